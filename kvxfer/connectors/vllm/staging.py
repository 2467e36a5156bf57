"""Where the bytes of a load land: in vLLM's own pages, or, where the source cuts its blocks otherwise, in pages of the
source's kind, which are then made into ours.

Decides how much memory that may take; `kvxfer.layout.convertible` says which blocks can be converted. The order of
bytes within a block is told to the planner as strides.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
from collections.abc import AsyncIterator, Sequence

import numpy as np
import numpy.typing as npt

from kvxfer.agent import Agent, Pool
from kvxfer.connectors.common.ids import blocks_for
from kvxfer.connectors.vllm.pages import Store
from kvxfer.errors import LimitExceededError
from kvxfer.layout.convertible import is_convertible
from kvxfer.layout.kv_layout import KvLayout, KvPart
from kvxfer.layout.plan import plan_transfer
from kvxfer.protocol.handshake import check, compare
from kvxfer.transport.base import Region, allocate_region
from kvxfer.types import CompatibilityRecord, Exposure, Member, PoolRecord, Segment


@dataclasses.dataclass(frozen=True)
class Cut:
    """How both engines share the model's heads out: equally among so many ranks. Ours is ``rank`` of ``ranks``."""

    source_rank: int = 0
    sources: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def reads_several(self) -> bool:
        """Whether our rank takes from several of theirs."""
        return len(ranks_read(self.rank, self.ranks, self.sources)) > 1


