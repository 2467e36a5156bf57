"""Pages of one block size made into another's, against the tensors' own indexing; and what is refused instead."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.agent import Agent
from kvxfer.connectors.vllm import staging as staging_module
from kvxfer.connectors.vllm.pages import LayerStorage
from kvxfer.connectors.vllm.shares import ranks_read
from kvxfer.connectors.vllm.staging import HeadShare, Staging, repack
from kvxfer.errors import IncompatibleError, LimitExceededError
from kvxfer.transport.base import Region, allocate_region
from kvxfer.types import (
    AgentRef,
    ChecksumMode,
    CompatibilityRecord,
    DataAddress,
    Exposure,
    Incarnation,
    Member,
    PoolRecord,
    Role,
    WorkerInfo,
)

LAYERS, HEADS, DIMS, TOKENS = 2, 2, 8, 96
RECORD = CompatibilityRecord("m", "", "", "f32", LAYERS, HEADS, DIMS, 16, "page:HNC", "isa vec", "", "CPU_ATTN")


@dataclasses.dataclass
class Cache:
    """One engine's: [page][head][keys [dim][token], values [token][dim]]."""

    store: LayerStorage
    record: CompatibilityRecord
    pages: npt.NDArray[np.float32]

    def element(self, layer: int, block: int, head: int, slot: int) -> tuple[npt.NDArray[np.float32], ...]:
        page = self.pages[int(self.store.first[layer] + block * self.store.step[layer]), head]
        tokens = self.record.block_tokens
        keys, values = page[: DIMS * tokens].reshape(DIMS, tokens), page[DIMS * tokens :].reshape(tokens, DIMS)
        return keys[:, slot], values[slot]


def cache(block_tokens: int, *, is_block_major: bool = False, seed: int | None = None, heads: int = HEADS) -> Cache:
    blocks = 2 * TOKENS // block_tokens
    shape = (LAYERS * blocks, heads, 2 * block_tokens * DIMS)
    draw = np.random.default_rng(seed)
    pages = np.zeros(shape, np.float32) if seed is None else draw.random(shape, np.float32)
    first = np.arange(LAYERS, dtype=np.int64) * (1 if is_block_major else blocks)
    step = np.full(LAYERS, LAYERS if is_block_major else 1, np.int64)
    region = Region(pages.ctypes.data, pages.nbytes, pages)
    record = dataclasses.replace(RECORD, block_tokens=block_tokens, kv_heads=heads)
    return Cache(LayerStorage(region, len(pages), 0, first, step), record, pages)


