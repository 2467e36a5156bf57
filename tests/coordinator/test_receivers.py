"""An agent that is told of some members only has of them what a receiver of everything has."""

from __future__ import annotations

import itertools
import random
from collections.abc import Set

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.coordinator import receivers
from kvxfer.coordinator.receivers import Receivers, StreamState
from kvxfer.errors import OverloadedError
from kvxfer.protocol.directory import Directory
from kvxfer.protocol.mirror import Mirror
from tests.support.directory import LIMITS, hello, pool
from tests.support.receivers import session_state

AGENTS = tuple("abcdef")


class World:
    """A directory of up to six agents, and each agent's mirror of it."""

    def __init__(self, whole_view_max: int) -> None:
        self.directory = Directory(LIMITS, 0, epoch=bytes(16))
        self.receivers = Receivers(self.directory, whole_view_max)
        self.whole_view_max = whole_view_max
        self.number = 0
        self.streams: dict[str, int] = {}
        self.states: dict[str, StreamState] = {}
        self.mirrors: dict[str, Mirror] = {}
        self.named: set[tuple[str, str]] = set()

    def come(self, name: str) -> None:
        self.number += 1
        mirror = self.mirrors.setdefault(name, Mirror())
        known = [member.ref.agent_id for member in mirror.membership.members]
        nonce = self.number.to_bytes(16, "big")
        registration = self.directory.register(hello(name, nonce), fresh_number=self.number, now_ns=0)
        self.receivers.wake()
        self.streams[name] = registration.stream
        self.states[name] = session_state(name)
        self.receivers.open(registration.stream, self.states[name], known)
        self.catch_up(name)

    def leave(self, name: str) -> None:
        self.directory.deregister(self.streams.pop(name), now_ns=0)
        self.receivers.wake()
        self.receivers.close(next(key for key, state in self.receivers.sessions.items() if state is self.states[name]))
        del self.states[name]

    def ask(self, name: str, other: str) -> None:
        self.receivers.ask(self.states[name], [other])
        self.named.add((name, other))

    def change(self, name: str, pools: int) -> None:
        self.directory.update_pools(self.streams[name], tuple(map(pool, range(pools))), now_ns=0)
        self.receivers.wake()

    def catch_up(self, name: str) -> None:
        state = self.states[name]
        if state.wake.is_set() or state.revision is None:
            state.wake.clear()
            self.mirrors[name].apply(self.receivers.take(state))
        else:
            state.revision = self.directory.revision  # as the answer to a heartbeat does

    def check(self) -> None:
        for name in self.states:
            self.catch_up(name)
        truth = {member.ref.agent_id: member for member in self.directory.change_since(None).members}
        views: dict[str, Set[str]] = {}
        for name in self.states:
            seen = {member.ref.agent_id: member for member in self.mirrors[name].membership.members}
            assert {other: (m.ref, m.pools) for other, m in seen.items()} == {
                other: (truth[other].ref, truth[other].pools) for other in seen
            }, "an old view of somebody"
            views[name] = seen.keys()
            if len(truth) <= self.whole_view_max:
                assert seen.keys() == truth.keys()
            for one, other in self.named & {(a, b) for a in self.states for b in self.states}:
                if name in (one, other) and one != other:
                    assert {one, other} - {name} <= seen.keys(), "asked for and not told"
        for one, other in itertools.combinations(views, 2):
            assert (other in views[one]) == (one in views[other]), "one could be dialed by one that it does not know"


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 1 << 32), st.integers(0, 6), st.integers(1, 60))
def test_what_is_told_is_the_truth_of_all_that_were_named(seed: int, whole_view_max: int, steps: int) -> None:
    source, world = random.Random(seed), World(whole_view_max)
    for _ in range(steps):
        name, other = source.choice(AGENTS), source.choice(AGENTS)
        if name not in world.states:
            world.come(name)
        elif source.random() < 0.2:
            world.leave(name)
            world.named = {pair for pair in world.named if name not in pair}
        elif source.random() < 0.4:
            world.ask(name, other)
        elif source.random() < 0.5:
            world.change(name, source.randrange(3))
        else:
            world.catch_up(name)
        if source.random() < 0.3:
            world.check()
    world.check()


def test_many_members_cost_an_agent_nothing_that_it_did_not_ask_for() -> None:
    world = World(0)
    for name in AGENTS:
        world.come(name)
    world.ask("a", "b")
    world.check()
    for name in ("c", "d"):
        world.change(name, 2)
    assert not world.states["a"].wake.is_set()
    assert {m.ref.agent_id for m in world.mirrors["b"].membership.members} == {"a", "b"}
    assert {m.ref.agent_id for m in world.mirrors["e"].membership.members} == {"e"}
    world.change("b", 2)
    assert [name for name, state in world.states.items() if state.wake.is_set()] == ["a", "b", "c", "d"]


def test_names_of_no_member_are_dropped_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receivers, "NAMES_MAX", 4)
    world = World(0)
    for name in "ab":
        world.come(name)
        world.states[name].names_max = 4
    for number in range(40):
        world.receivers.ask(world.states["a"], [f"absent-{number}"])
        assert len(world.states["a"].names) <= 4
    for number in range(40):  # each of them names b, and ends
        name = f"passer-by-{number}"
        world.come(name)
        world.ask(name, "b")
        world.catch_up("b")
        world.leave(name)
        world.catch_up("b")
        assert len(world.states["b"].names) <= 5
    assert {member.ref.agent_id for member in world.mirrors["b"].membership.members} <= {"a", "b"}


def test_more_members_than_the_bound_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receivers, "NAMES_MAX", 4)
    world = World(0)
    for name in AGENTS:
        world.come(name)
    with pytest.raises(OverloadedError, match="NAMES_MAX=4"):
        world.receivers.ask(world.states["a"], AGENTS)
