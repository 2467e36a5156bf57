"""vLLM's queue where blocks are short: a load that is over runs, and each request gets a turn.
The model of the queue is that of vLLM 0.28 to 0.30, which stops at the first request that gets no blocks.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from kvxfer.connectors.vllm.steps import Standing
from tests.support.vllm_connector.scheduler import BLOCK, Request, Status, new_half, step

BLOCKS = 23
STEPS_MAX = 400


@dataclasses.dataclass
class Leg:
    """A decode leg: ``begins_at`` is when its source begins its prompt, ``load_steps`` how long its load takes."""

    name: str
    blocks: int
    begins_at: int
    load_steps: int = 5
    decode_steps: int = 4
    is_plain: bool = False
    """It has no source: this engine computes it."""


class Queue:
    """One decode engine of vLLM, driven to its end; ``ended`` in that order."""

    def __init__(self, legs: list[Leg]) -> None:
        self.half, self.legs, self.now = new_half(), {leg.name: leg for leg in legs}, 0
        self.requests = {leg.name: self._request(leg) for leg in legs}
        self.waiting, self.free = [leg.name for leg in legs], BLOCKS
        self.loading: dict[str, int] = {}
        self.loaded: set[str] = set()
        self.running: dict[str, int] = {}
        self.ended: list[str] = []
        for request in self.requests.values():
            self.half.on_new_request(request)

    def _request(self, leg: Leg) -> Request:
        number = int.from_bytes(leg.name.encode(), "big")
        params = {
            "do_remote_prefill": True,
            "transfer_id": f"{number:032x}",
            "source": {"agent_id": "p"},
            "destination": {"agent_id": "me"},
        }
        return Request(leg.name, [1] * (leg.blocks * BLOCK), None if leg.is_plain else params)

    def step(self) -> None:
        self.now += 1
        for leg in self.legs.values():
            if leg.begins_at == self.now and not leg.is_plain:
                self.half.stands([Standing(leg.name, True, True)])
        ended = [name for name, until in self.loading.items() if until <= self.now]
        self.half.received(ended)
        self.loaded.update(ended)
        for name in ended:
            del self.loading[name]
        new = {}
        for name in list(self.waiting):
            leg = self.legs[name]
            if name in self.loading:
                continue
            if name not in self.loaded:
                count = self.half.matched(self.requests[name], 0)
                if count is None:
                    continue
                if leg.blocks > self.free:
                    break
                self.free -= leg.blocks
                self.half.allocated(self.requests[name], [list(range(1, leg.blocks + 1))], count)
                if count > 0:
                    self.loading[name] = self.now + leg.load_steps
                    continue
            self.waiting.remove(name)
            self.running[name] = leg.decode_steps
            new[name] = (range(1, leg.blocks + 1), 0, 1)
        step(self.half, new=new, cached={name: ((), 0, 1) for name in self.running if name not in new})
        for name in [name for name in self.running if self._ends(name)]:
            del self.running[name]
            self.free += self.legs[name].blocks
            self.requests[name].status = Status.FINISHED_STOPPED
            self.half.finished(self.requests[name], [list(range(1, self.legs[name].blocks + 1))])
            self.ended.append(name)

    def _ends(self, name: str) -> bool:
        self.running[name] -= 1
        return self.running[name] <= 0

    def run(self) -> list[str]:
        while len(self.ended) < len(self.legs):
            assert self.now < STEPS_MAX, f"it stands still: {self.waiting} wait, {self.free} blocks are free"
            self.step()
        return self.ended


def test_a_load_that_is_over_runs_before_a_leg_that_waits_for_its_blocks() -> None:
    assert Queue([Leg("a", 14, begins_at=3), Leg("b", 14, begins_at=1)]).run() == ["b", "a"]


@pytest.mark.parametrize("is_plain", [False, True])
def test_who_lacks_blocks_is_passed_over_for_loads_only(is_plain: bool) -> None:
    """Others that would begin behind it are not let past it while it waits: else it might wait for ever."""
    others = [Leg(f"c{number}", 4, begins_at=3, is_plain=is_plain) for number in range(40)]
    ended = Queue([Leg("a", 14, begins_at=3), Leg("b", 14, begins_at=1, load_steps=9), *others]).run()
    assert ended[0] == "b" if not is_plain else "b" in ended
    assert ended.index("a") < len(ended) - 20


def test_while_there_are_blocks_every_step_begins_what_it_can() -> None:
    queue = Queue([Leg(f"a{number}", 5, begins_at=1) for number in range(4)])
    queue.step()
    assert len(queue.loading) == 4


@pytest.mark.parametrize("seed", range(30))
def test_everything_ends_in_any_order(seed: int) -> None:
    draw = random.Random(seed)
    legs = [
        Leg(
            *(f"{number}", draw.randint(1, BLOCKS), draw.randint(1, 60)),
            load_steps=draw.randint(1, 12),
            decode_steps=draw.randint(1, 6),
            is_plain=draw.random() < 0.2,
        )
        for number in range(12)
    ]
    Queue(legs).run()
