"""Descriptors as callers write them, and what of the registered regions they become."""

from __future__ import annotations

import types

import numpy as np
import numpy.typing as npt
import pytest

import kvxfer.transport.descriptors as descriptors_module
from kvxfer.errors import InvalidArgumentError
from kvxfer.transport.descriptors import Descriptors, MemoryTable, Prepared
from kvxfer.types import Exposure, MemoryKind, RegionRecord

REGIONS = [(1 << 24, 0x10_0000, 4096 * 64), (5, 0x20_0000, 10_001), (77, 0x20_0000 + 10_001, 65_536)]
TABLE = MemoryTable([RegionRecord(*region) for region in REGIONS])
MIDDLE = 0x20_0000


def expand(prepared: Prepared, ids: npt.NDArray[np.uint32] | None = None) -> list[tuple[int, int, int]]:
    """(region, offset, length) of each descriptor, one by one."""
    strided = [tuple(int(value) for value in row) for row in prepared.strided]
    elements = [
        (region, offset + i * stride, size) for region, offset, stride, size, count in strided for i in range(count)
    ]
    return [elements[element] for element in prepared.elements(ids)]


def slowly(rows: npt.NDArray[np.uint64]) -> list[tuple[int, int, int]]:
    out = []
    for row in rows.tolist():
        address, length, _, count, stride = row if len(row) == 5 else [*row, 1, 0]
        for number in range(count):
            at = address + number * stride
            region, start, _ = next(r for r in REGIONS if r[1] <= at and at + length <= r[1] + r[2])
            out.append((region, at - start, length))
    return out


