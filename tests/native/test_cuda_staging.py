"""Memory on a device goes over `stream` and `unix` by pinned host memory, and nothing is said to be there before it is.

No GPU: a stand-in for the driver is built and loaded, whose device memory crashes a thread that touches it from the
host.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.config import AgentConfig
from kvxfer.errors import InvalidArgumentError, KvxferError, LaneUnavailableError
from kvxfer.transport.engine import Op, RemotePeer, TransferEngine
from kvxfer.transport.memory import MemoryBinding
from kvxfer.transport.native import NativeBinding
from kvxfer.transport.network import MemoryNetwork
from kvxfer.types import AgentRef, Incarnation, Lane, MemoryKind, RegionRecord
from tests.support.native.cuda_driver import POOL, DeviceMemory, Driver, add_pool, grant, pull, register
from tests.support.native.nodes import NewId

STREAM, UNIX, MAPPED, CMA = native.Lane.STREAM, native.Lane.UNIX, native.Lane.MAPPED, native.Lane.CMA
COMMITTED, FAILED = native.TransferState.COMMITTED, native.TransferState.FAILED
SECOND = 1_000_000_000


def waits_for_the_device(driver: Driver, remove: Callable[[], object]) -> None:
    """``remove`` returns once the copies of the device are let go on, and not before."""
    removed = threading.Event()

    def call() -> None:
        remove()
        removed.set()

    thread = threading.Thread(target=call)
    thread.start()
    assert not removed.wait(0.2)
    driver.set()
    thread.join(20)
    assert removed.is_set()


@pytest.mark.parametrize("lane", [STREAM, UNIX], ids=["stream", "unix"])
@pytest.mark.parametrize("has_checksums", [False, True], ids=["plain", "checksums"])
@pytest.mark.parametrize("has_batch", [True, False], ids=["batch", "single"])
def test_pools(
    driver: Driver, nodes: Any, new_id: NewId, lane: native.Lane, has_checksums: bool, has_batch: bool
) -> None:
    """Scattered blocks in segments that are cut differently, from one device to another, copies taking their time."""
    driver.set(delay_us=200, has_batch=has_batch)
    blocks, half = 600, 2500
    p, d = nodes.pair()
    ours, theirs = driver.alloc(blocks * 2 * half, 1), driver.alloc(blocks * 2 * half)
    add_pool(p, ours, [(0, half, half), (blocks * half, half, half)], blocks, has_checksums=has_checksums)
    add_pool(d, theirs, [(0, 2 * half, 2 * half)], blocks, has_checksums=has_checksums)
    rng = np.random.default_rng(3)
    granted, filled = rng.permutation(blocks)[:500], rng.permutation(blocks)[:500]
    transfer = new_id()
    grant(p, transfer, granted)
    pull(d, transfer, p, filled, lanes=[lane])
    assert d.wait_drained(transfer).state == COMMITTED
    for source, target in zip(granted.tolist(), filled.tolist(), strict=True):
        sent = ours.element(source * half, half) + ours.element((blocks + source) * half, half)
        assert theirs.element(target * 2 * half, 2 * half) == sent
    untouched = sorted(set(range(blocks)) - set(filled.tolist()))
    assert all(theirs.element(block * 2 * half, 2 * half) == b"\xee" * 2 * half for block in untouched)
    assert (driver.count("batches") > 0) or not has_batch
    d.core.remove_pool(POOL)


@pytest.mark.parametrize("where", ["source", "reader", "both", "other device"])
@pytest.mark.parametrize("verb", ["fetch", "push"])
@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
def test_regions(driver: Driver, nodes: Any, new_id: NewId, where: str, verb: str, checksums: bool) -> None:
    """Elements that are larger than a buffer, and a last one of a single byte; either side may be the host's."""
    p, d = nodes.pair()
    step, length, count = 700_001, 650_003, 4
    nbytes = step * count
    rows = [(0, step, length, count), (step * count - 1, 1, 1, 1)]
    first, second = driver.alloc(nbytes, 5), driver.alloc(nbytes)
    if where == "reader":
        kept = p.register(nbytes)
        kept.memory[:] = first.bytes
        source = kept.id
    else:
        source = register(p, first)
    if where == "source":
        to = d.register(nbytes)
        to.memory[:] = 0xEE
        target, read = to.id, to.element
    else:
        target, read = register(d, second, device=int(where == "other device")), second.element
    transfer = new_id()
    near, far = [(source, *row) for row in rows], [(target, *row) for row in rows]
    actor = d if verb == "fetch" else p
    if verb == "fetch":
        d.fetch(transfer, p, far, near, lanes=[UNIX], wants_checksums=checksums)
    else:
        p.push(transfer, d, near, far, lanes=[UNIX], wants_checksums=checksums)
    assert actor.wait_drained(transfer).state == COMMITTED
    for at in range(count):
        assert read(at * step, length) == first.element(at * step, length)
        gap = b"\xee" * (step - length - (at == count - 1))
        assert read(at * step + length, len(gap)) == gap
    assert read(nbytes - 1, 1) == first.element(nbytes - 1, 1)


