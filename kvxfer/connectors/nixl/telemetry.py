"""An agent's events in a file: NIXL's ``NIXL_TELEMETRY_DIR``, in the form that NIXL's own readers read. Decides which
event says what; must never know handles, nor how bytes move.

The file is a ring: a head of 40 bytes (where the writer is, where the reader is, the version twice, the capacity, the
mask) and events of 16 (kind, padding, value), all in the byte order of the host. It has one writer and one reader.
An event that finds it full is counted, and the count is an event as soon as there is room. A writer makes a file of its
own and puts it in the place of whatever bore its name.
"""

from __future__ import annotations

import enum
import fnmatch
import logging
import mmap
import os
import pathlib
import secrets
import struct
import threading

from kvxfer.connectors.nixl import errors
from kvxfer.connectors.nixl.requests import nixlXferTelemetry
from kvxfer.connectors.nixl.settings import Settings

VERSION = 4
HEAD_BYTES = 40
WRITER, READER = 0, 1
CAPACITY_MIN = 8
"""One place is never used, and the end of a transfer is four events."""
log = logging.getLogger("nixl.kvxfer")


class TelemetryEvent(enum.IntEnum):
    """NIXL's kinds of events, with NIXL's numbers."""

    AGENT_TX_BYTES = 0
    AGENT_RX_BYTES = 1
    AGENT_TX_REQUESTS_NUM = 2
    AGENT_RX_REQUESTS_NUM = 3
    AGENT_MEMORY_REGISTERED = 4
    AGENT_MEMORY_DEREGISTERED = 5
    AGENT_XFER_TIME = 6
    AGENT_XFER_POST_TIME = 7
    AGENT_ERR_NOT_POSTED = 8
    AGENT_ERR_INVALID_PARAM = 9
    AGENT_ERR_BACKEND = 10
    AGENT_ERR_NOT_FOUND = 11
    AGENT_ERR_MISMATCH = 12
    AGENT_ERR_NOT_ALLOWED = 13
    AGENT_ERR_REPOST_ACTIVE = 14
    AGENT_ERR_UNKNOWN = 15
    AGENT_ERR_NOT_SUPPORTED = 16
    AGENT_ERR_REMOTE_DISCONNECT = 17
    AGENT_ERR_CANCELED = 18
    AGENT_ERR_NO_TELEMETRY = 19
    AGENT_TELEMETRY_EVENTS_DROPPED = 20


_ERRORS: dict[type[errors.nixlError], TelemetryEvent] = {
    errors.nixlNotPostedError: TelemetryEvent.AGENT_ERR_NOT_POSTED,
    errors.nixlInvalidParamError: TelemetryEvent.AGENT_ERR_INVALID_PARAM,
    errors.nixlBackendError: TelemetryEvent.AGENT_ERR_BACKEND,
    errors.nixlNotFoundError: TelemetryEvent.AGENT_ERR_NOT_FOUND,
    errors.nixlMismatchError: TelemetryEvent.AGENT_ERR_MISMATCH,
    errors.nixlNotAllowedError: TelemetryEvent.AGENT_ERR_NOT_ALLOWED,
    errors.nixlRepostActiveError: TelemetryEvent.AGENT_ERR_REPOST_ACTIVE,
    errors.nixlNotSupportedError: TelemetryEvent.AGENT_ERR_NOT_SUPPORTED,
    errors.nixlRemoteDisconnectError: TelemetryEvent.AGENT_ERR_REMOTE_DISCONNECT,
    errors.nixlCancelledError: TelemetryEvent.AGENT_ERR_CANCELED,
    errors.nixlNoTelemetryError: TelemetryEvent.AGENT_ERR_NO_TELEMETRY,
}


