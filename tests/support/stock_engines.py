"""Stock engines as processes of their own, vLLM's and SGLang's servers unchanged, and what a router in front of them is
asked. Knows no engine's command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

from tests.support.child import environment
from tests.support.local_http import answers, free_ports
from tests.support.routers import RouterProcess
from tests.support.started import Started

IDLE_S = 60.0
CLIENT_S = 120.0
"""Engines of a tiny model share two processors with all else that runs there."""


class StockEngine:
    """``command(port)`` in a process with all that it starts. It can be stopped, and started again at its address."""

    def __init__(
        self,
        name: str,
        directory: pathlib.Path,
        command: Callable[[int], Sequence[str]],
        more: dict[str, str],
        *,
        ready_path: str = "/health",
    ) -> None:
        [self.port] = free_ports(1)
        self.name, self.url = name, f"http://127.0.0.1:{self.port}"
        self._directory, self._command, self._environment = directory, command, {**os.environ, **more}
        self._ready_path = ready_path
        self._started: Started | None = None

    def start(self) -> None:
        self._started = Started(self.name, self._command(self.port), self._directory, self._environment)

    def wait_ready(self) -> None:
        asyncio.run(self._ready())

    async def _ready(self) -> None:
        assert self._started is not None
        async with httpx.AsyncClient(trust_env=False) as client:
            await self._started.wait(functools.partial(answers, client, self.url + self._ready_path))

    def end(self) -> None:
        if self._started is not None:
            self._started.end()

    def kill(self) -> None:
        if self._started is not None:
            self._started.kill()

    def metric(self, name: str, label: str = "") -> float:
        """The sum of all samples of a metric."""
        return metric(self.url, name, label)


@contextlib.contextmanager
def serving(*engines: StockEngine) -> Iterator[None]:
    """All of them, ready. Leaving it ends them and what they started."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield
    finally:
        for engine in engines:
            engine.kill()


@contextlib.contextmanager
def routing(*flags: str) -> Iterator[RouterProcess]:
    """``kvxfer router`` with ``flags``, once it places requests."""
    router = RouterProcess(*flags)
    try:
        eventually(lambda: httpx.get(f"{router.url}/ready", trust_env=False).status_code == 200, "the router is ready")
        yield router
    finally:
        if router.process.poll() is None:
            router.stop()


def eventually(look: Callable[[], bool], what: str, within_s: float = IDLE_S) -> None:
    until_s = time.monotonic() + within_s
    while not look():
        assert time.monotonic() < until_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)


def metric(url: str, name: str, label: str = "") -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False, timeout=CLIENT_S).text.splitlines()
    samples = [line for line in lines if line.startswith((name + " ", name + "{")) and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in samples)


def ask(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, trust_env=False, timeout=CLIENT_S)


def drain(router: RouterProcess, engine: StockEngine, *flags: str) -> None:
    """``kvxfer drain``, which ends once nothing runs there any more."""
    name = f"127.0.0.1-{engine.port}"
    command = [sys.executable, "-m", "kvxfer.cli", "drain", name, "--router", router.url, *flags]
    said = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_S, env=environment(), check=False)
    assert said.returncode == 0, said.stderr
