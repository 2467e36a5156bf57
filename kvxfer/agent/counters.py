"""What one agent counts: outcomes of its transfers and of its peers' writes, and committed bytes, by lane. Decides
nothing."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Mapping

from kvxfer._native import _core
from kvxfer.agent.metrics import AgentMetrics
from kvxfer.agent.notifications import Notifications
from kvxfer.agent.statistics import AgentStatistics, Quarantine
from kvxfer.errors import KvxferError
from kvxfer.policy.calibration import LaneFigure
from kvxfer.transport.base import LANES_BACK, Transport
from kvxfer.types import Lane, TransferState

Outcomes = dict[str, collections.Counter[str]]
"""By lane, then by ``committed`` or the error's code."""


class AgentCounters:
    """The counts of one agent."""

    def __init__(self, agent_id: str, notifications: Notifications) -> None:
        self.metrics: AgentMetrics | None = None
        """Prometheus' copy of the counts, from the agent's start."""
        self._notifications = notifications
        self._outcomes: Outcomes = {}
        self._bytes: collections.Counter[Lane] = collections.Counter()
        self._offers: Outcomes = {}
        self._refused = 0
        self._last = AgentStatistics(agent_id)
        """The transport's last counts; the transport may be gone."""

    def committed(self, lane: Lane, byte_count: int, seconds: Mapping[str, float]) -> None:
        """``seconds``: by phase."""
        _add(self._outcomes, lane.value, "committed")
        self._bytes[lane] += byte_count
        if self.metrics is not None:
            self.metrics.committed(lane.value, byte_count, seconds)

    def failed(self, lane: Lane | None, error: KvxferError) -> None:
        """``lane``: the last that was tried, if one was."""
        name = "none" if lane is None else lane.value
        _add(self._outcomes, name, error.code)
        if self.metrics is not None:
            self.metrics.failed(name, error.code)

    def offer_ended(self, event: _core.OfferEnded) -> None:
        """A peer's write into our registered memory is over."""
        is_committed = TransferState(int(event.state)) is TransferState.COMMITTED
        lane, outcome = LANES_BACK[event.lane].value, "committed" if is_committed else event.code.name
        _add(self._offers, lane, outcome)
        if self.metrics is not None:
            self.metrics.offer_ended(lane, outcome)

    def session_refused(self) -> None:
        self._refused += 1

    def remember(self, transport: Transport) -> None:
        """Keep the last counts of a transport that is about to close."""
        with contextlib.suppress(KvxferError):
            self._last = AgentStatistics.of(str(transport.ref), transport.counts(), transport.wire_counts()).closed()

    def statistics(
        self,
        transport: Transport | None,
        quarantines: tuple[Quarantine, ...],
        searching: int,
        figures: Mapping[str, Mapping[Lane, LaneFigure]],
        is_connected: bool | None,
    ) -> AgentStatistics:
        """``searching``: transfers that the transport does not have yet. ``figures``: what lanes reached, by peer."""
        held = self._last
        if transport is not None:
            with contextlib.suppress(KvxferError):
                held = AgentStatistics.of(str(transport.ref), transport.counts(), transport.wire_counts())
        return dataclasses.replace(
            held,
            pulls=dataclasses.replace(held.pulls, unknown=held.pulls.unknown + searching),
            transfers_live=held.transfers_live + searching,
            outcomes=_copy(self._outcomes),
            bytes=dict(self._bytes.copy()),
            offers=_copy(self._offers),
            lanes=figures,
            quarantines=quarantines,
            sessions=dataclasses.replace(held.sessions, refused=self._refused),
            notifications=self._notifications.statistics(),
            is_coordinator_connected=is_connected,
        )


def _add(outcomes: Outcomes, lane: str, outcome: str) -> None:
    outcomes.setdefault(lane, collections.Counter())[outcome] += 1


def _copy(outcomes: Outcomes) -> dict[str, dict[str, int]]:
    return {lane: dict(counts.copy()) for lane, counts in outcomes.copy().items()}
