"""What a core holds on to: not memory that is not registered any more, nor a descriptor that a forked child has too."""

from __future__ import annotations

import contextlib
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvxfer._native import _core as native
from tests.support import child
from tests.support.native.nodes import NewId
from tests.support.native.rawpeer import KEY, RawPeer

SIZE = 64 << 20
"""More than sockets hold, and of no other region here."""
ELEMENT = 64 << 10


def mappings() -> int:
    """Of regions of that size in this process."""
    rows = re.findall(r"^(\w+)-(\w+) .*kvxfer region", pathlib.Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sum(int(end, 16) - int(begin, 16) == SIZE for begin, end in rows)


def comes_true(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture(params=[False, True], ids=["", "checksums"])
def stalled(nodes: Any, new_id: NewId, request: pytest.FixtureRequest) -> Iterator[tuple[Any, list[int]]]:
    """A core with three regions, and a peer that asked for all of the first two and takes nothing; the regions."""
    node, peer = nodes("source"), RawPeer()
    regions = [node.register(SIZE, is_exposed=False).id for _ in range(3)]
    node.core.set_peer(peer.ref, KEY, tcp_host="127.0.0.1", tcp_port=1, unix_path="")
    with contextlib.closing(peer):
        peer.dial(node.core)
        for region in regions[:2]:
            pull = native.Pull(
                new_id(), 1, 7, native.Lane.STREAM, 0, SIZE // ELEMENT, 0, bytes(32), 0, wants_checksums=request.param
            )
            peer.say(native.Fetch(pull, native.WireList([(region, 0, ELEMENT, ELEMENT, SIZE // ELEMENT)])))
        sent = [-1, 0]
        while len(sent) < 200 and (sent[-1] != sent[-2] or not sent[-1]):
            time.sleep(0.1)
            sent.append(node.core.statistics().bytes_streamed_out)
        assert 0 < sent[-1] == sent[-2] < SIZE, "it does not wait for a peer that takes nothing"
        assert mappings() == 3
        yield node, regions


def test_memory_of_a_reader_that_takes_nothing(stalled: tuple[Any, list[int]]) -> None:
    """What waits for it names one region, and keeps no other there, and not that one either when it is taken back."""
    node, (first, behind, other) = stalled
    for left, region in ((2, other), (1, behind)):
        node.core.remove_region(region)
        assert comes_true(lambda left=left: mappings() == left), "it is still mapped"
        time.sleep(0.1)
        assert mappings() == left, "what is being read was unmapped"
    node.core.remove_region(first)
    assert comes_true(lambda: mappings() == 0), "it is still mapped for a peer that takes nothing"
    assert node.core.counts().sessions_up == 1


FORKING = """
import os, pathlib, signal, sys, time
from kvxfer._native import _core as native
from tests.support.native.nodes import Node, join

directory = pathlib.Path(sys.argv[1])
a, b = Node("forks", directory), Node("peer", directory)
join(a, b)
a.fill_random()
for lane in (native.Lane.STREAM, native.Lane.MAPPED):
    transfer = os.urandom(16)
    a.grant(transfer, [1, 2])
    b.pull(transfer, a, [3, 4], lanes=[lane])
    assert b.wait_drained(transfer).state == native.TransferState.COMMITTED
if (child := os.fork()) == 0:
    signal.alarm(40)
    signal.pause()
try:
    for node, other in ((a, b), (b, a)):
        node.core.peer_dead(other.ref)
    end = time.monotonic() + 10
    while a.core.statistics().connections + b.core.statistics().connections:
        assert time.monotonic() < end, "a connection stayed"
        time.sleep(0.01)
    time.sleep(0.2)
    begun = time.process_time()
    time.sleep(1)
    print(time.process_time() - begun)
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for node in (a, b):
        node.core.close()
"""


@pytest.mark.no_sanitizer  # whose own locks, held by threads that a child does not have, stop it now and then
def test_connections_that_a_forked_child_holds_open(private_directories: pathlib.Path) -> None:
    """They are closed here, and cost nothing any more."""
    command = [sys.executable, "-c", FORKING, str(private_directories)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=child.environment())
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.3, "seconds of processor time in one second in which nothing happens"
