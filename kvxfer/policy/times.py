"""What a router has learnt of its workers' times: prompts, transfers, streams, all by its own clock.

Decides what of one request's course is a measurement of what. Workers' own words count only as tokens, never as times,
and only while their times agree with them. It must never know a choice, a clock or a request.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

from kvxfer.policy.curves import FACTOR_MEMORY, OUTLIER, Curve, CurveFit, Factor, Slope
from kvxfer.policy.disagg import CHARS_PER_TOKEN
from kvxfer.policy.lines import Amount, Line, Measured
from kvxfer.types import AgentRef

PAIRS_MAX = 4096
"""Pairs whose own transfers are remembered; those that were used last are kept."""
DOUBT_MAX = 0.1
"""Mean of logarithms: words that explain times worse by more than a tenth are wrong."""
MEMORY_PROMPTS = 256
"""Prompts of one worker over which it is counted what its cache is worth."""
TEXT_MEMORY = 64
"""Prompts over which the bytes of a token are a mean."""


class LinkKind(NamedTuple):
    """Transfers of one kind take alike: those of one model at one distance, converted or not."""

    model: str
    distance: float


class WorkerTimes:
    """Of one worker."""

    __slots__ = ("answers", "decoding", "doubt", "factor", "line", "loss_s", "reserved", "saved_s", "stored", "truth")

    def __init__(self) -> None:
        self.line = Line()
        self.factor = Factor()
        self.truth = 1.0
        """Part of the tokens that were presumed in its cache, and that it then had, by its own answers."""
        self.decoding = 0
        """Streams that this router has there."""
        self.reserved = 0.0
        """Their tokens."""
        self.answers = 0
        """In which it said how many tokens it had in its cache."""
        self.doubt = 0.0
        """How much better its times are explained by what is presumed of its cache than by what it says, in logarithms:
        above DOUBT_MAX its words are not believed."""
        self.saved_s = self.stored = 0.0
        """Seconds that the older half of its cache saved lately, and tokens that were put in."""
        self.loss_s = 0.0
        """Seconds that are lost with each token that a new one pushes out; 0.0 while there is room."""

    def cached(self, saved_s: float, stored: float, *, is_full: bool) -> None:
        """One more prompt: the older half of its cache saves so many seconds of it, and takes so many tokens more. What
        is put in passes through that half once, and what falls out of it had been worth about as much."""
        keep = 1.0 - 1.0 / MEMORY_PROMPTS
        self.saved_s = self.saved_s * keep + saved_s
        self.stored = self.stored * keep + stored
        self.loss_s = self.saved_s / self.stored if is_full and self.stored > 0 else 0.0

    @property
    def is_believed(self) -> bool:
        """Whether what it says of its cache agrees with its times as well as what is presumed."""
        return self.doubt <= DOUBT_MAX

    def explained(self, seconds: float, said_s: float, presumed_s: float) -> None:
        """A measurement for which its own words let expect ``said_s``, and what is presumed ``presumed_s``."""
        if min(seconds, said_s, presumed_s) > 0:
            errors = [min(abs(math.log(seconds / expected)), math.log(OUTLIER)) for expected in (said_s, presumed_s)]
            self.doubt += (errors[0] - errors[1] - self.doubt) / FACTOR_MEMORY

    def said_cached(self, presumed: float, cached: float) -> None:
        """An answer says that it had ``cached`` tokens where ``presumed`` were presumed."""
        self.answers += 1
        if presumed > 0:
            self.truth += (min(1.0, cached / presumed) - self.truth) / min(self.answers + 1, 16)


class ModelTimes:
    """Of all workers of one model."""

    def __init__(self) -> None:
        self.prompts = CurveFit()
        self.crowding = Slope()
        """Seconds that a stream takes longer for each other stream at its worker."""
        self.bytes_per_token = float(CHARS_PER_TOKEN)
        self._texts = 0
        self.mean_s = 0.0
        """Mean seconds of a prompt."""

    @property
    def curve(self) -> Curve | None:
        return self.prompts.curve

    def counted(self, size: float, tokens: float) -> None:
        """A prompt of ``size`` bytes of text has so many tokens."""
        if size >= 64 and tokens >= 1:  # a short one is mostly template
            self._texts += 1
            ratio = min(max(size / tokens, 0.25), 64.0)
            self.bytes_per_token += (ratio - self.bytes_per_token) / min(self._texts, TEXT_MEMORY)

    def computed(self, amount: Amount, seconds: float) -> None:
        """So much was measured, at any of the workers."""
        self.prompts.add(*amount, seconds)
        mean_s = seconds / amount.prompts
        self.mean_s += (mean_s - self.mean_s) / 16 if self.mean_s else mean_s


class Times:
    """Of one router."""

    def __init__(self) -> None:
        self._models: dict[str, ModelTimes] = {}
        self._workers: dict[AgentRef, WorkerTimes] = {}
        self._links: dict[LinkKind, CurveFit] = {}
        self._pairs: OrderedDict[tuple[AgentRef, AgentRef], Factor] = OrderedDict()
        self._moves = 0
        self._least = 1.0
        """No pair's factor is smaller."""

    def model(self, name: str) -> ModelTimes:
        return self._models.get(name) or self._models.setdefault(name, ModelTimes())

    def worker(self, ref: AgentRef) -> WorkerTimes:
        return self._workers.get(ref) or self._workers.setdefault(ref, WorkerTimes())

    def forget(self, ref: AgentRef) -> None:
        """The worker is gone."""
        self._workers.pop(ref, None)
        for pair in [pair for pair in self._pairs if ref in pair]:
            del self._pairs[pair]

    # Prompts.

    def prompt_s(self, model: str, ref: AgentRef, new: float, held: float) -> float:
        """Seconds in which the worker computes ``new`` tokens behind ``held`` ones, alone; 0.0 while nothing is
        known."""
        curve = self.model(model).curve
        return 0.0 if curve is None else curve.seconds(new, held) * self.worker(ref).factor.value

    def computed(self, model: str, worker: WorkerTimes, measured: Measured | None) -> None:
        """What the end of a prompt at a worker told."""
        if measured is None:
            return
        kind = self.model(model)
        curve, seconds = kind.curve, measured.seconds
        if curve is not None:
            factor = worker.factor.value
            worker.explained(seconds, factor * curve.sum_s(*measured.said), factor * curve.sum_s(*measured.presumed))
        amount = measured.said if worker.is_believed else measured.presumed
        if curve is not None:
            worker.factor.measured(seconds, curve.sum_s(*amount))
        kind.computed(amount, seconds)

    # Transfers: the seconds from P's end to D's first token, so that what overlaps P's work is not in them.

    def moved(self, kind: LinkKind, source: AgentRef, destination: AgentRef, tokens: float, seconds: float) -> None:
        """KV of so many tokens was there after ``seconds``."""
        fit = self._links.get(kind) or self._links.setdefault(kind, CurveFit())
        curve = fit.curve
        pair = (source, destination)
        if curve is not None:
            factor = self._pairs.pop(pair, None) or Factor()
            factor.measured(seconds, curve.seconds(tokens))
            self._pairs[pair] = factor
            self._least = min(self._least, factor.value)
            if len(self._pairs) > PAIRS_MAX:
                self._pairs.popitem(last=False)
            self._moves += 1
            if self._moves % PAIRS_MAX == 0:  # one that was the least once may be so no longer
                self._least = min(1.0, min(one.value for one in self._pairs.values()))
        fit.add(1.0, tokens, 0.0, seconds)

    def transfer_s(self, kind: LinkKind, source: AgentRef, destination: AgentRef, tokens: float) -> float:
        """Seconds until D has the KV of so many tokens, from P's end on; 0.0 while nothing is known of the kind."""
        fit = self._links.get(kind)
        curve = None if fit is None else fit.curve
        if curve is None:
            return 0.0
        factor = self._pairs.get((source, destination))
        return curve.seconds(tokens) * (1.0 if factor is None else factor.value)

    def least_transfer_s(self, kind: LinkKind, tokens: float) -> float:
        """No pair of the kind takes less."""
        fit = self._links.get(kind)
        curve = None if fit is None else fit.curve
        return 0.0 if curve is None else curve.seconds(tokens) * self._least
