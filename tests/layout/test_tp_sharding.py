"""Which rank pulls which shard: a model that is sharded one way must be whole again when it is sharded another way."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import IncompatibleError, InvalidArgumentError
from kvxfer.layout.axes import layout_from_axes
from kvxfer.layout.kv_layout import Holding, KvLayout
from kvxfer.layout.plan import plan_transfer
from kvxfer.layout.tp_sharding import SourceShard, choose_sources, count_readers, tp_heads

TOKENS = 13
DIMS = 3
AXES = ["LBHNKD", "LBNHKD", "BLHNKD", "LBHKND", "LKBNHD", "BLKHND"]


@dataclasses.dataclass(frozen=True)
class Engine:
    """Ranks of one engine: pipeline stages times tensor parallel ranks, each with a pool of its own."""

    layouts: dict[int, KvLayout]
    blocks: list[int]

    def holdings(self) -> dict[int, Holding]:
        return {rank: layout.holding for rank, layout in self.layouts.items()}


@st.composite
def engines(draw: st.DrawFn, total_heads: int, layers: int) -> Engine:
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if total_heads % n == 0 or n % total_heads == 0]))
    stages = draw(st.sampled_from([1, 2]))
    axes = draw(st.sampled_from(AXES))
    block_tokens = draw(st.sampled_from([1, 4, 6, 16]))
    transposed = ("k",) if axes.endswith("ND") and draw(st.booleans()) else ()
    layouts = {}
    for stage in range(stages):
        for rank in range(tp):
            heads = tp_heads(total_heads, tp, rank)
            layouts[stage * tp + rank] = layout_from_axes(
                axes,
                layers=range(stage * layers // stages, (stage + 1) * layers // stages),
                block_tokens=block_tokens,
                block_count=20,
                heads=len(heads),
                dims=DIMS,
                dtype_bytes=2,
                head_offset=heads.start,
                total_heads=total_heads,
                transposed=transposed,
            )
    blocks = draw(st.permutations(range(20)))[: -(-TOKENS // block_tokens)]
    return Engine(layouts, blocks)


def element(layout: KvLayout, blocks: list[int], layer: int, part: int, token: int, head: int) -> npt.NDArray[np.int64]:
    """First bytes of the dims of one head of one token, (DIMS,)."""
    strides = layout.parts[part]
    offset = layout.offsets[layout.layers.index(layer)][part]
    offset += blocks[token // layout.block_tokens] * strides.block_stride
    offset += token % layout.block_tokens * strides.token_stride + (head - layout.head_offset) * strides.head_stride
    return offset + np.arange(DIMS) * strides.dim_stride


def values(layer: int, part: int, token: int, head: int) -> npt.NDArray[np.uint16]:
    """What every rank that holds it must have there."""
    first = (((layer * 2 + part) * TOKENS + token) * 8 + head) * DIMS
    return np.arange(first, first + DIMS, dtype=np.uint16)


def places(layout: KvLayout) -> list[tuple[int, int, int, int]]:
    heads = range(layout.head_offset, layout.head_offset + layout.heads)
    return [(la, part, t, h) for la in layout.layers for part in (0, 1) for t in range(TOKENS) for h in heads]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_choose_sources_between_random_engines_covers_every_rank(data: st.DataObject) -> None:
    total_heads, layers = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([2, 3]))
    prefill, decode = data.draw(engines(total_heads, layers)), data.draw(engines(total_heads, layers))
    pools = {}
    for rank, layout in prefill.layouts.items():
        pools[rank] = np.zeros(layout.reach[0], np.uint8)
        for where in places(layout):
            at = element(layout, prefill.blocks, *where)
            pools[rank][at[:, None] + np.arange(2)] = values(*where).view(np.uint8).reshape(DIMS, 2)

    for rank, layout in decode.layouts.items():
        pool = np.full(layout.reach[0], 0xA5, np.uint8)
        moved = 0
        for shard in choose_sources(layout.holding, prefill.holdings(), destination_rank=rank):
            plan = plan_transfer(
                prefill.layouts[shard.source],
                layout,
                prefill.blocks,
                decode.blocks,
                range(TOKENS),
                shard.layers,
                heads=shard.heads,
            )
            moved += plan.bytes
            runs = plan.runs
            for i in range(plan.count):
                index = np.arange(runs.count[i], dtype=np.uint64)[:, None]
                inner = np.arange(runs.length[i], dtype=np.uint64)
                source = runs.source_offset[i] + index * runs.source_stride[i] + inner
                pool[runs.destination_offset[i] + index * runs.destination_stride[i] + inner] = pools[shard.source][
                    source
                ]
        assert moved == TOKENS * layout.bytes_per_token
        for where in places(layout):
            at = element(layout, decode.blocks, *where)
            np.testing.assert_array_equal(pool[at[:, None] + np.arange(2)].reshape(-1).view(np.uint16), values(*where))


def ranks(total_heads: int, size: int, layers: tuple[int, ...] = (0, 1)) -> dict[int, Holding]:
    held = {rank: tp_heads(total_heads, size, rank) for rank in range(size)}
    return {rank: Holding(layers, heads.start, len(heads), total_heads) for rank, heads in held.items()}


def test_choose_sources_with_fewer_sources_splits_each_source() -> None:
    sources, destinations = ranks(8, 2), ranks(8, 4)
    found = [choose_sources(held, sources, destination_rank=rank) for rank, held in destinations.items()]
    assert [[(shard.source, shard.heads) for shard in shards] for shards in found] == [
        [(0, range(0, 2))],
        [(0, range(2, 4))],
        [(1, range(4, 6))],
        [(1, range(6, 8))],
    ]
    assert [count_readers(rank, sources, destinations) for rank in sources] == [2, 2]


def test_choose_sources_with_more_sources_takes_several() -> None:
    sources, destinations = ranks(8, 4), ranks(8, 2)
    assert choose_sources(destinations[1], sources, destination_rank=1) == (
        SourceShard(2, (0, 1), range(4, 6)),
        SourceShard(3, (0, 1), range(6, 8)),
    )
    assert [count_readers(rank, sources, destinations) for rank in sources] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("total_heads", "source_size", "destination_size"), [(1, 4, 4), (1, 4, 8), (2, 8, 4), (2, 4, 8)]
)
def test_choose_sources_of_replicas_balances_readers(total_heads: int, source_size: int, destination_size: int) -> None:
    """MLA latents (one head), and more ranks than heads: every source serves equally many."""
    sources, destinations = ranks(total_heads, source_size), ranks(total_heads, destination_size)
    served = [count_readers(rank, sources, destinations) for rank in sources]
    used = [times for times in served if times]
    assert sum(served) == destination_size
    assert max(used) - min(used) == 0
    assert len(used) == min(source_size, destination_size)


def test_choose_sources_over_pipeline_stages_takes_each_layer_from_its_stage() -> None:
    stages = {0: Holding((0, 1), 0, 2, 2), 1: Holding((2, 3), 0, 2, 2)}
    assert choose_sources(Holding((1, 2), 1, 1, 2), stages) == (
        SourceShard(0, (1,), range(1, 2)),
        SourceShard(1, (2,), range(1, 2)),
    )


def test_choose_sources_of_missing_layers_or_heads_raises_with_the_field() -> None:
    with pytest.raises(IncompatibleError, match="layer 5") as error:
        choose_sources(Holding((0, 5), 0, 2, 2), ranks(2, 1))
    assert error.value.field == "layers"
    with pytest.raises(IncompatibleError, match="head 1 of layer 0") as error:
        choose_sources(Holding((0,), 0, 2, 2), {0: Holding((0,), 0, 1, 2)})
    assert error.value.field == "heads"
    with pytest.raises(IncompatibleError, match="rank 0 knows 2") as error:
        choose_sources(Holding((0,), 0, 2, 4), ranks(2, 1))
    assert error.value.field == "total_heads"


@pytest.mark.parametrize(("heads", "size", "rank"), [(6, 4, 0), (4, 6, 0), (4, 2, 2), (0, 1, 0)])
def test_tp_heads_of_uneven_sizes_raises(heads: int, size: int, rank: int) -> None:
    with pytest.raises(InvalidArgumentError, match="tp_"):
        tp_heads(heads, size, rank)
