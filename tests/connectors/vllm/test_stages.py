"""Pipeline stages that end elsewhere in two engines: each rank reads its layers where they are kept. Over real agents,
without vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvxfer.connectors.common.ids import rank_agent
from kvxfer.connectors.vllm.fetch import LoadEnded
from kvxfer.connectors.vllm.stage import StageLayers
from kvxfer.connectors.vllm.steps import ComputedBlocks, LoadOrder, RemotePrompt, StepOrders
from kvxfer.errors import IncompatibleError
from tests.support.vllm_connector.pair import (
    LAYERS,
    OPTIONS,
    Rank,
    engines_of,
    finish_order,
    is_idle,
    load_order,
    open_order,
    until,
)

ENDS = ["", "1,3", "2,3", "1,2,3"]
PAIRS = pytest.mark.parametrize(
    ("theirs", "ours"), [(theirs, ours) for theirs in ENDS for ours in ENDS if theirs or ours]
)


class Engines:
    """Engine ``p`` and engine ``d``, whose stages end there; each stage has ``ranks`` ranks with the same head."""

    def __init__(self, made: dict[str, Rank], theirs: str, ours: str, ranks: int) -> None:
        counts = {"p": ranks * (theirs.count(",") + 1), "d": ranks * (ours.count(",") + 1)}
        self.sources = [made[rank_agent("p", rank)] for rank in range(counts["p"])]
        self.readers = [made[rank_agent("d", rank)] for rank in range(counts["d"])]
        self.names = tuple(rank_agent("p", rank) for rank in range(counts["p"]))
        self.stages = theirs

    def order(self, first: int, blocks: tuple[int, ...], *, has_direct: bool, is_open: bool = False) -> LoadOrder:
        order = load_order(first, blocks, has_direct=has_direct)
        return dataclasses.replace(order, sources=self.names, stages=self.stages, is_open=is_open)

    def step(self, orders: StepOrders, blocks: list[int], seed: int = 0) -> None:
        for source in self.sources:
            source.forward(orders, blocks, seed)

    def begin(self, orders: StepOrders) -> None:
        for source in self.sources:
            source.source.begin_step(orders)

    async def load(self, order: LoadOrder) -> list[LoadEnded]:
        return await asyncio.wait_for(asyncio.gather(*(reader.load(order) for reader in self.readers)), 20.0)

    def arrived(self, held: list[int], into: list[int]) -> bool:
        """Whether every reader has of every layer what the sources have."""
        written = {}
        for source in self.sources:
            for at in range(len(source.memory)):
                written[source.first_layer + at] = source.memory[at, held]
        return all(
            bool((reader.memory[at, into] == written[reader.first_layer + at]).all())
            for reader in self.readers
            for at in range(len(reader.memory))
        )

    async def are_idle(self) -> None:
        for source in self.sources:
            await until(lambda source=source: source.freed == ["r"])  # type: ignore[misc]
        for rank in self.sources + self.readers:
            await is_idle(rank)


@contextlib.asynccontextmanager
async def engines(theirs: str, ours: str, *, ranks: int = 1, how: str = "loop") -> AsyncIterator[Engines]:
    async with engines_of(OPTIONS, ("p", "d"), how=how, ranks=ranks, stages={"p": theirs, "d": ours}) as made:
        for rank in made.values():
            rank.memory[:] = 0xA5
        yield Engines(made, theirs, ours, ranks)


@PAIRS
@pytest.mark.parametrize("how", ["loop", "thread"])
async def test_a_finished_prompt_arrives(theirs: str, ours: str, how: str) -> None:
    async with engines(theirs, ours, how=how) as two:
        two.step(StepOrders(True), [1, 2, 3], 5)
        two.begin(finish_order((1, 2, 3)))
        ended = await two.load(two.order(0, (5, 7, 6), has_direct=True))
        assert [over.error for over in ended] == [None] * len(ended)
        assert two.arrived([1, 2, 3], [5, 7, 6])
        await two.are_idle()
        moved = sum(over.report.bytes for over in ended)
        assert moved == LAYERS * 3 * two.readers[0].memory.shape[-1]


@PAIRS
@pytest.mark.parametrize("ranks", [1, 2])
async def test_chunks_arrive_while_they_are_computed(theirs: str, ours: str, ranks: int) -> None:
    async with engines(theirs, ours, ranks=ranks) as two:
        loading = asyncio.ensure_future(two.load(two.order(1, (5, 6, 7, 8), has_direct=False)))
        await asyncio.sleep(0.05)
        two.begin(open_order(5))
        two.step(StepOrders(True, chunks=(ComputedBlocks("r", (0,)),)), [0], 7)
        two.step(StepOrders(True, chunks=(ComputedBlocks("r", (1, 2)),)), [1, 2], 8)
        two.step(StepOrders(True, chunks=(ComputedBlocks("r", (3, 4)),)), [3, 4], 9)
        two.begin(finish_order((0, 1, 2, 3, 4), "d"))
        assert [over.error for over in await loading] == [None] * len(two.readers)
        assert two.arrived([1, 2, 3, 4], [5, 6, 7, 8])
        await two.are_idle()


@PAIRS
async def test_a_prompt_without_a_named_reader_is_claimed(theirs: str, ours: str) -> None:
    async with engines(theirs, ours) as two:
        two.step(StepOrders(True), [1, 2], 5)
        two.begin(finish_order((1, 2)))
        ended = await two.load(two.order(0, (5, 6), has_direct=True, is_open=True))
        assert [over.error for over in ended] == [None] * len(ended)
        assert two.arrived([1, 2], [5, 6])
        await two.are_idle()


@PAIRS
async def test_a_prompt_that_is_not_loaded_is_given_back(theirs: str, ours: str) -> None:
    async with engines(theirs, ours) as two:
        two.begin(finish_order((1, 2)))
        order = two.order(0, (5, 6), has_direct=True)
        for reader in two.readers:
            reader.loads.release(RemotePrompt("l", order.transfer_id, order.sources, stages=order.stages))
        await two.are_idle()


@pytest.mark.parametrize(
    ("theirs", "told"),
    [("1,3", "2,3"), ("2,3", "1,3"), ("1,2,3", "2,3"), ("1,3", "1,2,3"), ("1,3", ""), ("1,3", "4,5"), ("1,3", "3,1")],
)
@pytest.mark.parametrize("ours", ENDS)
async def test_stages_that_are_not_the_sources_end_by_name(theirs: str, told: str, ours: str) -> None:
    """What a client says of them is not believed: no byte of another layer arrives."""
    async with engines(theirs, ours) as two:
        two.step(StepOrders(True), [1, 2], 5)
        two.begin(finish_order((1, 2)))
        order = dataclasses.replace(two.order(0, (5, 6), has_direct=True), stages=told)
        ended = await two.load(order)
        codes = {over.error.code for over in ended if over.error is not None}
        assert codes, "what cannot be was loaded"
        assert codes <= {"incompatible", "content_mismatch", "refused", "grant_unknown", "peer_gone", "grant_revoked"}
        for over, reader in zip(ended, two.readers, strict=True):
            for at in range(len(reader.memory)):
                layer = reader.first_layer + at
                source = next(s for s in two.sources if s.first_layer <= layer < s.first_layer + len(s.memory))
                own = reader.memory[at, [5, 6]]
                is_right = (own == source.memory[layer - source.first_layer, [1, 2]]).all()
                assert is_right or (over.error is not None and (own == 0xA5).all()), f"layer {layer}"


def test_a_rank_without_those_layers_says_so() -> None:
    stage = StageLayers(4, 3, 12)
    assert stage.local(range(5, 7)) == range(1, 3)
    for layers in (range(3, 5), range(6, 8), range(5, 5), range(0, 12)):
        with pytest.raises(IncompatibleError, match="of a rank that keeps layers 4 to 6 of 12") as caught:
            stage.local(layers)
        assert caught.value.field == "layers"
        assert stage.why_not(layers) is not None
    assert stage.why_not(range(4, 7)) is None


def test_content_says_which_layers() -> None:
    digest = bytes(range(32))
    stage = StageLayers(4, 3, 12)
    assert StageLayers.whole(12).content(digest, range(12)) == digest
    said = {stage.content(digest, range(*pair)) for pair in [(4, 7), (4, 6), (5, 7), (5, 6)]} | {digest}
    assert len(said) == 5
    assert np.unique([len(one) for one in said]).tolist() == [32]
