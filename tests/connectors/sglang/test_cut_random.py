"""Rooms between engines that are cut differently, given up anywhere, by seed: what is done is whole, what is free stays
as it is."""

from __future__ import annotations

import pathlib
import random
import time

import numpy as np
import pytest

from kvxfer.types import Lane
from tests.support.sglang_core.cores import Rank, until
from tests.support.sglang_core.engines import Cutting, Engine, Room, engines

ROOMS, WAVES = 6, 3
OTHERS_P, OTHERS_D = 0xEE, 0xE1
"""What the next owner of a page writes, here and there; no content has either."""
PAGES = 24


def own(engine: Engine, pages: list[int], value: int) -> None:
    for rank in engine.ranks:
        for array in rank.kv:
            array[pages] = value


def ended(rank: Rank, room: int) -> str:
    until(lambda: rank.heard("done", room) or rank.heard("failed", room), 20)
    return "done" if rank.heard("done", room) else "failed"


@pytest.mark.parametrize("lane", [Lane.CMA, Lane.STREAM])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Cutting(tp=2), Cutting()),
        (Cutting(), Cutting(tp=2, page_tokens=8)),
        (Cutting(tp=4), Cutting(tp=2)),
        (Cutting(pp=2, page_tokens=8), Cutting()),
    ],
    ids=["2:1", "1:2", "4:2", "pp2:1"],
)
def test_random_shapes_end_whole(tmp_path: pathlib.Path, prefill: Cutting, decode: Cutting, lane: Lane) -> None:
    draw = random.Random(f"{prefill}{decode}{lane}")
    outcomes: list[str] = []
    with engines(tmp_path, prefill, decode, lanes=(lane,)) as (p, d):
        for wave in range(WAVES):
            rooms = []
            for slot in range(ROOMS):
                pages = [draw.sample(range(slot * 4, slot * 4 + 4), 4) for _ in range(2)]
                room = Room(p, d, 1 + wave * ROOMS + slot, draw.randint(1, 16), *pages)
                p.write(room.source, room.seed)
                own(d, room.target, OTHERS_D)
                room.begin(slot)
                rooms.append(room)
            sent = {room.number: [0] * len(p.ranks) for room in rooms}
            todo = [(room, at) for room in rooms for at in range(len(p.ranks))]
            while todo:
                room, at = draw.choice(todo)
                if draw.random() < 0.04:
                    if draw.random() < 0.5:
                        for rank in p.ranks:
                            rank.sources.abort(room.number, "prefill gave it up")
                        own(p, room.source, OTHERS_P)
                    else:
                        draw.choice(d.ranks).destinations.abort(room.number, "decode gave it up")
                first = sent[room.number][at]
                last = min(first + draw.randint(0, 2), len(room.source))
                is_last = last == len(room.source)
                fence = (lambda: time.sleep(0.004)) if draw.random() < 0.3 else None
                pages, aux_row = room.source[first:last], 0 if is_last else None
                p.ranks[at].sources.send(room.number, first, pages, is_last=is_last, aux_row=aux_row, fence=fence)
                sent[room.number][at] = last
                if is_last:
                    todo.remove((room, at))
            for room in rooms:
                for at, rank in enumerate(d.ranks):
                    outcome = ended(rank, room.number)
                    outcomes.append(outcome)
                    assert rank.destinations.is_drained(room.number)
                    if outcome == "done":
                        _, _, tokens = room.arrived
                        wanted = d.expected(at, [(room.target, room.seed, tokens)])
                        for expected, found in zip(wanted, rank.kv, strict=True):
                            is_written = expected[room.target] != 0xA5
                            same = found[room.target] == expected[room.target]
                            assert np.where(is_written, same, found[room.target] == OTHERS_D).all()
                    for array in rank.kv:
                        array[room.target] = OTHERS_D
                for rank in p.ranks:
                    rank.sources.clear(room.number)
                own(p, room.source, OTHERS_P)
                for rank in d.ranks:
                    rank.destinations.clear(room.number)
            until(lambda: p.is_free and d.is_free)
            for rank in d.ranks:
                assert all((array[room.target] == OTHERS_D).all() for array in rank.kv for room in rooms)
    assert outcomes.count("done") > ROOMS
    assert outcomes.count("failed") > 0
