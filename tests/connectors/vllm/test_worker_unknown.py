"""The worker half where it is not known which weights it has: its pools say so, and it neither promises nor fetches."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from kvxfer.connectors.common.weights import PENDING
from kvxfer.connectors.vllm.loaded import Loaded, source_of
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.steps import ComputedBlocks, Finish, LoadOrder, News, Open, StepOrders
from kvxfer.connectors.vllm.worker import WorkerHalf
from kvxfer.types import TransferId, unknown_fingerprint
from tests.support.vllm_connector.pair import OPTIONS as PAIR_OPTIONS
from tests.support.vllm_connector.pair import engines_of, finish_order, load_order, until
from tests.support.vllm_connector.worker_half import Told, new_half

ID = TransferId(b"i" * 16)


@pytest.fixture
def weights() -> Told:
    return Told()


@pytest.fixture
def loaded() -> Loaded:
    return Loaded()


@pytest.fixture
def half(weights: Told, loaded: Loaded) -> Iterator[WorkerHalf]:
    half = new_half(weights, loaded)
    half.register({"layer": torch.zeros(4, 1, 16, 8)})
    yield half
    half.shutdown()
    assert weights.is_stopped


def published(half: WorkerHalf, fingerprint: str) -> None:
    """Wait until its pool says that."""
    end_s = time.monotonic() + 10.0
    while [pool.record.weights_fingerprint for pool in half._pools] != [fingerprint]:
        assert time.monotonic() < end_s
        time.sleep(0.001)


def new_load() -> LoadOrder:
    return LoadOrder("l", TransferId(b"l" * 16), ("p",), 0, (1,), 4, b"c" * 32, True)


def test_its_pool_says_what_is_known_as_soon_as_it_is(half: WorkerHalf, weights: Told) -> None:
    published(half, weights.fingerprint)
    weights.become("w")
    published(half, "w")
    changed = unknown_fingerprint("they changed", b"n" * 16)
    weights.become(changed)
    published(half, changed)


def test_a_load_ends_at_once_with_the_reason_and_frees_what_was_named_twice(half: WorkerHalf) -> None:
    half.begin_step(StepOrders(loads=(new_load(),), cancels=("l",)))
    results = half.results()
    assert (results.received, results.failed, results.bad_blocks) == ({"l"}, {"l"}, {1})
    assert [(report.code, report.text) for report in half.reports()] == [("weights_unknown", PENDING)]
    assert half._loading == 0


def test_a_prompt_is_not_kept_and_its_blocks_are_given_back_at_once(half: WorkerHalf) -> None:
    half.begin_step(StepOrders(finishes=(Finish("f", ID, None, (1, 2), b"c" * 32),)))
    assert half.results().sent == {"f"}
    assert len(half._source) == 0


def test_a_prompt_under_way_is_taken_back_when_weights_change(half: WorkerHalf, weights: Told) -> None:
    weights.become("w")
    half.begin_step(StepOrders(opens=(Open("o", ID, "d", 3, b"c" * 32),), chunks=(ComputedBlocks("o", (1,)),)))
    half.step_saved()
    assert len(half._source) == 1
    weights.become(unknown_fingerprint("they changed", b"n" * 16))
    half.begin_step(StepOrders(chunks=(ComputedBlocks("o", (2,)),)))
    assert len(half._source) == 0
    ended, _ = half._source._ended.find(ID)
    assert ended is not None
    assert (ended.code, str(ended)) == ("weights_unknown", "they changed")
    half.begin_step(StepOrders(finishes=(Finish("o", ID, "d", (1, 2, 3), b"c" * 32),)))
    assert half.results().sent == {"o"}


def test_a_prompt_that_is_kept_already_stays(half: WorkerHalf, weights: Told) -> None:
    """It was computed with what was known then; whether it still goes with the pool's record its transport judges."""
    weights.become("w")
    half.begin_step(StepOrders(finishes=(Finish("f", ID, None, (1, 2), b"c" * 32),)))
    weights.become(unknown_fingerprint("they changed", b"n" * 16))
    half.begin_step(StepOrders())
    assert len(half._source) == 1


def test_news_are_told_once(half: WorkerHalf, weights: Told, loaded: Loaded) -> None:
    assert half.news() == News("a", PENDING, "", ())
    assert half.news() is None
    weights.become("w")
    published(half, "w")
    assert half.news() == News("a", None, "", ())
    loaded.adapter(source_of(half), 1, "/adapter", ())
    news = half.news()
    assert news is not None
    assert [load.path for load in news.adapters] == ["/adapter"]
    assert half.news() is None


def test_news_come_again_once_the_metadata_has_the_weights(weights: Told, loaded: Loaded) -> None:
    """A step between the two finds weights that are known, and pools that do not say so yet."""
    discovering = ConnectorOptions.from_config("kv_both", "a", {"discovery": True})
    half = new_half(weights, loaded, options=discovering)
    half.register({"layer": torch.zeros(4, 1, 16, 8)})
    try:
        listeners, weights.listeners = weights.listeners, []
        is_registered = threading.Event()
        half._runtime.call(is_registered.set)  # after what it says of its pools at first
        assert is_registered.wait(10.0)
        weights.become("w")
        early = half.news()
        assert early is not None
        assert half.news() is None
        for listener in listeners:
            listener()
        published(half, "w")
        late = half.news()
        assert late is not None
        assert (early.weights_why, late.weights_why) == (None, None)
        assert early.agent_metadata != late.agent_metadata == half.agent_metadata
        assert half.news() is None
    finally:
        half.shutdown()


async def test_an_engine_that_does_not_know_its_weights_lets_go_only_of_what_it_has_won(
    weights: Told, loaded: Loaded
) -> None:
    """Of an open prompt its second rank sees a rank of the source that does not know whose the prompt is."""
    async with engines_of(PAIR_OPTIONS, ("p", "d", "e"), ranks=2) as made:
        for name in ("p", "p.1"):
            made[name].forward(finish_order((3, 4, 9)), [3, 4, 9], 5)
        order = dataclasses.replace(load_order(0, (7, 1, 2), has_direct=True), sources=("p", "p.1"), is_open=True)
        assert (await made["d"].load(order)).error is None
        refused = new_half(weights, loaded, rank=1, ranks=2)
        (remote,) = refused._only_what_is_known(StepOrders(loads=(order,))).releases
        made["e.1"].loads.release(remote)
        assert (await made["d.1"].load(order)).error is None
        for name in ("p", "p.1"):
            await until(lambda name=name: made[name].freed == ["r"])