def ranks_read(rank: int, ranks: int, sources: int) -> range:
    """Which of ``sources`` ranks hold what rank ``rank`` of ``ranks`` holds: several where theirs hold less or are cut
    elsewhere, the same for several of ours where theirs hold more."""
    return range(rank * sources // ranks, -(-(rank + 1) * sources // ranks))


@dataclasses.dataclass(frozen=True)
class Landing:
    """Pools, pages and blocks that a load is pulled into, in blocks of the source: ``blocks`` are ``first`` and those
    after it of the prompt."""

    pools: tuple[Pool, ...]
    stores: tuple[Store, ...]
    first: int
    blocks: Sequence[int]
    cut: Cut
    is_staged: bool

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


class Staging:
    """Landings of one rank. ``bytes_max`` bounds the memory of those that are staged; loads wait for their turn."""

    def __init__(self, agent: Agent, pools: tuple[Pool, ...], stores: tuple[Store, ...], bytes_max: int) -> None:
        self._agent = agent
        self._pools = pools
        self._stores = stores
        self._bytes_max = bytes_max
        self._bytes = 0
        self._room = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def land(
        self, source: Member, cut: Cut, first: int, blocks: tuple[int, ...], tokens: int
    ) -> AsyncIterator[Landing]:
        """Where ``blocks`` of a prompt of ``tokens`` tokens, from our ``first``-th on, land when they come from
        ``source``. Leave it when nothing can land any more.

        Raises IncompatibleError, naming the fields that differ; LimitExceededError where staging has no room for so
        much.
        """
        theirs = nearest(self._pools[0].published, source)
        if not compare(self._pools[0].published, theirs):
            yield Landing(self._pools, self._stores, first, blocks, cut, is_staged=False)
            return
        ours = self._pools[0].published
        if len(self._pools) > 1 or not is_convertible(ours, theirs, ranks=cut.ranks, sources=cut.sources):
            check(ours, theirs)
        start = first * self._pools[0].record.block_tokens // theirs.record.block_tokens
        count = blocks_for(tokens, theirs.record.block_tokens) - start
        layers = self._stores[0].layers
        size = layers * count * theirs.block_bytes
        if size > self._bytes_max:
            raise LimitExceededError(f"the prompt takes {size} bytes of staging_bytes {self._bytes_max}")
        async with self._room:
            if cut.reads_several and self._bytes + size > self._bytes_max:  # to wait holding some would be for ever
                raise LimitExceededError("staging_bytes are in use, and a load of several sources does not wait")
            await self._room.wait_for(lambda: self._bytes + size <= self._bytes_max)
            self._bytes += size
        try:
            pool = self._agent.register_pool(
                theirs.record,
                await _allocate(size),
                block_count=layers * count,
                segments=(Segment(0, theirs.block_bytes, theirs.block_bytes),),
                exposure=Exposure.GRANT,
                checksum=self._pools[0].checksum,
                is_published=False,
            )
            try:
                steps = np.ones(layers, np.int64)
                store = Store(pool.region, layers * count, 0, np.arange(layers, dtype=np.int64) * count, steps)
                yield Landing((pool,), (store,), start, range(count), cut, is_staged=True)
            finally:
                self._agent.remove_pool(pool)
        finally:
            async with self._room:
                self._bytes -= size
                self._room.notify_all()

    def is_alike(self, source: Member) -> bool:
        """Whether what comes from it lands where it stays."""
        return bool(source.pools) and not compare(self._pools[0].published, nearest(self._pools[0].published, source))

    def in_place(self, first: int, blocks: tuple[int, ...]) -> Landing:
        """Where ``blocks`` from a source that is alike land, of which our rank has all that it needs."""
        return Landing(self._pools, self._stores, first, blocks, Cut(), is_staged=False)

    def is_replica(self, source: Member) -> bool:
        """Whether each rank of the source's holds as many heads as ours: then one that holds ours holds all of them."""
        ours = self._pools[0].published
        return nearest(ours, source).record.kv_heads == ours.record.kv_heads

    def unpack(self, landing: Landing, first: int, blocks: tuple[int, ...], tokens: int) -> None:
        """Make the staged pages into ours: tokens of our ``first``-th block and those after it. From any thread."""
        record, theirs = self._pools[0].record, landing.pools[0].record
        repack(
            landing.stores[0],
            theirs,
            landing.blocks,
            landing.first * theirs.block_tokens,
            self._stores[0],
            record,
            blocks,
            first * record.block_tokens,
            range(first * record.block_tokens, tokens),
            landing.cut,
        )


async def _allocate(size: int) -> Region:
    """Memory, made off the loop: a GiB takes most of a second, in which peers would hear nothing. Cancelled, it ends
    only when no more is being made."""
    making = asyncio.create_task(asyncio.to_thread(allocate_region, size))
    try:
        return await asyncio.shield(making)
    finally:
        await asyncio.wait({making})


def nearest(ours: PoolRecord, source: Member) -> PoolRecord:
    """The pool of ``source`` that is most like ours."""
    return min(source.pools, key=lambda theirs: len(compare(ours, theirs)))


def layout_of(store: Store, record: CompatibilityRecord, head_offset: int, total_heads: int) -> KvLayout:
    """What the planner must know of pages whose packing is one of TRANSPOSED_KEYS, of heads from ``head_offset`` on."""
    page = store.region.length_bytes // store.page_count
    tokens, dims, heads = record.block_tokens, record.head_dim, record.kv_heads
    item = page // (2 * heads * tokens * dims)
    stride, head = int(store.step[0]) * page, page // heads
    base = [int(first) * page for first in store.first]
    return KvLayout(
        parts=(
            KvPart("k", dims, item, stride, item, head, tokens * item),
            KvPart("v", dims, item, stride, dims * item, head, item),
        ),
        layers=tuple(range(store.layers)),
        regions=((0, 0),) * store.layers,
        offsets=tuple((first, first + tokens * dims * item) for first in base),
        block_tokens=tokens,
        block_count=store.page_count // store.layers,
        heads=heads,
        head_offset=head_offset,
        total_heads=total_heads,
    )


def repack(
    source: Store,
    source_record: CompatibilityRecord,
    source_blocks: Sequence[int],
    source_start: int,
    destination: Store,
    destination_record: CompatibilityRecord,
    destination_blocks: Sequence[int],
    destination_start: int,
    tokens: range,
    cut: Cut,
) -> None:
    """Copy ``tokens`` of the heads that both have between pages of two kinds, in host memory. From any thread.

    ``source_start`` is the token in the first slot of the first of ``source_blocks``; ``destination_start`` likewise.
    """
    ours, theirs = destination_record.kv_heads, source_record.kv_heads
    offsets, total = (cut.source_rank * theirs, cut.rank * ours), cut.ranks * ours
    if ours == theirs:  # the same heads, whoever holds them
        offsets, total = (0, 0), ours
    runs = plan_transfer(
        layout_of(source, source_record, offsets[0], total),
        layout_of(destination, destination_record, offsets[1], total),
        np.fromiter(source_blocks, np.int64),
        np.fromiter(destination_blocks, np.int64),
        tokens,
        source_start=source_start,
        destination_start=destination_start,
    ).runs
    read, written = _bytes_of(source.region), _bytes_of(destination.region)
    for at, stride, to, to_stride, length, count in zip(
        runs.source_offset.tolist(),
        runs.source_stride.tolist(),
        runs.destination_offset.tolist(),
        runs.destination_stride.tolist(),
        runs.length.tolist(),
        runs.count.tolist(),
        strict=True,
    ):
        _pieces(written, to, to_stride, length, count)[...] = _pieces(read, at, stride, length, count)


def _pieces(memory: npt.NDArray[np.uint8], at: int, stride: int, length: int, count: int) -> npt.NDArray[np.uint8]:
    return np.ndarray((count, length), np.uint8, memory.data, at, (stride, 1))


def _bytes_of(region: Region) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_ubyte * region.length_bytes).from_address(region.address))