@given(
    sizes=st.sampled_from([(4, 16), (16, 4), (8, 32), (32, 8), (12, 16)]),
    is_block_major=st.tuples(st.booleans(), st.booleans()),
    tokens=st.integers(1, TOKENS),
    skipped=st.integers(0, 5),
    draw=st.data(),
)
def test_every_element_is_the_same(
    sizes: tuple[int, int], is_block_major: tuple[bool, bool], tokens: int, skipped: int, draw: st.DataObject
) -> None:
    source = cache(sizes[0], is_block_major=is_block_major[0], seed=1)
    destination = cache(sizes[1], is_block_major=is_block_major[1])
    begin = skipped * sizes[1]
    if begin >= tokens:
        begin = 0
    start = begin // sizes[0]
    ours = draw.draw(st.permutations(range(2 * TOKENS // sizes[0])))[: -(-tokens // sizes[0]) - start]
    theirs = draw.draw(st.permutations(range(2 * TOKENS // sizes[1])))[: -(-tokens // sizes[1]) - begin // sizes[1]]
    repack(
        source.store,
        source.record,
        ours,
        start * sizes[0],
        destination.store,
        destination.record,
        theirs,
        begin,
        range(begin, tokens),
        HeadShare(),
    )
    for token in range(begin, tokens):
        at, to = token - start * sizes[0], token - begin
        for layer in range(LAYERS):
            for head in range(HEADS):
                wanted = source.element(layer, ours[at // sizes[0]], head, at % sizes[0])
                got = destination.element(layer, theirs[to // sizes[1]], head, to % sizes[1])
                assert all((a == b).all() for a, b in zip(wanted, got, strict=True))
    untouched = np.ones(len(destination.pages), bool)
    for layer in range(LAYERS):
        untouched[destination.store.first[layer] + np.asarray(theirs) * destination.store.step[layer]] = False
    assert not destination.pages[untouched].any()


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 16), (16, 4)])
def test_heads_go_where_their_rank_is(ours: int, theirs: int, sizes: tuple[int, int]) -> None:
    """Of a model of six heads, from ``theirs`` ranks to ``ours``."""
    total = 6
    sources = [cache(sizes[0], seed=rank, heads=total // theirs) for rank in range(theirs)]
    destinations = [cache(sizes[1], heads=total // ours) for _ in range(ours)]
    table = [list(range(TOKENS // size)) for size in sizes]
    for rank, destination in enumerate(destinations):
        for source_rank in ranks_read(rank, ours, theirs):
            source = sources[source_rank]
            repack(
                source.store,
                source.record,
                table[0],
                0,
                destination.store,
                destination.record,
                table[1],
                0,
                range(TOKENS),
                HeadShare(source_rank, theirs, rank, ours),
            )
    for token in range(TOKENS):
        for layer in range(LAYERS):
            for head in range(total):
                block, slot = divmod(token, sizes[0])
                wanted = sources[head * theirs // total].element(layer, block, head % (total // theirs), slot)
                block, slot = divmod(token, sizes[1])
                got = destinations[head * ours // total].element(layer, block, head % (total // ours), slot)
                assert all((a == b).all() for a, b in zip(wanted, got, strict=True))


ALONE = HeadShare()


def pool_of(record: CompatibilityRecord) -> PoolRecord:
    page = 2 * record.kv_heads * record.block_tokens * record.head_dim * 4
    return PoolRecord(1, record, 64, page, Exposure.POOL, is_shareable=False)


def member(record: CompatibilityRecord) -> Member:
    return Member(
        AgentRef("p", Incarnation(1, bytes(16))),
        WorkerInfo("p", Role.PREFILL, "m", ""),
        DataAddress("127.0.0.1", 1, "", "h"),
        (pool_of(record),),
    )


@contextlib.asynccontextmanager
async def staging_of(bytes_max: int = 1 << 30) -> AsyncIterator[Staging]:
    ours = cache(RECORD.block_tokens)
    agent = Agent(WorkerInfo("d", Role.DECODE, "m", ""))
    pool = agent.register_pool(
        RECORD, ours.store.region, block_count=ours.store.page_count, checksum=ChecksumMode.SAMPLED
    )
    async with agent:
        yield Staging(agent, (pool,), (ours.store,), bytes_max)
        assert agent.pools == (pool,)


async def land(theirs: CompatibilityRecord, cut: HeadShare = ALONE, *, bytes_max: int = 1 << 30) -> bool:
    async with (
        staging_of(bytes_max) as staging,
        staging.land(
            member(theirs), cut, 1, (3, 4), 40, layers=range(LAYERS), is_one_of_several=cut.sources > 1
        ) as landing,
    ):
        assert {pool.checksum for pool in landing.pools} == {ChecksumMode.SAMPLED}
        assert [pool.is_published for pool in landing.pools] == [not landing.is_staged]
        return landing.is_staged


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_heads", 1),
        ("head_dim", 16),
        ("dtype", "bf16"),
        ("axes", "page:NHC"),
        ("axes", "page:HNC:1+1"),
        ("packing", "isa amx"),
    ],
)
@pytest.mark.parametrize("block_tokens", [16, 32])
async def test_layout_that_cannot_be_converted_is_refused_by_name(field: str, value: object, block_tokens: int) -> None:
    theirs = dataclasses.replace(RECORD, block_tokens=block_tokens, **cast("dict[str, int]", {field: value}))
    with pytest.raises(IncompatibleError, match=field):
        await land(theirs)


async def test_heads_that_add_up_are_staged() -> None:
    theirs = dataclasses.replace(RECORD, kv_heads=1)
    assert await land(theirs, HeadShare(1, 2, 0, 1))
    assert await land(dataclasses.replace(RECORD, kv_heads=4), HeadShare(0, 1, 1, 2))
    with pytest.raises(IncompatibleError, match="kv_heads"):
        await land(theirs, HeadShare(0, 4, 0, 1))


async def test_another_block_size_is_staged_where_there_is_room() -> None:
    assert not await land(RECORD)
    theirs = dataclasses.replace(RECORD, block_tokens=32, packing="isa vec16")
    assert await land(theirs)
    with pytest.raises(LimitExceededError, match="staging_bytes"):
        await land(theirs, bytes_max=4096)


async def test_the_loop_goes_on_while_memory_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()

    def slowly(length_bytes: int) -> Region:
        assert may_go_on.wait(10.0)
        return allocate_region(length_bytes)

    monkeypatch.setattr(staging_module, "allocate_region", slowly)
    theirs = dataclasses.replace(RECORD, block_tokens=32)
    async with staging_of() as staging, contextlib.AsyncExitStack() as stack:
        landing = staging.land(member(theirs), ALONE, 1, (3, 4), 40, layers=range(LAYERS), is_one_of_several=False)
        given_up = asyncio.create_task(stack.enter_async_context(landing))
        await asyncio.sleep(0.05)  # on the loop, which the memory would hold up
        given_up.cancel()
        await asyncio.sleep(0.05)
        assert staging._bytes > 0  # until it is not being made any more
        may_go_on.set()
        await asyncio.wait({given_up})
        assert given_up.cancelled()
        assert staging._bytes == 0
