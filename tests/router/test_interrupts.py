"""Ending what a task waits for, with a reason."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.router.interrupts import InterruptedWithReason, Interrupts


async def test_work_that_nothing_interrupts_gives_its_result() -> None:
    interrupts: Interrupts[str] = Interrupts()
    assert await interrupts.run(asyncio.sleep(0, 7)) == 7
    assert interrupts.reason is None


async def test_the_first_reason_wins_and_the_task_goes_on() -> None:
    interrupts: Interrupts[str] = Interrupts()
    loop = asyncio.get_running_loop()
    loop.call_soon(interrupts.interrupt, "first")
    loop.call_soon(interrupts.interrupt, "second")
    with pytest.raises(InterruptedWithReason):
        await interrupts.run(asyncio.Event().wait())
    assert interrupts.reason == "first"
    await asyncio.sleep(0.001)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_reason_that_came_before_ends_the_work_before_it_begins() -> None:
    interrupts: Interrupts[str] = Interrupts()
    interrupts.interrupt("early")
    begun = False

    async def work() -> None:
        nonlocal begun
        begun = True

    with pytest.raises(InterruptedWithReason):
        await interrupts.run(work())
    assert not begun


async def test_a_reason_from_the_task_itself_ends_its_next_wait() -> None:
    interrupts: Interrupts[str] = Interrupts()
    reached = []

    async def work() -> None:
        interrupts.interrupt("own")
        reached.append("after")
        await asyncio.Event().wait()

    with pytest.raises(InterruptedWithReason):
        await interrupts.run(work())
    assert reached == ["after"]


async def test_work_that_ends_although_it_was_interrupted_gives_its_result() -> None:
    interrupts: Interrupts[str] = Interrupts()

    async def work() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 3
        return 0

    asyncio.get_running_loop().call_soon(interrupts.interrupt, "late")
    assert await interrupts.run(work()) == 3
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_an_error_on_the_way_out_is_the_interruption() -> None:
    interrupts: Interrupts[str] = Interrupts()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("closing")

    asyncio.get_running_loop().call_soon(interrupts.interrupt, "reason")
    with pytest.raises(InterruptedWithReason):
        await interrupts.run(work())


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    states: list[str] = []

    async def main() -> None:
        interrupts: Interrupts[str] = Interrupts()
        try:
            await interrupts.run(asyncio.Event().wait())
        except InterruptedWithReason:
            states.append("interrupted")
        except asyncio.CancelledError:
            states.append("cancelled")
            raise

    task = asyncio.create_task(main())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert states == ["cancelled"]


async def test_a_cancellation_beside_an_interruption_is_not_lost() -> None:
    held: list[Interrupts[str]] = []

    async def main() -> None:
        interrupts: Interrupts[str] = Interrupts()
        held.append(interrupts)
        await interrupts.run(asyncio.Event().wait())

    task = asyncio.create_task(main())
    await asyncio.sleep(0)
    held[0].interrupt("reason")
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
