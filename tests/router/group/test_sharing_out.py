"""Which process takes a new connection, and how many requests all of them let in."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kvxfer.errors import OverloadedError
from kvxfer.policy.admit import AdmitOptions
from kvxfer.router.front import Door
from kvxfer.router.group.member import WAIT_EACH_S, WAIT_MAX_S, GroupMember
from kvxfer.router.group.messages import MemberStart
from kvxfer.router.group.parent import options_of_one
from kvxfer.router.group.segment import CONNECTIONS, SERVING, SharedBoard, SharedCounts
from kvxfer.router.options import RouterOptions
from kvxfer.serving.accepting import Acceptor
from kvxfer.serving.connections import ConnectionPhase, Connections
from kvxfer.serving.server import listening
from tests.support.fake_workers import eventually


class Silent:
    """A channel that leads nowhere."""

    def send(self, *message: Any) -> None:
        pass


def test_turn_leaves_a_connection_to_processes_that_have_fewer() -> None:
    shared = SharedCounts.make(3)
    boards = [SharedBoard(shared, row) for row in range(3)]
    channel: Any = Silent()
    member = GroupMember(MemberStart(RouterOptions(), 3), channel, shared, 0)
    assert member.turn(7) == 0  # no other serves
    for board, count in zip(boards[1:], (5, 9), strict=True):
        board.show_self(SERVING, 1)
        board.show_self(CONNECTIONS, count)
    assert member.turn(5) == 0
    assert member.turn(7) == pytest.approx(2 * WAIT_EACH_S)
    assert member.turn(700) == WAIT_MAX_S
    assert boards[1].elsewhere(CONNECTIONS) == [9]  # row 0 does not serve yet
    boards[0].show_self(SERVING, 1)
    assert boards[1].elsewhere(CONNECTIONS) == [700, 9]
    shared.close()


def test_options_of_one_process_divide_what_each_has_of_its_own() -> None:
    options = RouterOptions(
        workers=4,
        max_connections=10,
        retry_floor_per_s=2.0,
        recompute_per_s=1.0,
        max_inflight=99,
        max_body_bytes=1 << 20,
    )
    one = options_of_one(options)
    assert (one.workers, one.max_connections, one.max_inflight) == (1, 3, 99)
    assert (one.retry_floor_per_s, one.recompute_per_s) == (0.5, 0.25)
    assert one.body_budget_bytes == options.body_budget_bytes // 4
    assert options_of_one(RouterOptions(workers=64)).body_budget_bytes == RouterOptions().max_body_bytes


async def test_door_lets_in_as_many_as_all_processes_may_together() -> None:
    door, shown, elsewhere = Door(AdmitOptions(3)), [], [2]
    door.share(shown.append, lambda: elsewhere[0])
    door.enter()
    with pytest.raises(OverloadedError):
        door.enter()
    elsewhere[0] = 1
    door.leave()
    door.enter()
    assert shown == [1, 0, 1]
    door.leave()


class Accepted(asyncio.Protocol):
    """A connection that only counts."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._connections.move(self, ConnectionPhase.WORK)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.remove(self)

    def give_up(self) -> None:
        self.transport.close()

    def abort(self) -> None:
        self.transport.close()


@pytest.mark.parametrize("ends_second", [False, True])
async def test_acceptors_of_one_listener_share_connections_and_leave_none(ends_second: bool) -> None:
    counts: dict[int, int] = {0: 0, 1: 0}
    with listening("127.0.0.1", 0) as listener:
        acceptors = []
        for mine in (0, 1):
            connections = Connections(100)

            def turn(count: int, mine: int = mine) -> float:
                counts[mine] = count
                return 0.001 * max(0, count - counts[1 - mine])

            one = listener if mine == 0 else socket.socket(fileno=listener.dup().detach())
            one.setblocking(False)
            acceptor = Acceptor(one, connections, lambda those=connections: Accepted(those), turn=turn)  # type: ignore[misc]
            acceptors.append((acceptor, connections, one))
            acceptor.start()
        if ends_second:
            acceptors[1][0].stop()
        address = listener.getsockname()[:2]
        opened = [await asyncio.open_connection(*address) for _ in range(20)]
        await eventually(lambda: sum(len(connections) for _, connections, _ in acceptors) == len(opened))
        shares = [len(connections) for _, connections, _ in acceptors]
        assert shares == [20, 0] if ends_second else min(shares) >= 6, shares
        for acceptor, connections, one in acceptors:
            acceptor.stop()
            connections.abort_all()
            if one is not listener:
                one.close()
        for _, writer in opened:
            writer.close()
        await asyncio.sleep(0.05)
