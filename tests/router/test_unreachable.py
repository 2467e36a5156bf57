"""A prefill worker whose HTTP is away while its agent is up: no request waits for what it will never grant."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from kvxfer.router import attempt
from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, failing, free_port, router_over


def prefiller(name: str = "p0") -> FakeWorker:
    return FakeWorker(name, Role.PREFILL)


def waiting_decoder() -> FakeWorker:
    """It waits for its prefill leg for ever, as a real one does for a minute."""
    d = FakeWorker("d0")
    d.needs_prefill = True
    return d


def swallow(monkeypatch: pytest.MonkeyPatch, port: int, until: asyncio.Event) -> None:
    """Let no connection to ``port`` come about, as where what is sent there is dropped; the wait for it is over with
    ``until``."""
    connect = asyncio.BaseEventLoop.create_connection

    async def create_connection(loop: Any, protocol: Any, host: str, at: int, **more: Any) -> Any:
        if at == port:
            await until.wait()
            raise OSError(errno.ETIMEDOUT, "timed out")
        return await connect(loop, protocol, host, at, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", create_connection)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("away", ["refuses", "swallows"])
async def test_a_prefiller_that_cannot_be_reached_is_replaced_and_the_decode_leg_begun_anew(
    away: str, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, live, d = prefiller("p0"), prefiller("p1"), waiting_decoder()
    dead.port = free_port()
    if away == "swallows":
        swallow(monkeypatch, dead.port, until=d.arrived)
    async with router_over(live, d, eject_base_s=60.0, eject_cap_s=60.0) as router:
        router.publish(dead, d)
        alone = await router.complete(stream=is_stream)  # there is no other: the decoder computes it
        assert (alone.status_code, alone.headers["x-kvxfer-prefill"]) == (200, "local")
        assert alone.headers["x-kvxfer-prefill-reason"] == "prefill_ejected"
        assert alone.headers["x-kvxfer-attempt"] == "2"
        *before, last = d.received  # it may be over before the decode leg was sent
        for leg in before:
            await asyncio.wait_for(leg.left.wait(), 5.0)
            assert leg.params is not None
        assert last.params is None
        assert len(before) == 1 or away == "refuses"
        kind = "unreachable" if away == "refuses" else "connect_timeout"
        failed = f'kvxfer_router_leg_failures_total{{kind="{kind}",part="prefill"}}'
        assert await router.metric(failed) >= 1
        # What only took too long is in doubt, and a probe would decide.
        assert await router.metric("kvxfer_router_workers_ejected") == (away == "refuses")
        d.received.clear()

        dead.incarnation = prefiller().incarnation  # another incarnation: not ejected
        router.publish(dead, live, d)
        before_s = await router.metric(failed)
        while await router.metric(failed) == before_s:
            d.received.clear()
            answer = await router.complete(stream=is_stream)
            assert (answer.status_code, answer.headers["x-kvxfer-prefill"]) == (200, "remote")
        assert answer.headers["x-kvxfer-attempt"] == "2"
        ids = [leg.params["transfer_id"] for leg in d.received if leg.params]
        assert len(set(ids)) == len(d.received)
        assert live.received[-1].params is not None
        assert live.received[-1].params["transfer_id"] == ids[-1]
        if away == "refuses":
            assert (await router.complete(stream=is_stream)).headers["x-kvxfer-attempt"] == "1"


async def test_a_rack_of_unreachable_prefillers_is_not_tried_one_by_one() -> None:
    d = waiting_decoder()
    dead = [prefiller(f"p{n}") for n in range(8)]
    async with router_over(d) as router:
        for p in dead:
            p.port = free_port()
        router.publish(*dead, d)
        answer = await router.complete()
        assert (answer.status_code, answer.headers["x-kvxfer-prefill-reason"]) == (200, "prefill_ejected")
        assert answer.headers["x-kvxfer-attempt"] == "3"


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_prefillers_that_take_nothing_leave_the_decoder_to_compute_it_whatever_the_attempts(
    attempts: int,
) -> None:
    d, busy = waiting_decoder(), [prefiller(f"p{n}") for n in range(4)]
    for p in busy:
        p.always_fails = failing(503, "overloaded", retryable=True)
    async with router_over(*busy, d, attempts_max=attempts) as router:
        answer = await router.complete()
        assert (answer.status_code, answer.headers["x-kvxfer-prefill"]) == (200, "local")
        assert sum(len(p.received) for p in busy) == min(attempts, 2)


async def test_local_prefill_off_tells_that_no_prefiller_could_be_reached() -> None:
    d, p = waiting_decoder(), prefiller()
    async with router_over(d, local_prefill="off") as router:
        p.port = free_port()
        router.publish(p, d)
        answer = await router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "peer_gone")
        assert answer.headers.get("x-kvxfer-prefill") is None


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "died"])
async def test_a_prefiller_that_hangs_up_is_replaced_once_it_is_known_to_live(
    is_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that died is the decode worker's to notice, by its agent: that computes the prompt itself."""
    monkeypatch.setattr(attempt, "OUTLIVES_S", 0.2)
    p, d = prefiller("p0"), waiting_decoder()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        await d.arrived.wait()
        if not is_up:
            router.publish(d)
            d.needs_prefill = False
        writer.transport.abort()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server, router_over(d) as router:
        p.port = server.sockets[0].getsockname()[1]
        router.publish(p, d)
        if not is_up:
            d.hold = asyncio.Event()
            asyncio.get_running_loop().call_later(0.6, d.hold.set)
        answer = await asyncio.wait_for(router.complete(), 20.0)
        assert answer.status_code == 200
        assert answer.headers["x-kvxfer-attempt"] == ("2" if is_up else "1")
        assert await router.metric('kvxfer_router_leg_failures_total{kind="unread",part="prefill"}') == 1
        assert router.workers.statistics().ejected == 0
