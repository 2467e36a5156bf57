"""What a run says: counts, rates, attainment and percentiles.

Decides the definitions, once for all commands, reports and exports. It must never know how requests were sent, and it
says nothing about whether the run can be believed: ``verdicts`` does.

Times of a request (``record``): due, begun, sent, first content, last content. All counts are of the requests *due* in
the window, warm-up left out, so that a request that was never sent or never answered counts as one that was not good.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvxfer.load.intervals import CountedShare, Percentiles, counted_share, json_number
from kvxfer.load.join import PHASES, phases_of
from kvxfer.load.limits import LatencyLimits
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun

NO_LIMITS = LatencyLimits()
ERRORS_MAX, OTHER_ERRORS = 50, "other_errors"
"""A server whose errors have a name for each request would else be a table of as many columns."""

QUANTITIES: Mapping[str, Callable[[MeasuredRequest], float | None]] = {
    "ttft": lambda record: record.ttft_s,
    "ttft_since_sent": lambda record: record.ttft_since_sent_s,
    "tpot": lambda record: record.tpot_s,
    "normalized_e2e": lambda record: record.normalized_e2e_s,
    "e2e": lambda record: record.e2e_s,
    "gap": lambda record: record.longest_gap_s,
    "lateness": lambda record: record.lateness_s,
}
"""In seconds.

``ttft``            from due to the first chunk with content
``ttft_since_sent`` from sent to the first chunk with content
``tpot``            (last content - first content) / (shown tokens - those of the first arrival); none of one token, or
                    where no time lies between the first and the last content
