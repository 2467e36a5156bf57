"""What one agent counts: outcomes and bytes by lane, and what its transport held last. Decides nothing."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from kvxfer._native import _core
from kvxfer.agent.notifications import Notifications
from kvxfer.agent.statistics import (
    AgentStatistics,
    GrantStatistics,
    PoolStatistics,
    PullStatistics,
    Quarantine,
    RegionStatistics,
    SessionStatistics,
)
from kvxfer.agent.transfer import Transfer
from kvxfer.errors import KvxferError
from kvxfer.policy.calibration import LaneFigure
from kvxfer.transport.base import LANES_BACK, Transport
from kvxfer.transport.counts import TransportCounts
from kvxfer.types import Lane, TransferState

_GRANT_FIELDS = ("alive", "released", "expired", "revoked", "reader_gone")


class Books:
    """The counts of one agent."""

    def __init__(self, agent_id: str, notifications: Notifications) -> None:
        self._name = agent_id
        self._notifications = notifications
        self._outcomes: dict[str, collections.Counter[str]] = {}
        self._bytes: collections.Counter[Lane] = collections.Counter()
        self._offers: dict[str, collections.Counter[str]] = {}
        self._refused = 0
        self._last: TransportCounts | None = None

    def committed(self, lane: Lane, byte_count: int) -> None:
        self._outcomes.setdefault(lane.value, collections.Counter())["committed"] += 1
        self._bytes[lane] += byte_count

    def failed(self, lane: str, error: KvxferError) -> None:
        self._outcomes.setdefault(lane, collections.Counter())[error.code] += 1

    def offer_ended(self, event: _core.OfferEnded) -> None:
        """A peer's write into our registered memory is over."""
        self._offers.setdefault(LANES_BACK[event.lane].value, collections.Counter())[outcome_of(event)] += 1

    def session_refused(self) -> None:
        self._refused += 1

    def remember(self, transport: Transport) -> None:
        """The last look at a transport that is about to close: what it held ends with it."""
        try:
            counts = transport.counts()
        except KvxferError:
            return
        self._name = str(transport.ref)
        self._last = dataclasses.replace(
            counts,
            pools=tuple(dataclasses.replace(pool, granted=0, reserved=0, quarantined=0) for pool in counts.pools),
            regions=(),
            grants_alive=0,
            grants_unread=0,
            blocks_unread=0,
            grants_expected=0,
            grants_revoked=counts.grants_revoked + counts.grants_alive,
            pulls_waiting=0,
            pulls_unknown=0,
            pulls_queued=0,
            pulls_granted=0,
            transfers_live=0,
            transfers_draining=0,
            sessions_up=0,
            sessions_opening=0,
            peers=0,
            notifications_pending=0,
        )

    def statistics(
        self,
        transport: Transport | None,
        transfers: Sequence[Transfer],
        searching: int,
        figures: Mapping[str, Mapping[Lane, LaneFigure]],
        is_connected: bool | None,
    ) -> AgentStatistics:
        """``searching``: transfers that the transport does not have yet. ``figures``: what lanes reached, by peer."""
        counts = self._last
        if transport is not None:
            try:
                counts = transport.counts()
                self._name = str(transport.ref)
            except KvxferError:
                counts = self._last
        pools: tuple[PoolStatistics, ...] = ()
        regions: tuple[RegionStatistics, ...] = ()
        pulls = PullStatistics(unknown=searching)
        grants, sessions, live, draining, peers = GrantStatistics(), SessionStatistics(refused=self._refused), 0, 0, 0
        if counts is not None:
            pools = tuple(
                PoolStatistics(pool.pool_id, pool.blocks, pool.reserved, pool.granted, pool.quarantined)
                for pool in counts.pools
            )
            regions = tuple(
                RegionStatistics(region.region_id, region.length_bytes, region.grants, region.transfers)
                for region in counts.regions
            )
            grants = GrantStatistics(
                **{name: getattr(counts, f"grants_{name}") for name in _GRANT_FIELDS},
                unread=counts.grants_unread,
                blocks_unread=counts.blocks_unread,
                expected=counts.grants_expected,
                pulls_waiting=counts.pulls_waiting,
                verdicts_ok=counts.verdicts_ok,
                verdicts_refused=counts.verdicts_refused,
                requests_refused=counts.requests_refused,
            )
            pulls = PullStatistics(counts.pulls_unknown + searching, counts.pulls_queued, counts.pulls_granted)
            sessions = SessionStatistics(counts.sessions_up, counts.sessions_opening, self._refused)
            live, draining, peers = counts.transfers_live, counts.transfers_draining, counts.peers
        return AgentStatistics(
            agent=self._name,
            pools=pools,
            regions=regions,
            grants=grants,
            pulls=pulls,
            transfers_live=live + searching,
            transfers_draining=draining,
            outcomes={lane: dict(outcomes.copy()) for lane, outcomes in self._outcomes.copy().items()},
            bytes=dict(self._bytes.copy()),
            offers={lane: dict(outcomes.copy()) for lane, outcomes in self._offers.copy().items()},
            lanes=figures,
            quarantines=tuple(
                Quarantine(
                    str(transfer.transfer_id),
                    transfer.progress().blocks_total,
                    f"a read was under way when the transfer ended as {transfer.progress().state.name.lower()}",
                )
                for transfer in transfers
                if transfer.is_final and not transfer.is_drained
            ),
            sessions=sessions,
            notifications=self._notifications.statistics(),
            peers=peers,
            is_coordinator_connected=is_connected,
        )


def outcome_of(event: _core.OfferEnded) -> str:
    """``committed``, or the code of what ended a peer's write."""
    is_committed = TransferState(int(event.state)) is TransferState.COMMITTED
    return "committed" if is_committed else str(event.code.name)
