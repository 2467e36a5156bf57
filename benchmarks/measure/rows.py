"""A row: kvxfer in turns with everybody it is compared with, at one size of blocks.

It decides the order of turns and what a row says: each comparison is made of pairs, one turn of kvxfer beside one turn
of the other; of two others one goes before and one after the same turn of kvxfer; every second round goes backwards.
A ratio is the median of the pairs' ratios. It must never know how a figure is shown.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from measure.contenders import Case, Option
from measure.ends import Moved, Pair, Reference, Setup, Site, WorkerFailed

TUNE_BYTES = 16 << 20
TUNE_TURNS = 2
SEEDS = itertools.count(1)
"""One for each turn of a run: transfer ids come from it too, and no id may be used twice."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median with the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        quarter = len(ordered) // 4
        return cls(ordered[quarter], statistics.median(ordered), ordered[-1 - quarter])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One other contender in a row. ``ratio`` is kvxfer's speed over its speed."""

    name: str
    settings: str
    gb_s: Spread
    cpu_s_per_gb: float
    ratio: Spread
    pairs: int
    error: str = ""
    """Why there are no figures; they are all 0 then."""


@dataclasses.dataclass(frozen=True)
class Row:
    lane: str
    op: str
    pages: str
    lists: str
    at_once: int
    site: str
    via: str
    block_bytes: int
    nbytes: int
    gb_s: Spread
    cpu_s_per_gb: float
    slowest_to_median: float
    others: tuple[Comparison, ...]
    error: str = ""


NOTHING = Spread(0.0, 0.0, 0.0)


class Room:
    """The processes of a run at one site; each setup's two are started when first asked for."""

    def __init__(self, site: Site, reference: Reference) -> None:
        self.site = site
        self.reference = reference
        self.pairs: dict[Setup, Pair] = {}
        self.failed: dict[Setup, str] = {}

    def pair(self, setup: Setup) -> Pair:
        """The setup's processes, awake, and all others at rest. Raises WorkerFailed, again and again for a setup that
        failed once."""
        if setup in self.failed:
            raise WorkerFailed(self.failed[setup])
        for other, pair in self.pairs.items():
            if other != setup:
                pair.rest()
        if setup not in self.pairs:
            try:
                self.pairs[setup] = Pair(setup, self.site, self.reference)
            except WorkerFailed as error:
                self.failed[setup] = str(error)
                raise
        self.pairs[setup].wake()
        return self.pairs[setup]

    def drop(self, setup: Setup) -> None:
        """Stop a setup's processes: they are of no more use, or in doubt."""
        pair = self.pairs.pop(setup, None)
        if pair is not None:
            pair.stop()

    def clear(self) -> None:
        for setup in list(self.pairs):
            self.drop(setup)
        self.failed.clear()


def neighbours(names: list[str]) -> list[list[str]]:
    """The order of one round: each name stands beside a turn of kvxfer, which is ""."""
    groups = [[*names[i : i + 1], "", *names[i + 1 : i + 2]] for i in range(0, len(names), 2)]
    return groups or [[""]]


class Turns:
    """Takes turns in one room. Every turn has lists of its own, which nobody else's turn had."""

    def __init__(self, room: Room, case: Case, nbytes: int) -> None:
        self.room = room
        self.case = case
        self.nbytes = nbytes

    def take(self, option: Option, block_bytes: int, nbytes: int, seed: int) -> Moved:
        try:
            return self.room.pair(option.setup).move(
                self.case.op,
                dict(option.how),
                seed=seed,
                block_bytes=block_bytes,
                nbytes=nbytes,
                at_once=1 if dict(option.how).get("limit") else self.case.at_once,
            )
        except WorkerFailed:
            self.room.drop(option.setup)
            raise

    def fastest(self, options: Sequence[Option], block_bytes: int) -> Option:
        """Try every choice of settings with smaller transfers; the fastest. Raises WorkerFailed if none works."""
        speeds: dict[Option, float] = {}
        errors = []
        size = min(self.nbytes, max(TUNE_BYTES, 16 * block_bytes))
        for option in options:
            try:
                if option.setup not in self.room.pairs or len(options) == 1:
                    self.take(option, block_bytes, size, next(SEEDS))
                if len(options) == 1:
                    return option
                got = [self.take(option, block_bytes, size, next(SEEDS)) for _ in range(TUNE_TURNS)]
                speeds[option] = max(one.gb_s for one in got)
            except WorkerFailed as error:
                errors.append(str(error))
        if not speeds:
            raise WorkerFailed(errors[0])
        return max(speeds, key=lambda option: speeds[option])

    def row(
        self,
        ours: Option,
        others: dict[str, list[Option]],
        block_bytes: int,
        pairs: int,
        site: str,
        say: Callable[[str], None],
    ) -> Row:
        """Measure one row. What fails is in the row as an error, and the rest goes on."""
        case = self.case
        fixed: dict[str, Any] = {**dataclasses.asdict(case), "site": site, "via": dict(ours.how)["via"]}
        fixed |= {"block_bytes": block_bytes, "nbytes": self.nbytes}
        try:
            self.fastest([ours], block_bytes)
        except WorkerFailed as error:
            say(str(error))
            return Row(
                **fixed, gb_s=NOTHING, cpu_s_per_gb=0, slowest_to_median=0, others=(), error=str(error).splitlines()[0]
            )
        chosen: dict[str, Option] = {}
        errors: dict[str, str] = {}
        for name, options in others.items():
            try:
                chosen[name] = self.fastest(options, block_bytes)
            except WorkerFailed as error:
                errors[name] = str(error)
        own: list[Moved] = []
        got: dict[str, list[tuple[Moved, Moved]]] = {name: [] for name in chosen}
        own_error = ""
        for turn in range(pairs):
            groups = neighbours(list(chosen))
            for group in [[*reversed(names)] for names in reversed(groups)] if turn % 2 else groups:
                seed = next(SEEDS)
                taken: dict[str, Moved] = {}
                for name in group:
                    try:
                        option = chosen[name] if name else ours
                        taken[name] = self.take(option, block_bytes, self.nbytes, seed)
                    except WorkerFailed as error:
                        if not name:
                            own_error = str(error).splitlines()[0]
                            say(str(error))
                            break
                        errors[name] = str(error)
                        del chosen[name]
                if "" in taken:
                    own.append(taken[""])
                    for name in taken.keys() - {""}:
                        got[name].append((taken[""], taken[name]))
            if own_error:
                break
        compared = [self.compare(name, option.label, got[name]) for name, option in chosen.items() if got[name]]
        for name, text in errors.items():
            say(text)
            compared.append(Comparison(name, "", NOTHING, 0.0, NOTHING, 0, text.splitlines()[0]))
        return Row(
            **fixed,
            gb_s=Spread.of([one.gb_s for one in own]) if own else NOTHING,
            cpu_s_per_gb=statistics.median(one.cpu_s_per_gb for one in own) if own else 0.0,
            slowest_to_median=statistics.median(one.slowest_to_median for one in own) if own else 0.0,
            others=tuple(compared),
            error=own_error,
        )

    @staticmethod
    def compare(name: str, settings: str, pairs: Sequence[tuple[Moved, Moved]]) -> Comparison:
        return Comparison(
            name,
            settings,
            Spread.of([theirs.gb_s for _, theirs in pairs]),
            statistics.median(theirs.cpu_s_per_gb for _, theirs in pairs),
            Spread.of([ours.gb_s / theirs.gb_s for ours, theirs in pairs]),
            len(pairs),
        )
