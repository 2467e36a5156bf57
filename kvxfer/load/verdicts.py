"""Whether a run can be believed, and what stands out in it: named verdicts, each with a sentence.

Decides which findings make a command fail: those that say that the run did not measure what it claims to. That a server
is slow or fails requests is a result, and no failure of the run. It must never print, or know which command asks.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvxfer.load.flow import flow_of
from kvxfer.load.intervals import percentile
from kvxfer.load.judge import RunSummary, error_of
from kvxfer.load.record import LUMP_TOKENS, NO_BODY, NOT_SENT, TOO_MANY_CONNECTIONS, MeasuredRequest
from kvxfer.load.run import LoadRun
from kvxfer.load.stationarity import Stationarity
from kvxfer.load.warmth import warmth_of

LATE_FLOOR_S = 0.002
LATE_SHARE = 0.02
"""Of the median TTFT since sent."""
DELIVERY_BLOCK_S = 10.0
DELIVERY_SHARE = 0.005
DELIVERY_SLACK_S = 0.1
"""A request that is sent later than this after it was due was not delivered at its time."""
ERRORS_TOLD = 8
"""Names in a sentence; a server may have one for each request."""
OFFERED_SHARE = 0.05
"""So much less than the asked rate may be due before it is said."""
STAMPED_SHARE = 0.01
"""Of the requests sent. Each late stamp is of one request, so that fewer cannot move a 99th percentile."""
CACHE_WAS_WARM = "cache_was_warm"
UNMEASURED, SHORT = "unmeasured", "short_answers"
OF_TOKENS = ("lumps", "hidden_tokens", UNMEASURED, "tokens_uncounted", SHORT)
"""How tokens came: of a search and of a sweep as well as of a run."""
HIDDEN_SHARE = 0.1
"""Of the counted tokens: fewer that are not shown are special ones, and parts of characters."""
BEYOND_MIN = 10
"""Requests that must be expected beyond a quantile before it is more than luck."""


@dataclasses.dataclass(frozen=True)
class RunVerdict:
    """One finding."""

    name: str
    """Stable, for programs."""
    sentence: str
    is_failure: bool
    """The run did not measure what it claims to: a command must exit with an error."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def judge_run(run: LoadRun, summary: RunSummary, steadiness: Stationarity) -> list[RunVerdict]:
    """All findings, those that are failures first."""
    found = [
        _ending(run),
        _late(run),
        _undelivered(run),
        _stamped_late(run),
        _offered_less(run, summary),
        _untold(run),
        _warm(run),
        _backlog(steadiness),
        _worsening(steadiness),
        _few(summary),
        _failures(run, summary),
        _without_content(run, summary),
        *_tokens(run, summary),
        _missed(summary),
    ]
    return sorted((verdict for verdict in found if verdict is not None), key=lambda verdict: not verdict.is_failure)


def has_failed(verdicts: Sequence[RunVerdict]) -> bool:
    return any(verdict.is_failure for verdict in verdicts)


ENDINGS = {
    "interrupted": "The run was interrupted: what was due later is missing.",
    "disk_full": "The disk was full: what was measured later is missing.",
    "driver_lost": "A sending process ended before its time: what it measured is missing.",
    "unreachable": "The server could not be reached.",
}


def _ending(run: LoadRun) -> RunVerdict | None:
    if run.ended == "complete":
        return None
    return RunVerdict(run.ended, ENDINGS.get(run.ended, f"The run ended early: {run.ended}."), True)


def lateness_limit_s(records: Sequence[MeasuredRequest]) -> float:
    """How late the generator may be at its 99th percentile: 2 ms, or 2 % of the median TTFT since sent."""
    times = sorted(record.ttft_since_sent_s for record in records if math.isfinite(record.ttft_since_sent_s))
    return max(LATE_FLOOR_S, LATE_SHARE * percentile(times, 0.5)) if times else LATE_FLOOR_S


