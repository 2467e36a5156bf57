"""The pools of one agent, before and while it is entered. Decides their numbers and what is published of them; must
never know which blocks are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvxfer.agent.pool import Pool, plan_segments
from kvxfer.config import check_checks
from kvxfer.errors import Closed, InvalidArgument, KvxferError
from kvxfer.transport.base import Region, Transport, allocate_region
from kvxfer.transport.host_memory import region_of
from kvxfer.types import CompatibilityRecord, Exposure, PoolRecord, Segment


class Pools:
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
        """From now on the transport has them, and ``publish`` is told whenever there are others."""
        for pool in self:
            transport.add_pool(pool.published, pool.region, pool.segments, checks=pool.checks == "on")
        self._transport = transport
        if publish is not None:
            self._publish = publish

    def close(self) -> None:
        self._is_closed = True

    def allocate(
        self,
        record: CompatibilityRecord,
        block_count: int,
        block_bytes: int,
        exposure: Exposure,
        checks: str,
        is_published: bool,
    ) -> Pool:
        """See :meth:`Agent.allocate_pool`."""
        if block_count < 1 or block_bytes < 1:
            raise InvalidArgument(f"a pool needs blocks and bytes, not {block_count} blocks of {block_bytes}")
        self._check_open()
        segments = (Segment(0, block_bytes, block_bytes),)
        region = allocate_region(block_count * block_bytes)
        return self._add(record, block_count, block_bytes, exposure, checks, is_published, region, segments)

    def register(
        self,
        record: CompatibilityRecord,
        memory: Any,
        block_count: int,
        segments: Sequence[Segment] | None,
        exposure: Exposure,
        checks: str,
        is_published: bool,
    ) -> Pool:
        """See :meth:`Agent.register_pool`."""
        region = memory if isinstance(memory, Region) else region_of(memory)
        parts, block_bytes = plan_segments(block_count, region.length_bytes, segments)
        return self._add(record, block_count, block_bytes, exposure, checks, is_published, region, parts)

    def remove(self, pool: Pool) -> None:
        """See :meth:`Agent.remove_pool`."""
        self._drop(pool)
        if pool.is_published:
            self._publish(self.published)

    def _add(
        self,
        record: CompatibilityRecord,
        block_count: int,
        block_bytes: int,
        exposure: Exposure,
        checks: str,
        is_published: bool,
        region: Region,
        segments: Sequence[Segment],
    ) -> Pool:
        self._check_open()
        check_checks("checks", checks)
        pool_id, self._next_id = self._next_id, self._next_id + 1
        published = PoolRecord(
            pool_id, record, block_count, block_bytes, exposure, region.shared is not None, region.memory
        )
        pool = Pool(published, region, segments, checks, is_published)
        if self._transport is not None:
            self._transport.add_pool(published, region, pool.segments, checks=checks == "on")
        self._pools[pool_id] = pool
        if is_published:
            try:
                self._publish(self.published)
            except KvxferError:
                self._drop(pool)
                raise
        return pool

    def _drop(self, pool: Pool) -> None:
        if self._transport is not None:
            self._transport.remove_pool(pool.pool_id)
        del self._pools[pool.pool_id]

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the agent was closed")
