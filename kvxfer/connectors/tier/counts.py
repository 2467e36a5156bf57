"""What a tier counts on the engine's side. Decides nothing; must never know how counts are exported."""

from __future__ import annotations

import collections
import dataclasses
import threading


@dataclasses.dataclass
class TierCounts:
    """Blocks and bytes. ``errors`` by what was tried (``save``, ``load``, ``find``) and the error's stable code."""

    hits: int = 0
    misses: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    errors: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)


class TierCounter:
    """Counts from any thread, and what was counted since it was last taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new = TierCounts()
        self._all = TierCounts()

    def found(self, is_hit: bool) -> None:
        """A request asked for a block the first time."""
        with self._lock:
            for counts in (self._new, self._all):
                counts.hits += is_hit
                counts.misses += not is_hit

    def saved(self, blocks: int, size_bytes: int) -> None:
        with self._lock:
            for counts in (self._new, self._all):
                counts.saved_blocks += blocks
                counts.saved_bytes += size_bytes

    def loaded(self, blocks: int, size_bytes: int) -> None:
        with self._lock:
            for counts in (self._new, self._all):
                counts.loaded_blocks += blocks
                counts.loaded_bytes += size_bytes

    def failed(self, tried: str, code: str, blocks: int = 1) -> None:
        with self._lock:
            for counts in (self._new, self._all):
                counts.errors[tried, code] += blocks

    def take(self) -> TierCounts:
        """What was counted since the last call."""
        with self._lock:
            new, self._new = self._new, TierCounts()
        return new

    def total(self) -> TierCounts:
        """A copy of all."""
        with self._lock:
            return dataclasses.replace(self._all, errors=collections.Counter(self._all.errors))
