"""What the IO thread owes its process: no GIL, no CPU while idle, no descriptor left, and calls in any order."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.errors import BlocksBusyError, ClosedError, InvalidArgumentError, KvxferError
from tests.support.native.nodes import NewId

MAPPED, STREAM = native.Lane.MAPPED, native.Lane.STREAM
COMMITTED = native.TransferState.COMMITTED
FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
each_lane = pytest.mark.parametrize("lane", [MAPPED, STREAM], ids=["mapped", "stream"])

SOURCE = textwrap.dedent(
    """
    import ctypes, os, sys, time
    import numpy as np
    from kvxfer._native import _core as native

    directory, reader_port, reader_nonce, transfer, hold_s = sys.argv[1:]
    key = b"k" * 32
    ref, path = native.AgentRef("source", 1, b"s" * 16), os.path.join(directory, "far-source")
    core = native.Core(ref, native.EndpointLimits(), bind_host="127.0.0.1", bind_port=0, unix_path=path)
    core.start()
    region = native.Region(65536 * 256)
    memory = np.frombuffer(region, np.uint8)
    memory[:] = np.arange(memory.size, dtype=np.uint32).view(np.uint8)[: memory.size]
    core.add_pool(native.PoolInfo(7, 256, 65536, b"d" * 32, True), region, [(0, 65536, 65536)])
    reader = native.AgentRef("reader", 1, bytes.fromhex(reader_nonce))
    core.set_peer(reader, key, tcp_host="127.0.0.1", tcp_port=int(reader_port), unix_path="")
    core.grant(bytes.fromhex(transfer), 7, np.arange(256, dtype=np.uint32), reader="reader", ttl_ns=30 * 10**9)
    core.ready(bytes.fromhex(transfer), 256 if float(hold_s) else 128, complete=bool(float(hold_s)))
    print(core.tcp_port, flush=True)
    sys.stdin.readline()
    if float(hold_s):
        print("holding", time.monotonic_ns(), flush=True)
        ctypes.PyDLL(None).usleep(int(float(hold_s) * 1e6))
        print("released", time.monotonic_ns(), flush=True)
    sys.stdin.readline()
    """
)


class FarSource:
    """A source in a process of its own, with 256 blocks of 64 KiB granted."""

    def __init__(self, reader: Any, directory: pathlib.Path, transfer: bytes, hold_s: float) -> None:
        arguments = [
            str(directory),
            str(reader.core.tcp_port),
            reader.ref.boot_nonce.hex(),
            transfer.hex(),
            str(hold_s),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SOURCE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ref = native.AgentRef("source", 1, b"s" * 16)
        port = int(self.line())
        path = str(directory / "far-source")
        reader.core.set_peer(self.ref, b"k" * 32, tcp_host="127.0.0.1", tcp_port=port, unix_path=path)

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the source's process ended"
        return line

    def say(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self) -> FarSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


def expected() -> bytes:
    return np.arange(65536 * 256, dtype=np.uint32).view(np.uint8)[: 65536 * 256].tobytes()


@each_lane
def test_serving_needs_no_gil(nodes: Any, new_id: NewId, private_directories: pathlib.Path, lane: native.Lane) -> None:
    """The source's process holds its GIL for two seconds; the pull is committed before it lets go."""
    d = nodes("reader", block_bytes=65536, blocks=256)
    transfer = new_id()
    with FarSource(d, private_directories / "sockets", transfer, 2.0) as source:
        source.say()
        assert source.line().split()[0] == "holding"
        d.pull(transfer, source.ref, np.arange(256), lanes=[lane])
        assert d.wait_drained(transfer).state == COMMITTED
        committed = time.monotonic_ns()
        word, released = source.line().split()
        assert word == "released"
        assert committed < int(released)
    assert d.memory.tobytes() == expected()


@each_lane
def test_source_killed(nodes: Any, new_id: NewId, private_directories: pathlib.Path, lane: native.Lane) -> None:
    d = nodes("reader", block_bytes=65536, blocks=256, limits=nodes.limits(reconnect_ns=1_000_000_000))
    transfer = new_id()
    with FarSource(d, private_directories / "sockets", transfer, 0) as source:
        d.pull(transfer, source.ref, np.arange(256), lanes=[lane])
        d.wait(lambda _: d.find(native.TransferProgress, id=transfer, done=128))
        source.process.kill()
        final = d.wait_drained(transfer)
    assert final.state == native.TransferState.FAILED
    assert final.code == native.Code.peer_gone
    assert d.memory[: 128 * 65536].tobytes() == expected()[: 128 * 65536]
    assert d.is_idle()
    assert d.core.statistics().connections == 0


