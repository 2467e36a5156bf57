"""CRC-32C: the vectors of RFC 3720, and every method of this CPU against the portable one."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.errors import InvalidArgumentError

METHODS = native.crc32c_methods()
ISCSI_READ = bytes.fromhex(
    "01c000000000000000000000000000001400000000000400000000140000001828000000000000000200000000000000"
)
VECTORS = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (ISCSI_READ, 0xD9963A56),
]


def test_portable_is_always_there_and_last() -> None:
    assert METHODS[-1] == "portable"
    assert len(set(METHODS)) == len(METHODS)


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_vectors_of_rfc_3720(data: bytes, expected: int) -> None:
    assert native.crc32c(data) == expected
    for method in METHODS:
        assert native.crc32c_by(method, data) == expected, method


@pytest.mark.parametrize("method", METHODS)
def test_every_method_agrees_with_the_portable_one(method: str) -> None:
    random = np.random.default_rng(7)
    data = random.integers(0, 256, 80_000, dtype=np.uint8)
    sizes = [*range(0, 300), 503, 504, 505, 511, 512, 513, 4079, 4080, 4081, 4096, 8160, 65536]
    sizes += [int(size) for size in random.integers(0, 70_000, 150)]
    for size in sizes:
        begin, value = int(random.integers(0, 200)), int(random.integers(0, 1 << 32))
        part = data[begin : begin + size]
        expected = native.crc32c_by("portable", part, value)
        assert native.crc32c_by(method, part, value) == expected, (size, begin, value)


def test_it_goes_on_from_what_came_before() -> None:
    random = np.random.default_rng(8)
    data = random.integers(0, 256, 20_000, dtype=np.uint8).tobytes()
    whole = native.crc32c(data)
    for cut in (0, 1, 7, 64, 4095, 19_999, 20_000):
        assert native.crc32c(data[cut:], native.crc32c(data[:cut])) == whole


def test_one_flipped_bit_is_seen() -> None:
    data = bytearray(np.random.default_rng(9).integers(0, 256, 4096, dtype=np.uint8).tobytes())
    before = native.crc32c(data)
    for bit in (0, 1, 4095 * 8 + 7, 12_345):
        data[bit // 8] ^= 1 << bit % 8
        assert native.crc32c(data) != before
        data[bit // 8] ^= 1 << bit % 8
    assert native.crc32c(data) == before


def test_crc32c_takes_contiguous_buffers_only() -> None:
    assert native.crc32c(memoryview(b"123456789")) == 0xE3069283
    with pytest.raises(InvalidArgumentError):
        native.crc32c_by("no such method", b"")
    with pytest.raises((TypeError, BufferError)):
        native.crc32c("text")
