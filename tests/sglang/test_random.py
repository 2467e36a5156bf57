"""Rooms that live at once, their steps in an order drawn by seed, some given up by either side at any moment: what
arrives is what was sent, what was given up ends on both sides, and nothing is written after that.

``ORDERS``, of the environment: how many. `make test-sglang` plays 200, `make nightly` 1,000.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.sglang.ranks import BOOTSTRAPPING, FAILED, POISON, SUCCESS, WAITING, Rank, World, give, send, wait

ORDERS = int(os.environ.get("ORDERS", "200"))
ROOMS, PAGES_EACH = 4, 6
ENDS_S = 10.0
GARBAGE = 0x5A


class Trial:
    """One room, and where its two sides are. Its pages and rows are its own."""

    def __init__(self, world: World, draw: random.Random, place: int) -> None:
        self.p, self.d = world.prefill, world.decode
        self.number, self.draw, self.place = world.room(), draw, place
        first = place * PAGES_EACH
        count = draw.randint(0, PAGES_EACH)
        self.source = draw.sample(range(first, first + PAGES_EACH), count)
        self.target = draw.sample(range(first, first + PAGES_EACH), count)
        fresh = np.random.default_rng(self.number)
        self.content = [fresh.integers(0, 256, (count, array.shape[1]), np.uint8) for array in self.p.kv]
        """Of each buffer: what the prompt's pages hold."""
        self.sender: Any = None
        self.receiver: Any = None
        self.gave_up = ""
        self.steps = {"prefill": self._prefill(), "decode": self._decode()}
        victim = draw.choice(["", "", "prefill", "decode"])
        self.abort_at = (victim, draw.randint(1, 6))

    def step(self, side: str) -> None:
        """That side does its next thing, if it can; it gives up instead where its time has come."""
        victim, left = self.abort_at
        if side == victim and not self.gave_up:
            self.abort_at = (victim, left - 1)
            end = self.sender if side == "prefill" else self.receiver
            if left <= 0 and end is not None:
                self._give_up(side, end)
        if side in self.steps and next(self.steps[side], None) == "over":
            del self.steps[side]

    def _give_up(self, side: str, end: Any) -> None:
        self.gave_up = side
        end.abort()
        if side == "prefill":  # its pages are free when that returns
            for array in self.p.kv:
                array[self.source] = GARBAGE

    def _prefill(self) -> Iterator[str]:
        self.sender = self.p.sender(self.number)
        yield ""
        while (now := self.sender.poll()) != WAITING:
            if now in (FAILED, SUCCESS):
                yield "over"
            if self.gave_up == "decode" and self.receiver.poll() == FAILED:
                self.sender.abort()  # as a router has it, which hangs up on both
            yield ""
        self.sender.pop_decode_prefix_len()
        self.sender.init(len(self.source), self.place)
        yield ""
        inner = range(1, len(self.source))
        cuts = sorted(self.draw.sample(inner, min(len(inner), self.draw.randint(0, 2))))
        for first, last in zip([0, *cuts], [*cuts, len(self.source)], strict=True):
            if self.gave_up == "prefill":
                yield "over"
            for array, content in zip(self.p.kv, self.content, strict=True):
                array[self.source[first:last]] = content[first:last]
            send(self.sender, self.source[first:last])
            yield ""
        while self.sender.poll() not in (FAILED, SUCCESS):
            yield ""
        yield "over"

    def _decode(self) -> Iterator[str]:
        self.receiver = self.d.receiver(self.number)
        yield ""
        while not self.d.manager.try_ensure_parallel_info(self.receiver.bootstrap_addr):
            if self.receiver.poll() == FAILED:
                yield "over"
            yield ""
        self.receiver.init(0)
        while (now := self.receiver.poll()) == BOOTSTRAPPING:
            yield ""
        if now != FAILED and self.gave_up != "decode":
            give(self.receiver, self.target, self.place)
        while self.receiver.poll() not in (FAILED, SUCCESS):
            yield ""
        yield "over"

    @property
    def ends(self) -> tuple[int, int]:
        return self.sender.poll(), self.receiver.poll()

    def clear(self) -> None:
        for side in (self.sender, self.receiver):
            side.clear()


def play(world: World, seed: int) -> list[tuple[int, int]]:
    """How each room ended, for prefill and for decode."""
    draw = random.Random(seed)
    world.decode.poison()
    trials = [Trial(world, draw, place) for place in range(ROOMS)]
    end_s = time.monotonic() + ENDS_S
    while open_trials := [trial for trial in trials if trial.steps]:
        assert time.monotonic() < end_s, [(trial.abort_at, trial.gave_up, list(trial.steps)) for trial in open_trials]
        trial = draw.choice(open_trials)
        trial.step(draw.choice(list(trial.steps)))
        if draw.random() < 0.2:
            time.sleep(0.001)
    for trial in trials:
        judge(world.decode, trial)
    ends = [trial.ends for trial in trials]
    for trial in trials:
        trial.clear()
    return ends


def judge(decode: Rank, trial: Trial) -> None:
    """Its pages hold what was sent, or, where it failed, nothing more comes."""
    sent, received = trial.ends
    if not trial.gave_up:
        assert (sent, received) == (SUCCESS, SUCCESS)
    if received == SUCCESS:
        for array, content in zip(decode.kv, trial.content, strict=True):
            assert np.array_equal(array[trial.target], content)
        for mine, theirs in zip(decode.aux, trial.p.aux, strict=True):
            assert np.array_equal(mine[trial.place], theirs[trial.place])
        return
    wait(lambda: decode.manager.is_abort_release_safe(trial.number, 1))
    for array in decode.kv:  # another request's
        array[trial.target] = POISON
    time.sleep(0.002)
    assert all((array[trial.target] == POISON).all() for array in decode.kv), "written after it was free"


@pytest.mark.parametrize("first", range(0, ORDERS, 20))
def test_random_orders_of_calls_deliver_what_was_sent(world: World, first: int) -> None:
    ends = []
    for seed in range(first, min(first + 20, ORDERS)):
        try:
            ends += play(world, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert {(SUCCESS, SUCCESS), (FAILED, FAILED)} <= set(ends)
    for rank in (world.prefill, world.decode):
        wait(lambda rank=rank: rank.manager.core.statistics().agent.is_idle)
