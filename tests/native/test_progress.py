"""Which threads run a core's event loop: its own, and with progress "caller" also one that posts, drains or waits.

In both modes a caller gets what it waits for, and what other threads and peers wait for goes on.
"""

from __future__ import annotations

import functools
import os
import select
import signal
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
from kvxfer.errors import InvalidArgumentError
from tests.support.native.nodes import NewId

COMMITTED = native.TransferState.COMMITTED
MakePair = Callable[..., tuple[Any, Any]]
LANES = [native.Lane.MAPPED, native.Lane.UNIX, native.Lane.STREAM]
SECOND = 10**9
MODES = ["thread", "caller"]


@pytest.fixture(params=MODES)
def pair(nodes: Any, request: pytest.FixtureRequest) -> MakePair:
    """Makes a source and a reader that know each other, both with the progress mode of the test."""
    return functools.partial(nodes.pair, core={"progress": request.param})


def wait_final(node: Any, transfer: bytes, timeout_s: float = 30.0) -> Any:
    """Wait, and drain, until the transfer is final; no other thread drains."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        node.core.wait(SECOND)
        for event in node.core.drain():
            if isinstance(event, native.TransferFinal) and event.id == transfer:
                return event
    raise AssertionError(f"{transfer.hex()} did not end")


def is_signalled(node: Any, timeout_s: float) -> bool:
    return bool(select.select([node.core.fileno()], [], [], timeout_s)[0])


def test_progress_of_another_name_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match='"thread" or "caller"'):
        native.Core(
            native.AgentRef("a", 1, b"n" * 16),
            native.EndpointLimits(),
            bind_host="127.0.0.1",
            bind_port=0,
            unix_path="",
            progress="both",
        )


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name.lower())
def test_wait_until_a_pull_is_final_brings_every_block(pair: MakePair, lane: native.Lane) -> None:
    p, d = pair(block_bytes=65536, blocks=256)
    p.fill_random()
    for _ in range(3):
        d.fill(0)
        transfer = d.pull_granted(p, range(256), range(256), lanes=[lane])
        assert wait_final(d, transfer).state == COMMITTED
        assert d.memory.tobytes() == p.memory.tobytes()


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name.lower())
def test_drain_in_a_loop_until_a_pull_is_final_brings_every_block(
    pair: MakePair, new_id: NewId, lane: native.Lane
) -> None:
    p, d = pair(block_bytes=65536, blocks=256)
    p.fill_random()
    for _ in range(3):
        d.fill(0)
        transfer, came = new_id(), []
        p.grant(transfer, range(256))
        d.pull(transfer, p, range(256), lanes=[lane])
        end = time.monotonic() + 30
        while not any(isinstance(event, native.TransferFinal) for event in came):
            came += d.core.drain()
            assert time.monotonic() < end
        assert [event.state for event in came if isinstance(event, native.TransferFinal)] == [COMMITTED]
        assert d.memory.tobytes() == p.memory.tobytes()
        d.wait(lambda _: d.core.counts().transfers_draining == 0, "the drain")


def test_wait_without_news_lasts_as_long_as_asked(pair: MakePair) -> None:
    _, d = pair()
    begin = time.monotonic()
    assert not d.core.wait(SECOND // 5)
    assert 0.15 < time.monotonic() - begin < 5.0


def test_wait_that_ends_early_leaves_the_pull_to_the_io_thread(pair: MakePair) -> None:
    p, d = pair()
    for _ in range(20):
        transfer = d.pull_granted(p, [1, 2], [1, 2], lanes=[native.Lane.MAPPED])
        d.core.wait(1)  # long enough to run the loop, too short to see the end
        assert d.wait_drained(transfer).state == COMMITTED


def test_four_threads_that_wait_all_return_and_transfers_go_on(pair: MakePair, new_id: NewId) -> None:
    p, d = pair(block_bytes=4096, blocks=256)
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
            transfer = d.pull_granted(p, range(256), range(256), lanes=[native.Lane.STREAM])
            assert d.wait_drained(transfer).state == COMMITTED
        p.wait(lambda _: p.is_idle())
        back = new_id()  # the waiting core as the source
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
def test_post_beside_a_long_wait_of_another_thread_is_carried_out(pair: MakePair, new_id: NewId, verb: str) -> None:
    p, d = pair()
    theirs, ours = p.register(65536), d.register(65536)
    d.core.notify(p.ref, b"the session is up")
    p.wait_for(native.NotifReceived)
    p.events.clear()
    d.wait_for(native.NotifDelivered)
    stop = threading.Event()

    def waits() -> None:
        while not stop.is_set():
            d.core.wait(60 * SECOND)

    waiting = threading.Thread(target=waits)
    waiting.start()
    time.sleep(0.3)  # it is asleep
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
        landed = ours.element(0, 4096) if verb == "fetch" else theirs.element(4096, 4096)
        assert landed == bytes([7]) * 4096
    assert time.monotonic() - begin < 10
    stop.set()
    d.core.close()
    waiting.join(10)
    assert not waiting.is_alive()


def test_deadline_of_a_post_is_kept_although_no_thread_calls_the_core_again(pair: MakePair, new_id: NewId) -> None:
    """The IO thread slept without a deadline before, and with progress "caller" the post did the first of the work."""
    p, d = pair()
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
    assert is_signalled(d, 20.0), "the end of it is told"
    assert time.monotonic() - begin < 10
    assert d.wait_drained(second).state == native.TransferState.FAILED


@pytest.mark.parametrize("call", ["drain", "wait"])
def test_grant_expires_on_time_beside_and_after_calls(pair: MakePair, new_id: NewId, call: str) -> None:
    """The source's owner is told, whether its threads call the core or have gone away after a call."""
    p, _ = pair()
    for is_calling in (True, False):
        grant, begin = new_id(), time.monotonic()
        p.grant(grant, [1], ttl_s=0.4)
        while is_calling and time.monotonic() - begin < 1.0 and not p.find(native.GrantEnded, id=grant):
            if call == "wait":
                p.core.wait(SECOND // 20)
            p.take()
        if call == "wait":
            p.core.wait(1)
        p.take()
        ended = p.wait_for(native.GrantEnded, 10.0, id=grant)
        assert ended.state == native.GrantState.EXPIRED
        assert 0.35 < time.monotonic() - begin < 5.0


@pytest.mark.parametrize("call", ["drain", "wait"])
def test_release_is_sent_although_no_thread_calls_the_core_again(pair: MakePair, new_id: NewId, call: str) -> None:
    p, d = pair()
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
            if call == "wait":
                d.core.wait(SECOND)
        while any(region.grants for region in p.core.counts().regions):
            assert time.monotonic() - begin < 8, "the end of a grant waits for some deadline"
            time.sleep(0.001)
    assert ours.element(0, 4096) == bytes([7]) * 4096


@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("threads", [1, 3])
def test_close_ends_every_wait(pair: MakePair, threads: int, turn: int) -> None:
    _, d = pair()
    waiting = [threading.Thread(target=d.core.wait, args=[60 * SECOND]) for _ in range(threads)]
    for thread in waiting:
        thread.start()
    time.sleep(0.1)
    closing = threading.Thread(target=d.core.close)
    closing.start()
    for thread in (*waiting, closing):
        thread.join(10)
        assert not thread.is_alive()
    assert not d.core.wait(SECOND // 100)


@pytest.mark.parametrize("progress", MODES)
def test_signal_ends_a_wait(progress: str) -> None:
    code = textwrap.dedent(
        """
        import signal, sys, time
        from kvxfer._native import _core as native
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell of the tests may ignore it
        ref = native.AgentRef("a", 1, b"n" * 16)
        core = native.Core(ref, native.EndpointLimits(), bind_host="127.0.0.1", bind_port=0, unix_path="",
                           progress=sys.argv[1])
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
    with subprocess.Popen([sys.executable, "-c", code, progress], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(10) == 0


def test_progress_of_a_transfer_does_not_end_a_wait(pair: MakePair, new_id: NewId) -> None:
    p, d = pair(block_bytes=4096, blocks=16)
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
    assert wait_final(d, transfer).state == COMMITTED
    assert np.array_equal(d.memory[: 16 * 4096], p.memory[: 16 * 4096])


def test_news_that_another_thread_makes_ends_a_wait(pair: MakePair, new_id: NewId) -> None:
    _, d = pair()
    while is_signalled(d, 0.1):
        d.take()
    for _ in range(5):
        waiting = threading.Thread(target=d.core.wait, args=[60 * SECOND])
        waiting.start()
        time.sleep(0.05)
        grant = new_id()
        d.grant(grant, [1])
        d.core.end_grant(grant, native.GrantEvent.REVOKE)
        waiting.join(10)
        assert not waiting.is_alive()
        assert is_signalled(d, 1.0)
        d.take()


def test_descriptor_is_not_readable_for_ever_after_drain_took_the_end(pair: MakePair, new_id: NewId) -> None:
    p, d = pair()
    p.fill_random()
    for _ in range(50):
        transfer, brought = new_id(), []
        p.grant(transfer, [1])
        d.pull(transfer, p, [1], lanes=[native.Lane.MAPPED])
        until = time.monotonic() + 10
        while not any(isinstance(event, native.TransferDrained) for event in brought) and time.monotonic() < until:
            brought += d.core.drain()
        assert [event.state for event in brought if isinstance(event, native.TransferFinal)] == [COMMITTED]
    while is_signalled(d, 0.1) and time.monotonic() < until:  # a signal of the IO thread may be under way yet
        assert not d.core.drain()
    assert not is_signalled(d, 0.0)


class Interrupted(BaseException):
    pass


def test_events_of_a_wait_that_a_signal_interrupts_are_drained_next(pair: MakePair) -> None:
    def interrupt(*_: Any) -> None:
        raise Interrupted

    blocks = range(1024)
    p, d = pair(block_bytes=65536, blocks=len(blocks))
    p.fill_random()
    main, interrupted = threading.main_thread().ident, 0
    assert main is not None
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        for delay_s in (0.001, 0.002, 0.004, 0.008):
            d.pull_granted(p, blocks, blocks, lanes=[native.Lane.MAPPED])
            sending = threading.Timer(delay_s, signal.pthread_kill, [main, signal.SIGUSR1])
            until = time.monotonic() + 10
            try:
                sending.start()  # may be interrupted itself, on a busy machine
                while sending.is_alive():
                    d.core.wait(SECOND // 50)
                    time.sleep(0)
                sending.join()
                time.sleep(0.01)
            except Interrupted:
                interrupted += 1
            taken: list[Any] = []
            while not any(isinstance(event, native.TransferDrained) for event in taken):
                d.core.wait(SECOND // 50)
                taken += d.core.drain()
                assert time.monotonic() < until, taken
            assert [event.state for event in taken if isinstance(event, native.TransferFinal)] == [COMMITTED]
            p.wait(lambda _: p.is_idle())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert interrupted == 4


@pytest.mark.parametrize("what", ["its own pull goes on", "a peer pulls from it"])
def test_caller_that_stops_polling_leaves_the_sockets_to_the_io_thread(
    pair: MakePair, new_id: NewId, what: str
) -> None:
    p, d = pair(block_bytes=4096, blocks=8)
    p.fill_random()
    d.fill_random()
    for at in range(20):
        source, target = (p, d) if what == "its own pull goes on" else (d, p)
        waiting, transfer = new_id(), new_id()
        d.pull(waiting, p, [1], lanes=[native.Lane.UNIX])  # nothing grants it yet
        for _ in range(4 + 2 * at):
            d.core.drain()
        if target is d:
            transfer = waiting
            p.grant(waiting, [0])
        else:
            d.grant(transfer, [0])
            p.pull(transfer, d, [0], lanes=[native.Lane.UNIX])
        assert is_signalled(target, 5.0), "the end of it is told"
        assert target.wait_drained(transfer).state == COMMITTED
        if transfer != waiting:
            d.core.cancel(waiting)
            d.wait_drained(waiting)
        assert source.core.counts().transfers_live == 0


@pytest.mark.parametrize("call", ["drain", "wait"])
@pytest.mark.parametrize("elements", [1, 512], ids=["small", "large"])
def test_caller_that_came_back_each_time_and_does_not_any_more_is_told_all_the_same(
    pair: MakePair, new_id: NewId, call: str, elements: int
) -> None:
    p, d = pair()
    length = 8192 * elements
    theirs, ours = p.register(length), d.register(length)
    theirs.memory[:] = np.random.default_rng(elements).integers(1, 256, length, dtype=np.uint8)
    rows = [(ours.id, 0, 8192, 8192, elements)], [(theirs.id, 0, 8192, 8192, elements)]
    for turn in range(15):
        comes_back = turn % 3 != 2
        ours.memory[:] = 0
        transfer, came = new_id(), []
        time.sleep(0.02)  # the IO thread sleeps
        begin = time.monotonic()
        d.fetch(transfer, p, *rows, lanes=[native.Lane.CMA])
        while comes_back and not any(isinstance(event, native.TransferDrained) for event in came):
            if call == "wait":
                d.core.wait(SECOND)
            came += d.core.drain()
            assert time.monotonic() - begin < 10
        if not comes_back:
            final = None
            while final is None and is_signalled(d, 5.0):  # no call until the core says that it has something
                came = d.core.drain()
                final = next((event for event in came if isinstance(event, native.TransferFinal)), None)
        assert [event.state for event in came if isinstance(event, native.TransferFinal)] == [COMMITTED]
        assert np.array_equal(ours.memory, theirs.memory)
        d.wait(lambda _: d.core.counts().transfers_draining == 0)
