"""An in-process stand-in for ``kvxfer.Agent``: real bytes between real pools, and knobs for what may go wrong.

It watches the engine's side of the safety rule: announced blocks must not change while their grant is alive, a
block must not be pulled into twice at once nor granted while it is pulled into. Breaches are collected in
``World.breaches``."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from kvxfer.engine.remote import ended_error
from kvxfer.errors import (
    BlocksBusyError,
    GrantExpiredError,
    GrantGoneError,
    GrantReleasedError,
    GrantRevokedError,
    IncompatibleError,
    InvalidArgumentError,
    KvxferError,
    PeerGoneError,
    TransferCancelledError,
)
from kvxfer.types import CompatibilityRecord, GrantState, Lane, Load, TransferId

POISON = 0xA5


class World:
    """All fake agents of one test, on one loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lock = threading.RLock()
        self.agents: dict[str, FakeAgent] = {}
        self.grants: dict[TransferId, FakeGrant] = {}
        self.changed = asyncio.Event()
        self.released: set[TransferId] = set()
        """Transfers that their reader gave up before their grant was made."""
        self.breaches: list[str] = []
        self.pull_errors: dict[TransferId, KvxferError] = {}
        """A pull under this id copies its first block, then fails so."""
        self.expire_at_grant: set[TransferId] = set()
        """A grant of this id expires as soon as it is made."""
        self.pull_wait_s = 30.0
        self.hold_back: set[TransferId] = set()
        """Transfers that hear of their grant and read nothing."""
        self.drains = asyncio.Event()
        """Failed transfers drain only while this is set."""
        self.drains.set()

    def touch(self) -> None:
        self.loop.call_soon_threadsafe(self.changed.set)

    def release(self, transfer_id: TransferId) -> None:
        """What an agent's reader tells the source when it will not read, or not read on."""
        with self.lock:
            grant = self.grants.get(transfer_id)
            if grant is None:
                self.released.add(transfer_id)
        if grant is not None:
            grant.end(GrantState.RELEASED)

    def expire(self, transfer_id: TransferId) -> None:
        self.grants[transfer_id].end(GrantState.EXPIRED)

    @property
    def granted(self) -> int:
        return sum(1 for grant in self.grants.values() if grant.state is GrantState.ALIVE)


class FakePool:
    def __init__(self, block_count: int, block_bytes: int) -> None:
        self.block_count = block_count
        self.block_bytes = block_bytes
        self.array = np.full((block_count, block_bytes), POISON, dtype=np.uint8)
        self.reserved: set[int] = set()

    def digest(self, blocks: list[int]) -> str:
        return hashlib.blake2b(self.array[blocks].tobytes()).hexdigest()


class FakeGrant:
    def __init__(
        self,
        world: World,
        pool: FakePool,
        blocks: list[int],
        transfer_id: TransferId,
        reader: str,
        content_digest: bytes | None = None,
    ) -> None:
        self.content_digest = content_digest
        self.world = world
        self.pool = pool
        self.blocks = blocks
        self.transfer_id = transfer_id
        self.reader = reader
        self.state = GrantState.ALIVE
        self.reason = ""
        self.ready_blocks = 0
        self.ready_early = 0
        """How many blocks were announced before all of them were."""
        self.is_complete = False
        self.seen: list[str] = []
        self.callbacks: list[Callable[[GrantState], None]] = []

    @property
    def has_begun(self) -> bool:
        transfers = [one for agent in self.world.agents.values() for one in agent.transfers]
        return any(one.transfer_id == self.transfer_id and one.blocks for one in transfers)

    def ready(self, blocks: int, *, layers: int = 0, complete: bool = False) -> None:
        with self.world.lock:
            if self.state is not GrantState.ALIVE:
                raise ended_error(self.state)
            assert self.ready_blocks <= blocks <= len(self.blocks), "ready is cumulative and bounded"
            assert not complete or blocks == len(self.blocks)
            self.seen += [self.pool.digest([block]) for block in self.blocks[self.ready_blocks : blocks]]
            if not complete:
                self.ready_early = blocks
            self.ready_blocks = blocks
            self.is_complete = complete
        self.world.touch()

    def end(self, state: GrantState) -> GrantState:
        with self.world.lock:
            if self.state is not GrantState.ALIVE:
                return self.state
            if [self.pool.digest([block]) for block in self.blocks[: self.ready_blocks]] != self.seen:
                self.world.breaches.append(f"a granted block of {self.transfer_id} changed")
            self.state = state
        self.world.loop.call_soon_threadsafe(self._notify)
        self.world.touch()
        return state

    def revoke(self, reason: str = "") -> GrantState:
        self.reason = reason
        return self.end(GrantState.REVOKED)

    def release(self) -> GrantState:
        return self.end(GrantState.RELEASED)

    def on_ended(self, callback: Callable[[GrantState], None]) -> None:
        assert asyncio.get_running_loop() is self.world.loop
        self.callbacks.append(callback)
        if self.state is not GrantState.ALIVE:
            self._notify()

    def _notify(self) -> None:
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback(self.state)


