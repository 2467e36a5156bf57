"""The size and the limits of a world of engines, and the bounds within which its waits must end; must never know
a seed.
"""

from __future__ import annotations

import dataclasses

from kvxfer.testing.sim.virtual_clock import S
from kvxfer.testing.sim.world_options import WorldOptions


@dataclasses.dataclass(frozen=True)
class EngineOptions(WorldOptions):
    """Virtual durations in nanoseconds; as production's, most of them shorter, so that they meet in a run."""

    engines: tuple[int, int] = (2, 4)
    requests: tuple[int, int] = (10, 22)
    prompt_blocks: tuple[int, int] = (3, 8)
    """The longest prompt of a world, in blocks; by seed."""
    block_tokens: int = 4
    output_tokens_max: int = 8
    arrivals_ns: int = 5 * S
    chaos_ns: int = 12 * S

    grant_ttl_ns: int = 3 * S
    grant_lifetime_max_ns: tuple[int, ...] = (600 * S,)
    wait_ns: int = 600 * S
    timeout_ns: tuple[int, int] = (25 * S, 90 * S)
    """Of a decode leg for its grant; by request."""
    transfer_deadline_ns: int = 60 * S
    """Counted from the grant. Long, so that a circle which only this would break is seen as one."""
    engine_silent_ns: int = 5 * S
    unknown_wait_ns: int = 1 * S
    room_wait_ns: int = 1 * S
    step_max_ns: int = 2 * S
    """The longest step of a slow engine."""
    fault_ns: int = 6 * S
    """By so much faults of the network may hold up a word that ends a wait."""

    def circle_ns(self, step_ns: int, held: int) -> int:
        """How long a circle of waits may persist: engines see what they lack once a step, and give up what they hold
        one prompt after another, each at most ``room_wait`` after the one before. ``held``: how many there are."""
        return (held + 1) * (self.room_wait_ns + step_ns) + self.fault_ns

    def hung_ns(self) -> int:
        """How long anybody may wait for the grant of a hung engine. Of one that stopped while it was idle, the source
        counts from the pull."""
        return self.engine_silent_ns + self.fault_ns

    def end_ns(self, timeout_ns: int, steps: int, step_ns: int) -> int:
        """When an attempt has ended at an engine that nothing disturbed: its grant may take ``timeout``, its transfer
        as long as a transfer may, and then everything that this engine was asked for may be computed before it."""
        return timeout_ns + self.transfer_deadline_ns + self.fault_ns + steps * (step_ns + self.room_wait_ns)
