"""The time in which a prefill worker has computed one request's prompt, and the decode worker may be reading it.

Decides nothing: the attempt says when it begins and ends. It is no load, but a worker that is drained waits for it.
"""

from __future__ import annotations

from kvxfer.router.fleet.entry import WorkerHold
from kvxfer.router.fleet.workers import Workers
from kvxfer.types import AgentRef


class HeldPrefill:
    """Of one attempt."""

    def __init__(self, workers: Workers, prefill: AgentRef | None) -> None:
        self._workers = workers
        self._prefill = prefill
        """None once it is over, or where there is none."""
        self._hold: WorkerHold | None = None

    def begin(self) -> None:
        """P is done. Nothing, where D has the KV already."""
        if self._prefill is not None and self._hold is None:
            self._hold = self._workers.hold(self._prefill)

    def end(self) -> None:
        """D has the KV, or does not want it any more."""
        self._prefill = None
        if self._hold is not None:
            self._hold.release()
            self._hold = None
