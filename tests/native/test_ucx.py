"""The `ucx` lane over what UCX has on any host: cma with posix and sysv, and tcp where it is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.errors import BlocksBusyError
from tests.support.native.nodes import UCX_LIBRARY, NewId, needs_ucx

UCX, STREAM = native.Lane.UCX, native.Lane.STREAM
COMMITTED, FAILED, CANCELLED = (
    native.TransferState.COMMITTED,
    native.TransferState.FAILED,
    native.TransferState.CANCELLED,
)
POISON = 0xEE

pytestmark = needs_ucx
each_tls = pytest.mark.parametrize("tls", ["", "tcp"], ids=["local", "tcp"])


def core(tls: str = "", library: str = UCX_LIBRARY.path) -> dict[str, Any]:
    return {"ucx_library": library, "ucx_tls": tls}


def ucx_pair(nodes: Any, tls: str = "", **both: Any) -> tuple[Any, Any]:
    options = {"core": core(tls), "is_exposed": True, "is_shareable": False, **both}
    source, reader = nodes.pair(**options)
    return source, reader


def check_blocks(source: Any, reader: Any, moved: dict[int, int]) -> None:
    """`moved`: reader's block to the source's. Every other block is the poison it was."""
    for block in range(reader.blocks):
        expected = source.block(moved[block]) if block in moved else bytes([POISON]) * reader.block_bytes
        assert reader.block(block) == expected, block


# --- pools ---


@each_tls
@pytest.mark.parametrize("block_bytes", [1024, 65536 + 512])
def test_pulls_blocks(nodes: Any, tls: str, block_bytes: int) -> None:
    p, d = ucx_pair(nodes, tls, block_bytes=block_bytes, blocks=96)
    assert d.core.ucx_obstacle == ""
    rng = np.random.default_rng(1)
    granted, filled = rng.permutation(96)[:64], rng.permutation(96)[:64]
    transfer = d.pull_granted(p, granted, filled, lanes=[UCX])
    final = d.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, UCX), final.text
    check_blocks(p, d, dict(zip(filled.tolist(), granted.tolist(), strict=True)))
    assert d.core.statistics().bytes_ucx == 64 * block_bytes
    d.wait(lambda _: p.is_idle() and d.is_idle())


@each_tls
def test_layouts_that_are_cut_differently(nodes: Any, tls: str) -> None:
    """Halves of a block far apart at the source, the block whole at the reader."""
    half, blocks = 3 * 1024, 32
    options = {"block_bytes": 2 * half, "blocks": blocks, "core": core(tls), "is_exposed": True, "is_shareable": False}
    p, d = nodes.pair(source={"segments": [(half * blocks, half, half), (0, half, half)]}, **options)
    transfer = d.pull_granted(p, np.arange(blocks), np.arange(blocks)[::-1], lanes=[UCX])
    assert d.wait_drained(transfer).state == COMMITTED
    check_blocks(p, d, {blocks - 1 - i: i for i in range(blocks)})


def test_blocks_that_become_ready_later_are_read_later(nodes: Any, new_id: NewId) -> None:
    p, d = ucx_pair(nodes, blocks=64)
    transfer = new_id()
    p.grant(transfer, np.arange(64), ready=10)
    d.pull(transfer, p, np.arange(64), lanes=[UCX])
    d.wait(lambda _: d.find(native.TransferProgress, id=transfer, done=10))
    p.core.ready(transfer, 64, complete=True)
    assert d.wait_drained(transfer).state == COMMITTED
    check_blocks(p, d, {i: i for i in range(64)})


def test_checksums_are_verified(nodes: Any, new_id: NewId) -> None:
    p, d = ucx_pair(nodes, blocks=64, has_checksums=True)
    good, bad = new_id(), new_id()
    p.grant(good, np.arange(32))
    d.pull(good, p, np.arange(32), lanes=[UCX])
    assert d.wait_drained(good).state == COMMITTED
    check_blocks(p, d, {i: i for i in range(32)})
    p.grant(bad, np.arange(32, 64))
    p.memory[40 * p.block_bytes + 17] ^= 1  # announced, and not left as it was
    d.pull(bad, p, np.arange(32, 64), lanes=[UCX])
    final = d.wait_drained(bad)
    assert (final.state, final.code) == (FAILED, native.Code.checksum)


@each_tls
def test_many_pulls_at_once_commit(nodes: Any, new_id: NewId, tls: str) -> None:
    p, d = ucx_pair(nodes, tls, block_bytes=16384, blocks=256)
    order = np.random.default_rng(2).permutation(256)
    transfers = {new_id(): order[i * 8 : i * 8 + 8] for i in range(32)}
    for transfer, blocks in transfers.items():
        p.grant(transfer, blocks)
        d.pull(transfer, p, blocks, lanes=[UCX])
    assert {d.wait_drained(transfer).state for transfer in transfers} == {COMMITTED}
    check_blocks(p, d, {i: i for i in range(256)})


# --- registered regions ---


@each_tls
@pytest.mark.parametrize("verb", ["fetch", "push"])
def test_elements_of_many_regions(nodes: Any, new_id: NewId, tls: str, verb: str) -> None:
    """Elements that touch across regions, and regions that lie side by side, each with a key of its own."""
    p, d = nodes.pair(core=core(tls), is_shareable=False)
    size, per = 64 * 1024, 16
    element = size // per
    source, target = (p, d) if verb == "fetch" else (d, p)
    arena = np.random.default_rng(3).integers(0, 256, 4 * size, dtype=np.uint8)
    theirs = []
    for index in range(4):  # of one array: neighbours in memory, each registered alone
        part = arena[index * size : (index + 1) * size]
        info = native.RegionInfo(900 + index, size)
        source.core.add_foreign_region(info, part.ctypes.data, size, arena)
        theirs.append((900 + index, 0, element, element, per))
    ours = [target.register(2 * size, is_foreign=True) for _ in range(2)]
    for region in ours:
        region.memory[:] = POISON
    mine = [(region.id, 0, 2 * element, element, per) for region in ours] + [
        (ours[0].id, element, 2 * element, element, per)
    ]
    rng = np.random.default_rng(4)
    ids = rng.permutation(4 * per)[: 3 * per], rng.permutation(3 * per)
    transfer = new_id()
    if verb == "fetch":
        target.fetch(transfer, source, mine, theirs, ids=(ids[1], ids[0]), lanes=[UCX])
    else:
        source.push(transfer, target, theirs, mine, ids=ids, lanes=[UCX])
    poster = target if verb == "fetch" else source
    final = poster.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, UCX), final.text
    expected = {region.id: np.full(2 * size, POISON, np.uint8) for region in ours}
    for read, filled in zip(*ids, strict=True):
        region, offset, stride, length, _ = mine[filled // per]
        start = offset + (filled % per) * stride
        expected[region][start : start + length] = arena[read * element : (read + 1) * element]
    for region in ours:
        assert np.array_equal(region.memory, expected[region.id])


def test_read_of_a_removed_region_is_not_committed(nodes: Any, new_id: NewId) -> None:
    p, d = nodes.pair(core=core(), is_shareable=False)
    theirs, ours = p.register(65536, is_foreign=True), d.register(65536, is_foreign=True)
    rows = (ours.id, 0, 4096, 4096, 16), (theirs.id, 0, 4096, 4096, 16)
    first, second = new_id(), new_id()
    d.fetch(first, p, [rows[0]], [rows[1]], lanes=[UCX])
    assert d.wait_drained(first).state == COMMITTED
    ours.memory[:] = POISON
    p.core.remove_region(theirs.id)
    d.fetch(second, p, [rows[0]], [rows[1]], lanes=[UCX], deadline_s=10)
    # A reader that has the key reads at once: bytes may come, and are thrown away with the fetch.
    assert d.wait_drained(second).state == FAILED
    d.core.remove_region(ours.id)


# --- what is not possible ---


def test_the_next_lane_is_taken_where_one_side_has_no_ucx(nodes: Any) -> None:
    options = {"is_exposed": True, "is_shareable": False}
    for source, reader in ((core(), None), (None, core())):
        p, d = (
            nodes("source" + os.urandom(2).hex(), core=source, **options),
            nodes("r" + os.urandom(2).hex(), core=reader, **options),
        )
        nodes.join(p, d)
        p.fill_random()
        transfer = d.pull_granted(p, np.arange(64), np.arange(64), lanes=[UCX, STREAM])
        final = d.wait_drained(transfer)
        assert (final.state, final.lane) == (COMMITTED, STREAM), final.text
        assert d.content(range(64)) == p.content(range(64))


def test_a_pool_that_is_not_exposed_gives_no_key(nodes: Any) -> None:
    p, d = ucx_pair(nodes, is_exposed=False)
    transfer = d.pull_granted(p, np.arange(64), np.arange(64), lanes=[UCX, STREAM])
    final = d.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, STREAM)
    assert d.core.statistics().bytes_ucx == 0


def test_transports_that_do_not_meet(nodes: Any) -> None:
    """The source has only tcp, the reader only what stays on the host."""
    options = {"is_exposed": True, "is_shareable": False}
    p, d = nodes.pair(source={"core": core("tcp")}, reader={"core": core()}, **options)
    transfer = d.pull_granted(p, np.arange(64), np.arange(64), lanes=[UCX, STREAM])
    final = d.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, STREAM)
    check_blocks(p, d, {i: i for i in range(64)})


# --- endings ---


@each_tls
def test_cancelled_in_the_middle_nothing_lands_later(nodes: Any, new_id: NewId, tls: str) -> None:
    p, d = ucx_pair(nodes, tls, block_bytes=1 << 20, blocks=48)
    for round_ in range(6):
        transfer = new_id()
        d.fill(POISON)
        p.grant(transfer, np.arange(48))
        d.pull(transfer, p, np.arange(48), lanes=[UCX])
        time.sleep(0.002 * round_)
        d.core.cancel(transfer)
        assert d.wait_drained(transfer).state in (CANCELLED, COMMITTED)
        d.fill(1)
        time.sleep(0.02)
        assert (d.memory == 1).all()
        p.core.end_grant(transfer, native.GrantEvent.REVOKE)
    d.wait(lambda _: d.is_idle())


@each_tls
def test_the_peers_death_in_the_middle(nodes: Any, new_id: NewId, tls: str) -> None:
    p, d = ucx_pair(nodes, tls, block_bytes=1 << 20, blocks=48)
    for round_ in range(6):
        transfer = new_id()
        nodes.join(p, d)
        p.grant(transfer, np.arange(48))
        d.pull(transfer, p, np.arange(48), lanes=[UCX])
        time.sleep(0.002 * round_)
        d.core.peer_dead(p.ref)
        p.core.peer_dead(d.ref)
        assert d.wait_drained(transfer).state in (FAILED, COMMITTED)
        d.fill(1)
        time.sleep(0.02)
        assert (d.memory == 1).all()
        p.core.end_grant(transfer, native.GrantEvent.REVOKE)
    d.wait(lambda _: d.is_idle())


SOURCE = textwrap.dedent(
    """
    import os, sys
    import numpy as np
    from kvxfer._native import _core as native

    library, tls, port, nonce, transfer = sys.argv[1:]
    core = native.Core(
        native.AgentRef("source", 1, b"s" * 16), native.EndpointLimits(), bind_host="127.0.0.1", bind_port=0,
        unix_path="", ucx_library=library, ucx_tls=tls,
    )
    core.start()
    memory = np.arange(64 << 18, dtype=np.uint32).view(np.uint8)
    info = native.PoolInfo(7, 64, 1 << 20, b"d" * 32, False, True, False)
    core.add_foreign_pool(info, memory.ctypes.data, memory.nbytes, memory, [(0, 1 << 20, 1 << 20)])
    reader = native.AgentRef("reader", 1, bytes.fromhex(nonce))
    core.set_peer(reader, b"k" * 32, tcp_host="127.0.0.1", tcp_port=int(port), unix_path="")
    core.grant(bytes.fromhex(transfer), 7, np.arange(64, dtype=np.uint32), reader="reader", ttl_ns=30 * 10**9)
    core.ready(bytes.fromhex(transfer), 64, complete=True)
    print(core.tcp_port, flush=True)
    sys.stdin.readline()
    """
)


@each_tls
@pytest.mark.parametrize("how", ["serves", "killed", "stopped"])
def test_a_source_in_another_process(nodes: Any, new_id: NewId, tls: str, how: str) -> None:
    limits = nodes.limits(reconnect_ns=1_000_000_000)
    d = nodes("reader", block_bytes=1 << 20, blocks=64, core=core(tls), limits=limits)
    d.fill(POISON)
    transfer = new_id()
    arguments = [UCX_LIBRARY.path, tls, str(d.core.tcp_port), d.ref.boot_nonce.hex(), transfer.hex()]
    source = subprocess.Popen(
        [sys.executable, "-c", SOURCE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert source.stdout is not None
        port = int(source.stdout.readline())
        ref = native.AgentRef("source", 1, b"s" * 16)
        d.core.set_peer(ref, b"k" * 32, tcp_host="127.0.0.1", tcp_port=port, unix_path="")
        d.pull(transfer, ref, np.arange(64), lanes=[UCX], deadline_s=2.0 if how == "stopped" else 30.0)
        if how != "serves":
            d.wait(lambda _: d.core.statistics().bytes_ucx > 0 or d.find(native.TransferFinal))
            source.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "stopped":  # what it may still have been asked for is over once its session is
            d.wait_for(native.TransferFinal, id=transfer)
            d.core.peer_dead(ref)
        final = d.wait_drained(transfer)
    finally:
        source.kill()
        source.communicate(timeout=30)
    if how == "serves":
        assert final.state == COMMITTED
    elif final.state != COMMITTED:  # it may have been through before the signal
        assert final.state in (FAILED, CANCELLED)
    if final.state == COMMITTED:
        assert np.array_equal(d.memory.view(np.uint32), np.arange(64 << 18, dtype=np.uint32))
    assert d.is_idle()


def test_pools_come_and_go(nodes: Any) -> None:
    """Registrations, endpoints and keys are given back: descriptors do not grow."""
    p, d = ucx_pair(nodes, blocks=16)
    counts = []
    for _ in range(12):
        nodes.join(p, d)
        transfer = d.pull_granted(p, np.arange(16), np.arange(16), lanes=[UCX])
        assert d.wait_drained(transfer).state == COMMITTED
        region = d.register(1 << 20, is_foreign=True)
        d.core.remove_region(region.id)
        p.core.peer_dead(d.ref)
        d.core.peer_dead(p.ref)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts[6:]) <= max(counts[:6]) + 2
    d.core.remove_pool(7)
    p.core.remove_pool(7)


def test_a_pool_is_busy_while_it_is_filled(nodes: Any, new_id: NewId) -> None:
    p, d = ucx_pair(nodes, "tcp", block_bytes=1 << 20, blocks=48)
    transfer = new_id()
    p.grant(transfer, np.arange(48), ready=47)  # so it is not over, however late we look
    d.pull(transfer, p, np.arange(48), lanes=[UCX])
    d.wait(lambda _: d.core.statistics().bytes_ucx > 0)
    with pytest.raises(BlocksBusyError):
        d.core.remove_pool(7)
    p.core.ready(transfer, 48, complete=True)
    assert d.wait_drained(transfer).state == COMMITTED