def _late(run: LoadRun) -> RunVerdict | None:
    late = sorted(value for record in run.counted if (value := record.lateness_s) is not None)
    if not late:
        return None
    limit, measured = lateness_limit_s(run.counted), percentile(late, 0.99)
    if measured <= limit:
        return None
    return RunVerdict(
        "generator_late",
        f"The generator was late: 1 % of the requests were begun more than {measured * 1e3:.1f} ms after they were "
        f"due, and at most {limit * 1e3:.1f} ms are allowed. The measured times contain the generator's own delay.",
        True,
    )


def _stamped_late(run: LoadRun) -> RunVerdict | None:
    """Of the native driver: how many arrivals its processes noted only once a body was made, and the longest of these
    delays. What each of them was is not told.
    """
    uses = _told_uses(run)
    late, sent = sum(use.get("stamps_late", 0) for use in uses), sum(use.get("sent", 0) for use in uses)
    worst = max((use.get("worst_stamp_s", 0.0) for use in uses), default=0.0)
    limit = lateness_limit_s(run.counted)
    if late <= STAMPED_SHARE * sent or worst <= limit:
        return None
    return RunVerdict(
        "stamps_late",
        f"The generator noted {late} arrivals too late, as it was making a body when they came: by up to "
        f"{worst * 1e3:.1f} ms, and {limit * 1e3:.1f} ms would be in order. TTFT and gaps of up to "
        f"{min(late, sent)} of {sent} requests can be too long, or too short, by that. More processes, or shorter "
        "prompts, make it less.",
        False,
    )


def _told_uses(run: LoadRun) -> list[dict[str, Any]]:
    generator = run.settings.get("generator")
    return list(generator.get("processes", ())) if isinstance(generator, dict) else []


def is_unsent(record: MeasuredRequest) -> bool:
    """It was due and the generator never tried it. A later turn of a session that had broken was not due."""
    if record.sent_s is not None or record.status is not None:  # the server's own word for something else
        return False
    return record.error in (TOO_MANY_CONNECTIONS, NO_BODY) or (record.error == NOT_SENT and record.turn == 0)


