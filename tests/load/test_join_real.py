"""Phases of real requests: mock engines of each kind in processes of their own, behind a router in another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest

from kvxfer.load.join import PHASES, join_log, phases_of
from kvxfer.load.record import MeasuredRequest
from tests.support.fake_workers import eventually
from tests.support.load_client import measured
from tests.support.routers import MODEL, RouterProcess, engines_of

REQUESTS = 200
AT_ONCE = 8
TOKENS = 8
PREFILL_S = 0.005
"""Of the mock engine's step model, at least: a step takes 6 ms. One that begins late is as much shorter."""
ENGINES = ("--pace=steps", "--max-num-seqs=4", "--transfer-ms=3", "--no-prefix-caching")

pytestmark = [pytest.mark.deep, pytest.mark.timeout(120)]


@contextlib.contextmanager
def routed(dialect: str, *flags: str) -> Iterator[tuple[RouterProcess, list[str]]]:
    """A router of ``dialect`` over engines of its kind; the list is the router's log, once the block has ended."""
    ending = "?bootstrap_port={}" if dialect == "sglang" else ""
    log: list[str] = []
    engine_flags = (f"--kind={dialect}", *ENGINES)
    with engines_of("prefill", 2, *engine_flags) as prefillers, engines_of("decode", 2, *engine_flags) as decoders:
        where = [
            f"--{role}={mock.engines[0].url}{ending.format(mock.engines[0].port)}"
            for role, mocks in (("prefill", prefillers), ("decode", decoders))
            for mock in mocks
        ]
        router = RouterProcess(*where, f"--dialect={dialect}", "--log-style=json", *flags)
        try:
            yield router, log
        finally:
            code, said = router.stop()
            log += said.splitlines()
    assert "Traceback" not in said, said
    assert code == 0, said


async def send_all(url: str) -> list[MeasuredRequest]:
    began_s = time.monotonic()
    free = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> MeasuredRequest:
        async with free:
            due_s = time.monotonic() - began_s
            body = {"model": MODEL, "prompt": [number % 7 + 1] * 200, "max_tokens": TOKENS}
            return await measured(url, body, f"req-{number}", began_s, due_s)

    return list(await asyncio.gather(*map(one, range(REQUESTS))))


async def wait_ready(url: str) -> None:
    async def is_ready() -> bool:
        return not (await measured(url, {"model": MODEL, "prompt": [1], "max_tokens": 1}, "r", 0.0, 0.0)).error

    await eventually(is_ready, within_s=20)


@pytest.mark.parametrize(("dialect", "workers"), [("kvxfer", 1), ("kvxfer", 2), ("vllm", 1), ("sglang", 1)])
def test_every_request_is_joined(dialect: str, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    async def run(url: str) -> list[MeasuredRequest]:
        await wait_ready(url)
        return await send_all(url)

    with routed(dialect, f"--workers={workers}") as (router, log):
        records = asyncio.run(run(router.url))
    assert all(record.is_good for record in records), [record.message for record in records if not record.is_good]
    found = [phases for phases in map(phases_of, records) if phases is not None]
    assert len(found) >= 0.999 * len(records)
    for record, phases in zip(records, found, strict=True):
        assert abs(phases.total_s - record.e2e_s) < 1e-6
        assert phases.prefill_worker != phases.decode_worker
        assert phases.prefill_s >= 0
        assert phases.is_queue_told == phases.is_transfer_told == (dialect == "kvxfer")
    assert sorted(phases.prefill_s for phases in found)[REQUESTS // 2] >= PREFILL_S
    if dialect == "kvxfer":
        assert max(phases.queue_s for phases in found) > 0.001  # four at a time wait for one prefill's step
        assert sorted(phases.transfer_s for phases in found)[REQUESTS // 2] >= 0.002
    unexplained = sorted(phases.unexplained_s for phases in found)
    with capsys.disabled():
        shown = {name: round(1e3 * sum(getattr(one, f"{name}_s") for one in found) / len(found), 2) for name in PHASES}
        print(
            f"\n{dialect} x{workers}: unexplained p99 {1e3 * unexplained[REQUESTS * 99 // 100]:.2f} ms; means {shown}"
        )
    for record in records:
        record.account = None
    assert join_log(records, log) == REQUESTS
    assert None not in map(phases_of, records)
