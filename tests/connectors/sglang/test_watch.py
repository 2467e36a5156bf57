"""When a peer of an open room is given up, on a clock of the test."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from kvxfer.connectors.sglang.watch import ASK_S, LOOK_S, LOST_S, SILENT_S, PeerLeg, Watch
from kvxfer.errors import KvxferError, MembershipEndedError
from kvxfer.types import AgentRef, Incarnation, TransferId

REF = AgentRef("d", Incarnation(1, bytes(16)))


@dataclasses.dataclass
class Peer:
    """What the agent knows of it."""

    ref: AgentRef = REF


class FakeAgent:
    """Knows one peer, which answers when the test says so."""

    def __init__(self) -> None:
        self.known: Peer | None = Peer()
        self.connected = True
        self.asked: list[asyncio.Future[None]] = []

    def find_member(self, agent_id: str) -> Peer | None:
        return self.known

    def is_connected(self, agent_id: str) -> bool:
        return self.connected

    def explain(self, error: KvxferError) -> KvxferError:
        return error

    def notify(self, agent_id: str, payload: bytes) -> asyncio.Future[None]:
        self.asked.append(asyncio.get_running_loop().create_future())
        return self.asked[-1]


class World:
    """A watch over one leg."""

    def __init__(self) -> None:
        self.agent = FakeAgent()
        self.leg = PeerLeg(TransferId(bytes(16)), "d", 0, began_s=0.0)
        self.gone: list[KvxferError] = []
        agent: Any = self.agent
        self.watch = Watch(agent, lambda: [] if self.gone else [self.leg], lambda _, error: self.gone.append(error))
        self.now_s = 0.0

    def look(self, until_s: float) -> None:
        while not self.gone and self.now_s < until_s:
            self.now_s += LOOK_S
            self.watch.look(self.now_s)


@pytest.fixture
def world() -> World:
    return World()


async def test_a_peer_that_says_nothing_is_given_up(world: World) -> None:
    world.look(10.0)
    assert "has said nothing" in str(world.gone[0])
    assert ASK_S + SILENT_S <= world.now_s <= ASK_S + SILENT_S + 2 * LOOK_S


async def test_a_peer_without_a_session_is_given_up(world: World) -> None:
    world.agent.connected = False
    world.look(10.0)
    assert "cannot be reached" in str(world.gone[0])
    assert world.now_s <= LOST_S + 3 * LOOK_S


async def test_unknown_peer_is_given_up(world: World) -> None:
    world.agent.known = None
    world.look(10.0)
    assert "is known" in str(world.gone[0])
    assert world.now_s <= SILENT_S + 2 * LOOK_S


@pytest.mark.parametrize("why", ["silent", "down", "unknown"])
async def test_a_rank_that_is_no_member_blames_itself(world: World, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world.agent.connected = why != "down"
    world.agent.known = None if why == "unknown" else Peer()
    monkeypatch.setattr(world.agent, "explain", lambda error: MembershipEndedError(f"revoked; {error}"))
    world.look(20.0)
    assert [(type(error), "revoked" in str(error)) for error in world.gone] == [(MembershipEndedError, True)]


@pytest.mark.parametrize("why", ["silent", "down", "unknown"])
async def test_process_that_was_stopped_gives_no_peer_up(world: World, why: str) -> None:
    world.agent.connected = why != "down"
    world.agent.known = None if why == "unknown" else Peer()
    world.look(0.7)
    assert not world.gone
    world.now_s += 60.0
    world.look(world.now_s + LOOK_S)
    assert not world.gone
    world.look(world.now_s + 10.0)
    assert world.gone


async def test_an_answer_that_waited_while_the_process_stood_still_counts(world: World) -> None:
    world.look(0.7)
    world.now_s += 60.0
    world.look(world.now_s + LOOK_S)
    world.agent.asked[0].set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    world.look(world.now_s + ASK_S + LOOK_S)
    assert not world.gone
    assert len(world.agent.asked) == 2
