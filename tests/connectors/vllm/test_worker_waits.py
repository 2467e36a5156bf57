"""The worker half and requests that wait: what it is ordered, and what it tells the scheduler half."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from kvxfer.connectors.vllm.loaded import Loaded
from kvxfer.connectors.vllm.steps import (
    Accept,
    Finish,
    LoadOrder,
    News,
    RemotePrompt,
    Revoke,
    Standing,
    StepOrders,
    WaitOrder,
)
from kvxfer.connectors.vllm.worker import WorkerHalf
from kvxfer.types import TransferId
from tests.support.vllm_connector.worker_half import Told, new_half

ID = TransferId(b"i" * 16)
OTHER = TransferId(b"o" * 16)
CONTENT = b"c" * 32


@pytest.fixture
def weights() -> Told:
    return Told()


@pytest.fixture
def half(weights: Told) -> Iterator[WorkerHalf]:
    half = new_half(weights, Loaded())
    half.register({"layer": torch.zeros(4, 1, 16, 8)})
    yield half
    half.shutdown()


def step(half: WorkerHalf, orders: StepOrders) -> News | None:
    half.begin_step(orders)
    half.step_saved()
    half.results()
    return half.news()


def standings(half: WorkerHalf, orders: StepOrders, within_s: float = 5.0) -> list[Standing]:
    """What is told of waits until one is over; the engine steps meanwhile, as vLLM does."""
    told: list[Standing] = []
    end_s = time.monotonic() + within_s
    while not any(standing.is_over for standing in told):
        assert time.monotonic() < end_s
        news = step(half, orders)
        told += news.standings if news is not None else ()
        orders = StepOrders()
    return told


def test_a_wait_for_an_engine_that_is_not_there_ends_by_name(half: WorkerHalf, weights: Told) -> None:
    weights.become("w")
    (end,) = standings(half, StepOrders(waits=(WaitOrder("l", ID, "ghost", 60.0),)))
    assert (end.request_id, end.code) == ("l", "peer_gone")
    assert step(half, StepOrders()) is None


def test_a_step_that_only_waits_ends_when_there_is_something_to_tell(half: WorkerHalf, weights: Told) -> None:
    weights.become("w")
    object.__setattr__(half._options, "idle_wait_s", 30.0)
    (end,) = standings(half, StepOrders(waits=(WaitOrder("l", ID, "ghost", 0.2),)))
    assert end.code in ("deadline", "peer_gone")


def test_a_request_that_is_aborted_and_back_in_one_step_waits_anew(half: WorkerHalf, weights: Told) -> None:
    async def notify(agent_id: str, messages: object) -> None:
        """It takes everything."""

    weights.become("w")
    assert half._waits is not None
    assert half._loads is not None
    half._waits._notify = notify
    step(half, StepOrders(keeps=(RemotePrompt("l", ID, ("ghost",)),), waits=(WaitOrder("l", ID, "ghost", 60.0),)))
    again = StepOrders(
        releases=(RemotePrompt("l", ID, ("ghost",)),),
        keeps=(RemotePrompt("l", OTHER, ("ghost",)),),
        waits=(WaitOrder("l", OTHER, "ghost", 0.3),),
    )
    (end,) = standings(half, again)
    assert (end.request_id, end.code) == ("l", "deadline")
    assert half._loads._kept["l"].transfer_id == OTHER


def test_a_wait_of_unknown_weights_ends_at_once(half: WorkerHalf) -> None:
    news = step(half, StepOrders(waits=(WaitOrder("l", ID, "ghost", 60.0),)))
    assert news is not None
    assert [(standing.is_over, standing.code) for standing in news.standings] == [(True, "weights_unknown")]
    step(half, StepOrders(accepts=(Accept("r", OTHER),)))
    assert OTHER not in half._source._accepted  # type: ignore[union-attr]


def test_a_load_whose_wait_failed_fails_at_once(half: WorkerHalf, weights: Told) -> None:
    weights.become("w")
    load = LoadOrder("l", ID, ("p",), 0, (1, 2), 8, CONTENT, False, code="grant_unknown", text="it never came")
    half.begin_step(StepOrders(loads=(load,)))
    results = half.results()
    assert (results.received, results.failed, results.bad_blocks) == ({"l"}, {"l"}, {1, 2})
    assert [(report.code, report.text) for report in half.reports()] == [("grant_unknown", "it never came")]
    assert half._loading == 0


def test_a_prompt_that_is_taken_back_is_given_to_vllm(half: WorkerHalf, weights: Told) -> None:
    weights.become("w")
    half.begin_step(StepOrders(finishes=(Finish("r", ID, "d", (1, 2), CONTENT),), revokes=(Revoke("r", "no_room"),)))
    assert half.results().sent == {"r"}
