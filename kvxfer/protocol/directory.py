"""The coordinator's state machine of membership. Decides which agents are members, since which revision, and which
incarnations ended; must never know how a stream, a store or a clock is made.

Theory of operation
-------------------

An *incarnation* is one AgentRef: an agent id, the number it was given, the nonce it drew. An agent id has at most one
incarnation in the directory. An incarnation speaks through one *stream* at a time (a number that
:meth:`Directory.register` hands out). When an agent reconnects before its old connection is known to be dead, the new
stream speaks for it, and whatever the old one still delivers is refused; the end of an old stream means nothing.

Three questions are kept apart, since confusing them is how zombies are made:

- *Is it connected?* An incarnation whose stream was cut is ADRIFT. It may come back with the pair (number, nonce) that
  it has, and is then LIVE as if nothing had happened.
- *Is it on time?* An incarnation with a stream but without heartbeats is SUSPECT. Suspect and adrift members get
  no new work; nothing else follows.
- *Is it over?* Only silence for ``dead_after`` (LOST), its own deregistration (LEFT), or a successor (REPLACED,
  OUTRANKED) ends an incarnation. Then it is announced in ``gone`` and leaves the directory.

An agent id may be taken over: a fresh process (no number yet) replaces an incarnation that is SUSPECT or ADRIFT, so a
restarted worker is back at once, and is refused while that incarnation is LIVE, so two workers with one name do not
fight. A process that shows a number was judged before: the higher number wins over any other incarnation (OUTRANKED),
the lower one is refused.

An incarnation that was declared gone may return with its pair, for instance after a partition, or to a restarted
coordinator that never heard of it; the directory of a restarted coordinator is empty and simply believes. That is safe,
because ``gone`` ends what peers had granted to that incarnation, not its name. For ``dead_after`` after its start a
coordinator is not *settled*: receivers must not conclude anything from an absence.

What receivers get is state, never an edge: :meth:`Directory.change_since` says what a receiver at a revision lacks. A
receiver that is new, or too far behind for the bounded log of ended incarnations, gets a whole snapshot and finds the
ended ones by difference (``protocol/mirror.py``). So each receiver hears of an ended incarnation exactly once, and a
slow one costs no queue.

An event that the table does not list for a state is a ProtocolError. The diagram in docs/control-plane.md is made
from the table.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools

from kvxfer.errors import InvalidArgumentError, OverloadedError, ProtocolError, RefusedError
from kvxfer.protocol.liveness import Light, Liveness, LivenessLimits
from kvxfer.types import AgentRef, DataAddress, Incarnation, Load, Member, PoolRecord, WorkerInfo


class MemberState(enum.StrEnum):
    LIVE = "live"
    SUSPECT = "suspect"
    ADRIFT = "adrift"
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


TABLE: dict[MemberState, dict[MemberEvent, MemberState]] = {
    MemberState.LIVE: {
        MemberEvent.BEAT: MemberState.LIVE,
        MemberEvent.LATE: MemberState.SUSPECT,
        MemberEvent.LOST: MemberState.GONE,
        MemberEvent.CUT: MemberState.ADRIFT,
        MemberEvent.RETURNED: MemberState.LIVE,
        MemberEvent.LEFT: MemberState.GONE,
        MemberEvent.OUTRANKED: MemberState.GONE,
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
    },
    MemberState.ADRIFT: {
        MemberEvent.LATE: MemberState.ADRIFT,
        MemberEvent.LOST: MemberState.GONE,
        MemberEvent.RETURNED: MemberState.LIVE,
        MemberEvent.REPLACED: MemberState.GONE,
        MemberEvent.OUTRANKED: MemberState.GONE,
    },
    MemberState.GONE: {},
}


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


Effect = CloseStream | OrderDrain | IncarnationEnded


@dataclasses.dataclass(frozen=True)
class Registration:
    """The answer to a Hello: the incarnation's full name, and the stream that speaks for it from now on."""

    ref: AgentRef
    stream: int
    is_return: bool
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


