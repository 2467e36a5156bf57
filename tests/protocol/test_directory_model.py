"""The directory against a plain dict, with receivers of every speed, and across restarts of the coordinator."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.errors import OverloadedError, RefusedError
from kvxfer.protocol.directory import NO_LOAD, Change, Directory, IncarnationEnded
from kvxfer.protocol.mirror import Mirror
from kvxfer.protocol.pace import RETURNS_A_S
from kvxfer.protocol.settling import RESTART_MAX_NS, SETTLING_MAX
from kvxfer.types import AgentRef, Incarnation, Load, Member, Membership, PoolRecord
from tests.support.directory import DEAD_NS, LIMITS, MS, NONCES, SUSPECT_NS, hello, pool

AGENTS = ("a", "b", "c")
GONE_MAX = 3


@dataclasses.dataclass
class ModelIncarnation:
    """What the plain model knows of one incarnation."""

    nonce: bytes
    number: int
    stream: int | None
    beat_ns: int
    is_suspect: bool = False
    is_draining: bool = False
    load: Load = NO_LOAD
    pools: tuple[PoolRecord, ...] = ()
    stretch: float = 1.0


class Receiver:
    """A receiver behind a mirror; checks that it hears of each ended incarnation once."""

    def __init__(self, seed: int) -> None:
        self.mirror = Mirror()
        self.random = random.Random(seed)
        self.revision: int | None = None
        self.with_load = bool(seed % 2)
        self.present: set[AgentRef] = set()
        self.told: collections.Counter[AgentRef] = collections.Counter()
        self.view = Membership(0)

    def catch_up(self, directory: Directory, deaths: collections.Counter[AgentRef]) -> None:
        change = directory.change_since(self.revision, with_load=self.with_load)
        before = set(self.present)
        cut = self.random.randint(0, len(change.members))
        head = dataclasses.replace(change, members=change.members[:cut], gone=())
        assert self.mirror.apply(head, is_last=False) is None
        view = self.mirror.apply(dataclasses.replace(change, members=change.members[cut:]))
        self.revision = change.revision
        if view is None:
            return
        self.view = view
        self.present = {member.ref for member in view.members}
        assert len(set(view.gone)) == len(view.gone)
        assert before - self.present <= set(view.gone), "an incarnation vanished without a word"
        self.check_gone(before, view, change)
        self.told.update(view.gone)
        assert self.told <= deaths, "an incarnation ended more often for a receiver than it did"

    def check_gone(self, before: set[AgentRef], view: Membership, change: Change) -> None:
        """An incarnation that is gone was a member, or came and went between two updates; one that is gone and a member
        came back."""
        for ref in view.gone:
            assert ref in before or ref in change.gone
            if ref in self.present:
                assert ref in change.gone


class DirectoryAgainstDict(RuleBasedStateMachine):
    """Every rule acts on the machine and on a dict, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.counter = 0
        self.epoch = 0
        self.incarnations: dict[str, ModelIncarnation] = {}
        self.deaths: collections.Counter[AgentRef] = collections.Counter()
        self.receivers = [Receiver(seed) for seed in range(4)]
        self.pairs: list[tuple[str, bytes, int]] = []
        self.streams: list[int] = []
        self.start()

    def start(self) -> None:
        for agent_id in list(self.incarnations):
            self.ended(agent_id)
        self.epoch += 1
        self.started_ns = self.waiting_ns = self.now_ns
        self.ends: collections.deque[tuple[str, bytes, int]] = collections.deque(maxlen=GONE_MAX)
        self.returned_ns: int | None = None
        self.is_settled = False
        self.directory = Directory(
            LIMITS,
            self.now_ns,
            epoch=bytes([self.epoch % 256]) * 16,
            first_revision=self.counter,
            members_max=2,
            gone_max=GONE_MAX,
        )
        self.streams = []
        for receiver in self.receivers:
            receiver.revision = None

    def ended(self, agent_id: str) -> None:
        incarnation = self.incarnations.pop(agent_id)
        self.deaths[AgentRef(agent_id, Incarnation(incarnation.number, incarnation.nonce))] += 1
        self.ends.append((agent_id, incarnation.nonce, incarnation.number))

    @rule(agent_id=st.sampled_from(AGENTS), nonce=st.sampled_from(NONCES))
    def register_fresh(self, agent_id: str, nonce: bytes) -> None:
        self.counter += 1
        self.register(agent_id, nonce, 0)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def register_again(self, data: st.DataObject) -> None:
        self.register(*data.draw(st.sampled_from(self.pairs)))

    def register(self, agent_id: str, nonce: bytes, number: int) -> None:
        current = self.incarnations.get(agent_id)
        is_same = current is not None and current.nonce == nonce
        if current is None:
            is_allowed = len(self.incarnations) < 2
        elif is_same:
            is_allowed = number in (0, current.number)
        elif number:
            is_allowed = number > current.number
        else:
            is_allowed = (current.is_suspect or current.stream is None) and self.counter > current.number
        offer = hello(agent_id, nonce, number)
        if not is_allowed:
            with pytest.raises(OverloadedError if current is None else RefusedError):
                self.directory.register(offer, fresh_number=self.counter or 1, now_ns=self.now_ns)
            return
        registration = self.directory.register(offer, fresh_number=self.counter or 1, now_ns=self.now_ns)
        if number and not is_same:
            self.returned_ns = self.now_ns
            is_known = current is not None or (agent_id, nonce, number) in self.ends
            if not is_known and self.is_settled and self.now_ns - self.started_ns <= RESTART_MAX_NS:
                self.is_settled, self.waiting_ns = False, self.now_ns
        got = registration.ref.incarnation.number
        assert got == (current.number if is_same and current else number or self.counter)
        incarnation = ModelIncarnation(nonce, got, registration.stream, self.now_ns)
        if is_same and current:
            incarnation.is_draining = current.is_draining
        elif current:
            self.ended(agent_id)
        self.incarnations[agent_id] = incarnation
        self.pairs.append((agent_id, nonce, got))
        self.streams.append(registration.stream)

    def speaker(self, stream: int) -> str | None:
        return next((name for name, incarnation in self.incarnations.items() if incarnation.stream == stream), None)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), queued=st.integers(0, 2), drains=st.booleans())
    def heartbeat(self, data: st.DataObject, queued: int, drains: bool) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        name, load = self.speaker(stream), Load(queued_requests=queued)
        if name is None:
            with pytest.raises(RefusedError):
                self.directory.heartbeat(stream, load, is_draining=drains, now_ns=self.now_ns)
            return
        assert self.directory.heartbeat(stream, load, is_draining=drains, now_ns=self.now_ns) == ()
        incarnation = self.incarnations[name]
        incarnation.beat_ns, incarnation.is_suspect, incarnation.load = self.now_ns, False, load
        incarnation.stretch = 1.0
        incarnation.is_draining |= drains

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), count=st.integers(0, 2))
    def update_pools(self, data: st.DataObject, count: int) -> None:
        stream, pools = data.draw(st.sampled_from(self.streams)), tuple(map(pool, range(count)))
        name = self.speaker(stream)
        if name is None:
            with pytest.raises(RefusedError):
                self.directory.update_pools(stream, pools, now_ns=self.now_ns)
            return
        self.directory.update_pools(stream, pools, now_ns=self.now_ns)
        incarnation = self.incarnations[name]
        incarnation.beat_ns, incarnation.is_suspect, incarnation.pools = self.now_ns, False, pools
        incarnation.stretch = 1.0

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        self.directory.stream_ended(stream, now_ns=self.now_ns)
        if name := self.speaker(stream):
            self.incarnations[name].stream = None
            self.incarnations[name].stretch = max(self.incarnations[name].stretch, self.of_absent())

    def of_absent(self) -> float:
        """The stretch by which one without a connection is judged."""
        return 1.0 + len(self.incarnations) / RETURNS_A_S * 1e9 / DEAD_NS

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def deregister(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        name = self.speaker(stream)
        if name is None:
            with pytest.raises(RefusedError):
                self.directory.deregister(stream, now_ns=self.now_ns)
            return
        self.directory.deregister(stream, now_ns=self.now_ns)
        self.ended(name)

    @rule(agent_id=st.sampled_from(AGENTS))
    def drain(self, agent_id: str) -> None:
        if agent_id not in self.incarnations:
            with pytest.raises(RefusedError):
                self.directory.drain(agent_id, "", now_ns=self.now_ns)
            return
        self.directory.drain(agent_id, "", now_ns=self.now_ns)
        self.incarnations[agent_id].is_draining = True

    @rule(steps=st.integers(1, 8))
    def pass_time(self, steps: int) -> None:
        for _ in range(steps):
            self.now_ns += 250 * MS
            effects = self.directory.tick(self.now_ns)
            lost = [effect.ref.agent_id for effect in effects if isinstance(effect, IncarnationEnded)]
            silence = {name: self.now_ns - incarnation.beat_ns for name, incarnation in self.incarnations.items()}
            is_quiet = self.returned_ns is None or self.now_ns - self.returned_ns >= DEAD_NS
            was_settled = self.is_settled
            self.is_settled |= self.now_ns - self.waiting_ns >= DEAD_NS * (1 if is_quiet else SETTLING_MAX)
            if self.is_settled and not was_settled and self.returned_ns is not None:
                for name, incarnation in self.incarnations.items():
                    incarnation.beat_ns, silence[name] = self.now_ns, 0
                    incarnation.stretch = self.of_absent()
            dead_ns = {name: DEAD_NS * incarnation.stretch for name, incarnation in self.incarnations.items()}
            silent = {name for name, age_ns in silence.items() if age_ns >= dead_ns[name] and self.is_settled}
            assert sorted(lost) == sorted(silent)
            for name in lost:  # in the directory's order, by which it forgets the oldest end
                self.ended(name)
            for name, incarnation in self.incarnations.items():
                is_late = silence[name] >= SUSPECT_NS * incarnation.stretch
                incarnation.is_suspect |= is_late and incarnation.stream is not None

    @rule()
    def restart_coordinator(self) -> None:
        self.start()

    @rule(index=st.integers(0, 3))
    def catch_up(self, index: int) -> None:
        self.receivers[index].catch_up(self.directory, self.deaths)

    @rule(index=st.integers(0, 3))
    def reconnect(self, index: int) -> None:
        self.receivers[index].revision = None

    def expected(self) -> dict[str, tuple[Any, ...]]:
        return {
            name: (
                incarnation.nonce,
                incarnation.number,
                incarnation.is_suspect or incarnation.stream is None,
                incarnation.is_draining,
                incarnation.pools,
            )
            for name, incarnation in self.incarnations.items()
        }

    def seen(self, members: tuple[Member, ...]) -> dict[str, tuple[Any, ...]]:
        return {
            member.ref.agent_id: (
                member.ref.incarnation.boot_nonce,
                member.ref.incarnation.number,
                member.is_suspect,
                member.is_draining,
                member.pools,
            )
            for member in members
        }

    @invariant()
    def the_directory_equals_the_dict(self) -> None:
        members = self.directory.change_since(None).members
        assert self.seen(members) == self.expected()
        assert len(self.directory._liveness) == len(self.incarnations)
        assert {member.ref.agent_id: member.load for member in members} == {
            name: incarnation.load for name, incarnation in self.incarnations.items()
        }

    @invariant()
    def receivers_see_the_truth_and_nothing_too_early(self) -> None:
        assert self.directory.is_settled == self.is_settled
        for receiver in self.receivers:
            if receiver.revision != self.directory.revision:
                continue
            seen = self.seen(receiver.view.members)
            missing = {name: seen[name] for name in seen if name not in self.expected()}
            assert {name: seen[name] for name in seen if name not in missing} == self.expected()
            assert not (self.directory.is_settled and missing)
            if receiver.with_load:
                assert {m.ref.agent_id: m.load for m in receiver.view.members if m.ref.agent_id not in missing} == {
                    name: incarnation.load for name, incarnation in self.incarnations.items()
                }


TestDirectoryAgainstDict = DirectoryAgainstDict.TestCase
TestDirectoryAgainstDict.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


def test_ends_of_one_moment_are_forgotten_in_the_directorys_order() -> None:
    """Two incarnations that end in one tick end one after the other, and the log forgets the first of all first. The
    model once took the order of a set, which differs from process to process."""
    machine, nonce = DirectoryAgainstDict(), NONCES[0]
    for number in (1, 3):
        machine.register_fresh("a", nonce)
        machine.register_fresh("b", nonce)
        if number == 1:
            machine.register("a", nonce, number)  # the newest change is a's, so b ends first
        machine.pass_time(DEAD_NS // (250 * MS))
    assert [name for name, _, _ in machine.ends] == ["a", "a", "b"]
    machine.register("a", nonce, 1)  # its end is still in the log, so it unsettles nothing
    machine.receivers_see_the_truth_and_nothing_too_early()
    assert machine.directory.is_settled
    machine.register("b", nonce, 2)  # and that of b is not
    machine.receivers_see_the_truth_and_nothing_too_early()
    assert not machine.directory.is_settled
