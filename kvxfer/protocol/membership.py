"""What the membership machine is told, decides and answers, as values, and the table of its states. Decides nothing;
must never know how a stream, a store or a clock is made. ``protocol/directory.py`` says what the states mean.
"""

from __future__ import annotations

import dataclasses
import enum

from kvxfer.errors import ProtocolError
from kvxfer.protocol.pace import ToldPace
from kvxfer.types import AgentRef, DataAddress, Load, Member, PoolRecord, WorkerInfo


class MemberState(enum.StrEnum):
    LIVE = "live"
    SUSPECT = "suspect"
    ADRIFT = "adrift"
    ELSEWHERE = "elsewhere"
    ORPHAN = "orphan"
    GONE = "gone"


class MemberEvent(enum.StrEnum):
    BEAT = "beat"
    LATE = "late"
    LOST = "lost"
    CUT = "cut"
    RETURNED = "returned"
    LEFT = "left"
    REPLACED = "replaced"
    OUTRANKED = "outranked"
    MOVED = "moved"
    ORPHANED = "orphaned"
    ENDED = "ended"


TABLE: dict[MemberState, dict[MemberEvent, MemberState]] = {
    MemberState.LIVE: {
        MemberEvent.BEAT: MemberState.LIVE,
        MemberEvent.LATE: MemberState.SUSPECT,
        MemberEvent.LOST: MemberState.GONE,
        MemberEvent.CUT: MemberState.ADRIFT,
        MemberEvent.RETURNED: MemberState.LIVE,
        MemberEvent.LEFT: MemberState.GONE,
        MemberEvent.OUTRANKED: MemberState.GONE,
        MemberEvent.MOVED: MemberState.ELSEWHERE,
    },
    MemberState.SUSPECT: {
        MemberEvent.BEAT: MemberState.LIVE,
        MemberEvent.LATE: MemberState.SUSPECT,
        MemberEvent.LOST: MemberState.GONE,
        MemberEvent.CUT: MemberState.ADRIFT,
        MemberEvent.RETURNED: MemberState.LIVE,
        MemberEvent.LEFT: MemberState.GONE,
        MemberEvent.REPLACED: MemberState.GONE,
        MemberEvent.OUTRANKED: MemberState.GONE,
        MemberEvent.MOVED: MemberState.ELSEWHERE,
    },
    MemberState.ADRIFT: {
        MemberEvent.LATE: MemberState.ADRIFT,
        MemberEvent.LOST: MemberState.GONE,
        MemberEvent.RETURNED: MemberState.LIVE,
        MemberEvent.REPLACED: MemberState.GONE,
        MemberEvent.OUTRANKED: MemberState.GONE,
        MemberEvent.MOVED: MemberState.ELSEWHERE,
        MemberEvent.ENDED: MemberState.GONE,
    },
    MemberState.ELSEWHERE: {
        MemberEvent.RETURNED: MemberState.LIVE,
        MemberEvent.REPLACED: MemberState.GONE,
        MemberEvent.OUTRANKED: MemberState.GONE,
        MemberEvent.MOVED: MemberState.ELSEWHERE,
        MemberEvent.ORPHANED: MemberState.ORPHAN,
        MemberEvent.ENDED: MemberState.GONE,
    },
    MemberState.ORPHAN: {
        MemberEvent.LATE: MemberState.ADRIFT,
        MemberEvent.LOST: MemberState.GONE,
        MemberEvent.RETURNED: MemberState.LIVE,
        MemberEvent.REPLACED: MemberState.GONE,
        MemberEvent.OUTRANKED: MemberState.GONE,
        MemberEvent.MOVED: MemberState.ELSEWHERE,
        MemberEvent.ENDED: MemberState.GONE,
    },
    MemberState.GONE: {},
}


def next_state(state: MemberState, event: MemberEvent) -> MemberState:
    """Where ``event`` leads. Raises ProtocolError where the table does not list it."""
    after = TABLE[state].get(event)
    if after is None:
        raise ProtocolError(f"a {state.value} incarnation does not take the event {event.value!r}")
    return after


def told_fields(member: Member) -> dict[str, object]:
    """What one coordinator tells another of a member, by field."""
    return {name: getattr(member, name) for name in ("info", "address", "pools", "is_suspect", "is_draining")}


NO_LOAD = Load()


@dataclasses.dataclass(frozen=True)
class Hello:
    """What an agent registers. ``number`` is 0 for an incarnation that was given none yet."""

    info: WorkerInfo
    address: DataAddress
    boot_nonce: bytes
    number: int = 0
    pools: tuple[PoolRecord, ...] = ()
    load: Load = NO_LOAD
    is_draining: bool = False
    sessions: int = 0
    """How many sessions this incarnation began, this one included; 0 where it does not count."""
    known: tuple[str, ...] = ()
    """The agents in its view, and those that it asked for."""
    return_within_ms: int = 0
    """As it was told last (``pace.ToldPace``); 0 where it never was."""


@dataclasses.dataclass(frozen=True)
class CloseStream:
    """Effect: this stream speaks for no agent any more; tell its peer why, and end it."""

    stream: int
    reason: str


@dataclasses.dataclass(frozen=True)
class OrderDrain:
    """Effect: tell the agent on this stream to take no new work."""

    stream: int
    reason: str


@dataclasses.dataclass(frozen=True)
class IncarnationEnded:
    """Effect: an incarnation is over; for logs and counters, since receivers learn it from
    :meth:`Directory.change_since`."""

    ref: AgentRef
    cause: MemberEvent
    sessions: int = dataclasses.field(default=0, compare=False)
    """How many sessions it had begun, as far as is known here."""


Effect = CloseStream | OrderDrain | IncarnationEnded


@dataclasses.dataclass(frozen=True)
class Registration:
    """The answer to a Hello: the incarnation's full name, and the stream that speaks for it from now on."""

    ref: AgentRef
    stream: int
    is_return: bool
    pace: ToldPace
    """What the agent is told of its heartbeats; it is judged by no shorter durations."""
    effects: tuple[Effect, ...] = ()


@dataclasses.dataclass(frozen=True)
class Change:
    """What one receiver lacks to stand at ``revision``.

    Whole: ``members`` are all there are and ``gone`` is empty. Otherwise ``members`` are those that are new or changed,
    and ``gone`` the incarnations that ended since; apply ``gone`` first, because an incarnation may have ended and come
    back."""

    epoch: bytes
    revision: int
    is_whole: bool
    is_settled: bool
    members: tuple[Member, ...] = ()
    gone: tuple[AgentRef, ...] = ()


@dataclasses.dataclass(frozen=True)
class DirectoryStatistics:
    revision: int
    is_settled: bool
    members: dict[str, int]
    """Members by state, and how many of them are draining."""
