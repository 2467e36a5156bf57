"""The other role is a process that is killed, or stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import child
from tests.support.sglang.ranks import FAILED, SUCCESS, WAITING, World, is_heard, reason, send, start, wait, wait_for

KILLED_S, STOPPED_S, LEFT_S = 1.5, 3.5, 0.5
"""A death is heard within 1 s, a standstill within 3 s, a farewell at once, on a host that does other things."""


class Peer:
    def __init__(self, role: str, world: World) -> None:
        command = child.command("sglang.peer", role, str(world.port), str(world.model))
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child.environment()
        )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def __call__(self, op: str, room: int, **more: Any) -> Any:
        assert self.process.stdin is not None
        print(json.dumps({"op": op, "room": room, **more}), file=self.process.stdin, flush=True)
        return self.answer()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def peers(world: World) -> Iterator[list[Peer]]:
    """Three decode processes and one of prefill; they import all at once."""
    peers = [Peer(role, world) for role in ("decode", "decode", "prefill", "decode")]
    try:
        for peer in peers:
            assert peer.answer() == "imported"
        yield peers
    finally:
        for peer in peers:
            peer.end()


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, KILLED_S), (signal.SIGSTOP, STOPPED_S)])
def test_decode_dies(world: World, peers: list[Peer], number: int, within_s: float) -> None:
    decode = peers[0 if number == signal.SIGKILL else 1]
    decode("begin", 0)
    rooms = [world.room() for _ in range(2)]
    senders = [world.prefill.sender(room) for room in rooms]
    for at, (room, sender) in enumerate(zip(rooms, senders, strict=True)):
        decode("open", room)
        decode("give", room, pages=[2 * at, 2 * at + 1], row=at)
        start(sender, 2, 1)
    send(senders[1], [7])
    time.sleep(0.3)
    decode.signal(number)
    for sender in senders:
        wait(lambda sender=sender: sender.poll() == FAILED, within_s)
        assert "peer_gone" in reason(sender)


def test_the_scheduler_of_decode_ends(world: World, peers: list[Peer]) -> None:
    """By itself: then its peers are told before SGLang's main process is, which kills it."""
    decode = peers[3]
    decode("begin", 0)
    room = world.room()
    sender = world.prefill.sender(room)
    decode("open", room)
    decode("give", room, pages=[1, 2], row=1)
    start(sender, 2, 1)
    decode("end", 0)
    wait(lambda: sender.poll() == FAILED, LEFT_S)
    assert "has left: the engine ends" in reason(sender)


def test_prefill_dies(world: World, peers: list[Peer]) -> None:
    """And the next request is answered soon, and one that comes after a new prefill engine has its place succeeds."""
    world.server.close()
    wait(lambda: not is_heard(world.port))
    prefill, manager = peers[2], world.decode.manager
    prefill("begin", 0)
    manager.forget(world.address)
    rooms = [world.room() for _ in range(2)]
    receivers = []
    for room in rooms:
        prefill("open", room)
        receivers.append(world.decode.ask(room, [11 * (1 + len(receivers))], 1))
    wait(lambda: prefill("poll", rooms[0]) == WAITING)
    prefill.signal(signal.SIGKILL)
    for receiver in receivers:
        wait(lambda receiver=receiver: receiver.poll() == FAILED, KILLED_S)
        assert "peer_gone" in reason(receiver)
    receiver = world.decode.receiver(world.room())
    looked_s = 0.0

    def is_answered() -> bool:
        nonlocal looked_s
        if time.monotonic() - looked_s >= 1.0:  # as often as SGLang does
            looked_s = time.monotonic()
            manager.try_ensure_parallel_info(world.address)
        return bool(receiver.poll() == FAILED)

    wait(is_answered, 2.9)
    assert "no prefill engine answers" in reason(receiver)
    world.server = world.classes["bootstrap_server"]("127.0.0.1", world.port)
    wait(lambda: is_heard(world.port))
    world.prefill = world.rank("prefill")
    room = world.room()
    sender, receiver = world.prefill.sender(room), world.decode.ask(room, [9], 2)
    start(sender, 1, 2)
    send(sender, [4])
    wait_for(receiver, SUCCESS)
    wait_for(sender, SUCCESS)
