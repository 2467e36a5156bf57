"""What all readers share: numbered lines, numbers in them, the one error, and the trace that comes out.

Decides bounds: of a line, of the rows. Knows no format.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from kvxfer.errors import InvalidArgumentError
from kvxfer.workload.request import REQUESTS_MAX, TOKENS_MAX, WorkloadRequest
from kvxfer.workload.sessions import HASH_TOKENS, grouped

LINE_MAX = 16 << 20
"""Characters of one line."""
TIME_MAX_S = 1e9
"""Of a time in a trace, about 30 years."""
_INTEGER = re.compile(r"[0-9]{1,18}")
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})?")


class TraceRowError(InvalidArgumentError):
    """A row of a trace is not what its format says. ``line`` counts from 1; ``field`` is empty where the whole line is
    meant."""

    def __init__(self, line: int, field: str, expected: str, found: object = "") -> None:
        shown = "" if found == "" else f", not {found!r:.80}"
        super().__init__(f"line {line}: {f'{field} must be ' if field else ''}{expected}{shown}")
        self.line = line
        self.field = field
        self.expected = expected


@dataclasses.dataclass(frozen=True)
class TraceRead:
    """What a reader found."""

    requests: Sequence[WorkloadRequest]
    """In the order of their due times, which begin at 0; each has a due time."""
    has_times: bool
    """Whether the trace says when requests are due; if not, all are due at 0, or after the turn before."""
    left_out: int = 0
    """Rows without an answer or without a prompt: in the trace they failed."""
    hash_tokens: int = HASH_TOKENS


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRow:
    """One row, before it is known which turn it is."""

    line: int
    prompt_tokens: int
    output_tokens: int
    time_ns: int | None
    session: str = ""
    delay_s: float | None = None
    took_s: float | None = None
    hash_ids: tuple[int, ...] = ()
    text: str | None = None


def numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """(number from 1, line without its end) of each line that is not blank. Raises TraceRowError for a long line."""
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_MAX:
            raise TraceRowError(number, "", f"a line must have at most {LINE_MAX} characters")
        text = line.strip("\ufeff \t\r\n")
        if text:
            yield number, text


def whole(line: int, field: str, value: object, *, minimum: int = 0, maximum: int = TOKENS_MAX) -> int:
    """A whole number, from JSON or text; ``12.0`` is one."""
    if isinstance(value, str):
        value = value.strip()
        if _INTEGER.fullmatch(value):
            value = int(value)
        elif _NUMBER.fullmatch(value):
            value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise TraceRowError(line, field, f"a whole number, {minimum} to {maximum}", value)
    return value


def number(line: int, field: str, value: object, *, maximum: float = TIME_MAX_S) -> float:
    """A number that is 0 or more, from JSON or text."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= maximum:  # type: ignore[operator]
        raise TraceRowError(line, field, f"a number, 0 to {maximum:g}", value)
    return float(value)  # type: ignore[arg-type]


def trace_of(rows: Iterable[TraceRow], rows_max: int) -> TraceRead:
    """The trace of the first ``rows_max`` rows: times begin at 0, rows of one session are its turns.

    Rows without prompt or answer are left out and counted. Raises TraceRowError for more than REQUESTS_MAX rows, for a
    row without a time or delay where others have times, and where there is no row at all.
    """
    kept: list[TraceRow] = []
    skipped = 0
    for row in rows:
        if row.prompt_tokens == 0 or row.output_tokens == 0:
            skipped += 1
            continue
        kept.append(row)
        if len(kept) == rows_max:
            break
        if len(kept) > REQUESTS_MAX:
            raise TraceRowError(row.line, "", f"a trace must have at most {REQUESTS_MAX} requests")
    if not kept:
        failed = f": its {skipped} rows have no prompt or no answer" if skipped else ""
        raise TraceRowError(1, "", f"the trace is empty{failed}")
    has_times = any(row.time_ns is not None for row in kept)
    zero_ns = min((row.time_ns for row in kept if row.time_ns is not None), default=0)
    numbers: dict[str, int] = {}
    turns: dict[str, int] = {}
    requests = []
    for place, row in enumerate(kept):
        turn = turns.get(row.session, 0) if row.session else 0
        due = None if row.time_ns is None else (row.time_ns - zero_ns) / 1e9
        if due is None and not turn:
            if has_times:
                raise TraceRowError(row.line, "timestamp", "there: other rows have one")
            due = 0.0
        session = None
        if row.session:
            turns[row.session] = turn + 1
            session = numbers.setdefault(row.session, len(numbers))
        requests.append(
            WorkloadRequest(
                place,
                row.prompt_tokens,
                row.output_tokens,
                due,
                session=session,
                turn=turn,
                hash_ids=row.hash_ids,
                text=row.text,
            )
        )
    made = grouped(requests, [row.delay_s for row in kept], [row.took_s for row in kept])
    return TraceRead(made, has_times, skipped)


def tokens_of_text(text: str) -> int:
    """An estimate: a token for each four characters, as English text has with most tokenizers."""
    return max(1, math.ceil(len(text) / 4))
