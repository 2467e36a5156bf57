"""A store of blocks in a directory of files: its bound, which files there are, and the threads that copy.

Decides when a file is written, read or removed; must never know an engine. One process owns a directory, which keeps
the bound exact; what the last owner left is found again by the names and sizes of files, and believed only once it was
read (:mod:`~kvxfer.connectors.tier.block_file`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvxfer.connectors.tier.block_file import (
    FILE_NAME,
    HEADER_BYTES,
    NO_ROOM,
    SUFFIX,
    TEMPORARY,
    read_block,
    write_block,
)
from kvxfer.connectors.tier.shelf import Shelf
from kvxfer.connectors.tier.store import RECORD_BYTES, BlockMove, BlockName, Done, Presence, Rows, StoreFigures
from kvxfer.errors import (
    BlockMissingError,
    BlocksBusyError,
    ClosedError,
    ConfigError,
    KvxferError,
    LimitExceededError,
    StoreBrokenError,
    StoreFullError,
)

log = logging.getLogger("kvxfer.tier")

FORMAT = "kvxfer-tier-1"
"""The folder below the directory that is given: nothing outside of it is looked at, and nothing in it that has other
names is touched."""
THREADS_MAX = 64
FULL_S = 10.0
"""After so long a disk that was full may have room again."""


def check_private(root: pathlib.Path) -> None:
    """Whoever can write to the directory decides what prompts are answered, so it belongs to the user as whom this
    process makes files, and nobody else may write there. Raises ConfigError, OSError."""
    try:
        with tempfile.TemporaryFile(dir=root) as mine:
            user = os.fstat(mine.fileno()).st_uid
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        user = os.geteuid()
    found = os.stat(root)
    if found.st_uid != user:
        raise ConfigError(
            f"the tier's directory {root} belongs to user {found.st_uid}, and this process is user {user}"
        )
    if found.st_mode & 0o077:
        os.chmod(root, 0o700)


class FileStore:
    """See :class:`~kvxfer.connectors.tier.store.BlockStore`. A thread begins at once to look for files; until it has
    seen all, no block is here."""

    def __init__(self, rows: Rows, path: str, capacity_bytes: int, *, threads: int = 4) -> None:
        """``capacity_bytes`` bounds the files' sizes together, headers included. Raises ConfigError where the directory
        cannot be used, or another process has it."""
        self._rows: Rows | None = rows
        self._root = pathlib.Path(path) / FORMAT
        self._lock = threading.Lock()
        self._shelf: Shelf[BlockName] = Shelf(capacity_bytes)
        self._writing: set[BlockName] = set()
        """On the shelf for their bytes, and not there yet."""
        self._leaving: set[BlockName] = set()
        """Off the shelf, and their files are being removed."""
        self._evictions = 0
        self._full_until_s = 0.0
        """Until when less is kept, because the disk was full; 0: it was not."""
        self._has_scanned = threading.Event()
        self._is_closed = False
        try:
            self._root = self._root.expanduser().absolute()
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self._root)
            self._owner = os.open(self._root / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except (OSError, ValueError, RuntimeError) as error:
            words = getattr(error, "strerror", None) or error
            raise ConfigError(f"the tier's directory {str(self._root)!r} cannot be used: {words}") from error
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._owner)
            raise ConfigError(f"another process has the tier's directory {self._root}: give each engine one") from error
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvxfer tier")
        self._threads.submit(self._scan)

    # --- the engine's thread ---

    def find(self, name: BlockName) -> Presence:
        if not self._has_scanned.is_set():
            return Presence.ABSENT
        with self._lock:
            is_here = name in self._shelf and name not in self._writing
        return Presence.HERE if is_here else Presence.ABSENT

    def flush(self) -> None:
        """Nothing has to be asked."""

    @property
    def is_asking(self) -> bool:
        return False

    def save(self, moves: Sequence[BlockMove], done: Done) -> None:
        with self._lock:  # the beginning of a prompt is the last to go
            self._shelf.use([move.name for move in moves])
        self._each(self._save, moves, done)

    def load(self, moves: Sequence[BlockMove], done: Done) -> None:
        self._each(self._load, moves, done)

    def use(self, names: Sequence[BlockName]) -> None:
        with self._lock:
            self._shelf.use(names)

    def figures(self) -> StoreFigures:
        with self._lock:
            shelf = self._shelf
            return StoreFigures(
                len(shelf) - len(self._writing), shelf.used_bytes, shelf.capacity_bytes, self._evictions
            )

    def wait_scanned(self, timeout_s: float) -> bool:
        """Wait until the files that are there are known; for tests and tools."""
        return self._has_scanned.wait(timeout_s)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._threads.shutdown(wait=True)
        self._rows = None
        os.close(self._owner)

    # --- threads of the store ---

    def _each(self, act: Callable[[BlockMove], None], moves: Sequence[BlockMove], done: Done) -> None:
        """Each move on a thread; ``done`` after the last."""
        outcomes: list[KvxferError | None] = [None] * len(moves)
        left = len(moves)

        def run(place: int, move: BlockMove) -> None:
            nonlocal left
            try:
                if self._is_closed:
                    raise ClosedError("the store was closed")
                self._has_scanned.wait()
                act(move)
            except KvxferError as error:
                outcomes[place] = error
            except Exception as error:  # a bug must not leave the engine waiting
                log.exception("a block could not be moved")
                outcomes[place] = StoreBrokenError(repr(error))
            with self._lock:
                left -= 1
                is_last = not left
            if is_last:
                done(outcomes)

        if not moves:
            done(outcomes)
        for place, move in enumerate(moves):
            try:
                self._threads.submit(run, place, move)
            except RuntimeError:  # closed
                run(place, move)

    def _save(self, move: BlockMove) -> None:
        name, row = move.name, self._row(move)
        size = HEADER_BYTES + row.nbytes
        with self._lock:
            if name in self._shelf:
                return
            if name in self._leaving:
                raise BlocksBusyError(f"block {name} is just being evicted")
            if 0.0 < self._full_until_s <= time.monotonic():
                self._full_until_s = 0.0
                self._shelf.restore()
            victims = self._shelf.make_room(size)
            self._shelf.put(name, size)
            self._shelf.pin(name)
            self._writing.add(name)
            self._leaving.update(victims)
            self._evictions += len(victims)
        self._unlink(victims)
        is_written = False
        try:
            write_block(self._path(name), name, row)
            is_written = True
        except StoreFullError as error:
            with self._lock:  # others use the disk too: less is kept for a while, and old blocks make room
                self._shelf.shrink(self._shelf.used_bytes - size)
                self._full_until_s = time.monotonic() + FULL_S
                log.warning("%s; for %g s at most %d bytes are kept", error, FULL_S, self._shelf.capacity_bytes)
            raise
        finally:
            with self._lock:
                self._writing.discard(name)
                self._shelf.unpin(name)
                if not is_written:
                    self._shelf.remove(name)

    def _load(self, move: BlockMove) -> None:
        name, row = move.name, self._row(move)
        with self._lock:
            if name not in self._shelf or name in self._writing:
                raise BlockMissingError(f"block {name} is not here any more")
            self._shelf.pin(name)
        is_kept = False
        try:
            read_block(self._path(name), name, row)
            is_kept = True
            with contextlib.suppress(OSError):
                os.utime(self._path(name))  # for the next owner
        except LimitExceededError:  # nothing is wrong with the file
            is_kept = True
            raise
        finally:
            with self._lock:
                self._shelf.unpin(name)
                if not is_kept and self._shelf.remove(name):
                    self._leaving.add(name)
            if not is_kept:
                self._unlink([name])

    def _row(self, move: BlockMove) -> Rows:
        rows = self._rows
        if rows is None:
            raise ClosedError("the store was closed")
        row: Rows = rows[move.row]
        return row

    def _unlink(self, names: Sequence[BlockName]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(self._path(name))
        with self._lock:
            self._leaving.difference_update(names)

    def _path(self, name: BlockName) -> str:
        key = name.key.hex()
        return os.path.join(self._root, name.record.hex(), key[:2], key + SUFFIX)

    # --- what is there at the start ---

    def _scan(self) -> None:
        try:
            found = sorted(self._files(), key=lambda entry: entry[0])
            with self._lock:
                for _, name, size in found:  # the oldest first: they are what there is no room for
                    try:
                        victims = self._shelf.make_room(size)
                    except StoreFullError:
                        victims = [name]
                    else:
                        self._shelf.put(name, size)
                    self._leaving.update(victims)
                leaving = list(self._leaving)
                self._evictions += len(leaving)
            self._unlink(leaving)
            log.info("%d blocks of %d bytes are in %s", len(self._shelf), self._shelf.used_bytes, self._root)
        except Exception:
            log.exception("the tier's directory could not be looked through")
        finally:
            self._has_scanned.set()

    def _files(self) -> Iterator[tuple[int, BlockName, int]]:
        """Time, block and size of each file that has the name of a block; what an owner did not finish is removed."""
        for record in self._folders(self._root, 2 * RECORD_BYTES):
            for folder in self._folders(record, 2):
                for entry in os.scandir(folder):
                    if TEMPORARY.fullmatch(entry.name):
                        with contextlib.suppress(OSError):
                            os.unlink(entry.path)
                        continue
                    match = FILE_NAME.fullmatch(entry.name)
                    is_name = match is not None and len(match[1]) % 2 == 0 and match[1].startswith(folder.name)
                    if match is not None and is_name and entry.is_file(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        name = BlockName(bytes.fromhex(record.name), bytes.fromhex(match[1]))
                        yield stat.st_mtime_ns, name, stat.st_size

    def _folders(self, path: str | pathlib.Path | os.DirEntry[str], digits: int) -> Iterator[os.DirEntry[str]]:
        for entry in os.scandir(path):
            is_hex = len(entry.name) == digits and all(digit in "0123456789abcdef" for digit in entry.name)
            if is_hex and entry.is_dir(follow_symlinks=False):
                yield entry
