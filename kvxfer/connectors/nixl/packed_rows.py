"""Rows of descriptors as bytes for other processes: no pickle, in or out. Decides the form; must not know the sender.

Little endian throughout::

    8  magic "kvxfer\\0D"
    1  version, 1
    1  kind: 1 transfer list, 2 registration list, 0 none at all (memory type and count 0)
    1  memory type, as in nixl_mem_t
    5  zero
    8  count
    24 x count   address, length, device
    and for kind 2, count times: 4 bytes of length, and as many of the meta

:func:`unpack` gives the rows (or None, which NIXL's programs send too) or raises one error, whatever the bytes.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvxfer.connectors.nixl.enums import nixl_mem_t
from kvxfer.connectors.nixl.errors import nixlMismatchError

MAGIC = b"kvxfer\0D"
VERSION = 1
HEAD = struct.Struct("<8sBBB5xQ")
META = struct.Struct("<I")
NONE = HEAD.pack(MAGIC, VERSION, 0, 0, 0)
ROW_BYTES = 24
COUNT_MAX = 1 << 24
"""Descriptors in one list from another process."""
PICKLE_MARK = b"\x80"
"""What a pickle of protocol 2 or later begins with, and nothing of ours does."""
TRANSFER, REGISTRATION = 1, 2
"""Kinds of lists."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedRows:
    kind: int
    memory: nixl_mem_t
    rows: npt.NDArray[np.uint64]
    """[n, 3]: address, length, device."""
    metas: list[bytes]
    """One for each row of a REGISTRATION list; of another kind none."""


def pack(kind: int, memory: nixl_mem_t, rows: npt.NDArray[np.uint64], metas: Sequence[bytes] = ()) -> bytes:
    parts = [HEAD.pack(MAGIC, VERSION, kind, int(memory), len(rows)), rows.astype("<u8", copy=False).tobytes()]
    for meta in metas:
        parts += (META.pack(len(meta)), meta)
    return b"".join(parts)


def unpack(data: bytes) -> PackedRows | None:
    """What :func:`pack` was given; None for NONE.

    Raises nixlMismatchError for bytes of another origin (pickles among them) and for damaged ones.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"serialised descriptors must be bytes, not {type(data).__name__}")
    data = bytes(data)
    if data[:1] == PICKLE_MARK:
        raise nixlMismatchError(
            "these descriptors are a pickle, which could run any code: kvxfer does not load it. "
            "NIXL itself sends pickles: run the peer on kvxfer too"
        )
    if len(data) < HEAD.size or data[:8] != MAGIC:
        raise nixlMismatchError("these bytes are not descriptors serialised by kvxfer")
    if data == NONE:
        return None
    _, version, kind, memory, count = HEAD.unpack_from(data)
    if version != VERSION or kind not in (TRANSFER, REGISTRATION) or data[11:16] != bytes(5):
        raise nixlMismatchError(f"descriptors of version {version}, kind {kind} are not known here")
    if memory not in set(nixl_mem_t) or count > COUNT_MAX or len(data) < HEAD.size + ROW_BYTES * count:
        raise nixlMismatchError(
            f"serialised descriptors are damaged: {count} of memory type {memory} in {len(data)} bytes"
        )
    rows = np.frombuffer(data, "<u8", 3 * count, HEAD.size).astype(np.uint64).reshape(count, 3)
    metas: list[bytes] = []
    end = HEAD.size + ROW_BYTES * count
    if kind == REGISTRATION:
        for place in range(count):
            length = META.unpack_from(data, end)[0] if end + META.size <= len(data) else len(data)
            begin, end = end + META.size, end + META.size + length
            if end > len(data):
                raise nixlMismatchError(f"serialised descriptors are damaged: the meta of number {place} is cut off")
            metas.append(data[begin:end])
    if end != len(data):
        raise nixlMismatchError(f"serialised descriptors are damaged: {len(data) - end} bytes too many")
    return PackedRows(kind, nixl_mem_t(memory), rows, metas)
