"""The workers that one request can go to, as a choice sees them: a frozen snapshot of each.

Decides which of them may get new work, and whether blocks of one can be read by another. It must never know what a
choice costs, nor how the router learnt what stands here.
"""

from __future__ import annotations

import dataclasses

from kvxfer.layout.convertible import is_convertible
from kvxfer.policy.capacity import Capacity, Need, capacity_of
from kvxfer.types import Exposure, Member


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One member with what this router knows of it: its requests in flight there, and whether it is the last choice."""

    member: Member
    prefill_inflight: int = 0
    decode_inflight: int = 0
    is_last_choice: bool = False
    ranks: int = 1
    """Agents of its engine that divide the heads of one layer equally; ``member`` is the first of them."""
    clips_answers: bool = False
    """Whether its engine ends an answer where its context does, rather than refuse to begin it."""
    known_capacity: Capacity | None = None
    """``capacity_of(member)``, where the caller knows it already."""
    share: float = 1.0
    """Of the work that it would get otherwise: less in a slow start, and the less the worse where it is ejected."""
    is_alone: bool = False
    """Whether its engine always computes the prompt itself, and none for another."""
    computes_alone: bool = True
    """Whether its engine, as a decoder, computes a prompt itself when it is to."""
    aliases: frozenset[str] = frozenset()
    """Other names of models that it serves."""

    @property
    def agent_id(self) -> str:
        return self.member.ref.agent_id

    @property
    def capacity(self) -> Capacity:
        return self.known_capacity or capacity_of(self.member)

    @property
    def inflight(self) -> int:
        """Requests there: the greater of its own count and of this router's."""
        load = self.member.load
        return max(self.prefill_inflight + self.decode_inflight, load.running_requests + load.queued_requests)

    @property
    def host(self) -> str:
        """Of its memory; empty where it does not say."""
        return self.member.address.host_id

    def serves(self, model: str) -> bool:
        return self.member.info.model == model or model in self.aliases


def is_placeable(candidate: Candidate, *, model: str | None = None) -> bool:
    """Whether a worker may get new work (for ``model``, if given)."""
    member = candidate.member
    return (
        bool(member.info.http_url)
        and not member.is_suspect
        and not member.is_draining
        and (model is None or candidate.serves(model))
    )


def is_near(source: Candidate, destination: Candidate) -> bool:
    """Whether both are on one host."""
    return bool(source.host) and source.host == destination.host


def is_mapped(source: Candidate) -> bool:
    """Whether a reader on its host maps its blocks, without a copy through a socket."""
    return any(pool.is_shareable and pool.exposure is Exposure.POOL for pool in source.member.pools)


def have_equal_pools(source: Member, destination: Member) -> bool:
    """Whether blocks of one are blocks of the other as they are; members without pools are not judged."""
    if not source.pools or not destination.pools:
        return True
    known = {pool.record for pool in source.pools if pool.record.has_known_weights}
    return any(pool.record in known for pool in destination.pools)


def have_unknown_weights(source: Member, destination: Member) -> bool:
    """Whether one of them does not know (yet) which weights its blocks are made with."""
    return any(not pool.record.has_known_weights for member in (source, destination) for pool in member.pools)


def can_read(source: Candidate, destination: Candidate, *, has_equal_pools: bool) -> bool:
    """Whether both speak the same dialect, and some pool of one can be read into some pool of the other, or be made
    into it. ``has_equal_pools``: of :func:`have_equal_pools`."""
    if source.member.info.dialect != destination.member.info.dialect:
        return False
    return has_equal_pools or any(
        is_convertible(ours, theirs, ranks=destination.ranks, sources=source.ranks)
        for ours in destination.member.pools
        for theirs in source.member.pools
    )


def can_prefill(candidate: Candidate, need: Need) -> bool:
    """Whether a worker may hold the prompt, as far as it is known."""
    return candidate.capacity.holds_prompt(need)


def can_decode(candidate: Candidate, need: Need) -> bool:
    """Whether a worker may hold prompt and answer, or as much of the answer as it gives, as far as it is known."""
    capacity = candidate.capacity
    if not candidate.clips_answers:
        return capacity.holds(need)
    return capacity.holds_prompt(need) and capacity.holds_answer(need)
