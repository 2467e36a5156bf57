"""What a world of engines, or many, amounted to; must never know how the run was made."""

from __future__ import annotations

import collections
import dataclasses

from kvxfer.testing.sim.report import SeedsReport
from kvxfer.testing.sim.virtual_clock import S


def _counter() -> collections.Counter[str]:
    return collections.Counter()


@dataclasses.dataclass
class EngineReport(SeedsReport):
    """Of the world of engines."""

    requests: int = 0
    served: int = 0
    remote: int = 0
    """Of those served, computed by another engine."""
    retries: int = 0
    errors: collections.Counter[str] = dataclasses.field(default_factory=_counter)
    """How attempts that brought no answer ended."""
    failures: collections.Counter[str] = dataclasses.field(default_factory=_counter)
    """Why attempts were computed where they decode."""
    finals: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    lanes: collections.Counter[str] = dataclasses.field(default_factory=_counter)
    struck: collections.Counter[str] = dataclasses.field(default_factory=_counter)
    """Faults and acts by name."""
    revoked: int = 0
    """Prompts given up for want of room."""
    taken_back: int = 0
    """Times that early blocks were."""
    preempted: int = 0
    circles: int = 0
    """Circles of waits that were seen, and broken."""
    circle_max_ns: int = 0
    hung_max_ns: int = 0
    """The longest wait for the grant of a hung engine."""
    attempt_max_ns: int = 0

    def lines(self) -> list[str]:
        """The account, as text."""

        def listed(counter: collections.Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"

        finals = collections.Counter({f"{state.lower()} {code}": n for (state, code), n in self.finals.items()})
        return [
            f"engines: {self.seeds} seeds, {self.events} events; {self.served} of {self.requests} requests answered, "
            f"{self.remote} with the prompt computed elsewhere, {self.retries} retries",
            f"  attempts without an answer: {listed(self.errors)}",
            f"  computed where they decode, because: {listed(self.failures)}",
            f"  transfers: {listed(finals)}; committed by lane: {listed(self.lanes)}",
            f"  struck: {listed(self.struck)}",
            f"  {self.revoked} prompts given up for want of room, {self.taken_back} times early blocks taken back, "
            f"{self.preempted} preemptions",
            f"  {self.circles} circles of waits, broken within {self.circle_max_ns / S:.2f} s; "
            f"hung engines left within {self.hung_max_ns / S:.2f} s; longest attempt {self.attempt_max_ns / S:.1f} s",
        ]
