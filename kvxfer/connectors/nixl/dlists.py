"""NIXL's descriptor lists: (address, length, device) by row, as numpy arrays. Decides what is a well-formed list; must
never know whether the memory is registered, nor touch it.

Where NIXL's own lists read beyond their end for a wrong index, these raise IndexError. Pickling one (by the program's
own hand) gives the form of :mod:`kvxfer.connectors.nixl.packed_rows`; nothing here ever unpickles.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvxfer.connectors.nixl import packed_rows
from kvxfer.connectors.nixl.enums import nixl_mem_t
from kvxfer.connectors.nixl.errors import nixlInvalidParamError, nixlMismatchError, nixlNotFoundError
from kvxfer.connectors.nixl.packed_rows import PackedRows

Rows = npt.NDArray[np.uint64]
RowT = TypeVar("RowT", bound=tuple[Any, ...])
WORD_MAX = (1 << 64) - 1


class _DList(Generic[RowT]):
    """Rows of three words, and whatever else a row of the kind has."""

    WIDTH: ClassVar[int] = 3
    LAYOUT: ClassVar[str] = "(address, length, device)"
    KIND: ClassVar[int] = packed_rows.TRANSFER

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:
        """``descs``: a list of tuples, an array of shape [n, 3] (uint64 or int64), or how many empty rows.

        Raises nixlInvalidParamError for malformed rows, TypeError for another kind of thing.
        """
        self._type = nixl_mem_t(type)
        self._buffer: Rows
        self._count: int
        self.owners: tuple[object, ...] = ()
        """Kept as long as the list: the tensors that rows were taken from."""
        if isinstance(descs, np.ndarray):
            self._fill(_from_array(descs), len(descs))
        elif isinstance(descs, list):
            self._check_tuples(descs)
            self._fill(_from_tuples(descs), len(descs))
            self._fill_rest(descs)
        elif isinstance(descs, int):
            if not 0 <= descs <= 1 << 32:
                raise nixlInvalidParamError(f"a list cannot begin with {descs} rows")
            self._fill(np.zeros((descs, 3), np.uint64), descs)
        else:
            raise TypeError(f"descriptors must be a list of tuples or an array, not {_kind(descs)}")

    # --- what NIXL has ---

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return self._count

    def isEmpty(self) -> bool:
        return self._count == 0

    def __getitem__(self, i: int) -> RowT:
        return self._row(self._place(i))

    def __setitem__(self, i: int, desc: RowT) -> None:
        self._set(self._place(i), self._check_tuples([desc])[0])

    def addDesc(self, desc: RowT) -> None:
        self._check_tuples([desc])
        if self._count == len(self._buffer):
            grown = np.zeros((max(16, 2 * self._count), 3), np.uint64)
            grown[: self._count] = self._buffer
            self._buffer = grown
        self._grow_rest()
        self._count += 1
        try:
            self._set(self._count - 1, desc)
        except BaseException:
            self.remDesc(self._count - 1)
            raise

    append = addDesc

    def remDesc(self, index: int) -> None:
        place = self._place(index)
        self._buffer[place : self._count - 1] = self._buffer[place + 1 : self._count]
        self._count -= 1

    def clear(self) -> None:
        self._fill(np.zeros((0, 3), np.uint64), 0)

    def print(self) -> None:
        print(self._describe())

    # --- what is ours ---

    @property
    def rows(self) -> Rows:
        """Shape [n, 3], not to be written to."""
        return self._buffer[: self._count]

    def __iter__(self) -> Iterator[RowT]:
        return (self._row(place) for place in range(self._count))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return False
        return self._type == other._type and np.array_equal(self.rows, other.rows)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._count} descriptors in {self._type.name}>"

    def _describe(self) -> str:
        lines = [f"DescList of mem type {self._type.name}, {self._count} descriptors"]
        return "\n".join([*lines, *(f"  {row}" for row in self)])

    def _fill(self, rows: Rows, count: int) -> None:
        self._buffer, self._count = rows, count

    def _fill_rest(self, descs: Sequence[tuple[Any, ...]]) -> None:
        """What a row has beside its words."""

    def _grow_rest(self) -> None:
        """Room for that of one row more."""

    def _row(self, place: int) -> RowT:
        address, length, device = self._buffer[place].tolist()
        return (address, length, device)  # type: ignore[return-value]

    def _set(self, place: int, desc: Sequence[Any]) -> None:
        self._buffer[place] = _from_tuples([tuple(desc)])[0]

    def _place(self, index: Any) -> int:
        place = operator.index(index)
        if not 0 <= place < self._count:
            raise IndexError(f"index {place} is outside a list of {self._count} descriptors")
        return place

    def _check_tuples(self, descs: Sequence[Any]) -> Sequence[Any]:
        for desc in descs:
            if not isinstance(desc, tuple):
                raise TypeError(f"each descriptor must be a tuple {self.LAYOUT}, not {_kind(desc)}")
            if len(desc) != self.WIDTH:
                raise nixlInvalidParamError(f"each descriptor must have {self.WIDTH} elements, {self.LAYOUT}")
        return descs

    def _index_of(self, desc: Sequence[Any]) -> int:
        self._check_tuples([desc])
        found = np.flatnonzero((self.rows == _from_tuples([tuple(desc)])[0]).all(axis=1))
        if len(found) == 0:
            raise nixlNotFoundError(f"{tuple(desc)} is not in {self!r}")
        return int(found[0])

    def __getstate__(self) -> bytes:
        return packed_rows.pack(self.KIND, self._type, self.rows, self._packed_metas())

    def __setstate__(self, state: bytes) -> None:
        packed = packed_rows.unpack(state)
        if packed is None or packed.kind != self.KIND:
            raise nixlMismatchError(f"these bytes are not a {type(self).__name__}")
        self.__dict__.update(self.unpacked(packed).__dict__)

    @classmethod
    def unpacked(cls, packed: PackedRows) -> Self:
        """The list of these rows, which are of this kind."""
        made = cls(packed.memory, packed.rows)
        made._take_metas(packed.metas)
        return made

    def _packed_metas(self) -> Sequence[bytes]:
        return ()

    def _take_metas(self, metas: list[bytes]) -> None:
        """Whatever else a row of the kind has."""


class nixlXferDList(_DList[tuple[int, int, int]]):
    """What to move: (address, length, device)."""

    def index(self, desc: tuple[int, int, int]) -> int:
        return self._index_of(desc)


class _WideDList(_DList[RowT]):
    """A list whose rows have one thing beside their words: the fourth element of a tuple."""

    WIDTH = 4
    NOTHING: ClassVar[Any]
    _beside: list[Any]

    @staticmethod
    def _as_beside(value: Any) -> Any:
        """The fourth element as it is kept. Raises TypeError, nixlInvalidParamError."""
        raise NotImplementedError

    def remDesc(self, index: int) -> None:
        del self._beside[self._place(index)]
        super().remDesc(index)

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and isinstance(other, type(self)) and self._beside == other._beside

    __hash__ = None

    def _fill(self, rows: Rows, count: int) -> None:
        super()._fill(rows, count)
        self._beside = [self.NOTHING] * count

    def _fill_rest(self, descs: Sequence[tuple[Any, ...]]) -> None:
        self._beside = [self._as_beside(desc[3]) for desc in descs]

    def _grow_rest(self) -> None:
        self._beside.append(self.NOTHING)

    def _row(self, place: int) -> RowT:
        address, length, device = self._buffer[place].tolist()
        return (address, length, device, self._beside[place])  # type: ignore[return-value]

    def _set(self, place: int, desc: Sequence[Any]) -> None:
        beside = self._as_beside(desc[3])
        super()._set(place, desc)
        self._beside[place] = beside


class nixlRegDList(_WideDList[tuple[int, int, int, bytes]]):
    """What to register: (address, length, device, meta). The meta is the program's own bytes (a file's name, for
    one)."""

    LAYOUT = "(address, length, device, meta)"
    KIND = packed_rows.REGISTRATION
    NOTHING = b""

    def index(self, desc: tuple[int, int, int, bytes]) -> int:
        return self._index_of(desc)

    def trim(self) -> nixlXferDList:
        """The same rows without their metas."""
        trimmed = nixlXferDList(self._type, self.rows.copy())
        trimmed.owners = self.owners
        return trimmed

    @property
    def metas(self) -> tuple[bytes, ...]:
        return tuple(self._beside)

    def _packed_metas(self) -> Sequence[bytes]:
        return self._beside

    def _take_metas(self, metas: list[bytes]) -> None:
        self._beside = metas

    @staticmethod
    def _as_beside(value: Any) -> bytes:
        if isinstance(value, int):
            raise nixlInvalidParamError("the fourth element of a registration must be bytes or str, not int")
        return as_bytes(value)


class nixlRemoteDList(_WideDList[tuple[int, int, int, str]]):
    """Memory of several agents: (address, length, device, agent). Only NIXL's GPU device API takes them."""

    LAYOUT = "(address, length, device, agent)"
    NOTHING = ""

    @staticmethod
    def _as_beside(value: Any) -> str:
        return as_name(value)