def thread_ticks() -> int:
    """CPU ticks of all IO threads of this process."""
    total = 0
    for task in pathlib.Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "kvxfer-io":
            fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
    return total


def test_idle_cores_use_no_cpu(p: Any, d: Any) -> None:
    for lane in (MAPPED, STREAM):
        transfer = d.pull_granted(p, [1, 2], [1, 2], lanes=[lane])
        assert d.wait_drained(transfer).state == COMMITTED
        p.wait_for(native.GrantEnded, id=transfer)

    def wakeups() -> int:
        return p.core.statistics().wakeups + d.core.statistics().wakeups

    time.sleep(2.0)  # a deadline that has become idle (of the dial, of the last wait) is slept until, once
    woken, ticks = wakeups(), thread_ticks()
    time.sleep(2.0)
    assert thread_ticks() - ticks <= 1
    assert wakeups() == woken


def blocked_by(name: str, before: set[str]) -> int | None:
    """The signals that this thread of ours takes not, one bit each; None where there is no such thread that is new."""
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # an older core's thread that ends
            if task.name not in before and (task / "comm").read_text().strip() == name:
                lines = (task / "status").read_text().splitlines()
                return int(next(line.split()[1] for line in lines if line.startswith("SigBlk")), 16)
    return None


def test_its_threads_take_no_signals_but_their_own_faults(nodes: Any) -> None:
    """A handler that Python has is never run there; a fault there is reported by the process's fault handler. That
    holds for a thread that helps copying too, also where a caller that runs the event loop started it."""
    before = set(os.listdir("/proc/self/task"))
    p, d = nodes.pair(
        blocks=4096, block_bytes=4096, is_exposed=True, reader={"core": {"copy_threads": 2, "progress": "caller"}}
    )
    transfer = d.pull_granted(p, list(range(4096)), list(range(4096)), lanes=[MAPPED])
    d.core.wait(10 * 10**9)
    assert d.wait_drained(transfer).state == COMMITTED
    for name in ("kvxfer-io", "kvxfer-copy"):
        d.wait(lambda _, name=name: blocked_by(name, before) is not None, "its thread has its name")
        mask = blocked_by(name, before)
        assert mask is not None
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            assert bool(mask >> (number - 1) & 1) == (number not in FAULTS), (name, number)


def test_waiting_uses_little_cpu(p: Any, d: Any, new_id: NewId) -> None:
    """A live grant and a pull that waits for more of it cost a handful of wakeups a second."""
    transfer = new_id()
    p.grant(transfer, [1, 2], ready=1)
    d.pull(transfer, p, [1, 2])
    d.wait_for(native.TransferProgress, id=transfer)
    woken = p.core.statistics().wakeups + d.core.statistics().wakeups
    time.sleep(1.0)
    assert p.core.statistics().wakeups + d.core.statistics().wakeups - woken < 60


def test_descriptors_and_threads_come_back(nodes: Any) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    gc.collect()
    before = count()
    for _ in range(3):
        p, d = nodes.pair()
        for lane in (MAPPED, STREAM):
            transfer = d.pull_granted(p, [1, 2], [1, 2], lanes=[lane])
            assert d.wait_drained(transfer).state == COMMITTED
        assert d.core.statistics().mappings == 1
        for node in (p, d):
            node.core.close()
        del p, d, node
        nodes.made.clear()
        gc.collect()
        assert count() == before


def test_calls_from_many_threads(nodes: Any, new_id: NewId) -> None:
    """Every method at once from every side, with a close in the middle: errors of the tree at most, and an end."""
    p, d = nodes.pair(block_bytes=4096, blocks=256)
    stop = threading.Event()
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        mine = list(range(seed * 32, seed * 32 + 32))
        while not stop.is_set():
            transfer = new_id()
            try:
                p.core.grant(
                    transfer,
                    7,
                    np.array(mine, np.uint32),
                    reader="",
                    ttl_ns=200_000_000,
                    ready_blocks=rng.randrange(33),
                )
                d.core.pull(transfer, p.ref, 7, np.array(mine, np.uint32), lanes=[rng.choice([MAPPED, STREAM])])
                p.core.notify(d.ref, b"x" * rng.randrange(2000))
                if rng.random() < 0.7:
                    p.core.ready(transfer, 32, complete=True)
                time.sleep(rng.random() * 0.002)
                if rng.random() < 0.5:
                    d.core.cancel(transfer)
                p.core.end_grant(transfer, rng.choice([native.GrantEvent.REVOKE, native.GrantEvent.RELEASE]))
                d.core.cancel(transfer)
                assert p.core.grant_state(transfer) != native.GrantState.ALIVE
                d.core.transfer_state(transfer)
                p.core.counts()
                d.core.statistics()
            except ClosedError:
                return
            except KvxferError:
                continue
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        p.take()
        d.take()
        time.sleep(0.005)
    d.core.close()
    time.sleep(0.05)
    p.core.close()
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not wrong
    p.take()
    d.take()
    drained = {e.id for e in d.find(native.TransferDrained)}
    assert {e.id for e in d.find(native.TransferFinal)} >= drained
    assert len(drained) > 50


