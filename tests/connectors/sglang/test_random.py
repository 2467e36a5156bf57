"""Rooms that are given up anywhere, by seed: what is done is whole, and what is free stays as it is."""

from __future__ import annotations

import pathlib
import random
import time

import pytest

from kvxfer.types import Lane
from tests.support.sglang_core.cores import PAGES, Rank, begin, idle, pair, until

ROOMS, WAVES = 8, 4
SOURCE_PAGES, TARGET_PAGES = PAGES // ROOMS, (PAGES - 8) // ROOMS
OTHERS_P, OTHERS_D = 0xEE, 0x33
"""What the next owner of a page writes, here and there."""


class Story:
    """One room, and what happens to it."""

    def __init__(self, p: Rank, d: Rank, slot: int, room: int, draw: random.Random) -> None:
        self.p, self.d, self.slot, self.room, self.draw = p, d, slot, room, draw
        self.count = draw.randint(0, TARGET_PAGES)
        self.source = draw.sample(range(slot * SOURCE_PAGES, (slot + 1) * SOURCE_PAGES), self.count)
        self.target = draw.sample(range(slot * TARGET_PAGES, (slot + 1) * TARGET_PAGES), self.count)
        for rank, pages in ((p, self.source), (d, self.target)):
            rank.write(rank.kv, pages, 2 * room)
        p.write(p.aux, (slot,), room)
        p.write(p.kv, self.source, 2 * room + 1)
        self.content = [array[self.source].copy() for array in p.kv]
        self.row = [array[slot].copy() for array in p.aux]
        self.sent = 0
        self.is_given_up = False
        begin(p, d, room, self.target, slot)
        p.sources.accept(room)

    def step(self) -> bool:
        """Whether there is more to do."""
        if self.draw.random() < 0.12:
            self.is_given_up = True
            if self.draw.random() < 0.5:
                self.p.sources.abort(self.room, "prefill gave it up")
                self.free_source()
            else:
                self.d.destinations.abort(self.room, "decode gave it up")
        if self.sent > self.count:
            return False
        pages = self.source[self.sent : self.sent + self.draw.randint(0, 3)]
        self.sent += len(pages)
        is_last = self.sent == self.count
        fence = (lambda: time.sleep(0.005)) if self.draw.random() < 0.3 else None
        self.p.sources.send(
            self.room,
            self.sent - len(pages),
            pages,
            is_last=is_last,
            aux_row=self.slot if is_last else None,
            fence=fence,
        )
        self.sent += is_last  # one beyond: all is sent
        return True

    def free_source(self) -> None:
        for array in self.p.kv:
            array[self.source] = OTHERS_P

    def end(self) -> None:
        """It is over on both sides; whose pages they are then."""
        until(lambda: self.d.heard("done", self.room) or self.d.heard("failed", self.room))
        assert self.d.destinations.is_drained(self.room)
        if self.d.heard("done", self.room):
            for array, content in zip(self.d.kv, self.content, strict=True):
                assert (array[self.target] == content).all()
            for array, row in zip(self.d.aux, self.row, strict=True):
                assert (array[self.slot] == row).all()
        else:
            assert self.is_given_up
        self.p.sources.clear(self.room)
        self.free_source()
        for array in self.d.kv:
            array[self.target] = OTHERS_D
        self.d.destinations.clear(self.room)


@pytest.mark.parametrize("lane", [Lane.CMA, Lane.STREAM])
@pytest.mark.parametrize("seed", range(10))
def test_random_rooms_end_whole_and_free_pages_stay_unwritten(tmp_path: pathlib.Path, seed: int, lane: Lane) -> None:
    draw = random.Random(seed)
    with pair(tmp_path, lanes=(lane,)) as (p, d):
        for wave in range(WAVES):
            stories = [Story(p, d, slot, wave * ROOMS + slot, draw) for slot in range(ROOMS)]
            running = list(stories)
            while running:
                story = draw.choice(running)
                if not story.step():
                    running.remove(story)
            for story in stories:
                story.end()
            idle(p, d)
            for story in stories:
                for array in d.kv:
                    assert (array[story.target] == OTHERS_D).all()
        outcomes = [event[0] for event in d.events]
        assert outcomes.count("done") > ROOMS
        assert outcomes.count("failed") > 2
        assert len(outcomes) == WAVES * ROOMS
