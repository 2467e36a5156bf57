"""Two questions about the machines' counts, which the native core defines (``EndpointCounts``): whether an agent has
anything under way, and what that is in words; and what is told of its sockets. Decides nothing.
"""

from __future__ import annotations

import dataclasses

from kvxfer._native import _core

_LIVE = ("transfers_live", "transfers_draining", "pulls_unknown", "pulls_queued", "pulls_granted")
_KNOWN = ("sessions_up", "sessions_opening", "peers", "notifications_pending")
_GRANTS = ("alive", "unread", "expected", "waiting_pulls")


@dataclasses.dataclass(frozen=True)
class WireCounts:
    """What the sockets of an agent carry, and what was wrong on them."""

    sessions_tcp: int = 0
    """Sessions over TCP that are up."""
    sessions_encrypted: int = 0
    """Those of them that are encrypted."""
    tls_failures: int = 0
    """Encrypted sessions that were up, and ended because a record was not the peer's."""
    checksum_failures: int = 0
    """Reads thrown away because their bytes did not match the source's checksums."""

    @classmethod
    def of(cls, counts: _core.CoreStatistics) -> WireCounts:
        return cls(counts.sessions_tcp, counts.sessions_tls, counts.tls_failures, counts.checksum_failures)


def is_idle(counts: _core.EndpointCounts) -> bool:
    """Whether nothing is promised, under way or waiting."""
    blocks = sum(pool.granted + pool.reserved + pool.quarantined for pool in counts.pools)
    elements = sum(region.grants + region.transfers for region in counts.regions)
    transfers = counts.transfers_live + counts.transfers_draining
    return blocks + elements + counts.grants.alive + counts.grants.waiting_pulls + transfers == 0


def describe(counts: _core.EndpointCounts) -> str:
    """What is held and under way, for the message of a test or a log line: every number that is not 0."""
    parts = [f"{name}={getattr(counts, name)}" for name in (*_LIVE, *_KNOWN) if getattr(counts, name)]
    parts += [f"grants.{name}={getattr(counts.grants, name)}" for name in _GRANTS if getattr(counts.grants, name)]
    for pool in counts.pools:
        states = ((name, getattr(pool, name)) for name in ("granted", "reserved", "quarantined"))
        parts += [f"pool {pool.pool}: {count} {name}" for name, count in states if count]
    for region in counts.regions:
        kinds = ((name, getattr(region, name)) for name in ("grants", "transfers"))
        parts += [f"region {region.region}: {count} {name}" for name, count in kinds if count]
    return ", ".join(parts) or "nothing"
