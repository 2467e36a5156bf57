"""Agents of two coordinators on one store: whatever is heard late, both ends of a pair know each other in the end.

A model of what runs around :class:`Receivers`: the store's records reach each coordinator late and in any order, and so
do the pairs that one coordinator has the other one tell.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.coordinator.receivers import Receivers, StreamState
from kvxfer.errors import RefusedError
from kvxfer.protocol.directory import CloseStream, Directory, Effect
from kvxfer.protocol.mirror import Mirror
from kvxfer.types import Member
from tests.support.directory import DEAD_NS, LIMITS, MS, hello, pool
from tests.support.receivers import session_state

AGENTS = tuple("abcdef")


@dataclasses.dataclass
class Agent:
    """One process."""

    number: int
    mirror: Mirror = dataclasses.field(default_factory=Mirror)
    asked: set[str] = dataclasses.field(default_factory=set)
    sessions: int = 0
    home: Site | None = None
    stream: int = 0

    @property
    def seen(self) -> set[str]:
        return {member.ref.agent_id for member in self.mirror.membership.members}


class Site:
    """A coordinator, settled."""

    def __init__(self, name: str, whole_view_max: int) -> None:
        self.name = name
        self.directory = Directory(LIMITS, 0, epoch=name.encode() * 16, is_shared=True)
        self.now_ns = 0
        while not self.directory.is_settled:
            self.now_ns += 100 * MS
            self.directory.tick(self.now_ns)
            assert self.now_ns < 10 * DEAD_NS
        self.receivers = Receivers(self.directory, whole_view_max)
        self.receivers.on_elsewhere = lambda agent_id, others: self.pairs.update((agent_id, other) for other in others)
        self.pairs: set[tuple[str, str]] = set()

    def carry_out(self, effects: tuple[Effect, ...]) -> None:
        retired = []
        for effect in effects:
            if isinstance(effect, CloseStream):
                self.receivers.retire(effect.stream, RefusedError(effect.reason))
                retired.append(effect.stream)
        self.receivers.wake()
        for stream in retired:
            if stream in self.receivers.sessions:
                self.receivers.close(stream)  # as the stream's own task does, later


class SharedWorld:
    """Two coordinators, a store, and agents that move."""

    def __init__(self, source: random.Random, whole_view_max: int) -> None:
        self.source = source
        self.whole_view_max = whole_view_max
        self.sites = [Site(name, whole_view_max) for name in "xy"]
        self.store: dict[str, tuple[Site, int, Member]] = {}
        self.agents: dict[str, Agent] = {}
        self.numbers = itertools.count(1)

    def come(self, name: str) -> None:
        """A fresh process, or one that goes to the other coordinator, or comes back to its own."""
        agent = self.agents.setdefault(name, Agent(next(self.numbers)))
        if agent.home is not None and agent.stream in agent.home.receivers.sessions and self.source.random() < 0.8:
            agent.home.receivers.close(agent.stream)
            agent.home.carry_out(agent.home.directory.stream_ended(agent.stream, now_ns=agent.home.now_ns))
        site = self.source.choice(self.sites)
        agent.sessions += 1
        nonce = agent.number.to_bytes(16, "big")
        number = agent.number if agent.sessions > 1 else 0
        known = (*agent.seen, *sorted(agent.asked))
        registration = site.directory.register(
            hello(name, nonce, number, sessions=agent.sessions), fresh_number=agent.number, now_ns=site.now_ns
        )
        agent.mirror.reset_parts()
        site.carry_out(registration.effects)
        site.receivers.open(registration.stream, session_state(name), known)
        agent.home, agent.stream = site, registration.stream
        self.write(name)

    def leave(self, name: str) -> None:
        """Where another coordinator does not know that it moved, it would end there by its silence."""
        for site in self.sites:
            self.read(site, name)
        agent = self.agents.pop(name)
        assert agent.home is not None
        agent.home.carry_out(agent.home.directory.deregister(agent.stream, now_ns=agent.home.now_ns))
        if agent.stream in agent.home.receivers.sessions:
            agent.home.receivers.close(agent.stream)
        del self.store[name]

    def ask(self, name: str, other: str) -> None:
        agent = self.agents[name]
        agent.asked.add(other)
        state, site = self.state(name)
        site.receivers.ask(state, [other])

    def change(self, name: str) -> None:
        agent, (_, site) = self.agents[name], self.state(name)
        pools = tuple(map(pool, range(self.source.randrange(3))))
        site.carry_out(site.directory.update_pools(agent.stream, pools, now_ns=site.now_ns))
        self.write(name)

    def write(self, name: str) -> None:
        site = self.agents[name].home
        assert site is not None
        known = site.directory.known(name)
        assert known is not None
        self.store[name] = site, known[1], known[0]

    def state(self, name: str) -> tuple[StreamState, Site]:
        agent = self.agents[name]
        assert agent.home is not None
        return agent.home.receivers.sessions[agent.stream], agent.home

    def read(self, site: Site, name: str) -> None:
        """What the store has of a name reaches a coordinator."""
        record = self.store.get(name)
        if record is None:
            site.carry_out(site.directory.ended(name, now_ns=site.now_ns))
        elif record[0] is not site:
            site.carry_out(site.directory.told(record[2], record[1], is_judged=True, now_ns=site.now_ns))

    def tell(self, site: Site) -> None:
        """One coordinator has the other tell, as ``Acquaintances`` does."""
        there = self.sites[1 - self.sites.index(site)]
        for agent_id, other in sorted(site.pairs):
            is_over = agent_id in site.receivers or agent_id not in site.directory
            is_over |= not site.receivers.is_told_of(other, agent_id)
            if is_over or (self.source.random() < 0.7 and there.receivers.acquaint(agent_id, [other])):
                site.pairs.discard((agent_id, other))

    def catch_up(self, name: str) -> None:
        state, site = self.state(name)
        if state.wake.is_set() or state.revision is None:
            state.wake.clear()
            self.agents[name].mirror.apply(site.receivers.take(state))
        else:
            state.revision = site.directory.revision

    def settle(self) -> None:
        """All that is late arrives."""
        for site, name in itertools.product(self.sites, AGENTS):
            self.read(site, name)
        while any(site.pairs for site in self.sites):
            for site in self.sites:
                self.tell(site)
        for name in self.agents:
            self.catch_up(name)

    def check(self) -> None:
        self.settle()
        views = {name: agent.seen for name, agent in self.agents.items()}
        for name, agent in self.agents.items():
            for member in agent.mirror.membership.members:
                record = self.store[member.ref.agent_id][2]
                assert (member.ref, member.pools) == (record.ref, record.pools), "an old view of somebody"
            assert agent.asked & self.agents.keys() <= views[name] | {name}, "asked for and not told"
            if len(self.agents) <= self.whole_view_max:
                assert views[name] == self.agents.keys()
        for one, other in itertools.combinations(views, 2):
            assert (other in views[one]) == (one in views[other]), "one could be dialed by one that it does not know"


@settings(deadline=None, max_examples=400)
@given(st.integers(0, 1 << 32), st.integers(0, 6), st.integers(1, 60))
def test_both_ends_of_each_pair_know_each_other_in_the_end(seed: int, whole_view_max: int, steps: int) -> None:
    source = random.Random(seed)
    world = SharedWorld(source, whole_view_max)
    for _ in range(steps):
        name, other = source.choice(AGENTS), source.choice(AGENTS)
        dice = source.random()
        if name not in world.agents:
            if any(name in site.directory for site in world.sites):
                for site in world.sites:
                    world.read(site, name)  # else the name is in use
            world.come(name)
        elif dice < 0.1:
            world.leave(name)
        elif dice < 0.25:
            world.come(name)
        elif dice < 0.4 and other != name:
            world.ask(name, other)
        elif dice < 0.5:
            world.change(name)
        elif dice < 0.7:
            world.read(source.choice(world.sites), other)
        elif dice < 0.85:
            world.tell(source.choice(world.sites))
        else:
            world.catch_up(name)
        if source.random() < 0.1:
            world.check()
    world.check()
