"""A prefill and a decode process of ``side``, and one request between them. What they import, this module does not:
it runs in any environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from tests.support import child
from tests.support.sglang.ranks import free_port
from tests.support.sglang.side import Request, Shape

HERE = pathlib.Path(__file__).resolve().parent
ENVIRONMENT = {
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "no_proxy": "127.0.0.1,localhost",
}
WARM_PAGES, WARM_TRIES = 8, 20


class SideFailed(Exception):
    """A process is gone, or a request came to nothing that should not have."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """How both processes of a pair are started."""

    name: str
    backend: str
    """`kvxfer` or `nixl`."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    paths: tuple[pathlib.Path, ...] = ()
    """Where its Python looks first."""
    prefix: tuple[str, ...] = ()
    """Stands before the command."""


@dataclasses.dataclass(frozen=True)
class Moved:
    """One request. ``sent_ms``: from prefill's last send to decode's success. ``whole_ms``: from when both engines had
    the request. CPU: of each process, from there to its own success."""

    sent_ms: float
    whole_ms: float
    prefill_cpu_ms: float
    decode_cpu_ms: float


class End:
    """One process."""

    def __init__(
        self, contender: Contender, role: str, python: str, port: int, directory: pathlib.Path, shape: Shape
    ) -> None:
        self.name = f"{contender.name}, {role}"
        self.log = directory / f"{self.name}.log"
        words = [contender.backend, role, str(port), str(directory / "model"), json.dumps(dataclasses.asdict(shape))]
        environment = child.environment(**ENVIRONMENT, **contender.environment)
        paths = [*map(str, contender.paths), str(HERE / "stubs"), environment["PYTHONPATH"]]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*contender.prefix, *child.command("sglang.side", *words, python=python)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )

    def tell(self, op: str, request: Request | None = None) -> None:
        assert self.process.stdin is not None
        more = {} if request is None else {"request": dataclasses.asdict(request)}
        with contextlib.suppress(BrokenPipeError):  # answer() says so
            print(json.dumps({"op": op, **more}), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last = "\n  ".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise SideFailed(f"{self.name} ended with {self.process.wait()}; its log ends:\n  {last}")
        return json.loads(line)

    def ask(self, op: str, request: Request | None = None) -> Any:
        self.tell(op, request)
        return self.answer()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Pair:
    """Both processes. :meth:`begin` waits until they can be used: several pairs are imported at once."""

    def __init__(self, contender: Contender, python: str, directory: pathlib.Path, shape: Shape) -> None:
        """``directory``: has the model, as :func:`ranks.make_model` makes it, and gets the logs."""
        self.contender, self.shape = contender, shape
        port = free_port()
        self.prefill, self.decode = (
            End(contender, role, python, port, directory, shape) for role in ("prefill", "decode")
        )
        self._rooms = itertools.count(time.time_ns() % 10**12 * 1000)

    def begin(self) -> None:
        for end in (self.prefill, self.decode):
            assert end.answer() == "imported"
        for end in (self.prefill, self.decode):
            end.ask("begin")

    def request(self, tokens: int, seed: object, chunk: int = 0) -> Request:
        """Of pages that lie scattered on both sides. ``chunk``: pages of one send; 0: all in one."""
        count = -(-tokens // self.shape.tokens)
        draw = random.Random(f"{seed}")
        sources, targets = (draw.sample(range(1, self.shape.pages), count) for _ in range(2))
        chunks = [min(chunk, count - at) for at in range(0, count, chunk)] if chunk else [count]
        return Request(next(self._rooms), sources, targets, draw.randrange(8), chunks)

    def move(self, request: Request) -> Moved:
        """Raises SideFailed where it comes to nothing, and for a byte that is wrong afterwards."""
        self.decode.ask("poison", request)
        sent, got = self._both(request)
        for answer in (sent, got):
            if answer["why"] is not None:
                raise SideFailed(f"{self.contender.name}: {answer['why']}")
        if wrong := self.decode.ask("check", request):
            raise SideFailed(f"{self.contender.name}: {wrong} bytes are wrong")
        begun_s = min(sent["begun_s"], got["begun_s"])
        return Moved(
            (got["ended_s"] - sent["sent_s"]) * 1e3,
            (got["ended_s"] - begun_s) * 1e3,
            sent["cpu_s"] * 1e3,
            got["cpu_s"] * 1e3,
        )

    def warm(self) -> None:
        """A few pages, as often as it takes: connections may have ended while the processes stood still."""
        for left in reversed(range(WARM_TRIES)):
            sent, got = self._both(self.request(WARM_PAGES * self.shape.tokens, left))
            if sent["why"] is None and got["why"] is None:
                return
            if not left:
                raise SideFailed(f"{self.contender.name} does not wake up: {got['why'] or sent['why']}")

    def is_awake(self, yes: bool) -> None:
        for end in (self.prefill, self.decode):
            end.signal(signal.SIGCONT if yes else signal.SIGSTOP)

    def lose_prefill(self) -> tuple[float, str]:
        """Kill the prefill process while decode waits for a prompt: seconds until that has failed, and why it says."""
        request = self.request(64, "lost")
        self.decode.tell("fetch", request)
        self.prefill.ask("hold", request)
        time.sleep(0.5)
        killed_s = time.monotonic()
        self.prefill.kill()
        return self._failed(self.decode.answer(), killed_s)

    def ask_the_lost(self) -> tuple[float, str]:
        """The next request: seconds until it has failed, and why."""
        answer = self.decode.ask("fetch", self.request(64, "after"))
        return self._failed(answer, answer["begun_s"])

    def end(self) -> None:
        for end in (self.prefill, self.decode):
            end.kill()

    def _failed(self, answer: dict[str, Any], since_s: float) -> tuple[float, str]:
        if answer["why"] is None:
            raise SideFailed(f"{self.contender.name}: a request of a dead prefill succeeded")
        return answer["ended_s"] - since_s, str(answer["why"])

    def _both(self, request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
        self.prefill.tell("serve", request)
        self.decode.tell("fetch", request)
        return self.prefill.answer(), self.decode.answer()
