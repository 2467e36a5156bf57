"""The highest rate at which enough requests are good.

Each probe is a run at one rate, with a seed and a salt of its own, so that no prefix cache helps from one to the next.
Rates are doubled or halved until one passed and one failed; then each probe is put where the crossing still can be, now
a little below, now a little above it (``crossing`` says where that is). The search ends when the rate is known well
enough, or when its probes are used up. A probe passes if its attainment is at least the target and its backlog does not
grow. Where a lower rate was clearly worse than a higher one, it is probed again (``contradictions``).

Decides which rate is probed next, and what all probes say. It must never know how a probe is made: the caller runs it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kvxfer.config import check_positive
from kvxfer.errors import ConfigError
from kvxfer.load.contradictions import DOUBTS_MAX, ProbedShare, doubted, outvoted
from kvxfer.load.crossing import CrossingPosterior, RateBounds
from kvxfer.load.intervals import wilson
from kvxfer.load.judge import RunSummary, answered_within, summarize
from kvxfer.load.limits import LatencyLimits
from kvxfer.load.run import LoadRun
from kvxfer.load.stationarity import Stationarity, stationarity
from kvxfer.load.verdicts import SHORT, UNMEASURED, RunVerdict, judge_run
from kvxfer.workload.request import REQUESTS_MAX

STEP_MAX = 2.0
"""The next rate is at most so many times the highest so far, and not less than the lowest divided by it."""
ALONE_IN_FLIGHT = 0.5
"""With fewer requests in flight, on average, none waits for another."""
TURNS = (0.15, 0.85)
"""Quantiles of the crossing at which it is probed by turns."""
DOUBT, DOUBT_PLAIN, GROWTH_PLAIN = 0.1, 0.001, 0.15
"""How likely it is that a backlog does not grow although the run said so; the second, where a larger share of the
requests due than the third piled up."""
CAME_DEVIATIONS = 3.0
"""So far can the rate of a probe be from the asked one, in standard deviations of a Poisson count."""
LATE_PROBES_MAX = 4
LATE_STEP = 0.85
"""A probe whose generator was late is repeated, in case it was by chance. After the second at about its rate, rates
stay below this share of it, unless a higher one was in time."""
LATE_NEAR = 1.1
"""Rates that differ by less than this factor are about the same."""
WIDE = 2.0
"""Bounds whose upper one is above so many times the lower one hardly say a rate."""
RANGE = 1024.0
"""A crossing is sought at most so far from the first rate, both ways."""


def _help(text: str) -> dict[str, Any]:
    return {"help": text}


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """How the rate is sought."""

    start_rate: float = dataclasses.field(default=1.0, metadata=_help("requests/s of the first probe: a guess"))
    rate_min: float = dataclasses.field(default=0.0, metadata=_help("no lower rate is probed; 0: start-rate/1024"))
    rate_max: float = dataclasses.field(default=0.0, metadata=_help("no higher rate is probed; 0: start-rate*1024"))
    probes_max: int = dataclasses.field(default=8, metadata=_help("runs at most"))
    probe_requests: int = dataclasses.field(default=900, metadata=_help("of each probe"))
    probe_warmup: int = dataclasses.field(default=0, metadata=_help("of each probe; 0: a fifth of its requests"))
    probe_s_max: float = dataclasses.field(
        default=600.0, metadata=_help("a probe at a low rate has fewer requests, at least 100, so as to be no longer")
    )
    precision: float = dataclasses.field(
        default=0.02, metadata=_help("the search ends when the rate is known to within this share of itself")
    )

    def __post_init__(self) -> None:
        check_positive("start_rate", self.start_rate, maximum=1e6)
        check_positive("probes_max", self.probes_max, maximum=100)
        check_positive("probe_s_max", self.probe_s_max, maximum=86400)
        check_positive("precision", self.precision, maximum=1)
        if not 100 <= self.probe_requests <= REQUESTS_MAX:
            raise ConfigError(f"probe_requests must be 100 to {REQUESTS_MAX}, not {self.probe_requests}")
        if not 0 <= self.probe_warmup <= REQUESTS_MAX:
            raise ConfigError(f"probe_warmup must be 0 to {REQUESTS_MAX}, not {self.probe_warmup}")
        for name in ("rate_min", "rate_max"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise ConfigError(f"{name} must be 0 to 1000000, not {getattr(self, name)}")
        if not self.lowest <= self.start_rate <= self.highest or not self.lowest < self.highest:
            raise ConfigError("start_rate must be between rate_min and rate_max, and these must differ")

    @property
    def warmup(self) -> int:
        """Of each probe at most."""
        return self.probe_warmup or -(-self.probe_requests // 5)

    @property
    def lowest(self) -> float:
        return self.rate_min or self.start_rate / RANGE

    @property
    def highest(self) -> float:
        return self.rate_max or self.start_rate * RANGE


@dataclasses.dataclass(frozen=True)
class SearchProbe:
    """One run that is asked for."""

    number: int
    """From 1."""
    rate: float
    """Requests due per second, Poisson."""
    requests: int
    warmup: int
    seed: int
    salt: str
    """Of the prompts: no two probes have the same."""


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """What one probe said."""

    probe: SearchProbe
    summary: RunSummary
    steadiness: Stationarity
    verdicts: tuple[RunVerdict, ...]
    passed: bool
    """Its attainment is at least the target, its backlog does not grow, and it can be believed."""
    is_believed: bool
    """The generator was in time and the run complete."""
    is_set_aside: bool = False
    """It contradicts two others, and counts for nothing."""

    @property
    def counts(self) -> bool:
        return self.is_believed and not self.is_set_aside

    @property
    def probed(self) -> ProbedShare:
        independent = max(1.0, self.steadiness.effective_requests)
        low, high = wilson(self.summary.attainment.share * independent, independent)
        return ProbedShare(self.probe.number, self.probe.rate, low, high, self.passed)

    def to_json(self) -> dict[str, Any]:
        share = self.summary.attainment
        return {
            **dataclasses.asdict(self.probe),
            "attainment": share.share,
            "attainment_low": share.low,
            "attainment_high": share.high,
            "due": share.total,
            "good": share.good,
            "answered_per_s": self.summary.answered_per_s,
            "is_stationary": self.steadiness.is_stationary,
            "passed": self.passed,
            "is_believed": self.is_believed,
            "is_set_aside": self.is_set_aside,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
        }


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The answer of a search, and why there is none, or not the whole."""

    rate: float | None
    """The highest rate at which the target is met; None: see ``reason``."""
    low: float | None
    high: float | None
    """95 % bounds of the rate, by all probes."""
    below: float | None
    """Neighbours of the crossing: the nearest probe that passed, and the nearest that failed above it."""
    above: float | None
    probes: tuple[ProbeResult, ...]
    reason: str
    """Stable name of why there is no rate, or why the search ended before its time; empty: there is one, in full."""
    sentence: str
    contradictions: tuple[str, ...] = ()
    """Probes that contradicted each other, and what became of it, in sentences."""

    @property
    def is_wide(self) -> bool:
        """There is a rate, and it is hardly known."""
        return self.low is not None and self.high is not None and self.high > WIDE * self.low

    def to_json(self) -> dict[str, Any]:
        names = ("rate", "low", "high", "below", "above", "reason", "sentence", "contradictions")
        return {**{name: getattr(self, name) for name in names}, "probes": [one.to_json() for one in self.probes]}


