"""A pool of blocks in this host's memory, kept for engines: which blocks there are, who pulls and who is granted.

Decides what is kept and evicted, and answers engines' messages. A byte gets into the pool only by this agent's own
pull, under the engine's grant and into units that no block has; a block is read only under a grant, and its units are
free again once no grant of it is alive. So a block that was evicted meanwhile is a named miss, never other bytes. Must
never know what a block means.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
from collections.abc import Coroutine
from typing import Any

from kvxfer.agent import Agent, Pool, Transfer
from kvxfer.connectors.tier.extents import FreeUnits, Units
from kvxfer.connectors.tier.messages import (
    Find,
    Found,
    Get,
    Message,
    MoveEnded,
    Put,
    TierHello,
    TierWelcome,
    Used,
    decode,
    encode,
)
from kvxfer.connectors.tier.shelf import Shelf
from kvxfer.connectors.tier.store import BlockName
from kvxfer.errors import (
    BlockMissingError,
    IncompatibleError,
    KvxferError,
    OverloadedError,
    ProtocolError,
    StoreFullError,
)
from kvxfer.ratelimit import RateLimitedWarning
from kvxfer.types import AgentRef, CompatibilityRecord, GrantState

log = logging.getLogger("kvxfer.tier")

MOVES_MAX = 256
"""Moves of one engine at a time."""


def unit_record(unit_bytes: int) -> CompatibilityRecord:
    """The record of pools whose units are so long. What a unit holds, each grant's content digest says."""
    return CompatibilityRecord.opaque(f"kvxfer-tier-{unit_bytes}")


