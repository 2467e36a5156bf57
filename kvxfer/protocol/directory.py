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
because ``gone`` ends what peers had granted to that incarnation, not its name. After its start a coordinator is not
*settled* for a while (``protocol/settling.py``): receivers must not conclude anything from an absence.

What receivers get is state, never an edge: :meth:`Directory.change_since` says what a receiver at a revision lacks. A
receiver that is new, or too far behind for the bounded log of ended incarnations, gets a whole snapshot and finds the
ended ones by difference (``protocol/mirror.py``). So each receiver hears of an ended incarnation exactly once, and a
slow one costs no queue.

Several coordinators share their members by a store. A member is then judged by the one that holds its stream, and at
all others it is ELSEWHERE: :meth:`Directory.told` takes what its coordinator wrote. When that coordinator is dead, its
members are ORPHANs: as they were, with ``dead_after`` of grace before silence means anything. What is told is compared
with what is known by (number, sessions that the incarnation began), and the older one is dropped, so it does not matter
in which order coordinators hear of each other. While the view of the others may be old (:meth:`Directory.set_current`),
no member ends for silence, since the agent may be elsewhere, and this coordinator is not settled.

An event that the table does not list for a state is a ProtocolError. The diagram in docs/control-plane.md is made
from the table.

A coordinator that is short of processor time reads heartbeats late. So where too many are late at once, none ends for
silence (``SelfDoubt``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from kvxfer.errors import InvalidArgumentError, OverloadedError, RefusedError
from kvxfer.protocol.changes import ChangeLog, Entry
from kvxfer.protocol.liveness import Light, Liveness, LivenessLimits
from kvxfer.protocol.membership import (
    NO_LOAD,
    TABLE,
    Change,
    CloseStream,
    DirectoryStatistics,
    Effect,
    Hello,
    IncarnationEnded,
    MemberEvent,
    MemberState,
    OrderDrain,
    Registration,
    next_state,
    told_fields,
)
from kvxfer.protocol.pace import CoordinatorPace, Pace, SelfDoubt, ToldPace
from kvxfer.protocol.settling import Settling
from kvxfer.types import AgentRef, Incarnation, Load, Member, PoolRecord

__all__ = [
    "NO_LOAD",
    "TABLE",
    "Change",
    "CloseStream",
    "Directory",
    "DirectoryStatistics",
    "Effect",
    "Hello",
    "IncarnationEnded",
    "MemberEvent",
    "MemberState",
    "OrderDrain",
    "Registration",
]


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
        is_shared: bool = False,
        pace: Pace | None = None,
    ) -> None:
        """``epoch``: 16 random bytes that name this run of the coordinator. ``gone_max`` bounds the log of ended
        incarnations. ``is_shared``: other coordinators tell of members too. Without ``pace`` all durations are those of
        ``limits``, however many agents there are."""
        pace = pace or Pace(limits.suspect_after_ns / 2e9, limits.dead_after_ns / 1e9)
        self._pace = CoordinatorPace(pace, members_max)
        self._judged_ns = 0
        """Awake time of the last judgement."""
        self._limits, self._doubt = limits, SelfDoubt()
        self._liveness: Liveness[str] = Liveness(limits, now_ns)
        self._log = ChangeLog(epoch, first_revision, gone_max)
        self._entries = self._log.entries
        self._settling, self._is_current = Settling(is_alone=not is_shared), True
        self._members_max = members_max
        self._speakers: dict[int, str] = {}
        """The agent id for which each stream speaks."""
        self._streams = 0

    @property
    def epoch(self) -> bytes:
        """16 bytes that name this run of the coordinator."""
        return self._log.epoch

    @property
    def revision(self) -> int:
        return self._log.revision

    @property
    def shape_revision(self) -> int:
        """The last revision in which something changed besides a member's load."""
        return self._log.shape_revision

    @property
    def contact_revision(self) -> int:
        """The last revision in which something changed that agents need to reach each other."""
        return self._log.contact_revision

    @property
    def is_settled(self) -> bool:
        """Whether absence means something: all that come back are back, and the view is current."""
        return self._settling.is_settled and self._is_current

    @property
    def pace(self) -> ToldPace:
        """What an agent is to be told now. It may promise that from now on."""
        return self._pace.told(len(self._speakers))

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
        entry = Entry(member, MemberState.LIVE, None, 0, 0, hello.sessions)
        self._entries[agent_id] = entry
        if hello.number:
            self._came_back(hello, now_ns, is_known=current is not None or self._log.knows_end_of(ref))
        stream = self._open_stream(entry, now_ns)
        return Registration(ref, stream, is_return=hello.number != 0, pace=self.pace, effects=tuple(effects))

    def heartbeat(
        self, stream: int, load: Load, *, is_draining: bool, now_ns: int, promised_ms: int = 0
    ) -> tuple[Effect, ...]:
        """A heartbeat, with what it says of itself, and within how many milliseconds it promises the next (0: it
        promises nothing, and may take as long as anybody was told).

        Draining never goes back. Raises RefusedError on a stream that speaks for no agent.
        """
        member = (entry := self._entry_of(stream)).member
        stretch = self._pace.stretch_of(promised_ms)
        self._liveness.beat(member.ref.agent_id, now_ns, stretch)
        if member.load != load:
            self._log.touch_load(entry)
        if entry.state is MemberState.LIVE and is_draining <= member.is_draining:  # nearly all heartbeats
            if member.load != load:
                entry.member = dataclasses.replace(member, load=load)
            return ()
        self._step(entry, MemberEvent.BEAT, load=load, is_draining=is_draining or member.is_draining)
        return ()

    def update_pools(self, stream: int, pools: tuple[PoolRecord, ...], *, now_ns: int) -> tuple[Effect, ...]:
        """Replace the incarnation's pools. A heartbeat too. Raises RefusedError on a stream that speaks for no
        agent."""
        entry = self._entry_of(stream)
        self._liveness.beat(entry.member.ref.agent_id, now_ns, self._pace.longest_stretch)
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
            self._liveness.stretch(agent_id, self._pace.stretch_of_absent(len(self._entries)))
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
        stretch = self._pace.stretch(len(self._speakers))
        dead_after_ns = self._limits.dead_after_ns
        quiet_ns = max(dead_after_ns, self._pace.returns_ns)
        if self._settling.wait(awake_ns, dead_after_ns=dead_after_ns * stretch, quiet_ns=quiet_ns):
            self._pace.expect_no_more()
            self._log.step()
            if self._settling.saw_returns:  # that many came back may have cut off some of them again
                self.begin_anew(now_ns, MemberState.ELSEWHERE, MemberState.ORPHAN)
        if stretch > 1.0 and awake_ns - self._judged_ns < self._limits.gap_max_ns / 2 * stretch:
            return ()
        self._judged_ns = awake_ns
        own = (name for name, entry in self._entries.items() if entry.state is not MemberState.ELSEWHERE)
        lights = {name: self._liveness.light(name, now_ns) for name in own}
        late = {name: light for name, light in lights.items() if light is not Light.GREEN}
        is_held = self._doubt.holds(len(late), len(lights), awake_ns, dead_after_ns * stretch)
        if self._doubt.has_ended:  # those that are not heard yet have time to be
            for agent_id in late:
                self._give_grace(agent_id, now_ns)
        for agent_id, light in late.items():
            entry = self._entries[agent_id]
            if light is Light.RED and self.is_settled and not (is_held or self._doubt.has_ended):
                effects += self._end(entry, MemberEvent.LOST)
            elif next_state(entry.state, MemberEvent.LATE) is not entry.state:
                self._step(entry, MemberEvent.LATE)
        return tuple(effects)

    def _give_grace(self, agent_id: str, now_ns: int) -> None:
        """Judge a member without a heartbeat anew from now on, by what it may have been told elsewhere."""
        self._liveness.beat(agent_id, now_ns, self._pace.stretch_of_absent(len(self._entries)))

    def set_current(self, is_current: bool, *, now_ns: int) -> None:
        """Say whether what :meth:`told` gave is all that other coordinators wrote. Silence counts anew once it is."""
        self._liveness.observe(now_ns)
        if is_current == self._is_current:
            return
        self._is_current = is_current
        self._log.step()
        if is_current:
            self.begin_anew(now_ns, MemberState.ELSEWHERE)

    def begin_anew(self, now_ns: int, *but: MemberState) -> None:
        """Count the silence of all from now on, but of those in some states."""
        for agent_id, entry in self._entries.items():
            if entry.state not in but:
                self._give_grace(agent_id, now_ns)

    def told(self, member: Member, sessions: int, *, is_judged: bool, now_ns: int) -> tuple[Effect, ...]:
        """What another coordinator wrote of a member. ``is_judged``: that coordinator is there, and holds its stream.

        Does nothing where this coordinator knows something newer. ``members_max`` bounds the own members only.
        """
        agent_id = member.ref.agent_id
        entry = self._entries.get(agent_id)
        effects: list[Effect] = []
        if entry is not None:
            is_own = entry.state not in (MemberState.ELSEWHERE, MemberState.ORPHAN)
            version = (member.ref.incarnation.number, sessions)
            if is_own and version == entry.version and member.is_draining and not entry.member.is_draining:
                return self.drain(agent_id, "ordered through another coordinator", now_ns=now_ns)
            is_live_there = is_judged and not member.is_suspect
            if version == entry.version and entry.state is MemberState.ADRIFT and is_live_there:
                is_own = False  # we kept it for a coordinator that seemed dead, and that has its stream
            if version < entry.version or (is_own and version == entry.version):
                return ()
            if member.ref != entry.member.ref:
                effects = self._end(entry, MemberEvent.OUTRANKED)
                entry = None
        if entry is None:
            entry = self._entries[agent_id] = Entry(member, MemberState.ELSEWHERE, None, 0, 0)
            self._log.touch(entry)
        elif version != entry.version:
            self._log.touch(entry)  # as a return does: it may be at another coordinator, which knows less
        if entry.stream is not None:
            effects.append(CloseStream(entry.stream, "a newer stream at another coordinator speaks for this agent"))
            del self._speakers[entry.stream]
            entry.stream = None
        entry.sessions = sessions
        if is_judged or entry.state is not MemberState.ORPHAN:
            self._liveness.forget(agent_id)
            self._step(entry, MemberEvent.MOVED)
        is_draining = member.is_draining or entry.member.is_draining  # an order is never taken back
        self._replace(entry, **{**told_fields(member), "load": entry.member.load, "is_draining": is_draining})
        return (*effects, *(() if is_judged else self.orphan(agent_id, now_ns=now_ns)))

    def set_load(self, ref: AgentRef, load: Load) -> None:
        """The load of a member that another coordinator holds; means nothing for any other one."""
        entry = self._entries.get(ref.agent_id)
        if entry is None or entry.state is not MemberState.ELSEWHERE or entry.member.ref != ref:
            return
        if entry.member.load != load:
            self._log.touch_load(entry)
            entry.member = dataclasses.replace(entry.member, load=load)

    def orphan(self, agent_id: str, *, now_ns: int) -> tuple[Effect, ...]:
        """The coordinator that judged a member is dead, or says nothing of it any more: the member's grace begins."""
        entry = self._entries.get(agent_id)
        if entry is not None and entry.state is MemberState.ELSEWHERE:
            self._step(entry, MemberEvent.ORPHANED)
            self._give_grace(agent_id, now_ns)
        return ()

    def ended(self, agent_id: str, *, now_ns: int, cause: MemberEvent = MemberEvent.ENDED) -> tuple[Effect, ...]:
        """Another coordinator removed a member or, as LOST, its return is not waited for. Means nothing for one whose
        stream is here."""
        self._liveness.observe(now_ns)
        entry = self._entries.get(agent_id)
        if entry is None or entry.stream is not None or cause not in TABLE[entry.state]:
            return ()
        return tuple(self._end(entry, cause))

    def known(self, agent_id: str) -> tuple[Member, int, bool] | None:
        """A member, the sessions it began, and whether this coordinator judges it by a stream that it has or had."""
        entry = self._entries.get(agent_id)
        if entry is None:
            return None
        is_own = entry.state not in (MemberState.ELSEWHERE, MemberState.ORPHAN)
        return entry.member, entry.sessions, is_own

    def change_since(
        self,
        revision: int | None,
        *,
        with_load: bool = False,
        with_judgement: bool = True,
        names: Collection[str] | None = None,
        fresh: Collection[str] = (),
    ) -> Change:
        """As :meth:`ChangeLog.since`."""
        return self._log.since(
            revision,
            is_settled=self.is_settled,
            with_load=with_load,
            with_judgement=with_judgement,
            names=names,
            fresh=fresh,
        )

    def ids_since(self, revision: int) -> set[str]:
        """As :meth:`ChangeLog.ids_since`."""
        return self._log.ids_since(revision)

    def __iter__(self) -> Iterator[str]:
        """The agent ids of all members."""
        return iter(self._entries)

    def __contains__(self, agent_id: str) -> bool:
        return agent_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def statistics(self) -> DirectoryStatistics:
        counts = {state.value: 0 for state in MemberState if state is not MemberState.GONE}
        for entry in self._entries.values():
            counts[entry.state.value] += 1
        counts["draining"] = sum(entry.member.is_draining for entry in self._entries.values())
        return DirectoryStatistics(self.revision, self.is_settled, counts)

    def __repr__(self) -> str:
        return f"<Directory revision {self.revision}: {self.statistics().members}>"

    def _return(self, entry: Entry, hello: Hello, now_ns: int) -> Registration:
        """A known incarnation comes back on a new stream. Where its number is 0, it repeats its first Hello, because
        our answer was lost."""
        ref = entry.member.ref
        if hello.number not in (0, ref.incarnation.number):
            raise RefusedError(
                f"agent {ref.agent_id!r} was given the number {ref.incarnation.number}, not {hello.number}"
            )
        if 0 < hello.sessions < entry.sessions:
            raise RefusedError(f"agent {ref.agent_id!r} has begun another session since this one")
        effects: list[Effect] = []
        if entry.state in (MemberState.ORPHAN, MemberState.ELSEWHERE):
            self._came_back(hello, now_ns, is_known=True)
        if entry.stream is not None:
            del self._speakers[entry.stream]
            effects.append(CloseStream(entry.stream, "a newer stream speaks for this agent"))
        entry.sessions = max(hello.sessions, entry.sessions + (0 if hello.sessions else 1))
        self._step(
            entry,
            MemberEvent.RETURNED,
            info=hello.info,
            address=hello.address,
            pools=hello.pools,
            load=hello.load,
            is_draining=hello.is_draining or entry.member.is_draining,
        )
        stream = self._open_stream(entry, now_ns)
        return Registration(ref, stream, is_return=True, pace=self.pace, effects=tuple(effects))

    def _end_for_successor(self, current: Entry, hello: Hello, number: int) -> list[Effect]:
        """End ``current`` in favour of another incarnation with the same agent id, or raise RefusedError."""
        ref = current.member.ref
        if number <= ref.incarnation.number:
            raise RefusedError(
                f"agent id {ref.agent_id!r} belongs to the newer incarnation {ref}, not to number {number}"
            )
        if hello.number:
            return self._end(current, MemberEvent.OUTRANKED)
        is_live_elsewhere = current.state is MemberState.ELSEWHERE and not current.member.is_suspect
        if MemberEvent.REPLACED not in TABLE[current.state] or is_live_elsewhere:
            raise RefusedError(
                f"agent id {ref.agent_id!r} is in use by the live agent {ref} at {current.member.address.tcp_host}:"
                f"{current.member.address.tcp_port}; give every worker its own id"
            )
        return self._end(current, MemberEvent.REPLACED)

    def _came_back(self, hello: Hello, now_ns: int, *, is_known: bool) -> None:
        """An incarnation came whose stream this coordinator did not have."""
        if self._settling.returned(self._liveness.observe(now_ns), is_known=is_known):
            self._log.step()
        if not self._settling.is_settled:
            self._pace.expect(hello.return_within_ms)

    def _open_stream(self, entry: Entry, now_ns: int) -> int:
        """Give an incarnation a new stream, which counts as a heartbeat."""
        self._streams += 1
        entry.stream = self._streams
        self._speakers[entry.stream] = entry.member.ref.agent_id
        self._liveness.beat(entry.member.ref.agent_id, now_ns, self._pace.stretch(len(self._speakers)))
        self._log.touch(entry)
        return entry.stream

    def _entry_of(self, stream: int) -> Entry:
        """The entry for which a stream speaks. Raises RefusedError where it speaks for none."""
        agent_id = self._speakers.get(stream)
        if agent_id is None:
            raise RefusedError("this stream speaks for no member any more")
        return self._entries[agent_id]

    def _step(self, entry: Entry, event: MemberEvent, **changes: object) -> None:
        entry.state = next_state(entry.state, event)
        if entry.state not in (MemberState.ELSEWHERE, MemberState.ORPHAN):
            changes["is_suspect"] = entry.state in (MemberState.SUSPECT, MemberState.ADRIFT)
        self._replace(entry, **changes)

    def _replace(self, entry: Entry, **changes: object) -> None:
        """Change the member; a revision only where receivers can see a difference beyond the load."""
        before = entry.member
        entry.member = dataclasses.replace(before, **changes)  # type: ignore[arg-type]
        after = dataclasses.replace(entry.member, load=before.load)
        if before != after:
            as_judged = dataclasses.replace(after, is_suspect=before.is_suspect, is_draining=before.is_draining)
            self._log.touch(entry, is_contact=before != as_judged)

    def _end(self, entry: Entry, event: MemberEvent) -> list[Effect]:
        entry.state = next_state(entry.state, event)
        ref = entry.member.ref
        self._log.remove(entry)
        self._liveness.forget(ref.agent_id)
        effects: list[Effect] = [IncarnationEnded(ref, event, entry.sessions)]
        if entry.stream is not None:
            del self._speakers[entry.stream]
            effects.append(CloseStream(entry.stream, f"this incarnation of the agent ended: {event.value}"))
        return effects