def _undelivered(run: LoadRun) -> RunVerdict | None:
    """In each 10 s, of the requests due. One that was sent too late is not counted alone: a single one is more than
    the share wherever few are due.
    """
    begin, _ = run.window_s
    due: Counter[int] = Counter()
    unsent: Counter[int] = Counter()
    missing: Counter[int] = Counter()
    for record in run.counted:
        place = int((record.due_s - begin) // DELIVERY_BLOCK_S)
        due[place] += 1
        unsent[place] += is_unsent(record)
        missing[place] += is_unsent(record) or (record.lateness_s or 0.0) > DELIVERY_SLACK_S
    short = [
        place
        for place, count in due.items()
        if unsent[place] > DELIVERY_SHARE * count or missing[place] > max(1.0, DELIVERY_SHARE * count)
    ]
    if not short:
        return None
    worst = max(short, key=lambda place: missing[place] / due[place])
    return RunVerdict(
        "undelivered",
        f"The offered load was not delivered: in {len(short)} of {len(due)} spans of {DELIVERY_BLOCK_S:.0f} s more "
        f"than {DELIVERY_SHARE:.1%} of the requests due were not sent within {DELIVERY_SLACK_S * 1e3:.0f} ms; worst "
        f"{missing[worst]} of {due[worst]}, {worst * DELIVERY_BLOCK_S:.0f} s after the window began.",
        True,
    )


def _offered_less(run: LoadRun, summary: RunSummary) -> RunVerdict | None:
    """Of sessions: the first ones begin with the run, and nobody is in his later turns yet. Sessions that had begun
    before would need prompts that no prefix cache has seen, so the load is not corrected but told.
    """
    asked, counted = run.offered_per_s, run.counted
    sessions = len({record.session for record in counted})
    if not asked or "imported_from" in run.settings or not any(record.turn for record in counted):
        return None
    luck = 2 / math.sqrt(sessions)
    if summary.offered_per_s >= asked * (1 - max(OFFERED_SHARE, luck)):
        return None
    begin, end = run.window_s
    middle = (begin + end) / 2
    later = sum(record.due_s >= middle for record in counted) / (end - middle)
    return RunVerdict(
        "offered_less",
        f"Less was due than was asked for: {summary.offered_per_s:.2f} of {asked:g} requests/s, and {later:.2f} in the "
        "second half. Sessions begin one after another, and their later turns come think times and answers after: a "
        "longer run, or a shorter think time, comes nearer to the rate.",
        False,
    )


OF_UNTOLD = {
    "due_s": ("when requests were to be sent", "how late the generator was"),
    "output_tokens_asked": ("how long answers were asked to be", "whether they are short"),
    "output_tokens": ("how many tokens came", "TPOT"),
    "longest_gap_s": ("the gaps between chunks", "how evenly text came"),
    "cached_tokens": ("what a prefix cache had", "whether it was warm"),
}
"""What another tool may not tell, and what was therefore not judged: no finding of these is none."""


def _untold(run: LoadRun) -> RunVerdict | None:
    missing = run.settings.get("not_told") or ()
    found = [words for name, words in OF_UNTOLD.items() if name in missing]
    if not found:
        return None
    told, judged = ("; ".join(part) for part in zip(*found, strict=True))
    return RunVerdict("untold", f"{run.driver} does not tell: {told}. So it was not judged: {judged}.", False)


def _warm(run: LoadRun) -> RunVerdict | None:
    found = warmth_of(run)
    if found is None:
        return None
    loaded = " A decode engine that counts what it loaded as cached tells the same." if found.is_whole else ""
    return RunVerdict(
        CACHE_WAS_WARM,
        f"The server's prefix cache was warm: it had {found.cached:.1%} of the prompt tokens of {found.answers} "
        f"answers, and by what this run's prompts share it can have {found.explained:.1%} at most. A run before sent "
        f"the same prompts: another --salt gives prompts that no cache has.{loaded}",
        False,
    )


def _backlog(steadiness: Stationarity) -> RunVerdict | None:
    if not steadiness.is_growing or steadiness.growth_per_s is None:
        return None
    return RunVerdict(
        "backlog_grows",
        f"The backlog grows: {steadiness.growth_per_s:.2f} more requests were in flight each second, so the rate is "
        "above what the server holds, and the latencies depend on how long the run lasted.",
        False,
    )


def _worsening(steadiness: Stationarity) -> RunVerdict | None:
    first, second = steadiness.attainment_first, steadiness.attainment_second
    if not steadiness.is_worsening or first is None or second is None:
        return None
    return RunVerdict(
        "worsens",
        f"The second half of the run was worse than the first: {second:.1%} of the requests met the limits, and "
        f"{first:.1%} before.",
        False,
    )


def requests_for(share: float) -> int:
    """How many requests a quantile needs so that BEYOND_MIN are expected beyond it; of 1, 300: if none of them misses,
    at most 1 % do, with 95 % (the rule of three).
    """
    return math.ceil(BEYOND_MIN / (1 - share) - 1e-9) if share < 1 else 300


def _few(summary: RunSummary) -> RunVerdict | None:
    target = summary.attainment_target
    needed = requests_for(target)
    if summary.due >= needed:
        return None
    if not summary.due:
        return RunVerdict("too_few_requests", "No request was due in the window: there is nothing to judge.", False)
    if not summary.attainment.low <= target <= summary.attainment.high:
        return None  # few, and still enough to tell
    bounds = f"{summary.attainment.low:.1%} to {summary.attainment.high:.1%}"
    return RunVerdict(
        "too_few_requests",
        f"{summary.due} requests are too few to tell {target:.1%} from less: {needed} are needed. The attainment is "
        f"{bounds} with 95 %.",
        False,
    )


def _failures(run: LoadRun, summary: RunSummary) -> RunVerdict | None:
    count = sum(summary.failed.values())
    if not count:
        return None
    counted = sorted(summary.failed.items(), key=lambda one: -one[1])
    named = [f"{name} {number}" for name, number in counted[:ERRORS_TOLD]]
    if len(counted) > ERRORS_TOLD:
        named.append(f"{len(counted) - ERRORS_TOLD} other errors {sum(number for _, number in counted[ERRORS_TOLD:])}")
    names = ", ".join(named)
    failed = (record for record in run.counted if not record.is_good)
    commonest = max(summary.failed, key=lambda name: summary.failed[name])
    said = next((record.message for record in failed if error_of(record) == commonest and record.message), "")
    words = f" The first {commonest} says: {said.removesuffix('.')!r:.200}." if said else ""
    return RunVerdict(
        "failures",
        f"{count} of {summary.due} requests failed ({names}). They count as not good, and as infinite.{words}",
        False,
    )


def _without_content(run: LoadRun, summary: RunSummary) -> RunVerdict | None:
    count = sum(record.is_good and record.first_s is None for record in run.counted)
    if not count:
        return None
    costs = " They miss every limit." if summary.limits else ""
    return RunVerdict(
        "no_content",
        f"{count} of {summary.answered} whole answers had no content: no text of their tokens came, so they have "
        f"neither times nor phases.{costs}",
        False,
    )


def _tokens(run: LoadRun, summary: RunSummary) -> list[RunVerdict]:
    """What keeps a time for each token from being what it is taken for, and answers from being what was asked for."""
    flow, found = flow_of(run), []
    each_s = flow.normalized_e2e_s
    whole = "" if each_s is None else f" Over the whole answer a token took {each_s * 1e3:.1f} ms (median)."
    of_all = f"of {summary.answered} whole answers"
    if flow.tokens_each_arrival is not None and flow.tokens_each_arrival > LUMP_TOKENS:
        found.append(
            RunVerdict(
                "lumps",
                f"Chunks do not stand for tokens: {flow.tokens_each_arrival:.1f} tokens came at a time, and an answer "
                f"in {flow.arrivals_each:.1f} lumps on average. TPOT is a mean over lumps, and the longest gap says "
                f"how long the text stood still.{whole}",
                False,
            )
        )
    if flow.hidden_share > HIDDEN_SHARE:
        found.append(
            RunVerdict(
                "hidden_tokens",
                f"{flow.hiding} {of_all} have hidden tokens, as reasoning: {flow.hidden_share:.1%} of the tokens that "
                f"the server counted were never shown. TPOT is that of the others.{whole}",
                False,
            )
        )
    if flow.unmeasured:
        costs = f" They do not meet the limits of {' and '.join(summary.unmeasured)}." if summary.unmeasured else ""
        found.append(
            RunVerdict(
                UNMEASURED,
                f"{flow.unmeasured} {of_all} have no TPOT that could be measured: all their content came in one lump, "
                f"or nothing counted their tokens.{costs}{whole}",
                False,
            )
        )
    if flow.uncounted:
        found.append(
            RunVerdict(
                "tokens_uncounted",
                f"The server did not count the tokens {flow.uncounted} {of_all}: each chunk counts as one token.",
                False,
            )
        )
    if flow.short:
        found.append(
            RunVerdict(
                SHORT,
                f"{flow.short} {of_all} are shorter than asked for: {flow.short_tokens:.1f} of {flow.short_asked:.1f} "
                "tokens on average. They count as not good. Where answers may end by themselves, say --no-ignore-eos.",
                False,
            )
        )
    return found


def _missed(summary: RunSummary) -> RunVerdict | None:
    if not summary.due or summary.is_attained:
        return None
    share = summary.attainment
    return RunVerdict(
        "attainment_missed",
        f"{share.share:.1%} of the requests due were good ({share.low:.1%} to {share.high:.1%} with 95 %), and "
        f"{summary.attainment_target:.1%} were asked for.",
        False,
    )
