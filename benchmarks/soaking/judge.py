"""What a soak must not have shown: one verdict a rule, each with a sentence. Pure; it knows lists, and no process."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from soaking.records import TOO_LONG, Asked, Attempt, HappenedFault, Samples

SILENCING = ("kill", "stop", "restart", "partition")
"""A fault of these kinds lets all others find a part gone; of any other kind it goes on serving, some perhaps late."""
CUT_NAMES = frozenset({"peer_gone", "deadline", "closed"})
"""What a router that is there may call the end of an answer that it had begun: its decode worker is gone, or has been
silent for too long; or one of the two is being stopped."""
ROLES = ("prefill", "decode", "router", "coordinator")
"""Whose growth is judged; etcd is not ours."""
WARM_S, JUDGED_S = 60.0, 90.0
"""A process is not judged by its first WARM_S seconds, nor where JUDGED_S are not left."""
LIVED_SHARE = 0.8
"""Of the run: one process of each role must have been judged over so much of it, if that is long enough."""
MEMORY_MB, MEMORY_SHARE = 12.0, 0.05
DESCRIPTORS, THREADS = 12, 4
"""What the middle of the last third may be above the middle of the first third. Descriptors are connections."""
LAST_S, BLOCKS_FROM_S, BLOCK_SAMPLES = 60.0, 70.0, 10
"""A worker that ran for BLOCKS_FROM_S held no block at some time in its last LAST_S; judged by at least so many samples
of them. In good runs a decode worker under load was without one in every 40 s."""
ANSWERS_A_MINUTE, NO_ANSWER_S, REMOTE_SHARE = 200, 10.0, 0.8
HAPPENED_SHARE = 0.7
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
    ``late``: (seconds, by how much a timer was late); ``blocks``: (seconds, worker, used and held blocks); ``kinds``:
    the faults that there should be; ``planned``: how many faults; ``left_out``: kinds that cannot be made here, and
    why; ``whole_s``: how long it took, after all faults, until all parts saw each other; None: they did not."""

    span_s: float
    asked: Sequence[Asked]
    faults: Sequence[HappenedFault]
    processes: Sequence[Samples]
    endings: Sequence[Mapping[str, Any]]
    held: Mapping[str, Any]
    late: Sequence[tuple[float, float]] = ()
    blocks: Sequence[tuple[float, str, int]] = ()
    kinds: Sequence[str] = ()
    planned: int = 0
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    whole_s: float | None = None


def judge(run: Soaked) -> list[SoakVerdict]:
    return [
        _tokens(run),
        _named(run),
        _avoidable(run),
        _explained(run),
        _flat(run, "memory", "MiB"),
        _flat(run, "shared", "MiB"),
        _flat(run, "descriptors", "descriptors"),
        _flat(run, "threads", "threads"),
        _lived(run),
        _stranded(run),
        _ended(run),
        _whole(run),
        _faults(run),
        _enough(run),
        _steady(run),
        _undisturbed(run),
    ]


def failures(run: Soaked) -> list[tuple[Asked, Attempt]]:
    return [(asked, attempt) for asked in run.asked for attempt in asked.attempts if attempt.name]


def was_gone(attempt: Attempt, faults: Sequence[HappenedFault]) -> bool:
    """Its router was killed, stopped or cut off, or had not been back for long."""
    hit = [fault for fault in faults if fault.victim == attempt.router and fault.kind in SILENCING]
    return any(fault.covers(attempt.at_s, attempt.ended_s) for fault in hit)


def is_avoidable(attempt: Attempt, faults: Sequence[HappenedFault]) -> bool:
    """It failed before its first token at a router that was there: another try was that router's to make."""
    if attempt.had_token:
        return False
    return not was_gone(attempt, faults)