``normalized_e2e``   e2e / tokens, hidden ones among them
``e2e``             from due to the last chunk with content
``gap``             the longest between two chunks with content; none with fewer than two
``lateness``        from due to begun (to sent, where begun is not told): the generator's own
"""


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """One run in numbers. Rates are per second of the window."""

    name: str
    window_s: float
    due: int
    """Requests due in the window."""
    sent: int
    answered: int
    """Answered whole, in time or not."""
    good: int
    """Answered whole, as long as asked for, and within all limits."""
    failed: Mapping[str, int]
    """Requests that were not answered whole, by error name, at most ERRORS_MAX of them."""
    missed: Mapping[str, int]
    """Whole answers that were too slow, by limit; one can miss several."""
    unmeasured: Mapping[str, int]
    """Whole answers whose time was not measured, by limit: these are not good either."""
    short: int
    """Whole answers with fewer tokens than asked for; not good either."""
    offered_per_s: float
    """Requests due."""
    delivered_per_s: float
    """Requests due in the window that were sent."""
    answered_per_s: float
    """Answers that became whole within the window, to whatever requests: what the server held."""
    goodput_per_s: float
    """Good requests."""
    goodput_per_device_per_s: float | None
    """None where the run's point does not say its devices."""
    attainment: CountedShare
    """Good requests out of those due, with Wilson 95 % bounds (requests counted as independent)."""
    attainment_target: float
    limits: str
    """As ``LatencyLimits.parse`` reads them; empty: none."""
    output_tokens_per_s: float
    """Tokens of whole answers that came within the window, to whatever requests. The tokens of an answer after its
    first chunk count as evenly spread between its first and last content."""
    output_tokens_per_s_per_device: float | None
    tokens_per_s_per_user: float | None
    """1 / median TPOT of the whole answers: how fast one user sees text. None where no answer has a TPOT above 0."""
    tokens_from: Mapping[str, int]
    """What counted the tokens of the whole answers."""
    of_successful: Mapping[str, Percentiles]
    """Of the requests answered whole, by QUANTITIES."""
    of_all: Mapping[str, Percentiles]
    """Of all requests due: one that failed counts as infinite, so that a failure never improves a percentile. Lateness
    is infinite only where nothing was sent."""
    joined: CountedShare
    """Whole answers whose phases are known, out of all whole answers."""
    phases: Mapping[str, Percentiles]
    """Of those, by ``join.PHASES``; empty where there are none."""

    @property
    def is_attained(self) -> bool:
        """The share of good requests is at least the target. Of no request it is not."""
        return self.due > 0 and self.good >= self.attainment_target * self.due - 1e-9

    def to_json(self) -> dict[str, Any]:
        """No NaN and no infinity: see ``Percentiles.to_json``."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("of_successful", "of_all", "phases"):
                values[field.name] = {name: one.to_json() for name, one in value.items()}
            elif isinstance(value, CountedShare):
                values[field.name] = value.to_json()
            elif isinstance(value, Mapping):
                values[field.name] = dict(value)
            else:
                values[field.name] = json_number(value) if isinstance(value, float) else value
        values["is_attained"] = self.is_attained
        return values


def summarize(run: LoadRun, limits: LatencyLimits | None, attainment: float) -> RunSummary:
    """``run`` in numbers; ``attainment`` is the share of good requests that is asked for, and ``limits`` None asks for
    whole answers alone.
    """
    limits = limits or NO_LIMITS
    counted = run.counted
    begin, end = run.window_s
    seconds = end - begin
    per_s = 1 / seconds if seconds > 0 else 0.0
    whole = [record for record in counted if record.is_good]
    good = sum(limits.is_met(record) for record in whole)
    sent = sum(record.sent_s is not None for record in counted)
    devices = _devices(run)
    tokens_per_s = per_s * math.fsum(tokens_within(record, begin, end) for record in run.records if record.is_good)
    of_successful = {name: Percentiles.of(_values(whole, of)) for name, of in QUANTITIES.items()}
    missing = untold(run)
    phases = [known for record in whole if (known := phases_of(record)) is not None]
    median_tpot = of_successful["tpot"].p50
    return RunSummary(
        name=run.name,
        window_s=seconds,
        due=len(counted),
        sent=sent,
        answered=len(whole),
        good=good,
        failed=_bounded(_counts(error_of(record) for record in counted if not record.is_good)),
        missed=_counts(name for record in whole for name in limits.missed(record)),
        unmeasured=_counts(name for record in whole for name in limits.unmeasured(record)),
        short=sum(record.is_short for record in whole),
        offered_per_s=len(counted) * per_s,
        delivered_per_s=sent * per_s,
        answered_per_s=answered_within(run.records, begin, end) * per_s,
        goodput_per_s=good * per_s,
        goodput_per_device_per_s=good * per_s / devices if devices else None,
        attainment=counted_share(good, len(counted)),
        attainment_target=attainment,
        limits=str(limits),
        output_tokens_per_s=tokens_per_s,
        output_tokens_per_s_per_device=tokens_per_s / devices if devices else None,
        tokens_per_s_per_user=1 / median_tpot if median_tpot else None,
        tokens_from=_counts(record.tokens_from or "unknown" for record in whole),
        of_successful=of_successful,
        of_all={name: Percentiles.of([] if name in missing else _values_of_all(counted, name)) for name in QUANTITIES},
        joined=counted_share(len(phases), len(whole)),
        phases={name: Percentiles.of(getattr(one, f"{name}_s") for one in phases) for name in PHASES if phases},
    )


def untold(run: LoadRun) -> tuple[str, ...]:
    """Quantities, by QUANTITIES, that the tool which sent the requests told of no answer, though some had later tokens:
    nothing can be said of them, also where a request failed."""
    missing = run.settings.get("not_told") or ()
    if not any(record.is_good and (record.output_tokens is None or record.output_tokens > 1) for record in run.counted):
        return ()
    return tuple(name for name, field in (("tpot", "output_tokens"), ("gap", "longest_gap_s")) if field in missing)


def error_of(record: MeasuredRequest) -> str:
    """The name of what went wrong; ``no_end`` of a record that has neither an error nor an end."""
    return record.error or ("" if record.is_good else "no_end")


def answered_within(records: Iterable[MeasuredRequest], begin_s: float, end_s: float) -> int:
    """How many answers became whole from the first time on and before the second."""
    return sum(record.is_good and record.end_s is not None and begin_s <= record.end_s < end_s for record in records)


def tokens_within(record: MeasuredRequest, begin_s: float, end_s: float) -> float:
    """Output tokens of one request that came from the first time on and before the second."""
    if record.first_s is None or record.last_s is None or not record.output_tokens:
        return 0.0
    at_first = min(record.first_chunk_tokens, record.output_tokens)
    tokens = float(at_first) if begin_s <= record.first_s < end_s else 0.0
    later = record.output_tokens - at_first
    span = record.last_s - record.first_s
    if span <= 0:
        return tokens + (later if begin_s <= record.first_s < end_s else 0.0)
    overlap = min(record.last_s, end_s) - max(record.first_s, begin_s)
    return tokens + later * max(0.0, overlap) / span


def _devices(run: LoadRun) -> float | None:
    value = run.point.get("devices")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _bounded(counts: Mapping[str, int]) -> dict[str, int]:
    """The most frequent ERRORS_MAX names; the rest together are OTHER_ERRORS."""
    if len(counts) <= ERRORS_MAX:
        return dict(counts)
    kept = dict(sorted(counts.items(), key=lambda one: (-one[1], one[0]))[: ERRORS_MAX - 1])
    others = sum(number for name, number in counts.items() if name not in kept)
    return dict(sorted({**kept, OTHER_ERRORS: kept.get(OTHER_ERRORS, 0) + others}.items()))


def _values(records: Iterable[MeasuredRequest], of: Callable[[MeasuredRequest], float | None]) -> list[float]:
    """What does not exist is left out, as the TTFT of an answer without content."""
    return [value for record in records if (value := of(record)) is not None and value < math.inf]


def _values_of_all(records: Iterable[MeasuredRequest], name: str) -> Iterable[float]:
    of = QUANTITIES[name]
    for record in records:
        if name == "lateness":
            value = of(record)
            yield math.inf if value is None else value
        elif not record.is_good:
            yield math.inf
        elif (value := of(record)) is not None:
            yield value
