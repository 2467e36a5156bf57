"""Bytes from one core's pool to another's, over both lanes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from tests.support.native.nodes import NewId

MAPPED, STREAM = native.Lane.MAPPED, native.Lane.STREAM
COMMITTED = native.TransferState.COMMITTED
each_lane = pytest.mark.parametrize("lane", [MAPPED, STREAM], ids=["mapped", "stream"])


def check_moved(source: Any, reader: Any, granted: Any, filled: Any) -> None:
    """The filled blocks hold the granted ones, and no other block of the reader was touched."""
    assert reader.content(filled) == source.content(granted)
    others = sorted(set(range(reader.blocks)) - {int(b) for b in filled})
    assert all(set(reader.block(b)) == {0xEE} for b in others)


@each_lane
@pytest.mark.parametrize("block_bytes", [1, 7, 4096, 65536 + 3, 3 << 20])
def test_every_size(nodes: Any, new_id: NewId, lane: native.Lane, block_bytes: int) -> None:
    blocks = min(500, max(8, (16 << 20) // block_bytes))
    p, d = nodes.pair(block_bytes=block_bytes, blocks=blocks)
    rng = np.random.default_rng(block_bytes)
    granted, filled = rng.permutation(blocks)[: blocks // 2], rng.permutation(blocks)[: blocks // 2]
    transfer = new_id()
    p.grant(transfer, granted, reader="reader")
    d.pull(transfer, p, filled, lanes=[lane])
    final = d.wait_drained(transfer)
    assert (final.state, final.code, final.lane) == (COMMITTED, native.Code.ok, lane), final.text
    assert (final.attempts, final.blocks_done, final.lane_notes) == (1, len(granted), "")
    check_moved(p, d, granted, filled)
    p.wait_for(native.GrantEnded, id=transfer, state=native.GrantState.RELEASED)
    assert p.is_idle()
    assert d.is_idle()
    moved = d.core.statistics()
    assert (moved.bytes_mapped if lane == MAPPED else moved.bytes_streamed_in) == len(granted) * block_bytes
    assert moved.bytes_discarded == 0


@each_lane
def test_segments_cut_differently(nodes: Any, lane: native.Lane) -> None:
    """A block is its segments in order; how each side cuts them is its own affair."""
    k_and_v = [(0, 600, 600), (64 * 600, 1000, 424)]
    layers = [(5, 16 * 64, 256), (5 + 256, 16 * 64, 256), (5 + 512, 16 * 64, 512)]
    p, d = nodes.pair(
        block_bytes=1024,
        blocks=50,
        source={"segments": k_and_v, "region_bytes": 64 * 1600},
        reader={"segments": layers, "region_bytes": 64 * 1024 + 5},
    )
    rng = np.random.default_rng(1)
    granted, filled = rng.permutation(50)[:37], rng.permutation(50)[:37]
    transfer = d.pull_granted(p, granted, filled, lanes=[lane])
    assert d.wait_drained(transfer).state == COMMITTED
    check_moved(p, d, granted, filled)
    assert d.memory[:5].tolist() == [0xEE] * 5


@each_lane
def test_neighbours_in_order(nodes: Any, new_id: NewId, lane: native.Lane) -> None:
    p, d = nodes.pair(block_bytes=512, blocks=2000)
    transfer = new_id()
    granted, filled = np.arange(100, 1900), np.arange(0, 1800)
    p.grant(transfer, granted)
    d.pull(transfer, p, filled, lanes=[lane])
    assert d.wait_drained(transfer).state == COMMITTED
    check_moved(p, d, granted, filled)


@each_lane
def test_ready_step_by_step(nodes: Any, new_id: NewId, lane: native.Lane) -> None:
    p, d = nodes.pair(block_bytes=4096, blocks=64)
    transfer = new_id()
    p.grant(transfer, np.arange(60), ready=0)
    d.pull(transfer, p, np.arange(4, 64), lanes=[lane])
    for count in (1, 7, 8, 30, 59):
        p.core.ready(transfer, count, layers=count)
        d.wait(lambda _, n=count: d.find(native.TransferProgress, id=transfer, done=n), f"{count} blocks")
        assert d.core.transfer_state(transfer) == native.TransferState.READING
        assert d.content(range(4, 4 + count)) == p.content(range(count))
    p.core.ready(transfer, 60, complete=True)
    final = d.wait_drained(transfer)
    assert (final.state, final.blocks_before_complete) == (COMMITTED, 59)
    check_moved(p, d, range(60), range(4, 64))


@each_lane
def test_pull_before_grant_and_the_tail_only(p: Any, d: Any, new_id: NewId, lane: native.Lane) -> None:
    transfer = new_id()
    d.pull(transfer, p, [3, 1, 2], lanes=[lane], first=5)
    d.wait_for(native.SessionUp)
    time.sleep(0.05)
    p.grant(transfer, [9, 8, 7, 6, 5, 4, 3, 2])
    assert d.wait_drained(transfer).state == COMMITTED
    check_moved(p, d, [4, 3, 2], [3, 1, 2])


@each_lane
def test_many_pulls_at_once_commit(nodes: Any, new_id: NewId, lane: native.Lane) -> None:
    p, d = nodes.pair(block_bytes=2048, blocks=1024)
    rng = np.random.default_rng(3)
    granted, filled = rng.permutation(1024).reshape(128, 8), rng.permutation(1024).reshape(128, 8)
    ids = [new_id() for _ in granted]
    for transfer, blocks in zip(ids, filled, strict=True):
        d.pull(transfer, p, blocks, lanes=[lane])
    for transfer, blocks in zip(ids, granted, strict=True):
        p.grant(transfer, blocks)
    for transfer in ids:
        assert d.wait_drained(transfer).state == COMMITTED
    check_moved(p, d, granted.ravel(), filled.ravel())
    for transfer in ids:
        p.wait_for(native.GrantEnded, id=transfer)
    assert p.is_idle()
    assert d.core.statistics().connections == 1


def test_pulls_in_both_directions_at_once(nodes: Any, new_id: NewId) -> None:
    p, d = nodes.pair(block_bytes=65536, blocks=128)
    before = p.content(range(64))
    d.memory[64 * 65536 :] = 0x11
    there, back = new_id(), new_id()
    p.grant(there, range(64))
    d.grant(back, range(64, 128))
    d.pull(there, p, range(64), lanes=[STREAM])
    p.pull(back, d, range(64, 128), lanes=[STREAM])
    assert d.wait_drained(there).state == COMMITTED
    assert p.wait_drained(back).state == COMMITTED
    assert d.content(range(64)) == before
    assert all(set(block) == {0x11} for block in p.content(range(64, 128)))


def test_lanes_in_order_of_wish(nodes: Any) -> None:
    """Where the pool cannot be mapped the next lane serves, and the result says why."""
    p, d = nodes.pair(source={"is_shareable": False})
    transfer = d.pull_granted(p, [1, 2], [5, 6])
    final = d.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, STREAM)
    assert "cannot be mapped" in final.lane_notes
    check_moved(p, d, [1, 2], [5, 6])


def test_no_unix_socket(nodes: Any, new_id: NewId) -> None:
    p, d = nodes.pair(source={"has_unix": False})
    transfer, hopeless = new_id(), new_id()
    p.grant(transfer, [1])
    d.pull(transfer, p, [5])
    final = d.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, STREAM)
    assert "no Unix socket" in final.lane_notes
    d.pull(hopeless, p, [6], lanes=[MAPPED])
    final = d.wait_drained(hopeless)
    assert (final.state, final.code) == (native.TransferState.FAILED, native.Code.no_lane)


def test_incompatible_pools(nodes: Any) -> None:
    p, d = nodes.pair(source={"digest": b"e" * 32})
    transfer = d.pull_granted(p, [1], [5])
    final = d.wait_drained(transfer)
    assert (final.state, final.code) == (native.TransferState.FAILED, native.Code.incompatible)


def test_notifications(p: Any, d: Any) -> None:
    numbers = [p.core.notify(d.ref, bytes([i]) * i) for i in range(50)]
    assert numbers == list(range(1, 51))
    d.wait(lambda _: len(d.find(native.NotifReceived)) == 50)
    assert [e.payload for e in d.find(native.NotifReceived)] == [bytes([i]) * i for i in range(50)]
    assert {e.sender.agent_id for e in d.find(native.NotifReceived)} == {"source"}
    p.wait(lambda _: len(p.find(native.NotifDelivered)) == 50)
    assert [e.seq for e in p.find(native.NotifDelivered)] == numbers
