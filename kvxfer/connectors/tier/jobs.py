"""What an engine's tier does with its store: jobs of several blocks, which request asked for what, and when nothing is
stored or loaded at all.

Decides that a block is moved only while it is known which record the engine's blocks have, that a request which met a
failure does not try that block again, and which outcome a job has. Must never know an engine's classes or a store's
kind.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvxfer.connectors.tier.counts import TierCounter
from kvxfer.connectors.tier.store import BlockMove, BlockName, BlockStore, Outcomes, Presence
from kvxfer.errors import IncompatibleError, KvxferError
from kvxfer.ratelimit import RateLimitedWarning

log = logging.getLogger("kvxfer.tier")

REQUEST_KEYS_MAX = 1 << 16
"""So many blocks of one request are remembered."""


@dataclasses.dataclass(frozen=True)
class JobEnd:
    """A job is over, and touches the engine's memory no more."""

    job_id: int
    keys: tuple[bytes, ...]
    good_keys: tuple[bytes, ...]
    """Those that were moved."""
    seconds: float
    moved_bytes: int

    @property
    def is_success(self) -> bool:
        return len(self.good_keys) == len(self.keys)


@dataclasses.dataclass
class _AskedKeys:
    """What one request asked for, in the order of its tokens, and what failed for it."""

    found: dict[bytes, bool] = dataclasses.field(default_factory=dict)
    failed: set[bytes] = dataclasses.field(default_factory=set)
    offered: set[bytes] = dataclasses.field(default_factory=set)
    """Blocks that are here, of which the engine has begun no load in this step."""


class TierJobs:
    """All calls but :meth:`drain` return at once; they come from one thread, the engine's."""

    def __init__(self, store: BlockStore, block_bytes: int, record: Callable[[], bytes]) -> None:
        """``record()``: SHA-256 of what says what the engine's blocks are. It raises IncompatibleError while that is
        not known: then nothing is stored or loaded."""
        self.store = store
        self.counter = TierCounter()
        self._block_bytes = block_bytes
        self._record = record
        self._requests: dict[str, _AskedKeys] = {}
        self._offering: set[str] = set()
        """Requests that were told in this step of blocks that are here."""
        self._changed = threading.Condition()
        self._running = 0
        self._ended: collections.deque[tuple[JobEnd, bool, bytes]] = collections.deque()
        self._unknown_warning = RateLimitedWarning(log, "nothing is stored or loaded: %s", period_s=60.0)
        self._failure_warning = RateLimitedWarning(log, "a block could not be %s: %s")

    # --- blocks of a request ---

    def find(self, request_id: str, key: bytes) -> Presence:
        """Whether that block could be loaded now."""
        asked = self._requests.setdefault(request_id, _AskedKeys())
        if key in asked.failed:
            return Presence.ABSENT
        record = self._known_record("find")
        presence = Presence.ABSENT if record is None else self.store.find(BlockName(record, key))
        is_new = key not in asked.found and len(asked.found) < REQUEST_KEYS_MAX
        if presence is not Presence.ASKED and is_new:
            asked.found[key] = presence is Presence.HERE
            self.counter.found(presence is Presence.HERE)
        if presence is Presence.HERE:
            asked.offered.add(key)
            self._offering.add(request_id)
        return presence

    def step_over(self) -> None:
        """The engine has come to the end of a step. A block that it was told of, and did not load, found no row in the
        engine's primary tier. For that request it is absent from now on: a row for it would be that of a block before
        it, which the request needs more, and so on for ever."""
        for request_id in self._offering:
            asked = self._requests.get(request_id)
            if asked is not None:
                asked.failed |= asked.offered
                asked.offered.clear()
        self._offering.clear()
        self.store.flush()

    def request_over(self, request_id: str) -> None:
        """It asks for nothing more. Its blocks count as used now."""
        asked = self._requests.pop(request_id, None)
        record = self._known_record("") if asked is not None and asked.found else None
        if asked is not None and record is not None:
            self.store.use([BlockName(record, key) for key in asked.found])

    # --- jobs ---

    def save(self, job_id: int, request_id: str, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Copy those rows to the store."""
        asked = self._requests.get(request_id)
        for key in keys if asked is not None else ():
            if asked is not None and len(asked.found) < REQUEST_KEYS_MAX:
                asked.found.setdefault(key, False)
        self._begin(job_id, request_id, keys, rows, is_load=False)

    def load(self, job_id: int, request_id: str, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Copy those blocks to rows."""
        asked = self._requests.get(request_id)
        if asked is not None:
            asked.offered.difference_update(map(bytes, keys))
        self._begin(job_id, request_id, keys, rows, is_load=True)

    def take_ended(self) -> list[JobEnd]:
        """The jobs that ended since the last call."""
        ended = []
        while self._ended:
            end, is_load, record = self._ended.popleft()
            if is_load and end.good_keys and self._known_record("load", len(end.good_keys)) != record:
                end = dataclasses.replace(end, good_keys=())  # the weights changed meanwhile
            if is_load:
                self.counter.loaded(len(end.good_keys), len(end.good_keys) * self._block_bytes)
            else:
                self.counter.saved(len(end.good_keys), end.moved_bytes)
            ended.append(end)
        return ended

    @property
    def has_work(self) -> bool:
        """Whether a job is running, or a question is open."""
        return bool(self._running or self._ended or self.store.is_asking)

    def drain(self) -> None:
        """Wait until no job is running."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def close(self) -> None:
        """End the store. Callable twice."""
        self.store.close()

    def _known_record(self, tried: str, blocks: int = 1) -> bytes | None:
        try:
            return self._record()
        except IncompatibleError as error:
            self._unknown_warning.say(error)
            if tried:
                self.counter.failed(tried, error.code, blocks)
            return None

    def _begin(
        self, job_id: int, request_id: str, keys: Sequence[bytes], rows: Sequence[int], *, is_load: bool
    ) -> None:
        tried = "load" if is_load else "save"
        keys = tuple(map(bytes, keys))
        record = self._known_record(tried, len(keys))
        began_s = time.monotonic()
        if record is None:
            self._note_failures(request_id, keys)
            self._ended.append((JobEnd(job_id, keys, (), 0.0, 0), is_load, b""))
            return
        moves = [BlockMove(BlockName(record, key), int(row)) for key, row in zip(keys, rows, strict=True)]
        with self._changed:
            self._running += 1

        def done(outcomes: Outcomes) -> None:
            good = tuple(key for key, error in zip(keys, outcomes, strict=True) if error is None)
            self._note_failures(request_id, [key for key in keys if key not in set(good)] if is_load else ())
            for error in outcomes:
                if isinstance(error, KvxferError):
                    self.counter.failed(tried, error.code)
                    self._failure_warning.say("loaded" if is_load else "saved", f"{error.code}: {error}")
            seconds = time.monotonic() - began_s
            end = JobEnd(job_id, keys, good, seconds, len(good) * self._block_bytes)
            with self._changed:
                self._ended.append((end, is_load, record))
                self._running -= 1
                self._changed.notify_all()

        (self.store.load if is_load else self.store.save)(moves, done)

    def _note_failures(self, request_id: str, keys: Sequence[bytes]) -> None:
        asked = self._requests.get(request_id)
        if asked is not None:
            asked.failed.update(keys)
