"""A router in a process of its own, in front of mock engines that are in others, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx

from tests.support.child import environment
from tests.support.fake_workers import eventually
from tests.support.mock_engine.mocks import Engine, Mocks

MODEL = "mock"
TOKENS = 8


class RouterProcess:
    """``kvxfer router`` with ``flags``."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "kvxfer.cli", "router", *flags]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, env=environment())
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.stop()[1])
        self.ready: dict[str, Any] = json.loads(line)
        self.url: str = self.ready["http_url"]

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and log."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.communicate(timeout=60)
        self._log.seek(0)
        with self._log:
            return self.process.returncode, self._log.read().decode()


class Site:
    """A router over prefill and decode engines, each engine in a process of its own."""

    def __init__(self, router: RouterProcess, prefillers: list[Mocks], decoders: list[Mocks]) -> None:
        self.router = router
        self.prefillers = prefillers
        self.decoders = decoders
        self.client = httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=60.0)

    @property
    def engines(self) -> list[Engine]:
        return [mock.engines[0] for mock in (*self.prefillers, *self.decoders)]

    async def complete(self, *, stream: bool = True, tokens: int = TOKENS, **more: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "Say something long.", "max_tokens": tokens, "stream": stream, **more}
        return await self.client.post("/v1/completions", json=body)

    async def workers(self) -> dict[str, dict[str, Any]]:
        """What the router says of each, by URL."""
        listed = (await self.client.get("/workers")).json()["data"]
        return {worker["http_url"]: worker for worker in listed}

    async def wait_ready(self, *, within_s: float = 20.0) -> None:
        async def ready() -> bool:
            return (await self.client.get("/ready")).status_code == 200

        await eventually(ready, within_s=within_s)

    async def metric(self, name: str) -> float:
        """The sum of all samples of a metric."""
        text = (await self.client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith((name + " ", name + "{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def wait_free(self, *, within_s: float = 5.0) -> float:
        """Wait until no engine runs anything or holds a block; the seconds that it took."""
        begun_s = time.monotonic()

        def is_free() -> bool:
            return all(_is_free(engine) for engine in self.engines)

        await eventually(lambda: asyncio.to_thread(is_free), within_s=within_s)
        return time.monotonic() - begun_s

    def sum_of(self, name: str, mocks: Sequence[Mocks]) -> float:
        return sum(mock.engines[0].statistics()[name] for mock in mocks)


def _is_free(engine: Engine) -> bool:
    now = engine.statistics()
    return now["running"] == 0 and now["blocks_held"] == 0


def check(answer: httpx.Response, tokens: int = TOKENS) -> None:
    """That an answer is whole: its status, its events, its number of tokens."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]", lines[-3:]
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert all("error" not in event for event in events), events[-1]
        choices = [event["choices"][0] for event in events if event.get("choices")]
        assert sum(bool(choice.get("text")) for choice in choices) == tokens
        assert choices[-1]["finish_reason"]
    else:
        assert answer.json()["choices"][0]["finish_reason"]


def broken_well(answer: httpx.Response) -> dict[str, Any]:
    """The error of a stream that broke after it had begun, and ended well formed."""
    assert answer.status_code == 200
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]", lines[-3:]
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert {"message", "type", "code"} <= set(error)
    return dict(error)


@contextlib.contextmanager
def engines_of(role: str, count: int, *flags: str) -> Iterator[list[Mocks]]:
    """``count`` processes of one engine each."""
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(count):
            mock = Mocks("--count=1", f"--roles={role}", *flags)
            stack.callback(mock.stop)
            started.append(mock)
        yield started


@contextlib.asynccontextmanager
async def site(
    prefill: int = 1,
    decode: int = 2,
    *,
    dialect: str = "vllm",
    engine_flags: Sequence[str] = ("--ttft-ms=1", "--itl-ms=1"),
    router_flags: Sequence[str] = (),
) -> AsyncIterator[Site]:
    """Started engines behind a started router, ready; the router's log has no traceback at the end."""
    kind = {"vllm": "vllm", "vllm-mooncake": "vllm", "sglang": "sglang", "kvxfer": "kvxfer"}[dialect]
    flags = (f"--kind={kind}", *engine_flags)
    with engines_of("prefill", prefill, *flags) as prefillers, engines_of("decode", decode, *flags) as decoders:
        where = [f"--prefill={_address(mock, dialect)}" for mock in prefillers]
        where += [f"--decode={_address(mock, dialect)}" for mock in decoders]
        router = await asyncio.to_thread(RouterProcess, *where, f"--dialect={dialect}", *router_flags)
        try:
            there = Site(router, prefillers, decoders)
            async with there.client:
                await there.wait_ready()
                yield there
        finally:
            code, said = await asyncio.to_thread(router.stop)
        assert "Traceback" not in said, said
        assert code == 0, said


def _address(mock: Mocks, dialect: str) -> str:
    """As a flag gives it."""
    engine = mock.engines[0]
    return f"{engine.url}?bootstrap_port={engine.port}" if dialect in ("sglang", "vllm-mooncake") else engine.url
