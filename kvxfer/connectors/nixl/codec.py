"""Descriptor lists as bytes, in the form of :mod:`kvxfer.connectors.nixl.packed_rows`. Decides which
kinds of lists travel; must never know the sender.
"""

from __future__ import annotations

from typing import TypeVar

from kvxfer.connectors.nixl import packed_rows
from kvxfer.connectors.nixl.dlists import nixlRegDList, nixlXferDList
from kvxfer.connectors.nixl.errors import nixlInvalidParamError, nixlMismatchError

DListT = TypeVar("DListT", nixlXferDList, nixlRegDList)


def encode_dlist(descs: nixlXferDList | nixlRegDList | None) -> bytes:
    """The bytes of a transfer or registration list, or of None. Raises nixlInvalidParamError for anything else."""
    if descs is None:
        return packed_rows.NONE
    if type(descs) not in (nixlXferDList, nixlRegDList):
        raise nixlInvalidParamError(f"only transfer and registration lists are serialised, not {type(descs).__name__}")
    return descs.__getstate__()


def decode_any(data: bytes) -> nixlXferDList | nixlRegDList | None:
    """The list, or None, that :func:`encode_dlist` wrote; raises as :func:`packed_rows.unpack`."""
    packed = packed_rows.unpack(data)
    if packed is None:
        return None
    return (nixlRegDList if packed.kind == packed_rows.REGISTRATION else nixlXferDList).unpacked(packed)


def decode_dlist(data: bytes, kind: type[DListT]) -> DListT:
    """A list of exactly that kind; raises as :func:`decode_any`."""
    descs = decode_any(data)
    if type(descs) is not kind:
        raise nixlMismatchError(f"these bytes are a {type(descs).__name__}, not a {kind.__name__}")
    return descs
