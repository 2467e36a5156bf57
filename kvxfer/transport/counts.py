"""Two questions about the machines' counts, which the native core defines (``EndpointCounts``): whether an agent has
anything under way, and what that is in words. Decides nothing.
"""

from __future__ import annotations

from kvxfer._native import _core

_LIVE = ("transfers_live", "transfers_draining", "pulls_unknown", "pulls_queued", "pulls_granted")
_KNOWN = ("sessions_up", "sessions_opening", "peers", "notifications_pending")
_GRANTS = ("alive", "unread", "expected", "waiting_pulls")


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
