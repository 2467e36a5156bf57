"""``nixl._utils``: raw memory for tests and examples. Decides nothing; a wrong address crashes the process, as
there."""

from __future__ import annotations

import ctypes

from kvxfer.connectors.nixl.errors import nixlInvalidParamError, nixlMismatchError

__all__ = ["ba_buf", "free_passthru", "malloc_passthru", "verify_transfer"]

ALIGNMENT = 4096
_libc = ctypes.CDLL(None, use_errno=True)
_libc.aligned_alloc.restype = ctypes.c_void_p
_libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_libc.free.restype = None
_libc.free.argtypes = [ctypes.c_void_p]


def malloc_passthru(size: int, /) -> int:
    """The address of ``size`` bytes of page-aligned memory. Raises nixlInvalidParamError where there are not so
    many."""
    address = _libc.aligned_alloc(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT) if size > 0 else None
    if not address:
        raise nixlInvalidParamError(f"{size} bytes cannot be allocated")
    return int(address)


def free_passthru(buf: int, /) -> None:
    """Give back what :func:`malloc_passthru` gave."""
    _libc.free(buf)


def ba_buf(addr: int, size: int, /) -> None:
    """Fill memory with 0xba."""
    ctypes.memset(addr, 0xBA, size)


def verify_transfer(addr1: int, addr2: int, size: int, /) -> None:
    """Raises nixlMismatchError unless both places hold the same bytes."""
    if ctypes.string_at(addr1, size) != ctypes.string_at(addr2, size):
        raise nixlMismatchError(f"{size} bytes at {addr1:#x} and at {addr2:#x} differ")
