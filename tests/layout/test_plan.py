"""Plans between random layouts, against a reference that indexes one element after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.layout.axes import layout_from_axes
from kvxfer.layout.indexed_ranges import IndexedRanges
from kvxfer.layout.kv_layout import KvLayout, KvPart
from kvxfer.layout.plan import LayoutPlan, plan_transfer
from kvxfer.layout.runs import U64

POISON = 0xA5
Memory = dict[int, npt.NDArray[np.uint8]]


@dataclasses.dataclass(frozen=True)
class Side:
    layout: KvLayout
    blocks: list[int]
    start: int

    def place(self, part: str, layer: int, token: int, head: int, dim: int) -> tuple[int, int]:
        """(region, byte offset) of one element, as the definition says it."""
        layout = self.layout
        column = [known.name for known in layout.parts].index(part)
        row = layout.layers.index(layer)
        strides = layout.parts[column]
        block = self.blocks[(token - self.start) // layout.block_tokens]
        slot = (token - self.start) % layout.block_tokens
        return layout.regions[row][column], (
            layout.offsets[row][column]
            + block * strides.block_stride
            + slot * strides.token_stride
            + (head - layout.head_offset) * strides.head_stride
            + dim * strides.dim_stride
        )


@dataclasses.dataclass(frozen=True)
class Case:
    source: Side
    destination: Side
    tokens: range
    layers: list[int]
    heads: range

    def plan(self) -> LayoutPlan:
        return plan_transfer(
            self.source.layout,
            self.destination.layout,
            np.array(self.source.blocks, np.int32),
            np.array(self.destination.blocks, np.uint32),
            self.tokens,
            self.layers,
            heads=self.heads,
            source_start=self.source.start,
            destination_start=self.destination.start,
        )


def memory(layout: KvLayout, fill: Callable[[int], npt.NDArray[np.uint8]]) -> Memory:
    return {region: fill(size + 3) for region, size in layout.reach.items()}


def poisoned(size: int) -> npt.NDArray[np.uint8]:
    return np.full(size, POISON, np.uint8)


def copy_by_element(case: Case, source: Memory, destination: Memory) -> int:
    """The slow, obviously right way; the bytes copied."""
    copied = 0
    for part in case.source.layout.parts:
        for layer in case.layers:
            for token in case.tokens:
                for head in case.heads:
                    for dim in range(part.dims):
                        a, x = case.source.place(part.name, layer, token, head, dim)
                        b, y = case.destination.place(part.name, layer, token, head, dim)
                        destination[b][y : y + part.dtype_bytes] = source[a][x : x + part.dtype_bytes]
                        copied += part.dtype_bytes
    return copied


def copy_by_runs(plan: LayoutPlan, source: Memory, destination: Memory) -> int:
    columns = zip(*(getattr(plan.runs, field.name).tolist() for field in dataclasses.fields(plan.runs)), strict=True)
    copied = 0
    for a, x, step, b, y, other_step, length, count in columns:
        for _ in range(count):
            assert x + length <= len(source[a])
            assert y + length <= len(destination[b])
            destination[b][y : y + length] = source[a][x : x + length]
            x, y, copied = x + step, y + other_step, copied + length
        assert count == 1 or (step >= length and other_step >= length), "descriptors of a run overlap"
    return copied


def descriptors(ranges: U64) -> list[tuple[int, int, int]]:
    return [
        (region, offset + index * stride, length)
        for region, offset, stride, length, count in ranges.tolist()
        for index in range(count)
    ]


def copy_by_indices(ranges: IndexedRanges, source: Memory, destination: Memory) -> int:
    ours, theirs = descriptors(ranges.source), descriptors(ranges.destination)
    copied = 0
    assert len(ranges.source_indices) == len(ranges.destination_indices)
    for i, j in zip(ranges.source_indices.tolist(), ranges.destination_indices.tolist(), strict=True):
        (a, x, length), (b, y, other_length) = ours[i], theirs[j]
        assert length == other_length
        destination[b][y : y + length] = source[a][x : x + length]
        copied += length
    for name, table, memory_ in (("source", ranges.source, source), ("destination", ranges.destination, destination)):
        for region, offset, stride, length, count in table.tolist():
            assert count == 1 or stride >= length, name
            assert offset + (count - 1) * stride + length <= len(memory_[region]), f"a {name} range leaves its region"
    return copied


def assert_equal(found: Mapping[int, npt.NDArray[np.uint8]], wanted: Mapping[int, npt.NDArray[np.uint8]]) -> None:
    for region, expected in wanted.items():
        np.testing.assert_array_equal(found[region], expected, err_msg=f"region {region}")


def check(case: Case) -> LayoutPlan:
    """Bit-exact, every byte once, and not a byte beside."""
    rng = np.random.default_rng(7)
    source = memory(case.source.layout, lambda size: rng.integers(0, 256, size, dtype=np.uint8))
    wanted = memory(case.destination.layout, poisoned)
    size = copy_by_element(case, source, wanted)
    plan = case.plan()
    assert plan.bytes == size

    by_runs = memory(case.destination.layout, poisoned)
    assert copy_by_runs(plan, source, by_runs) == size
    assert_equal(by_runs, wanted)
    assert plan.count == len(plan.runs.length)
    assert plan.descriptor_count == int(plan.runs.count.sum())

    by_indices = memory(case.destination.layout, poisoned)
    assert copy_by_indices(plan.as_indexed_ranges(), source, by_indices) == size
    assert_equal(by_indices, wanted)
    return plan


@dataclasses.dataclass(frozen=True)
class Shape:
    """What both sides must share."""

    dims: dict[str, int]
    dtype_bytes: int
    total_heads: int


@st.composite
def free_layouts(draw: st.DrawFn, shape: Shape, layers: list[int], heads: range, block_count: int) -> KvLayout:
    """Axes in any order, gaps anywhere, planes in any of three regions."""
    block_tokens = draw(st.integers(1, 6))
    names = draw(st.permutations(list(shape.dims)))
    is_layer_inside = draw(st.booleans())
    is_part_inside = draw(st.booleans()) and len(names) > 1
    widest = max(shape.dims.values())
    sizes = {"B": block_count, "H": len(heads), "N": block_tokens, "D": widest, "L": len(layers), "K": len(names)}
    gaps = draw(st.sampled_from([[0], [0, 0, 0, 1, 3]]))

    def strides() -> tuple[dict[str, int], int]:
        order = draw(st.permutations(list("BHND") + ["L"] * is_layer_inside + ["K"] * is_part_inside))
        found, inner = {"L": 0, "K": 0}, shape.dtype_bytes
        for axis in order:
            found[axis] = inner + draw(st.sampled_from(gaps))
            inner = found[axis] * sizes[axis]
        return found, inner

    common = strides()
    of_part = {name: common if is_part_inside or draw(st.booleans()) else strides() for name in names}
    planes = [
        (row, column)
        for row in range(1 if is_layer_inside else len(layers))
        for column in range(1 if is_part_inside else len(names))
    ]
    origin, ends = {}, {1: 0, 2: 5, 3: 0}
    for row, column in draw(st.sampled_from([planes, draw(st.permutations(planes))])):
        region = draw(st.sampled_from([1, 1, 1, 2, 3]))
        origin[row, column] = region, ends[region] + draw(st.sampled_from(gaps))
        ends[region] = origin[row, column][1] + of_part[names[column]][1]

    def at(row: int, column: int) -> tuple[int, int]:
        region, offset = origin[0 if is_layer_inside else row, 0 if is_part_inside else column]
        found = of_part[names[column]][0]
        return region, offset + row * found["L"] * is_layer_inside + column * found["K"] * is_part_inside

    return KvLayout(
        parts=tuple(
            KvPart(name, shape.dims[name], shape.dtype_bytes, *(of_part[name][0][axis] for axis in "BNHD"))
            for name in names
        ),
        layers=tuple(layers),
        regions=tuple(tuple(at(row, column)[0] for column in range(len(names))) for row in range(len(layers))),
        offsets=tuple(tuple(at(row, column)[1] for column in range(len(names))) for row in range(len(layers))),
        block_tokens=block_tokens,
        block_count=block_count,
        heads=len(heads),
        head_offset=heads.start,
        total_heads=shape.total_heads,
    )


@st.composite
def engine_layouts(draw: st.DrawFn, shape: Shape, layers: list[int], heads: range, block_count: int) -> KvLayout:
    """Dense, with the axes of engines."""
    axes = draw(st.sampled_from(["LBHNKD", "LBNHKD", "BLHNKD", "LBHKND", "KBNHD", "BNHD", "BHND", "BLKHND", "LKBNHD"]))
    needed = (1 if "L" in axes else len(layers)) * (1 if "K" in axes else len(shape.dims))
    can_transpose = axes.endswith("ND") and "k" in shape.dims
    return layout_from_axes(
        axes,
        layers=layers,
        block_tokens=draw(st.sampled_from([1, 2, 3, 4, 8])),
        block_count=block_count,
        heads=len(heads),
        dims=list(shape.dims.values()),
        dtype_bytes=shape.dtype_bytes,
        parts=list(shape.dims),
        head_offset=heads.start,
        total_heads=shape.total_heads,
        regions=draw(st.permutations(range(needed))),
        offset=draw(st.sampled_from([0, 64])),
        transposed=("k",) if can_transpose and draw(st.booleans()) else (),
    )


@st.composite
def block_lists(draw: st.DrawFn, count: int, block_count: int, is_distinct: bool) -> list[int]:
    """Ascending, descending, evenly spaced, or anything."""
    kind = draw(st.sampled_from(["run", "down", "even", "any"]))
    if kind == "any" and not is_distinct:
        return draw(st.lists(st.integers(0, block_count - 1), min_size=count, max_size=count))
    if kind == "any":
        return draw(st.permutations(range(block_count)))[:count]
    step = 2 if kind == "even" and 2 * count <= block_count else 1
    first = draw(st.integers(0, block_count - step * count))
    blocks = list(range(first, first + step * count, step))
    return blocks[::-1] if kind == "down" else blocks


@st.composite
def cases(draw: st.DrawFn) -> Case:
    total_heads = draw(st.integers(1, 4))
    dims = draw(st.sampled_from([{"k": 4, "v": 4}, {"k": 3, "v": 2}, {"latent": 5}, {"k": 1, "v": 1}]))
    shape = Shape(dims, draw(st.sampled_from([1, 2])), total_heads)
    first_token = draw(st.integers(0, 5))
    length = draw(st.integers(1, 24))

    held_layers = st.sampled_from([[0, 1, 2], [0, 1], [1], [1, 2, 5], [2, 1, 0]])
    head_from, head_to = sorted(draw(st.tuples(st.integers(0, total_heads - 1), st.integers(1, total_heads))))
    heads = range(head_from, max(head_to, head_from + 1))
    sides = []
    same_layout: KvLayout | None = None
    for is_destination in (False, True):
        start = draw(st.integers(0, first_token))
        if same_layout is not None and draw(st.booleans()):
            layout = same_layout
        else:
            held = range(draw(st.integers(0, heads.start)), draw(st.integers(heads.stop, total_heads)))
            kind = draw(st.sampled_from([free_layouts, engine_layouts]))
            layout = draw(kind(shape, draw(held_layers), held, draw(st.sampled_from([30, 31, 40]))))
        needed = -(-(first_token + length - start) // layout.block_tokens) + draw(st.integers(0, 1))
        if needed > layout.block_count:
            needed = layout.block_count
        sides.append(Side(layout, draw(block_lists(needed, layout.block_count, is_destination)), start))
        same_layout = layout
    source, destination = sides
    common = [layer for layer in source.layout.layers if layer in destination.layout.layers]
    layers = draw(st.sampled_from([common, common[:1], common[::-1]]))
    return Case(source, destination, range(first_token, first_token + length), layers, heads)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_plan_between_random_layouts_moves_every_byte_once(case: Case) -> None:
    check(case)
