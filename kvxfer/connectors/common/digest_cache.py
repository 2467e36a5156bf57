"""Digests of files that were read whole, cached for other processes of this user and this boot. Decides which entries
are trusted; must never know the files or the digest algorithms.

An entry's name is made of the state of its file (boot, device, inode, size, times), so a changed file has no entry. An
entry is written only if the file was not written in the COARSE_NS before it was read: a younger file may change without
its stamp changing. If there is no directory that only this user can write, entries are kept in memory only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import secrets
import stat
import threading
import time
from collections.abc import Iterator

from kvxfer.connectors.common.stamps import COARSE_NS, Stamp, boot_id

LOCK_WAIT_S = 600.0
"""How long another process may take for a file before this one reads it too."""
LOCK_POLL_S = 0.05
ENTRY_BYTES_MAX = 4096
ENTRIES_MAX = 4096


class DigestCache:
    """Entries in ``directory``, which is created; ``None``: in memory only. From any thread."""

    def __init__(self, directory: pathlib.Path | None) -> None:
        self._boot = boot_id()
        self._directory = directory if directory is not None and self._boot and _is_ours(directory) else None
        self._memory: dict[str, str] = {}
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    @property
    def directory(self) -> pathlib.Path | None:
        """Where entries are kept; ``None``: in memory only."""
        return self._directory

    def get(self, kind: str, stamp: Stamp) -> str | None:
        """The digest of the file in that state, if it is known."""
        key = self._key(kind, stamp)
        with self._lock:
            known = self._memory.get(key)
        if known is not None or self._directory is None:
            return known
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            entry = json.loads(_read_own(self._path(key)))
            if entry["key"] == key and entry["read_ns"] - stamp.newest_ns >= COARSE_NS:
                return str(entry["digest"])
        return None

    def put(self, kind: str, stamp: Stamp, digest: str, read_ns: int) -> None:
        """Store a digest; the reading began at ``read_ns`` since the epoch."""
        if read_ns - stamp.newest_ns < COARSE_NS:
            return
        key = self._key(kind, stamp)
        with self._lock:
            self._memory[key] = digest
        if self._directory is None:
            return
        path = self._path(key)
        scratch = path.with_name(f"{self._boot[:8]}-{secrets.token_hex(8)}.new")
        with contextlib.suppress(OSError):
            file = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, json.dumps({"key": key, "digest": digest, "read_ns": read_ns}).encode())
            finally:
                os.close(file)
            scratch.rename(path)
        with contextlib.suppress(OSError):
            scratch.unlink()
        self._prune()

    @contextlib.contextmanager
    def turn(self, kind: str, stamp: Stamp, *, waits: bool) -> Iterator[bool]:
        """Hold the lock for reading that file. Yields whether this thread has it. If another thread or process has it,
        this yields ``False``: at once or, with ``waits``, after LOCK_WAIT_S."""
        key = self._key(kind, stamp)
        end_s = time.monotonic() + (LOCK_WAIT_S if waits else 0.0)
        with contextlib.ExitStack() as held:
            while not self._take(key, held):
                if time.monotonic() >= end_s:
                    yield False
                    return
                time.sleep(LOCK_POLL_S)
            yield True

    def _take(self, key: str, held: contextlib.ExitStack) -> bool:
        with self._lock:
            if key in self._busy:
                return False
            self._busy.add(key)
        if self._directory is None:
            held.callback(self._release, key)
            return True
        try:
            file = os.open(self._path(key).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # the directory is no longer writable: other processes may read the file too
            held.callback(self._release, key)
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            self._release(key)
            return False
        held.callback(self._release, key)
        held.callback(os.close, file)
        return True

    def _release(self, key: str) -> None:
        with self._lock:
            self._busy.discard(key)

    def _key(self, kind: str, stamp: Stamp) -> str:
        return f"{kind} {self._boot} {stamp.device} {stamp.inode} {stamp.size} {stamp.mtime_ns} {stamp.ctime_ns}"

    def _path(self, key: str) -> pathlib.Path:
        assert self._directory is not None
        return self._directory / f"{self._boot[:8]}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def _prune(self) -> None:
        """Delete entries of earlier boots, and the oldest beyond the limit."""
        assert self._directory is not None
        with contextlib.suppress(OSError):
            paths = list(self._directory.iterdir())
            for path in paths:
                if not path.name.startswith(f"{self._boot[:8]}-"):
                    path.unlink(missing_ok=True)
            if len(paths) > ENTRIES_MAX:
                paths.sort(key=lambda path: path.stat().st_mtime_ns if path.exists() else 0)
                for path in paths[: len(paths) - ENTRIES_MAX // 2]:
                    path.unlink(missing_ok=True)


def default_directory() -> pathlib.Path | None:
    """``$XDG_CACHE_HOME/kvxfer/digests``, or below ``~/.cache``; ``None`` for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "kvxfer" / "digests"
    except RuntimeError:
        return None


def _is_ours(directory: pathlib.Path) -> bool:
    """Make the directory. Returns whether only this user can write there."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o022 and os.access(directory, os.W_OK)


def _read_own(path: pathlib.Path) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise OSError("another user could have written it")
        return os.read(file, ENTRY_BYTES_MAX)
    finally:
        os.close(file)
