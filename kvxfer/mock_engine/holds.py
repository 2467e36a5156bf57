"""The KV that a prefill engine keeps for its readers: under a key, until it is released or its lease ends.

Decides what a reader gets to hear of a key: the hold, or why there is none. It must never know HTTP, nor which clock
makes tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Callable

from kvxfer.errors import (
    DeadlineExceededError,
    GrantExpiredError,
    GrantReleasedError,
    GrantRevokedError,
    GrantUnknownError,
    KvxferError,
)
from kvxfer.mock_engine.generation import MockGeneration

ENDED_MAX = 65536
"""Keys whose end is remembered."""


@dataclasses.dataclass(eq=False)
class KvHold:
    """The KV of one prompt, or of all that share a key."""

    key: str
    generations: list[MockGeneration]
    tokens: int
    blocks: int
    block_ids: tuple[int, ...]
    timer: asyncio.TimerHandle | None = None
    is_claimed: bool = False
    ended: asyncio.Future[None] | None = None
    """Set when the hold ends, if something waits for that."""


@dataclasses.dataclass
class HoldCounts:
    """Totals since the engine began."""

    held: int = 0
    released: int = 0
    expired: int = 0
    blocks_released: int = 0
    blocks_expired: int = 0


class KvHolds:
    """All holds of one engine. ``free`` frees a generation's blocks."""

    def __init__(self, lease_s: float, free: Callable[[MockGeneration], None]) -> None:
        self.counts = HoldCounts()
        self._lease_s = lease_s
        self._free = free
        self._loop = asyncio.get_running_loop()
        self._holds: dict[str, KvHold] = {}
        self._ended: OrderedDict[str, KvxferError] = OrderedDict()
        self._readers: dict[str, list[asyncio.Future[KvHold]]] = {}
        self._awaited: dict[str, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, key: object) -> bool:
        return key in self._holds

    @property
    def open_blocks(self) -> int:
        return sum(hold.blocks for hold in self._holds.values())

    def hold(self, key: str, generations: list[MockGeneration], blocks: int, block_ids: tuple[int, ...]) -> KvHold:
        """Keep the blocks of ``generations``; a reader that waits for ``key`` gets them now."""
        self._end(key, GrantRevokedError(f"{key} was prefilled again"))
        tokens = sum(generation.sequence.prompt_tokens for generation in generations)
        hold = KvHold(key, generations, tokens, blocks, block_ids)
        self._holds[key] = hold
        self._ended.pop(key, None)
        self.counts.held += 1
        hold.timer = self._loop.call_later(self._lease_s, self._expire, hold)
        for reader in self._readers.pop(key, []):
            if not reader.done():
                self._claim(hold)
                reader.set_result(hold)
        return hold

    async def claim(self, key: str, wait_s: float, block_ids: tuple[int, ...] | None = None) -> KvHold:
        """The hold of ``key``, as soon as there is one; its lease begins anew.

        Raises GrantGoneError where it has ended or has other blocks, DeadlineExceededError after ``wait_s``.
        """
        hold = self._holds.get(key)
        if hold is None:
            if (ended := self._ended.get(key)) is not None:
                raise type(ended)(str(ended))
            if wait_s <= 0:
                raise GrantUnknownError(f"nothing is held under {key}")
            reader: asyncio.Future[KvHold] = self._loop.create_future()
            self._readers.setdefault(key, []).append(reader)
            if (awaited := self._awaited.get(key)) is not None and not awaited.done():
                awaited.set_result(None)
            try:
                async with asyncio.timeout(wait_s):
                    return await reader
            except TimeoutError:
                raise DeadlineExceededError(f"no prefill of {key} came within {wait_s:g} s") from None
            finally:
                waiting = self._readers.get(key, [])
                if reader in waiting:
                    waiting.remove(reader)
                    if not waiting:
                        del self._readers[key]
        if block_ids is not None and block_ids != hold.block_ids:
            raise GrantUnknownError(f"{key} is held in other blocks than the request names")
        self._claim(hold)
        return hold

    async def wait_reader(self, key: str, wait_s: float) -> None:
        """Until a reader asks for ``key``. Raises DeadlineExceededError after ``wait_s``."""
        if self._readers.get(key):
            return
        awaited = self._awaited.setdefault(key, self._loop.create_future())
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(awaited)
        except TimeoutError:
            raise DeadlineExceededError(f"no decode engine asked for {key} within {wait_s:g} s") from None
        finally:
            self._awaited.pop(key, None)

    def release(self, key: str) -> bool:
        """The reader needs ``key`` no longer; False where it is not held."""
        hold = self._holds.get(key)
        if hold is None:
            return False
        self.counts.released += 1
        self.counts.blocks_released += hold.blocks
        self._end(key, GrantReleasedError(f"{key} was released"))
        return True

    def drop(self, key: str, reason: str) -> None:
        """There will be no KV under ``key``: its readers are told at once."""
        self._end(key, GrantRevokedError(reason))
        self._remember(key, GrantRevokedError(reason))
        for reader in self._readers.pop(key, []):
            if not reader.done():
                reader.set_exception(GrantRevokedError(reason))

    def close(self) -> None:
        """End everything."""
        for key in {*self._holds, *self._readers}:
            self.drop(key, "the engine stops")

    def _claim(self, hold: KvHold) -> None:
        hold.is_claimed = True
        assert hold.timer is not None
        hold.timer.cancel()
        hold.timer = self._loop.call_later(self._lease_s, self._expire, hold)

    def _expire(self, hold: KvHold) -> None:
        self.counts.expired += 1
        self.counts.blocks_expired += hold.blocks
        self._end(hold.key, GrantExpiredError(f"the lease of {hold.key} ended after {self._lease_s:g} s"))

    def _end(self, key: str, why: KvxferError) -> None:
        hold = self._holds.pop(key, None)
        if hold is None:
            return
        if hold.timer is not None:
            hold.timer.cancel()
        self._remember(key, why)
        for generation in hold.generations:
            self._free(generation)
        if hold.ended is not None and not hold.ended.done():
            hold.ended.set_result(None)

    def _remember(self, key: str, why: KvxferError) -> None:
        self._ended[key] = why
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
