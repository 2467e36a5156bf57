"""What the lanes to each peer have shown, for everything in one process that reads from it or writes to it. Decides how
long a peer is remembered; must never measure anything itself.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from kvxfer.policy.calibration import Calibration, LaneFigure, Order
from kvxfer.types import AgentRef, Lane

PEERS_MAX = 4096
"""Lives that are remembered; beyond that the longest known is forgotten, and starts anew if it is met again."""


class Calibrations:
    """One :class:`~kvxfer.policy.calibration.Calibration` for each life of a peer. Thread-safe."""

    def __init__(self, host_id: str, *, is_used: bool = True) -> None:
        """``host_id``: our own. Not ``is_used``: the order that the operator gave always rules."""
        self._host_id = host_id
        self._is_used = is_used
        self._lock = threading.RLock()  # a signal handler may start a transfer while its thread is in here
        self._peers: dict[AgentRef, Calibration] = {}

    def __repr__(self) -> str:
        return f"<Calibrations of {len(self._peers)} peers>"

    def order(self, peer: AgentRef, host_id: str, lanes: Sequence[Lane], nbytes: int) -> Order:
        """``lanes``, likely the fastest for ``nbytes`` first."""
        if not self._is_used or len(lanes) < 2:
            return Order(tuple(lanes), nbytes, host_id == self._host_id, {})
        with self._lock:
            return self._of(peer, host_id).order(lanes, nbytes)

    def measured(self, peer: AgentRef, host_id: str, lane: Lane, nbytes: int, seconds: float) -> None:
        """A transfer committed."""
        with self._lock:
            self._of(peer, host_id).measured(lane, nbytes, seconds)

    def figures(self) -> dict[str, Mapping[Lane, LaneFigure]]:
        """By peer, what was measured."""
        with self._lock:
            return {str(peer): calibration.figures() for peer, calibration in self._peers.items()}

    def _of(self, peer: AgentRef, host_id: str) -> Calibration:
        found = self._peers.get(peer)
        if found is None:
            if len(self._peers) >= PEERS_MAX:
                del self._peers[next(iter(self._peers))]
            found = self._peers[peer] = Calibration(is_same_host=host_id == self._host_id)
        return found
