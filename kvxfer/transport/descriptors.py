"""Byte ranges as callers name them, by address, and as the native core takes them: offsets into registered regions.

It decides how a list of descriptors is written down with the fewest numbers; it must never move a byte, and trusts no
address: the owner of the memory checks again what it says. Hot paths are numpy passes.

A list is written in one of three forms, the shortest of them:

* *runs*: neighbours in the list lie at equal steps (a whole cache in order does). One strided range a run, and nothing
  for each descriptor.
* *pages*: all elements have one length and, region by region, lie at multiples of one step (any subset of a paged
  cache, in any order, does). One strided range a region, and for each descriptor the index of its element: 4 bytes on
  the wire.
* a *table*: one strided range of one element for each descriptor: 36 bytes on the wire.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer._native import _core
from kvxfer.errors import InvalidArgumentError
from kvxfer.transport.base import Blocks
from kvxfer.transport.host_memory import region_of
from kvxfer.types import AgentRef, DataAddress, Exposure, MemoryKind, RegionRecord

Words: TypeAlias = npt.NDArray[np.uint64]

RANGE_BYTES, INDEX_BYTES = 36, 4
"""What one strided range, and the index of one element, take on the wire."""
ELEMENTS_MAX = 0xFFFFFFFF
LONG = 8
"""Where the strided ranges of runs take at most 1/LONG of the bytes that indices would take, the form *runs* is taken
without a search for pages."""
GLANCE = 256
"""The search for runs looks at so many steps first. Where most of them differ, it does not look at the rest."""
ELEMENT_BYTES_MAX = 4 << 20
"""Longer descriptors are cut into elements of this size: an element is the unit in which transfers are cancelled,
resumed and interleaved."""
ADDRESS_MAX = 1 << 63
"""Above any offset, length or step that the core takes."""


class Descriptors:
    """Some byte ranges, in order. ``rows`` is uint64 of shape [n, 3] (address, length, device), or of shape [n, 5]
    (address, length, device, count, stride), where a row stands for ``count`` elements ``stride`` bytes apart.
    """

    def __init__(self, rows: Words) -> None:
        """Raises InvalidArgumentError for another shape, an empty list, and for the first element that is empty or
        overlaps the next one of its row."""
        if rows.ndim != 2 or rows.shape[1] not in (3, 5) or len(rows) == 0:
            raise InvalidArgumentError(
                f"descriptors must be an array of shape [n, 3] or [n, 5], not {list(rows.shape)}"
            )
        self.rows = rows
        _check(rows[:, 1] > 0, "descriptor {} has no bytes")
        self.is_strided = rows.shape[1] == 5 and bool((rows[:, 3] != 1).any())
        if rows.shape[1] == 5:
            _check((rows[:, 3] > 0) & (rows[:, 3] <= ELEMENTS_MAX), "descriptor {} has no count of 1 to 2^32")
            _check((rows[:, 3] == 1) | (rows[:, 4] >= rows[:, 1]), "the elements of descriptor {} overlap")

    @classmethod
    def of(cls, given: Any) -> Descriptors:
        """Descriptors of whatever names memory: an integer array of shape [n, 3] or [n, 5]; a list of such tuples; a
        contiguous tensor or array; a list of those, also views into registered memory. An integer array of shape
        [n, 3] or [n, 5] is always taken as descriptors, any other array as memory.

        Raises InvalidArgumentError for anything else, memory with gaps among it.
        """
        if isinstance(given, Descriptors):
            return given
        if isinstance(given, np.ndarray) and _is_table(given):
            return cls(_as_words(given))
        if isinstance(given, (list, tuple)):
            if not given:
                raise InvalidArgumentError("a list of descriptors must not be empty")
            if all(isinstance(item, (list, tuple)) for item in given):
                return cls(_from_tuples(given))
            return cls(_from_memory(given))
        return cls(_from_memory([given]))

    @property
    def count(self) -> int:
        """Elements: those of every row."""
        return int(self.rows[:, 3].sum()) if self.is_strided else len(self.rows)

    @property
    def nbytes(self) -> int:
        lengths = self.rows[:, 1]
        return int((lengths * self.rows[:, 3]).sum() if self.is_strided else lengths.sum())

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"<Descriptors of {self.count} elements, {self.nbytes} bytes>"


@dataclasses.dataclass(frozen=True)
class Traits:
    """What decides about lanes in a region's record."""

    exposure: Exposure
    is_shareable: bool
    memory: MemoryKind


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """Descriptors that were found in registered regions, in the core's own form: made once, posted many times.

    Element ``i`` is the ``i``-th descriptor (of a strided list: the elements of row 0, then those of row 1, ...).
    """

    ranges: _core.Ranges
    strided: Words = dataclasses.field(repr=False)
    """The same strided ranges as an array of shape [g, 5]: region, offset, stride, length, count."""
    indices: Blocks | None = dataclasses.field(repr=False)
    """Which element of the ranges each descriptor is; ``None``: they are the same."""
    firsts: npt.NDArray[np.int64] | None = dataclasses.field(repr=False)
    """Shape [count + 1]: where the elements of each descriptor begin, where some are cut; ``None``: one element
    each."""
    count: int
    nbytes: int
    length_bytes: int
    """Of every descriptor; 0 where they differ."""
    regions: frozenset[int]
    traits: tuple[Traits, ...]
    peer: RemotePeer | None = None
    """Whose memory; ``None``: our own."""

    def elements(self, ids: Blocks | None) -> Blocks:
        """The elements of the ranges that the descriptors ``ids`` are; ``None``: all of them, in order."""
        if ids is not None and int(ids.max()) >= self.count:
            raise InvalidArgumentError(f"index {int(ids.max())} is outside a prepared list of {self.count} descriptors")
        if ids is None:
            last = self.count if self.firsts is None else int(self.firsts[-1])
            return np.arange(last, dtype=np.uint32) if self.indices is None else self.indices
        if self.firsts is not None:
            ids = _cut_elements(self.firsts, ids)
        return ids if self.indices is None else self.indices[ids]

    def lengths(self, elements: Blocks) -> Words:
        """The bytes of each of ``elements`` (of the ranges), shape [len(elements)]."""
        lengths: Words = self.strided[self.strided_of(elements), 3]
        return lengths

    def strided_of(self, elements: Blocks) -> npt.NDArray[np.int64]:
        """The strided range that each of ``elements`` is in."""
        if self.is_table:
            return elements.astype(np.int64)
        return np.searchsorted(np.cumsum(self.strided[:, 4]), elements, side="right")

    @property
    def is_table(self) -> bool:
        """Whether every element is a strided range of its own."""
        return self.ranges.count == len(self.strided)

    def __len__(self) -> int:
        return self.count


