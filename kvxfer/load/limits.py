"""The latency limits that make a request good. Decides whether one record meets them, and nothing about how many must.

It must never know a run, a rate or a time of day: a record is judged alone.
"""

from __future__ import annotations

import dataclasses
import math

from kvxfer.errors import ConfigError
from kvxfer.load.record import ARRIVAL_S, MeasuredRequest

LIMIT_MAX_MS = 86_400_000.0
"""A day."""


@dataclasses.dataclass(frozen=True)
class LatencyLimits:
    """Each in seconds; None: no limit. Without any limit every request that was answered whole is good.

    Raises ConfigError for a limit that is not above 0 or longer than a day.
    """

    ttft_s: float | None = None
    """From due to the first content."""
    tpot_s: float | None = None
    """For each token that was shown, after those of the first arrival, on average."""
    e2e_s: float | None = None
    """From due to the last content."""
    gap_s: float | None = None
    """The longest between two chunks with content."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value <= LIMIT_MAX_MS / 1e3:
                raise ConfigError(
                    f"the limit {field.name.removesuffix('_s')} must be above 0 and at most {LIMIT_MAX_MS:.0f} ms, "
                    f"not {value * 1e3:g}"
                )

    @classmethod
    def parse(cls, text: str) -> LatencyLimits:
        """Limits from ``"ttft:200 tpot:50"``, in milliseconds, parted by blanks or commas.

        Raises ConfigError for anything else: an unknown or repeated name, a value that is no number, or no limit.
        """
        names = [field.name.removesuffix("_s") for field in dataclasses.fields(cls)]
        found: dict[str, float] = {}
        for part in text.replace(",", " ").split():
            name, colon, number = part.partition(":")
            if not colon or name not in names:
                raise ConfigError(
                    f"a limit must be one of {', '.join(names)}, a colon and milliseconds, like ttft:200, "
                    f"not {part!r:.80}"
                )
            if f"{name}_s" in found:
                raise ConfigError(f"the limit {name} stands twice in {text!r:.120}")
            try:
                value = float(number) if number.isascii() and "_" not in number else math.nan
            except ValueError:
                value = math.nan
            if not 0 < value <= LIMIT_MAX_MS:
                raise ConfigError(
                    f"the limit {name} must be milliseconds above 0 and at most {LIMIT_MAX_MS:.0f}, not {number!r:.80}"
                )
            found[f"{name}_s"] = value / 1e3
        if not found:
            raise ConfigError('there is no limit in the text: it must be like "ttft:200 tpot:50"')
        return cls(**found)

    def missed(self, record: MeasuredRequest) -> tuple[str, ...]:
        """The names of the limits that an answer was too slow for; empty for a request that failed. One without content
        was too slow for each limit."""
        if not record.is_good:
            return ()
        gap_s = math.inf if record.first_s is None else record.longest_gap_s
        values = (record.ttft_s, record.tpot_s, record.e2e_s, gap_s)
        return tuple(
            field.name.removesuffix("_s")
            for field, value in zip(dataclasses.fields(self), values, strict=True)
            if (limit := getattr(self, field.name)) is not None and value is not None and value > limit
        )

    def unmeasured(self, record: MeasuredRequest) -> tuple[str, ...]:
        """The names of the limits whose time was not measured, of a whole answer that has more than one token."""
        if not record.has_later_tokens:
            return ()
        gap_s = record.longest_gap_s if (record.longest_gap_s or 0.0) >= ARRIVAL_S or record.arrivals > 1 else None
        found = {"tpot": (self.tpot_s, record.tpot_s), "gap": (self.gap_s, gap_s)}
        return tuple(name for name, (limit, value) in found.items() if limit is not None and value is None)

    def is_met(self, record: MeasuredRequest) -> bool:
        """Whether the request was answered whole, as long as asked, and within all limits. One that failed, was cut,
        timed out or was never sent does not meet them, and neither does one whose TPOT or gap was not measured. An
        answer of a single token has neither, and these limits say nothing of it.
        """
        if not record.is_good or record.is_short:
            return False
        return not self.missed(record) and not self.unmeasured(record)

    def __str__(self) -> str:
        """As :meth:`parse` reads it; empty without limits."""
        values = ((field.name.removesuffix("_s"), getattr(self, field.name)) for field in dataclasses.fields(self))
        return " ".join(f"{name}:{value * 1e3:.12g}" for name, value in values if value is not None)
