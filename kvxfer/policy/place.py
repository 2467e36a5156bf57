"""Which worker computes the prompt and which one generates: both chosen together, over one frozen snapshot.

Filter, then score, then search. Filter: a worker that is suspect, draining, excluded, of another model, without an HTTP
address or too small for the request gets no new work. Score: a policy says what the request costs at each worker, and
between two (`scores`). Search: the cheapest pair, or the cheapest decoder that computes the prompt itself; equals are
told apart by a number that the caller draws, so that the same snapshot and the same number give the same answer. It
must never know a clock, a socket or how a request reaches a worker.

A worker that is the last choice (it is ejected) is tried last: as a decoder only where no other is left, as a
prefiller only where the decoder must not compute the prompt itself.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence

from kvxfer.errors import DoesNotFitError, NoWorkerError
from kvxfer.policy.candidates import Candidate, can_decode, can_prefill, is_placeable
from kvxfer.policy.capacity import ANY, Need
from kvxfer.policy.scores import LEAST_LOADED, Scores
from kvxfer.policy.search import Ranked, Unpaired, best_pair, ranked
from kvxfer.types import AgentRef, Member


class PlaceReason(enum.StrEnum):
    """Why the prompt is computed where it is."""

    REMOTE = "remote"
    CHEAPER_ALONE = "cheaper_alone"
    """The policy weighs both, and it is done earlier where it is decoded."""
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


_WHY_UNPAIRED = {
    Unpaired.ONLY_ITSELF: PlaceReason.ONLY_ITSELF,
    Unpaired.INCOMPATIBLE_POOLS: PlaceReason.INCOMPATIBLE_POOLS,
    Unpaired.WEIGHTS_UNKNOWN: PlaceReason.WEIGHTS_UNKNOWN,
    Unpaired.EJECTED: PlaceReason.PAIR_EJECTED,
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """``prefill`` is None where the decoder computes the prompt itself; ``reason`` says why."""

    prefill: Member | None
    decode: Member
    reason: PlaceReason


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
    scores: Scores = LEAST_LOADED,
    sizes: Sizes = UNKNOWN,
    wants_remote_prefill: bool = True,
    allows_local_prefill: bool = True,
    generates: bool = True,
    excluded: frozenset[str] = frozenset(),
    avoided: frozenset[str] = frozenset(),
    preferred: AgentRef | None = None,
    ejected_pairs: frozenset[tuple[AgentRef, AgentRef]] = frozenset(),
) -> Placement:
    """Choose the pair for one request.

    ``excluded`` agents get nothing; ``avoided`` ones (they failed this very request) are treated as a last choice.
    ``preferred`` has computed the prompt: it is the prefiller of the pair wherever it can be, whatever it costs.
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
    # computing: those that may compute the prompt themselves, engines that always do among them.
    computing = _computing(decoders, generates=generates) if allows_local_prefill else []
    alone = _cheapest([c for c in decoders if c.is_alone], scores, tie_break)
    local = _cheapest(computing, scores, tie_break)
    if not wants_remote_prefill and (local or alone) is not None:
        return _alone(local or alone, PlaceReason.NOT_WANTED)

    prefillers = [c for c in usable if c.member.info.role.can_prefill and not c.is_alone]
    known_prefillers = [c for c in known if c.member.info.role.can_prefill and not c.is_alone]
    able_prefillers = _able(known_prefillers, can_prefill, sizes.need, sizes.too_small_to_prefill)
    local_reason = PlaceReason.NO_PREFILL_WORKER
    if prefillers:
        prefillers = _among(prefillers, able_prefillers, known_prefillers)
        if not prefillers:
            local_reason = PlaceReason.PREFILL_TOO_SMALL
    if prefillers and all(c.is_last_choice for c in prefillers) and local is not None:
        return _alone(local, PlaceReason.PREFILL_EJECTED)
    prefillers = [c for c in prefillers if not c.is_last_choice] or prefillers
    prefillers = [c for c in prefillers if can_prefill(c, sizes.likely)] or prefillers
    paired = [c for c in decoders if not c.is_alone]
    if prefillers and paired:
        sources = ranked(prefillers, scores.prefill, tie_break // max(1, len(decoders)))
        destinations = ranked(paired, scores.decode, tie_break)
        if preferred is not None:
            first = [one for one in sources if one.candidate.member.ref == preferred]
            best, _ = best_pair(first, destinations, scores, ejected_pairs)
            if best is not None:
                return Placement(best.source.member, best.destination.member, PlaceReason.REMOTE)
        best, why = best_pair(sources, destinations, scores, ejected_pairs)
        if best is None and ejected_pairs and alone is None and local is None:
            best, why = best_pair(sources, destinations, scores, frozenset())
        if best is not None:
            rival = local if scores.weighs_alone and local is not None else alone
            if rival is not None and rival.cost.amount <= best.cost.amount:
                return _alone(rival, PlaceReason.CHEAPER_ALONE)
            return Placement(best.source.member, best.destination.member, PlaceReason.REMOTE)
        local_reason = _WHY_UNPAIRED[why]
    if (local or alone) is not None:
        return _alone(local or alone, local_reason)
    if known_prefillers and not able_prefillers:
        raise _does_not_fit(known_prefillers, model, sizes.need)
    why_not = "no decode worker computes a prompt itself" if allows_local_prefill else "local prefill is off"
    raise NoWorkerError(f"no prefill worker for model {model!r} ({local_reason.value}), and {why_not}")


def _alone(chosen: Ranked | None, reason: PlaceReason) -> Placement:
    """The prompt is computed where it is decoded, for ``reason`` unless the engine always does it."""
    assert chosen is not None
    decode = chosen.candidate
    return Placement(None, decode.member, PlaceReason.ENGINE_ALONE if decode.is_alone else reason)


def _cheapest(candidates: Sequence[Candidate], scores: Scores, tie_break: int) -> Ranked | None:
    """The one that computes the prompt and generates at the least cost."""
    return next(iter(ranked(candidates, scores.alone, tie_break)), None) if candidates else None


def _computing(decoders: Sequence[Candidate], *, generates: bool) -> list[Candidate]:
    """Those that can compute the prompt themselves, where there is one to compute."""
    return [c for c in decoders if c.computes_alone or not generates]


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
