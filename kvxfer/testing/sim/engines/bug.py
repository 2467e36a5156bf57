"""Ways in which waiting went wrong once, or could, put back by name so that the checkers can prove that they see them;
must never be switched on outside the simulation.
"""

from __future__ import annotations

import enum


class EngineBug(enum.StrEnum):
    NONE = "none"
    NEVER_REVOKE = "never_revoke"
    """An engine never gives up a prompt that it holds for another one."""
    EARLY_BLOCKS_STAY = "early_blocks_stay"
    """Blocks of a pull without a grant cannot be taken back."""
    FIXED_WAIT = "fixed_wait"
    """The rule before: a pull holds its slot and blocks from the start, and ends after a fixed wait of 60 s."""
    HUNG_ENGINE_UNNOTICED = "hung_engine_unnoticed"
    """An agent says of its hung engine that it has just made a step."""


FIXED_WAIT_NS = 60_000_000_000


def fixed_wait_ns(bug: EngineBug) -> int | None:
    """How long a pull waits for its grant whatever its request says; ``None``: as its request says."""
    return FIXED_WAIT_NS if bug is EngineBug.FIXED_WAIT else None
