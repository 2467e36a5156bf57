"""ServeGen's clients: for each a CSV of windows (rate, coefficient of variation, distribution of gaps) and a JSON
object with the distributions of lengths. Requests are drawn from them by seed.

Decides how: a window's requests are rate*seconds, rounded up or down by chance so that the mean is right, at places
that gaps of the window's distribution give, stretched to fill the window (ServeGen fits them so too: bursts this strong
would miss the mean rate by several percent otherwise). Prompt and answer lengths are drawn apart from each other;
ServeGen draws both from one random number, so that long prompts always have long answers. Only text is read.

Format and meaning: github.com/alibaba/ServeGen, ``servegen/clientpool.py`` and ``construct.py`` at f891d11.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvxfer.workload.readers.rows import LINE_MAX, TraceRead, TraceRowError, number, numbered, whole
from kvxfer.workload.request import REQUESTS_MAX, TOKENS_MAX, WorkloadRequest
from kvxfer.workload.seeds import Stream, stream

WINDOW_S = 600.0
"""Of the last window; the others end where the next begins."""
CLIENTS_MAX = 10_000
_GAPS = ("Gamma", "Weibull")
_PARTS_MAX = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class ClientRate:
    """One window of one client. Seconds, and requests per second."""

    begin_s: float
    span_s: float
    rate: float
    gaps: str
    """``Gamma`` or ``Weibull``."""
    shape: float


@dataclasses.dataclass(frozen=True, slots=True)
class LengthChances:
    """A distribution of lengths in tokens."""

    tokens: npt.NDArray[np.int64]
    cumulative: npt.NDArray[np.float64]

    def drawn(self, count: int, draw: Stream) -> npt.NDArray[np.int64]:
        places = np.searchsorted(self.cumulative, draw.random(count) * self.cumulative[-1], side="right")
        drawn: npt.NDArray[np.int64] = self.tokens[np.minimum(places, len(self.tokens) - 1)]
        return np.maximum(drawn, 1)


@dataclasses.dataclass(frozen=True)
class ServeGenClient:
    """One client: its windows, and from when on which lengths hold."""

    name: str
    rates: Sequence[ClientRate]
    """Without windows in which it sends nothing."""
    lengths: Mapping[float, tuple[LengthChances, LengthChances]]
    """By the second from which on they hold: of prompts, of answers."""

    def lengths_at(self, second: float) -> tuple[LengthChances, LengthChances] | None:
        """Those of the last time that is not later, else the first there are; None where there are none."""
        earlier = [time for time in self.lengths if time <= second]
        time = max(earlier) if earlier else min(self.lengths, default=None)
        return None if time is None else self.lengths[time]


def read_rates(lines: Iterable[str]) -> list[ClientRate]:
    """A ``chunk-*-trace.csv``: begin, rate, CV, distribution, shape, scale. Raises TraceRowError."""
    rows: list[tuple[float, float, str, float]] = []
    for line, text in numbered(lines):
        values = text.split(",")
        if len(values) != 6:
            raise TraceRowError(line, "", "a row must have begin, rate, CV, distribution, shape and scale", text)
        begin, rate = number(line, "begin", values[0]), number(line, "rate", values[1], maximum=1e6)
        gaps = values[3].strip()
        if gaps and gaps not in _GAPS:
            raise TraceRowError(line, "distribution", "Gamma, Weibull or empty", gaps)
        shape = number(line, "shape", values[4], maximum=1e6)
        if gaps and not shape:
            raise TraceRowError(line, "shape", "above 0", values[4])
        if rows and begin <= rows[-1][0]:
            raise TraceRowError(line, "begin", "later than that of the line before", values[0])
        rows.append((begin, rate, gaps, shape))
    ends = [*(begin for begin, *_ in rows[1:]), rows[-1][0] + WINDOW_S] if rows else []
    return [
        ClientRate(begin, end - begin, rate, gaps, shape)
        for (begin, rate, gaps, shape), end in zip(rows, ends, strict=True)
        if gaps and rate > 0
    ]


def read_lengths(text: str) -> dict[float, tuple[LengthChances, LengthChances]]:
    """A ``chunk-*-dataset.json``: ``{"0": {"input_tokens": "{103: 0.25, ...}", "output_tokens": ...}, ...}``, of which
    empty distributions are left out. Raises TraceRowError, whose line is that of a JSON error, else 1."""
    if len(text) > LINE_MAX * 4:
        raise TraceRowError(1, "", f"a file of lengths must have at most {LINE_MAX * 4} characters")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceRowError(error.lineno, "", f"lengths must be JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise TraceRowError(1, "", f"lengths must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise TraceRowError(1, "", "lengths must be a JSON object")
    lengths = {}
    for time, fields in found.items():
        second = number(1, "time", time)
        if not isinstance(fields, dict):
            raise TraceRowError(1, time, "an object with input_tokens and output_tokens", fields)
        prompt, answer = (_chances(fields, name, time) for name in ("input_tokens", "output_tokens"))
        if prompt is not None and answer is not None:
            lengths[second] = (prompt, answer)
    return lengths


def _chances(fields: Mapping[str, object], name: str, time: str) -> LengthChances | None:
    """``{103: 0.25, 105: 0.75}``, as text; None where it is empty."""
    field = f"{name} of {time}"
    value = fields.get(name)
    if not isinstance(value, str) or not (value.startswith("{") and value.endswith("}")):
        raise TraceRowError(1, field, "text like '{103: 0.25, 105: 0.75}'", value)
    parts = [part for part in value[1:-1].split(",") if part.strip()]
    if not parts:
        return None
    if len(parts) > _PARTS_MAX:
        raise TraceRowError(1, field, f"a distribution of at most {_PARTS_MAX} lengths", len(parts))
    tokens, chances = [], []
    for part in parts:
        length, _, chance = part.partition(":")
        tokens.append(whole(1, field, length, maximum=TOKENS_MAX))
        chances.append(number(1, field, chance, maximum=1.0))
    cumulative = np.cumsum(chances)
    if not 0.99 <= cumulative[-1] <= 1.01:
        raise TraceRowError(1, field, "a distribution whose chances add to 1", float(cumulative[-1]))
    return LengthChances(np.array(tokens, dtype=np.int64), cumulative)


def drawn_requests(
    clients: Sequence[ServeGenClient], seed: int, *, rows_max: int = REQUESTS_MAX, end_s: float = float("inf")
) -> TraceRead:
    """Requests of all clients before ``end_s``, at most ``rows_max`` of them: the first.

    A client's requests depend on its name, its windows and the seed, and not on other clients or bounds. Clients
    without lengths send nothing. Raises TraceRowError where there is no request, or there are more than REQUESTS_MAX.
    """
    windows = [
        (window.begin_s, place, window)
        for place, client in enumerate(clients)
        for window in client.rates
        if client.lengths
    ]
    windows.sort(key=lambda window: window[:2])
    zero_s = windows[0][0] if windows else 0.0
    drawn_until_s = 0.0
    rows: list[tuple[float, int, int]] = []
    for begin, place, window in windows:
        # Whatever comes from here on is due later than every row there is.
        is_enough = len(rows) >= rows_max and drawn_until_s <= begin
        if is_enough or begin - zero_s >= end_s:
            break
        rows += _of_window(clients[place], window, seed, zero_s)
        drawn_until_s = max(drawn_until_s, begin + window.span_s)
        if len(rows) > REQUESTS_MAX:
            raise TraceRowError(1, "", f"these clients send more than {REQUESTS_MAX} requests: bound number or time")
    rows = sorted(row for row in rows if row[0] < end_s)[:rows_max]
    if not rows:
        raise TraceRowError(1, "", "the trace is empty: its clients send no request in that time")
    made = [WorkloadRequest(place, prompt, answer, due) for place, (due, prompt, answer) in enumerate(rows)]
    return TraceRead(made, has_times=True)


def _of_window(client: ServeGenClient, window: ClientRate, seed: int, zero_s: float) -> list[tuple[float, int, int]]:
    lengths = client.lengths_at(window.begin_s)
    expected = window.rate * window.span_s
    if lengths is None or expected > REQUESTS_MAX:
        if lengths is None:
            return []
        raise TraceRowError(1, "rate", f"so low that a window has at most {REQUESTS_MAX} requests", window.rate)
    draw = stream(seed, "servegen", client.name, repr(window.begin_s))
    count = int(expected) + int(draw.random() < expected % 1)
    if count == 0:
        return []
    # One gap more than requests: the last one ends with the window.
    if window.gaps == "Gamma":
        gaps = draw.standard_gamma(window.shape, count + 1)
    else:
        gaps = draw.weibull(window.shape, count + 1)
    total = float(gaps.sum())
    if not 0 < total < float("inf"):
        gaps, total = np.ones(count + 1), count + 1.0
    dues = window.begin_s - zero_s + np.cumsum(gaps[:-1]) * (window.span_s / total)
    prompts, answers = lengths[0].drawn(count, draw), lengths[1].drawn(count, draw)
    return list(zip(dues.tolist(), prompts.tolist(), answers.tolist(), strict=True))