def as_name(name: Any) -> str:
    """An agent's name, which programs give as text or (as NIXL hands it out) as UTF-8. Raises TypeError,
    nixlInvalidParamError."""
    if isinstance(name, str):
        check_text("agent name", name)
        return name
    if isinstance(name, (bytes, bytearray)):
        try:
            return bytes(name).decode()
        except UnicodeDecodeError:
            raise nixlInvalidParamError(f"agent name {bytes(name)!r} is not UTF-8") from None
    raise TypeError(f"an agent's name must be str or bytes, not {_kind(name)}")


def check_text(what: str, text: str) -> bytes:
    """Its UTF-8. Raises nixlInvalidParamError where it has none: it holds half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise nixlInvalidParamError(f"{what} {text!r:.80} has no UTF-8") from None


def as_bytes(message: Any) -> bytes:
    """A notification's payload, which programs give as bytes or text. Raises TypeError, nixlInvalidParamError."""
    if isinstance(message, str):
        return check_text("message", message)
    if isinstance(message, (bytes, bytearray, memoryview)):
        return bytes(message)
    raise TypeError(f"a message must be bytes or str, not {_kind(message)}")


def strided_rows(array: npt.NDArray[Any]) -> Rows:
    """NIXL's strided rows (address, length, device, stride, count) in the order of kvxfer's (..., count, stride).

    Raises nixlInvalidParamError.
    """
    words = _words_of(array, 5)
    return np.ascontiguousarray(words[:, [0, 1, 2, 4, 3]])