@dataclasses.dataclass(frozen=True)
class FakeResult:
    transfer_id: TransferId
    lane: Lane
    lane_reason: str
    blocks: int
    bytes: int
    seconds: dict[str, float]
    bytes_before_complete: int
    attempts: int = 1


class FakeTransfer:
    def __init__(
        self,
        world: World,
        pool: FakePool,
        blocks: list[int],
        transfer_id: TransferId,
        first: int,
        content_digest: bytes | None = None,
        on_granted: Callable[[Any], None] | None = None,
    ) -> None:
        self.content_digest = content_digest
        self.world = world
        self.pool = pool
        self.blocks = blocks
        self.transfer_id = transfer_id
        self.first = first
        self.on_granted = on_granted
        self.timeout_s: float | None = None
        self.is_cancelled = False
        self.is_told = False
        self.is_drained = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    def __await__(self) -> Generator[Any, None, FakeResult]:
        return self.task.__await__()

    def cancel(self) -> None:
        self.is_cancelled = True
        self.world.touch()

    def reserve(self, blocks: np.ndarray, *, first: int = 0) -> None:
        with self.world.lock:
            if self.task.done():
                raise InvalidArgumentError("this transfer is over")
            take(self.world, self.pool, blocks)
            self.first, self.blocks = first, blocks.tolist()
        self.world.touch()

    def unreserve(self) -> bool:
        with self.world.lock:
            if self.task.done() or not self.blocks or self.transfer_id in self.world.grants:
                return False
            self.pool.reserved -= set(self.blocks)
            self.blocks, self.is_told = [], False
            return True

    async def wait_drained(self) -> None:
        await self.is_drained.wait()

    async def _run(self) -> FakeResult:
        try:
            result = await self._pull()
        except BaseException:
            self.world.release(self.transfer_id)
            self.drain_task = asyncio.create_task(self._drain_later())
            raise
        self._drain()
        return result

    async def _pull(self) -> FakeResult:
        world, early = self.world, 0
        error = world.pull_errors.get(self.transfer_id)
        wait_s = world.pull_wait_s if self.timeout_s is None else min(self.timeout_s, world.pull_wait_s)
        end_s = world.loop.time() + wait_s
        done = 0
        while True:
            with world.lock:
                if self.is_cancelled:
                    raise TransferCancelledError("cancelled")
                grant = world.grants.get(self.transfer_id)
                if grant is not None:
                    if (
                        None not in (self.content_digest, grant.content_digest)
                        and self.content_digest != grant.content_digest
                    ):
                        raise IncompatibleError("content digests differ")
                    if grant.state is GrantState.EXPIRED:
                        raise GrantExpiredError("the grant expired")
                    if grant.state is not GrantState.ALIVE:
                        raise GrantRevokedError(f"the grant is {grant.state.name}")
                    if not self.is_told and self.on_granted is not None:
                        self.is_told = True
                        self.on_granted(self)
                    last = min(grant.ready_blocks, self.first + len(self.blocks)) if not error else self.first + 1
                    for position in range(self.first + done, min(last, grant.ready_blocks)):
                        self.pool.array[self.blocks[done]] = grant.pool.array[grant.blocks[position]]
                        done += 1
                        early += 0 if grant.is_complete else self.pool.block_bytes
                    if error is not None and done:
                        raise error
                    is_held_back = self.transfer_id in world.hold_back
                    if self.blocks and not is_held_back and grant.is_complete and done == len(self.blocks):
                        break
                elif world.loop.time() > end_s:
                    raise PeerGoneError("no grant came")
            world.changed.clear()
            try:
                await asyncio.wait_for(world.changed.wait(), 0.05)
            except TimeoutError:
                continue
        await asyncio.sleep(0)
        if self.is_cancelled:
            raise TransferCancelledError("cancelled")
        if grant.end(GrantState.RELEASED) is not GrantState.RELEASED:
            raise GrantGoneError("the grant ended before the confirm")
        size = done * self.pool.block_bytes
        seconds = {"queue": 0.0, "plan": 0.0, "wire": 0.001, "confirm": 0.0}
        return FakeResult(self.transfer_id, Lane.MEMORY, "fake", done, size, seconds, early)

    async def _drain_later(self) -> None:
        await self.world.drains.wait()
        self._drain()

    def _drain(self) -> None:
        self.pool.reserved -= set(self.blocks)
        self.is_drained.set()


@dataclasses.dataclass(frozen=True)
class FakeStatistics:
    reserved: int
    granted: int

    def as_dict(self) -> dict[str, Any]:
        return {"pools": [{"reserved": self.reserved, "granted": self.granted, "quarantined": 0}]}