def cuts(attempt: Attempt, fault: HappenedFault, roles: Mapping[str, str]) -> bool:
    """Whether the fault can end an answer that had begun: it takes away its router or its decode worker, or parts the
    two. With the first token the prefill worker's part is over. Where no account named the decode worker, any may have
    been it."""

    def is_decode(part: str) -> bool:
        return part == attempt.decode_agent if attempt.decode_agent else roles.get(part) == "decode"

    if fault.kind in SILENCING:
        return fault.victim == attempt.router or is_decode(fault.victim)
    ends = (fault.victim, fault.peer)
    return fault.kind == "apart" and attempt.router in ends and any(map(is_decode, ends))


def lived_share(run: Soaked, role: str) -> float:
    """Over how much of the run the process of this role that lived longest can be judged."""
    return max((each.lived_s for each in run.processes if each.role == role), default=0.0) / run.span_s


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
    """A router that was gone could not say why an answer ended; one that can says one of CUT_NAMES. An answer that
    never ended is excused by no fault: none is so long."""
    wrong = []
    for asked, attempt in failures(run):
        if attempt.is_named:
            is_right = attempt.name in CUT_NAMES or not attempt.had_byte
        else:
            is_right = attempt.name != TOO_LONG and was_gone(attempt, run.faults)
        if not is_right:
            wrong.append(_told(asked, attempt))
    return _verdict("named", wrong, f"{len(failures(run))} attempts failed, each by a name")


def _avoidable(run: Soaked) -> SoakVerdict:
    wrong = [_told(asked, attempt) for asked, attempt in failures(run) if is_avoidable(attempt, run.faults)]
    wrong += [
        f"request {asked.number} at {asked.at_s:.1f} s: no router answered"
        for asked in run.asked
        if asked.outcome == "failed"
    ]
    return _verdict("avoidable", wrong, "no request failed before its first token by a router that was there")


def _explained(run: Soaked) -> SoakVerdict:
    """An answer that had begun is cut by a fault of its own parts alone; a failure before is `avoidable`'s too."""
    roles = {samples.part: samples.role for samples in run.processes}
    wrong = []
    for asked, attempt in failures(run):
        there = [fault for fault in run.faults if fault.covers(attempt.at_s, attempt.ended_s)]
        if attempt.had_byte:
            there = [fault for fault in there if cuts(attempt, fault, roles)]
        if not there:
            wrong.append(_told(asked, attempt))
    return _verdict("explained", wrong, "no attempt failed but by a fault that could fail it")


def _flat(run: Soaked, what: str, unit: str) -> SoakVerdict:
    """Of each process that lived long enough."""
    wrong, judged, most = [], 0, 0.0
    for samples in run.processes:
        values = list(getattr(samples, {"memory": "memory_mb", "shared": "shared_mb"}.get(what, what)))
        if samples.role not in ROLES or not values:
            continue
        from_s = samples.at_s[0] + WARM_S
        values = [value for at_s, value in zip(samples.at_s, values, strict=True) if at_s >= from_s]
        if len(values) < 3 or samples.at_s[-1] - from_s < JUDGED_S:
            continue
        judged += 1
        relative = max(MEMORY_MB, MEMORY_SHARE * values[0])
        allowed = {"descriptors": DESCRIPTORS, "threads": THREADS, "shared": MEMORY_MB}.get(what, relative)
        grown = growth(values)
        most = max(most, grown)
        if grown > allowed:
            span = f"in {samples.at_s[-1] - from_s:.0f} s; {allowed:.1f} allowed"
            wrong.append(f"{samples.part} (pid {samples.pid}) grew by {grown:.1f} {unit} {span}")
    return _verdict(
        what, wrong, f"{judged} processes lived long enough to be judged; at most {most:.1f} {unit} more at their ends"
    )


def _lived(run: Soaked) -> SoakVerdict:
    """Growth over the run is seen in a process that ran all of it."""
    shares = {role: lived_share(run, role) for role in ROLES}
    wrong = []
    if LIVED_SHARE * run.span_s >= WARM_S + JUDGED_S:
        wrong = [f"no {role} ran for more than {s:.0%} of the run" for role, s in shares.items() if s < LIVED_SHARE]
    told = ", ".join(f"{role} {share:.0%}" for role, share in shares.items())
    return _verdict("lived", wrong, f"the process of each role that ran longest, of the run: {told}")


