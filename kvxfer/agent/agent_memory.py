"""The part of an agent that is about memory: pools of blocks, registered regions that peers may read and write at any
time, and posts between regions. Decides nothing; the pools, the transfer engine and the transport do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from kvxfer.agent.pool import Pool
from kvxfer.agent.pools import Pools, PoolSpec
from kvxfer.agent.runtime import AgentRuntime
from kvxfer.agent.transfer import AgentPost
from kvxfer.errors import InvalidArgumentError
from kvxfer.transport.descriptors import Prepared
from kvxfer.transport.engine import MemoryRegistration, Op
from kvxfer.types import ChecksumMode, CompatibilityRecord, Exposure, Lane, RegionRecord, Segment, WorkerInfo


class AgentMemory:
    """What :class:`~kvxfer.agent.Agent` inherits."""

    info: WorkerInfo
    _lanes: tuple[Lane, ...]
    _pools: Pools

    def _open(self) -> AgentRuntime:
        raise NotImplementedError

    def _check_own(self, pool: Pool) -> None:
        if pool not in self._pools:
            raise InvalidArgumentError(f"{pool!r} is no pool of agent {self.info.agent_id}")

    # --- pools ---

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(self._pools)

    def allocate_pool(
        self,
        record: CompatibilityRecord,
        *,
        block_count: int,
        block_bytes: int,
        exposure: Exposure = Exposure.POOL,
        checksum: ChecksumMode = ChecksumMode.OFF,
        is_published: bool = True,
    ) -> Pool:
        """A pool in memory made by kvxfer, zeroed, block ``b`` at ``b * block_bytes``: readers on this host can map it
        (lane ``mapped``), unless ``exposure`` is GRANT. ``checksum``: which transfers from
        here and to here carry CRC-32Cs. One that is
        not ``is_published`` is for pulls of our own: no other agent knows of it. Raises InvalidArgumentError where
        there are too many published ones, LimitExceededError where the host has not so much memory.
        """
        return self._pools.allocate(PoolSpec(record, block_count, exposure, checksum, is_published), block_bytes)

    def register_pool(
        self,
        record: CompatibilityRecord,
        memory: Any,
        *,
        block_count: int,
        segments: Sequence[Segment] | None = None,
        exposure: Exposure = Exposure.POOL,
        checksum: ChecksumMode = ChecksumMode.OFF,
        is_published: bool = True,
    ) -> Pool:
        """A pool in memory that is there already: a contiguous tensor (CPU, CUDA), array, buffer, ``(address, length)``
        or Region. It is kept alive as long as the pool. Without ``segments``, block ``b`` is ``b``-th of equal parts.

        Raises InvalidArgumentError for memory with gaps or segments that do not fit, LaneUnavailableError for an
        unusable device.
        """
        return self._pools.register(PoolSpec(record, block_count, exposure, checksum, is_published), memory, segments)

    def remove_pool(self, pool: Pool) -> None:
        """Take a pool back. Raises BlocksBusyError while a block of it is granted, reserved or quarantined."""
        self._check_own(pool)
        self._pools.remove(pool)

    # --- registered memory ---

    def register(self, memory: Any, *, can_read: bool = True, can_write: bool = True) -> MemoryRegistration:
        """Let every proven peer read and write ``memory`` (contiguous tensor (CPU, CUDA), array, buffer,
        ``(address, length)`` or Region) at any time until :meth:`deregister`: an open-ended grant and offer. It is kept
        alive so long.

        Raises InvalidArgumentError for memory with gaps, LaneUnavailableError for an unusable device.
        """
        return self._open().transfers.engine.register(memory, can_read=can_read, can_write=can_write)

    def deregister(self, registration: MemoryRegistration) -> None:
        """Take it back: once this returned no peer reads or writes it. Raises BlocksBusyError while a post of ours uses
        it, or a peer's write into it drains."""
        self._open().transfers.engine.deregister(registration)

    def memory(self) -> tuple[RegionRecord, ...]:
        """What is registered here, for peers (``to_json``): they need it to prepare."""
        return self._open().transfers.engine.records()

    def prepare(
        self, descriptors: Any, *, peer: str | None = None, records: Sequence[RegionRecord] | None = None
    ) -> Prepared:
        """Find descriptors in our registered memory, or in that of ``peer``, whose :meth:`memory` is ``records``
        (needed when they are new). Descriptors: see :meth:`~kvxfer.transport.descriptors.Descriptors.of`. Once made, a
        list is posted from many times. Raises InvalidArgumentError naming the first that lies in no region;
        PeerGoneError.
        """
        return self._open().transfers.prepare(descriptors, peer, records)

    def post(
        self,
        op: Op,
        local: Prepared,
        local_ids: npt.ArrayLike | None,
        remote: Prepared,
        remote_ids: npt.ArrayLike | None,
        *,
        lanes: Sequence[Lane] | None = None,
        notification: bytes | None = None,
        deadline_s: float | None = None,
    ) -> AgentPost:
        """READ the peer's descriptors ``remote_ids`` into ours, ``local_ids``, one by one (``None``: all), or WRITE the
        other way, which has the peer's agent read. ``notification`` is told to the peer once the bytes are committed.

        A wrong call raises here: InvalidArgumentError, LimitExceededError, LaneUnavailableError, PeerGoneError. What
        goes wrong later is raised by awaiting.
        """
        allowed = self._lanes if lanes is None else lanes
        return self._open().transfers.post(
            op, local, local_ids, remote, remote_ids, lanes=allowed, notification=notification, deadline_s=deadline_s
        )