def search(
    run_at: Callable[[SearchProbe], LoadRun],
    limits: LatencyLimits,
    attainment: float,
    options: SearchOptions,
    *,
    seed: int = 0,
    on_probe: Callable[[ProbeResult], None] | None = None,
) -> SearchResult:
    """Probe with ``run_at`` until the highest rate is known at which a share of ``attainment`` of the requests meets
    ``limits``. ``on_probe`` is told each probe's result as it comes.

    Raises ConfigError for an attainment that no number of requests can show: 1.
    """
    if not 0 < attainment < 1:
        raise ConfigError(f"a search needs an attainment above 0 and below 1, not {attainment}")
    plan = SearchPlan(limits, attainment, options, seed)
    while (probe := plan.next_probe()) is not None:
        result = plan.note(probe, run_at(probe))
        if on_probe is not None:
            on_probe(result)
    return plan.result()


def _came(probe: SearchProbe, summary: RunSummary) -> float:
    """The rate at which requests really came: by chance it differs from the asked one, by 3 % with 900 of them, and
    what was slow or fast is due to it.
    """
    bound = CAME_DEVIATIONS / math.sqrt(max(1, summary.due))
    return min(max(summary.offered_per_s, probe.rate * (1 - bound)), probe.rate * (1 + bound))


class SearchPlan:
    """A search that is under way: ask :meth:`next_probe`, run it, :meth:`note` it, until there is none."""

    def __init__(self, limits: LatencyLimits, attainment: float, options: SearchOptions, seed: int) -> None:
        self._limits = limits
        self._attainment = attainment
        self._options = options
        self._seed = seed
        self._highest = options.highest
        self._posterior = CrossingPosterior(options.lowest, options.highest, attainment)
        self._done: list[ProbeResult] = []
        self._stopped: tuple[str, str] | None = None
        """(reason, sentence), where going on is of no use."""
        self._doubted: tuple[ProbedShare, ProbedShare | None] | None = None
        """The rate that is probed again, and the higher one that it contradicts, where there is one."""
        self._doubts = 0
        self._contradictions: list[str] = []

    def next_probe(self) -> SearchProbe | None:
        """The run that is to be made now; None: the search is over."""
        options = self._options
        if self._stopped or len(self._done) >= options.probes_max:
            return None
        number = len(self._done) + 1
        rate = self._next_rate()
        if rate is None:
            return None
        requests = int(min(options.probe_requests, max(100, rate * options.probe_s_max)))
        warmup = min(options.warmup, max(20, requests // 2))
        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        return SearchProbe(number, rate, requests, warmup, seed, f"search-{self._seed}-{number}")

    def note(self, probe: SearchProbe, run: LoadRun) -> ProbeResult:
        """Take in what came of ``probe``, and say what it means."""
        summary = summarize(run, self._limits, self._attainment)
        steadiness = stationarity(run, self._limits)
        verdicts = tuple(judge_run(run, summary, steadiness))
        failure = next((verdict for verdict in verdicts if verdict.is_failure), None)
        is_met = summary.is_attained and not steadiness.is_growing and not steadiness.is_worsening
        result = ProbeResult(probe, summary, steadiness, verdicts, is_met and not failure, not failure)
        self._done.append(result)
        if run.ended != "complete":
            self._stopped = run.ended, failure.sentence if failure else ""
        elif failure:
            self._note_late(probe, failure)
        else:
            self._note_measured(probe, run, summary, steadiness)
            self._compare(result)
        return result

    def _compare(self, result: ProbeResult) -> None:
        """Set aside which of two stands alone, where ``result`` decides that, and look for others."""
        if self._doubted is not None:
            lower, higher = self._doubted
            odd = outvoted(lower, higher, result.probed)
            if odd is not None:
                self._set_aside(odd.number)
                self._contradictions.append(
                    f"{self._contradicting(lower, higher or result.probed)} With {lower.rate:.3g} requests/s again "
                    f"{result.summary.attainment.share:.1%} were good, so probe {odd.number} counts for nothing."
                )
        self._doubted = doubted([one.probed for one in self._done if one.counts])
        if self._doubted is not None and self._doubts >= DOUBTS_MAX:
            self._doubted = None
        self._doubts += self._doubted is not None

    def _set_aside(self, number: int) -> None:
        self._done = [
            dataclasses.replace(one, is_set_aside=one.is_set_aside or one.probe.number == number) for one in self._done
        ]
        self._posterior.forget(number)

    def _contradicting(self, lower: ProbedShare, higher: ProbedShare) -> str:
        shares = {one.probe.number: one.summary.attainment.share for one in self._done}
        return (
            f"Probe {lower.number} contradicts probe {higher.number}: {shares[lower.number]:.1%} were good at "
            f"{lower.rate:.3g} requests/s, and {shares[higher.number]:.1%} at {higher.rate:.3g}, which load does not "
            "explain."
        )

    def _unresolved(self) -> tuple[str, ...]:
        pair = doubted([one.probed for one in self._done if one.counts])
        if pair is None or pair[1] is None:
            return ()
        why = self._contradicting(pair[0], pair[1])
        return (f"{why} No probe was left to try it again: the bounds of the rate do not hold.",)

    def _note_late(self, probe: SearchProbe, failure: RunVerdict) -> None:
        if self._late_near(probe.rate) > 1 and not self._was_in_time(probe.rate):
            self._highest = min(self._highest, probe.rate * LATE_STEP)
        late = sum(not one.is_believed for one in self._done)
        best = max((one.probe.rate for one in self._done if one.passed), default=0.0)
        if late >= LATE_PROBES_MAX or self._highest <= max(best, self._options.lowest):
            self._stopped = (
                failure.name,
                f"At {probe.rate:.3g} requests/s the load was not what was asked for. " + (failure.sentence),
            )

    def _late_near(self, rate: float) -> int:
        """How many probes at about ``rate`` had a late generator."""
        near = (one for one in self._done if rate / LATE_NEAR < one.probe.rate < rate * LATE_NEAR)
        return sum(not one.is_believed for one in near)

    def _was_in_time(self, rate: float) -> bool:
        return any(one.is_believed and one.probe.rate > rate / LATE_NEAR for one in self._done)

    def _note_measured(self, probe: SearchProbe, run: LoadRun, summary: RunSummary, steadiness: Stationarity) -> None:
        share = summary.attainment.share
        if steadiness.is_growing:
            begin, end = run.window_s
            middle = (begin + end) / 2
            answers = answered_within(run.records, middle, end)
            if answers:
                is_plain = (steadiness.growth_share or 0.0) > GROWTH_PLAIN
                doubt = DOUBT_PLAIN if is_plain else DOUBT
                self._posterior.note_served(probe.number, min(answers / (end - middle), probe.rate), answers, doubt)
        if not steadiness.is_growing or share < self._attainment:
            effect = summary.due / max(1.0, steadiness.effective_requests)
            self._posterior.note_share(probe.number, _came(probe, summary), share, summary.due, effect)
        unjudged = self._unjudged()
        if unjudged is not None:
            self._stopped = unjudged.name, f"No rate can be found. {unjudged.sentence}"
        elif self._is_too_slow_alone():
            self._stopped = (
                "too_slow_alone",
                f"Even at {probe.rate:.3g} requests/s, where hardly a request waits for another, only {share:.1%} of "
                "the requests were good: no rate meets the limits.",
            )
        elif share < self._attainment and probe.rate <= self._options.lowest * 1.001:
            self._stopped = (
                "lowest_rate_fails",
                f"Even at the lowest rate, {probe.rate:.3g} requests/s, only {share:.1%} of the requests were good.",
            )
        elif self._done[-1].passed and probe.rate >= self._options.highest * 0.999:
            self._stopped = (
                "highest_rate_passes",
                f"At the highest rate, {probe.rate:.3g} requests/s, the target is still met: the server holds more.",
            )

    def _unjudged(self) -> RunVerdict | None:
        """Why no probe can pass, whatever its rate: too many answers of the last one are short, or were not measured,
        and before it none passed. None: the others are too many to be good as well, or it did pass."""
        last = self._done[-1]
        unmeasured = max(last.summary.unmeasured.values(), default=0)
        unjudged = last.summary.short + unmeasured
        if any(one.passed for one in self._done) or not unjudged:
            return None
        if last.summary.good + unjudged < self._attainment * last.summary.due:
            return None
        name = SHORT if last.summary.short >= unmeasured else UNMEASURED
        return next((verdict for verdict in last.verdicts if verdict.name == name), None)

    def _is_too_slow_alone(self) -> bool:
        """The last probe failed although hardly a request waited for another. Where errors made it fail, twice: a
        server that sheds load answers soon too.
        """
        failed = []
        for one in self._done:
            in_flight = one.summary.answered_per_s * (one.summary.of_successful["e2e"].mean or 0.0)
            is_alone = one.steadiness.is_stationary and in_flight <= ALONE_IN_FLIGHT
            failed.append(one.is_believed and not one.summary.is_attained and is_alone)
        last = self._done[-1].summary
        are_errors = last.due - last.answered > last.answered - last.good
        return failed[-1] and (not are_errors or sum(failed) > 1)

    def _next_rate(self) -> float | None:
        believed = [one for one in self._done if one.counts]
        lowest, highest = self._options.lowest, self._highest
        last = self._done[-1] if self._done else None
        if last is not None and not last.is_believed and last.probe.rate <= highest:
            return last.probe.rate
        if self._doubted is not None:
            return self._doubted[0].rate
        if not believed:
            return min(self._options.start_rate, highest)
        rates = [one.probe.rate for one in believed]
        passed = [one.probe.rate for one in believed if one.passed]
        if passed and len(passed) < len(believed):
            if self._is_known():
                return None
            rate = self._posterior.quantile(TURNS[len(believed) % 2])
        else:
            rate = self._posterior.quantile(0.5)
            if not passed and self._posterior.quantile(0.1) < lowest * 1.1:
                rate = lowest
            elif passed and self._posterior.quantile(0.9) > highest / 1.1:
                rate = highest
        return min(max(rate, min(rates) / STEP_MAX, lowest), max(rates) * STEP_MAX, highest)

    def _is_known(self) -> bool:
        return self._posterior.bounds().half_width <= self._options.precision

    def _neighbours(self, rate: float) -> tuple[float | None, float | None]:
        """The nearest probes that passed below ``rate`` and failed above it. By chance there may be none on that side:
        then the nearest on the other.
        """
        passed = [one.probe.rate for one in self._done if one.counts and one.passed]
        failed = [one.probe.rate for one in self._done if one.counts and not one.passed]
        below = max((one for one in passed if one <= rate), default=min(passed, default=None))
        above = min((one for one in failed if one >= rate), default=max(failed, default=None))
        return below, above

    def result(self) -> SearchResult:
        """What all probes say."""
        result = self._result()
        return dataclasses.replace(result, contradictions=(*self._contradictions, *self._unresolved()))

    def _result(self) -> SearchResult:
        bounds = self._posterior.bounds()
        below, above = self._neighbours(bounds.rate)
        if below is not None and above is not None:
            return self._answer(bounds, below, above)
        reason, sentence = self._stopped or self._unbracketed()
        return SearchResult(None, None, None, below, above, tuple(self._done), reason, sentence)

    def _answer(self, bounds: RateBounds, below: float, above: float) -> SearchResult:
        low, high = bounds.low, bounds.high
        sentence = (
            f"The server holds {bounds.rate:.4g} requests/s ({low:.4g} to {high:.4g} with 95 %) at an attainment of "
            f"{self._attainment:.1%}; {below:.4g} requests/s passed and {above:.4g} failed."
        )
        reason, why = self._stopped or ("", "")
        return SearchResult(
            bounds.rate, low, high, below, above, tuple(self._done), reason, f"{sentence} {why}".strip()
        )

    def _unbracketed(self) -> tuple[str, str]:
        believed = [one for one in self._done if one.counts]
        rates = [one.probe.rate for one in believed]
        if not believed:
            return "generator_late", "The generator was late in each probe."
        if any(one.passed for one in believed):
            return (
                "no_rate_fails",
                f"The target is still met at {max(rates):.3g} requests/s, the highest that was probed.",
            )
        return (
            "no_rate_passes",
            f"The target is not met even at {min(rates):.3g} requests/s, the lowest that was probed.",
        )
