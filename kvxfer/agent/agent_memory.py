"""An agent's calls about memory: pools of blocks, registered regions that peers may read and write at any time, and
posts, which read or write between registered regions of two agents. Decides nothing; the pools, the transfer engine and
the transport do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from kvxfer.agent.arguments import judged
from kvxfer.agent.pool import Pool
from kvxfer.agent.pools import AgentPools, PoolSpec
from kvxfer.agent.runtime import AgentRuntime
from kvxfer.agent.transfer import AgentPost
from kvxfer.errors import InvalidArgumentError
from kvxfer.transport.descriptors import Prepared
from kvxfer.transport.engine import MemoryRegistration, Op
from kvxfer.types import ChecksumMode, CompatibilityRecord, Exposure, Lane, RegionRecord, Segment, WorkerInfo


class AgentMemory:
    """The base class of :class:`~kvxfer.agent.Agent` that has these calls."""

    info: WorkerInfo
    _lanes: tuple[Lane, ...]
    _pools: AgentPools

    def _open(self) -> AgentRuntime:
        raise NotImplementedError

    def _on_loop(self, method: str) -> AgentRuntime:
        """As :meth:`_open`. Raises InvalidArgumentError on another thread than the loop's."""
        runtime = self._open()
        if not runtime.transfers.is_on_loop:
            raise InvalidArgumentError(f"{method} is for the agent's loop: other threads use loop.call_soon_threadsafe")
        return runtime

    def _check_own(self, pool: Pool) -> None:
        if pool not in self._pools:
            raise InvalidArgumentError(f"{pool!r} is not a pool of agent {self.info.agent_id}")

    # --- pools ---

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(self._pools)

    @judged
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
        """A pool in zeroed memory that kvxfer allocates; block ``b`` is at ``b * block_bytes``. Readers on this host
        can map it (lane ``mapped``), unless ``exposure`` is GRANT. ``checksum``: which transfers from and to this pool
        carry CRC-32C checksums. A pool that is not ``is_published`` is only pulled into; no other agent learns of it.
        Raises InvalidArgumentError for too many published pools, LimitExceededError if the host lacks the memory."""
        return self._pools.allocate(PoolSpec(record, block_count, exposure, checksum, is_published), block_bytes)

    @judged
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
        """A pool in existing memory: a contiguous tensor (CPU, CUDA), array, buffer, ``(address, length)`` or Region,
        which the pool keeps alive. Without ``segments`` the memory is cut into equal blocks. Other pools of this agent
        may have the same memory: a block is busy while one that shares bytes with it is.

        Raises InvalidArgumentError for memory with gaps, segments that do not fit, blocks that share bytes, and memory
        that is registered (:meth:`register`); LaneUnavailableError for an unusable device.
        """
        return self._pools.register(PoolSpec(record, block_count, exposure, checksum, is_published), memory, segments)

    @judged
    def remove_pool(self, pool: Pool) -> None:
        """Remove a pool. Raises BlocksBusyError while a block of it is granted, reserved or quarantined."""
        self._check_own(pool)
        self._pools.remove(pool)

    # --- registered memory ---

    @judged
    def register(self, memory: Any, *, can_read: bool = True, can_write: bool = True) -> MemoryRegistration:
        """Let every authenticated peer read and write ``memory`` (a contiguous tensor (CPU, CUDA), array, buffer,
        ``(address, length)`` or Region) at any time until :meth:`deregister`: an open-ended grant and offer. The memory
        is kept alive until then. Registrations may overlap.

        Raises InvalidArgumentError for memory with gaps and memory of a pool, LaneUnavailableError for an unusable
        device.
        """
        return self._open().transfers.engine.register(memory, can_read=can_read, can_write=can_write)

    @judged
    def deregister(self, registration: MemoryRegistration) -> None:
        """Remove it. Once this has returned no peer reads or writes it. Raises BlocksBusyError while one of our posts
        uses it, or a peer's write into it drains."""
        self._open().transfers.engine.deregister(registration)

    def memory(self) -> tuple[RegionRecord, ...]:
        """The registered regions of this agent. Peers need them (``to_json``) to prepare."""
        return self._open().transfers.engine.records()

    @judged
    def prepare(
        self, descriptors: Any, *, peer: str | None = None, records: Sequence[RegionRecord] | None = None
    ) -> Prepared:
        """Find descriptors in our registered memory, or in that of ``peer``, whose :meth:`memory` is ``records``
        (needed if they are new). For descriptors see :meth:`~kvxfer.transport.descriptors.Descriptors.of`. A prepared
        list may be posted many times. Raises InvalidArgumentError naming the first descriptor outside every region;
        PeerGoneError."""
        return self._open().transfers.prepare(descriptors, peer, records)

    @judged
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
        """READ the peer's descriptors ``remote_ids`` into ours, ``local_ids``, one by one (``None``: all), or WRITE
        ours into the peer's: then the peer's agent reads. The peer gets ``notification`` once the bytes are committed.

        A wrong call raises here: InvalidArgumentError, LimitExceededError, LaneUnavailableError, PeerGoneError.
        Awaiting raises what goes wrong later.
        """
        allowed = self._lanes if lanes is None else lanes
        return self._on_loop("post").transfers.post(
            op, local, local_ids, remote, remote_ids, lanes=allowed, notification=notification, deadline_s=deadline_s
        )