def _stranded(run: Soaked) -> SoakVerdict:
    """Not at the end alone: a worker that was killed or restarted takes what it held with it."""
    wrong = [f"{name} holds {held}" for name, held in run.held.items()]
    judged = 0
    for samples in run.processes:
        if samples.role not in ("prefill", "decode") or samples.lived_s <= BLOCKS_FROM_S:
            continue
        first_s, last_s = samples.at_s[-1] - LAST_S, samples.at_s[-1]
        counts = [count for at_s, part, count in run.blocks if part == samples.part and first_s <= at_s <= last_s]
        if len(counts) < BLOCK_SAMPLES:
            continue
        judged += 1
        if min(counts):
            wrong.append(
                f"{samples.part} (pid {samples.pid}) never held less than {min(counts)} blocks in the {LAST_S:.0f} s "
                f"before {last_s:.0f} s"
            )
    if not judged and run.span_s > BLOCKS_FROM_S + LAST_S:
        wrong.append("no worker's blocks were seen for long enough")
    return _verdict(
        "stranded", wrong, f"no worker holds a block at the end; each of {judged} was without one near its own end"
    )


def _ended(run: Soaked) -> SoakVerdict:
    wrong = [f"{ending['part']} at {ending['at_s']:.1f} s {ending['what']}" for ending in run.endings]
    return _verdict("ended", wrong, "no process ended but when it was told to")


def _whole(run: Soaked) -> SoakVerdict:
    wrong = [f"{f.kind} {f.victim} at {f.began_s:.1f} s: not whole again" for f in run.faults if f.whole_s is None]
    if run.whole_s is None:
        wrong.append("not whole at the end")
    took = [fault.whole_s for fault in run.faults if fault.whole_s is not None]
    return _verdict(
        "whole", wrong, f"{len(took)} faults, whole again at most {max(took, default=0.0):.1f} s after the end of each"
    )


def _faults(run: Soaked) -> SoakVerdict:
    """What was to be survived was there: every kind, where the run is long enough for each."""
    wrong = [f"no fault {kind}: {why}" for kind, why in run.left_out.items() if kind in run.kinds]
    kinds = collections.Counter(fault.kind for fault in run.faults)
    least = 1 if run.planned else 0
    if run.planned >= len(run.kinds):
        wrong += [f"no fault {kind} happened" for kind in run.kinds if not kinds[kind] and kind not in run.left_out]
        least = math.ceil(HAPPENED_SHARE * run.planned)
    if len(run.faults) < least:
        wrong.append(f"only {len(run.faults)} of {run.planned} faults happened")
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return _verdict("faults", wrong, f"{len(run.faults)} of {run.planned} happened: {told or 'none'}")


def _steady(run: Soaked) -> SoakVerdict:
    """Answers keep coming, whatever is broken: until the last request ended."""
    ends = sorted(asked.at_s + asked.took_s for asked in run.asked if asked.outcome == "right")
    over_s = max((asked.at_s + asked.took_s for asked in run.asked), default=run.span_s)
    times = [0.0, *ends, over_s]
    gap_s, at_s = max((later - before, before) for before, later in itertools.pairwise(times))
    wrong = [f"no right answer came for {gap_s:.1f} s after {at_s:.1f} s"] if gap_s > NO_ANSWER_S else []
    return _verdict("steady", wrong, f"a right answer came at least every {gap_s:.1f} s")


def _enough(run: Soaked) -> SoakVerdict:
    outcomes = collections.Counter(asked.outcome for asked in run.asked)
    remote = sum(asked.outcome == "right" and asked.transfer == "remote" for asked in run.asked)
    wanted = ANSWERS_A_MINUTE * run.span_s / 60
    wrong = [] if outcomes["right"] >= wanted else [f"only {outcomes['right']} right answers in {run.span_s:.0f} s"]
    if remote < REMOTE_SHARE * outcomes["right"]:
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
