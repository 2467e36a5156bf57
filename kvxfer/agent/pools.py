"""The pools of one agent, before and while it is entered. Decides their numbers and what is published of them; must
never know which blocks are in use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvxfer.agent.arguments import check_count
from kvxfer.agent.pool import Pool, plan_segments
from kvxfer.config import checksum_mode
from kvxfer.errors import ClosedError, InvalidArgumentError, KvxferError
from kvxfer.transport.base import Region, Transport, allocate_region
from kvxfer.transport.host_memory import region_of
from kvxfer.types import ChecksumMode, CompatibilityRecord, Exposure, PoolRecord, Segment


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """What the owner says of a pool, wherever its memory comes from: see :meth:`Agent.allocate_pool`."""

    record: CompatibilityRecord
    block_count: int
    exposure: Exposure
    checksum: ChecksumMode
    is_published: bool


class AgentPools:
    """In the order of their ids, which count from 1."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}
        self._next_id = 1
        self._transport: Transport | None = None
        self._publish: Callable[[list[PoolRecord]], None] = lambda _: None
        self._is_closed = False

    def __iter__(self) -> Iterator[Pool]:
        return iter(tuple(self._pools.values()))  # other threads look too, while the loop adds and removes

    def __len__(self) -> int:
        return len(self._pools)

    def __contains__(self, pool: object) -> bool:
        return isinstance(pool, Pool) and self._pools.get(pool.pool_id) is pool

    @property
    def published(self) -> list[PoolRecord]:
        """Those that other agents may know, as they see them."""
        return [pool.published for pool in self if pool.is_published]

    def open(self, transport: Transport, publish: Callable[[list[PoolRecord]], None] | None) -> None:
        """Give the pools to the transport. ``publish`` is called with the published pools whenever they change."""
        for pool in self:
            transport.add_pool(
                pool.published, pool.region, pool.segments, has_checksums=pool.checksum == ChecksumMode.ON
            )
        self._transport = transport
        if publish is not None:
            self._publish = publish

    def close(self) -> None:
        self._is_closed = True

    def allocate(self, spec: PoolSpec, block_bytes: int) -> Pool:
        """See :meth:`Agent.allocate_pool`."""
        if spec.block_count < 1 or block_bytes < 1:
            raise InvalidArgumentError(f"a pool needs blocks and bytes, not {spec.block_count} blocks of {block_bytes}")
        check_count("block_count", spec.block_count)
        self._check_open()
        region = allocate_region(spec.block_count * block_bytes)
        return self._add(spec, region, (Segment(0, block_bytes, block_bytes),), block_bytes)

    def register(self, spec: PoolSpec, memory: Any, segments: Sequence[Segment] | None) -> Pool:
        """See :meth:`Agent.register_pool`."""
        region = memory if isinstance(memory, Region) else region_of(memory)
        return self._add(spec, region, *plan_segments(spec.block_count, region.length_bytes, segments))

    def remove(self, pool: Pool) -> None:
        """See :meth:`Agent.remove_pool`."""
        self._drop(pool)
        if pool.is_published:
            self._publish(self.published)

    def _add(self, spec: PoolSpec, region: Region, segments: Sequence[Segment], block_bytes: int) -> Pool:
        self._check_open()
        checksum = checksum_mode("checksum", spec.checksum)
        pool_id, self._next_id = self._next_id, self._next_id + 1
        published = PoolRecord(
            pool_id, spec.record, spec.block_count, block_bytes, spec.exposure, region.shared is not None, region.memory
        )
        pool = Pool(published, region, segments, checksum, spec.is_published, self._on_described)
        if self._transport is not None:
            self._transport.add_pool(published, region, pool.segments, has_checksums=checksum == ChecksumMode.ON)
        self._pools[pool_id] = pool
        if spec.is_published:
            try:
                self._publish(self.published)
            except KvxferError:
                self._drop(pool)
                raise
        return pool

    def _on_described(self, pool: Pool) -> None:
        """The owner has replaced the record of a pool."""
        if self._pools.get(pool.pool_id) is not pool or self._is_closed:
            return
        if self._transport is not None:
            self._transport.describe_pool(pool.published)
        if pool.is_published:
            self._publish(self.published)

    def _drop(self, pool: Pool) -> None:
        if self._transport is not None:
            self._transport.remove_pool(pool.pool_id)
        del self._pools[pool.pool_id]

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the agent was closed")