@dataclasses.dataclass
class _Entry:
    member: Member
    state: MemberState
    stream: int | None
    revision: int
    load_revision: int


class Directory:
    """The membership machine.

    Every method but the readers takes ``now_ns`` of one monotonic clock and returns effects for its owner to carry out.
    """

    def __init__(
        self,
        limits: LivenessLimits,
        now_ns: int,
        *,
        epoch: bytes,
        first_revision: int = 0,
        members_max: int = 4096,
        gone_max: int = 4096,
    ) -> None:
        """``epoch``: 16 random bytes that name this run of the coordinator. ``gone_max`` bounds the log of ended
        incarnations.
        """
        self._limits = limits
        self._liveness: Liveness[str] = Liveness(limits, now_ns)
        self._epoch = epoch
        self._revision = first_revision
        self._shape_revision = first_revision
        self._settled = False
        self._members_max = members_max
        self._entries: collections.OrderedDict[str, _Entry] = collections.OrderedDict()
        """By agent id, least recently changed first."""
        self._speakers: dict[int, str] = {}
        """The agent id for which each stream speaks."""
        self._streams = 0
        self._gone: collections.deque[tuple[int, AgentRef]] = collections.deque(maxlen=gone_max)
        self._gone_since = first_revision
        """The log of ended incarnations is complete from this revision on; an older receiver needs a whole snapshot."""

    @property
    def revision(self) -> int:
        return self._revision

    @property
    def shape_revision(self) -> int:
        """The last revision in which something changed besides a member's load."""
        return self._shape_revision

    @property
    def is_settled(self) -> bool:
        """Whether absence means something: ``dead_after`` has passed since the start."""
        return self._settled

    def register(self, hello: Hello, *, fresh_number: int | None, now_ns: int) -> Registration:
        """Admit an incarnation, or the same incarnation again. ``fresh_number`` is what an incarnation without a number
        will get.

        Raises RefusedError (the id is in use, or belongs to a newer incarnation) and OverloadedError (``members_max``).
        """
        agent_id = hello.info.agent_id
        effects: list[Effect] = []
        current = self._entries.get(agent_id)
        if current is not None and current.member.ref.incarnation.boot_nonce == hello.boot_nonce:
            return self._return(current, hello, now_ns)
        number = hello.number or fresh_number
        if number is None:
            raise InvalidArgumentError(f"agent {agent_id!r} has no number, and none was given to register it")
        if current is not None:
            effects = self._end_for_successor(current, hello, number)
        elif len(self._entries) >= self._members_max:
            raise OverloadedError(f"the coordinator keeps at most members_max={self._members_max} members")
        ref = AgentRef(agent_id, Incarnation(number, hello.boot_nonce))
        member = Member(ref, hello.info, hello.address, hello.pools, hello.load, is_draining=hello.is_draining)
        entry = _Entry(member, MemberState.LIVE, None, 0, 0)
        self._entries[agent_id] = entry
        return Registration(ref, self._open_stream(entry, now_ns), is_return=hello.number != 0, effects=tuple(effects))

    def heartbeat(self, stream: int, load: Load, *, is_draining: bool, now_ns: int) -> tuple[Effect, ...]:
        """A heartbeat, with what it says of itself.

        Draining never goes back. Raises RefusedError on a stream that speaks for no agent.
        """
        entry = self._entry_of(stream)
        self._liveness.beat(entry.member.ref.agent_id, now_ns)
        if entry.member.load != load:
            self._revision += 1
            entry.load_revision = self._revision
        self._step(entry, MemberEvent.BEAT, load=load, is_draining=is_draining or entry.member.is_draining)
        return ()

    def update_pools(self, stream: int, pools: tuple[PoolRecord, ...], *, now_ns: int) -> tuple[Effect, ...]:
        """Replace the incarnation's pools. A heartbeat too. Raises RefusedError on a stream that speaks for no
        agent."""
        entry = self._entry_of(stream)
        self._liveness.beat(entry.member.ref.agent_id, now_ns)
        self._step(entry, MemberEvent.BEAT, pools=pools)
        return ()

    def deregister(self, stream: int, *, now_ns: int) -> tuple[Effect, ...]:
        """The incarnation ends by its own word. Raises RefusedError on a stream that speaks for no agent."""
        self._liveness.observe(now_ns)
        return tuple(self._end(self._entry_of(stream), MemberEvent.LEFT))

    def stream_ended(self, stream: int, *, now_ns: int) -> tuple[Effect, ...]:
        """The connection behind a stream is gone; means nothing if that stream speaks for no agent."""
        self._liveness.observe(now_ns)
        agent_id = self._speakers.pop(stream, None)
        if agent_id is not None:
            entry = self._entries[agent_id]
            entry.stream = None
            self._step(entry, MemberEvent.CUT)
        return ()

    def drain(self, agent_id: str, reason: str, *, now_ns: int) -> tuple[Effect, ...]:
        """Order one member to take no new work; it counts as draining at once. Raises RefusedError if there is no such
        member.
        """
        self._liveness.observe(now_ns)
        entry = self._entries.get(agent_id)
        if entry is None:
            raise RefusedError(f"there is no member {agent_id!r} to drain")
        self._replace(entry, is_draining=True)
        return () if entry.stream is None else (OrderDrain(entry.stream, reason),)

    def tick(self, now_ns: int) -> tuple[Effect, ...]:
        """Let time pass: judge which members are late and which are lost. Call a few times per heartbeat."""
        effects: list[Effect] = []
        awake_ns = self._liveness.observe(now_ns)
        if not self._settled and awake_ns >= self._limits.dead_after_ns:
            self._settled = True
            self._shape_revision = self._revision = self._revision + 1
        for agent_id, entry in list(self._entries.items()):
            match self._liveness.light(agent_id, now_ns):
                case Light.YELLOW:
                    self._step(entry, MemberEvent.LATE)
                case Light.RED:
                    effects += self._end(entry, MemberEvent.LOST)
                case Light.GREEN:
                    pass
        return tuple(effects)

    def change_since(self, revision: int | None, *, with_load: bool = False) -> Change:
        """What a receiver at ``revision`` of this epoch lacks; ``None`` is a new receiver. Only ``with_load`` is a new
        load a change by itself.
        """
        if revision is None or revision < self._gone_since:
            members = sorted((entry.member for entry in self._entries.values()), key=lambda member: member.ref)
            return Change(self._epoch, self._revision, True, self._settled, tuple(members))
        newest_first = reversed(self._entries.values())
        changed = [entry.member for entry in itertools.takewhile(lambda entry: entry.revision > revision, newest_first)]
        if with_load:
            changed += [
                entry.member for entry in self._entries.values() if entry.revision <= revision < entry.load_revision
            ]
        gone = tuple(ref for ended, ref in self._gone if ended > revision)
        return Change(
            self._epoch,
            self._revision,
            False,
            self._settled,
            tuple(sorted(changed, key=lambda member: member.ref)),
            gone,
        )

    def statistics(self) -> DirectoryStatistics:
        counts = {state.value: 0 for state in MemberState if state is not MemberState.GONE}
        for entry in self._entries.values():
            counts[entry.state.value] += 1
        counts["draining"] = sum(entry.member.is_draining for entry in self._entries.values())
        return DirectoryStatistics(self._revision, self._settled, counts)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.statistics().members.items())
        return f"<Directory revision {self._revision}: {counts}>"

    def _return(self, entry: _Entry, hello: Hello, now_ns: int) -> Registration:
        """A known incarnation comes back on a new stream. Where its number is 0, it repeats its first Hello, because
        our answer was lost."""
        ref = entry.member.ref
        if hello.number not in (0, ref.incarnation.number):
            raise RefusedError(
                f"agent {ref.agent_id!r} was given the number {ref.incarnation.number}, not {hello.number}"
            )
        effects: list[Effect] = []
        if entry.stream is not None:
            del self._speakers[entry.stream]
            effects.append(CloseStream(entry.stream, "a newer stream speaks for this agent"))
        self._step(
            entry,
            MemberEvent.RETURNED,
            info=hello.info,
            address=hello.address,
            pools=hello.pools,
            load=hello.load,
            is_draining=hello.is_draining or entry.member.is_draining,
        )
        return Registration(ref, self._open_stream(entry, now_ns), is_return=True, effects=tuple(effects))

    def _end_for_successor(self, current: _Entry, hello: Hello, number: int) -> list[Effect]:
        """End ``current`` in favour of another incarnation with the same agent id, or raise RefusedError."""
        ref = current.member.ref
        if number <= ref.incarnation.number:
            raise RefusedError(
                f"agent id {ref.agent_id!r} belongs to the newer incarnation {ref}, not to number {number}"
            )
        if hello.number:
            return self._end(current, MemberEvent.OUTRANKED)
        if MemberEvent.REPLACED not in TABLE[current.state]:
            raise RefusedError(
                f"agent id {ref.agent_id!r} is in use by the live agent {ref} at {current.member.address.tcp_host}:"
                f"{current.member.address.tcp_port}; give every worker its own id"
            )
        return self._end(current, MemberEvent.REPLACED)

    def _open_stream(self, entry: _Entry, now_ns: int) -> int:
        """Give an incarnation a new stream, which counts as a heartbeat."""
        self._streams += 1
        entry.stream = self._streams
        self._speakers[entry.stream] = entry.member.ref.agent_id
        self._liveness.beat(entry.member.ref.agent_id, now_ns)
        self._touch(entry)
        return entry.stream

    def _entry_of(self, stream: int) -> _Entry:
        """The entry for which a stream speaks. Raises RefusedError where it speaks for none."""
        agent_id = self._speakers.get(stream)
        if agent_id is None:
            raise RefusedError("this stream speaks for no member any more")
        return self._entries[agent_id]

    def _step(self, entry: _Entry, event: MemberEvent, **changes: object) -> None:
        entry.state = _next_state(entry.state, event)
        self._replace(entry, is_suspect=entry.state in (MemberState.SUSPECT, MemberState.ADRIFT), **changes)

    def _replace(self, entry: _Entry, **changes: object) -> None:
        """Change the member; a revision only where receivers can see a difference beyond the load."""
        before = entry.member
        entry.member = dataclasses.replace(before, **changes)  # type: ignore[arg-type]
        if dataclasses.replace(before, load=entry.member.load) != entry.member:
            self._touch(entry)

    def _touch(self, entry: _Entry) -> None:
        """Give an entry the next revision, and the last place in the order of changes."""
        entry.revision = self._shape_revision = self._revision = self._revision + 1
        self._entries.move_to_end(entry.member.ref.agent_id)

    def _end(self, entry: _Entry, event: MemberEvent) -> list[Effect]:
        entry.state = _next_state(entry.state, event)
        ref = entry.member.ref
        del self._entries[ref.agent_id]
        self._liveness.forget(ref.agent_id)
        self._shape_revision = self._revision = self._revision + 1
        if len(self._gone) == self._gone.maxlen:
            self._gone_since = self._gone[0][0]
        self._gone.append((self._revision, ref))
        effects: list[Effect] = [IncarnationEnded(ref, event)]
        if entry.stream is not None:
            del self._speakers[entry.stream]
            effects.append(CloseStream(entry.stream, f"this incarnation of the agent ended: {event.value}"))
        return effects


def _next_state(state: MemberState, event: MemberEvent) -> MemberState:
    after = TABLE[state].get(event)
    if after is None:
        raise ProtocolError(f"a {state.value} incarnation does not take the event {event.value!r}")
    return after