def test_elements_of_host_and_device_in_one_post(driver: Driver, nodes: Any, new_id: NewId) -> None:
    p, d = nodes.pair()
    on_device, into = driver.alloc(8192, 7), driver.alloc(16384)
    on_host = p.register(8192)
    on_host.memory[:] = np.random.default_rng(8).integers(0, 256, 8192, dtype=np.uint8)
    ours, theirs = register(p, on_device), register(d, into)
    transfer = new_id()
    remote = [(on_host.id, 0, 4096, 4096, 2), (ours, 0, 4096, 4096, 2)]
    d.fetch(transfer, p, [(theirs, 0, 4096, 4096, 4)], remote, lanes=[STREAM])
    assert d.wait_drained(transfer).state == COMMITTED
    assert into.element(0, 16384) == on_host.element(0, 8192) + on_device.element(0, 8192)


@pytest.mark.parametrize("gone", ["source", "destination"])
def test_a_host_element_that_vanished_beside_a_devices_is_named_and_ends_the_post(
    driver: Driver, nodes: Any, new_id: NewId, gone: str
) -> None:
    """A driver's own loads and stores would not outlive it: the host's elements are copied by the kernel."""
    p, d = nodes.pair()
    on_device, into = driver.alloc(8192, 7), driver.alloc(8192)
    pages = {name: mmap.mmap(-1, 8192, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for name in ("source", "destination")}
    hosts = {name: np.frombuffer(page, np.uint8) for name, page in pages.items()}
    hosts["source"][:] = 5
    for node, name, region in ((p, "source", 801), (d, "destination", 802)):
        info = native.RegionInfo(region, 8192)
        node.core.add_foreign_region(info, hosts[name].ctypes.data, 8192, pages[name])
    local = [(802, 0, 4096, 4096, 2), (register(d, into), 0, 4096, 4096, 2)]
    remote = [(801, 0, 4096, 4096, 2), (register(p, on_device), 0, 4096, 4096, 2)]
    first, second = new_id(), new_id()
    d.fetch(first, p, local, remote, lanes=[STREAM])
    assert d.wait_drained(first).state == COMMITTED
    assert (hosts["destination"].tobytes(), into.element(0, 8192)) == (b"\5" * 8192, on_device.element(0, 8192))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(hosts[gone].ctypes.data + 4096, 4096, 0) == 0  # as if unmapped
    d.fetch(second, p, local, remote, lanes=[STREAM])
    final = d.wait_drained(second)
    assert libc.mprotect(hosts[gone].ctypes.data + 4096, 4096, 3) == 0
    assert (final.state, final.code) == (FAILED, native.Code.memory_gone), final.text
    assert final.text.startswith(f"the {gone}'s memory")
    assert final.text.endswith(f"region {801 if gone == 'source' else 802} at byte 4096")


def test_nothing_has_landed_before_it_was_scattered(driver: Driver, nodes: Any, new_id: NewId) -> None:
    p, d = nodes.pair()
    kept = p.register(100_000)
    kept.memory[:] = 0x11
    into = driver.alloc(100_000)
    target = register(d, into)
    driver.set(held=True)
    transfer = new_id()
    d.fetch(transfer, p, [(target, 0, 1, 100_000, 1)], [(kept.id, 0, 1, 100_000, 1)], lanes=[STREAM])
    driver.wait_for_copies()
    time.sleep(0.1)
    d.take()
    assert not d.find(native.TransferFinal, id=transfer)
    assert d.core.transfer_state(transfer) != COMMITTED
    assert into.element(0, 10) == b"\xee" * 10
    driver.set()
    assert d.wait_drained(transfer).state == COMMITTED
    assert into.element(0, 100_000) == b"\x11" * 100_000


def test_a_cancelled_landing_keeps_its_memory_until_the_device_is_done(
    driver: Driver, nodes: Any, new_id: NewId
) -> None:
    p, d = nodes.pair()
    kept = p.register(100_000)
    into = driver.alloc(100_000)
    target = register(d, into)
    driver.set(held=True)
    transfer = new_id()
    d.fetch(transfer, p, [(target, 0, 1, 100_000, 1)], [(kept.id, 0, 1, 100_000, 1)], lanes=[STREAM])
    driver.wait_for_copies()
    d.core.cancel(transfer)
    d.wait_for(native.TransferFinal, id=transfer)
    time.sleep(0.1)
    d.take()
    assert not d.find(native.TransferDrained, id=transfer)
    driver.set()
    assert d.wait_drained(transfer).state == native.TransferState.CANCELLED
    d.core.remove_region(target)
    again = new_id()  # the session goes on
    other = register(d, into)
    d.fetch(again, p, [(other, 0, 1, 100_000, 1)], [(kept.id, 0, 1, 100_000, 1)], lanes=[STREAM])
    assert d.wait_drained(again).state == COMMITTED


def test_a_region_is_taken_back_after_a_push_that_had_ended_and_still_lands(
    driver: Driver, nodes: Any, new_id: NewId
) -> None:
    """What ended it before the call ends nothing on the device: the call waits, where it could have said busy."""
    p, d = nodes.pair()
    source = p.register(100_000)
    target = register(d, driver.alloc(100_000))
    driver.set(held=True)
    p.push(new_id(), d, [(source.id, 0, 1, 100_000, 1)], [(target, 0, 1, 100_000, 1)], lanes=[STREAM])
    driver.wait_for_copies()
    d.core.peer_dead(p.ref)
    d.wait(lambda _: d.core.counts().transfers_live == 0, "the end of the push")
    waits_for_the_device(driver, lambda: d.core.remove_region(target))


def test_memory_is_not_taken_back_under_a_gather(driver: Driver, nodes: Any, new_id: NewId) -> None:
    """And bytes gathered of a grant that has ended are not sent."""
    p, d = nodes.pair()
    secret = driver.alloc(65536, 11)
    add_pool(p, secret, [(0, 4096, 4096)], 16)
    host = np.full(65536, 0xEE, np.uint8)
    record = native.PoolInfo(POOL, 16, 4096, b"p" * 32, False)
    d.core.add_foreign_pool(record, host.ctypes.data, 65536, host, [(0, 4096, 4096)])
    driver.set(held=True)
    transfer = new_id()
    grant(p, transfer, np.arange(16))
    pull(d, transfer, p, np.arange(16))
    driver.wait_for_copies()
    p.core.end_grant(transfer, native.GrantEvent.REVOKE)
    waits_for_the_device(driver, lambda: p.core.remove_pool(POOL))
    final = d.wait_drained(transfer)
    assert (final.state, final.code) == (FAILED, native.Code.grant_revoked)
    for at in range(0, 65536, 4096):
        assert host[at : at + 4096].tobytes() != secret.element(at, 4096)


@pytest.mark.parametrize("side", ["source", "reader"])
def test_a_copy_that_fails_is_tried_again(driver: Driver, nodes: Any, new_id: NewId, side: str) -> None:
    limits = nodes.limits(stall_ns=SECOND // 5)
    p, d = nodes.pair(limits=limits)
    memory, into = driver.alloc(300_000, 13), driver.alloc(300_000)
    kept, target = p.register(300_000), d.register(300_000)
    kept.memory[:] = memory.bytes
    source = register(p, memory) if side == "source" else kept.id
    to = register(d, into) if side == "reader" else target.id
    driver.set(failing_copies=2, has_batch=False)
    transfer = new_id()
    d.fetch(transfer, p, [(to, 0, 1, 300_000, 1)], [(source, 0, 1, 300_000, 1)], lanes=[STREAM])
    assert d.wait_drained(transfer).state == COMMITTED
    assert (into if side == "reader" else target).element(0, 300_000) == memory.element(0, 300_000)


@pytest.mark.parametrize(
    "trouble", [{"failing_allocs": 10**6}, {"lost": True}], ids=["no pinned memory", "context lost"]
)
@pytest.mark.parametrize("side", ["source", "reader"])
def test_a_driver_that_stays_broken(
    driver: Driver, nodes: Any, new_id: NewId, side: str, trouble: dict[str, Any]
) -> None:
    p, d = nodes.pair()
    memory, kept, target = driver.alloc(4096, 1), p.register(4096), d.register(4096)
    source = register(p, memory) if side == "source" else kept.id
    to = register(d, memory) if side == "reader" else target.id
    driver.set(**trouble)
    transfer = new_id()
    d.fetch(transfer, p, [(to, 0, 1, 4096, 1)], [(source, 0, 1, 4096, 1)], lanes=[STREAM], deadline_s=0.5)
    final = d.wait_drained(transfer)
    assert final.state == FAILED
    if "lost" in trouble:  # no second try finds another context
        assert final.code == native.Code.memory_gone
        what = "source" if side == "source" else "destination"
        assert final.text == f"the {what}'s memory is on a device that failed: CUDA: a copy: unspecified launch failure"
    driver.set()
    d.core.remove_region(to)
    p.core.remove_region(source)
    back = new_id()  # both cores live
    p.register(10)
    one, other = p.register(10), d.register(10)
    d.fetch(back, p, [(other.id, 0, 1, 10, 1)], [(one.id, 0, 1, 10, 1)], lanes=[STREAM])
    assert d.wait_drained(back).state == COMMITTED


@pytest.mark.parametrize("lane", [MAPPED, CMA], ids=["mapped", "cma"])
@pytest.mark.parametrize("side", ["source", "reader"])
def test_other_lanes_refuse_it_by_name(driver: Driver, nodes: Any, new_id: NewId, lane: native.Lane, side: str) -> None:
    p, d = nodes.pair()
    memory, kept, target = driver.alloc(4096, 1), p.register(4096), d.register(4096)
    source = register(p, memory) if side == "source" else kept.id
    to = register(d, memory) if side == "reader" else target.id
    transfer = new_id()
    d.fetch(transfer, p, [(to, 0, 1, 4096, 1)], [(source, 0, 1, 4096, 1)], lanes=[lane, STREAM])
    final = d.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, STREAM)
    assert ("cannot be mapped" if (lane, side) == (MAPPED, "source") else "is on a device") in final.lane_notes


def test_more_frames_than_staging_buffers_commit(driver: Driver, nodes: Any, new_id: NewId) -> None:
    """More frames than there are buffers, both ways, over three stripes."""
    limits = nodes.limits()
    limits.stripes = 3
    driver.set(delay_us=100)
    p, d = nodes.pair(limits=limits)
    nbytes = 1_500_000
    posts = []
    for seed in range(12):
        ours, theirs = driver.alloc(nbytes, seed), driver.alloc(nbytes)
        source, target, transfer = register(p, ours), register(d, theirs), new_id()
        near, far = [(source, 0, 5000, 4999, 300)], [(target, 0, 5000, 4999, 300)]
        if seed % 2:
            d.fetch(transfer, p, far, near, lanes=[STREAM])
        else:
            p.push(transfer, d, near, far, lanes=[STREAM])
        posts.append((d if seed % 2 else p, transfer, ours, theirs))
    for actor, transfer, ours, theirs in posts:
        assert actor.wait_drained(transfer).state == COMMITTED
        for at in range(300):
            assert theirs.element(at * 5000, 4999) == ours.element(at * 5000, 4999)


def test_a_core_that_closes_waits_for_its_copies(driver: Driver, nodes: Any, new_id: NewId) -> None:
    p, d = nodes.pair()
    memory, into = driver.alloc(100_000, 1), driver.alloc(100_000)
    source, target = register(p, memory), register(d, into)
    driver.set(held=True)
    d.fetch(new_id(), p, [(target, 0, 1, 100_000, 1)], [(source, 0, 1, 100_000, 1)], lanes=[STREAM])
    driver.wait_for_copies()
    closed = threading.Event()

    def close() -> None:
        p.core.close()
        closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    assert not closed.wait(0.2)
    driver.set()
    thread.join(20)
    assert closed.is_set()


def test_a_core_that_breaks_says_so_after_its_copies(driver: Driver, nodes: Any, new_id: NewId, breaker: Any) -> None:
    """Nothing is written any more once that is told; and the thread that waits for the region learns it at once, not
    late."""
    p = nodes("source")
    break_loop = breaker()
    d = nodes("breaks")
    nodes.join(p, d)
    source = p.register(100_000)
    into = driver.alloc(100_000)
    target = register(d, into)
    driver.set(held=True)
    p.push(new_id(), d, [(source.id, 0, 1, 100_000, 1)], [(target, 0, 1, 100_000, 1)], lanes=[STREAM])
    driver.wait_for_copies()
    answers: list[KvxferError] = []

    def remove() -> None:
        try:
            d.core.remove_region(target)
        except KvxferError as error:
            answers.append(error)

    thread = threading.Thread(target=remove)
    thread.start()
    break_loop()
    time.sleep(0.3)
    assert not any(isinstance(event, native.CoreFailed) for event in d.core.drain())
    driver.set()
    thread.join(2)
    (error,) = answers
    assert "the native core failed" in str(error)
    told: list[Any] = []
    deadline_s = time.monotonic() + 5
    while not told and time.monotonic() < deadline_s:  # after the thread that waited for the region
        told = d.core.drain()
        time.sleep(0.005)
    assert isinstance(told[-1], native.CoreFailed)
    assert into.element(0, 100_000) == source.element(0, 100_000)
    d.core.close()
    nodes.made.remove(d)


def tensor(memory: DeviceMemory, device: int = 0) -> types.SimpleNamespace:
    """As torch has them on a GPU."""
    place = types.SimpleNamespace(type="cuda", index=device)
    return types.SimpleNamespace(
        data_ptr=lambda: memory.address, nbytes=memory.bytes.size, is_contiguous=lambda: True, device=place
    )


@pytest.mark.parametrize("op", Op)
def test_tensors_of_two_posters(driver: Driver, op: Op) -> None:
    """From a registered tensor to another, by what the policy makes of their records."""
    posters = []
    for number, name in enumerate("ab"):
        config = AgentConfig()
        binding = NativeBinding(config)
        posters.append(
            TransferEngine(binding.open(AgentRef(name, Incarnation(1, bytes([number] * 16))), config), config=config)
        )
    one, other = posters
    key = os.urandom(32)
    one.transport.set_peer(other.transport.ref, other.transport.address, key)
    other.transport.set_peer(one.transport.ref, one.transport.address, key)
    first, second = driver.alloc(1 << 20, 1), driver.alloc(1 << 20)
    mine, theirs = (second, first) if op is Op.READ else (first, second)
    local, remote = one.register(tensor(mine)), other.register(tensor(theirs, device=1))
    assert (remote.record.memory, remote.record.device) == (MemoryKind.CUDA, 1)
    records = tuple(RegionRecord.from_json(record.to_json()) for record in other.records())
    peer = RemotePeer(other.transport.ref, other.transport.address, records)
    near = one.prepare([(mine.address + at, 4096, 0) for at in range(0, 1 << 20, 8192)])
    far = one.prepare([(theirs.address + at, 4096, 1) for at in range(0, 1 << 20, 8192)], peer=peer)
    with pytest.raises(InvalidArgumentError, match="another device"):
        one.prepare([(theirs.address, 4096, 0)], peer=peer)
    post = one.post(op, near, None, far, None)
    end = time.monotonic() + 30
    while not post.is_drained and time.monotonic() < end:
        post.poll()
        other.poll()
    assert post.result().lane is Lane.UNIX
    assert all(second.element(at, 4096) == first.element(at, 4096) for at in range(0, 1 << 20, 8192))
    one.deregister(local)
    other.deregister(remote)
    for poster in posters:
        poster.transport.close()


def test_in_process_networks_have_no_devices(driver: Driver) -> None:
    config, binding = AgentConfig(), MemoryBinding(MemoryNetwork())
    poster = TransferEngine(binding.open(AgentRef("a", Incarnation(1, bytes(16))), config), config=config)
    with pytest.raises(LaneUnavailableError, match="host memory only"):
        poster.register(tensor(driver.alloc(4096)))


def test_no_such_device(driver: Driver, nodes: Any) -> None:
    p = nodes("source")
    memory = driver.alloc(4096)
    with pytest.raises(LaneUnavailableError, match="no CUDA device 2: this process sees 2"):
        register(p, memory, device=2)


def test_no_driver(nodes: Any) -> None:
    """In a process that has loaded none yet."""
    script = """
import os
from kvxfer._native import _core as native
from kvxfer.errors import LaneUnavailableError
ref = native.AgentRef("a", 1, os.urandom(16))
core = native.Core(ref, native.EndpointLimits(), bind_host="127.0.0.1", bind_port=0, unix_path="")
try:
    core.add_foreign_region(native.RegionInfo(1, 4096), 1 << 40, 4096, None, device=0)
except LaneUnavailableError as error:
    print(error)
"""
    environment = {**os.environ, "KVXFER_CUDA_LIBRARY": "/nowhere/libcuda.so.1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "cannot load the CUDA driver: /nowhere/libcuda.so.1" in done.stdout
