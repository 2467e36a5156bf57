"""Digests of whole files. Each file is read once on a host: by one of the processes that need its digest, while the
others read other files or wait. Decides nothing about what the files are.

Reading and digesting go on without the GIL, a MiB at a time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import xxhash

from kvxfer.connectors.common.digest_cache import DigestCache, default_directory
from kvxfer.connectors.common.stamps import Stamp, stamp_of, stamp_of_open

CHUNK_BYTES = 1 << 20

XXH3 = "xxh3-128"
"""For files of the operator: it detects mistakes, at memory speed, but no attack."""
SHA256 = "sha-256"
"""For files of users: an attacker cannot make two contents with one digest."""
_KINDS: dict[str, Callable[[], Any]] = {XXH3: xxhash.xxh3_128, SHA256: hashlib.sha256}


class FileChanged(Exception):
    """A file is not what it was when it was looked at first."""


@functools.cache
def shared_cache() -> DigestCache:
    """The cache that all processes of this user share."""
    return DigestCache(default_directory())


def digests_of(
    files: Mapping[str, Stamp], kind: str, cache: DigestCache, should_stop: Callable[[], bool] = lambda: False
) -> dict[str, str]:
    """The digest of each of ``files``, by path, in exactly that state.

    Raises FileChanged where one has another state by now, OSError where one cannot be read, InterruptedError where it
    ``should_stop``.
    """
    found: dict[str, str] = {}
    for waits in (False, True):  # first the files that no other process is reading
        for path, stamp in files.items():
            if path in found:
                continue
            digest = cache.get(kind, stamp)
            if digest is None:
                with cache.turn(kind, stamp, waits=waits) as is_ours:
                    if not is_ours and not waits:
                        continue
                    digest = cache.get(kind, stamp)
                    if digest is None:
                        digest = _read(path, stamp, kind, cache, should_stop)
            elif stamp_of(path) != stamp:
                raise FileChanged(f"{path} was changed")
            found[path] = digest
    return found


def stamps_of(paths: Iterable[str]) -> dict[str, Stamp]:
    """The stamp of each file as it is now. Raises OSError."""
    return {path: stamp_of(path) for path in paths}


def _read(path: str, stamp: Stamp, kind: str, cache: DigestCache, should_stop: Callable[[], bool]) -> str:
    read_ns = time.time_ns()
    whole = _KINDS[kind]()
    memory = memoryview(bytearray(min(CHUNK_BYTES, max(1, stamp.size))))
    done = 0
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if stamp_of_open(file) != stamp:
            raise FileChanged(f"{path} was changed")
        while count := os.readv(file, [memory]):
            whole.update(memory[:count])
            done += count
            if should_stop():
                raise InterruptedError("the engine stops")
        if done != stamp.size or stamp_of_open(file) != stamp or stamp_of(path) != stamp:
            raise FileChanged(f"{path} was changed while it was read")
    finally:
        os.close(file)
    digest: str = whole.hexdigest()
    cache.put(kind, stamp, digest, read_ns)
    return digest
