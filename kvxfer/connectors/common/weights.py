"""The fingerprint of the weights that an engine computes with: read in the background, and unknown again once the files
or the weights in memory change. Decides when the files on disk are what was loaded; must never delay an engine.

The fingerprint is of what was loaded, but the file on disk may have changed since. If the engine was watched while it
loaded, a file counts if it was not written after the worker began to read it. Otherwise a file counts if it was not
written after this process began.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from kvxfer.connectors.common.checkpoint import ModelName, NotKnown, fingerprint_of, printable, unknown, weight_files
from kvxfer.connectors.common.digest_cache import DigestCache
from kvxfer.connectors.common.file_digests import FileChanged, shared_cache
from kvxfer.connectors.common.stamps import Stamp, process_start_ns, stamp_of

log = logging.getLogger("kvxfer.weights")

WATCH_S = 1.0
"""How often the loaded files are looked at."""
PENDING = "its weights are still being read"


class LoadRecord(Protocol):
    """What a process saw its engine load, and later changes of weights in memory."""

    def files_of(self, model: str) -> list[str]:
        """The files that were read for that model; empty if unknown."""

    def read_as(self, path: str) -> tuple[Stamp, int] | None:
        """The state of that file just before it was read, and that time (since the epoch); ``None`` if unknown."""

    def listen(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call ``listener`` with the reason whenever weights change in memory, and at once if they have changed before.
        Returns a function that ends this."""


class Weights:
    """The weights of one worker. A thread of its own begins at once to read them."""

    def __init__(
        self,
        find_models: Callable[[], Iterable[ModelName]],
        *,
        loaded: LoadRecord,
        cache: DigestCache | None = None,
        started_ns: Callable[[], int | None] = process_start_ns,
        watch_s: float = WATCH_S,
    ) -> None:
        """``find_models`` raises NotKnown where there are no files to compare."""
        self._find_models = find_models
        self._loaded = loaded
        self._cache = cache
        self._started_ns = started_ns
        self._watch_s = watch_s
        self._lock = threading.Lock()
        self._state: tuple[str, str | None] = (unknown(PENDING), PENDING)
        self._is_final = False
        self._listeners: list[Callable[[], None]] = []
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._unlisten = loaded.listen(self.forget)
        self._thread = threading.Thread(target=self._run, name="kvxfer weights", daemon=True)
        self._thread.start()

    @property
    def fingerprint(self) -> str:
        """The fingerprint for a compatibility record; it equals nothing while :attr:`why` has a reason."""
        return self._state[0]

    @property
    def why(self) -> str | None:
        """Why the weights are unknown; ``None``: they are known."""
        return self._state[1]

    def listen(self, listener: Callable[[], None]) -> None:
        """Call it after every change, from any thread."""
        with self._lock:
            self._listeners.append(listener)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the weights are known, or certain to stay unknown. Returns whether that came in time. For tests
        and tools."""
        return self._settled.wait(timeout_s)

    def forget(self, why: str) -> None:
        """The weights are unknown from now on, for good: only an engine that loads them anew knows them."""
        with self._lock:
            if self._is_final:
                return
            self._is_final = True
        why = printable(why)
        log.warning("from now on decode engines compute prompts themselves: %s", why)
        self._become(unknown(why), why)

    def stop(self) -> None:
        """Callable twice; waits for nothing."""
        self._unlisten()
        self._stopping.set()

    def _become(self, fingerprint: str, why: str | None) -> None:
        with self._lock:
            if self._is_final and why is None:
                return
            self._state = (fingerprint, why)
            listeners = list(self._listeners)
        self._settled.set()
        for listener in listeners:
            listener()

    def _run(self) -> None:
        try:
            self._read_and_watch()
        except Exception as error:  # an engine's config may raise anything; without this the weights would stay pending
            log.exception("the weight files could not be read or watched")
            self.forget(f"which weights were loaded is not known: {error!r}")

    def _read_and_watch(self) -> None:
        begun_s = time.monotonic()
        try:
            files = self._files()
            fingerprint = fingerprint_of(files, self._cache or shared_cache(), self._stopping.is_set)
        except InterruptedError:
            return
        except (NotKnown, OSError, FileChanged) as error:
            self.forget(f"which weights were loaded is not known: {error}")
            return
        size = sum(stamp.size for stamp in files.values())
        log.info("%d weight files of %d bytes were read in %.1f s", len(files), size, time.monotonic() - begun_s)
        self._become(fingerprint, None)
        while not self._stopping.wait(self._watch_s):
            for path, stamp in files.items():
                try:
                    is_same = stamp_of(path) == stamp
                except FileNotFoundError:  # the loaded weights stay known, until another file takes its place
                    is_same = True
                except OSError:
                    is_same = False
                if not is_same:
                    self.forget(f"{path} was changed after it was loaded")
                    return

    def _files(self) -> dict[str, Stamp]:
        """The weight files in the state in which they were loaded. Raises NotKnown, OSError."""
        started_ns = self._started_ns()
        files = {}
        for name in self._find_models():
            for path in self._loaded.files_of(name.model) or weight_files(name):
                known = self._loaded.read_as(path)
                stamp = stamp_of(path)
                if known is not None:
                    read, at_ns = known
                    if stamp != read:
                        raise NotKnown(f"{path} was changed after the engine began to read it")
                    if not read.was_settled(at_ns):
                        raise NotKnown(f"{path} was written just before the engine read it")
                elif started_ns is None or not stamp.is_older(started_ns):
                    raise NotKnown(f"{path} is younger than this process, which may have read what was there before")
                files[path] = stamp
        if not files:
            raise NotKnown("there are no weight files")
        return files
