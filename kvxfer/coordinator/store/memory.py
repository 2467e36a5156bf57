"""The store that ends with its process. Decides nothing; must never touch a disk or a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvxfer.coordinator.store.base import MemberRecord, NumberLine, StoreChange
from kvxfer.types import AgentRef


class MemoryStore:
    """Forgets everything with the process, except that its numbers begin at the wall clock's microseconds.

    A restarted coordinator thus begins above all earlier numbers, as long as fewer than a million are given a second.
    Where the clock was set back meanwhile, the agents that come back raise the counter above theirs.
    """

    is_shared = False

    def __init__(self, wall_clock_us: int) -> None:
        """``wall_clock_us``: microseconds since 1970, read once by the caller."""
        self._numbers = NumberLine(wall_clock_us)
        self._records: dict[str, MemberRecord] = {}

    async def open(self, owner: str, address: str) -> None:
        pass

    async def close(self) -> None:
        pass

    async def next_number(self) -> int:
        return self._numbers.above(0)

    async def admit_number(self, number: int) -> None:
        self._numbers.admit(number)

    async def put(self, record: MemberRecord) -> None:
        known = self._records.get(record.agent_id)
        if known is None or known.version <= record.version:
            self._records[record.agent_id] = record

    async def remove(self, ref: AgentRef, sessions: int) -> None:
        known = self._records.get(ref.agent_id)
        if known is not None and known.version <= (ref.incarnation.number, sessions):
            del self._records[ref.agent_id]

    async def load(self) -> tuple[MemberRecord, ...]:
        return tuple(self._records.values())

    async def watch(self) -> AsyncIterator[StoreChange]:
        await asyncio.Event().wait()
        yield StoreChange(False, {})

    async def check(self) -> None:
        pass

    async def catch_up(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"<MemoryStore at {self._numbers.last}>"