def test_end_grant_waits_for_the_send_under_way(nodes: Any) -> None:
    """Its GIL stays free meanwhile: another thread counts on."""
    p, d = nodes.pair(block_bytes=1 << 20, blocks=64)
    transfer = d.pull_granted(p, np.arange(64), np.arange(64), lanes=[STREAM])
    d.wait_begun(transfer)
    p.core.end_grant(transfer, native.GrantEvent.REVOKE)
    p.fill(0xAA)
    d.wait_drained(transfer)
    assert not np.any(d.memory == 0xAA) or p.content([0]) != d.content([0])


def test_memory_stays_mapped_while_a_view_of_it_exists(nodes: Any) -> None:
    p = nodes("source")
    region = native.Region(1 << 20)
    assert region.nbytes == 1 << 20
    assert region.address % 4096 == 0
    view = np.frombuffer(region, np.uint8)
    assert view.ctypes.data == region.address
    p.core.add_pool(native.PoolInfo(1, 16, 65536, b"d" * 32, True), region, [(0, 65536, 65536)])
    address = region.address
    del region
    gc.collect()
    view[:] = 3
    del view
    gc.collect()
    assert ctypes.string_at(address, 4) == b"\x03" * 4, "the pool keeps the region"
    p.core.remove_pool(1)
    with pytest.raises(InvalidArgumentError):
        p.core.remove_pool(1)
    with pytest.raises(InvalidArgumentError):
        native.Region(0)


def test_foreign_memory(nodes: Any, new_id: NewId) -> None:
    p, d = nodes.pair(block_bytes=1024, blocks=16)

    class Owner(np.ndarray):
        pass

    memory = np.zeros((2, 16, 512), np.uint8).view(Owner)
    memory[0], memory[1] = 1, 2
    d.core.add_foreign_pool(
        native.PoolInfo(9, 16, 1024, b"d" * 32, False),
        memory.ctypes.data,
        memory.nbytes,
        memory,
        [(0, 512, 512), (8192, 512, 512)],
    )
    transfer = new_id()
    d.core.grant(transfer, 9, np.array([3], np.uint32), reader="", ttl_ns=10**10, ready_blocks=1)
    p.pull(transfer, d, [5])
    final = p.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, STREAM)
    assert p.block(5) == b"\x01" * 512 + b"\x02" * 512
    alive = weakref.ref(memory)
    del memory
    gc.collect()
    assert alive() is not None
    d.wait_for(native.GrantEnded, id=transfer)
    d.core.remove_pool(9)
    gc.collect()
    assert alive() is None
    with pytest.raises(InvalidArgumentError, match="shared"):
        d.core.add_foreign_pool(native.PoolInfo(9, 1, 8, b"d" * 32, True), 4096, 8, None, [(0, 8, 8)])


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [(0, 64, 64)],
        [(1, 128, 128)],
        [(0, 129, 128)],
        [(0, 64, 128)],
        [(2**64 - 64, 128, 128)],
        [(0, 2**62, 128)],
        [(0, 128, 0), (0, 128, 128)],
    ],
)
def test_blocks_outside_of_the_region(nodes: Any, segments: list[tuple[int, int, int]]) -> None:
    p = nodes("source")
    with pytest.raises(InvalidArgumentError):
        p.core.add_pool(native.PoolInfo(1, 8, 128, b"d" * 32, True), native.Region(1024), segments)
    assert [pool.pool for pool in p.core.counts().pools] == [7]


def test_remove_pool_in_use(p: Any, d: Any, new_id: NewId) -> None:
    transfer = new_id()
    p.grant(transfer, [1])
    with pytest.raises(BlocksBusyError):
        p.core.remove_pool(7)
    p.core.end_grant(transfer, native.GrantEvent.RELEASE)
    p.core.remove_pool(7)
    d.pull(transfer, p, [1])
    assert d.wait_drained(transfer).code == native.Code.grant_released
