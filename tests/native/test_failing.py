"""A native core that broke: waiting threads get the error, and it is the last event."""

from __future__ import annotations

import pathlib
import select
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.errors import KvxferError
from tests.support import child
from tests.support.native.cuda_driver import build
from tests.support.native.nodes import NewId

STREAM = native.Lane.STREAM


def told_of_the_end(core: native.Core) -> list[Any]:
    """All that a core tells until it tells that it failed, by waiting for its descriptor alone."""
    told: list[Any] = []
    end = time.monotonic() + 10
    while not any(isinstance(event, native.CoreFailed) for event in told):
        assert select.select([core.fileno()], [], [], end - time.monotonic())[0], "nothing was told of the failure"
        told += core.drain()
    return told


def test_the_failure_is_the_last_that_is_told(nodes: Any, new_id: NewId, breaker: Any) -> None:
    """Also of a core with a transfer under way each way, and after everything that was told before."""
    peer = nodes("peer", block_bytes=1 << 20, blocks=48)
    break_loop = breaker()
    node = nodes("breaks", block_bytes=1 << 20, blocks=48)
    nodes.join(peer, node)
    there, back, waiting = new_id(), new_id(), new_id()
    node.grant(there, np.arange(24))
    peer.grant(back, np.arange(24))
    node.pull(waiting, peer, np.arange(24, 26), lanes=[STREAM])
    node.pull(back, peer, np.arange(26, 48), lanes=[STREAM])
    peer.pull(there, node, np.arange(24, 48), lanes=[STREAM])
    node.wait_begun(back)
    break_loop()
    peer.core.notify(node.ref, b"whatever wakes it")
    told = told_of_the_end(node.core)
    assert [type(event) for event in told].count(native.CoreFailed) == 1
    assert isinstance(told[-1], native.CoreFailed)
    assert "epoll" in told[-1].text
    for call in (
        lambda: node.core.end_grant(there, native.GrantEvent.REVOKE),
        lambda: node.core.notify(peer.ref, b""),
        lambda: node.core.remove_pool(7),
        lambda: node.pull(new_id(), peer, [1]),
    ):
        with pytest.raises(KvxferError, match="the native core failed"):
            call()
    time.sleep(0.1)
    assert not node.core.drain()
    assert not select.select([node.core.fileno()], [], [], 0)[0]
    node.core.close()
    nodes.made.remove(node)