def rows_of(*columns: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    return np.stack(np.broadcast_arrays(*columns), axis=1).astype(np.uint64)


@pytest.mark.parametrize("seed", range(40))
def test_every_way_of_writing_a_list_down_means_the_same(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 200))
    regions = random.choice(3, int(random.integers(1, 4)), replace=False)
    which = random.choice(regions, count)
    starts = np.array([start for _, start, _ in REGIONS])[which]
    room = np.array([length for _, _, length in REGIONS])[which]
    shape = seed % 5
    length: npt.ArrayLike
    if shape == 0:  # a paged cache, any order
        length = int(random.integers(1, 700))
        step = length + int(random.integers(0, 3)) * 64
        rows = rows_of(starts + random.integers(0, 1 << 30, count) % (room // step) * step, length, 0)
    elif shape == 1:  # anywhere
        length = random.integers(1, 500, count)
        rows = rows_of(starts + random.integers(0, 9000, count), length, 0)
    elif shape == 2:  # anywhere, of one length
        rows = rows_of(starts + random.integers(0, 9000, count), 33, 0)
    elif shape == 3:  # runs of equal steps and of several lengths
        parts = [
            rows_of(start + int(random.integers(0, 50)) + np.arange(60) * step, size, 0)
            for start in starts[:5]
            for size, step in [(int(random.integers(1, 80)), int(random.integers(80, 150)))]
        ]
        rows = np.concatenate(parts)
    else:  # strided
        elements = random.integers(1, 30, count)
        length = random.integers(1, 100, count)
        rows = rows_of(
            starts + random.integers(0, 4000, count), length, 0, elements, length + random.integers(0, 90, count)
        )
    descriptors = Descriptors.of(rows)
    prepared = TABLE.resolve(descriptors)
    truth = slowly(rows)
    assert expand(prepared) == truth
    assert prepared.count == descriptors.count == len(truth) == len(prepared)
    assert prepared.nbytes == descriptors.nbytes == sum(size for _, _, size in truth)
    assert prepared.regions == {region for region, _, _ in truth}
    sizes = {size for _, _, size in truth}
    assert prepared.length_bytes == (sizes.pop() if len(sizes) == 1 else 0)
    ids = random.integers(0, len(truth), 50).astype(np.uint32)
    assert expand(prepared, ids) == [truth[i] for i in ids]
    assert prepared.lengths(prepared.elements(ids)).tolist() == [truth[i][2] for i in ids]


def test_the_shortest_way_is_taken() -> None:
    start = REGIONS[0][1]
    order = np.random.default_rng(0).permutation(64)
    blocks = TABLE.resolve(Descriptors.of(rows_of(start + order * 4096, 4096, 0)))
    assert (len(blocks.strided), blocks.is_table) == (1, False)
    halves = np.concatenate([rows_of(start + order * 1024, 512, 0), rows_of(MIDDLE + 3 + order[:9] % 9 * 1024, 512, 0)])
    assert len(TABLE.resolve(Descriptors.of(halves)).strided) == 2
    odd = TABLE.resolve(Descriptors.of(rows_of(start + order * 701, 700, 0)[:40]))
    assert len(odd.strided) == 1
    runs = np.concatenate([rows_of(start + np.arange(50) * 64, 64, 0), rows_of(start + np.arange(50) * 100, 32, 0)])
    assert TABLE.resolve(Descriptors.of(runs)).strided[:, 4].tolist() == [50, 50]
    scattered = rows_of(start + np.cumsum(1000 + order % 7), 999, 0)
    assert TABLE.resolve(Descriptors.of(scattered)).is_table
    assert TABLE.resolve(Descriptors.of(rows_of([start], 4096, 0))).is_table


def test_long_descriptors_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors_module, "ELEMENT_BYTES_MAX", 100)
    start = REGIONS[0][1]
    for rows in (
        [(start, 250, 0), (start + 1000, 100, 0), (start + 3000, 301, 0), (start + 500, 7, 0)],
        [(start, 250, 0, 3, 300), (start + 2000, 30, 0, 2, 40)],
        [(start, 200, 0), (start + 5000, 200, 0), (start + 200, 200, 0)],
    ):
        descriptors = Descriptors.of(rows)
        prepared = TABLE.resolve(descriptors)
        truth = slowly(descriptors.rows)
        assert prepared.count == len(truth)
        assert prepared.nbytes == sum(length for _, _, length in truth)
        cut = [
            [(region, offset + at, min(100, length - at)) for at in range(0, length, 100)]
            for region, offset, length in truth
        ]
        assert expand(prepared) == [element for elements in cut for element in elements]
        ids = np.array([2, 0, 1, 2], dtype=np.uint32)
        assert expand(prepared, ids) == [element for i in ids for element in cut[i]]
        assert prepared.length_bytes == (200 if len(rows) == 3 else 0)


@pytest.mark.parametrize("columns", [3, 5])
def test_the_first_that_lies_outside_is_named(columns: int) -> None:
    start, length = REGIONS[0][1:]
    good = [start, 64, 0, 1, 64]
    for bad in (
        [start - 1, 64, 0, 1, 64],
        [start + length - 63, 64, 0, 1, 64],
        [MIDDLE + 9_990, 64, 0, 1, 64],
        [1 << 63, 64, 0, 1, 64],
        [(1 << 64) - 8, 64, 0, 1, 64],
        [start, 1 << 63, 0, 1, 1 << 63],
        [start, (1 << 64) - 1, 0, 1, 64],
    ):
        rows = np.array([good, good, bad, bad], dtype=np.uint64)[:, :columns]
        with pytest.raises(InvalidArgumentError, match="descriptor 2"):
            TABLE.resolve(Descriptors.of(rows))
    for bad in ([start, 64, 0, 1 << 20, 64], [start, 64, 0, 2, 1 << 63], [start, 64, 0, (1 << 32) - 1, 1 << 62]):
        rows = np.array([good, bad], dtype=np.uint64)
        with pytest.raises(InvalidArgumentError, match="descriptor 1"):
            TABLE.resolve(Descriptors.of(rows))
    with pytest.raises(InvalidArgumentError, match="no memory is registered"):
        MemoryTable([]).resolve(Descriptors.of([tuple(good[:columns])]))


def test_regions_may_overlap() -> None:
    """As they do where a whole pool is registered, and then a part of it."""
    table = MemoryTable([RegionRecord(1, 1000, 1000), RegionRecord(2, 1100, 100), RegionRecord(3, 1100, 50)])
    prepared = table.resolve(Descriptors.of([(1010, 10, 0), (1110, 20, 0), (1110, 100, 0), (1900, 100, 0)]))
    assert expand(prepared) == [(1, 10, 10), (1, 110, 20), (1, 110, 100), (1, 900, 100)]
    other = MemoryTable([*table.records, RegionRecord(4, 9000, 50)])
    prepared = other.resolve(
        Descriptors.of([(1010, 10, 0), (1110, 20, 0), (1110, 100, 0), (1110, 41, 0), (9000, 5, 0)])
    )
    assert expand(prepared) == [(1, 10, 10), (2, 10, 20), (1, 110, 100), (2, 10, 41), (4, 0, 5)]
    with pytest.raises(InvalidArgumentError, match="descriptor 1"):
        table.resolve(Descriptors.of([(1010, 10, 0), (1110, 900, 0)]))


def test_what_is_taken() -> None:
    array = np.zeros((4, 8), np.float32)
    pointer = array.__array_interface__["data"][0]
    for given in (
        [(pointer, 128, 0)],
        ((pointer, 128, 0),),
        [[pointer, 128, 0]],
        np.array([[pointer, 128, 0]]),
        np.array([[pointer, 128, 0, 1, 9]], dtype=np.uint64),
        array,
        [array],
        memoryview(array),
    ):
        descriptors = Descriptors.of(given)
        assert descriptors.rows[:, :3].tolist() == [[pointer, 128, 0]]
        assert (descriptors.count, descriptors.nbytes) == (1, 128)
        assert Descriptors.of(descriptors) is descriptors
    rows = Descriptors.of([array[2], array[0:2]]).rows
    assert rows.tolist() == [[pointer + 64, 32, 0], [pointer, 64, 0]]
    strided = Descriptors.of([(pointer, 8, 0, 4, 32), (pointer, 8, 0, 2, 8)])
    assert (strided.count, strided.nbytes, strided.is_strided) == (6, 48, True)
    high = (1 << 63) + 8
    assert Descriptors.of([(high, 5, 0)]).rows[0, 0] == high


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    whole = torch.zeros(8, 64)
    rows = Descriptors.of([whole[3], whole[5:7]]).rows
    assert rows.tolist() == [[whole[3].data_ptr(), 256, 0], [whole[5].data_ptr(), 512, 0]]
    assert Descriptors.of(whole).rows.tolist() == [[whole.data_ptr(), 2048, 0]]
    with pytest.raises(InvalidArgumentError, match=r"descriptor 1: .* contiguous"):
        Descriptors.of([whole[0], whole[:, 1]])
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        Descriptors.of(whole.t())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "must not be empty"),
        (np.zeros((0, 3), np.uint64), "shape"),
        ([(1, 2)], "shape"),
        ([(1, 2, 3, 4)], "shape"),
        ([(1, 2, 3), (1, 2)], "whole numbers"),
        ([(-1, 2, 3)], "below 0"),
        ([(1, 2.5, 3)], "whole numbers"),
        ([(1 << 64, 2, 3)], "whole numbers"),
        ([("a", 2, 3)], "whole numbers"),
        ([(5, 64, 0), (5, 0, 0)], "descriptor 1 has no bytes"),
        ([(5, 64, 0, 1, 64), (5, 64, 0, 0, 64)], "descriptor 1 has no count"),
        ([(5, 64, 0, 1, 64), (5, 64, 0, 2, 63)], "descriptor 1 overlap"),
        (7, "no memory"),
        ([object()], "no memory"),
    ],
)
def test_descriptors_of_invalid_input_are_refused(given: object, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        Descriptors.of(given)


def test_an_index_outside_the_list() -> None:
    prepared = TABLE.resolve(Descriptors.of([(REGIONS[0][1], 64, 0)] * 3))
    with pytest.raises(InvalidArgumentError, match="index 3 is outside"):
        prepared.elements(np.array([0, 3], dtype=np.uint32))


def test_devices() -> None:
    """Host memory is one whatever number it goes by; a device's must be that device's."""
    table = MemoryTable([RegionRecord(1, 1000, 100), RegionRecord(2, 5000, 100, MemoryKind.CUDA, 1)])
    assert table.resolve(Descriptors.of([(1000, 8, 7), (5000, 8, 1)])).regions == {1, 2}
    with pytest.raises(InvalidArgumentError, match="descriptor 1 names another device"):
        table.resolve(Descriptors.of([(1000, 8, 7), (5000, 8, 0)]))


def test_a_record_travels_as_json() -> None:
    record = RegionRecord(9, 1 << 40, 77, MemoryKind.CUDA, 3, True, False, True, Exposure.GRANT)
    assert RegionRecord.from_json(record.to_json()) == record
    text = record.to_json()
    for wrong in (
        "",
        "[]",
        "{}",
        text.replace("cuda", "tpu"),
        text.replace("77", '"77"'),
        text.replace('id":9', 'id":-9'),
    ):
        with pytest.raises(InvalidArgumentError):
            RegionRecord.from_json(wrong)
    with pytest.raises(InvalidArgumentError):
        RegionRecord(1, 0, 8)
    with pytest.raises(InvalidArgumentError):
        RegionRecord(1, (1 << 64) - 4, 8)


def test_tensors_by_duck_typing() -> None:
    tensor = types.SimpleNamespace(
        data_ptr=lambda: 4096, is_contiguous=lambda: True, device="cpu", numel=lambda: 6, element_size=lambda: 2
    )
    assert Descriptors.of([tensor]).rows.tolist() == [[4096, 12, 0]]
