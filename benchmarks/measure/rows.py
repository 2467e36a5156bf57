"""A row: kvxfer in turns with everybody it is compared with, at one size of blocks.

It decides the order of turns and what a row says: each comparison is made of pairs, one turn of kvxfer beside one turn
of the other; of two others one goes before and one after the same turn of kvxfer; every second round goes backwards.
A ratio is the median of the pairs' ratios.

The rounds of a row may be taken by several sets of processes: where a pool's pages lie is luck, and stays so for as
long as its process runs. It must never know how a figure is shown.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from peers.memory import Pages, Scraps

from measure.contenders import Case, Option
from measure.ends import Moved, Pair, Reference, Setup, Site, WorkerFailed

TUNE_BYTES = 16 << 20
TUNE_TURNS = 2
WARM_BYTES = 8 << 20
"""Moved first, and not counted, by processes that were at rest: a limit has its turns in kvxfer's own, next to them."""
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
    source_cpu_s_per_gb: float = 0.0
    """Of ``cpu_s_per_gb``; 0 in reports that were written before it was told apart."""


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
    source_cpu_s_per_gb: float = 0.0
    copy_threads: int = 0


NOTHING = Spread(0.0, 0.0, 0.0)
Say = Callable[[str], None]
"""Prints for the person that watches the run."""


class Room:
    """The processes of a run at one site; each setup's two are started when first asked for, out of memory that lies
    together."""

    def __init__(self, site: Site, reference: Reference) -> None:
        self.site = site
        self.reference = reference
        self.pairs: dict[Setup, Pair] = {}
        self.failed: dict[Setup, str] = {}
        self.scraps = Scraps()

    def pair(self, setup: Setup) -> Pair:
        """The setup's processes, awake, and all others at rest. Raises WorkerFailed, again and again for a setup that
        failed once."""
        if setup in self.failed:
            raise WorkerFailed(self.failed[setup])
        for other, pair in self.pairs.items():
            if other != setup:
                pair.rest()
        if setup not in self.pairs:
            if setup.pages == Pages.SMALL:
                self.scraps.hold()
            try:
                self.pairs[setup] = Pair(setup, self.site, self.reference)
            except WorkerFailed as error:
                self.failed[setup] = str(error)
                raise
        self.pairs[setup].wake()
        return self.pairs[setup]

    def is_at_rest(self, setup: Setup) -> bool:
        return setup in self.pairs and not self.pairs[setup].is_awake

    def drop(self, setup: Setup) -> None:
        """Stop a setup's processes: they are of no more use, or in doubt."""
        pair = self.pairs.pop(setup, None)
        if pair is not None:
            pair.stop()

    def clear(self) -> None:
        for setup in list(self.pairs):
            self.drop(setup)
        self.failed.clear()
        self.scraps.give_back()


