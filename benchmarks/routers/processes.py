"""The processes of a run: mock engines, routers, and the client's. Decides how they start, wait, pause and end.

It must never know which router a process is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from routers import proc
from routers.load import HOST, Job

HERE = pathlib.Path(__file__).resolve().parents[1]
READY_S = 90.0
FOUND_S = 5.0
"""How long a router may take to find the other engines once it answers."""
POLL_S = 0.1
PREFILL, DECODE = 2, 2
"""Engines of each role."""
MOCK = (
    *("--count", str(PREFILL + DECODE), "--roles", ",".join(["prefill"] * PREFILL + ["decode"] * DECODE)),
    *("--record", "0", "--blocks", "1000000", "--max-num-seqs", "4096", "--log-level", "warning"),
)
"""Nothing of an engine is ever full: what is compared are routers."""


class Void(Exception):
    """What was measured does not count, and why."""


class Process:
    """A program in a session of its own, so that all that it starts is paused and ended with it."""

    def __init__(self, name: str, command: list[str], directory: pathlib.Path) -> None:
        self.name = name
        self.log = directory / "log"
        self.out = directory / "stdout"
        with self.out.open("wb") as out, self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True
            )
        self.pid = self._process.pid

    def wait_until(self, look: Callable[[], Any]) -> Any:
        """What ``look`` finds, once it finds something. Raises Void if that takes too long, or the process ends."""
        deadline_s = time.monotonic() + READY_S
        while not (found := look()):
            if (code := self._process.poll()) is not None:
                raise Void(f"{self.name} ended with code {code}: {self.last_lines()}")
            if time.monotonic() > deadline_s:
                raise Void(f"{self.name} was not ready within {READY_S:g} s: {self.last_lines()}")
            time.sleep(POLL_S)
        return found

    def ready_line(self) -> dict[str, Any] | None:
        """The JSON object that a part of kvxfer prints when it is ready."""
        with contextlib.suppress(ValueError):
            found = json.loads(self.out.read_text().partition("\n")[0])
            return found if isinstance(found, dict) else None
        return None

    def last_lines(self) -> str:
        lines = [line for file in (self.out, self.log) for line in file.read_text(errors="replace").splitlines()[-8:]]
        return " / ".join(lines)[-1500:]

    def is_awake(self, flag: bool) -> None:
        """Continue or pause it."""
        os.killpg(self.pid, signal.SIGCONT if flag else signal.SIGSTOP)

    def end(self) -> None:
        """At once: some routers take their time to say goodbye, and nothing of them is needed any more."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def ask(port: int, method: str, path: str, body: Any = None, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    with contextlib.closing(connection):
        content = None if body is None else json.dumps(body).encode()
        connection.request(method, path, content, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()


class Engines(Process):
    """The mock engines of one pace, in one process."""

    def __init__(self, dialect: str, itl_ms: float, directory: pathlib.Path) -> None:
        command = [sys.executable, "-m", "kvxfer.cli", "mock-engine", *MOCK, f"--exit-with-parent={os.getpid()}"]
        super().__init__("mock-engine", [*command, "--kind", dialect, "--itl-ms", str(itl_ms)], directory)
        ready = self.wait_until(self.ready_line)
        ports = [engine["port"] for engine in ready["engines"]]
        self.prefill, self.decode = tuple(ports[:PREFILL]), tuple(ports[PREFILL:])

    def counts(self) -> list[dict[str, Any]]:
        """Of each engine, prefill first."""
        _, body = ask(self.prefill[0], "GET", "/mock/statistics?port=all")
        by_port = {engine["port"]: engine for engine in json.loads(body)}
        return [by_port[port] for port in (*self.prefill, *self.decode)]


class Router(Process):
    """One router in front of ``engines``. ``port`` is 0 where the router's ready line says it."""

    def __init__(self, name: str, command: list[str], directory: pathlib.Path, port: int, engines: Engines) -> None:
        super().__init__(name, command, directory)
        self.port, self.engines = port, engines

    def wait_ready(self, *, finds_all: bool) -> None:
        """Returns once a request is answered; with ``finds_all`` when each engine got one, or FOUND_S later: not every
        placement gives each engine some of few requests."""
        if not self.port:
            url = self.wait_until(self.ready_line)["http_url"]
            self.port = int(url.rpartition(":")[2].rstrip("/"))
        before = self.engines.counts()
        self.wait_until(self._answers)
        deadline_s = time.monotonic() + FOUND_S
        while finds_all and time.monotonic() < deadline_s:
            after = self.engines.counts()
            if all(new["requests"] > old["requests"] for old, new in zip(before, after, strict=True)):
                return
            time.sleep(POLL_S)
            self._answers()

    def _answers(self) -> bool:
        body = {"model": "mock", "prompt": "Is it there?", "max_tokens": 1, "stream": True}
        try:
            status, answer = ask(self.port, "POST", "/v1/completions", body)
        except (OSError, http.client.HTTPException):
            return False
        return status == 200 and b"[DONE]" in answer

    def load(self, job: dict[str, Any], expected_spread: bool) -> dict[str, Any]:
        """The client's figures. Raises Void for a wrong answer, and where the engines saw something else than one
        prefill and one decode for each request."""
        before = self.engines.counts()
        engines = self.engines
        whole = Job(
            port=self.port, pid=self.pid, engines_pid=engines.pid, prefill=engines.prefill, decode=engines.decode, **job
        )
        command = [sys.executable, "-m", "routers.load", json.dumps(dataclasses.asdict(whole))]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
        if done.returncode:
            raise Void(f"{self.name}: {(done.stderr.splitlines() or ['?'])[-1]}")
        found: dict[str, Any] = json.loads(done.stdout)
        self._check_engines(before, found.pop("asked"), expected_spread)
        return found

    def _check_engines(self, before: list[dict[str, Any]], asked: int, expected_spread: bool) -> None:
        after = self.engines.counts()

        def grew(name: str) -> list[int]:
            return [new[name] - old[name] for old, new in zip(before, after, strict=True)]

        for name in ("recomputes", "silent_recomputes", "load_failures", "failed", "refused"):
            if sum(grew(name)):
                raise Void(f"{self.name}: the engines counted {sum(grew(name))} {name}")
        if (prefills := sum(grew("holds_made")[:PREFILL])) != asked:
            raise Void(f"{self.name}: {prefills} prompts were prefilled for {asked} requests")
        requests = grew("requests")
        if sum(requests) != 2 * asked:
            raise Void(f"{self.name}: the engines got {sum(requests)} legs of {asked} requests")
        if expected_spread and not all(requests):
            raise Void(f"{self.name}: an engine got no request at all: {requests}")

    def memory_mib(self) -> tuple[float, float]:
        """(RSS, PSS)."""
        found = proc.memory(self.pid)
        return round(found.rss / 1024, 2), round(found.pss / 1024, 2)
