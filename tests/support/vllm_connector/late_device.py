"""A device that does what it is asked later, in order, and its events."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable


class Device:
    """``asked`` grows; its first ``done`` are done: one each 2 ms by :meth:`run`, or all by :meth:`synchronize`."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []
        self.done = 0

    def record(self) -> Event:
        return Event(self, len(self.asked))

    def step(self) -> None:
        if self.done < len(self.asked):
            self.asked[self.done]()
            self.done += 1

    def synchronize(self) -> None:
        while self.done < len(self.asked):
            self.step()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            self.step()


@dataclasses.dataclass
class Event:
    device: Device
    asked: int

    def query(self) -> bool:
        return self.device.done >= self.asked
