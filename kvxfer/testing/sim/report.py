"""The result of one run or many: how often each fault struck in each phase, how transfers ended, and which cells
stayed empty; must never know how the run was made.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Self

from kvxfer.testing.sim.faults import IMPOSSIBLE, Kind, TransferPhase
from kvxfer.testing.sim.virtual_clock import S


@dataclasses.dataclass
class SeedsReport:
    """One seed, or the sum of many. ``digest`` is the hash of one seed's whole event log: equal digests, equal runs."""

    seed: int = 0
    digest: str = ""
    seeds: int = 1
    events: int = 0

    @classmethod
    def of_none(cls) -> Self:
        """The sum of no runs."""
        return cls(seeds=0)

    def add(self, other: SeedsReport) -> None:
        """Count other runs in."""
        for field in dataclasses.fields(self):
            mine, its = getattr(self, field.name), getattr(other, field.name)
            if field.name.endswith("_max_ns"):
                setattr(self, field.name, max(mine, its))
            elif isinstance(mine, collections.Counter):
                mine.update(its)
            elif field.name not in ("seed", "digest"):
                setattr(self, field.name, mine + its)


@dataclasses.dataclass
class SimReport(SeedsReport):
    """Of the world of agents."""

    struck: collections.Counter[tuple[Kind, TransferPhase]] = dataclasses.field(default_factory=collections.Counter)
    finals: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    """(final state, code) of every transfer that became final while its destination lived."""
    lanes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Committed transfers by lane."""
    posted: int = 0
    posts: collections.Counter[tuple[str, str, str]] = dataclasses.field(default_factory=collections.Counter)
    """(fetch or push, final state, code) of every post that became final while its poster lived."""
    post_lanes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    requests: int = 0
    served: int = 0
    """Requests of which one transfer committed."""
    rest_max_ns: int = 0
    """From the last fault until everything was at rest."""

    @property
    def committed_share(self) -> float:
        """Of all transfers that became final."""
        finals = sum(self.finals.values())
        return sum(n for (state, _), n in self.finals.items() if state == "COMMITTED") / finals if finals else 0.0

    def post_committed_share(self, op: str) -> float:
        """Of the fetches, or the pushes, that became final."""
        finals = sum(n for (kind, _, _), n in self.posts.items() if kind == op)
        return sum(n for (kind, state, _), n in self.posts.items() if (kind, state) == (op, "COMMITTED")) / finals

    def empty_cells(self) -> list[tuple[Kind, TransferPhase]]:
        """Possible cells that no fault ever struck."""
        cells = [(kind, phase) for kind in Kind for phase in TransferPhase]
        return [cell for cell in cells if cell not in IMPOSSIBLE and not self.struck[cell]]

    def impossible_cells(self) -> list[tuple[Kind, TransferPhase]]:
        """Cells that were struck although the list says they cannot be: then the list is wrong."""
        return [cell for cell in IMPOSSIBLE if self.struck[cell]]

    def lines(self) -> list[str]:
        """The tables, as text."""
        width = max(len(kind) for kind in Kind)
        lines = [f"{'fault':{width}}" + "".join(f"{phase:>13}" for phase in TransferPhase)]
        for kind in Kind:
            row = [self.struck[kind, phase] for phase in TransferPhase]
            marks = [
                "-" if (kind, phase) in IMPOSSIBLE and not count else str(count)
                for phase, count in zip(TransferPhase, row, strict=True)
            ]
            lines.append(f"{kind:{width}}" + "".join(f"{mark:>13}" for mark in marks))
        finals = sum(self.finals.values())
        lines += ["", f"{'final state':{width}}{'code':>17}{'transfers':>12}"]
        for (state, code), count in sorted(self.finals.items(), key=lambda item: (-item[1], item[0])):
            lines.append(f"{state.lower():{width}}{code:>17}{count:>12}{count / finals:>8.1%}")
        for op in ("fetch", "push"):
            all_of = sum(n for (kind, _, _), n in self.posts.items() if kind == op)
            lines += ["", f"{op:{width}}{'code':>17}{'posts':>12}"]
            for (_, state, code), count in sorted(
                ((key, n) for key, n in self.posts.items() if key[0] == op), key=lambda item: (-item[1], item[0])
            ):
                lines.append(f"{state.lower():{width}}{code:>17}{count:>12}{count / all_of:>8.1%}")
        lanes, post_lanes = (
            ", ".join(f"{lane} {count}" for lane, count in sorted(counter.items()))
            for counter in (self.lanes, self.post_lanes)
        )
        lines += [
            "",
            f"{self.seeds} seeds, {self.events} events, {finals} final transfers; committed by lane: {lanes}",
            f"{self.posted} posts; committed by lane: {post_lanes}",
            f"{self.served} of {self.requests} requests got their KV; "
            f"at rest at most {self.rest_max_ns / S:.2f} s after the last fault",
        ]
        return lines
