"""Messages between ranks that are recorded and sent again: they cannot be changed, and have no second effect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvxfer.connectors.sglang import greetings
from tests.support.sglang.ranks import (
    BOOTSTRAPPING,
    FAILED,
    SUCCESS,
    WAITING,
    Rank,
    World,
    reason,
    send,
    start,
    wait,
    wait_for,
)

QUIET_S = 0.4
"""What a message leads to comes sooner."""


class Wire:
    """What came to ranks' sockets, and a socket of another process that sends it again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._context = zmq.Context()
        self._recorded: list[tuple[Any, list[bytes]]] = []

    def tap(self, rank: Rank) -> None:
        taken = rank.manager._take

        def take(frames: list[bytes]) -> None:
            self._recorded.append((rank.manager, frames))
            taken(frames)

        self._monkeypatch.setattr(rank.manager, "_take", take)

    def recorded(self, kind: type, rank: Rank) -> list[list[bytes]]:
        """Messages of that kind that came to that rank."""
        signer = rank.manager._signer
        mine = [frames for manager, frames in list(self._recorded) if manager is rank.manager]
        return [frames for frames in mine if isinstance(greetings.decode(signer, frames), kind)]

    def replay(self, kind: type, rank: Rank, to: Rank | None = None) -> None:
        """All messages of that kind that came to ``rank``, to it or another again; returns when they were heard."""
        found, manager = self.recorded(kind, rank), (to or rank).manager
        assert found, kind
        host, port = manager.local_ip, manager.rank_port
        socket = self._context.socket(zmq.PUSH)
        socket.connect(f"tcp://{host}:{port}")
        for frames in found:
            socket.send_multipart(frames)
        time.sleep(QUIET_S)
        socket.close(linger=0)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def wire(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    wire = Wire(monkeypatch)
    for rank in (world.prefill, world.decode):
        wire.tap(rank)
    yield wire
    wire.close()


def works(world: World, room: int, sender: Any = None, receiver: Any = None) -> None:
    """That room comes, with what it has already."""
    sender = sender or world.prefill.sender(room)
    receiver = receiver or world.decode.ask(room, [5], 1)
    start(sender, 1, 1)
    send(sender, [5])
    wait_for(receiver, SUCCESS)
    wait_for(sender, SUCCESS)
    sender.clear()
    receiver.clear()


def given_up(world: World, *, is_asked: bool) -> int:
    """A room that decode gave up, before or after it asked for it."""
    room = world.room()
    sender, receiver = world.prefill.sender(room), world.decode.receiver(room)
    world.decode.greet(receiver)
    if is_asked:
        receiver.clear()
        receiver = world.decode.ask(room, [5], 1)
        wait_for(sender, WAITING)
    receiver.abort()
    wait(lambda: sender.poll() == FAILED)
    assert "gave it up" in reason(sender)
    wait(lambda: receiver.poll() == FAILED)
    sender.clear()
    receiver.clear()
    time.sleep(0.2)
    return room


def test_a_room_sent_again_while_it_is_under_way_changes_nothing(world: World, wire: Wire) -> None:
    room = world.room()
    sender, receiver = world.prefill.sender(room), world.decode.ask(room, [5], 1)
    wait_for(sender, WAITING)
    wire.replay(greetings.RoomRequest, world.prefill)
    assert sender.poll() == receiver.poll() == WAITING
    works(world, room, sender, receiver)


def test_a_room_sent_again_before_its_prompt_changes_nothing(world: World, wire: Wire) -> None:
    room = world.room()
    receiver = world.decode.ask(room, [5], 1)
    wait(lambda: wire.recorded(greetings.RoomRequest, world.prefill))
    wire.replay(greetings.RoomRequest, world.prefill)
    assert receiver.poll() == WAITING
    works(world, room, receiver=receiver)


def test_a_room_sent_again_after_its_end_begins_nothing(world: World, wire: Wire) -> None:
    room = world.room()
    works(world, room)
    wire.replay(greetings.RoomRequest, world.prefill)
    side = world.prefill.manager.prefill_side
    assert room not in side._wanted
    sender = world.prefill.sender(room)
    wire.replay(greetings.RoomRequest, world.prefill)
    assert sender.poll() == BOOTSTRAPPING
    works(world, room, sender)


def test_a_room_sent_to_another_rank_begins_nothing(world: World, wire: Wire) -> None:
    """The prefill engine that was started again, which the decode rank knows."""
    room = world.room()
    works(world, room)
    before, world.prefill = world.prefill, world.rank("prefill")
    world.decode.manager.forget(world.address)
    works(world, world.room())
    wire.replay(greetings.RoomRequest, before, world.prefill)
    sender = world.prefill.sender(room)
    time.sleep(QUIET_S)
    assert sender.poll() == BOOTSTRAPPING
    works(world, room, sender)


@pytest.mark.parametrize("is_asked", [True, False])
def test_an_abort_sent_again_hits_no_later_request(world: World, wire: Wire, is_asked: bool) -> None:
    room = given_up(world, is_asked=is_asked)
    wire.replay(greetings.Abort, world.prefill)
    sender = world.prefill.sender(room)
    wire.replay(greetings.Abort, world.prefill)
    assert sender.poll() == BOOTSTRAPPING
    receiver = world.decode.ask(room, [5], 1)
    wait_for(sender, WAITING)
    wire.replay(greetings.Abort, world.prefill)
    works(world, room, sender, receiver)


@pytest.mark.parametrize("is_asked", [True, False])
def test_an_abort_sent_to_another_rank_hits_nothing(world: World, wire: Wire, is_asked: bool) -> None:
    room = given_up(world, is_asked=is_asked)
    before, world.prefill = world.prefill, world.rank("prefill")
    world.decode.manager.forget(world.address)
    sender = world.prefill.sender(room)
    wire.replay(greetings.Abort, before, world.prefill)
    assert sender.poll() == BOOTSTRAPPING
    works(world, room, sender)


def test_replayed_answer_registers_no_rank(world: World, wire: Wire) -> None:
    """Of a prefill rank that is no more, from the place where there is another now."""
    world.decode.manager.forget(world.address)
    works(world, world.room())
    before = wire.recorded(greetings.Registered, world.decode)
    place = greetings.address_of(before[-1])
    known = world.decode.manager.decode_side._known
    was = known[place]
    known[place] = greetings.Registered("sglang-prefill-new", *list(was.__dict__.values())[1:])
    now = known[place]
    wire.replay(greetings.Registered, world.decode)
    assert known[place] == now
    world.decode.manager.forget(world.address)


def test_replayed_registers_change_nothing(world: World, wire: Wire) -> None:
    world.decode.manager.forget(world.address)
    room = world.room()
    sender, receiver = world.prefill.sender(room), world.decode.ask(room, [5], 1)
    wait_for(sender, WAITING)
    wire.replay(greetings.Register, world.prefill)
    assert sender.poll() == receiver.poll() == WAITING
    works(world, room, sender, receiver)


def test_a_refusal_sent_again_hits_no_later_request(world: World, wire: Wire) -> None:
    room = world.room()
    sender = world.prefill.sender(room)
    sender.abort()
    receiver = world.decode.ask(room, [5], 1)
    wait(lambda: receiver.poll() == FAILED)
    assert "Aborted" in reason(receiver)
    receiver.clear()  # as SGLang does
    sender, receiver = world.prefill.sender(room), world.decode.ask(room, [5], 1)
    wait_for(sender, WAITING)
    wire.replay(greetings.RoomFailed, world.decode)
    works(world, room, sender, receiver)
