"""Changes of this process's weights since they were loaded. Decides nothing; must never know SGLang's classes."""

from __future__ import annotations

from kvxfer.connectors.common.changes import WeightChanges
from kvxfer.connectors.common.stamps import Stamp


class Updates(WeightChanges):
    """The load record for :class:`~kvxfer.connectors.common.weights.Weights`. SGLang is not watched while it reads
    files: those that are older than the process count."""

    def files_of(self, model: str) -> list[str]:
        """Not known."""
        return []

    def read_as(self, path: str) -> tuple[Stamp, int] | None:
        """Not known."""
        return None


UPDATES = Updates()
"""Of this process."""
