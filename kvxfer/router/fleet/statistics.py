"""Plain numbers of the fleet. It must never know how they are shown."""

from __future__ import annotations

import dataclasses

SHOWN_MAX = 8
"""Workers whose names a message has."""


@dataclasses.dataclass(frozen=True)
class WorkersStatistics:
    """Counts of what the router knows; the ready are those that placement may give new work."""

    is_connected: bool | None
    revision: int
    members: int
    prefill_ready: int
    decode_ready: int
    ejected: int
    """Workers that get a request only where no other is left."""
    inflight: int
    states: dict[str, int] = dataclasses.field(default_factory=dict)
    """Workers by the state of their health."""
    without_model: int = 0
    """Workers that did not say yet which model they serve."""
    drained: int = 0
    shadowed: int = 0
    """Workers that another source has too, and that count there."""
    pairs: int = 0
    pairs_ejected: int = 0
    pools: int = 0
    pools_retired: int = 0


class FleetCounters:
    """Numbers that only grow, of workers that are known."""

    def __init__(self) -> None:
        self.ejections: dict[tuple[str, str], int] = {}
        """By (agent id, reason)."""
        self.probes: dict[tuple[str, str], int] = {}
        """By (agent id, event)."""
        self.pair_ejections: dict[tuple[str, str], int] = {}
        """By (agent id of the prefill worker, of the decode worker)."""

    @staticmethod
    def add(counts: dict[tuple[str, str], int], first: str, second: str) -> None:
        counts[first, second] = counts.get((first, second), 0) + 1

    def forget(self, agent_id: str) -> None:
        """The last incarnation of that worker is gone."""
        for counts in (self.ejections, self.probes):
            for key in [key for key in counts if key[0] == agent_id]:
                del counts[key]
        for key in [key for key in self.pair_ejections if agent_id in key]:
            del self.pair_ejections[key]


def why_none(waiting: list[tuple[str, str]]) -> str:
    """Why no model is served, for people, by the workers that have not said theirs and what keeps each from it."""
    if not waiting:
        return "no worker is known"
    named = [f"{name} ({trouble})" if trouble else name for name, trouble in waiting[:SHOWN_MAX]]
    more = f" and {len(waiting) - SHOWN_MAX} more" if len(waiting) > SHOWN_MAX else ""
    return f"no worker has said yet which model it serves: {', '.join(named)}{more}"
