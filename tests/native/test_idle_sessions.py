"""A session that idled, and was forgotten on its way without a word: the next to use it hardly waits."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from tests.support.native.nodes import NewId

STREAM = native.Lane.STREAM
COMMITTED = native.TransferState.COMMITTED
KEY = b"k" * 32
SIZE, COUNT = 65536, 16
STALL_S = 2.0
IDLE_S = 0.6
"""Longer than a session may be idle before it is asked whether it is there: a quarter of the stall."""
SOON_S = 3.0
"""A fifth of the stall and what a busy machine takes; without a probe, twice the stall. The machines' test is exact."""


class Middlebox:
    """Forwards TCP connections. It silently drops the bytes of those that it has forgotten, both ways."""

    def __init__(self, port: int) -> None:
        self.port, self.taken = port, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[1]
        self.forgotten = threading.Event()
        self.sockets: list[socket.socket] = []
        self.threads = [threading.Thread(target=self.serve)]
        self.threads[0].start()

    def serve(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            self.taken += 1
            far = socket.create_connection(("127.0.0.1", self.port))
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sockets += [near, far]
            for pair in ((near, far, self.forgotten), (far, near, self.forgotten)):
                self.threads.append(threading.Thread(target=self.forward, args=pair))
                self.threads[-1].start()

    def forward(self, origin: socket.socket, to: socket.socket, forgotten: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := origin.recv(65536):
                if not forgotten.is_set():
                    to.sendall(data)
        if forgotten.is_set():
            return
        for end in (origin, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """What there is; new connections are as good as ever."""
        forgotten, self.forgotten = self.forgotten, threading.Event()
        forgotten.set()

    def close(self) -> None:
        for end in [self.listener, *self.sockets]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(10)
        for end in [self.listener, *self.sockets]:
            end.close()


class Far:
    """Two nodes, `d` reaches `p` through a middlebox, by TCP."""

    def __init__(self, nodes: Any) -> None:
        limits = nodes.limits(stall_ns=int(STALL_S * 10**9))
        self.p = nodes("source", has_unix=False, limits=limits)
        self.d = nodes("reader", has_unix=False, limits=limits)
        self.box = Middlebox(self.p.core.tcp_port)
        self.d.core.set_peer(self.p.ref, KEY, tcp_host="127.0.0.1", tcp_port=self.box.address, unix_path="")
        self.p.core.set_peer(self.d.ref, KEY, tcp_host="127.0.0.1", tcp_port=self.d.core.tcp_port, unix_path="")
        self.theirs, self.ours = self.p.register(SIZE * COUNT), self.d.register(SIZE * COUNT)

    def move(self, verb: str, transfer: bytes) -> float:
        """A transfer of `d`'s; returns the seconds that it took."""
        source, target = (self.ours, self.theirs) if verb == "push" else (self.theirs, self.ours)
        source.memory[:] = np.frombuffer(np.random.default_rng(transfer[3]).bytes(SIZE * COUNT), np.uint8)
        target.memory[:] = 0xEE
        rows = [(self.ours.id, 0, SIZE, SIZE, COUNT)], [(self.theirs.id, 0, SIZE, SIZE, COUNT)]
        begun = time.monotonic()
        self.d.post(verb, transfer, self.p, *rows, lanes=[STREAM])
        final = self.d.wait_drained(transfer)
        took_s = time.monotonic() - begun
        assert final.state == COMMITTED, final.text
        assert np.array_equal(source.memory, target.memory)
        return took_s


@pytest.fixture
def far(nodes: Any) -> Iterator[Far]:
    made = Far(nodes)
    yield made
    made.d.core.close()
    made.p.core.close()
    made.box.close()


@pytest.mark.parametrize("verb", ["fetch", "push"])
def test_a_transfer_over_a_session_that_was_forgotten_takes_another_one_at_once(
    far: Far, new_id: NewId, verb: str
) -> None:
    far.move(verb, new_id())
    for round_ in range(2):
        time.sleep(IDLE_S)
        far.box.forget()
        assert far.move(verb, new_id()) < SOON_S
        assert far.box.taken == round_ + 2
    assert far.d.core.counts().sessions_up == 1


def test_a_pull_that_waits_for_its_grant_takes_another_session_at_once(far: Far, new_id: NewId) -> None:
    """Nothing but a probe is answered before there is a grant."""
    far.move("fetch", new_id())
    time.sleep(IDLE_S)
    far.box.forget()
    transfer = new_id()
    begun = time.monotonic()
    far.d.pull(transfer, far.p, [1, 2], lanes=[STREAM])
    far.d.wait(lambda _: far.box.taken == 2, "another session")
    far.p.wait(lambda _: far.p.core.counts().grants.waiting_pulls, "the pull")
    far.p.grant(transfer, [1, 2])
    assert far.d.wait_drained(transfer).state == COMMITTED
    assert time.monotonic() - begun < SOON_S


def test_a_notification_over_a_session_that_was_forgotten_arrives_soon(far: Far, new_id: NewId) -> None:
    far.move("fetch", new_id())
    time.sleep(IDLE_S)
    far.box.forget()
    begun = time.monotonic()
    far.d.core.notify(far.p.ref, b"hello")
    assert far.p.wait_for(native.NotifReceived).payload == b"hello"
    assert time.monotonic() - begun < SOON_S
    far.d.wait_for(native.NotifDelivered)


def test_a_session_that_idled_and_is_alive_is_kept(far: Far, new_id: NewId) -> None:
    far.move("fetch", new_id())
    for _ in range(2):
        time.sleep(IDLE_S)
        far.move("fetch", new_id())
        time.sleep(IDLE_S)
        far.d.core.notify(far.p.ref, b"hello")
    far.d.wait(lambda _: len(far.d.find(native.NotifDelivered)) == 2, "both notifications")
    assert far.box.taken == 1
    assert far.d.core.counts().sessions_up == 1


KEEPALIVE = 2


def timer_of(port: int) -> int:
    """What the kernel waits for on the connection accepted there: 0 nothing, 1 an acknowledgement, 2 to keep it up."""
    for line in pathlib.Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        _, local, _, state, _, timer = line.split()[:6]
        if state == "01" and int(local.rpartition(":")[2], 16) == port:
            return int(timer.partition(":")[0])
    raise AssertionError("no connection there")


def test_idle_sessions_are_kept_alive_by_the_kernel(far: Far, new_id: NewId) -> None:
    """Which wakes no thread."""
    far.move("fetch", new_id())
    far.p.wait(lambda _: timer_of(far.p.core.tcp_port) == KEEPALIVE, "the timer")
