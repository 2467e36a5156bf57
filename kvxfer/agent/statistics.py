"""An agent's counts at one moment, frozen and ready for JSON. The native core counts what its state machines hold, and
this is Python's only copy of it. Decides nothing; must never refer to anything that changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvxfer._native import _core
from kvxfer.agent.notifications import NotificationStatistics
from kvxfer.policy.calibration import LaneFigure
from kvxfer.transport.counts import WireCounts
from kvxfer.types import GrantState, Lane


@dataclasses.dataclass(frozen=True)
class PoolUsage:
    """Blocks of one pool. ``quarantined``: destination blocks of a transfer that is over and may still be written."""

    pool_id: int
    blocks: int
    reserved: int
    granted: int
    quarantined: int

    @classmethod
    def of(cls, counts: _core.PoolCounts) -> PoolUsage:
        return cls(counts.pool, counts.blocks, counts.reserved, counts.granted, counts.quarantined)


@dataclasses.dataclass(frozen=True)
class RegionStatistics:
    """Transfers over one registered region: ``grants`` (reads by peers, own writes to peers) and ``transfers`` (own
    reads into it, writes by peers)."""

    region_id: int
    bytes: int
    grants: int
    transfers: int

    @classmethod
    def of(cls, counts: _core.RegionCounts) -> RegionStatistics:
        return cls(counts.region, counts.bytes, counts.grants, counts.transfers)


@dataclasses.dataclass(frozen=True)
class GrantStatistics:
    """Grants that are alive now; the other states count from the agent's start."""

    alive: int = 0
    released: int = 0
    expired: int = 0
    revoked: int = 0
    reader_gone: int = 0
    unread: int = 0
    """Those that are alive, and whose readers have not begun to read."""
    blocks_unread: int = 0
    """The blocks that these grants promise."""
    expected: int = 0
    """Prompts that the engine accepted and that have no grant yet."""
    pulls_waiting: int = 0
    """Pulls of peers that came before their grant."""
    verdicts_ok: int = 0
    verdicts_refused: int = 0
    requests_refused: int = 0
    """Reads and writes that peers requested and that were refused: of another's grant, or outside its blocks or bytes.
    """

    @classmethod
    def of(cls, counts: _core.GrantCounts) -> GrantStatistics:
        return cls(
            alive=counts.alive,
            released=counts.released,
            expired=counts.expired,
            revoked=counts.revoked,
            reader_gone=counts.reader_gone,
            unread=counts.unread,
            blocks_unread=counts.unread_blocks,
            expected=counts.expected,
            pulls_waiting=counts.waiting_pulls,
            verdicts_ok=counts.verdicts_ok,
            verdicts_refused=counts.verdicts_refused,
            requests_refused=counts.refused,
        )

    def by_state(self) -> dict[GrantState, int]:
        return {state: int(getattr(self, state.name.lower())) for state in GrantState}


@dataclasses.dataclass(frozen=True)
class PullStatistics:
    """Own pulls that have read nothing yet, by what their sources said of them."""

    unknown: int = 0
    """The source has said nothing yet, or that its engine has not accepted that prompt."""
    queued: int = 0
    """The source's engine has accepted the prompt, and no grant exists."""
    granted: int = 0
    """The grant exists."""


@dataclasses.dataclass(frozen=True)
class SessionStatistics:
    up: int = 0
    opening: int = 0
    refused: int = 0
    """Sessions that never came up, by us or by the peer, since the start."""


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """A transfer that is over and whose blocks are not back yet, and why."""

    transfer_id: str
    blocks: int
    reason: str


@dataclasses.dataclass(frozen=True)
class AgentStatistics:
    """Everything that one agent counts. ``outcomes``: finished transfers, by lane, then by ``committed`` or the error's
    code (a transfer that never had a lane counts under ``none``); posts count as transfers. ``bytes``: of committed
    ones. ``offers``: writes of peers into our registered memory, likewise. ``lanes``: by peer, what each lane reached.
    """

    agent: str
    pools: tuple[PoolUsage, ...] = ()
    regions: tuple[RegionStatistics, ...] = ()
    grants: GrantStatistics = GrantStatistics()
    pulls: PullStatistics = PullStatistics()
    transfers_live: int = 0
    transfers_draining: int = 0
    outcomes: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    bytes: Mapping[Lane, int] = dataclasses.field(default_factory=dict)
    offers: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    lanes: Mapping[str, Mapping[Lane, LaneFigure]] = dataclasses.field(default_factory=dict)
    quarantines: tuple[Quarantine, ...] = ()
    sessions: SessionStatistics = SessionStatistics()
    wire: WireCounts = dataclasses.field(default_factory=WireCounts)
    notifications: NotificationStatistics = dataclasses.field(
        default_factory=lambda: NotificationStatistics(sent=0, delivered=0, failed=0, received=0, dropped=0, pending=0)
    )
    peers: int = 0
    is_coordinator_connected: bool | None = None

    @classmethod
    def of(cls, agent: str, counts: _core.EndpointCounts, wire: WireCounts) -> AgentStatistics:
        """What the machines hold and decided, and what the sockets carry; the rest is empty."""
        return cls(
            agent=agent,
            pools=tuple(PoolUsage.of(pool) for pool in counts.pools),
            regions=tuple(RegionStatistics.of(region) for region in counts.regions),
            grants=GrantStatistics.of(counts.grants),
            pulls=PullStatistics(counts.pulls_unknown, counts.pulls_queued, counts.pulls_granted),
            transfers_live=counts.transfers_live,
            transfers_draining=counts.transfers_draining,
            sessions=SessionStatistics(counts.sessions_up, counts.sessions_opening),
            wire=wire,
            peers=counts.peers,
        )

    def closed(self) -> AgentStatistics:
        """These counts once the transport has closed: it holds nothing, and has revoked the grants that were alive."""
        now = self.grants
        grants = GrantStatistics(
            released=now.released,
            expired=now.expired,
            revoked=now.revoked + now.alive,
            reader_gone=now.reader_gone,
            verdicts_ok=now.verdicts_ok,
            verdicts_refused=now.verdicts_refused,
            requests_refused=now.requests_refused,
        )
        pools = tuple(PoolUsage(pool.pool_id, pool.blocks, 0, 0, 0) for pool in self.pools)
        wire = dataclasses.replace(self.wire, sessions_tcp=0, sessions_encrypted=0)
        return AgentStatistics(self.agent, pools=pools, grants=grants, wire=wire)

    @property
    def is_idle(self) -> bool:
        """Whether no block is reserved, granted or quarantined, and no transfer or grant is alive."""
        blocks = sum(pool.reserved + pool.granted + pool.quarantined for pool in self.pools)
        blocks += sum(region.grants + region.transfers for region in self.regions)
        return blocks + self.grants.alive + self.transfers_live + self.transfers_draining == 0

    def as_dict(self) -> dict[str, Any]:
        """These counts as JSON can write them."""
        values = dataclasses.asdict(self)
        values["pools"] = list(values["pools"])
        values["regions"] = list(values["regions"])
        values["quarantines"] = list(values["quarantines"])
        values["bytes"] = {lane.value: count for lane, count in self.bytes.items()}
        values["outcomes"] = {lane: dict(outcomes) for lane, outcomes in self.outcomes.items()}
        values["offers"] = {lane: dict(outcomes) for lane, outcomes in self.offers.items()}
        values["lanes"] = {
            peer: {lane.value: dataclasses.asdict(figure) for lane, figure in figures.items()}
            for peer, figures in self.lanes.items()
        }
        return values