class MemoryTable:
    """The registered regions of one agent, by address. Immutable."""

    def __init__(self, records: Sequence[RegionRecord]) -> None:
        self.records = tuple(sorted(records, key=lambda record: (record.address, record.length_bytes)))
        self._starts = np.array([record.address for record in self.records], dtype=np.uint64)
        self._lengths = np.array([record.length_bytes for record in self.records], dtype=np.uint64)
        self._ids = np.array([record.region_id for record in self.records], dtype=np.uint64)
        ends = self._starts + self._lengths
        self._has_overlaps = len(ends) > 1 and bool((np.maximum.accumulate(ends)[:-1] > self._starts[1:]).any())

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        return f"<MemoryTable of {len(self.records)} regions, {int(self._lengths.sum())} bytes>"

    def resolve(self, descriptors: Descriptors, peer: RemotePeer | None = None) -> Prepared:
        """Find every descriptor's region. Raises InvalidArgumentError, naming the first descriptor that lies in
        none."""
        rows, firsts, is_strided = descriptors.rows, None, descriptors.is_strided
        if int(rows[:, 1].max()) > ELEMENT_BYTES_MAX:
            self._find(rows[:, 0], _spans(rows) if is_strided else rows[:, 1])
            rows, firsts = _cut_rows(rows, is_strided)
            is_strided = False
        address = np.ascontiguousarray(rows[:, 0])
        length = np.ascontiguousarray(rows[:, 1])
        span = _spans(rows) if is_strided else length
        place = self._find(address, span)
        offset = address - self._starts[place]
        self._check_devices(rows[:, 2], place)
        is_uniform = int(length.min()) == int(length.max())
        whole = descriptors.rows[:, 1]
        indices: Blocks | None = None
        if is_strided:
            stride = np.where(rows[:, 3] > 1, rows[:, 4], length)
            strided = _strided(self._ids[place], offset, stride, length, rows[:, 3])
        else:
            region = np.broadcast_to(self._ids[place], offset.shape)
            runs = _runs(region, offset, length)
            is_long = runs is not None and RANGE_BYTES * LONG * len(runs) <= INDEX_BYTES * len(rows)
            pages = self._pages(offset, place, int(length[0])) if is_uniform and not is_long else None
            if pages is not None:
                strided, indices = pages
            else:
                strided = _strided(region, offset, length, length, 1) if runs is None else runs
        used = self.records[place : place + 1] if isinstance(place, int) else self._used(place)
        return Prepared(
            ranges=_core.Ranges(strided),
            strided=strided,
            indices=indices,
            firsts=firsts,
            count=descriptors.count,
            nbytes=descriptors.nbytes,
            length_bytes=int(whole[0]) if int(whole.min()) == int(whole.max()) else 0,
            regions=frozenset(record.region_id for record in used),
            traits=tuple(dict.fromkeys(Traits(record.exposure, record.is_shareable, record.memory) for record in used)),
            peer=peer,
        )

    def _find(self, address: Words, span: Words) -> int | npt.NDArray[np.int64]:
        """For each byte range, the index in ``records`` of a region that contains it; one number where all are in the
        same region."""
        if not self.records:
            raise InvalidArgumentError("no memory is registered here")
        place = max(int(np.searchsorted(self._starts, address[0], side="right")) - 1, 0)
        start = int(self._starts[place])
        if int(address.min()) >= start and int(address.max()) + int(span.max()) <= start + int(self._lengths[place]):
            return place
        places = np.maximum(np.searchsorted(self._starts, address, side="right") - 1, 0)
        is_inside = self._holds(places, address, span)
        if self._has_overlaps and not is_inside.all():
            rest = np.flatnonzero(~is_inside)
            for candidate in range(len(self.records)):
                held = self._holds(candidate, address[rest], span[rest])
                places[rest[held]] = candidate
                is_inside[rest[held]] = True
                rest = rest[~held]
        if not is_inside.all():
            first = int(np.argmin(is_inside))
            where = f"{int(span[first])} bytes at {int(address[first]):#x}"
            raise InvalidArgumentError(f"descriptor {first} ({where}) is inside no registered region")
        return places

    def _holds(self, place: Any, address: Words, span: Words) -> npt.NDArray[np.bool_]:
        room = self._lengths[place]
        offset = address - self._starts[place]
        is_inside: npt.NDArray[np.bool_] = (
            (address >= self._starts[place]) & (span <= room) & (offset <= room - np.minimum(span, room))
        )
        return is_inside

    def _check_devices(self, device: Words, place: int | npt.NDArray[np.int64]) -> None:
        """Host memory is one, whatever number it is given; a device's must be that device's."""
        if all(record.memory is MemoryKind.HOST for record in self.records):
            return
        wanted = np.array([-1 if r.memory is MemoryKind.HOST else r.device for r in self.records])[place]
        _check(
            (wanted < 0) | (device == wanted.astype(np.uint64)), "descriptor {} names another device than its region"
        )

    def _used(self, place: npt.NDArray[np.int64]) -> list[RegionRecord]:
        return [self.records[i] for i in np.flatnonzero(np.bincount(place, minlength=len(self.records)))]

    def _pages(self, offset: Words, place: int | npt.NDArray[np.int64], length: int) -> tuple[Words, Blocks] | None:
        """The form *pages*: one strided range for each region, and the index of each element. ``None`` where that is
        not shorter than a table, or where the elements have no common step."""
        if isinstance(place, int):
            used, firsts = np.array([place]), np.zeros(1, np.int64)
            slot: Any = 0
        else:
            first = np.full(len(self.records), -1, np.int64)
            first[place[::-1]] = np.arange(len(place) - 1, -1, -1)
            used = np.flatnonzero(first >= 0)
            firsts = first[used]
            slots = np.zeros(len(self.records), np.int64)
            slots[used] = np.arange(len(used))
            slot = slots[place]
        if RANGE_BYTES * len(used) + INDEX_BYTES * len(offset) >= RANGE_BYTES * len(offset):
            return None
        step = _common_step(np.abs((offset - offset[firsts][slot]).view(np.int64)), length)
        if step is None:
            return None
        origin = offset[firsts] % np.uint64(step)
        count = (self._lengths[used] - origin - np.uint64(length)) // np.uint64(step) + np.uint64(1)
        total = int(count.sum())
        if total > ELEMENTS_MAX:
            return None
        before = np.cumsum(count) - count
        indices = _divide(offset - origin[slot], step) + before[slot]
        return _strided(self._ids[used], origin, step, length, count), indices.astype(np.uint32)


