"""The service of a tier in real vLLM ends, or hangs, while blocks are on their way to it or from it: the answer is
right, nothing waits long, the error has its name, and once the service is there again blocks come back."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Iterator

import pytest

from tests.support.vllm.tiered import ALL, BLOCK_TOKENS, WHOLE, Driven, TierProcess, Within

pytestmark = [pytest.mark.nightly]
AFTER = 3
"""Blocks that are moved, one after the other, before the signal."""
LONGEST_S = 25.0


class Pair:
    """A service, and an engine that moves one block at a time."""

    def __init__(self, folder: pathlib.Path, model: pathlib.Path) -> None:
        self.service = TierProcess(folder)
        tier = {**self.service.tier, "deadline_s": 3.0, "window": 1}
        self.engine = Driven(model, tier, folder / "engine.log").wait_ready()
        self.engine.wait_attached()

    def strike(self, on: str, number: signal.Signals) -> None:
        self.engine.ask("strike", on=on, after=AFTER, pid=self.service.process.pid, number=int(number))

    def heal(self, number: signal.Signals) -> None:
        """The service is there again, as it was or anew."""
        if number is signal.SIGSTOP:
            self.service.signal(signal.SIGCONT)
        else:
            self.service.end()
            self.service.start()

    def end(self) -> None:
        self.engine.end()
        self.service.end()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: pathlib.Path) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("lost"), tiny_model)
    yield pair
    pair.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_service_that_is_lost_while_blocks_come_back(pair: Pair, number: signal.Signals) -> None:
    engine = pair.engine
    first = engine.tokens([1, 2, 3, 4])
    before = engine.errors()
    pair.strike("load", number)
    with Within(LONGEST_S):
        tokens, cached = engine.generate(1)
    assert tokens == first[0]
    assert cached <= AFTER * BLOCK_TOKENS
    assert lost(engine, "load", before) == WHOLE - AFTER
    with Within(LONGEST_S):
        assert engine.tokens([2, 3]) == first[1:3]
    pair.heal(number)
    assert_comes_back(pair, first)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_service_that_is_lost_while_blocks_are_stored(pair: Pair, number: signal.Signals) -> None:
    engine, seed = pair.engine, 50 + int(number)
    first = engine.tokens([1, 2, 3, 4])
    before = engine.errors()
    pair.strike("save", number)
    with Within(LONGEST_S):
        computed = engine.generate(seed)
    assert computed[1] == 0
    assert lost(engine, "save", before) == WHOLE - AFTER
    with Within(LONGEST_S):
        assert engine.tokens([1, 2, 3]) == first[:3]
        assert engine.generate(seed)[0] == computed[0]
    pair.heal(number)
    assert_comes_back(pair, first)


def lost(engine: Driven, tried: str, before: dict[str, int]) -> int:
    """Blocks that could not be moved since, by the codes of a peer that is gone or silent."""
    found = {name: count - before.get(name, 0) for name, count in engine.errors().items()}
    codes = {name.split()[1] for name, count in found.items() if count}
    assert codes <= {"peer_gone", "deadline"}, found
    return sum(count for name, count in found.items() if name.startswith(tried))


def assert_comes_back(pair: Pair, first: list[list[int]]) -> None:
    """Once the engine has found the service again, what it computes is stored, and comes back."""
    with Within(LONGEST_S):
        while True:
            assert pair.engine.tokens([1, 2, 3, 4]) == first
            tokens, cached = pair.engine.generate(1)
            assert tokens == first[0]
            if cached == ALL:
                return
