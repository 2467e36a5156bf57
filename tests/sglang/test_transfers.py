"""What succeeds: pages and auxiliary rows are the source's byte for byte, and nothing else was touched."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.sglang.ranks import (
    AUX_BYTES,
    LAYERS,
    POISON,
    SUCCESS,
    WAIT_S,
    WAITING,
    Rank,
    World,
    send,
    start,
    wait_for,
)


@pytest.fixture(autouse=True)
def poisoned(world: World) -> None:
    world.decode.poison()


def check(prefill: Rank, decode: Rank, pages: dict[int, int], rows: dict[int, int]) -> None:
    """``pages`` and ``rows``: of decode, and which of prefill's each holds now. All others are poisoned still."""
    for mine, theirs, moved in ((decode.kv, prefill.kv, pages), (decode.aux, prefill.aux, rows)):
        for here, there in zip(mine, theirs, strict=True):
            for index in range(len(here)):
                wanted = there[moved[index]] if index in moved else np.full_like(here[index], POISON)
                assert np.array_equal(here[index], wanted), index


@pytest.mark.parametrize(
    "chunks",
    [[[3]], [[3, 4, 5, 6]], [[1, 2], [9]], [[7, 3], [5], [20, 21, 22]], [[]]],
    ids=["one", "many", "two chunks", "three chunks", "nothing but the row"],
)
def test_pages_and_row_arrive(world: World, chunks: list[list[int]]) -> None:
    sources = [page for chunk in chunks for page in chunk]
    targets = [40 - index for index in range(len(sources))]
    room = world.room()
    sender = world.prefill.sender(room)
    receiver = world.decode.ask(room, targets, 2)
    assert start(sender, len(sources), 5) == 0
    for chunk in chunks:
        send(sender, chunk)
    wait_for(receiver, SUCCESS)
    wait_for(sender, SUCCESS)
    check(world.prefill, world.decode, dict(zip(targets, sources, strict=True)), {2: 5})
    sender.clear()
    metric = sender.get_transfer_metric()
    assert metric.transfer_total_bytes == len(sources) * 2 * LAYERS * 256 + sum(AUX_BYTES)
    assert 0 < metric.transfer_latency_s < WAIT_S
    receiver.clear()
    for manager in (world.prefill.manager, world.decode.manager):
        assert room not in manager.request_status
    assert room not in world.prefill.manager.transfer_infos


def test_decode_may_come_first(world: World) -> None:
    room = world.room()
    receiver = world.decode.ask(room, [10, 11], 1)
    sender = world.prefill.sender(room)
    start(sender, 2, 1)
    send(sender, [1, 2])
    wait_for(receiver, SUCCESS)
    wait_for(sender, SUCCESS)
    check(world.prefill, world.decode, {10: 1, 11: 2}, {1: 1})
    sender.clear()
    receiver.clear()


def test_cached_prefix_of_decode_is_not_sent(world: World) -> None:
    room = world.room()
    sender = world.prefill.sender(room)
    receiver = world.decode.ask(room, [30], 0, prefix=32)
    assert start(sender, 1, 3) == 32
    send(sender, [12])
    wait_for(receiver, SUCCESS)
    check(world.prefill, world.decode, {30: 12}, {0: 3})
    wait_for(sender, SUCCESS)
    sender.clear()
    receiver.clear()


def test_many_rooms_at_once(world: World) -> None:
    rooms = [world.room() for _ in range(12)]
    senders = [world.prefill.sender(room) for room in rooms]
    receivers = [world.decode.ask(room, [4 * i, 4 * i + 1, 4 * i + 2], i) for i, room in enumerate(rooms)]
    for i, sender in enumerate(senders):
        start(sender, 3, i)
        send(sender, [i, i + 1])
    for i, sender in enumerate(senders):
        send(sender, [i + 2])
    for side in (*receivers, *senders):
        wait_for(side, SUCCESS)
    pages = {4 * i + j: i + j for i in range(12) for j in range(3)}
    check(world.prefill, world.decode, pages, {i: i for i in range(12)})
    for side in (*receivers, *senders):
        side.clear()


def test_a_hybrid_models_state_comes_along(world: World) -> None:
    prefill, decode = world.rank("prefill", state_bytes=96), world.rank("decode", state_bytes=96)
    room = world.room()
    sender = prefill.sender(room)
    receiver = decode.ask(room, [8], 0, state=[[np.array([7], np.int32)]])
    start(sender, 1, 0)
    send(sender, [4], [[np.array([2], np.int32)]])
    wait_for(receiver, SUCCESS)
    wait_for(sender, SUCCESS)
    check(prefill, decode, {8: 4}, {0: 0})
    assert np.array_equal(decode.state[0][7], prefill.state[0][2])
    assert (decode.state[0][:7] == POISON).all()
    prefill.stop()
    world.rank("prefill")  # the bootstrap server sends the next ones to the newest


def test_a_sent_room_waits_for_its_end(world: World) -> None:
    world.prefill = world.rank("prefill")
    world.decode.manager.forget(world.address)
    room = world.room()
    sender, receiver = world.prefill.sender(room), world.decode.ask(room, [1, 2], 0)
    start(sender, 2, 0)
    send(sender, [1])
    assert receiver.poll() == WAITING
    send(sender, [2])
    wait_for(receiver, SUCCESS)
    wait_for(sender, SUCCESS)
