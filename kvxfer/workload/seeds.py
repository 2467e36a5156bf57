"""From which random numbers something is drawn: a generator for each purpose, by explicit seed.

Decides that two purposes never share a stream, and that the same seed gives the same numbers in every process: the key
is a BLAKE2b digest of the parts, never ``hash()``. Knows nothing of what is drawn.
"""

from __future__ import annotations

import hashlib

import numpy as np

Stream = np.random.Generator


def key_of(*parts: int | str) -> bytes:
    """16 bytes that depend on every part, its type and its place."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = f"{'i' if isinstance(part, int) else 's'}{part}".encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def stream(*parts: int | str) -> Stream:
    """The generator (PCG64) of that purpose: ``stream(seed, "arrivals")``."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(key_of(*parts), "little")))


def stream_of_block(key: bytes, number: int) -> Stream:
    """The generator of one block of a key of 16 bytes; faster than ``stream``. ``number`` is any 64 bits or more."""
    data = number.to_bytes(16, "little", signed=True)
    seed = hashlib.blake2b(data, digest_size=16, key=key).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(seed, "little")))