class FakeAgent:
    def __init__(self, world: World, agent_id: str) -> None:
        self.world = world
        self.agent_id = agent_id
        self.loads: list[Load] = []
        self.transfers: list[FakeTransfer] = []
        self.given_up: list[TransferId] = []
        self.expected: list[TransferId] = []
        self.pulse_count = 0
        self.pulses: collections.deque[tuple[bool, bool]] = collections.deque(maxlen=64)
        self.pool: FakePool | None = None
        self.is_draining = False
        world.agents[agent_id] = self

    async def __aenter__(self) -> FakeAgent:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def set_draining(self) -> None:
        self.is_draining = True

    def allocate_pool(self, record: CompatibilityRecord, *, block_count: int, block_bytes: int) -> FakePool:
        self.pool = FakePool(block_count, block_bytes)
        return self.pool

    def statistics(self) -> FakeStatistics:
        grants = [grant for grant in self.world.grants.values() if grant.pool is self.pool]
        alive = {block for grant in grants if grant.state is GrantState.ALIVE for block in grant.blocks}
        return FakeStatistics(len(self.pool.reserved) if self.pool else 0, len(alive))

    def report_load(self, load: Load) -> None:
        self.loads = [load]

    def expect(self, transfer_id: TransferId, *, reader: str | None = None) -> None:
        self.expected.append(transfer_id)

    def pulse(self, *, has_work: bool, took_in: bool = True) -> None:
        self.pulses.append((has_work, took_in))
        self.pulse_count += 1

    def grant(
        self,
        pool: FakePool,
        blocks: np.ndarray,
        *,
        transfer_id: TransferId,
        reader: str | None = None,
        ready_blocks: int = 0,
        ttl_s: float | None = None,
        content_digest: bytes | None = None,
    ) -> FakeGrant:
        assert blocks.dtype == np.uint32
        assert len(blocks)
        assert reader is not None
        with self.world.lock:
            if pool.reserved & set(blocks.tolist()):
                self.world.breaches.append("a block was granted while it is pulled into")
                raise BlocksBusyError("reserved")
            if transfer_id in self.world.released:
                raise GrantReleasedError("the reader gave it up")
            assert transfer_id not in self.world.grants, "a retry is a new transfer id"
            grant = FakeGrant(self.world, pool, blocks.tolist(), transfer_id, reader, content_digest)
            self.world.grants[transfer_id] = grant
        grant.ready(ready_blocks)
        if transfer_id in self.world.expire_at_grant:
            grant.end(GrantState.EXPIRED)
        return grant

    def abort_grant(self, transfer_id: TransferId) -> None:
        with self.world.lock:
            assert transfer_id not in self.world.grants, "what was granted is revoked, not declined"
            self.world.grants[transfer_id] = FakeGrant(self.world, FakePool(0, 1), [], transfer_id, "")
        self.world.grants[transfer_id].end(GrantState.REVOKED)

    def abort_pull(self, transfer_id: TransferId, source: str) -> None:
        self.given_up.append(transfer_id)
        self.world.release(transfer_id)

    def pull(
        self,
        pool: FakePool,
        blocks: np.ndarray,
        *,
        transfer_id: TransferId,
        source: str,
        first: int = 0,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        lanes: Any = None,
        content_digest: bytes | None = None,
        on_granted: Callable[[Any], None] | None = None,
    ) -> FakeTransfer:
        assert asyncio.get_running_loop() is self.world.loop
        if source not in self.world.agents:
            raise PeerGoneError(f"no agent {source}")
        take(self.world, pool, blocks)
        transfer = FakeTransfer(self.world, pool, blocks.tolist(), transfer_id, first, content_digest, on_granted)
        transfer.timeout_s = timeout_s
        self.transfers.append(transfer)
        return transfer

    def ask(
        self,
        pool: FakePool,
        count: int,
        *,
        transfer_id: TransferId,
        source: str,
        timeout_s: float | None = None,
        content_digest: bytes | None = None,
        on_granted: Callable[[Any], None] | None = None,
    ) -> FakeTransfer:
        assert asyncio.get_running_loop() is self.world.loop
        if source not in self.world.agents:
            raise PeerGoneError(f"no agent {source}")
        transfer = FakeTransfer(self.world, pool, [], transfer_id, 0, content_digest, on_granted)
        self.transfers.append(transfer)
        return transfer


def take(world: World, pool: FakePool, blocks: np.ndarray) -> None:
    assert blocks.dtype == np.uint32
    assert len(blocks)
    taken = set(blocks.tolist())
    if len(taken) != len(blocks) or pool.reserved & taken:
        world.breaches.append("a block is pulled into twice")
        raise BlocksBusyError("reserved")
    pool.reserved |= taken
    pool.array[blocks] = POISON
