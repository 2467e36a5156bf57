"""The size and the limits of a simulated world, and the bound within which it must come to rest; must never know a
seed.
"""

from __future__ import annotations

import dataclasses

from kvxfer.protocol.liveness import LivenessLimits
from kvxfer.testing.sim.virtual_clock import MS, S


@dataclasses.dataclass(frozen=True)
class WorldOptions:
    """Virtual durations in nanoseconds. The limits are production's, only shorter, so that they meet in a run."""

    sources: int = 2
    destinations: int = 2
    extra_max: int = 1
    """Up to so many more of each, by seed."""
    transfers: int = 20
    """Requests posted during the chaos; up to half as many more by seed, and retries on top."""
    posts: int = 12
    """Fetches and pushes of registered memory; up to half as many more by seed."""
    pool_blocks: int = 24
    transfer_blocks_max: int = 7
    has_faults: bool = True
    chaos_ns: int = 6 * S

    grant_ttl_ns: int = 1 * S
    grant_lifetime_max_ns: tuple[int, ...] = (1200 * MS, 5 * S)
    """One of them by seed."""
    stall_ns: int = 300 * MS
    reconnect_ns: int = 1500 * MS
    wait_ns: int = 4 * S
    handshake_ns: int = 400 * MS
    heartbeat_ns: int = 500 * MS
    liveness: LivenessLimits = dataclasses.field(
        default_factory=lambda: LivenessLimits(suspect_after_ns=750 * MS, dead_after_ns=1500 * MS, gap_max_ns=500 * MS)
    )

    @property
    def rest_ns(self) -> int:
        """How long after the last fault everything must be final and every block back.

        A restarted coordinator settles, and then finds the dead (twice ``dead_after``); a source is sought
        (``reconnect``); a pull waits for a grant that will not come (``wait``); the grant of a reader that lost its
        session lapses (``ttl``, renewed at most once more by a frame under way); and a frame lost at the very end is
        missed when the longest patience ends (16 times ``stall``), and asked for again.
        """
        return (
            2 * self.liveness.dead_after_ns
            + self.reconnect_ns
            + self.wait_ns
            + 2 * self.grant_ttl_ns
            + (16 + 4) * self.stall_ns
        )
