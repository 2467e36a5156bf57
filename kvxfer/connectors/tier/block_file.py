"""One block as a file: a header that says what it is, and the block's bytes.

Decides what a file must say to be read as a block, and by which error one that does not is called; must never know
which files there are. A file is written under another name and renamed when all of it is there, so a reader finds all
of a block or nothing. It is not synced to the disk: a crash of the machine leaves files that the checksum refuses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import secrets
import stat
import struct

import numpy as np
import numpy.typing as npt
import xxhash

from kvxfer.connectors.tier.store import KEY_BYTES_MAX, RECORD_BYTES, BlockName
from kvxfer.errors import (
    BlockDamagedError,
    BlockForeignError,
    BlockMissingError,
    KvxferError,
    LimitExceededError,
    StoreBrokenError,
    StoreFullError,
)

MAGIC = b"kvxfer\x00T"
VERSION = 1
HEADER_BYTES = 4096
"""The block begins at a page of the file."""
_FIELDS = struct.Struct(f"<8sHH{RECORD_BYTES}s{KEY_BYTES_MAX}sQ16s")
"""Magic, version, bytes of the key, record, key (padded by zeros), bytes of the block, XXH3-128 of the block."""
_CHECK = struct.Struct("<Q")
"""XXH3-64 of the fields, behind them."""
SUFFIX = ".kvb"
FILE_NAME = re.compile(rf"([0-9a-f]{{2,{2 * KEY_BYTES_MAX}}})\.kvb")
TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.kvb-part")
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NO_FILE = frozenset({errno.ELOOP, errno.ENXIO})
"""A link or a socket has the name."""
TOO_MANY = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""This process or this host lacks something, and the file may be good."""


@dataclasses.dataclass(frozen=True)
class BlockHeader:
    """What a file says of its block."""

    name: BlockName
    length_bytes: int
    checksum: bytes
    """XXH3-128: it guards against accidents. An attacker who writes to the directory needs none."""

    def encode(self) -> bytes:
        """HEADER_BYTES bytes."""
        key = self.name.key
        fields = _FIELDS.pack(MAGIC, VERSION, len(key), self.name.record, key, self.length_bytes, self.checksum)
        return (fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))).ljust(HEADER_BYTES, b"\x00")

    @classmethod
    def decode(cls, header: bytes) -> BlockHeader:
        """Raises BlockForeignError for what is no block file of this version, BlockDamagedError for one whose header
        was changed."""
        if len(header) < HEADER_BYTES:
            raise BlockDamagedError(f"the file ends after {len(header)} bytes, within its header")
        magic, version, key_bytes, record, key, length, checksum = _FIELDS.unpack_from(header)
        if magic != MAGIC:
            raise BlockForeignError("the file is no block of kvxfer")
        if version != VERSION:
            raise BlockForeignError(f"the file has format {version}, this version reads {VERSION}")
        if _CHECK.unpack_from(header, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(header[: _FIELDS.size]):
            raise BlockDamagedError("the file's header was changed")
        if not 0 < key_bytes <= KEY_BYTES_MAX or any(key[key_bytes:]) or any(header[_FIELDS.size + _CHECK.size :]):
            raise BlockDamagedError("the file's header is not what kvxfer writes")
        return cls(BlockName(record, key[:key_bytes]), length, checksum)


def write_block(path: str, name: BlockName, row: npt.NDArray[np.uint8]) -> None:
    """Write a block. Raises StoreFullError where the disk or the quota is full, StoreBrokenError for any other failure;
    then nothing is left."""
    body = row.data
    header = BlockHeader(name, body.nbytes, xxhash.xxh3_128_digest(body)).encode()
    temporary = os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}{SUFFIX}-part")
    try:
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _write_all(file, memoryview(header))
            _write_all(file, body)
        finally:
            os.close(file)
        os.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise _named(error, path) from error


def read_block(path: str, name: BlockName, row: npt.NDArray[np.uint8]) -> None:
    """Read a block into ``row``, which may hold anything if this raises: BlockMissingError, BlockForeignError (it is
    another block, another model's, or of another length, or no file), BlockDamagedError, StoreBrokenError;
    LimitExceededError: nothing is known of the file."""
    body = row.data
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise BlockForeignError(f"what has the name of block {name} is no file")
            header = BlockHeader.decode(os.pread(file, HEADER_BYTES, 0))
            if header.name != name:
                raise BlockForeignError(f"the file of block {name} holds block {header.name}")
            if header.length_bytes != body.nbytes:
                raise BlockForeignError(f"the file has a block of {header.length_bytes} bytes, not {body.nbytes}")
            size = os.fstat(file).st_size
            if size != HEADER_BYTES + body.nbytes:
                raise BlockDamagedError(f"the file has {size} bytes, not {HEADER_BYTES + body.nbytes}")
            _read_all(file, body)
        finally:
            os.close(file)
    except FileNotFoundError:
        raise BlockMissingError(f"the file of block {name} is gone") from None
    except OSError as error:
        if error.errno in NO_FILE:
            raise BlockForeignError(f"what has the name of block {name} is no file") from None
        raise _named(error, path) from error
    if xxhash.xxh3_128_digest(body) != header.checksum:
        raise BlockDamagedError(f"the bytes of block {name} are not those that were written")


def _write_all(file: int, body: memoryview) -> None:
    body = body.cast("B")
    while body:
        written = os.write(file, body)
        body = body[written:]


def _read_all(file: int, body: memoryview) -> None:
    body, offset = body.cast("B"), HEADER_BYTES
    while body:
        count = os.preadv(file, [body], offset)
        if not count:
            raise BlockDamagedError("the file became shorter while it was read")
        body, offset = body[count:], offset + count


def _named(error: OSError, path: str) -> KvxferError:
    text = f"{os.path.dirname(path)}: {error.strerror or error}"
    if error.errno in TOO_MANY:
        return LimitExceededError(text)
    return StoreFullError(text) if error.errno in NO_ROOM else StoreBrokenError(text)
