"""What the lanes to each peer have shown, for everything in one process that reads from it or writes to it. Decides how
long a peer is remembered; must never measure anything itself.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence

from kvxfer._native import _core
from kvxfer.clock import NS_PER_S
from kvxfer.policy.calibration import Calibration, LaneFigure, Order
from kvxfer.transport.base import LANES_BACK
from kvxfer.transport.peer import RemotePeer
from kvxfer.types import AgentRef, Lane

PEERS_MAX = 4096
"""Lives that are remembered; beyond that the longest known is forgotten, and starts anew if it is met again."""


NEWS_MAX = 64
"""Transfers that nobody asked about yet."""


class Calibrations:
    """One :class:`~kvxfer.policy.calibration.Calibration` for each life of a peer. Thread-safe."""

    def __init__(self, host_id: str, *, is_used: bool = True) -> None:
        """``host_id``: our own. Not ``is_used``: the order that the operator gave always rules."""
        self._host_id = host_id
        self._is_used = is_used
        self._lock = threading.RLock()
        self._peers: dict[AgentRef, Calibration] = {}
        self._news: collections.deque[tuple[RemotePeer, int, _core.TransferFinal]] = collections.deque()

    def __repr__(self) -> str:
        return f"<Calibrations of {len(self._peers)} peers>"

    def order(self, peer: AgentRef, host_id: str, lanes: Sequence[Lane], nbytes: int) -> Order:
        """``lanes``, likely the fastest for ``nbytes`` first."""
        if not self._is_used or len(lanes) < 2:
            return Order(tuple(lanes), nbytes, host_id == self._host_id, {})
        with self._lock:
            self._learn()
            return self._of(peer, host_id).order(lanes, nbytes)

    def measured(self, peer: AgentRef, host_id: str, lane: Lane, nbytes: int, seconds: float) -> None:
        """A transfer committed."""
        with self._lock:
            self._learn()
            self._of(peer, host_id).measured(lane, nbytes, seconds)

    def committed(self, peer: RemotePeer, nbytes: int, final: _core.TransferFinal) -> None:
        """A transfer committed, and this is what the core says of it. What that means is found out when somebody asks:
        here somebody waits for the bytes."""
        news = self._news
        news.append((peer, nbytes, final))
        if len(news) >= NEWS_MAX:
            with self._lock:
                self._learn()

    def figures(self) -> dict[str, Mapping[Lane, LaneFigure]]:
        """By peer, what was measured."""
        with self._lock:
            self._learn()
            return {str(peer): calibration.figures() for peer, calibration in self._peers.items()}

    def _learn(self) -> None:
        """The lock is held; news may come meanwhile."""
        while self._news:
            peer, nbytes, final = self._news.popleft()
            seconds = (final.wire_ns + final.confirm_ns) / NS_PER_S
            self._of(peer.ref, peer.address.host_id).measured(LANES_BACK[final.lane], nbytes, seconds)

    def _of(self, peer: AgentRef, host_id: str) -> Calibration:
        found = self._peers.get(peer)
        if found is None:
            if len(self._peers) >= PEERS_MAX:
                del self._peers[next(iter(self._peers))]
            found = self._peers[peer] = Calibration(is_same_host=host_id == self._host_id)
        return found