@dataclasses.dataclass
class KeeperCounts:
    """Since the start. ``errors``: by what an engine wanted and the error's stable code."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    stored_bytes: int = 0
    served_bytes: int = 0
    stored_blocks: int = 0
    served_blocks: int = 0
    errors: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)


class BlockKeeper:
    """On the agent's loop."""

    def __init__(self, agent: Agent, pool: Pool, *, deadline_s: float, can_discover: bool) -> None:
        """``pool``: of ``agent``, all of it for blocks. ``deadline_s`` bounds one pull. ``can_discover``: an engine
        makes itself known by its signed agent metadata."""
        self._agent = agent
        self._pool = pool
        self._deadline_s = deadline_s
        self._can_discover = can_discover
        self._free = FreeUnits(pool.block_count)
        self._shelf: Shelf[BlockName] = Shelf(pool.block_count * pool.block_bytes)
        self._units: dict[BlockName, Units] = {}
        self._moves: collections.Counter[str] = collections.Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._bad_message = RateLimitedWarning(log, "a message of %s was ignored: %s")
        self._failed_put = RateLimitedWarning(log, "a block of %s was not kept: %s")
        self.counts = KeeperCounts()

    @property
    def blocks(self) -> int:
        """Blocks that could be loaded now."""
        return len(self._units)

    @property
    def used_bytes(self) -> int:
        return self._shelf.used_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._shelf.capacity_bytes

    @property
    def pinned(self) -> int:
        """Blocks that an engine is reading, or that are being pulled."""
        return self._shelf.pinned

    async def serve(self) -> None:
        """Answer messages until the agent closes."""
        try:
            async for notification in self._agent.notifications():
                try:
                    self._hear(notification.sender, decode(notification.payload))
                except KvxferError as error:
                    self._bad_message.say(notification.sender, error)
                except Exception:  # one engine's message must not end the service of all
                    log.exception("a message of %s could not be answered", notification.sender)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _hear(self, sender: AgentRef, message: Message) -> None:
        match message:
            case TierHello(number, metadata):
                if metadata and self._can_discover:
                    self._agent.add_remote_agent(metadata, sender.agent_id, incarnation=sender.incarnation)
                self._say(sender, TierWelcome(number))
            case Find(number, record, keys):
                here = tuple(BlockName(record, key) in self._units for key in keys)
                self.counts.hits += sum(here)
                self.counts.misses += len(here) - sum(here)
                self._say(sender, Found(number, here))
            case Put():
                self._begin(sender, message, self._put(sender, message))
            case Get():
                self._get(sender, message)
            case Used(record, keys):
                self._shelf.use([BlockName(record, key) for key in keys])
            case _:
                raise ProtocolError(f"a tier's service does not hear {type(message).__name__}")

    def _say(self, to: AgentRef, message: Message) -> None:
        with contextlib.suppress(KvxferError):  # it is gone, and asks again or not at all
            self._agent.notify(to.agent_id, encode(message))

    # --- an engine's block comes ---

    def _begin(self, sender: AgentRef, put: Put, move: Coroutine[Any, Any, None]) -> None:
        if self._moves[sender.agent_id] >= MOVES_MAX:
            move.close()
            self._end(sender, put, OverloadedError(f"{MOVES_MAX} blocks of this engine are on their way"))
            return
        self._moves[sender.agent_id] += 1
        task = asyncio.create_task(move)
        self._tasks.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._moves[sender.agent_id] -= 1
            if not self._moves[sender.agent_id]:
                del self._moves[sender.agent_id]

        task.add_done_callback(over)

    def _end(self, sender: AgentRef, put: Put, error: KvxferError | None) -> None:
        if error is None:
            self._say(sender, MoveEnded(put.transfer_id))
            return
        self.counts.errors["put", error.code] += 1
        self._failed_put.say(sender.agent_id, f"{error.code}: {error}")
        self._say(sender, MoveEnded(put.transfer_id, error.code, str(error)))

    async def _put(self, sender: AgentRef, put: Put) -> None:
        name = put.name
        if name in self._shelf:  # it is here, or comes from another engine
            self._end(sender, put, None)
            return
        failure: KvxferError | None = None
        try:
            units = self._make_room(put)
            try:
                await self._pull(sender, put, units)
            finally:
                self._shelf.unpin(name)
                if name not in self._units:
                    self._shelf.remove(name)
        except KvxferError as error:
            failure = error
        else:
            self.counts.stored_blocks += 1
            self.counts.stored_bytes += put.length_bytes
        self._end(sender, put, failure)

    async def _pull(self, sender: AgentRef, put: Put, units: Units) -> None:
        """Fill the units, or give them back: once no byte can land in them any more."""
        try:
            transfer = self._agent.pull(
                self._pool,
                units,
                transfer_id=put.transfer_id,
                source=sender.agent_id,
                timeout_s=self._deadline_s,
                deadline_s=self._deadline_s,
                content_digest=put.name.content_digest(put.length_bytes),
            )
        except KvxferError:
            self._free.give(units)
            raise
        try:
            await transfer
        except BaseException:
            transfer.cancel()
            self._give_later(transfer, units)
            raise
        self._units[put.name] = units

    def _give_later(self, transfer: Transfer, units: Units) -> None:
        """Once no byte of that pull can land in them any more."""

        async def give() -> None:
            await transfer.wait_drained()
            self._free.give(units)

        task = asyncio.create_task(give())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _make_room(self, put: Put) -> Units:
        """Units for the block, and its place on the shelf, pinned."""
        unit = self._pool.block_bytes
        count, rest = divmod(put.length_bytes, unit)
        if rest or not count:
            raise IncompatibleError(f"a block of {put.length_bytes} bytes is no multiple of this tier's unit, {unit}")
        for victim in self._shelf.make_room(put.length_bytes):
            self._free.give(self._units.pop(victim))
            self.counts.evictions += 1
        if self._free.free < count:
            raise StoreFullError("units of pulls that failed are not free yet")
        self._shelf.put(put.name, put.length_bytes)
        self._shelf.pin(put.name)
        return self._free.take(count)

    # --- a block goes back ---

    def _get(self, sender: AgentRef, get: Get) -> None:
        units = self._units.get(get.name)
        try:
            if units is None:
                raise BlockMissingError(f"block {get.name} is not here any more")
            if len(units) * self._pool.block_bytes != get.length_bytes:
                raise IncompatibleError(
                    f"block {get.name} has {len(units) * self._pool.block_bytes} bytes, not {get.length_bytes}"
                )
            grant = self._agent.grant(
                self._pool,
                units,
                transfer_id=get.transfer_id,
                reader=sender.agent_id,
                content_digest=get.name.content_digest(get.length_bytes),
            )
        except KvxferError as error:
            with contextlib.suppress(KvxferError):
                self._agent.abort_grant(get.transfer_id)
            self.counts.errors["get", error.code] += 1
            self._say(sender, MoveEnded(get.transfer_id, error.code, str(error)))
            return
        self._shelf.pin(get.name)
        self._shelf.use([get.name])

        def over(state: GrantState) -> None:
            self._shelf.unpin(get.name)
            if state is GrantState.RELEASED:
                self.counts.served_blocks += 1
                self.counts.served_bytes += get.length_bytes
            else:
                self.counts.errors["get", f"grant_{state.name.lower()}"] += 1

        grant.on_ended(over)
        with contextlib.suppress(KvxferError):  # it ended in this moment
            grant.ready(len(units), complete=True)
