"""How short a plan is where it must be short, what is refused and by which name, and how long it takes to make one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import IncompatibleError, InvalidArgumentError, LimitExceededError
from kvxfer.layout.axes import layout_from_axes
from kvxfer.layout.kv_layout import KvLayout, KvPart
from kvxfer.layout.plan import LayoutPlan, plan_transfer

BASE: dict[str, Any] = dict(layers=range(4), block_tokens=16, block_count=100, heads=2, dims=8, dtype_bytes=2)
BLOCK_BYTES = 4 * 2 * 2 * 16 * 8 * 2
SCATTERED = np.array([7, 3, 40, 11, 90, 5])


def layout(axes: str, **changes: Any) -> KvLayout:
    return layout_from_axes(axes, **{**BASE, **changes})


def shape_of(plan: LayoutPlan) -> list[tuple[int, int]]:
    """(length, count) of each run."""
    return list(zip(plan.runs.length.tolist(), plan.runs.count.tolist(), strict=True))


def test_plan_of_scattered_contiguous_blocks_has_one_run_a_block() -> None:
    pool = layout("BLKHND")
    plan = plan_transfer(pool, pool, SCATTERED, SCATTERED[::-1])
    assert shape_of(plan) == [(BLOCK_BYTES, 1)] * 6
    ranges = plan.as_indexed_ranges()
    assert ranges.source.tolist() == ranges.destination.tolist() == [[0, 0, BLOCK_BYTES, BLOCK_BYTES, 100]]
    pairs = set(zip(SCATTERED.tolist(), SCATTERED[::-1].tolist(), strict=True))
    assert set(zip(ranges.source_indices.tolist(), ranges.destination_indices.tolist(), strict=True)) == pairs
    assert plan.bytes == 6 * BLOCK_BYTES


def test_plan_of_neighbouring_blocks_is_one_run_in_either_order() -> None:
    pool = layout("BLKHND")
    up, down = np.arange(10, 20), np.arange(10, 20)[::-1]
    assert shape_of(plan_transfer(pool, pool, up, up + 50)) == [(10 * BLOCK_BYTES, 1)]
    assert shape_of(plan_transfer(pool, pool, down, down + 50)) == [(10 * BLOCK_BYTES, 1)]
    assert shape_of(plan_transfer(pool, pool, up, down)) == [(BLOCK_BYTES, 1)] * 10, "neighbours at one side only"


def test_plan_of_blocks_at_equal_steps_is_one_run() -> None:
    pool = layout("BLKHND")
    plan = plan_transfer(pool, pool, np.arange(0, 40, 2), np.arange(20))
    assert shape_of(plan) == [(BLOCK_BYTES, 20)]
    assert plan.runs.source_stride[0] == 2 * BLOCK_BYTES
    # One layer of neighbouring blocks: as many descriptors, one run.
    assert shape_of(plan_transfer(pool, pool, np.arange(20), np.arange(20), layers=[2])) == [(BLOCK_BYTES // 4, 20)]


def test_plan_of_two_progressions_takes_their_common_block_once() -> None:
    pool = layout("BLKHND")
    blocks = np.array([0, 2, 4, 6, 9, 12, 15, 17, 18])
    plan = plan_transfer(pool, pool, blocks, blocks)
    assert shape_of(plan) == [(BLOCK_BYTES, 4), (BLOCK_BYTES, 3), (2 * BLOCK_BYTES, 1)]


def test_plan_of_layer_major_pool_steps_through_layers() -> None:
    """Scattered blocks of a layer-major pool: one run a block, which steps through keys, values and layers."""
    pool = layout("LKBNHD")
    plan = plan_transfer(pool, pool, SCATTERED, SCATTERED)
    assert shape_of(plan) == [(BLOCK_BYTES // 8, 8)] * 6
    many = np.random.default_rng(1).permutation(100)[:50]
    assert len(plan_transfer(pool, pool, many, many[::-1]).as_indexed_ranges().source) == 8, (
        "indices into the pool are shorter here"
    )


def test_plan_of_one_region_a_layer_has_one_run_a_region() -> None:
    pool = layout("BNHD", regions=range(8))
    plan = plan_transfer(pool, pool, np.arange(5), np.arange(5) + 1)
    assert shape_of(plan) == [(5 * BLOCK_BYTES // 8, 1)] * 8
    assert sorted(plan.runs.source_region.tolist()) == list(range(8))


def test_plan_of_half_the_heads_is_contiguous_or_one_step_a_token() -> None:
    """Half of the heads: contiguous where heads are outside of tokens, a step a token where they are within."""
    for axes, each in (("LBHNKD", (16 * 2 * 8 * 2, 4)), ("LBNHKD", (2 * 8 * 2, 16))):
        whole = layout(axes)
        half = layout(axes, heads=1, head_offset=1, total_heads=2)
        plan = plan_transfer(whole, half, SCATTERED, SCATTERED)
        assert set(shape_of(plan)) == {each}
        assert plan.bytes == 6 * BLOCK_BYTES // 2


def test_plan_from_separate_to_adjacent_keys_and_values_has_one_run_a_plane() -> None:
    """The heads of all tokens are one progression, over the blocks too."""
    apart, beside = layout("LKBNHD"), layout("LBNHKD")
    plan = plan_transfer(apart, beside, np.arange(4), np.arange(4) + 3)
    assert shape_of(plan) == [(8 * 2, 4 * 16 * 2)] * 8


def test_plan_between_block_sizes_of_token_major_pools_is_one_run_a_region() -> None:
    """Token-major pools care for no block size: neighbouring blocks are one run, partial ones too."""
    small, large = layout("BNHD", regions=range(8), block_tokens=12), layout("BNHD", regions=range(8), block_tokens=16)
    plan = plan_transfer(small, large, np.arange(20, 28), np.arange(6), range(0, 91))
    assert shape_of(plan) == [(91 * 2 * 8 * 2, 1)] * 8


def test_plan_after_a_prefix_hit_takes_the_tail_only() -> None:
    pool = layout("BLKHND")
    blocks = np.array([4, 9, 2])
    plan = plan_transfer(pool, pool, blocks, [50], range(32, 48), destination_start=32)
    assert plan.runs.source_offset.tolist() == [2 * BLOCK_BYTES]
    assert plan.runs.destination_offset.tolist() == [50 * BLOCK_BYTES]
    assert plan_transfer(pool, pool, blocks, [50], destination_start=32).bytes == BLOCK_BYTES, "what both lists hold"


def test_plan_without_tokens_is_empty() -> None:
    pool = layout("BLKHND")
    for plan in (
        plan_transfer(pool, pool, [1, 2], [], range(0)),
        plan_transfer(pool, pool, [], []),
        LayoutPlan.join([]),
    ):
        assert (plan.bytes, plan.count, plan.descriptor_count) == (0, 0, 0)
        assert plan.as_indexed_ranges().source.shape == (0, 5)
        assert len(plan.runs.length) == 0


def test_plan_join_keeps_the_order() -> None:
    full, window = layout("BLKHND"), layout("BLKHND", layers=[4], regions=[1])
    plan = LayoutPlan.join([plan_transfer(full, full, [3, 8], [1, 5]), plan_transfer(window, window, [7], [2])])
    assert plan.runs.source_region.tolist() == [0, 0, 1]
    ranges = plan.as_indexed_ranges()
    assert ranges.source.shape == (2, 5)
    assert ranges.source_indices.tolist() == [3, 8, 107]
    assert ranges.destination_indices.tolist() == [1, 5, 102]


def test_plan_of_transposed_keys_takes_whole_blocks_or_one_step_a_dim() -> None:
    """Whole blocks of CPU_ATTN are plain bytes, other block sizes a step a dim; that is the case NIXL gets wrong."""
    wide, narrow = (
        layout("LBHKND", transposed=["k"], block_tokens=tokens, dtype_bytes=4, dims=64) for tokens in (128, 32)
    )
    assert shape_of(plan_transfer(wide, wide, [3], [9])) == [(2 * 2 * 128 * 64 * 4, 4)]
    keys_and_values = shape_of(plan_transfer(narrow, wide, [1, 7, 3, 2], [9], layers=[0]))
    assert set(keys_and_values) == {(32 * 4, 64), (32 * 64 * 4, 2)}


def test_plan_of_packed_blocks_moves_whole_blocks_or_raises() -> None:
    amx = layout("LBHKND", packing="cpu_attn/amx")
    assert plan_transfer(amx, amx, [3, 4], [8, 9]).bytes == 2 * BLOCK_BYTES
    assert plan_transfer(amx, layout("LBHKND", packing="cpu_attn/amx", heads=1, total_heads=2), [3], [8]).count
    with pytest.raises(InvalidArgumentError, match=r"tokens: 0 to 16 cut a block"):
        plan_transfer(amx, amx, [3, 4], [8, 9], range(17))
    for other, field in (
        (layout("LBHKND"), "packing"),
        (layout("LBHKND", packing="cpu_attn/amx", block_tokens=8), None),
    ):
        with pytest.raises(IncompatibleError) as error:
            plan_transfer(amx, other, [3], [8])
        assert error.value.field == (field or "block_tokens")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"total_heads": 4}, "total_heads"),
        ({"parts": ["latent"]}, "parts"),
        ({"dims": 4}, "k.dims"),
        ({"dims": [8, 4]}, "v.dims"),
        ({"dtype_bytes": 1}, "k.dtype_bytes"),
        ({"layers": [7]}, "layers"),
    ],
)
def test_plan_of_incompatible_pools_raises_with_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(IncompatibleError, match=field) as error:
        plan_transfer(layout("LBHNKD"), layout("LBHNKD", **changes), [1], [1])
    assert error.value.field == field
    sliced = [layout("LBHNKD", heads=1, head_offset=offset, total_heads=2) for offset in (0, 1)]
    with pytest.raises(IncompatibleError, match="heads") as error:
        plan_transfer(sliced[0], sliced[1], [1], [1])
    assert error.value.field == "heads"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"source_blocks": [100]}, "source_blocks: block 100 .* of 100"),
        ({"destination_blocks": [2, -1]}, "destination_blocks: block -1"),
        ({"source_blocks": [1.5]}, "source_blocks: .* whole numbers"),
        ({"source_blocks": [[1]]}, "source_blocks: .* one dimension"),
        ({"destination_blocks": [4, 4]}, "destination_blocks: block 4 is named twice"),
        ({"tokens": range(0, 33)}, "tokens: 0 to 32 are not all in source_blocks"),
        ({"tokens": range(0, 32, 2)}, "tokens: .* leaves some out"),
        ({"tokens": range(0, 32), "source_start": 16}, "tokens: .* source_blocks, which hold tokens 16 to 47"),
        ({"destination_start": -1}, "destination_blocks: the first token -1"),
        ({"layers": [9]}, "layers: the source does not hold layer 9"),
        ({"layers": []}, "layers: at least one"),
        ({"layers": [1, 1]}, "layers: .* each once"),
        ({"heads": range(0, 3)}, "heads: .* heads 0 to 1"),
        ({"heads": range(1, 1)}, "heads"),
    ],
)
def test_plan_with_wrong_arguments_raises_with_the_argument(arguments: dict[str, Any], words: str) -> None:
    pool = layout("BLKHND")
    call: dict[str, Any] = {"source_blocks": [3, 4], "destination_blocks": [5, 6], **arguments}
    with pytest.raises(InvalidArgumentError, match=words):
        plan_transfer(pool, pool, **call)


def test_indexed_ranges_past_the_largest_index_raise() -> None:
    """Element by element, 2^32 of them: the plan itself is small, the lists of descriptors are refused."""
    sizes = {"layers": [0], "heads": 1, "dims": 1 << 16, "block_tokens": 1 << 16, "block_count": 1, "dtype_bytes": 1}
    plain = layout("BHND", parts=["k"], **sizes)
    turned = layout("BHND", parts=["k"], transposed=["k"], **sizes)
    plan = plan_transfer(plain, turned, [0], [0])
    assert (plan.descriptor_count, plan.count) == (1 << 32, 1 << 16)
    with pytest.raises(LimitExceededError, match="4294967296 descriptors"):
        plan.as_indexed_ranges()


def test_plan_with_a_source_block_twice_reads_it_twice() -> None:
    pool = layout("BLKHND")
    assert plan_transfer(pool, pool, [4, 4], [5, 6]).bytes == 2 * BLOCK_BYTES


def median_ms(make: Callable[[], object]) -> float:
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        make()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[2] * 1e3


def test_plan_of_100_000_blocks_takes_under_half_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    """The bars are 10 and 50 ms on an idle machine; only a plan that loops over blocks would miss these."""
    rng = np.random.default_rng(0)
    many = rng.permutation(200_000)
    pool = layout("BLKHND", block_count=200_000)
    equal = median_ms(lambda: plan_transfer(pool, pool, many[:100_000], many[100_000:]).as_indexed_ranges())

    some = rng.permutation(20_000)
    ours = layout("LBHNKD", block_count=20_000, heads=8, dims=128, layers=[0])
    theirs = layout("LBNHKD", block_count=20_000, heads=4, total_heads=8, dims=128, layers=[0])
    sliced = median_ms(lambda: plan_transfer(ours, theirs, some[:10_000], some[10_000:]).as_indexed_ranges())
    with capsys.disabled():
        print(f"\n100,000 equal blocks {equal:.1f} ms; 10,000 blocks HND to NHD, half of the heads, {sliced:.1f} ms")
    assert equal < 500
    assert sliced < 500


def test_kv_layout_with_overlaps_raises_with_the_field() -> None:
    sound = layout("BLKHND")
    k, v = sound.parts
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"parts": (KvPart("k", 8, 2, k.block_stride, 8, 256, 2), v)}, "k.token_stride: 8 is less than the 16"),
        ({"parts": (k, KvPart("v", 8, 2, 2048, 16, 256, 2))}, "offsets: k of layer 0 and v of layer 0"),
        ({"parts": (k, KvPart("v", 8, 2, 100, 16, 256, 2))}, "v.block_stride: 100"),
        ({"parts": (k, k)}, "parts"),
        ({"parts": (k, KvPart("v", 0, 2, v.block_stride, 16, 256, 2))}, "v.dims"),
        ({"parts": (k, KvPart("v", 8, 2, v.block_stride, 16, -256, 2))}, "v.head_stride"),
        ({"offsets": ((0, 512), (1024, 1024), (2048, 2560), (3072, 3584))}, "k of layer 1 and v of layer 1 overlap"),
        ({"offsets": ((0, 512), (1024, 1536), (2048, 2560), (4100, 3584))}, "k of layer 0 and k of layer 3 overlap"),
        ({"offsets": ((0, 512),)}, "offsets: one row a layer"),
        ({"regions": ((0,),) * 4}, "regions: one row a layer"),
        ({"regions": ((0, -1),) * 4}, "regions: every one"),
        ({"layers": (0, 1, 1, 2)}, "layers: a layer is named twice"),
        ({"layers": ()}, "layers: at least one"),
        ({"layers": (0, 1, 2, -3)}, "layers: -3"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_count": -1}, "block_count"),
        ({"heads": 0}, "heads"),
        ({"head_offset": 1}, "head_offset"),
    ]
    good = {name: getattr(sound, name) for name in ("parts", "layers", "regions", "offsets", "block_tokens")}
    good.update(block_count=100, heads=2)
    assert KvLayout(**good) == sound
    for changes, words in wrong:
        with pytest.raises(InvalidArgumentError, match=words):
            KvLayout(**{**good, **changes})


@pytest.mark.parametrize("axes", ["LBHNKD", "LBNHKD", "BLHNKD", "LBHKND", "KBNHD", "BNHD", "LBHND", "BLKHND"])
def test_axes_of_a_dense_pool_equal_numpy_strides(axes: str) -> None:
    """A pool as a numpy array of those axes; an element's place in it is its place in the layout."""
    sizes = {"L": 3, "B": 5, "K": 2, "H": 4, "N": 6, "D": 7}
    count = (1 if "L" in axes else 3) * (1 if "K" in axes else 2)
    found = layout(
        axes,
        layers=range(3),
        block_tokens=6,
        block_count=5,
        heads=4,
        dims=7,
        regions=range(10, 10 + count),
        offset=64,
    )
    array = np.zeros([sizes[axis] for axis in axes], np.uint16)
    strides = dict(zip(axes, array.strides, strict=True))
    for row in range(3):
        for column, part in enumerate(found.parts):
            assert (part.block_stride, part.token_stride) == (strides["B"], strides["N"])
            assert (part.head_stride, part.dim_stride) == (strides["H"], strides["D"])
            offset = 64 + row * strides.get("L", 0) + column * strides.get("K", 0)
            assert found.offsets[row][column] == offset
            region = 10 + row * ("L" not in axes) * (1 if "K" in axes else 2) + column * ("K" not in axes)
            assert found.regions[row][column] == region
    assert set(found.reach.values()) == {64 + array.nbytes}
    assert found.bytes_per_token == 3 * 2 * 4 * 7 * 2


def test_axes_with_wide_and_transposed_parts_give_their_strides() -> None:
    wide = layout("LBHNKD", dims=[8, 6])
    assert [part.token_stride for part in wide.parts] == [28, 28]
    assert wide.offsets[0] == (0, 16)
    turned = layout("LBHKND", transposed=["k"])
    assert (turned.parts[0].token_stride, turned.parts[0].dim_stride) == (2, 32)
    assert (turned.parts[1].token_stride, turned.parts[1].dim_stride) == (16, 2)


@pytest.mark.parametrize(
    ("axes", "changes", "field"),
    [
        ("LBHN", {}, "axes"),
        ("LBBHND", {}, "axes"),
        ("LBHNDX", {}, "axes"),
        ("BNHD", {}, "regions"),
        ("LBHNKD", {"dims": [1, 2, 3]}, "dims"),
        ("LBHNKD", {"transposed": ["k"]}, "transposed"),
        ("LBHKND", {"transposed": ["q"]}, "transposed"),
    ],
)
def test_axes_with_wrong_arguments_raise_with_the_field(axes: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{field}"):
        layout(axes, **changes)
