"""Where the bytes of a load land: in vLLM's own pages or, if the source cuts its blocks differently, in pages of the
source's layout that are then converted into ours.

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
from kvxfer.connectors.vllm.pages import LayerStorage, cut_stores
from kvxfer.errors import LimitExceededError
from kvxfer.layout.convertible import is_convertible
from kvxfer.layout.kv_layout import KvLayout, KvPart
from kvxfer.layout.plan import plan_transfer
from kvxfer.protocol.handshake import check, compare
from kvxfer.transport.base import Region, allocate_region
from kvxfer.types import CompatibilityRecord, Exposure, Member, PoolRecord, Segment


@dataclasses.dataclass(frozen=True)
class HeadShare:
    """How both engines divide the model's heads: equally among their tensor ranks. Ours is ``rank`` of ``ranks``."""

    source_rank: int = 0
    sources: int = 1
    rank: int = 0
    ranks: int = 1


@dataclasses.dataclass(frozen=True)
class Landing:
    """Pools, pages and blocks that a load is pulled into, in blocks of the source: ``blocks`` are ``first`` and those
    after it of the prompt. ``layers``: their places among those of our rank."""

    pools: tuple[Pool, ...]
    stores: tuple[LayerStorage, ...]
    layers: range
    first: int
    blocks: Sequence[int]
    cut: HeadShare
    is_staged: bool

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


class Staging:
    """Landings of one rank. ``bytes_max`` bounds the memory of those that are staged; loads wait for their turn."""

    def __init__(self, agent: Agent, pools: tuple[Pool, ...], stores: tuple[LayerStorage, ...], bytes_max: int) -> None:
        self._agent = agent
        self._pools = pools
        self._stores = stores
        self._bytes_max = bytes_max
        self._bytes = 0
        self._room = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def land(
        self,
        source: Member,
        cut: HeadShare,
        first: int,
        blocks: tuple[int, ...],
        tokens: int,
        *,
        layers: range,
        is_one_of_several: bool,
    ) -> AsyncIterator[Landing]:
        """Where ``blocks`` of a prompt of ``tokens`` tokens, from our ``first``-th on, land when they come from
        ``source``, of those ``layers`` of our rank. ``is_one_of_several``: the load has other sources too. Leave it
        when nothing can land any more.

        Raises IncompatibleError, naming the fields that differ; LimitExceededError where staging has no room for so
        much.
        """
        theirs = nearest(self._pools[0].published, source)
        if not compare(self._pools[0].published, theirs):
            yield self.in_place(first, blocks, layers, cut)
            return
        ours = self._pools[0].published
        if len(self._pools) > 1 or not is_convertible(ours, theirs, ranks=cut.ranks, sources=cut.sources):
            check(ours, theirs)
        start = first * self._pools[0].record.block_tokens // theirs.record.block_tokens
        count = blocks_for(tokens, theirs.record.block_tokens) - start
        size = len(layers) * count * theirs.block_bytes
        if size > self._bytes_max:
            raise LimitExceededError(f"the prompt takes {size} bytes of staging_bytes {self._bytes_max}")
        async with self._room:
            if is_one_of_several and self._bytes + size > self._bytes_max:  # to wait holding some would be for ever
                raise LimitExceededError("staging_bytes are in use, and a load of several sources does not wait")
            await self._room.wait_for(lambda: self._bytes + size <= self._bytes_max)
            self._bytes += size
        try:
            pool = self._agent.register_pool(
                theirs.record,
                await _allocate(size),
                block_count=len(layers) * count,
                segments=(Segment(0, theirs.block_bytes, theirs.block_bytes),),
                exposure=Exposure.GRANT,
                checksum=self._pools[0].checksum,
                is_published=False,
            )
            try:
                steps, firsts = np.ones(len(layers), np.int64), np.arange(len(layers), dtype=np.int64) * count
                store = LayerStorage(pool.region, len(layers) * count, 0, firsts, steps)
                yield Landing((pool,), (store,), layers, start, range(count), cut, is_staged=True)
            finally:
                self._agent.remove_pool(pool)
        finally:
            async with self._room:
                self._bytes -= size
                self._room.notify_all()

    def is_alike(self, source: Member) -> bool:
        """Whether bytes from that source land in their final place."""
        return bool(source.pools) and not compare(self._pools[0].published, nearest(self._pools[0].published, source))

    def in_place(self, first: int, blocks: tuple[int, ...], layers: range, cut: HeadShare | None = None) -> Landing:
        """Where ``blocks`` land from a source with the same layout that has all the heads of our rank."""
        parts = [(pool, store) for _, pool, store in cut_stores(self._pools, self._stores, layers)]
        pools, stores = tuple(pool for pool, _ in parts), tuple(store for _, store in parts)
        return Landing(pools, stores, layers, first, blocks, cut or HeadShare(), is_staged=False)

    def unpack(self, landing: Landing, first: int, blocks: tuple[int, ...], tokens: int) -> None:
        """Convert the staged pages into ours: tokens of our ``first``-th block and those after it. From any thread."""
        record, theirs = self._pools[0].record, landing.pools[0].record
        own = self._stores[0].cut(landing.layers)
        assert own is not None, "a landing has layers"
        repack(
            landing.stores[0],
            theirs,
            landing.blocks,
            landing.first * theirs.block_tokens,
            own,
            record,
            blocks,
            first * record.block_tokens,
            range(first * record.block_tokens, tokens),
            landing.cut,
        )


async def _allocate(size: int) -> Region:
    """Memory, allocated off the loop: a GiB takes most of a second, in which peers would hear nothing. If cancelled, it
    ends only once the allocation has."""
    making = asyncio.create_task(asyncio.to_thread(allocate_region, size))
    try:
        return await asyncio.shield(making)
    finally:
        await asyncio.wait({making})


def nearest(ours: PoolRecord, source: Member) -> PoolRecord:
    """The pool of ``source`` that is most like ours."""
    return min(source.pools, key=lambda theirs: len(compare(ours, theirs)))


def layout_of(store: LayerStorage, record: CompatibilityRecord, head_offset: int, total_heads: int) -> KvLayout:
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
        block_count=store.blocks,
        heads=heads,
        head_offset=head_offset,
        total_heads=total_heads,
    )


def repack(
    source: LayerStorage,
    source_record: CompatibilityRecord,
    source_blocks: Sequence[int],
    source_start: int,
    destination: LayerStorage,
    destination_record: CompatibilityRecord,
    destination_blocks: Sequence[int],
    destination_start: int,
    tokens: range,
    cut: HeadShare,
) -> None:
    """Copy ``tokens`` of the heads that both have between pages of two kinds, in host memory. From any thread.

    ``source_start`` is the token in the first slot of the first of ``source_blocks``; ``destination_start`` likewise.
    """
    ours, theirs = destination_record.kv_heads, source_record.kv_heads
    offsets, total = (cut.source_rank * theirs, cut.rank * ours), cut.ranks * ours
    if ours == theirs:  # the same heads, on whatever rank
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
