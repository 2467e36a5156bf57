"""Which worker computes the prompt and which one generates: both chosen together, over one frozen snapshot.

Filter, then score, then pick. Filter: a worker that is suspect, draining, excluded, of another model or without an
HTTP address gets no new work. Score: a worker costs what it already carries, a pair costs what lies between the two.
Pick: the cheapest; equals are told apart by a number that the caller draws, so that the same snapshot and the same
number give the same answer. It must never know a clock, a socket or how a request reaches a worker.

A worker put aside (it lately refused a connection) is tried last: as a decoder only where no other is left, as a
prefiller only where the decoder must not compute the prompt itself.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvxfer.errors import NoWorker
from kvxfer.policy.bridge import can_bridge
from kvxfer.types import CompatibilityRecord, Exposure, Member

SHORTLIST = 8
"""Cheapest workers of each part whose pairs are compared; the cheapest of each host and kind of pools join them."""

PREFILL_TOKENS_PER_REQUEST = 1024
"""Queued prompt tokens that weigh as much as one request in flight."""

SAME_HOST_COST = 0.05
OTHER_HOST_COST = 0.5
"""What a transfer costs, counted in requests in flight: memory-mapped pools on one host cost nothing."""

BRIDGED_COST = 0.25
"""What it costs more where blocks of one kind must be made into blocks of another."""


class PlaceReason(enum.StrEnum):
    """Why the prompt is computed where it is."""

    REMOTE = "remote"
    NOT_WANTED = "not_wanted"
    NO_PREFILL_WORKER = "no_prefill_worker"
    ONLY_ITSELF = "only_itself"
    PREFILL_ASIDE = "prefill_aside"
    INCOMPATIBLE_POOLS = "incompatible_pools"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One member with what this router knows of it: its own requests in flight there, and whether it is put aside."""

    member: Member
    prefill_inflight: int = 0
    decode_inflight: int = 0
    is_aside: bool = False
    ranks: int = 1
    """Agents of its engine, each with an equal share of the heads; ``member`` is the first of them."""

    @property
    def agent_id(self) -> str:
        return self.member.ref.agent_id


@dataclasses.dataclass(frozen=True)
class Placement:
    """``prefill`` is None where the decoder computes the prompt itself; ``reason`` says why."""

    prefill: Member | None
    decode: Member
    reason: PlaceReason


def transfer_cost(source: Member, destination: Member) -> float:
    """What lies between two workers, in requests in flight; lower is nearer."""
    if not source.address.host_id or source.address.host_id != destination.address.host_id:
        return OTHER_HOST_COST
    is_mapped = any(pool.is_shareable and pool.exposure is Exposure.POOL for pool in source.pools)
    return 0.0 if is_mapped else SAME_HOST_COST


def prefill_cost(candidate: Candidate) -> float:
    """Work waiting at a prefiller: requests (the greater of its own count and ours) and queued prompt tokens."""
    load = candidate.member.load
    inflight = max(candidate.prefill_inflight + candidate.decode_inflight, load.running_requests + load.queued_requests)
    return inflight + load.queued_prefill_tokens / PREFILL_TOKENS_PER_REQUEST


def decode_cost(candidate: Candidate) -> float:
    """Work at a decoder: requests, and up to one request more as its blocks run out."""
    load = candidate.member.load
    inflight = max(candidate.prefill_inflight + candidate.decode_inflight, load.running_requests + load.queued_requests)
    used = 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    return inflight + min(1.0, max(0.0, used)) ** 2


def is_placeable(candidate: Candidate, *, model: str | None = None) -> bool:
    """Whether a worker may get new work (for ``model``, if given)."""
    member = candidate.member
    return (
        bool(member.info.http_url)
        and not member.is_suspect
        and not member.is_draining
        and (model is None or member.info.model == model)
    )


def have_equal_pools(source: Member, destination: Member) -> bool:
    """Whether blocks of one are blocks of the other as they are; members without pools are not judged."""
    if not source.pools or not destination.pools:
        return True
    known = {pool.record for pool in source.pools}
    return any(pool.record in known for pool in destination.pools)


def are_compatible(source: Candidate, destination: Candidate) -> bool:
    """Whether both speak the same dialect, and some pool of one can be read into some pool of the other, or be made
    into it."""
    if source.member.info.dialect != destination.member.info.dialect:
        return False
    return have_equal_pools(source.member, destination.member) or any(
        can_bridge(ours, theirs, ranks=destination.ranks, sources=source.ranks)
        for ours in destination.member.pools
        for theirs in source.member.pools
    )


