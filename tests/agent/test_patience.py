"""A timeout that does not count the time in which this process did not run."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvxfer.patience import TURNS, timeout_while_running

TIMEOUT_S = 0.2


async def through(hops: int) -> None:
    for _ in range(hops):
        await asyncio.sleep(0)


async def answered(came: asyncio.Event) -> str:
    async with timeout_while_running(TIMEOUT_S):
        await came.wait()
        await through(5)
    return "answered"


async def test_a_peer_that_says_nothing_is_silent_after_that_time() -> None:
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        await answered(asyncio.Event())
    assert time.monotonic() - began_s >= TIMEOUT_S * 0.99


@pytest.mark.parametrize("stops_after", [0.0, 0.5, 0.95])
async def test_an_answer_that_came_while_this_process_stood_still_is_read(stops_after: float) -> None:
    came, loop = asyncio.Event(), asyncio.get_running_loop()
    waiting = asyncio.ensure_future(answered(came))
    await asyncio.sleep(TIMEOUT_S * stops_after)
    peer = threading.Timer(TIMEOUT_S, loop.call_soon_threadsafe, (came.set,))
    peer.start()
    time.sleep(2 * TIMEOUT_S)  # noqa: ASYNC251  stands for a process that gets no processor
    assert await waiting == "answered"
    peer.join()


async def test_a_loop_that_is_always_late_ends_its_wait() -> None:
    waiting, pauses = asyncio.ensure_future(answered(asyncio.Event())), 0
    while not waiting.done():
        pauses += 1
        time.sleep(3 * TIMEOUT_S / TURNS)  # noqa: ASYNC251
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await waiting
    assert pauses <= 2 * (TURNS + 3)  # a timer that is armed within a pause comes after the next one


async def test_a_wait_that_is_cancelled_or_fails_leaves_no_timer() -> None:
    waiting = asyncio.ensure_future(answered(asyncio.Event()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(ZeroDivisionError):
        async with timeout_while_running(TIMEOUT_S):
            raise ZeroDivisionError
    await asyncio.sleep(1.5 * TIMEOUT_S)  # a timer that was left would cancel this
