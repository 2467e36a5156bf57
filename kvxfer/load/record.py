"""What is noted of one request of a load test: one line of ``requests.jsonl``.

Decides names and units, and nothing about what is good. All times are seconds after the beginning of the run, of one
monotonic clock, so that they can be subtracted. docs/load-test.md has the definitions.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from kvxfer.errors import InvalidArgumentError

NOT_SENT = "not_sent"
"""Error of a request that was due and never sent: the run was stopped, or its session had broken."""
NO_BODY = "no_body"
"""Error of a request whose body could not be made."""
TOO_MANY_CONNECTIONS = "too_many_connections"
"""Error of a request that was beyond the connections that the driver may open."""
ARRIVAL_S = 0.001
"""Content that comes within this time of an arrival's beginning is of that arrival: between the chunks that one read of
a socket gives, or two reads of one buffer, no time was measured."""
LUMP_TOKENS = 1.5
"""With more tokens for each chunk than that, chunks do not stand for tokens."""


@dataclasses.dataclass(slots=True)
class MeasuredRequest:
    """One request: what was planned, when things happened, and what came of it."""

    run: str
    """Which run of the command it belongs to: a search or a sweep has several."""
    number: int
    """In the run's workload."""
    request_id: str
    """Sent as ``x-request-id``: routers and engines name the request by it."""
    due_s: float
    """When it was to be sent: the workload's time, or the end of the turn before and the think time."""
    prompt_tokens: int
    """Planned; where the server counted, the server's count."""
    output_tokens_asked: int
    is_warmup: bool = False
    """Sent to warm the service up; it counts for nothing."""
    session: int | None = None
    turn: int = 0
    begun_s: float | None = None
    """When its first bytes had been offered to the kernel, or a connection for it had been asked for: the generator had
    done its part. None: it never was, or the tool that sent does not tell it."""
    sent_s: float | None = None
    """When the last byte of its body was handed to the kernel. None: it never was."""
    first_s: float | None = None
    """When the first chunk came that has text, reasoning text or a tool call. A chunk with a role alone is none."""
    last_s: float | None = None
    """When the last such chunk came."""
    end_s: float | None = None
    """When the answer was whole, or had failed."""
    output_tokens: int | None = None
    tokens_from: str = ""
    """What counted ``output_tokens``: ``usage`` (the server), ``chunks`` (each counts as one), or another tool."""
    first_chunk_tokens: int = 1
    """Tokens of the first arrival: by the usage in it; else its chunks, or its share of the text where chunks do not
    stand for tokens."""
    hidden_tokens: int = 0
    """Of ``output_tokens``: those that the server counted and never showed, as reasoning."""
    chunks: int = 0
    """Chunks with content."""
    arrivals: int = 0
    """How often content came: see ARRIVAL_S. 0: that is not told."""
    longest_gap_s: float | None = None
    """Between two chunks with content."""
    finish_reason: str = ""
    """The server's word for why the answer ended."""
    is_length_asked: bool = False
    """Exactly ``output_tokens_asked`` were asked for, and not at most so many (``ignore_eos``)."""
    cached_tokens: int | None = None
    """Prompt tokens that the server took from a prefix cache, by its usage."""
    status: int | None = None
    """Of HTTP; None where no answer came."""
    error: str = ""
    """A stable name of what went wrong; empty: the answer is whole."""
    message: str = ""
    """The server's or the system's words about it, cut to 200 characters."""
    process: int = 0
    """Which process of the driver sent it."""
    account: dict[str, Any] | None = None
    """The router's or the engine's own account of the request, as it came. ``join`` reads it."""

    @property
    def is_good(self) -> bool:
        """It was answered whole. Whether it was in time is for ``judge`` to say."""
        return not self.error and self.end_s is not None

    @property
    def ttft_s(self) -> float:
        """From due to the first content; infinite where none came."""
        return math.inf if self.first_s is None else self.first_s - self.due_s

    @property
    def ttft_since_sent_s(self) -> float:
        """From sent to the first content; infinite where none came."""
        return math.inf if self.first_s is None or self.sent_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From due to the last content; infinite where the request failed."""
        return self.last_s - self.due_s if self.is_good and self.last_s is not None else math.inf

    @property
    def normalized_e2e_s(self) -> float | None:
        """Over the whole answer: E2E for each token that the server counted, whenever it came and whether it was shown.
        None where none was counted."""
        return self.e2e_s / self.output_tokens if self.is_good and self.output_tokens else None

    @property
    def shown_tokens(self) -> int | None:
        """None where nothing counted them, also where the count is 0 and content came."""
        shown = (self.output_tokens or 0) - self.hidden_tokens
        return shown if shown > 0 else None

    @property
    def has_later_tokens(self) -> bool:
        """Content came, and not as a single token: there is a time for each token, and a gap, measured or not."""
        return self.is_good and self.first_s is not None and self.shown_tokens != 1

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token that was shown, after those of the first arrival. Infinite where the request failed.
        None where there is no later token, or where its time was not measured: all content came at once, or nothing
        counted the tokens."""
        if not self.is_good or self.first_s is None or self.last_s is None:
            return math.inf
        span_s, later = self.last_s - self.first_s, (self.shown_tokens or 0) - self.first_chunk_tokens
        return span_s / later if later > 0 and span_s >= ARRIVAL_S else None

    @property
    def is_short(self) -> bool:
        """Answered whole with fewer tokens than asked for: by the count, or, where only chunks were counted, by the
        reason. An answer that may end by itself is short only where the server says that it was cut for its length."""
        if not self.is_good or not self.output_tokens_asked:
            return False
        if self.output_tokens is None or self.tokens_from == "chunks":
            return self.is_length_asked and self.finish_reason not in ("", "length")
        is_fixed = self.is_length_asked or self.finish_reason == "length"
        return is_fixed and self.output_tokens < self.output_tokens_asked

    @property
    def acted_s(self) -> float | None:
        """When the generator acted on it: ``begun_s``, or ``sent_s`` where that is not told."""
        return self.sent_s if self.begun_s is None else self.begun_s

    @property
    def lateness_s(self) -> float | None:
        """How long after it was due it was begun to be sent: the generator's own fault. A server that is slow to accept
        or to read delays ``sent_s``, and not this."""
        acted_s = self.acted_s
        return None if acted_s is None else acted_s - self.due_s

    def to_json(self) -> str:
        """One line without its end; members that say nothing are left out."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or (field.default is not dataclasses.MISSING and value == field.default):
                continue
            values[field.name] = round(value, 7) if isinstance(value, float) else value
        return json.dumps(values, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str | bytes) -> MeasuredRequest:
        """Raises InvalidArgumentError for a line that is no record."""
        try:
            values = json.loads(line)
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError(f"not a record of a load test: {error}") from None
