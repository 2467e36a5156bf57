"""Endings that meet work in progress: events stay in order, and the first end is never overruled."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.errors import ClosedError, GrantUnknownError, LimitExceededError
from tests.support import child
from tests.support.native.nodes import NewId

STREAM = native.Lane.STREAM


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
        a.wait_begun(back)
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
            with contextlib.suppress(ClosedError):
                for transfer in ids:
                    core.ready(transfer, 1, complete=True)

        threads = [threading.Thread(target=announce), threading.Thread(target=p.core.close)]
        threads[0].start()
        time.sleep(0.0001 * (round_ % 12))
        threads[1].start()
        with contextlib.suppress(ClosedError):
            while True:
                with contextlib.suppress(GrantUnknownError):
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


def test_two_that_end_one_grant(nodes: Any) -> None:
    """The second caller gets the same end."""
    p, d = nodes.pair(block_bytes=1 << 20, blocks=16)
    transfer = d.pull_granted(p, np.arange(16), np.arange(16), lanes=[STREAM])
    d.wait_begun(transfer)
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


def test_frame_before_the_proof_is_refused_early(nodes: Any) -> None:
    """A frame as long as frames may be is refused long before it is whole."""
    p = nodes("source")
    with socket.create_connection(("127.0.0.1", p.core.tcp_port), 10) as unknown:
        unknown.sendall(b"KX" + bytes([native.WIRE_VERSION, 1]) + (512 * 1024).to_bytes(4, "little") + bytes(8192))
        assert "before the session was proven" in p.wait_for(native.SessionRefused).text


def test_untaken_notifications_are_bounded(p: Any, d: Any) -> None:
    """Empty ones too; and none is lost by it."""
    sent = 0
    end = time.monotonic() + 30
    while sent < 67000 and time.monotonic() < end:
        try:
            p.core.notify(d.ref, b"")
            sent += 1
            end = time.monotonic() + 3  # both sides are full where none is taken for so long
        except LimitExceededError:
            if p.core.statistics().dials > 1:  # hung up on, and at it again
                break
            p.take()
    waiting = [e.seq for e in d.core.drain() if isinstance(e, native.NotifReceived)]
    assert len(waiting) <= 65537
    d.wait(lambda _: len(waiting) + len(d.find(native.NotifReceived)) == sent, "the rest")


FORKING = """
import os, pathlib, signal, sys
from kvxfer._native import _core as native
from tests.support.native.nodes import Node, join
from kvxfer.errors import ClosedError

STREAM = [native.Lane.STREAM]
directory = pathlib.Path(sys.argv[1])
a, b = Node("forks", directory), Node("peer", directory)
join(a, b)
theirs, ours = a.register(65536, is_foreign=True), b.register(65536)
rows = [(ours.id, 0, 65536, 65536, 1)], [(theirs.id, 0, 65536, 65536, 1)]
b.fetch(os.urandom(16), a, *rows, lanes=STREAM)
b.wait(lambda events: b.find(native.TransferFinal))
go, stop = os.pipe(), os.pipe()
if (child := os.fork()) == 0:
    signal.alarm(120)
    os.read(go[0], 1)
    os.set_blocking(stop[0], False)
    info = native.RegionInfo(77, 4096)
    calls = [a.core.drain, a.core.counts, lambda: a.core.remove_region(theirs.id), a.core.start, lambda: a.core.agent,
             lambda: a.core.peer_dead(b.ref), lambda: a.core.notify(b.ref, b"x"), lambda: a.register(4096),
             lambda: a.fetch(os.urandom(16), b, rows[1], rows[0]), lambda: a.grant(os.urandom(16), [1])]
    frames, answered = a.core.statistics().frames_in, 0
    is_over = False
    while not is_over:
        for call in calls:
            try:
                call()
                answered += 1
            except ClosedError as error:
                answered += "belongs to the process" not in str(error)
        try:
            is_over = bool(os.read(stop[0], 1))
        except BlockingIOError:
            pass
    a.core.close()
    os._exit(0 if not answered and a.core.statistics().frames_in == frames else 1)
a.core.remove_region(theirs.id)
theirs.memory[:] = 2
os.write(go[1], b"x")
for _ in range(100):
    transfer = os.urandom(16)
    b.fetch(transfer, a, *rows, lanes=STREAM, deadline_s=20)
    final = b.wait_drained(transfer)
    assert (final.state, final.code) == (native.TransferState.FAILED, native.Code.refused), (final.code, final.text)
