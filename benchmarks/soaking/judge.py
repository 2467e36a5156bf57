"""What a soak must not have shown: one verdict a rule, each with a sentence. Pure; it knows lists, and no process."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from soaking.records import Asked, Attempt, HappenedFault, Samples

SILENCES_ITS_ROUTER = ("kill", "stop", "restart", "partition")
"""A fault of these kinds lets a client find its router gone; of any other kind a router goes on serving."""
WARM_S, JUDGED_S = 60.0, 90.0
"""A process is not judged by its first WARM_S seconds, nor where JUDGED_S are not left."""
OLD_ENOUGH_S = 600.0
"""In a run as long as that some process must have been judged."""
MEMORY_MB, MEMORY_SHARE = 12.0, 0.05
DESCRIPTORS, THREADS = 12, 4
"""What the middle of the last third may be above the middle of the first third. Descriptors are connections."""
ANSWERS_A_MINUTE = 30
LATE_S = 1.0
"""A timer that is later than that: other programs have the processors, and an agent may well miss its heartbeats."""


@dataclasses.dataclass(frozen=True)
class SoakVerdict:
    rule: str
    is_met: bool
    sentence: str


@dataclasses.dataclass
class Soaked:
    """All that a run left. ``held``: what workers held at its end; ``endings``: those that were not asked for;
    ``late``: (seconds, by how much a timer was late)."""

    span_s: float
    asked: Sequence[Asked]
    faults: Sequence[HappenedFault]
    processes: Sequence[Samples]
    endings: Sequence[Mapping[str, Any]]
    held: Mapping[str, Any]
    late: Sequence[tuple[float, float]] = ()


def judge(run: Soaked) -> list[SoakVerdict]:
    return [
        _tokens(run),
        _named(run),
        _avoidable(run),
        _explained(run),
        _flat(run, "memory", "MiB"),
        _flat(run, "descriptors", "descriptors"),
        _flat(run, "threads", "threads"),
        _stranded(run),
        _ended(run),
        _whole(run),
        _enough(run),
        _undisturbed(run),
    ]


def failures(run: Soaked) -> list[tuple[Asked, Attempt]]:
    return [(asked, attempt) for asked in run.asked for attempt in asked.attempts if attempt.name]


def was_gone(attempt: Attempt, faults: Sequence[HappenedFault]) -> bool:
    """Its router was killed, stopped or cut off, or had not been back for long."""
    hit = [fault for fault in faults if fault.victim == attempt.router and fault.kind in SILENCES_ITS_ROUTER]
    return any(fault.covers(attempt.at_s, attempt.ended_s) for fault in hit)


def is_avoidable(attempt: Attempt, faults: Sequence[HappenedFault]) -> bool:
    """It failed before its first byte at a router that was there: another try was that router's to make."""
    if attempt.had_byte:
        return False
    return not was_gone(attempt, faults)


def growth(values: Sequence[float]) -> float:
    """The middle of the last third less the middle of the first."""
    third = len(values) // 3
    return statistics.median(values[-third:]) - statistics.median(values[:third])


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _verdict(rule: str, wrong: Sequence[str], well: str) -> SoakVerdict:
    return SoakVerdict(rule, not wrong, _some(wrong) if wrong else well)


def _told(asked: Asked, attempt: Attempt) -> str:
    return f"request {asked.number} at {attempt.at_s:.1f} s by {attempt.router}: {attempt.name}"


def _tokens(run: Soaked) -> SoakVerdict:
    wrong = [f"request {asked.number} at {asked.at_s:.1f} s: {asked.wrong}" for asked in run.asked if asked.wrong]
    right = sum(asked.outcome == "right" for asked in run.asked)
    return _verdict("tokens", wrong, f"{right} answers, each with the right tokens")


def _named(run: Soaked) -> SoakVerdict:
    """A router that was gone could not say why an answer ended."""
    wrong = []
    for asked, attempt in failures(run):
        if not attempt.is_named and not was_gone(attempt, run.faults):
            wrong.append(_told(asked, attempt))
    return _verdict("named", wrong, f"{len(failures(run))} attempts failed, each by a name")


