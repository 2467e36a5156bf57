"""Changes of this process's weights since they were loaded. Decides nothing; must never know SGLang's classes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvxfer.connectors.common.stamps import Stamp


class Updates:
    """The load record for :class:`~kvxfer.connectors.common.weights.Weights`. SGLang is not watched while it reads
    files: those that are older than the process count. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Callable[[str], None]] = []
        self._changed = ""

    def files_of(self, model: str) -> list[str]:
        """Not known."""
        return []

    def read_as(self, path: str) -> tuple[Stamp, int] | None:
        """Not known."""
        return None

    def changed(self, why: str) -> None:
        """The weights in memory are, or will be, no longer what was loaded from files."""
        with self._lock:
            self._changed = self._changed or why
            listeners = list(self._listeners)
        for listener in listeners:
            listener(why)

    def listen(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call it with the reason whenever weights changed, and at once where they have. Returns what ends that."""
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


UPDATES = Updates()
"""Of this process."""
