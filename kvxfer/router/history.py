"""What the router did lately, for operators: its last decisions, its requests by time, and its pairs' transfers.

Everything here is bounded, whatever the load and the fleet. Adding is cheap; quantiles are computed when they are asked
for. Decides nothing, and knows neither clocks nor workers: times are of the router's monotonic clock.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

DECISIONS_MAX = 200
STEP_S = 5.0
SPAN_S = 600.0
PAIRS_MAX = 1000
"""More would be more than a page can show; those that were used last are kept."""
LANES_MAX = 16
SAMPLES_MAX = 64
"""Transfers of one pair or lane from which its quantiles are computed: the last ones."""
TEXT_MAX = 80
"""Of a name that a client or a worker chose."""
GROWTH = 1.05
"""From one bucket of the first-byte times to the next."""

_SCALE = 1.0 / math.log(GROWTH)
_SHORTEST_S = 1e-6


class Decision(NamedTuple):
    """One request, when it was over. It has no text of the prompt, and nothing that names the client."""

    ended_s: float
    route: str
    model: str
    is_stream: bool
    prefill: str
    """Empty where the decode worker computed the prompt itself, or where no worker was chosen."""
    decode: str
    reason: str
    outcome: str
    is_failure: bool
    status: int
    ttft_s: float | None
    duration_s: float
    attempts: int
    code: str


class TransferSample(NamedTuple):
    """What D said of one transfer. ``seconds`` is None where D said no time, or where the transfer failed."""

    seconds: float | None
    bytes: int
    blocks: int
    lane: str
    is_failure: bool


def transfer_of(account: Mapping[str, Any]) -> TransferSample | None:
    """Read D's account, of kvxfer's engine or of its connector in vLLM; None where it tells of no transfer.

    A worker wrote it, so nothing in it is believed to have its type.
    """
    failure = account.get("failure") or account.get("code")
    if account.get("prefill") == "local" and not failure:
        return None
    seconds = None if failure else _duration(account.get("transfer_s"), account.get("seconds"))
    lane = account.get("lane")
    return TransferSample(
        seconds,
        _count(account.get("bytes_moved"), account.get("bytes")),
        _count(account.get("blocks_moved"), account.get("blocks")),
        lane[:TEXT_MAX] if isinstance(lane, str) else "",
        bool(failure),
    )


class History:
    """Of one router; belongs to one event loop."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._decisions: collections.deque[Decision] = collections.deque(maxlen=DECISIONS_MAX)
        self._steps: list[_Step | None] = [None] * math.ceil(SPAN_S / STEP_S)
        self._pairs: dict[tuple[str, str], _Moves] = {}
        self._lanes: dict[str, _Moves] = {}
        self._outcomes: collections.Counter[str] = collections.Counter()

    # What a request tells.

    def ended(self, decision: Decision) -> None:
        """A request is over."""
        self._decisions.append(decision)
        self._outcomes[decision.outcome] += 1
        step = self._step(decision.ended_s)
        if step is not None:
            step.requests += 1
            step.failures += decision.is_failure
        if decision.prefill:
            self._pair(decision.prefill, decision.decode).requests += 1

    def first_byte(self, now_s: float, seconds: float) -> None:
        """The first event with some of a stream's answer went out, ``seconds`` after its request came in."""
        step = self._step(now_s)
        if step is not None:
            bucket = math.floor(math.log(max(seconds, _SHORTEST_S)) * _SCALE)
            step.ttft[bucket] = step.ttft.get(bucket, 0) + 1

    def transferred(self, prefill: str, decode: str, account: Mapping[str, Any]) -> None:
        """D said in its answer what became of a transfer from P."""
        sample = transfer_of(account)
        if sample is None:
            return
        self._pair(prefill, decode).add(sample)
        if sample.lane:
            self._lane(sample.lane).add(sample)

    # Between processes.

    def drain(self) -> list[Any]:
        """All that happened since the last call, as a message carries it. Nothing of it is here any more."""
        steps = [[step.number, *step.counts(), list(step.ttft.items())] for step in self._steps if step is not None]
        told = [
            [list(decision) for decision in self._decisions],
            list(self._outcomes.items()),
            steps,
            [[*pair, moves.drain()] for pair, moves in self._pairs.items()],
            [[lane, moves.drain()] for lane, moves in self._lanes.items()],
        ]
        self._clear()
        return told

    def take(self, told: list[Any]) -> None:
        """Add what :meth:`drain` gave in another process."""
        decisions, outcomes, steps, pairs, lanes = told
        if decisions:
            both = [*self._decisions, *(Decision(*values) for values in decisions)]
            self._decisions.clear()
            self._decisions.extend(sorted(both, key=_ended_of))  # it keeps the last ones
        self._outcomes.update(dict(outcomes))
        for number, requests, failures, ttft in steps:
            step = self._step_of(number)
            if step is not None:
                step.take(requests, failures, ttft)
        for prefill, decode, moves in pairs:
            self._pair(prefill, decode).take(moves)
        for lane, moves in lanes:
            self._lane(lane).take(moves)

    # What operators ask.

    def outcomes(self) -> dict[str, int]:
        """Requests by outcome, since the start."""
        return dict(self._outcomes)

    def decisions(self) -> list[Decision]:
        """The last ones, newest first."""
        return list(reversed(self._decisions))

    def series(self, now_s: float) -> list[dict[str, Any]]:
        """The steps of the last SPAN_S in which something happened, oldest first; ``begun_s`` is the step's beginning.
        The quantiles are those of a bucket, within 3 % of the true value."""
        oldest = int(now_s // STEP_S) - len(self._steps)
        kept = sorted((step for step in self._steps if step is not None and step.number > oldest), key=_number_of)
        return [step.describe() for step in kept]

    def pairs(self) -> list[dict[str, Any]]:
        """Every pair that is kept, by its names."""
        kept = sorted(self._pairs.items())
        return [{"prefill": prefill, "decode": decode, **moves.describe()} for (prefill, decode), moves in kept]

    def lanes(self) -> list[dict[str, Any]]:
        """Every lane that carried a transfer. ``requests`` is a pair's alone."""
        kept = [(lane, moves.describe()) for lane, moves in sorted(self._lanes.items())]
        return [{**values, "lane": lane} for lane, values in kept]

    def _step(self, now_s: float) -> _Step | None:
        """The step of that moment, begun where it has none; None where the moment lies too far back."""
        return self._step_of(int(now_s // STEP_S))

    def _step_of(self, number: int) -> _Step | None:
        place = number % len(self._steps)
        step = self._steps[place]
        if step is None or step.number < number:
            step = self._steps[place] = _Step(number)
        return step if step.number == number else None

    def _lane(self, lane: str) -> _Moves:
        known = lane in self._lanes or len(self._lanes) < LANES_MAX
        return self._lanes.setdefault(lane if known else "other", _Moves())

    def _pair(self, prefill: str, decode: str) -> _Moves:
        key = (prefill, decode)
        moves = self._pairs.pop(key, None)
        if moves is None:
            moves = _Moves()
            if len(self._pairs) >= PAIRS_MAX:
                del self._pairs[next(iter(self._pairs))]
        self._pairs[key] = moves  # at the end: it was used last
        return moves


class _Step:
    """One step of the series."""

    __slots__ = ("failures", "number", "requests", "ttft")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = 0
        self.failures = 0
        self.ttft: dict[int, int] = {}
        """Streams by the bucket of their first-byte time."""

    def counts(self) -> tuple[int, int]:
        return self.requests, self.failures

    def take(self, requests: int, failures: int, ttft: list[list[int]]) -> None:
        self.requests += requests
        self.failures += failures
        for bucket, count in ttft:
            self.ttft[bucket] = self.ttft.get(bucket, 0) + count

    def describe(self) -> dict[str, Any]:
        return {
            "begun_s": self.number * STEP_S,
            "requests": self.requests,
            "failures": self.failures,
            "ttft_count": sum(self.ttft.values()),
            "ttft_p50_s": _quantile_of_buckets(self.ttft, 0.50),
            "ttft_p95_s": _quantile_of_buckets(self.ttft, 0.95),
        }


class _Moves:
    """The transfers of one pair, or of one lane."""

    __slots__ = ("blocks", "bytes", "failures", "lane", "requests", "seconds", "transfers")

    def __init__(self) -> None:
        self.requests = 0
        self.transfers = 0
        self.failures = 0
        self.bytes = 0
        self.blocks = 0
        self.lane = ""
        """Of the last transfer that said one."""
        self.seconds: collections.deque[float] = collections.deque(maxlen=SAMPLES_MAX)

    def add(self, sample: TransferSample) -> None:
        if sample.is_failure:
            self.failures += 1
            return
        self.transfers += 1
        self.bytes += sample.bytes
        self.blocks += sample.blocks
        self.lane = sample.lane or self.lane
        if sample.seconds is not None:
            self.seconds.append(sample.seconds)

    def drain(self) -> list[Any]:
        counts = [self.requests, self.transfers, self.failures, self.bytes, self.blocks]
        return [counts, self.lane, list(self.seconds)]

    def take(self, told: list[Any]) -> None:
        [requests, transfers, failures, moved, blocks], lane, seconds = told
        self.requests += requests
        self.transfers += transfers
        self.failures += failures
        self.bytes += moved
        self.blocks += blocks
        self.lane = lane or self.lane
        self.seconds.extend(seconds)

    def describe(self) -> dict[str, Any]:
        ordered = sorted(self.seconds)
        return {
            "requests": self.requests,
            "transfers": self.transfers,
            "failures": self.failures,
            "bytes": self.bytes,
            "blocks": self.blocks,
            "lane": self.lane,
            "transfer_p50_s": _quantile(ordered, 0.50),
            "transfer_p95_s": _quantile(ordered, 0.95),
        }


def _ended_of(decision: Decision) -> float:
    return decision.ended_s


def _number_of(step: _Step) -> int:
    return step.number


def _quantile(ordered: list[float], share: float) -> float | None:
    """The nearest rank's."""
    return round(ordered[math.ceil(share * len(ordered)) - 1], 6) if ordered else None


def _quantile_of_buckets(counts: Mapping[int, int], share: float) -> float | None:
    left = math.ceil(share * sum(counts.values()))
    for bucket, count in sorted(counts.items()):
        left -= count
        if left <= 0:
            return round(math.exp((bucket + 0.5) / _SCALE), 6)
    return None


def _duration(*values: object) -> float | None:
    """The first that is a number of seconds."""
    return next((float(value) for value in values if isinstance(value, int | float) and _is_amount(value)), None)


def _count(*values: object) -> int:
    """The first that is a count of something."""
    return next((value for value in values if isinstance(value, int) and _is_amount(value)), 0)


def _is_amount(value: int | float) -> bool:
    """Whether one transfer can have so much."""
    return not isinstance(value, bool) and 0 <= value < 1 << 60