def _avoidable(run: Soaked) -> SoakVerdict:
    wrong = [_told(asked, attempt) for asked, attempt in failures(run) if is_avoidable(attempt, run.faults)]
    wrong += [
        f"request {asked.number} at {asked.at_s:.1f} s: no router answered"
        for asked in run.asked
        if asked.outcome == "failed"
    ]
    return _verdict("avoidable", wrong, "no request failed before its first byte by a router that was there")


def _explained(run: Soaked) -> SoakVerdict:
    wrong = [
        _told(asked, attempt)
        for asked, attempt in failures(run)
        if not any(fault.covers(attempt.at_s, attempt.ended_s) for fault in run.faults)
    ]
    return _verdict("explained", wrong, "no attempt failed while there was no fault")


def _flat(run: Soaked, what: str, unit: str) -> SoakVerdict:
    """Of each process that lived long enough; etcd is not ours."""
    wrong, judged, most = [], 0, 0.0
    for samples in run.processes:
        values = list(samples.memory_mb if what == "memory" else getattr(samples, what))
        if samples.role == "etcd" or not values:
            continue
        from_s = samples.at_s[0] + WARM_S
        values = [value for at_s, value in zip(samples.at_s, values, strict=True) if at_s >= from_s]
        if len(values) < 3 or samples.at_s[-1] - from_s < JUDGED_S:
            continue
        judged += 1
        allowed = {"memory": max(MEMORY_MB, MEMORY_SHARE * values[0]), "descriptors": DESCRIPTORS, "threads": THREADS}[
            what
        ]
        grown = growth(values)
        most = max(most, grown)
        if grown > allowed:
            span = f"in {samples.at_s[-1] - from_s:.0f} s; {allowed:.1f} allowed"
            wrong.append(f"{samples.part} (pid {samples.pid}) grew by {grown:.1f} {unit} {span}")
    if not judged and run.span_s >= OLD_ENOUGH_S:
        wrong.append(f"no process was left alone for {WARM_S + JUDGED_S:.0f} s")
    return _verdict(
        what, wrong, f"{judged} processes lived long enough to be judged; at most {most:.1f} {unit} more at their ends"
    )


def _stranded(run: Soaked) -> SoakVerdict:
    return _verdict(
        "stranded", [f"{name} holds {held}" for name, held in run.held.items()], "no worker holds a block at the end"
    )


def _ended(run: Soaked) -> SoakVerdict:
    wrong = [f"{ending['part']} at {ending['at_s']:.1f} s {ending['what']}" for ending in run.endings]
    return _verdict("ended", wrong, "no process ended but when it was told to")


def _whole(run: Soaked) -> SoakVerdict:
    wrong = [f"{f.kind} {f.victim} at {f.began_s:.1f} s: not whole again" for f in run.faults if f.whole_s is None]
    took = [fault.whole_s for fault in run.faults if fault.whole_s is not None]
    return _verdict(
        "whole", wrong, f"{len(took)} faults, whole again at most {max(took, default=0.0):.1f} s after the end of each"
    )


def _enough(run: Soaked) -> SoakVerdict:
    outcomes = collections.Counter(asked.outcome for asked in run.asked)
    remote = sum(asked.outcome == "right" and asked.prefill not in ("", "local") for asked in run.asked)
    wanted = ANSWERS_A_MINUTE * run.span_s / 60
    wrong = [] if outcomes["right"] >= wanted else [f"only {outcomes['right']} right answers in {run.span_s:.0f} s"]
    if remote < outcomes["right"] / 2:
        wrong.append(f"only {remote} of {outcomes['right']} prompts were computed by a prefill worker")
    return _verdict(
        "enough", wrong, ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items())) + f"; {remote} remote"
    )


def _undisturbed(run: Soaked) -> SoakVerdict:
    wrong = [
        f"the machine let this program wait for {late_s:.1f} s at {at_s:.0f} s"
        for at_s, late_s in run.late
        if late_s > LATE_S
    ]
    return _verdict("undisturbed", wrong, "no timer was late by more than a second")
