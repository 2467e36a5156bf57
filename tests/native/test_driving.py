"""A caller that waits does the loop's work itself: what it waits for comes, and everybody else's goes on."""

from __future__ import annotations

import os
import select
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native

COMMITTED = native.TransferState.COMMITTED
NewId = Callable[[], bytes]
LANES = [native.Lane.MAPPED, native.Lane.UNIX, native.Lane.STREAM]
SECOND = 10**9


def drive(node: Any, transfer: bytes, timeout_s: float = 30.0) -> Any:
    """Wait, and take what came, until the transfer is final; who takes is the only one who does."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        node.core.wait(SECOND)
        for event in node.core.drain():
            if isinstance(event, native.TransferFinal) and event.id == transfer:
                return event
    raise AssertionError(f"{transfer.hex()} did not end")


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name.lower())
def test_who_waits_moves(nodes: Any, new_id: NewId, lane: native.Lane) -> None:
    p, d = nodes.pair(block_bytes=65536, blocks=256)
    p.fill_random()
    for _ in range(3):
        d.fill(0)
        transfer = new_id()
        p.grant(transfer, range(256))
        d.pull(transfer, p, range(256), lanes=[lane])
        assert drive(d, transfer).state == COMMITTED
        assert d.memory.tobytes() == p.memory.tobytes()


def test_nothing_to_come_is_waited_for_no_longer_than_asked(nodes: Any) -> None:
    _, d = nodes.pair()
    begin = time.monotonic()
    assert not d.core.wait(SECOND // 5)
    assert 0.15 < time.monotonic() - begin < 5.0


def test_the_core_goes_on_when_the_driver_has_left(nodes: Any, new_id: NewId) -> None:
    p, d = nodes.pair()
    for _ in range(20):
        transfer = new_id()
        p.grant(transfer, [1, 2])
        d.pull(transfer, p, [1, 2], lanes=[native.Lane.MAPPED])
        d.core.wait(1)  # long enough to take the loop, too short to see the end
        assert d.wait_drained(transfer).state == COMMITTED


def test_many_wait_on_one_core(nodes: Any, new_id: NewId) -> None:
    """One of them drives, whoever else waits comes back too, and sessions with others are served meanwhile."""
    p, d = nodes.pair(block_bytes=4096, blocks=256)
    p.fill_random()
    stop = threading.Event()
    returned = [0] * 4

    def waits(index: int) -> None:
        while not stop.is_set():
            d.core.wait(SECOND // 20)
            returned[index] += 1

    threads = [threading.Thread(target=waits, args=[index]) for index in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            transfer = new_id()
            p.grant(transfer, range(256))
            d.pull(transfer, p, range(256), lanes=[native.Lane.STREAM])
            assert d.wait_drained(transfer).state == COMMITTED
        p.wait(lambda _: p.is_idle())
        back = new_id()  # the driven core as the source
        d.grant(back, [3])
        p.pull(back, d, [4], lanes=[native.Lane.STREAM])
        assert p.wait_drained(back).state == COMMITTED
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert all(returned)


@pytest.mark.parametrize("verb", ["fetch", "push", "notify"])
def test_a_post_beside_a_long_wait(nodes: Any, new_id: NewId, verb: str) -> None:
    """Who posts cannot do the loop's work while another thread drives it: that one is woken for it."""
    p, d = nodes.pair()
    theirs, ours = p.register(65536), d.register(65536)
    d.core.notify(p.ref, b"the session is up")
    p.wait_for(native.NotifReceived)
    p.events.clear()
    d.wait_for(native.NotifDelivered)
    waiting = threading.Thread(target=d.core.wait, args=[60 * SECOND])
    waiting.start()
    time.sleep(0.3)  # it is asleep, driving
    begin = time.monotonic()
    if verb == "notify":
        d.core.notify(p.ref, b"hear me")
        p.wait_for(native.NotifReceived)
    else:
        theirs.memory[:4096] = ours.memory[4096:8192] = 7
        mine, peers = (0, 0) if verb == "fetch" else (4096, 4096)
        rows = [(ours.id, mine, 0, 4096, 1)], [(theirs.id, peers, 0, 4096, 1)]
        transfer = new_id()
        getattr(d, verb)(transfer, p, *rows, lanes=[native.Lane.UNIX])
        assert d.wait_drained(transfer).state == COMMITTED
        landed = ours.piece(0, 4096) if verb == "fetch" else theirs.piece(4096, 4096)
        assert landed == bytes([7]) * 4096
    assert time.monotonic() - begin < 10
    d.core.close()
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_deadline_of_a_post_is_kept_when_nobody_calls_the_core_again(nodes: Any, new_id: NewId) -> None:
    """The core's own thread slept before, without a deadline, and who posted did the first of the work."""
    p, d = nodes.pair()
    theirs, ours = p.register(4096), d.register(4096)
    first = new_id()
    rows = [(ours.id, 0, 0, 4096, 1)], [(theirs.id, 0, 0, 4096, 1)]
    d.fetch(first, p, *rows, lanes=[native.Lane.UNIX])
    assert d.wait_drained(first).state == COMMITTED
    time.sleep(0.3)  # it sleeps, and nothing is due
    p.core.close()
    d.wait(lambda _: d.core.counts().sessions_up == 0, "the session's end")
    time.sleep(0.3)
    begin = time.monotonic()
    second = new_id()
    d.fetch(second, p, *rows, lanes=[native.Lane.UNIX], deadline_s=0.5)
    assert select.select([d.core.fileno()], [], [], 20.0)[0], "the end of it is told"
    assert time.monotonic() - begin < 10
    final = d.wait_drained(second)
    assert final.state == native.TransferState.FAILED


