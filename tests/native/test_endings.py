"""Endings that meet work under way: what is told stays in order, and who ended first is never overruled."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvxfer._native import _core as native
from kvxfer.errors import Closed, GrantUnknown, LimitExceeded

STREAM = native.Lane.STREAM
NewId = Callable[[], bytes]


def test_final_is_told_before_drained_while_a_send_is_waited_for(nodes: Any, new_id: NewId) -> None:
    """A death that ends a grant in the middle of a send, and a transfer in the middle of a landing."""
    a, b = nodes.pair(block_bytes=1 << 20, blocks=48)
    for round_ in range(60):
        there, back = new_id(), new_id()
        nodes.join(a, b)
        a.grant(there, np.arange(24))
        b.grant(back, np.arange(24))
        a.pull(back, b, np.arange(24, 48), lanes=[STREAM])
        b.pull(there, a, np.arange(24, 48), lanes=[STREAM])
        a.wait_for(native.TransferProgress, id=back)
        time.sleep(0.0002 * (round_ % 10))
        a.core.peer_dead(b.ref)
        b.core.peer_dead(a.ref)
        for node, transfer in ((a, back), (b, there)):
            node.wait_drained(transfer)
            told = [type(e) for e in node.events if getattr(e, "id", None) == transfer]
            assert told.index(native.TransferFinal) < told.index(native.TransferDrained)
            node.events.clear()
        for node, transfer in ((a, there), (b, back)):
            node.core.end_grant(transfer, native.GrantEvent.REVOKE)


def test_nothing_is_confirmed_once_the_owner_was_told_that_the_core_is_closed(nodes: Any, new_id: NewId) -> None:
    """Closed means that every grant is over: the owner may write its blocks before close() has returned."""
    count, size = 64, 32768
    d = nodes("reader", block_bytes=size, blocks=count)
    wrong = []
    for round_ in range(40):
        p = nodes(f"source{round_}", block_bytes=size, blocks=count)
        nodes.join(p, d)
        p.fill(1)
        d.fill(0xEE)
        ids = [new_id() for _ in range(count)]
        for block, transfer in enumerate(ids):
            p.grant(transfer, [block], ready=0)
            d.pull(transfer, p, [block], lanes=[STREAM])

        def announce(core: native.Core = p.core, ids: list[bytes] = ids) -> None:
            with contextlib.suppress(Closed):
                for transfer in ids:
                    core.ready(transfer, 1, complete=True)

        threads = [threading.Thread(target=announce), threading.Thread(target=p.core.close)]
        threads[0].start()
        time.sleep(0.0001 * (round_ % 12))
        threads[1].start()
        with contextlib.suppress(Closed):
            while True:
                with contextlib.suppress(GrantUnknown):
                    p.core.end_grant(bytes(16), native.GrantEvent.REVOKE)
        p.memory[::size] = 2
        for thread in threads:
            thread.join()
        d.core.peer_dead(p.ref)
        for block, transfer in enumerate(ids):
            is_committed = d.wait_drained(transfer).state == native.TransferState.COMMITTED
            if is_committed and d.memory[block * size] != 1:
                wrong.append((round_, block))
        d.events.clear()
    assert not wrong


def test_two_that_end_one_grant(nodes: Any, new_id: NewId) -> None:
    """Whoever comes second is told the same end."""
    p, d = nodes.pair(block_bytes=1 << 20, blocks=16)
    transfer = new_id()
    p.grant(transfer, np.arange(16))
    d.pull(transfer, p, np.arange(16), lanes=[STREAM])
    d.wait_for(native.TransferProgress, id=transfer)
    ends: list[native.GrantState] = []
    threads = [
        threading.Thread(target=lambda: ends.append(p.core.end_grant(transfer, native.GrantEvent.REVOKE)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ends)) == 1
    assert d.wait_drained(transfer).state in (native.TransferState.FAILED, native.TransferState.COMMITTED)


def test_one_refusal_a_connection(nodes: Any) -> None:
    """Nonsense after the frame that a connection is hung up for changes nothing any more."""
    p = nodes("source")
    with socket.create_connection(("127.0.0.1", p.core.tcp_port), 10) as noise:
        noise.sendall(native.encode(native.Ping(native.PingKind.ASK, 1)) + b"nonsense" * 4)
        while noise.recv(4096):
            pass
    p.wait_for(native.SessionRefused)
    p.take()
    assert len(p.find(native.SessionRefused)) == p.core.statistics().sessions_refused == 1


def test_little_is_kept_of_who_has_not_proven_itself(nodes: Any) -> None:
    """A frame as long as frames may be is refused long before it is whole."""
    p = nodes("source")
    with socket.create_connection(("127.0.0.1", p.core.tcp_port), 10) as stranger:
        stranger.sendall(b"KX\x01\x01" + (512 * 1024).to_bytes(4, "little") + bytes(8192))
        assert "before the session was proven" in p.wait_for(native.SessionRefused, 1.0).text


def test_notifications_that_nobody_takes_are_bounded(nodes: Any) -> None:
    """Empty ones too; and none is lost by it."""
    p, d = nodes.pair()
    sent = 0
    end = time.monotonic() + 30
    while sent < 67000 and time.monotonic() < end:
        try:
            p.core.notify(d.ref, b"")
            sent += 1
        except LimitExceeded:
            if p.core.statistics().dials > 1:  # hung up on, and at it again
                break
            p.take()
    waiting = [e.seq for e in d.core.drain() if isinstance(e, native.NotifReceived)]
    assert len(waiting) <= 65537
    d.wait(lambda _: len(waiting) + len(d.find(native.NotifReceived)) == sent, "the rest")


FORKING = """
import os, pathlib, signal, sys
from kvxfer._native import _core as native

path = sys.argv[1]
limits = native.EndpointLimits()
agent = native.AgentRef("forks", 1, bytes(16))
core = native.Core(agent, limits, bind_host="127.0.0.1", bind_port=0, unix_path=path)
core.start()
if (child := os.fork()) == 0:
    signal.alarm(20)
    core.close()
    os._exit(0)
assert os.waitpid(child, 0) == (child, 0)
assert pathlib.Path(path).is_socket()
core.close()
assert not pathlib.Path(path).exists()
"""


def test_a_forked_child_ends_nothing_of_its_parent(private_directories: pathlib.Path) -> None:
    """In a process of its own: what else this one has loaded has opinions of its own about forks."""
    path = private_directories / "forking"
    done = subprocess.run([sys.executable, "-c", FORKING, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
