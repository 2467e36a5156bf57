"""Engines that are cut differently: every head of every token arrives where one rank would hold it, nowhere else; and
what is given up anywhere ends everywhere, with nothing written later."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.sglang.cuts import Cutting, Engines, Room, are_idle, engines_of
from tests.support.sglang.ranks import BOOTSTRAPPING, FAILED, SUCCESS, WAITING, give, reason, wait, wait_for

SOURCE, TARGET = [7, 3, 12, 5, 20, 1, *range(40, 58)], [2, 21, 8, 6, 15, 11, *range(60, 40, -1)]
TOLD_S = 1.5
"""So soon every rank hears of what one did: through one peer, and from there through another."""


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    yield from engines_of(tmp_path_factory.mktemp("cuts"), request.param)


@pytest.fixture(autouse=True)
def poisoned(engines: Engines) -> Iterator[None]:
    for rank in engines.d:
        rank.poison()
    yield
    wait(lambda: are_idle(engines))


TP = [Cutting(1, 2), Cutting(2, 1), Cutting(2, 4), Cutting(4, 2)]
PAGES = [Cutting(1, 1, 4, (16, 8)), Cutting(1, 1, 4, (8, 32)), Cutting(2, 1, 4, (16, 4)), Cutting(1, 2, 4, (4, 16))]
REPLICAS = [Cutting(4, 2, 2), Cutting(1, 4, 2), Cutting(2, 1, 0), Cutting(1, 2, 0)]
"""Ranks that hold the same head, or latent."""


STAGES = [
    Cutting(1, 1, stages=(2, 1)),
    Cutting(1, 1, stages=(3, 3)),
    Cutting(2, 1, stages=(2, 1)),
    Cutting(1, 2, 4, (16, 8), stages=(3, 1)),
    Cutting(4, 2, 2, stages=(2, 1)),
    Cutting(1, 2, 0, stages=(2, 1)),
]
"""Of pipelines: prefill's hold the layers that one of decode's has, or the same."""


@pytest.mark.parametrize("engines", [*TP, *PAGES, *REPLICAS, *STAGES], ids=str, indirect=True)
def test_every_byte_arrives_and_no_other_is_touched(engines: Engines) -> None:
    rooms = [Room(engines, 61, SOURCE, TARGET), Room(engines, 16, [21, 22, 23, 24], [30, 31, 32, 33], row=2)]
    for room in rooms:
        room.run()
    for room in rooms:
        room.wait()
    engines.check(*(room.result for room in rooms), rows=[(0, 1), (2, 3)])
    for room in rooms:
        room.clear()
        for rank in (*engines.p, *engines.d):
            assert room.number not in rank.manager.request_status


@pytest.mark.parametrize("engines", [TP[0], TP[1], STAGES[0]], ids=str, indirect=True)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("state", ["bootstrapping", "waiting", "transferring"])
def test_abort_on_one_rank_ends_the_room_on_all(engines: Engines, role: str, state: str) -> None:
    room = Room(engines, 61, SOURCE, TARGET)
    room.open()
    if state != "bootstrapping":
        room.give()
    if state == "transferring":
        room.send(0, 2)
        time.sleep(0.2)
    own = room.senders if role == "prefill" else room.receivers
    for side in own if state == "bootstrapping" else own[:1]:  # before there is a room SGLang ends it on every rank
        side.abort()
    if (role, state) == ("prefill", "bootstrapping"):
        for receiver in room.receivers:
            give(receiver, room.target, room.row)
    for side in (*room.senders, *room.receivers):
        wait(lambda side=side: side.poll() == FAILED, TOLD_S)
        assert reason(side)
    for rank in engines.d:
        assert rank.manager.is_abort_release_safe(room.number, 1)
        rank.poison()  # another request's
    for rank in engines.p:
        for array in rank.kv:
            array[room.source] = 0
    time.sleep(0.2)
    engines.check()
    room.clear()
    again = Room(engines, 40, SOURCE, TARGET, row=4)
    again.run()
    again.wait()
    engines.check(again.result, rows=[(4, 5)])
    again.clear()


@pytest.mark.parametrize("engines", [Cutting(1, 1, 4, (16, 8)), Cutting(1, 2, 4, (16, 4))], ids=str, indirect=True)
@pytest.mark.parametrize("prefix", [8, 16, 24, 40])
def test_cached_prefix_of_decode_is_not_sent(engines: Engines, prefix: int) -> None:
    """Also where it ends within a page of prefill's."""
    room = Room(engines, 61, SOURCE, TARGET, prefix=prefix)
    room.run()
    room.wait()
    engines.check(room.result, rows=[(0, 1)])
    room.clear()


@pytest.mark.parametrize("engines", [Cutting(4, 2, 2)], ids=str, indirect=True)
def test_of_replicas_one_is_asked(engines: Engines) -> None:
    room = Room(engines, 32, SOURCE, TARGET)
    room.run()
    room.wait()
    given = [rank.manager.core.sources.moved(room.number).bytes > 0 for rank in engines.p]
    assert given == [True, False, False, True], "the r-th of them"
    assert [[info["is_dummy"] for info in receiver.bootstrap_infos] for receiver in room.receivers] == [
        [False, True],
        [True, False],
    ]
    room.clear()


@pytest.mark.parametrize("engines", [Cutting(2, 4)], ids=str, indirect=True)
def test_a_prefill_rank_waits_for_all_that_ask_it(engines: Engines) -> None:
    room = Room(engines, 32, SOURCE, TARGET)
    room.open()
    for receiver in room.receivers[:3]:
        give(receiver, room.target, 0)
    wait_for(room.senders[0], WAITING)
    time.sleep(0.3)
    assert room.senders[1].poll() == BOOTSTRAPPING
    give(room.receivers[3], room.target, 0)
    for sender in room.senders:
        wait_for(sender, WAITING)
        sender.init(len(room.source), 1)
    room.send(0, 2)
    room.wait()
    engines.check(room.result, rows=[(0, 1)])
    room.clear()


@pytest.mark.parametrize("engines", [Cutting(1, 1)], ids=str, indirect=True)
def test_engines_that_are_cut_alike_have_no_views(engines: Engines) -> None:
    room = Room(engines, 32, SOURCE, TARGET)
    room.run()
    room.wait()
    for rank in (*engines.p, *engines.d):
        assert rank.manager.core._pools.views is not None
        assert not len(rank.manager.core._pools.views)
    engines.check(room.result, rows=[(0, 1)])
    assert np.array_equal(engines.d[0].kv[0][TARGET[0]], engines.p[0].kv[0][SOURCE[0]])
    assert room.senders[0].poll() == SUCCESS
    room.clear()


@pytest.mark.parametrize("engines", [Cutting(1, 1)], ids=str, indirect=True)
def test_pages_that_hold_other_heads_are_refused(engines: Engines) -> None:
    other = engines.world.rank("decode", heads=8)
    receiver = other.receiver(engines.world.room())
    other.greet(receiver)
    assert receiver.poll() == FAILED
    assert "head_bytes of k of layer 0: 8 here, 16 there" in reason(receiver)
