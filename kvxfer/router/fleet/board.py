"""The seam between the fleet of one process and those of others beside it: which requests are in flight elsewhere.

A router in one process has no board. Decides nothing; an implementation must never know what a request is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvxfer.types import AgentRef


class InFlight(NamedTuple):
    """Of one worker, in one process or in several together."""

    prefill: int = 0
    decode: int = 0
    held: int = 0
    """Prompts that it has computed and that another worker may still be reading."""


class LoadBoard(Protocol):
    """Where this process shows how many requests it has in flight, and reads what the others have."""

    def show(self, ref: AgentRef, counts: InFlight) -> None:
        """This process has so many in flight at a worker now."""

    def again(self) -> None:
        """The next ``changed`` gives every worker."""

    def changed(self) -> Iterable[tuple[AgentRef, InFlight]]:
        """What is in flight in all other processes together, of each worker for which that is not
        what the last call gave."""
