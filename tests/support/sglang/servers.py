"""SGLang's servers as people start them, on a CPU with a tiny model; and what gives a request to two of them: SGLang's
own router, or a proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

import aiohttp
import requests
from aiohttp import web

from tests.support.sglang import launch
from tests.support.sglang.ranks import free_port

READY_S = 400.0
"""A server is three processes of some seconds of imports each, on a host that does other things too."""


class Used(NamedTuple):
    """Of a server's pool of pages, as SGLang counts them itself: what is neither free, nor kept by its prefix cache
    alone; and when that was, on the monotonic clock."""

    tokens: int
    at_s: float


class Process:
    """One that serves HTTP, with all that it starts. It can be stopped, killed, and started again where it was."""

    def __init__(self, name: str, log: pathlib.Path, ready: str) -> None:
        """``ready``: the path that it answers with 200 once it is ready."""
        self.name, self.log, self.port = name, log, free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.environment = dict(os.environ)
        self._ready = ready

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.environment,
            )

    def wait_ready(self) -> None:
        assert self.process is not None
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < READY_S:
            assert self.process.poll() is None, f"{self.name} ended; {self.last_lines()}"
            with contextlib.suppress(requests.RequestException):
                if requests.get(self.url + self._ready, timeout=2).status_code == 200:
                    return
            time.sleep(0.5)
        raise AssertionError(f"{self.name} did not become ready; {self.last_lines()}")

    def kill(self) -> None:
        """With all that it started."""
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()

    def signal(self, number: int) -> None:
        """To it, and all that it started."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def last_lines(self) -> str:
        return "\n  ".join([f"its log is {self.log}", *self.log.read_text(errors="replace").splitlines()[-25:]])


class Server(Process):
    """``role``: prefill, decode, or nothing for one server that does both; of ``tp`` ranks, each on a processor of its
    own where there are several. Its ``flags`` may change between starts."""

    def __init__(
        self, directory: pathlib.Path, model: pathlib.Path, role: str, *flags: str, bootstrap: int = 0, tp: int = 1
    ) -> None:
        name = f"{role or 'one'}{'' if tp == 1 else tp}"
        super().__init__(name, directory / f"{name}.log", "/v1/models")
        self.bootstrap, self.flags = bootstrap or free_port(), flags
        if tp > 1:
            self.flags += ("--tp-size", str(tp))
            self.environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
        self._role, self._model = role, str(model)

    def command(self) -> list[str]:
        more = {"role": self._role, "bootstrap": self.bootstrap}
        return launch.server(sys.executable, self._model, self.port, *self.flags, **more)

    def used_tokens(self) -> Used:
        answer = requests.get(f"{self.url}/v1/loads", params={"include": "core"}, timeout=10)
        [load] = answer.json()["loads"]
        return Used(load["num_used_tokens"], load["timestamp"] - time.time() + time.monotonic())

    def abort(self, rid: str) -> None:
        """One request; of an empty name all."""
        requests.post(f"{self.url}/abort_request", json={"rid": rid, "abort_all": not rid}, timeout=10)


class Router(Process):
    """SGLang's own, out of its wheel."""

    def __init__(self, directory: pathlib.Path, prefill: Server, decode: Server) -> None:
        super().__init__("router", directory / "router.log", "/readiness")
        self._servers, self._metrics_port = (prefill, decode), free_port()

    def command(self) -> list[str]:
        prefill, decode = self._servers
        return launch.router(sys.executable, self.port, self._metrics_port, prefill.url, prefill.bootstrap, decode.url)


class Proxy:
    """Gives each request to a prefill and a decode server at once, with one room, and answers what decode answers."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self.prefill, self.decode, self.port = prefill, decode, free_port()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._ready.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        body |= {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap,
            "bootstrap_room": random.getrandbits(62) + 1,
        }
        prefill, decode = (asyncio.ensure_future(self._post(server, body)) for server in (self.prefill, self.decode))
        status, answer = await decode
        if status != 200:
            prefill.cancel()  # SGLang gives up what no client waits for
            return web.Response(status=status, body=answer)
        await prefill
        return web.Response(body=answer, content_type="application/json")

    async def _post(self, server: Server, body: dict[str, Any]) -> tuple[int, bytes]:
        try:
            async with self._client.post(f"{server.url}/generate", json=body) as answer:
                return answer.status, await answer.read()
        except aiohttp.ClientError as error:
            return 502, str(error).encode()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def main() -> None:
            self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
            app = web.Application(client_max_size=1 << 24)
            app.router.add_post("/generate", self._generate)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            self._ready.set()

        self._loop.run_until_complete(main())
        self._loop.run_forever()
