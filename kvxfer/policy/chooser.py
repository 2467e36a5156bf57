"""What a policy remembers from one request to the next, and where a request's course is told to it.

Decides what is presumed of a request that was just given away, and what is learnt from its course. It must never know a
clock, a socket or an engine's words: times and counts are the caller's. Belongs to one event loop.
"""

from __future__ import annotations

import enum
import itertools

from kvxfer.policy.candidates import Candidate, have_equal_pools
from kvxfer.policy.place import Placement
from kvxfer.policy.prefixes import FACTS_MAX, NO_CHAIN, Chain, Prefixes
from kvxfer.policy.scores import LEAST_LOADED, Random, RoundRobin, Scores, distance
from kvxfer.policy.seconds import Estimate, PromptFacts, Seconds
from kvxfer.policy.times import LinkKind, Times
from kvxfer.types import AgentRef

CAPACITY_TOKENS = 1 << 18
"""Of a worker that does not say how much its cache holds: 84 GB of KV at 320 KB a token (Llama 70B), 34 GB at 128 KB
(8B). Answers correct it."""


class Policy(enum.StrEnum):
    """How the workers of a request are chosen."""

    SECONDS = "seconds"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


class Prompt:
    """One request as it is placed, retries included. ``tokens``: exact, or 0 where only the ``text`` is known: its
    bytes, without what is no text. ``is_heard``: whether its first token is seen when it comes."""

    __slots__ = ("chain", "facts", "is_heard", "model", "text", "tokens")

    def __init__(
        self, model: str, tokens: float, text: float = 0.0, chain: Chain = NO_CHAIN, *, is_heard: bool = True
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.text = text
        self.chain = chain
        self.is_heard = is_heard
        self.facts: PromptFacts | None = None
        """As it was weighed last."""


class Chooser:
    """Of one router. ``weighs_alone``: whether D alone is weighed against pairs (``seconds`` only)."""

    def __init__(
        self, policy: Policy = Policy.LEAST_LOADED, *, weighs_alone: bool = True, facts_max: int = FACTS_MAX
    ) -> None:
        self.policy = policy
        self.times = Times()
        self.prefixes = Prefixes(facts_max)
        self._weighs_alone = weighs_alone
        self._numbers = itertools.count(1)
        self._turns: dict[AgentRef, int] = {}

    @property
    def learns(self) -> bool:
        """Whether prompts need chains, and courses are of any use."""
        return self.policy is Policy.SECONDS

    def scores(self, prompt: Prompt, now_s: float) -> Scores:
        """The costs of a request that is placed now."""
        if self.policy is Policy.SECONDS:
            prompt.facts = self.facts(prompt)
            return Seconds(self.times, prompt.facts, now_s, weighs_alone=self._weighs_alone)
        if self.policy is Policy.ROUND_ROBIN:
            return RoundRobin(self._turns)
        return Random() if self.policy is Policy.RANDOM else LEAST_LOADED

    def facts(self, prompt: Prompt) -> PromptFacts:
        """What is known of a request's size, and of where its beginning is."""
        chain = prompt.chain
        tokens = prompt.tokens or max(1.0, prompt.text / self.times.model(prompt.model).bytes_per_token)
        if not chain.keys:
            return PromptFacts(prompt.model, tokens)
        held = self.prefixes.held(chain)
        if not held.sizes:
            return PromptFacts(prompt.model, tokens)
        scale = tokens / max(1, chain.size)
        tokens_held = {ref: size * scale for ref, size in held.sizes.items()}
        return PromptFacts(prompt.model, tokens, tokens_held, max(tokens_held.values()), max(0.0, held.uses - 1.0))

    def chosen(
        self, prompt: Prompt, placement: Placement, source: Candidate | None, destination: Candidate, now_s: float
    ) -> Choice:
        """The request goes to these workers."""
        number = next(self._numbers)
        if self.policy is Policy.ROUND_ROBIN:
            for member in (placement.prefill, placement.decode):
                if member is not None:
                    self._turns[member.ref] = number
        if not self.learns:
            return NOTHING_LEARNT
        return LearntChoice(self, number, prompt.facts or self.facts(prompt), prompt, source, destination, now_s)

    def forget(self, ref: AgentRef) -> None:
        """The worker is gone."""
        self.times.forget(ref)
        self.prefixes.forget(ref)
        self._turns.pop(ref, None)

    def __repr__(self) -> str:
        return f"Chooser({self.policy.value}, {self.prefixes!r})"


class Choice:
    """The course of one attempt, as it is told to the policy. This one is of a policy that learns nothing."""

    __slots__ = ()

    predicted_s: float | None = None
    """Until the first token, as it was estimated at the choice; None where nothing was known."""
    presumed: float = 0.0
    """Tokens of the prompt that were presumed in the cache of the worker that computes it."""
    began_s: float = 0.0
    """When it was made."""

    def prefilled(self, now_s: float, *, tokens: int | None, cached: int | None) -> None:
        """P is done; ``tokens`` and ``cached``: what it says of the prompt, and of its cache. None: it does not say."""

    def handed_on(self, now_s: float) -> None:
        """P was done before this attempt."""

    def first_token(self, now_s: float) -> None:
        """D began its answer."""

    def answered(self, now_s: float) -> None:
        """The answer is whole."""

    def over(self, now_s: float) -> None:
        """The attempt is over, however it ended; more calls do nothing."""


NOTHING_LEARNT = Choice()


class LearntChoice(Choice):
    """Of the policy ``seconds``: claims on both workers' time until they are done, and what their ends tell."""

    __slots__ = (
        *("_facts", "_chooser", "_computer", "_computer_ref", "_crowd", "_decoder", "_destination", "_first_s"),
        *("_is_equal", "_is_over", "_number", "_prefilled_s", "_prompt", "_source"),
        *("began_s", "predicted_s", "presumed"),
    )

    def __init__(
        self,
        chooser: Chooser,
        number: int,
        facts: PromptFacts,
        prompt: Prompt,
        source: Candidate | None,
        destination: Candidate,
        now_s: float,
    ) -> None:
        self._chooser, self._number, self._facts, self._prompt = chooser, number, facts, prompt
        self._source, self._destination = source, destination
        self.began_s = now_s
        self._computer_ref = (source or destination).member.ref
        """The worker that computes the prompt."""
        self._is_equal = source is None or have_equal_pools(source.member, destination.member)
        self._prefilled_s: float | None = None
        self._first_s: float | None = None
        self._is_over = False
        times = chooser.times
        seconds = Seconds(times, facts, now_s)
        estimate = seconds.prompt(source or destination)
        model = times.model(facts.model)
        self._computer = times.worker(self._computer_ref)
        self._decoder = times.worker(destination.member.ref)
        between_s = 0.0 if source is None else seconds.between(source, destination, is_equal=self._is_equal).amount
        self.predicted_s = None
        if model.curve is not None:
            self.predicted_s = estimate.wait_s + estimate.compute_s + between_s + seconds.room_s(destination)
        self.presumed = estimate.held
        is_heard = source is not None or prompt.is_heard
        self._computer.line.add(number if is_heard else None, estimate.compute_s, now_s, model.mean_s)
        self._crowd = float(self._decoder.decoding)
        self._decoder.decoding += 1
        self._decoder.reserved += facts.tokens
        self._insert(estimate)

    def _insert(self, estimate: Estimate) -> None:
        """From now on the worker is presumed to have the prompt: another of the same beginning that comes while it is
        computed finds it there, or waits for it in the same line."""
        chooser, chain = self._chooser, self._prompt.chain
        if not chain.keys:
            return
        ends = [one for one in (self._source, self._destination) if one is not None]
        scale = chain.size / self._facts.tokens
        ages: dict[AgentRef, float] = {}
        for end in ends:
            capacity = end.capacity.pool_tokens or CAPACITY_TOKENS
            ages[end.member.ref] = chooser.prefixes.insert(end.member.ref, chain, capacity * scale)
        curve = chooser.times.model(self._facts.model).curve
        if curve is not None:
            is_old = ages[self._computer_ref] > 0.5
            saved_s = (
                0.0 if not is_old else curve.seconds(self._facts.tokens) - curve.seconds(estimate.new, estimate.held)
            )
            is_full = chooser.prefixes.is_full(self._computer_ref)
            self._computer.cached(max(0.0, saved_s), estimate.new, is_full=is_full)

    def prefilled(self, now_s: float, *, tokens: int | None, cached: int | None) -> None:
        if self._source is None or self._prefilled_s is not None or self._is_over:
            return
        self._prefilled_s = now_s
        self._computed(now_s, tokens, cached)

    def handed_on(self, now_s: float) -> None:
        self._computer.line.lost(self._number, now_s)

    def _computed(self, now_s: float, tokens: int | None, cached: int | None) -> None:
        times, chain = self._chooser.times, self._prompt.chain
        whole = float(tokens) if tokens else self._facts.tokens
        if tokens:
            times.model(self._facts.model).counted(self._prompt.text, tokens)
        presumed = min(self._facts.held.get(self._computer_ref, 0.0), whole - 1.0)
        said = presumed if cached is None else min(float(cached), whole - 1.0)
        if cached is not None and self._computer.is_believed:
            self._computer.said_cached(presumed, said)
            sizes = (round(presumed * chain.size / whole), round(said * chain.size / whole))
            self._chooser.prefixes.correct(self._computer_ref, chain, *sizes)
        measured = self._computer.line.ended(self._number, whole, said, presumed, now_s)
        times.computed(self._facts.model, self._computer, measured)

    def first_token(self, now_s: float) -> None:
        if self._first_s is not None or self._is_over:
            return
        self._first_s = now_s
        if self._source is None:
            self._computed(now_s, None, None)
        elif self._prefilled_s is not None and now_s > self._prefilled_s:
            ends = (self._source.member.ref, self._destination.member.ref)
            far = distance(self._source, self._destination, is_equal=self._is_equal)
            held = self._facts.held.get(ends[1], 0.0)
            tokens = max(1.0, self._facts.tokens - held)
            self._chooser.times.moved(LinkKind(self._facts.model, far), *ends, tokens, now_s - self._prefilled_s)

    def answered(self, now_s: float) -> None:
        if self._first_s is not None and not self._is_over:
            crowding = self._chooser.times.model(self._facts.model).crowding
            crowding.add((self._crowd + self._decoder.decoding - 1) / 2, now_s - self._first_s)

    def over(self, now_s: float) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._computer.line.lost(self._number, now_s)
        decoder = self._decoder
        decoder.decoding -= 1
        decoder.reserved = max(0.0, decoder.reserved - self._facts.tokens) if decoder.decoding else 0.0