def parts_of(pairs: int, sets: int) -> list[range]:
    """The numbers of a row's rounds, in so many parts of nearly one size; in fewer, where there are fewer pairs."""
    sets = max(1, min(sets, pairs))
    return [range(pairs * part // sets, pairs * (part + 1) // sets) for part in range(sets)]


def neighbours(names: list[str]) -> list[list[str]]:
    """The order of one round: each name stands beside a turn of kvxfer, which is ""."""
    groups = [[*names[i : i + 1], "", *names[i + 1 : i + 2]] for i in range(0, len(names), 2)]
    return groups or [[""]]


class Turns:
    """Takes turns in one room. Every turn has lists of its own, which no other turn had."""

    def __init__(self, room: Room, case: Case, nbytes: int) -> None:
        self.room = room
        self.case = case
        self.nbytes = nbytes

    def take(self, option: Option, block_bytes: int, nbytes: int, seed: int) -> Moved:
        at_rest = self.room.is_at_rest(option.setup)
        try:
            pair = self.room.pair(option.setup)
            if at_rest:
                self.move(pair, option, block_bytes, min(nbytes, max(WARM_BYTES, block_bytes)), next(SEEDS))
            return self.move(pair, option, block_bytes, nbytes, seed)
        except WorkerFailed:
            self.room.drop(option.setup)
            raise

    def move(self, pair: Pair, option: Option, block_bytes: int, nbytes: int, seed: int) -> Moved:
        how = dict(option.how)
        at_once = 1 if how.get("limit") else self.case.at_once
        return pair.move(self.case.op, how, seed=seed, block_bytes=block_bytes, nbytes=nbytes, at_once=at_once)

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


class GrowingRow:
    """One row, a few rounds at a time: processes may be replaced between two calls of :meth:`take`. What fails is in
    the row as an error, and the rest goes on."""

    def __init__(
        self, turns: Turns, ours: Option, others: dict[str, list[Option]], block_bytes: int, site: str, say: Say
    ) -> None:
        self.turns = turns
        self.ours = ours
        self.others = others
        self.block_bytes = block_bytes
        self.site = site
        self.say = say
        self.chosen: dict[str, Option] | None = None
        self.errors: dict[str, str] = {}
        self.own: list[Moved] = []
        self.own_error = ""
        self.got: dict[str, list[tuple[Moved, Moved]]] = {}

    def take(self, rounds: Iterable[int]) -> None:
        """A round is one turn of each other beside one of kvxfer; its number says in which order."""
        if self.own_error:
            return
        try:
            self.turns.fastest([self.ours], self.block_bytes)
        except WorkerFailed as error:
            return self.fail(error)
        options = self.others if self.chosen is None else {name: [option] for name, option in self.chosen.items()}
        self.chosen = {}
        for name, choices in options.items():
            try:
                self.chosen[name] = self.turns.fastest(choices, self.block_bytes)
                self.got.setdefault(name, [])
            except WorkerFailed as error:
                self.errors[name] = str(error)
        for number in rounds:
            groups = neighbours(list(self.chosen))
            for group in [[*reversed(names)] for names in reversed(groups)] if number % 2 else groups:
                self.take_group(group, self.chosen)
                if self.own_error:
                    return

    def take_group(self, group: list[str], chosen: dict[str, Option]) -> None:
        seed = next(SEEDS)
        taken: dict[str, Moved] = {}
        for name in group:
            try:
                option = chosen[name] if name else self.ours
                taken[name] = self.turns.take(option, self.block_bytes, self.turns.nbytes, seed)
            except WorkerFailed as error:
                if not name:
                    self.fail(error)
                    break
                self.errors[name] = str(error)
                del chosen[name]
        if "" in taken:
            self.own.append(taken[""])
            for name in taken.keys() - {""}:
                self.got[name].append((taken[""], taken[name]))

    def fail(self, error: WorkerFailed) -> None:
        self.say(str(error))
        self.own_error = str(error).splitlines()[0]

    def whole(self) -> Row:
        compared = [
            self.compare(name, option.label, self.got[name])
            for name, option in (self.chosen or {}).items()
            if self.got[name]
        ]
        for name, text in self.errors.items():
            self.say(text)
            compared.append(Comparison(name, "", NOTHING, 0.0, NOTHING, 0, text.splitlines()[0]))
        own = self.own
        return Row(
            **dataclasses.asdict(self.turns.case),
            site=self.site,
            via=dict(self.ours.how)["via"],
            block_bytes=self.block_bytes,
            nbytes=self.turns.nbytes,
            gb_s=Spread.of([one.gb_s for one in own]) if own else NOTHING,
            cpu_s_per_gb=statistics.median(one.cpu_s_per_gb for one in own) if own else 0.0,
            slowest_to_median=statistics.median(one.slowest_to_median for one in own) if own else 0.0,
            others=tuple(compared),
            error=self.own_error,
            source_cpu_s_per_gb=statistics.median(one.source_cpu_s_per_gb for one in own) if own else 0.0,
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
            source_cpu_s_per_gb=statistics.median(theirs.source_cpu_s_per_gb for _, theirs in pairs),
        )


def each_case(cases: Iterable[dict[str, Any]], compare: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """What ``compare`` finds in each case, beside the case's own words; ``error``: why it could not run."""
    found = []
    for case in cases:
        try:
            found.append(case | compare(**case))
        except WorkerFailed as error:
            found.append(case | {"error": str(error).splitlines()[0]})
    return found