class RemotePeer:
    """One incarnation of a peer, and the memory that it registered. Another incarnation, or other records, are another
    RemotePeer; lists prepared for the earlier one stay good as long as their regions are registered.
    """

    def __init__(self, ref: AgentRef, address: DataAddress, records: Sequence[RegionRecord]) -> None:
        self.ref = ref
        self.address = address
        self.records = tuple(records)
        self.table = MemoryTable(records)

    def __repr__(self) -> str:
        return f"<RemotePeer {self.ref}: {len(self.table)} regions>"


def _cut_rows(rows: Words, is_strided: bool) -> tuple[Words, npt.NDArray[np.int64]]:
    """Rows [n, 3] of at most ELEMENT_BYTES_MAX each, and where those of each descriptor begin."""
    if is_strided:
        row, number = _repeat_and_number(rows[:, 3].astype(np.int64))
        plain = rows[row, :3]
        plain[:, 0] += number.astype(np.uint64) * rows[row, 4]
    else:
        plain = rows[:, :3]
    counts = -(-plain[:, 1].astype(np.int64) // ELEMENT_BYTES_MAX)
    source, number = _repeat_and_number(counts)
    begin = number.astype(np.uint64) * np.uint64(ELEMENT_BYTES_MAX)
    cut = plain[source]
    cut[:, 0] += begin
    cut[:, 1] = np.minimum(plain[source, 1] - begin, np.uint64(ELEMENT_BYTES_MAX))
    return cut, np.concatenate(([0], np.cumsum(counts)))


def _cut_elements(firsts: npt.NDArray[np.int64], ids: Blocks) -> Blocks:
    """All elements of the descriptors ``ids``, in order."""
    source, number = _repeat_and_number(firsts[ids.astype(np.int64) + 1] - firsts[ids])
    return (firsts[ids][source] + number).astype(np.uint32)


def _repeat_and_number(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Repeat each index as often as its count, and number the repeats: for ``[2, 3]`` the arrays ``[0, 0, 1, 1, 1]``
    and ``[0, 1, 0, 1, 2]``."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - (np.cumsum(counts) - counts)[which]


def _common_step(distance: npt.NDArray[np.int64], length: int) -> int | None:
    """The largest step of at least ``length`` that divides every distance; ``None`` where there is none, or where four
    rounds did not find it. It guesses from a sample, and corrects the guess by the distances that it does not
    divide."""
    step = int(np.gcd.reduce(distance[:: max(1, len(distance) // 64)])) or length
    for _ in range(4):
        if step < length:
            return None
        rest = distance & (step - 1) if step & (step - 1) == 0 else distance % step
        if not rest.any():
            return step
        odd = rest[rest != 0]
        step = int(np.gcd(step, np.gcd.reduce(odd[:1024])))
    return None


def _divide(numbers: Words, step: int) -> Words:
    """``numbers // step``; by far the slowest pass here unless the step is a power of two."""
    if step & (step - 1) == 0:
        return numbers >> np.uint64(step.bit_length() - 1)
    return numbers // np.uint64(step)


def _runs(region: Words, offset: Words, length: Words) -> Words | None:
    """The form *runs*: one strided range for each run of equal steps. ``None`` where a table is less than
    about twice as long."""
    if len(offset) < 4:
        return None
    glance = slice(0, GLANCE)
    if len(offset) > 2 * GLANCE and np.unique(np.diff(offset[glance])).size > GLANCE // 2:
        return None
    step = (offset[1:] - offset[:-1]).view(np.int64)
    joins = (region[1:] == region[:-1]) & (length[1:] == length[:-1]) & (step >= length[:-1].view(np.int64))
    joins[1:] &= ~joins[:-1] | (step[1:] == step[:-1])
    begins = np.flatnonzero(np.concatenate(([True], ~joins)))
    if 2 * (RANGE_BYTES * len(begins) + INDEX_BYTES * len(offset)) > RANGE_BYTES * len(offset):
        return None
    count = np.diff(np.append(begins, len(offset)))
    stride = np.where(count > 1, np.append(step, 0)[begins], length[begins])
    return _strided(region[begins], offset[begins], stride, length[begins], count)


def _strided(region: Any, offset: Words, stride: Any, length: Any, count: Any) -> Words:
    strided = np.empty((len(offset), 5), np.uint64)
    for column, values in enumerate((region, offset, stride, length, count)):
        strided[:, column] = values
    return strided


def _spans(rows: Words) -> Words:
    """First to last byte of each strided row."""
    steps, stride = rows[:, 3] - np.uint64(1), np.where(rows[:, 3] > 1, rows[:, 4], np.uint64(0))
    _check(stride <= ADDRESS_MAX // np.maximum(steps, 1), "descriptor {} ends beyond any memory")
    _check(rows[:, 1] <= ADDRESS_MAX, "descriptor {} ends beyond any memory")
    return steps * stride + rows[:, 1]


def _check(is_right: npt.NDArray[np.bool_], text: str) -> None:
    if not is_right.all():
        raise InvalidArgumentError(text.format(int(np.argmin(is_right))))


def _is_table(array: npt.NDArray[Any]) -> bool:
    return array.ndim == 2 and array.shape[1] in (3, 5) and array.dtype.kind in "iu"


def _as_words(array: npt.NDArray[Any]) -> Words:
    if array.dtype.kind == "i" and array.size and int(array.min()) < 0:
        raise InvalidArgumentError("addresses, lengths and devices must not be below 0")
    return array.astype(np.uint64, copy=False)


def _from_tuples(given: Sequence[Any]) -> Words:
    try:
        array = np.array(given)
        if array.dtype.kind == "f":  # what becomes of integers of both halves of 64 bits, inexactly
            exact = np.array(given, dtype=np.uint64)
            array = exact if (exact.astype(np.float64) == array).all() else array
        if array.dtype.kind not in "iu":
            raise TypeError(f"entries of {array.dtype}")
        return _as_words(array)
    except InvalidArgumentError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgumentError(f"descriptors must be tuples of 3 or 5 whole numbers of 64 bits: {error}") from None


def _from_memory(given: Sequence[Any]) -> Words:
    rows = np.zeros((len(given), 3), np.uint64)
    for number, memory in enumerate(given):
        try:
            region = region_of(memory)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"descriptor {number}: {error}") from None
        rows[number] = region.address, region.length_bytes, region.device
    return rows
