"""Which worker computes the prompt and which one generates: both chosen together, over one frozen snapshot.

Filter, then score, then pick. Filter: a worker that is suspect, draining, excluded, of another model, without an HTTP
address or too small for the request gets no new work. Score: a worker costs what it already carries, a pair costs what
lies between the two. Pick: the cheapest; equals are told apart by a number that the caller draws, so that the same
snapshot and the same number give the same answer. It must never know a clock, a socket or how a request reaches a
worker.

A worker that is the last choice (it is ejected) is tried last: as a decoder only where no other is left, as a
prefiller only where the decoder must not compute the prompt itself.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvxfer.errors import DoesNotFitError, NoWorkerError
from kvxfer.layout.convertible import is_convertible
from kvxfer.policy.capacity import ANY, Capacity, Need, capacity_of
from kvxfer.types import AgentRef, CompatibilityRecord, Exposure, Member

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
    PREFILL_EJECTED = "prefill_ejected"
    PREFILL_TOO_SMALL = "prefill_too_small"
    INCOMPATIBLE_POOLS = "incompatible_pools"
    WEIGHTS_UNKNOWN = "weights_unknown"
    PAIR_EJECTED = "pair_ejected"
    """Every pair that there is lately failed, while its ends work with others."""
    ENGINE_ALONE = "engine_alone"
    """The engine that is chosen takes no part in pairs."""


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

    def serves(self, model: str) -> bool:
        return self.member.info.model == model or model in self.aliases


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
    return _of_share(inflight + load.queued_prefill_tokens / PREFILL_TOKENS_PER_REQUEST, candidate.share)


def decode_cost(candidate: Candidate) -> float:
    """Work at a decoder: requests, and up to one request more as its blocks run out."""
    load = candidate.member.load
    inflight = max(candidate.prefill_inflight + candidate.decode_inflight, load.running_requests + load.queued_requests)
    used = 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    return _of_share(inflight + min(1.0, max(0.0, used)) ** 2, candidate.share)


def _of_share(cost: float, share: float) -> float:
    """What ``cost`` is at a worker that is to carry only ``share`` of what another carries at the same cost."""
    return cost if share == 1.0 else (cost + 1.0) / share - 1.0


def is_placeable(candidate: Candidate, *, model: str | None = None) -> bool:
    """Whether a worker may get new work (for ``model``, if given)."""
    member = candidate.member
    return (
        bool(member.info.http_url)
        and not member.is_suspect
        and not member.is_draining
        and (model is None or candidate.serves(model))
    )


def have_equal_pools(source: Member, destination: Member) -> bool:
    """Whether blocks of one are blocks of the other as they are; members without pools are not judged."""
    if not source.pools or not destination.pools:
        return True
    known = {pool.record for pool in source.pools if pool.record.has_known_weights}
    return any(pool.record in known for pool in destination.pools)


def have_unknown_weights(source: Member, destination: Member) -> bool:
    """Whether one of them does not know (yet) which weights its blocks are made with."""
    return any(not pool.record.has_known_weights for member in (source, destination) for pool in member.pools)


def are_compatible(source: Candidate, destination: Candidate) -> bool:
    """Whether both speak the same dialect, and some pool of one can be read into some pool of the other, or be made
    into it."""
    return _can_read(source, destination, has_equal_pools=have_equal_pools(source.member, destination.member))


def _can_read(source: Candidate, destination: Candidate, *, has_equal_pools: bool) -> bool:
    if source.member.info.dialect != destination.member.info.dialect:
        return False
    return has_equal_pools or any(
        is_convertible(ours, theirs, ranks=destination.ranks, sources=source.ranks)
        for ours in destination.member.pools
        for theirs in source.member.pools
    )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is known of one request's size, and which workers said of this very request that they cannot hold it.

    ``need`` is certain. ``likely`` is what it will take by all estimates: it only says which workers are tried first.
    """

    need: Need = ANY
    likely: Need = ANY
    too_small_to_prefill: frozenset[str] = frozenset()
    too_small_to_decode: frozenset[str] = frozenset()


UNKNOWN = Sizes()


