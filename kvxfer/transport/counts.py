"""What the machines of one agent hold at a moment, and what they decided so far. Frozen values; decides nothing."""

from __future__ import annotations

import dataclasses

from kvxfer._native import _core


@dataclasses.dataclass(frozen=True)
class PoolCounts:
    """Blocks of one pool in the states that belong to the agent."""

    pool_id: int
    blocks: int
    granted: int
    reserved: int
    quarantined: int

    @property
    def is_idle(self) -> bool:
        return self.granted + self.reserved + self.quarantined == 0


@dataclasses.dataclass(frozen=True)
class RegionCounts:
    """What is under way over one registered region."""

    region_id: int
    length_bytes: int
    grants: int
    """Reads by peers, and own writes to peers."""
    transfers: int
    """Own reads, and writes of peers, which may still fill it."""

    @property
    def is_idle(self) -> bool:
        return self.grants + self.transfers == 0


@dataclasses.dataclass(frozen=True)
class TransportCounts:
    """What the machines hold now, and (``grants_*`` but alive, ``verdicts_*``) what they decided so far."""

    pools: tuple[PoolCounts, ...]
    regions: tuple[RegionCounts, ...]
    grants_alive: int
    grants_unread: int
    """Of those alive: their readers have not begun to read."""
    blocks_unread: int
    """Promised by those."""
    grants_expected: int
    """Prompts that the engine accepted and that have no grant yet."""
    grants_released: int
    grants_expired: int
    grants_revoked: int
    grants_reader_gone: int
    pulls_waiting: int
    """Of peers, for grants of ours."""
    pulls_unknown: int
    """Own pulls without a grant whose source has not said that its engine accepted the prompt."""
    pulls_queued: int
    """Own pulls without a grant whose source has said so."""
    pulls_granted: int
    """Own pulls whose grant exists and that have read nothing."""
    verdicts_ok: int
    verdicts_refused: int
    requests_refused: int
    transfers_live: int
    transfers_draining: int
    sessions_up: int
    sessions_opening: int
    peers: int
    notifications_pending: int

    @property
    def is_idle(self) -> bool:
        """Whether nothing is promised, under way or waiting."""
        return (
            all(pool.is_idle for pool in self.pools)
            and all(region.is_idle for region in self.regions)
            and self.grants_alive + self.pulls_waiting + self.transfers_live + self.transfers_draining == 0
        )


def counts_from(native: _core.EndpointCounts) -> TransportCounts:
    grants = native.grants
    return TransportCounts(
        pools=tuple(
            PoolCounts(pool.pool, pool.blocks, pool.granted, pool.reserved, pool.quarantined) for pool in native.pools
        ),
        regions=tuple(
            RegionCounts(region.region, region.bytes, region.grants, region.transfers) for region in native.regions
        ),
        grants_alive=grants.alive,
        grants_unread=grants.unread,
        blocks_unread=grants.unread_blocks,
        grants_expected=grants.expected,
        grants_released=grants.released,
        grants_expired=grants.expired,
        grants_revoked=grants.revoked,
        grants_reader_gone=grants.reader_gone,
        pulls_waiting=grants.waiting_pulls,
        pulls_unknown=native.pulls_unknown,
        pulls_queued=native.pulls_queued,
        pulls_granted=native.pulls_granted,
        verdicts_ok=grants.verdicts_ok,
        verdicts_refused=grants.verdicts_refused,
        requests_refused=grants.refused,
        transfers_live=native.transfers_live,
        transfers_draining=native.transfers_draining,
        sessions_up=native.sessions_up,
        sessions_opening=native.sessions_opening,
        peers=native.peers,
        notifications_pending=native.notifications_pending,
    )
