"""Peers that die or stop, in processes of their own: the other side hears of it, and goes on with a peer that comes
back."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.connectors.sglang.source import RoomReader
from kvxfer.types import Role
from tests.support import child
from tests.support.sglang_core.cores import Copy, Rank, check, committed, new_id, options, running, until

KILLED_S, STOPPED_S = 1.5, 3.0
"""By then it is known that a process was killed (one second, and what a busy machine adds), or stopped."""


class Other:
    """A rank in another process."""

    def __init__(self, name: str, role: Role, directory: pathlib.Path) -> None:
        self.name = name
        command = child.command("sglang_core.rank_process", name, role, str(directory))
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child.environment()
        )
        self.events: list[list[Any]] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        until(lambda: self.events, 30.0)
        self.metadata = str(self.events[0][1])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def tell(self, *order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def wait(self, what: str, room: int) -> None:
        until(lambda: [what, room] in [event[:2] for event in self.events])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def other(name: str, role: Role, directory: pathlib.Path, rank: Rank) -> Iterator[Other]:
    """It and ``rank`` know each other."""
    made = Other(name, role, directory)
    try:
        made.tell("add_remote_agent", rank.core.export_metadata(), rank.name)
        rank.core.add_remote_agent(made.metadata, name)
        yield made
    finally:
        made.end()


def send_to(d: Other, p: Rank, room: int, state: str) -> None:
    """``d`` wants the room of ``p``, which comes to that state."""
    transfer_id = new_id()
    p.sources.accept(room)
    d.tell("begin", room, str(transfer_id), p.name, [1, 2])
    p.sources.reader(room, RoomReader(transfer_id, d.name, 0, 2))
    until(lambda: p.core.statistics().agent.grants.pulls_waiting == 1)
    if state != "queued":
        p.sources.send(room, 0, (7,), is_last=False)
        until(lambda: p.core.statistics().agent.grants.released > 0)
    if state == "fenced":
        p.sources.send(room, 1, (8,), is_last=True, aux_row=0, fence=threading.Event().wait)


@pytest.fixture
def rank(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Rank]:
    role: Role = request.param
    made = Rank("here", role, options(tmp_path))
    with running(made):
        yield made


@pytest.mark.parametrize("rank", [Role.PREFILL], indirect=True)
@pytest.mark.parametrize("state", ["queued", "chunk", "fenced"])
@pytest.mark.parametrize(("how", "within_s"), [(signal.SIGKILL, KILLED_S), (signal.SIGSTOP, STOPPED_S)])
def test_a_reader_that_is_lost_fails_its_rooms(
    tmp_path: pathlib.Path, rank: Rank, state: str, how: signal.Signals, within_s: float
) -> None:
    with other("d", Role.DECODE, tmp_path, rank) as d:
        send_to(d, rank, 5, state)
        d.process.send_signal(how)
        started_s = time.monotonic()
        assert rank.wait("unsent", 5)[2] == "peer_gone"
        assert time.monotonic() - started_s < within_s
        assert rank.core.statistics().agent.grants.alive == 0
        rank.sources.clear(5)
        if how is signal.SIGSTOP:  # it is no worse than another once it goes on
            d.process.send_signal(signal.SIGCONT)
            d.wait("failed", 5)
            works_again(d, rank)
    with other("d", Role.DECODE, tmp_path, rank) as d:
        works_again(d, rank)


def works_again(d: Other, p: Rank) -> None:
    transfer_id = new_id()
    until(lambda: p.core.statistics().agent.grants.pulls_waiting == 0)  # what waited for the lost room was turned away
    p.sources.accept(6)
    d.tell("begin", 6, str(transfer_id), p.name, [1, 2])
    p.sources.reader(6, RoomReader(transfer_id, d.name, 0, 2))
    until(lambda: p.core.statistics().agent.grants.pulls_waiting == 1)
    p.sources.send(6, 0, (7, 8), is_last=True, aux_row=0)
    p.wait("sent", 6)
    d.wait("done", 6)
    p.sources.clear(6)
    p.events.clear()


@pytest.mark.parametrize("rank", [Role.DECODE], indirect=True)
@pytest.mark.parametrize("state", ["begun", "queued", "chunk", "fenced"])
@pytest.mark.parametrize(("how", "within_s"), [(signal.SIGKILL, KILLED_S), (signal.SIGSTOP, STOPPED_S)])
def test_a_source_that_is_lost_fails_its_rooms(
    tmp_path: pathlib.Path, rank: Rank, state: str, how: signal.Signals, within_s: float
) -> None:
    with other("p", Role.PREFILL, tmp_path, rank) as p:
        transfer_id = new_id()
        rank.destinations.begin(5, transfer_id, [("p", 0)], (1, 2), 0)
        p.tell("accept", 5)
        if state != "begun":
            p.tell("reader", 5, str(transfer_id), "here", 2)
            until(lambda: rank.core.statistics().agent.pulls.queued == 1)
        if state in ("chunk", "fenced"):
            p.tell("send", 5, 0, [7], False, False)
            until(lambda: committed(rank) == 1)
        if state == "fenced":
            p.tell("send", 5, 1, [8], True, True)
            until(lambda: rank.core.statistics().agent.pools[0].reserved == 1)
        p.process.send_signal(how)
        started_s = time.monotonic()
        assert rank.wait("failed", 5)[2] == "peer_gone"
        assert time.monotonic() - started_s < within_s
        assert rank.destinations.is_drained(5)
        rank.destinations.clear(5)
        p.process.send_signal(signal.SIGCONT)
    with other("p", Role.PREFILL, tmp_path, rank) as p:
        transfer_id = new_id()
        rank.destinations.begin(5, transfer_id, [("p", 0)], (1, 2), 0)
        p.tell("accept", 5)
        p.tell("reader", 5, str(transfer_id), "here", 2)
        p.tell("write", [7, 8], 3)
        p.tell("send", 5, 0, [7, 8], True, False)
        rank.wait("done", 5)
        twin = Rank("twin", Role.PREFILL, options(tmp_path))
        twin.write(twin.kv, (7, 8), 3)
        check(twin, rank, Copy(((7, 8), (1, 2)), ((0,), (0,))))