class Ring:
    """One agent's events. Thread-safe; events stay in the file when the agent is gone. A fork of the process writes
    nothing, because the ring belongs to its parent."""

    def __init__(self, path: pathlib.Path, capacity: int, enabled: frozenset[TelemetryEvent]) -> None:
        """Makes the file; one that was there under its name keeps its bytes, and its writers and readers, but not
        the name. Raises nixlInvalidParamError (``capacity`` is no power of two, or too small), nixlBackendError (the
        file cannot be made)."""
        if capacity < CAPACITY_MIN or capacity & (capacity - 1):
            raise errors.nixlInvalidParamError(
                f"NIXL_TELEMETRY_BUFFER_SIZE must be a power of two, and at least {CAPACITY_MIN}, not {capacity}"
            )
        self._enabled = enabled
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        self._place = self._dropped = 0
        self._mask = capacity - 1
        try:
            self._map = _make(path, HEAD_BYTES + 16 * capacity, (0, 0, VERSION << 32 | VERSION, capacity, self._mask))
        except OSError as error:
            raise errors.nixlBackendError(f"no telemetry at {str(path)!r}: {error.strerror}") from None
        self._words = memoryview(self._map).cast("Q")

    def close(self) -> None:
        """Close the file; later events are lost. May be called twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._words.release()
                self._map.close()

    def add(self, *events: tuple[TelemetryEvent, int]) -> None:
        """Add all of these events, or none if there is no room for all."""
        if os.getpid() != self._pid:
            return
        wanted = [pair for pair in events if pair[0] in self._enabled]
        with self._lock:
            if self._is_closed:
                return
            if self._dropped and self._put([(TelemetryEvent.AGENT_TELEMETRY_EVENTS_DROPPED, self._dropped)]):
                self._dropped = 0
            if not self._put(wanted) and TelemetryEvent.AGENT_TELEMETRY_EVENTS_DROPPED in self._enabled:
                self._dropped += len(wanted)

    def add_error(self, error: errors.nixlError) -> None:
        self.add((_ERRORS.get(type(error), TelemetryEvent.AGENT_ERR_UNKNOWN), 1))

    def add_end(self, is_write: bool, end: nixlXferTelemetry | errors.nixlError) -> None:
        """Of a transfer that was under way."""
        if isinstance(end, errors.nixlError):
            self.add_error(end)
            return
        self.add(
            (TelemetryEvent.AGENT_XFER_POST_TIME, end.postDuration),
            (TelemetryEvent.AGENT_XFER_TIME, end.xferDuration),
            (TelemetryEvent.AGENT_TX_BYTES if is_write else TelemetryEvent.AGENT_RX_BYTES, end.totalBytes),
            (TelemetryEvent.AGENT_TX_REQUESTS_NUM if is_write else TelemetryEvent.AGENT_RX_REQUESTS_NUM, 1),
        )

    def _put(self, events: list[tuple[TelemetryEvent, int]]) -> bool:
        if len(events) > (self._words[READER] - self._place - 1) & self._mask:
            return False
        for kind, value in events:
            at = HEAD_BYTES // 8 + 2 * self._place
            self._words[at], self._words[at + 1] = kind, value
            self._place = (self._place + 1) & self._mask
        self._words[WRITER] = self._place
        return True


def _make(path: pathlib.Path, size: int, head: tuple[int, ...]) -> mmap.mmap:
    """A file of ``size`` bytes, all of which the filesystem has allocated, at ``path``. Raises OSError."""
    temporary = path.with_name(f".kvxfer-{secrets.token_hex(8)}")
    file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(file, 0, size)
        mapped = mmap.mmap(file, size)
        mapped[:HEAD_BYTES] = struct.pack("=5Q", *head)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(file)
    return mapped


def ring_for(name: str, settings: Settings) -> Ring | None:
    """Where the environment wants the events of agent ``name``: None where it does not, or where it names an exporter
    that is a plugin of NIXL's. Raises nixlInvalidParamError, nixlBackendError."""
    exporter, directory = settings.telemetry_exporter, settings.telemetry_dir
    if exporter not in ("", "BUFFER", "NOP"):
        log.warning("NIXL_TELEMETRY_EXPORTER=%s is a plugin of NIXL's: nothing is exported", exporter)
        return None
    if exporter == "NOP" or not (exporter or directory):
        return None
    if not directory:
        raise errors.nixlInvalidParamError("NIXL_TELEMETRY_EXPORTER=BUFFER needs NIXL_TELEMETRY_DIR")
    if "/" in name or "\0" in name:
        raise errors.nixlBackendError(f"no telemetry of agent {name!r}: its name cannot be that of a file")
    globs = [text.strip() for text in settings.telemetry_metrics.split(",") if text.strip()]
    for text in globs:
        if not any(fnmatch.fnmatchcase(kind.name.lower(), text) for kind in TelemetryEvent):
            log.warning("NIXL_TELEMETRY_ENABLED_METRICS: no metric is called %r", text)
    enabled = {
        kind for kind in TelemetryEvent if not globs or any(fnmatch.fnmatchcase(kind.name.lower(), g) for g in globs)
    }
    return Ring(pathlib.Path(directory) / name, settings.telemetry_events, frozenset(enabled))
