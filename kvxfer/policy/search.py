"""The cheapest pair of a prefill and a decode worker, without looking at every pair.

Decides in which order pairs are looked at and when no other can be cheaper: both sides are sorted, and no pair costs
less than its ends and the least that any two of their kind have between them. It must never know what a cost means.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvxfer.policy.candidates import Candidate, can_read, have_equal_pools, have_unknown_weights, is_near
from kvxfer.policy.scores import Cost, Scores
from kvxfer.types import AgentRef

EjectedPairs = frozenset[tuple[AgentRef, AgentRef]]


class Ranked(NamedTuple):
    """One worker and what the request costs there."""

    cost: Cost
    candidate: Candidate


class CheapestPair(NamedTuple):
    """``cost``: of both ends and of what is between them."""

    cost: Cost
    source: Candidate
    destination: Candidate


class Unpaired(enum.Enum):
    """Why no pair was found."""

    ONLY_ITSELF = enum.auto()
    INCOMPATIBLE_POOLS = enum.auto()
    WEIGHTS_UNKNOWN = enum.auto()
    EJECTED = enum.auto()


def ranked(candidates: Iterable[Candidate], cost: Callable[[Candidate], Cost], tie_break: int) -> list[Ranked]:
    """Cheapest first. ``tie_break`` rotates each group of equal cost, so that each member comes first equally often."""
    by_cost: dict[Cost, list[Candidate]] = {}
    for candidate in candidates:
        by_cost.setdefault(cost(candidate), []).append(candidate)
    ordered: list[Ranked] = []
    for price in sorted(by_cost):
        equals = by_cost[price]
        start = tie_break % len(equals)
        ordered += [Ranked(price, one) for one in (*equals[start:], *equals[:start])]
    return ordered


def best_pair(
    sources: Sequence[Ranked], destinations: Sequence[Ranked], scores: Scores, ejected: EjectedPairs
) -> tuple[CheapestPair | None, Unpaired]:
    """The pair of the least cost, ``ejected`` ones left out; both sides come as :func:`ranked` gives them. Of equals it
    is the one whose source comes first, then whose destination does."""
    best: CheapestPair | None = None
    why = Unpaired.ONLY_ITSELF
    by_kind = _by(destinations, kind_of)
    for ours in _by(sources, kind_of).values():
        for theirs in by_kind.values():
            source, destination = ours[0].candidate, theirs[0].candidate
            is_equal = have_equal_pools(source.member, destination.member)
            if not can_read(source, destination, has_equal_pools=is_equal):
                if len(ours) > 1 or len(theirs) > 1 or source.agent_id != destination.agent_id:
                    why = max(why, _why_unreadable(source, destination), key=lambda one: one.value)
                continue
            best, met_ejected = _Search(scores, ejected, best, is_equal=is_equal).run(ours, theirs)
            if met_ejected:
                why = Unpaired.EJECTED
    return best, why


def _why_unreadable(source: Candidate, destination: Candidate) -> Unpaired:
    is_unknown = have_unknown_weights(source.member, destination.member)
    return Unpaired.WEIGHTS_UNKNOWN if is_unknown else Unpaired.INCOMPATIBLE_POOLS


def kind_of(ranked: Ranked) -> object:
    """Workers of one kind can be read by the same others. Pools of unknown weights count as one kind, although each has
    a fingerprint of its own, because none of them is paired."""
    candidate = ranked.candidate
    pools = candidate.member.pools
    if not pools:
        return candidate.member.info.dialect
    known = frozenset(
        (pool.record, pool.block_bytes, pool.memory) if pool.record.has_known_weights else None for pool in pools
    )
    return candidate.member.info.dialect, candidate.ranks, known


def _host_of(ranked: Ranked) -> str:
    return ranked.candidate.host


def _by(ordered: Iterable[Ranked], key: Callable[[Ranked], object]) -> dict[object, list[Ranked]]:
    groups: dict[object, list[Ranked]] = {}
    for one in ordered:
        groups.setdefault(key(one), []).append(one)
    return groups


class _Search:
    """Among workers of one kind for each side: those of one host first, then all others."""

    def __init__(self, scores: Scores, ejected: EjectedPairs, best: CheapestPair | None, *, is_equal: bool) -> None:
        self._scores = scores
        self._ejected = ejected
        self._best = best
        self._is_equal = is_equal
        self._met_ejected = False

    def run(self, sources: Sequence[Ranked], destinations: Sequence[Ranked]) -> tuple[CheapestPair | None, bool]:
        """The best pair so far, and whether an ejected one was passed over."""
        there = _by(destinations, _host_of)
        for host, ours in _by(sources, _host_of).items():
            if host and host in there:
                self._among(ours, there[host], near=True)
        self._among(sources, destinations, near=False)
        return self._best, self._met_ejected

    def _among(self, sources: Sequence[Ranked], destinations: Sequence[Ranked], *, near: bool) -> None:
        least = self._scores.between_least(is_near=near, is_equal=self._is_equal)
        for source_cost, source in sources:
            if self._is_worse(source_cost.amount + destinations[0].cost.amount, least):
                return
            for destination_cost, destination in destinations:
                ends = source_cost.amount + destination_cost.amount
                if self._is_worse(ends, least):
                    break
                if source.agent_id == destination.agent_id or is_near(source, destination) is not near:
                    continue
                if self._ejected and (source.member.ref, destination.member.ref) in self._ejected:
                    self._met_ejected = True
                    continue
                between = self._scores.between(source, destination, is_equal=self._is_equal)
                cost = Cost(ends + between.amount, between.tie)
                if self._best is None or cost < self._best.cost:
                    self._best = CheapestPair(cost, source, destination)

    def _is_worse(self, ends: float, least: Cost) -> bool:
        """Whether no pair with these ends can be better than the best so far."""
        return self._best is not None and (ends + least.amount, least.tie) >= self._best.cost
