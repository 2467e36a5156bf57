"""What a choice costs: the seam between the search for the cheapest workers and the policy that says what is cheap.

A policy gives one request's cost at each worker, and between two; `place` finds the least sum. Here are the policies
that learn nothing: ``least-loaded``, ``round-robin`` and ``random``. `seconds` is the one that learns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from kvxfer.policy.candidates import Candidate, is_mapped, is_near
from kvxfer.types import AgentRef


class Cost(NamedTuple):
    """``amount`` is in the policy's own unit and is added up; ``tie`` tells equal amounts apart, less first."""

    amount: float
    tie: float = 0.0


FREE = Cost(0.0)


class Scores(Protocol):
    """The costs of one request. All are 0 or more, and none changes while the request is placed."""

    @property
    def weighs_alone(self) -> bool:
        """Whether a decoder that computes the prompt itself is compared with pairs. Else it only stands in for them."""

    def prefill(self, candidate: Candidate) -> Cost:
        """To compute the prompt there for another worker."""

    def decode(self, candidate: Candidate) -> Cost:
        """To generate there from KV that is read."""

    def alone(self, candidate: Candidate) -> Cost:
        """To do both there."""

    def between(self, source: Candidate, destination: Candidate, *, is_equal: bool) -> Cost:
        """To bring the KV from one to the other. ``is_equal``: blocks of one are blocks of the other as they are."""

    def between_least(self, *, is_near: bool, is_equal: bool) -> Cost:
        """No pair on one host (``is_near``), or on two, has less between its ends."""


DISTANCES = (0.0, 1.0, 2.0)
"""An order and no measure: mapped, on one host, elsewhere."""
BRIDGED = 0.5
"""Blocks that must be converted come behind those of the same distance that need not be, and before the next one."""


def distance(source: Candidate, destination: Candidate, *, is_equal: bool) -> float:
    """The order in which pairs of equal cost are taken, the least first."""
    at = 2 if not is_near(source, destination) else 0 if is_mapped(source) else 1
    return DISTANCES[at] + (0.0 if is_equal else BRIDGED)


def least_distance(*, is_near: bool, is_equal: bool) -> float:
    """No pair on one host (``is_near``), or on two, has a smaller :func:`distance`."""
    return DISTANCES[0 if is_near else 2] + (0.0 if is_equal else BRIDGED)


def of_share(amount: float, share: float, one: float = 1.0) -> float:
    """What ``amount`` is at a worker that is to carry only ``share`` of what another carries at the same amount;
    ``one``: the amount of one request."""
    return amount if share == 1.0 else (amount + one) / share - one


class LeastLoaded:
    """In requests in flight. Equal ones are told apart by queued prompt tokens, by the share of blocks that are taken,
    and by distance."""

    weighs_alone = False

    def prefill(self, candidate: Candidate) -> Cost:
        queued = candidate.member.load.queued_prefill_tokens
        return Cost(of_share(candidate.inflight, candidate.share), queued)

    def decode(self, candidate: Candidate) -> Cost:
        return Cost(of_share(candidate.inflight, candidate.share), used_share(candidate))

    def alone(self, candidate: Candidate) -> Cost:
        return self.decode(candidate)

    def between(self, source: Candidate, destination: Candidate, *, is_equal: bool) -> Cost:
        return Cost(0.0, distance(source, destination, is_equal=is_equal))

    def between_least(self, *, is_near: bool, is_equal: bool) -> Cost:
        return Cost(0.0, least_distance(is_near=is_near, is_equal=is_equal))


LEAST_LOADED = LeastLoaded()


class Random(LeastLoaded):
    """Each worker equally often, whatever it carries; only shares count."""

    def prefill(self, candidate: Candidate) -> Cost:
        return Cost(of_share(0.0, candidate.share))

    def decode(self, candidate: Candidate) -> Cost:
        return self.prefill(candidate)

    def between(self, source: Candidate, destination: Candidate, *, is_equal: bool) -> Cost:
        return FREE

    def between_least(self, *, is_near: bool, is_equal: bool) -> Cost:
        return FREE


class RoundRobin(Random):
    """``turns``: the number of the last request that each worker got; the one whose turn is longest ago is next."""

    def __init__(self, turns: Mapping[AgentRef, int]) -> None:
        self._turns = turns

    def prefill(self, candidate: Candidate) -> Cost:
        return Cost(of_share(self._turns.get(candidate.member.ref, 0), candidate.share))


def used_share(candidate: Candidate) -> float:
    """Of its blocks: 0.0 to 1.0, and 0.0 where it does not say."""
    load = candidate.member.load
    return min(1.0, max(0.0, 1.0 - load.free_blocks / load.total_blocks)) if load.total_blocks else 0.0
