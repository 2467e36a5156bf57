"""Which lanes carry a transfer with a peer, and in which order: those that can (:mod:`kvxfer.policy.lanes`), by what
earlier transfers took (:mod:`kvxfer.policy.calibration`). All reads and writes of one agent share it. Decides how long
a peer is remembered; must never measure anything itself.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence

from kvxfer.errors import LaneUnavailableError
from kvxfer.policy.calibration import Calibration, LaneFigure, LaneOrder
from kvxfer.policy.lanes import LaneEnd, Memory, checking_lanes, choose_lanes, explain, is_same_host
from kvxfer.types import AgentRef, DataAddress, Lane

PEERS_MAX = 4096
"""Incarnations that are remembered; beyond that the longest known is forgotten, and starts anew if it is met again."""


@dataclasses.dataclass(frozen=True)
class LaneChoice:
    """The lanes that can carry a transfer, in the order of those allowed, and for each of these why or why not."""

    lanes: tuple[Lane, ...]
    reasons: Mapping[Lane, str]


class LaneChooser:
    """Of one agent. Thread-safe."""

    def __init__(self, ours: DataAddress, *, is_calibrated: bool = True) -> None:
        """``ours``: where peers reach this agent. Without ``is_calibrated`` the order of the allowed lanes rules."""
        self._ours = ours
        self._is_calibrated = is_calibrated
        self._lock = threading.RLock()
        """A signal handler may start a transfer while its thread is in here."""
        self._peers: dict[AgentRef, Calibration] = {}

    def __repr__(self) -> str:
        return f"<LaneChooser of {len(self._peers)} peers>"

    def is_near(self, address: DataAddress) -> bool:
        """Whether the agent at ``address`` runs on this host."""
        return is_same_host(self._ours, address)

    def possible(
        self,
        peer: AgentRef,
        address: DataAddress,
        here: Sequence[Memory],
        there: Sequence[Memory],
        allowed: Sequence[Lane],
        *,
        is_read: bool = True,
        must_check: bool = False,
    ) -> LaneChoice:
        """The lanes of ``allowed`` that can carry a read of any memory ``there`` into any memory ``here``, or, for a
        write, the reverse, which is a read by the peer. ``must_check``: with checksums.

        Raises LaneUnavailableError, naming each lane's obstacle, if none can.
        """
        lanes = tuple(allowed)
        reasons: dict[Lane, str] = {}
        for mine in here:
            for theirs in there:
                near, far = LaneEnd(self._ours, mine), LaneEnd(address, theirs)
                lanes, why = choose_lanes(near, far, lanes) if is_read else choose_lanes(far, near, lanes)
                reasons.update(why)
        choice = LaneChoice(*checking_lanes(lanes, reasons)) if must_check else LaneChoice(lanes, reasons)
        if not choice.lanes:
            raise LaneUnavailableError(f"no lane joins us and {peer}: {explain(None, choice.reasons)}")
        return choice

    def order(self, peer: AgentRef, address: DataAddress, lanes: Sequence[Lane], nbytes: int) -> LaneOrder:
        """``lanes``, likely the fastest for ``nbytes`` first."""
        if not self._is_calibrated or len(lanes) < 2:
            return LaneOrder(tuple(lanes), nbytes, self.is_near(address), {})
        with self._lock:
            return self._of(peer, address).order(lanes, nbytes)

    def measured(self, peer: AgentRef, address: DataAddress, lane: Lane, nbytes: int, seconds: float) -> None:
        """A transfer committed."""
        with self._lock:
            self._of(peer, address).measured(lane, nbytes, seconds)

    def figures(self) -> dict[str, Mapping[Lane, LaneFigure]]:
        """The measurements, by peer."""
        with self._lock:
            return {str(peer): calibration.figures() for peer, calibration in self._peers.items()}

    def _of(self, peer: AgentRef, address: DataAddress) -> Calibration:
        found = self._peers.get(peer)
        if found is None:
            if len(self._peers) >= PEERS_MAX:
                del self._peers[next(iter(self._peers))]
            found = self._peers[peer] = Calibration(is_same_host=self.is_near(address))
        return found
