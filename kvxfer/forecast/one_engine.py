"""One engine on a virtual clock: when each request of a schedule gets its tokens.

Decides nothing of its own: ``step`` chooses what a step computes, ``cost`` says how long it takes, and here time jumps
from the end of one step to the next. The rules of time are those of the mock engine's loop, so that both give the same
answer: requests that come while a step runs join the next one; an idle engine begins a step when a request comes; the
tokens of a step are there at its end. It must never know a network, a router or a real clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgumentError
from kvxfer.forecast.cost import LinearCost
from kvxfer.forecast.step import StepCounts, StepLimits, StepModel, StepSequence

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request that comes to an engine."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int] = ()
    """Of ``StepSequence``: a key for each full block."""


@dataclasses.dataclass(slots=True)
class _Times:
    """When the tokens of one request came."""

    arrival_s: float
    first_s: float = math.inf
    last_s: float = math.inf
    gap_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class EngineRun:
    """Each array has a value for each request, in the order in which they were given. Seconds."""

    arrival_s: Floats
    first_s: Floats
    last_s: Floats
    gap_s: Floats
    """The longest between two tokens; 0 with one token."""
    output_tokens: Floats
    counts: StepCounts
    ended_s: float
    """When the last step ended."""

    @property
    def ttft_s(self) -> Floats:
        """From arrival to the first token."""
        return self.first_s - self.arrival_s

    @property
    def e2e_s(self) -> Floats:
        """From arrival to the last token."""
        return self.last_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """For each token after the first; NaN of an answer of one token."""
        later = self.output_tokens - 1
        return np.where(later > 0, (self.last_s - self.first_s) / np.maximum(later, 1), np.nan)

    def are_within(
        self,
        *,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        e2e_s: float | None = None,
        gap_s: float | None = None,
    ) -> NDArray[np.bool_]:
        """Which requests meet all limits. A TPOT that does not exist meets any."""
        good = np.ones(len(self.arrival_s), dtype=bool)
        for limit, values in ((ttft_s, self.ttft_s), (tpot_s, self.tpot_s), (e2e_s, self.e2e_s), (gap_s, self.gap_s)):
            if limit is not None:
                good &= ~(values > limit)
        return good


def run_engine(limits: StepLimits, cost: LinearCost, requests: Iterable[EngineRequest]) -> EngineRun:
    """Serve ``requests``, which come in the order of their arrival, until the last has its answer.

    Raises InvalidArgumentError where an arrival is before the one before it, or a step takes no time; DoesNotFitError
    for a request that has more tokens than all blocks hold.
    """
    model: StepModel[_Times] = StepModel(limits)
    all_times: list[_Times] = []
    tokens: list[int] = []
    incoming = iter(requests)
    arrival = next(incoming, None)
    now_s = 0.0
    while True:
        while arrival is not None and arrival.arrival_s <= now_s:
            times = _Times(arrival.arrival_s)
            all_times.append(times)
            tokens.append(arrival.output_tokens)
            model.add(StepSequence(times, arrival.prompt_tokens, arrival.output_tokens, arrival.keys))
            previous, arrival = arrival, next(incoming, None)
            if arrival is not None and not arrival.arrival_s >= previous.arrival_s:
                raise InvalidArgumentError(f"requests must be in the order of their arrival, not {arrival.arrival_s}")
        step = model.begin()
        if step.work:
            seconds = cost.seconds(
                step.prefill_tokens, step.decode_sequences, step.context_tokens, step.prefill_context_tokens
            )
            if not seconds > 0:
                raise InvalidArgumentError("a step that computes something must take time")
            now_s += seconds
            for sequence in model.end(step):
                times = sequence.owner
                if sequence.emitted == 1:
                    times.first_s = now_s
                elif now_s - times.last_s > times.gap_s:
                    times.gap_s = now_s - times.last_s
                times.last_s = now_s
        elif arrival is not None:
            now_s = max(now_s, arrival.arrival_s)
        else:
            break
    columns = np.array([(one.arrival_s, one.first_s, one.last_s, one.gap_s) for one in all_times], dtype=float)
    arrival_s, first_s, last_s, gap_s = columns.reshape(-1, 4).T
    return EngineRun(arrival_s, first_s, last_s, gap_s, np.array(tokens, dtype=float), model.counts, now_s)
