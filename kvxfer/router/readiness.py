"""Whether a request would be served now: what placement says of the last membership, and whether the router stops.

Decides nothing of its own, so that it cannot say otherwise than placement does. Losing the coordinator changes nothing:
the last membership stands.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.policy.place import place
from kvxfer.router.dialects import dialect
from kvxfer.router.fleet.workers import Workers


class UnreadyReason(enum.StrEnum):
    """Why a request would be refused now."""

    DRAINING = "draining"
    NO_WORKER = "no_worker"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """``reason`` is None where requests would be placed; ``message`` says more, with names of models."""

    reason: UnreadyReason | None = None
    message: str = ""

    @property
    def is_ready(self) -> bool:
        return self.reason is None


class RouterReadiness:
    """Asks placement as a request would, with nothing known of its size."""

    def __init__(self, workers: Workers, *, allows_local_prefill: bool, is_draining: Callable[[], bool]) -> None:
        self._workers = workers
        self._allows_local_prefill = allows_local_prefill
        self._is_draining = is_draining

    def verdict(self, model: str | None = None) -> Verdict:
        """Of ``model``, or of any model that is served here."""
        if self._is_draining():
            return Verdict(UnreadyReason.DRAINING, "the router is stopping")
        models = self._workers.models() if model is None else (model,)
        candidates = self._workers.candidates()
        reasons: list[str] = []
        for name in models:
            try:
                found = place(candidates, model=name, tie_break=0, allows_local_prefill=self._allows_local_prefill)
                if found.prefill is None and not dialect(self._workers.worker(found.decode.ref).dialect).computes_alone:
                    place(candidates, model=name, tie_break=0, allows_local_prefill=False)
                return Verdict()
            except KvxferError as error:
                reasons.append(str(error))
        return Verdict(UnreadyReason.NO_WORKER, "; ".join(reasons) or self._workers.why_none())

    def describe(self, model: str | None = None, *, names_models: bool = True) -> dict[str, Any]:
        """JSON-able account, for ``GET /ready``; without the message where ``names_models`` is off."""
        verdict, known = self.verdict(model), self._workers.statistics()
        why = {} if verdict.reason is None else {"reason": verdict.reason.value}
        if verdict.message and names_models:
            why["message"] = verdict.message
        return {
            "status": "ready" if verdict.is_ready else "not_ready",
            **why,
            "workers_ready": {"prefill": known.prefill_ready, "decode": known.decode_ready},
            "workers_ejected": known.ejected,
            "coordinator_connected": known.is_connected,
        }
