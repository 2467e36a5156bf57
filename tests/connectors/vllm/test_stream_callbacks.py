"""Acts that wait for a device, which is played by flags."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from kvxfer.connectors.vllm.stream_callbacks import POLL_S, StreamCallbacks


@dataclasses.dataclass
class Event:
    is_done: bool = False
    error: str = ""
    asked: int = 0

    def query(self) -> bool:
        self.asked += 1
        if self.error:
            raise RuntimeError(self.error)
        return self.is_done


class Device:
    """Every act gets an event of its own."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.called: list[int] = []
        self.callbacks = StreamCallbacks(self.record, asyncio.get_running_loop().call_soon_threadsafe)

    def record(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def ask(self, *numbers: int) -> None:
        for number in numbers:
            self.callbacks.after(lambda number=number: self.called.append(number))  # type: ignore[misc]


async def settle() -> None:
    await asyncio.sleep(20 * POLL_S)


async def test_acts_come_in_order_each_after_its_event() -> None:
    device = Device()
    device.ask(1, 2, 3)
    await settle()
    assert device.called == []
    device.events[1].is_done = True  # the first is not, so neither can this be
    await settle()
    assert device.called == []
    device.events[0].is_done = True
    await settle()
    assert device.called == [1, 2]
    device.events[2].is_done = True
    await settle()
    assert device.called == [1, 2, 3]


async def test_nothing_is_asked_of_the_device_when_nothing_waits() -> None:
    device = Device()
    device.ask(1)
    device.events[0].is_done = True
    await settle()
    asked = device.events[0].asked
    await settle()
    assert (device.called, device.events[0].asked) == ([1], asked)


async def test_an_act_that_breaks_holds_up_no_other() -> None:
    device, broken = Device(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context["exception"]))
    device.callbacks.after(lambda: 1 // 0)
    device.ask(1)
    for event in device.events:
        event.is_done = True
    await settle()
    assert device.called == [1]
    assert [type(error) for error in broken] == [ZeroDivisionError]


async def test_after_the_device_failed_nothing_comes(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    device.ask(1, 2)
    device.events[0].error = "an illegal memory access was encountered"
    device.events[1].is_done = True
    await settle()
    device.ask(3)
    device.events[2].is_done = True
    await settle()
    assert device.called == []
    assert device.events[0].asked == 1
    assert "the device failed" in caplog.text