def _from_array(array: npt.NDArray[Any]) -> Rows:
    return _words_of(array, 3).copy()


def _words_of(array: npt.NDArray[Any], width: int) -> Rows:
    if array.ndim != 2 or array.shape[1] != width:
        raise nixlInvalidParamError(f"descriptors must be an array of shape [n, {width}], not {list(array.shape)}")
    if array.dtype not in (np.dtype(np.uint64), np.dtype(np.int64)):
        raise nixlInvalidParamError(f"descriptors must be an array of uint64 or int64, not {array.dtype}")
    if not array.flags.c_contiguous:
        raise nixlInvalidParamError("descriptors must be a C-contiguous array")
    if array.dtype == np.dtype(np.int64) and array.size and int(array.min()) < 0:
        raise nixlInvalidParamError("addresses, lengths and devices must not be below 0")
    return array.view(np.uint64)


def _from_tuples(descs: Sequence[tuple[Any, ...]]) -> Rows:
    """The first three elements of each tuple; their number was checked."""
    words = itertools.chain.from_iterable(desc[:3] for desc in descs)
    try:
        array = np.array(list(words))
        if array.dtype.kind not in "iub" or array.dtype.kind == "b" or (array.size and int(array.min()) < 0):
            array = _from_words([desc[:3] for desc in descs])
        return array.astype(np.uint64, copy=False).reshape(len(descs), 3)
    except (OverflowError, ValueError, TypeError) as error:
        if isinstance(error, nixlInvalidParamError):
            raise
        raise nixlInvalidParamError(
            f"addresses, lengths and devices must be whole numbers of 64 bits: {error}"
        ) from None


def _from_words(descs: Sequence[tuple[Any, ...]]) -> Rows:
    rows = np.zeros((len(descs), 3), np.uint64)
    for place, desc in enumerate(descs):
        for column, word in enumerate(desc):
            try:
                value = operator.index(word)
            except TypeError:
                raise nixlInvalidParamError(f"{word!r} of descriptor {place} is not a whole number") from None
            if not 0 <= value <= WORD_MAX:
                raise nixlInvalidParamError(f"{word!r} of descriptor {place} does not fit 64 bits")
            rows[place, column] = value
    return rows


def _kind(value: object) -> str:
    return type(value).__name__