os.write(stop[1], b"x")
assert os.waitpid(child, 0) == (child, 0)
assert pathlib.Path(a.core.unix_path).is_socket()
again = a.register(65536)
transfer = os.urandom(16)
b.fetch(transfer, a, rows[0], [(again.id, 0, 65536, 65536, 1)], lanes=[native.Lane.MAPPED])
assert b.wait_drained(transfer).state == native.TransferState.COMMITTED
a.core.close()
assert not pathlib.Path(a.core.unix_path).exists()
b.core.close()
"""


@pytest.mark.no_sanitizer  # whose own locks, held by threads that a child does not have, stop it now and then
def test_a_forked_child_has_no_part_in_its_parents_core(private_directories: pathlib.Path) -> None:
    """It ends nothing and answers no peer, least of all out of its copy of what the parent has taken back.

    In a process of its own: what else this one has loaded has opinions of its own about forks.
    """
    command = [sys.executable, "-c", FORKING, str(private_directories)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=child.environment())
    assert done.returncode == 0, done.stderr


def test_the_descriptor_is_not_readable_for_ever(nodes: Any, new_id: NewId) -> None:
    """Events that were taken before their signal was written: the next call takes that back."""
    node = nodes("owner")
    go, done = threading.Event(), threading.Event()
    is_over = False

    def end_grants() -> None:
        while True:
            go.wait()
            go.clear()
            if is_over:
                return
            transfer = new_id()
            node.grant(transfer, [1])
            node.core.end_grant(transfer, native.GrantEvent.REVOKE)
            done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=end_grants)
    thread.start()
    try:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            done.clear()
            go.set()
            while not done.is_set():
                node.core.drain()
            looks = 0
            while select.select([node.core.fileno()], [], [], 0)[0]:
                node.core.drain()
                looks += 1
                assert looks < 100
    finally:
        is_over = True
        go.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_a_grant_revoked_in_the_middle_of_checked_blocks(nodes: Any) -> None:
    """The reader is told what ended it: that the rest went out as zeros is no broken byte."""
    p, d = nodes.pair(block_bytes=1 << 20, blocks=64, has_checksums=True)
    for round_ in range(12):
        transfer = d.pull_granted(p, np.arange(64), np.arange(64), lanes=[STREAM])
        d.wait_begun(transfer)
        time.sleep(0.001 * (round_ % 6))
        p.core.end_grant(transfer, native.GrantEvent.REVOKE)
        final = d.wait_drained(transfer)
        if final.state != native.TransferState.COMMITTED:
            assert final.code == native.Code.grant_revoked, final.text
    assert d.core.statistics().checksum_failures == 0


def test_a_push_that_cannot_be_told_is_answered(nodes: Any, new_id: NewId) -> None:
    """Notifications that the program does not take cost their sender this push, and not the session."""
    p, d = nodes.pair(limits=nodes.limits())
    source, target = p.register(4096), d.register(4096)
    rows = [(source.id, 0, 64, 64, 1)], [(target.id, 0, 64, 64, 1)]
    first = new_id()
    p.push(first, d, *rows, lanes=[STREAM], notification=b"x")
    assert p.wait_drained(first).state == native.TransferState.COMMITTED
    payload = bytes(60000)
    codes = set()
    end = time.monotonic() + 30
    while not codes and time.monotonic() < end:
        ids = [new_id() for _ in range(32)]
        for transfer in ids:
            p.push(transfer, d, *rows, lanes=[STREAM], notification=payload)
        codes = {p.wait_drained(transfer).code for transfer in ids} - {native.Code.ok}
    assert codes == {native.Code.overloaded}
    transfer = new_id()
    p.push(transfer, d, *rows, lanes=[STREAM])
    assert p.wait_drained(transfer).state == native.TransferState.COMMITTED
    assert p.core.statistics().dials == 1


@pytest.mark.nightly  # 66,000 posts
@pytest.mark.no_sanitizer  # a minute of the same two threads
def test_untaken_ended_offers_are_bounded(p: Any, d: Any) -> None:
    """By the oldest of them; nothing else is lost."""
    source, target = p.register(4096), d.register(4096)
    p.core.notify(d.ref, b"before")
    size = 32
    left = 66000
    while left > 0:
        ids = [os.urandom(16) for _ in range(size)]
        for transfer in ids:
            p.push(transfer, d, [(source.id, 0, 1, 1, 1)], [(target.id, 0, 1, 1, 1)], lanes=[STREAM])
        for transfer in ids:
            p.wait_drained(transfer)
        p.events.clear()
        left -= size
    events = d.core.drain()
    assert 32768 <= sum(isinstance(event, native.OfferEnded) for event in events) <= 65536
    assert sum(isinstance(event, native.NotifReceived) for event in events) == 1
