"""Changes of a process's weights in memory since they were loaded. Decides nothing; must never know an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable


class WeightChanges:
    """The first change counts. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = ""
        self._listeners: list[Callable[[str], None]] = []

    def changed(self, why: str) -> None:
        """The weights in memory are, or will be, no longer what was loaded from files."""
        with self._lock:
            self._changed = self._changed or why
            listeners = list(self._listeners)
        for listener in listeners:
            listener(why)

    def listen(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call it with the reason whenever weights changed in memory, and at once where they have since they were
        loaded. Returns what ends that."""
        with self._lock:
            self._listeners.append(listener)
            changed = self._changed
        if changed:
            listener(changed)
        return lambda: self._forget(listener)

    def _forget(self, listener: Callable[[str], None]) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