def place(
    candidates: Iterable[Candidate],
    *,
    model: str,
    tie_break: int,
    sizes: Sizes = UNKNOWN,
    wants_remote_prefill: bool = True,
    allows_local_prefill: bool = True,
    generates: bool = True,
    excluded: frozenset[str] = frozenset(),
    avoided: frozenset[str] = frozenset(),
    cost_between: Callable[[Member, Member], float] = transfer_cost,
    ejected_pairs: frozenset[tuple[AgentRef, AgentRef]] = frozenset(),
) -> Placement:
    """Choose the pair for one request.

    ``excluded`` agents get nothing; ``avoided`` ones (they failed this very request) are treated as a last choice.
    ``ejected_pairs`` (prefill, decode) are taken only where the decoder must not compute the prompt itself and there is
    no other pair.
    A request that does not generate (``generates``) has no prompt to compute, so that any decoder answers it alone.
    ``tie_break`` is any int drawn by the caller. Raises NoWorkerError where no decoder is left, or where the prompt may
    not be computed by the decoder and no other worker can; DoesNotFitError where none that is known is large enough, be
    it busy, suspect, draining or excluded.
    """
    # known: every worker of the model; usable: those of them that take new work; able: those that are large enough.
    known = [c for c in candidates if c.serves(model) and c.member.info.http_url]
    usable = sorted(
        (c for c in known if c.agent_id not in excluded and is_placeable(c)), key=lambda c: c.member.ref.agent_id
    )
    if avoided:
        usable = [dataclasses.replace(c, is_last_choice=True) if c.agent_id in avoided else c for c in usable]
    decoders = [c for c in usable if c.member.info.role.can_decode]
    known_decoders = [c for c in known if c.member.info.role.can_decode]
    able_decoders = _able(known_decoders, can_decode, sizes.need, sizes.too_small_to_decode)
    if known_decoders and not able_decoders:
        raise _does_not_fit(known_decoders, model, sizes.need)
    decoders = _among(decoders, able_decoders, known_decoders)
    if not decoders:
        raise NoWorkerError(f"no decode worker for model {model!r} takes new work")
    if not wants_remote_prefill and allows_local_prefill:
        decoders = _computing(decoders, generates=generates) or decoders
    decoders = [c for c in decoders if not c.is_last_choice] or decoders
    decoders = [c for c in decoders if c.capacity.holds(sizes.likely)] or decoders
    decoders = _by_cost(decoders, decode_cost, tie_break)
    # computing: those that may compute the prompt themselves.
    computing = _computing(decoders, generates=generates) if allows_local_prefill else []
    if not wants_remote_prefill and computing:
        return Placement(None, computing[0].member, PlaceReason.NOT_WANTED)
    alone = next((c for c in decoders if c.is_alone), None)
    if not wants_remote_prefill and alone is not None:
        return Placement(None, alone.member, PlaceReason.ENGINE_ALONE)

    prefillers = [c for c in usable if c.member.info.role.can_prefill and not c.is_alone]
    known_prefillers = [c for c in known if c.member.info.role.can_prefill and not c.is_alone]
    able_prefillers = _able(known_prefillers, can_prefill, sizes.need, sizes.too_small_to_prefill)
    local_reason = PlaceReason.NO_PREFILL_WORKER
    if prefillers:
        prefillers = _among(prefillers, able_prefillers, known_prefillers)
        if not prefillers:
            local_reason = PlaceReason.PREFILL_TOO_SMALL
    if prefillers and all(c.is_last_choice for c in prefillers) and computing:
        return Placement(None, computing[0].member, PlaceReason.PREFILL_EJECTED)
    prefillers = [c for c in prefillers if not c.is_last_choice] or prefillers
    prefillers = [c for c in prefillers if can_prefill(c, sizes.likely)] or prefillers
    prefillers = _by_cost(prefillers, prefill_cost, tie_break // max(1, len(decoders)))
    paired = [c for c in decoders if not c.is_alone]
    if prefillers and paired:
        best, local_reason = _best_pair(prefillers, paired, cost_between, ejected_pairs)
        if best is None and ejected_pairs and alone is None and not computing:
            best, local_reason = _best_pair(prefillers, paired, cost_between, frozenset())
        if best is not None:
            if alone is not None and decode_cost(alone) <= best[0]:
                return Placement(None, alone.member, PlaceReason.ENGINE_ALONE)
            return Placement(best[1], best[2], PlaceReason.REMOTE)
    if alone is not None and (not computing or alone is computing[0]):
        return Placement(None, alone.member, PlaceReason.ENGINE_ALONE)
    if not computing:
        if known_prefillers and not able_prefillers:
            raise _does_not_fit(known_prefillers, model, sizes.need)
        why = "no decode worker computes a prompt itself" if allows_local_prefill else "local prefill is off"
        raise NoWorkerError(f"no prefill worker for model {model!r} ({local_reason.value}), and {why}")
    return Placement(None, computing[0].member, local_reason)


def _computing(decoders: Sequence[Candidate], *, generates: bool) -> list[Candidate]:
    """Those that can compute the prompt themselves, where there is one to compute."""
    return [c for c in decoders if c.computes_alone or not generates]


def can_prefill(candidate: Candidate, need: Need) -> bool:
    """Whether a worker may hold the prompt, as far as it is known."""
    return candidate.capacity.holds_prompt(need)


def can_decode(candidate: Candidate, need: Need) -> bool:
    """Whether a worker may hold prompt and answer, or as much of the answer as it gives, as far as it is known."""
    capacity = candidate.capacity
    if not candidate.clips_answers:
        return capacity.holds(need)
    return capacity.holds_prompt(need) and capacity.holds_answer(need)


def _able(
    candidates: Sequence[Candidate],
    can: Callable[[Candidate, Need], bool],
    need: Need,
    too_small: frozenset[str],
) -> list[Candidate]:
    """The candidates that may hold ``need``. Left out are workers that refused this request as too large
    (``too_small``), and workers of the same dialect that are known to be no larger than one of those."""
    able = [c for c in candidates if can(c, need)]
    if not too_small:
        return able
    refused = [c for c in candidates if c.agent_id in too_small]
    return [c for c in able if c.agent_id not in too_small and not any(_is_no_larger(c, other) for other in refused)]


def _is_no_larger(candidate: Candidate, other: Candidate) -> bool:
    ours, theirs = candidate.capacity, other.capacity
    is_known = ours.tokens is not None and candidate.member.info.dialect == other.member.info.dialect
    return is_known and ours.is_within(theirs)


def _among(candidates: list[Candidate], able: Sequence[Candidate], known: Sequence[Candidate]) -> list[Candidate]:
    """Those ``candidates``, all of them ``known``, that are among ``able``, by agent id."""
    if len(able) == len(known):
        return candidates
    names = {c.agent_id for c in able}
    return [c for c in candidates if c.agent_id in names]


def _does_not_fit(candidates: Sequence[Candidate], model: str, need: Need) -> DoesNotFitError:
    largest = max((c.capacity.tokens or 0 for c in candidates), default=0)
    holds = f": the largest holds {largest} tokens" if largest else ""
    is_prompt = not any(can_prefill(c, need) for c in candidates)
    return DoesNotFitError(
        f"{need} do not fit any worker for model {model!r}{holds}",
        field="prompt" if is_prompt else "max_tokens",
        prompt_tokens=need.prompt_tokens if need.prompt_tokens > 1 else None,
    )


def _best_pair(
    prefillers: Sequence[Candidate],
    decoders: Sequence[Candidate],
    cost_between: Callable[[Member, Member], float],
    ejected_pairs: frozenset[tuple[AgentRef, AgentRef]],
) -> tuple[tuple[float, Member, Member] | None, PlaceReason]:
    reason = PlaceReason.ONLY_ITSELF
    best: tuple[float, Member, Member] | None = None
    sources = [(candidate, prefill_cost(candidate)) for candidate in _shortlist(prefillers)]
    for decoder in _shortlist(decoders):
        destination, decoding_cost = decoder.member, decode_cost(decoder)
        for prefiller, prefilling_cost in sources:
            source = prefiller.member
            if source.ref.agent_id == destination.ref.agent_id:
                continue
            is_equal = have_equal_pools(source, destination)
            if not _can_read(prefiller, decoder, has_equal_pools=is_equal):
                if have_unknown_weights(source, destination):
                    reason = PlaceReason.WEIGHTS_UNKNOWN
                elif reason is PlaceReason.ONLY_ITSELF:
                    reason = PlaceReason.INCOMPATIBLE_POOLS
                continue
            if ejected_pairs and (source.ref, destination.ref) in ejected_pairs:
                reason = PlaceReason.PAIR_EJECTED
                continue
            cost = prefilling_cost + decoding_cost + cost_between(source, destination)
            if not is_equal:
                cost += BRIDGED_COST
            if best is None or cost < best[0]:
                best = (cost, source, destination)
    return (None, reason) if best is None else (best, PlaceReason.REMOTE)


def _shortlist(ordered: Sequence[Candidate]) -> list[Candidate]:
    """The SHORTLIST cheapest, and the two cheapest of every host and kind of pools: two, because one of them may be the
    other worker of the pair.

    Pools of unknown weights count as one kind, although each has its own fingerprint, because none of them is paired.
    """
    if len(ordered) <= SHORTLIST:
        return list(ordered)
    taken: Counter[tuple[str, frozenset[CompatibilityRecord | None]]] = Counter()
    chosen: list[Candidate] = []
    for at, candidate in enumerate(ordered):
        records = (pool.record for pool in candidate.member.pools)
        kinds = frozenset(record if record.has_known_weights else None for record in records)
        key = (candidate.member.address.host_id, kinds)
        if at < SHORTLIST or taken[key] < 2:
            chosen.append(candidate)
        taken[key] += 1
    return chosen


def _by_cost(candidates: Iterable[Candidate], cost: Callable[[Candidate], float], tie_break: int) -> list[Candidate]:
    """Cheapest first. ``tie_break`` rotates each group of equal cost, so that each member comes first equally often."""
    by_cost: dict[float, list[Candidate]] = {}
    for candidate in candidates:
        by_cost.setdefault(cost(candidate), []).append(candidate)
    ordered: list[Candidate] = []
    for price in sorted(by_cost):
        equals = by_cost[price]
        start = tie_break % len(equals)
        ordered += [*equals[start:], *equals[:start]]
    return ordered
