"""Whether a prefix cache had more of a run's prompts than the run itself can have put there.

Decides that by the servers' own counts and by what the workload shares with itself; it must never know how it is said.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvxfer.load.run import LoadRun
from kvxfer.workload.request import Workload
from kvxfer.workload.shared import shared_tokens

PREFIXES = "prefixes"
"""Of the settings of a run: ``prompt_tokens`` of its workload, and ``shared_tokens`` of them. Both are planned."""
WARM_SHARE = 0.1
"""Of the tokens that no prompt of the run had before: more than that from a cache is no chance."""
SLACK_TOKENS, SLACK_TEXT_TOKENS = 16, 128
"""Of each answer: beginnings that are alike by chance; of text also what a server's template puts before it."""
WHOLE_SHARE = 0.5
"""Of the answers: so many with all but the last token cached are told."""


@dataclasses.dataclass(frozen=True)
class CacheWarmth:
    """A cache that was warm. Shares are of the prompt tokens of the answers that tell their cached ones."""

    answers: int
    cached: float
    explained: float
    """At most so much the run can have put there itself."""
    is_whole: bool
    """Most answers had all but the last token from the cache. A decode engine that counts what it loaded from a prefill
    engine as cached tells the same."""


def prefixes_of(run: LoadRun, workload: Workload, *, tokens_differ: bool = True) -> dict[str, Any]:
    """For the run's settings under PREFIXES; empty where no answer tells what was cached, or where all prompts are
    alike as there is but one token to make them of (``tokens_differ``)."""
    if not tokens_differ or all(record.cached_tokens is None for record in run.records):
        return {}
    prompt_tokens = sum(request.prompt_tokens for request in workload.requests)
    return {
        "prompt_tokens": prompt_tokens,
        "shared_tokens": shared_tokens(workload),
        "are_texts": any(request.text is not None for request in workload.requests),
    }


def warmth_of(run: LoadRun) -> CacheWarmth | None:
    """None where the cache had no more than the run explains, or nothing is known of it. Warm-up requests count: they
    share nothing, and fill the cache as others do."""
    planned, target = run.settings.get(PREFIXES), run.settings.get("target")
    told = [record for record in run.records if record.is_good and record.cached_tokens is not None]
    tokens = sum(record.prompt_tokens for record in told)
    if not isinstance(planned, dict) or not planned.get("prompt_tokens") or not tokens:
        return None
    has_template = planned.get("are_texts") or (isinstance(target, dict) and target.get("api") == "chat")
    slack = SLACK_TEXT_TOKENS if has_template else SLACK_TOKENS
    share = planned.get("shared_tokens", 0) / planned["prompt_tokens"]
    explained = min(tokens, share * sum(record.prompt_tokens for record in run.records))
    cached = sum(min(record.cached_tokens or 0, record.prompt_tokens) for record in told)
    if cached - explained - slack * len(told) <= WARM_SHARE * (tokens - explained):
        return None
    whole = sum((record.cached_tokens or 0) >= record.prompt_tokens - 1 for record in told)
    return CacheWarmth(len(told), cached / tokens, explained / tokens, whole >= WHOLE_SHARE * len(told))
