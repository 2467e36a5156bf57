"""How the tokens of a run's answers came: one by one, in lumps, hidden, fewer than asked, or uncounted.

Decides that from the records alone. It must never know how it is said, or what is good.
"""

from __future__ import annotations

import dataclasses
import statistics

from kvxfer.load.run import LoadRun


@dataclasses.dataclass(frozen=True)
class TokenFlow:
    """Counts of whole answers; tokens and seconds are those of all answers of a kind together, or a median of them."""

    answers: int
    """Whole ones with content."""
    tokens_each_arrival: float | None
    """Shown tokens for each time at which content came. None where the server counted none, or arrivals are untold."""
    arrivals_each: float
    """For each answer."""
    normalized_e2e_s: float | None
    """The median over the answers."""
    unmeasured: int
    """More than one token, and no time between them."""
    hiding: int
    """Those with tokens that were counted and never shown."""
    hidden_share: float
    """Of all counted tokens."""
    uncounted: int
    """No usage came: each chunk counts as one token."""
    short: int
    short_tokens: float
    """The mean of the short ones, and what was asked of them."""
    short_asked: float


def flow_of(run: LoadRun) -> TokenFlow:
    """Of the requests that count."""
    whole = [record for record in run.counted if record.is_good]
    came = [record for record in whole if record.first_s is not None]
    counted = [record for record in came if record.tokens_from != "chunks" and record.shown_tokens is not None]
    told = [record for record in counted if record.arrivals]
    arrivals = sum(record.arrivals for record in told)
    tokens = sum(record.output_tokens or 0 for record in counted)
    each = [value for record in counted if (value := record.normalized_e2e_s) is not None]
    short = [record for record in whole if record.is_short]
    return TokenFlow(
        answers=len(came),
        tokens_each_arrival=sum(record.shown_tokens or 0 for record in told) / arrivals if arrivals else None,
        arrivals_each=arrivals / len(told) if told else 0.0,
        normalized_e2e_s=statistics.median(each) if each else None,
        unmeasured=sum(record.has_later_tokens and record.tpot_s is None for record in came),
        hiding=sum(record.hidden_tokens > 0 for record in counted),
        hidden_share=sum(record.hidden_tokens for record in counted) / tokens if tokens else 0.0,
        uncounted=sum(record.tokens_from == "chunks" for record in came),
        short=len(short),
        short_tokens=statistics.fmean(record.output_tokens or 0 for record in short) if short else 0.0,
        short_asked=statistics.fmean(record.output_tokens_asked for record in short) if short else 0.0,
    )