HERE = pathlib.Path(__file__).parent
OUT_OF_MEMORY = """
import ctypes, os, pathlib, sys, threading, time
import numpy as np
from kvxfer._native import _core as native
from tests.support.native.nodes import Node, join

memory = ctypes.CDLL(None)
memory.has_come.restype = ctypes.c_bool

def in_a_thread(call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread

def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)

def waits_until_that_is_over(call):
    # What is under way has stopped where memory is to be missed.
    wait_for(memory.has_come)
    thread = in_a_thread(call)
    thread.join(0.2)
    assert thread.is_alive(), "nothing was under way"
    memory.go_on()
    thread.join(5)
    assert not thread.is_alive(), "still waited for"

directory, transfer = pathlib.Path(sys.argv[1]), os.urandom(16)
p = Node("source", directory, block_bytes=64, blocks=3001, has_checksums=True)
"""
CHECKSUMS = """
def announce():
    try:
        p.core.ready(transfer, 3001, complete=True)
    except MemoryError:
        errors.append("missed")

def take_back():
    p.core.end_grant(transfer, native.GrantEvent.REVOKE)
    p.core.remove_pool(7)

errors = []
p.grant(transfer, np.arange(3001), ready=0)
memory.fail_at(3001 * 4, 2)  # the checksums; before them comes the list of blocks
thread = in_a_thread(announce)
waits_until_that_is_over(take_back)
thread.join(5)
assert errors == ["missed"]
p.core.close()
"""
SEND = """
d = Node("reader", directory, block_bytes=64, blocks=3001, has_checksums=True)
join(p, d)
p.grant(transfer, np.arange(3001))
memory.fail_at(15361, 1)  # as the trailer of checksums grows
d.pull(transfer, p, np.arange(3001), lanes=[native.Lane.STREAM])
states = []
waits_until_that_is_over(lambda: states.append(p.core.end_grant(transfer, native.GrantEvent.REVOKE)))
assert states == [native.GrantState.REVOKED]
told = []
def is_told():
    told.extend(p.core.drain())
    return any(isinstance(event, native.CoreFailed) for event in told)
wait_for(is_told)
assert not p.core.drain() and isinstance(told[-1], native.CoreFailed), told
p.core.close()
d.core.close()
"""
FORK = """
import signal

def announce():
    try:
        p.core.ready(transfer, 3001, complete=True)
    except MemoryError:
        pass

p.grant(transfer, np.arange(3001), ready=0)
memory.fail_at(3001 * 4, 2)
threads = [in_a_thread(announce)]
wait_for(memory.has_come)
p.core.end_grant(transfer, native.GrantEvent.REVOKE)
threads.append(in_a_thread(lambda: p.core.remove_pool(7)))
time.sleep(0.2)
assert all(thread.is_alive() for thread in threads)
if (child := os.fork()) == 0:
    core = p.__dict__.pop("core")
    fileno = core.fileno()
    # What the frames of threads that are not here hold, a child keeps for ever; and may not.
    while sys.getrefcount(core) > 2:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(core))
    del core
    try:
        os.fstat(fileno)
    except OSError:
        os._exit(0)
    os._exit(1)
ended = []
waiter = in_a_thread(lambda: ended.append(os.waitpid(child, 0)))
waiter.join(10)
if not ended:
    os.kill(child, signal.SIGKILL)
waiter.join()
assert ended == [(child, 0)], ended
memory.go_on()
for thread in threads:
    thread.join(5)
    assert not thread.is_alive()
p.core.close()
"""


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("script", [CHECKSUMS, SEND], ids=["checksums", "send"])
def test_gather_ends_when_an_allocation_fails(
    private_directories: pathlib.Path, tmp_path: pathlib.Path, script: str
) -> None:
    """A look at blocks that ends by an exception has ended: a thread that takes the blocks back no longer waits for
    it."""
    run_with_failing_new(script, private_directories, tmp_path)


@pytest.mark.no_sanitizer
def test_a_forked_child_does_not_wait_for_threads_of_its_parent(
    private_directories: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """One that drops a core in which a thread of the parent waits, while another looks at blocks."""
    run_with_failing_new(FORK, private_directories, tmp_path)


def run_with_failing_new(script: str, directory: pathlib.Path, built: pathlib.Path) -> None:
    library = built / "failing_new.so"
    build(library, HERE / "failing_new.cpp")
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY + script, str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
        env=child.environment(LD_PRELOAD=str(library)),
    )
    assert done.returncode == 0, done.stderr


NO_MASK = """
import os, pathlib, select, sys, time
from kvxfer._native import _core as native
from tests.support.native.nodes import Node

def epolls():
    found = {}
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        try:
            if entry.readlink().name == "anon_inode:[eventpoll]":
                watched = pathlib.Path("/proc/self/fdinfo", entry.name).read_text().count("tfd:")
                found[int(entry.name)] = watched
        except FileNotFoundError:
            pass  # of the listing itself
    return found

node = Node("node", pathlib.Path(sys.argv[1]), core={"progress": "caller"})
[the_threads] = [fd for fd, watched in epolls().items() if watched == 2]  # the loop's epoll, and the wake
with open(os.devnull, "rb") as other:
    os.dup2(other.fileno(), the_threads, inheritable=False)
node.core.wait(10**8)
told, end = [], time.monotonic() + 20
while not any(isinstance(event, native.CoreFailed) for event in told):
    assert time.monotonic() < end, "the second epoll was not wanted"
    select.select([node.core.fileno()], [], [], 1)
    told += node.core.drain()
assert isinstance(told[-1], native.CoreFailed) and "epoll_ctl" in told[-1].text, told
assert not node.core.wait(10**7)
node.core.close()
"""


def test_caller_that_cannot_take_the_loop_fails_the_core_and_not_the_process(
    private_directories: pathlib.Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_MASK, str(private_directories)],
        capture_output=True,
        text=True,
        timeout=60,
        env=child.environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "the native core failed: epoll_ctl" in done.stderr