def place(
    candidates: Iterable[Candidate],
    *,
    model: str,
    tie_break: int,
    wants_remote_prefill: bool = True,
    allows_local_prefill: bool = True,
    excluded: frozenset[str] = frozenset(),
    avoided: frozenset[str] = frozenset(),
    cost_between: Callable[[Member, Member], float] = transfer_cost,
) -> Placement:
    """Choose the pair for one request.

    ``excluded`` agents get nothing; ``avoided`` ones (they failed this very request) are treated as put aside.
    ``tie_break`` is any int drawn by the caller. Raises NoWorker where no decoder is left, or where the prompt may
    not be computed by the decoder and nobody else can.
    """
    usable = sorted(
        (c for c in candidates if c.agent_id not in excluded and is_placeable(c, model=model)),
        key=lambda c: c.agent_id,
    )
    usable = [dataclasses.replace(c, is_aside=True) if c.agent_id in avoided else c for c in usable]
    decoders = [c for c in usable if c.member.info.role.can_decode]
    if not decoders:
        raise NoWorker(f"no decode worker for model {model!r} takes new work")
    decoders = [c for c in decoders if not c.is_aside] or decoders
    decoders = _by_cost(decoders, decode_cost, tie_break)
    if not wants_remote_prefill and allows_local_prefill:
        return Placement(None, decoders[0].member, PlaceReason.NOT_WANTED)

    prefillers = [c for c in usable if c.member.info.role.can_prefill]
    local_reason = PlaceReason.NO_PREFILL_WORKER
    if prefillers and all(c.is_aside for c in prefillers) and allows_local_prefill:
        return Placement(None, decoders[0].member, PlaceReason.PREFILL_ASIDE)
    prefillers = [c for c in prefillers if not c.is_aside] or prefillers
    prefillers = _by_cost(prefillers, prefill_cost, tie_break // max(1, len(decoders)))
    if prefillers:
        pair, local_reason = _best_pair(prefillers, decoders, cost_between)
        if pair is not None:
            return Placement(pair[0], pair[1], PlaceReason.REMOTE)
    if not allows_local_prefill:
        raise NoWorker(f"no prefill worker for model {model!r} ({local_reason.value}), and local prefill is off")
    return Placement(None, decoders[0].member, local_reason)


def _best_pair(
    prefillers: Sequence[Candidate],
    decoders: Sequence[Candidate],
    cost_between: Callable[[Member, Member], float],
) -> tuple[tuple[Member, Member] | None, PlaceReason]:
    reason = PlaceReason.ONLY_ITSELF
    best: tuple[float, Member, Member] | None = None
    sources = _shortlist(prefillers)
    for decoder in _shortlist(decoders):
        for prefiller in sources:
            if prefiller.agent_id == decoder.agent_id:
                continue
            if not are_compatible(prefiller, decoder):
                reason = PlaceReason.INCOMPATIBLE_POOLS
                continue
            cost = prefill_cost(prefiller) + decode_cost(decoder) + cost_between(prefiller.member, decoder.member)
            if not have_equal_pools(prefiller.member, decoder.member):
                cost += BRIDGED_COST
            if best is None or cost < best[0]:
                best = (cost, prefiller.member, decoder.member)
    return (None, reason) if best is None else ((best[1], best[2]), PlaceReason.REMOTE)


def _shortlist(ordered: Sequence[Candidate]) -> list[Candidate]:
    """The cheapest few, and the cheapest two (one may be the other part itself) of every host and kind of pools."""
    taken: Counter[tuple[str, frozenset[CompatibilityRecord]]] = Counter()
    chosen: list[Candidate] = []
    for at, candidate in enumerate(ordered):
        key = (candidate.member.address.host_id, frozenset(pool.record for pool in candidate.member.pools))
        if at < SHORTLIST or taken[key] < 2:
            chosen.append(candidate)
        taken[key] += 1
    return chosen


def _by_cost(candidates: Iterable[Candidate], cost: Callable[[Candidate], float], tie_break: int) -> list[Candidate]:
    """Cheapest first; each group of equals is turned by ``tie_break``, so that each comes first equally often."""
    ordered: list[Candidate] = []
    for _, group in itertools.groupby(sorted(candidates, key=cost), key=cost):
        equals = list(group)
        start = tie_break % len(equals)
        ordered += [*equals[start:], *equals[:start]]
    return ordered