@pytest.mark.parametrize("how", ["poll", "wait"])
def test_what_is_left_to_say_is_said_although_nobody_calls_the_core_again(nodes: Any, new_id: NewId, how: str) -> None:
    """Who polls or waits is told of the end first; that the source's grant may end too is the core's own thread's."""
    p, d = nodes.pair()
    theirs, ours = p.register(4096), d.register(4096)
    theirs.memory[:] = 7
    rows = [(ours.id, 0, 0, 4096, 1)], [(theirs.id, 0, 0, 4096, 1)]
    begin = time.monotonic()
    for _ in range(20):
        transfer = new_id()
        d.fetch(transfer, p, *rows, lanes=[native.Lane.UNIX])
        end = time.monotonic() + 10
        while not any(isinstance(event, native.TransferFinal) for event in d.core.drain()):
            assert time.monotonic() < end
            if how == "wait":
                d.core.wait(SECOND)
        while any(region.grants for region in p.core.counts().regions):
            assert time.monotonic() - begin < 8, "the end of a grant waits for some deadline"
            time.sleep(0.001)
    assert ours.piece(0, 4096) == bytes([7]) * 4096


@pytest.mark.parametrize("turn", range(5))
def test_closing_ends_a_wait(nodes: Any, turn: int) -> None:
    """The word that wakes the driver is not lost for the core's own thread, which sleeps too."""
    _, d = nodes.pair()
    waiting = threading.Thread(target=d.core.wait, args=[60 * SECOND])
    waiting.start()
    time.sleep(0.1)
    closing = threading.Thread(target=d.core.close)
    closing.start()
    for thread in (waiting, closing):
        thread.join(10)
        assert not thread.is_alive()
    assert not d.core.wait(SECOND // 100)


def test_a_signal_ends_a_wait() -> None:
    code = textwrap.dedent(
        """
        import signal, time
        from kvxfer._native import _core as native
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
        ref = native.AgentRef("a", 1, b"n" * 16)
        core = native.Core(ref, native.EndpointLimits(), bind_host="127.0.0.1", bind_port=0, unix_path="")
        core.start()
        print("up", flush=True)
        try:
            while True:
                core.wait(60 * 10**9)
        except KeyboardInterrupt:
            core.close()
            print("interrupted", flush=True)
        """
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(10) == 0


def test_progress_does_not_end_a_wait(nodes: Any, new_id: NewId) -> None:
    """Of a pull that waits for its source the driver is told with the next news, not block by block."""
    p, d = nodes.pair(block_bytes=4096, blocks=16)
    transfer = new_id()
    p.grant(transfer, range(16), ready=0)
    d.pull(transfer, p, range(16), lanes=[native.Lane.MAPPED])
    for ready in range(1, 16):
        p.core.ready(transfer, ready, complete=False)
        begin = time.monotonic()
        d.core.wait(SECOND // 50)
        news = [event for event in d.take() if not isinstance(event, native.TransferProgress)]
        assert news or time.monotonic() - begin > 0.01, "woken, and for nothing else"
    p.core.ready(transfer, 16, complete=True)
    assert drive(d, transfer).state == COMMITTED
    assert np.array_equal(d.memory[: 16 * 4096], p.memory[: 16 * 4096])


def is_signalled(node: Any, timeout_s: float) -> bool:
    return bool(select.select([node.core.fileno()], [], [], timeout_s)[0])


def test_what_others_bring_beside_a_taker_is_signalled(nodes: Any, new_id: NewId) -> None:
    _, d = nodes.pair()
    while is_signalled(d, 0.1):
        d.take()
    taker = threading.Thread(target=d.core.take, args=[60 * SECOND])
    taker.start()
    time.sleep(0.05)
    grant = new_id()
    d.grant(grant, [1])
    d.core.end_grant(grant, native.GrantEvent.REVOKE)
    assert is_signalled(d, 1.0) or not taker.is_alive(), "it waits for the taker, who waits for something else"
    d.core.close()
    taker.join(10)
    assert not taker.is_alive()


def test_after_a_poll_brought_the_end_nothing_is_signalled_for_ever(nodes: Any, new_id: NewId) -> None:
    p, d = nodes.pair()
    p.fill_random()
    for _ in range(50):
        transfer, brought = new_id(), []
        p.grant(transfer, [1])
        d.pull(transfer, p, [1], lanes=[native.Lane.MAPPED])
        until = time.monotonic() + 10
        while not any(isinstance(event, native.TransferDrained) for event in brought) and time.monotonic() < until:
            brought += d.core.drain()
        assert [event.state for event in brought if isinstance(event, native.TransferFinal)] == [COMMITTED]
    while is_signalled(d, 0.1) and time.monotonic() < until:  # a signal of the core's thread may be under way yet
        assert not d.core.drain()
    assert not is_signalled(d, 0.0)


class Interrupted(BaseException):
    pass


def test_what_a_signal_interrupts_is_taken_next(nodes: Any, new_id: NewId) -> None:
    def interrupt(*_: Any) -> None:
        raise Interrupted

    blocks = range(1024)
    p, d = nodes.pair(block_bytes=65536, blocks=len(blocks))
    p.fill_random()
    main, interrupted = threading.main_thread().ident, 0
    assert main is not None
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        for delay_s in (0.001, 0.002, 0.004, 0.008):
            transfer, taken = new_id(), []
            p.grant(transfer, blocks)
            d.pull(transfer, p, blocks, lanes=[native.Lane.MAPPED])
            sending = threading.Timer(delay_s, signal.pthread_kill, [main, signal.SIGUSR1])
            until = time.monotonic() + 10
            while True:
                try:
                    if not sending.ident:
                        sending.start()
                    taken += d.core.take(SECOND // 50)
                    if not sending.is_alive() and any(isinstance(event, native.TransferDrained) for event in taken):
                        break
                except Interrupted:  # as a rule while this thread copies, and not while it sleeps
                    interrupted += 1
                assert time.monotonic() < until, taken
            assert [event.state for event in taken if isinstance(event, native.TransferFinal)] == [COMMITTED]
            p.wait(lambda _: p.is_idle())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert interrupted == 4


@pytest.mark.parametrize("what", ["its own pull goes on", "a peer pulls from it"])
def test_who_polls_and_gives_up_leaves_the_sockets_to_the_core(nodes: Any, new_id: NewId, what: str) -> None:
    """While a caller polls, the core's own thread hears of no socket; a caller that went away must not leave it so."""
    p, d = nodes.pair(block_bytes=4096, blocks=8)
    p.fill_random()
    d.fill_random()
    took = []
    for at in range(20):
        source, target = (p, d) if what == "its own pull goes on" else (d, p)
        waiting, transfer = new_id(), new_id()
        d.pull(waiting, p, [1], lanes=[native.Lane.UNIX])  # nothing grants it yet
        for _ in range(4 + 2 * at):
            d.core.drain()
        begin = time.monotonic()
        if target is d:
            transfer = waiting
            p.grant(waiting, [0])
            assert select.select([d.core.fileno()], [], [], 5.0)[0], "the end of it is told"
        else:
            d.grant(transfer, [0])
            p.pull(transfer, d, [0], lanes=[native.Lane.UNIX])
            assert select.select([p.core.fileno()], [], [], 5.0)[0], "the end of it is told"
        took.append(time.monotonic() - begin)
        assert target.wait_drained(transfer).state == COMMITTED
        if transfer != waiting:
            d.core.cancel(waiting)
            d.wait_drained(waiting)
        assert source.core.counts().transfers_live == 0
    assert statistics.median(took) < 0.5, "it waited for a silence to be noticed"


@pytest.mark.parametrize("how", ["poll", "wait"])
@pytest.mark.parametrize("pieces", [1, 512], ids=["small", "large"])
def test_who_came_back_each_time_and_now_does_not_is_told_all_the_same(
    nodes: Any, new_id: NewId, how: str, pieces: int
) -> None:
    """The core's own thread leaves a post to whoever polled or waited for his last ones, but not for ever."""
    p, d = nodes.pair()
    length = 8192 * pieces
    theirs, ours = p.register(length), d.register(length)
    theirs.memory[:] = np.random.default_rng(pieces).integers(1, 256, length, dtype=np.uint8)
    rows = [(ours.id, 0, 8192, 8192, pieces)], [(theirs.id, 0, 8192, 8192, pieces)]
    took = []
    for turn in range(15):
        comes_back = turn % 3 != 2
        ours.memory[:] = 0
        transfer, came = new_id(), []
        time.sleep(0.02)  # the core's own thread sleeps
        begin = time.monotonic()
        d.fetch(transfer, p, *rows, lanes=[native.Lane.CMA])
        while comes_back and not any(isinstance(event, native.TransferDrained) for event in came):
            if how == "wait":
                d.core.wait(SECOND)
            came += d.core.drain()
            assert time.monotonic() - begin < 10
        if not comes_back:
            final = None
            while final is None and is_signalled(d, 5.0):  # nobody calls the core until it says that it has something
                came = d.core.drain()
                final = next((event for event in came if isinstance(event, native.TransferFinal)), None)
            took.append(time.monotonic() - begin)
        assert [event.state for event in came if isinstance(event, native.TransferFinal)] == [COMMITTED]
        assert np.array_equal(ours.memory, theirs.memory)
        d.wait(lambda _: d.core.counts().transfers_draining == 0)
    assert statistics.median(took) < 0.5, "it waited for a silence to be noticed"
