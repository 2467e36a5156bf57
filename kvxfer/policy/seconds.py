"""The policy ``seconds``: what a request costs at each worker: the time until its first token, and what others lose.

One pure function of what is known at the moment of the choice. All costs are seconds, so that no threshold and no
weight stands between them; while nothing is learnt they are 0.0 and `LeastLoaded` decides. The parts:

- **Until P has computed the prompt**: the seconds of those before it, and its own: its uncached tokens on the curve of
  the model, times the worker's factor.
- **Until D has the KV**: as learnt for that pair, for the tokens that D has not.
- **Until D has room**: the tokens that must be freed, at the rate at which D frees them.
- **What others lose**: those that will come to P in the meantime wait as long as this one takes (Pigou's external cost
  of a queue: arrivals within its time, each delayed by it); what a full cache forgets for it must be computed again, as
  often as such content was asked for lately; what it leaves there is a gain, where many prompts begin alike and the
  workers that have it are busy; the streams that D has run more slowly; a prompt that D computes itself makes all of
  them wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvxfer.policy.candidates import Candidate
from kvxfer.policy.scores import DISTANCES, LEAST_LOADED, Cost, distance, least_distance, of_share
from kvxfer.policy.times import LinkKind, ModelTimes, Times
from kvxfer.types import AgentRef


@dataclasses.dataclass(frozen=True)
class PromptFacts:
    """What a choice knows of one request. ``tokens``: of its prompt, about. ``held``: how many of them each worker is
    presumed to have in its cache."""

    model: str
    tokens: float
    held: Mapping[AgentRef, float] = dataclasses.field(default_factory=dict)
    most: float = 0.0
    """The most that any of them has."""
    reuse: float = 0.0
    """How often other prompts began with that lately."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of one worker's part, in seconds. ``new`` tokens are computed behind ``held`` ones."""

    wait_s: float
    compute_s: float
    others_s: float
    new: float
    held: float

    @property
    def total_s(self) -> float:
        return self.wait_s + self.compute_s + self.others_s


class Seconds:
    """The costs of one request at ``now_s``. ``weighs_alone``: whether D alone is weighed against pairs."""

    def __init__(self, times: Times, facts: PromptFacts, now_s: float, *, weighs_alone: bool = True) -> None:
        self._times = times
        self._facts = facts
        self._now_s = now_s
        self._model: ModelTimes = times.model(facts.model)
        self._weighs_alone = weighs_alone
        self._holders_wait_s: float | None = None

    @property
    def weighs_alone(self) -> bool:
        """Not before anything is known of what computing a prompt takes."""
        return self._weighs_alone and self._model.curve is not None

    def held(self, ref: AgentRef) -> float:
        """Tokens of the prompt that count as cached there: never the last one, which is always computed."""
        presumed = self._facts.held.get(ref, 0.0)
        if not presumed:
            return 0.0
        worker = self._times.worker(ref)
        truth = worker.truth if worker.is_believed else 1.0
        return min(presumed * truth, max(0.0, self._facts.tokens - 1.0))

    def prompt(self, candidate: Candidate) -> Estimate:
        """To compute the prompt there."""
        ref, times = candidate.member.ref, self._times
        held = self.held(ref)
        new = self._facts.tokens - held
        compute_s = times.prompt_s(self._facts.model, ref, new, held)
        line, mean_s = times.worker(ref).line, self._model.mean_s
        wait_s = line.wait_s(self._now_s)
        elsewhere = candidate.prefill_inflight - len(line)
        if elsewhere > 0:  # of other processes of this router, of which only the number is known
            wait_s += elsewhere * mean_s
        rate = line.rate(self._now_s, mean_s)
        others_s = compute_s * rate * (wait_s + compute_s / 2) + new * times.worker(ref).loss_s
        if self._facts.reuse and held < self._facts.most:
            others_s -= self._gain_s(ref, wait_s, compute_s)
        return Estimate(wait_s, compute_s, others_s, new, held)

    def _gain_s(self, ref: AgentRef, wait_s: float, compute_s: float) -> float:
        """What the next prompts with the same beginning gain where one more worker has it: each the difference of the
        waits of now, and together no more than what it takes to compute that beginning."""
        facts = self._facts
        holders = [other for other, tokens in facts.held.items() if tokens >= facts.most]
        if self._holders_wait_s is None:
            lines = (self._times.worker(other).line for other in holders)
            self._holders_wait_s = min(line.wait_s(self._now_s) for line in lines)
        saved_s = facts.reuse / (len(holders) + 1) * max(0.0, self._holders_wait_s - wait_s)
        rest_s = self._times.prompt_s(facts.model, ref, facts.tokens - facts.most, facts.most)
        return min(saved_s, max(0.0, compute_s - rest_s))

    def room_s(self, candidate: Candidate) -> float:
        """Until the worker has blocks for the request, where it says how many it has."""
        tokens = candidate.capacity.pool_tokens
        worker, model = self._times.worker(candidate.member.ref), self._model
        if tokens is None or worker.reserved <= 0 or not worker.decoding or model.crowding.mean_s <= 0:
            return 0.0
        lacking = worker.reserved + self._facts.tokens - tokens
        if lacking <= 0:
            return 0.0
        # Streams end one after another: what they hold, in the time that one of them takes.
        return lacking * model.crowding.mean_s / worker.reserved

    def crowd_s(self, candidate: Candidate) -> float:
        """What the streams of the worker lose by one more, and one more by them."""
        return self._model.crowding.value * candidate.inflight

    def prefill(self, candidate: Candidate) -> Cost:
        amount = self.prompt(candidate).total_s
        return Cost(of_share(amount, candidate.share, self._model.mean_s), LEAST_LOADED.prefill(candidate).amount)

    def decode(self, candidate: Candidate) -> Cost:
        amount = self.room_s(candidate) + self.crowd_s(candidate)
        return Cost(of_share(amount, candidate.share, self._model.mean_s), LEAST_LOADED.decode(candidate).amount)

    def alone(self, candidate: Candidate) -> Cost:
        """A decoder that computes a prompt makes its streams wait for all of it."""
        prompt = self.prompt(candidate)
        stalled_s = prompt.compute_s * candidate.decode_inflight
        amount = prompt.total_s + stalled_s + self.room_s(candidate) + self.crowd_s(candidate)
        return Cost(of_share(amount, candidate.share, self._model.mean_s), LEAST_LOADED.decode(candidate).amount)

    def between(self, source: Candidate, destination: Candidate, *, is_equal: bool) -> Cost:
        far = distance(source, destination, is_equal=is_equal)
        tokens = self._facts.tokens - self.held(destination.member.ref)
        kind = LinkKind(self._facts.model, far)
        return Cost(self._times.transfer_s(kind, source.member.ref, destination.member.ref, tokens), far)

    def between_least(self, *, is_near: bool, is_equal: bool) -> Cost:
        least = least_distance(is_near=is_near, is_equal=is_equal)
        kinds = [least] if not is_near else [least, least + DISTANCES[1] - DISTANCES[0]]
        tokens = max(1.0, self._facts.tokens - max(self._facts.held.values(), default=0.0))
        return Cost(min(self._times.least_transfer_s(LinkKind(self._facts.model, far), tokens) for far in kinds), least)
