"""The scheduler half and requests that wait: no blocks before the grant, and what becomes of a request that waited."""

from __future__ import annotations

import dataclasses

import pytest

from kvxfer.connectors.vllm.params import handed_over
from kvxfer.connectors.vllm.requests import Gauges
from kvxfer.connectors.vllm.scheduler import SchedulerHalf
from kvxfer.connectors.vllm.steps import Accept, Close, Standing, StepOrders, WaitOrder
from tests.support.vllm_connector.scheduler import ID, OPTIONS, PREFILL, Request, Status, concurrent, new_half, step

GRANTED = Standing("r", True, is_over=True, seconds=0.5)
GONE = Standing("r", True, is_over=True, code="peer_gone", text="the engine made no step", seconds=11.0)


def waiting(half: SchedulerHalf, request_id: str = "r", tokens: int = 49, **params: object) -> Request:
    request = Request(request_id, list(range(tokens)), {**concurrent("prefill"), **params})
    half.on_new_request(request)
    return request


@pytest.fixture
def half() -> SchedulerHalf:
    return new_half()


def test_a_concurrent_decode_gets_no_blocks_before_the_grant(half: SchedulerHalf) -> None:
    request = waiting(half)
    orders = step(half)
    assert orders.waits == (WaitOrder("r", ID, "p", OPTIONS.grant_wait_s),)
    assert [keep.request_id for keep in orders.keeps] == ["r"]
    for standing in (None, Standing("r", False), Standing("r", True)):
        half.stands([standing] if standing else [])
        assert half.matched(request, 0) is None
        assert step(half) == StepOrders()
    half.stands([GRANTED])
    assert half.matched(request, 16) == 32
    half.allocated(request, [[9, 8, 7, 6]], 32)
    orders = step(half)
    assert [(load.first, load.blocks, load.has_direct) for load in orders.loads] == [(1, (8, 7), False)]
    assert half.take_waited() == [0.5]


def test_a_leg_whose_source_has_computed_it_does_not_wait() -> None:
    half, request = new_half(), Request("r", list(range(33)), handed_over(ID, ("p",), "x", 32))
    half.on_new_request(request)
    assert half.matched(request, 0) == 32
    half.allocated(request, [[1, 2, 3]], 32)
    assert step(half).waits == ()


@pytest.mark.parametrize("timeout_s", [None, 7, 0.5])
def test_a_leg_says_how_long_it_waits(half: SchedulerHalf, timeout_s: float | None) -> None:
    waiting(half, timeout_s=timeout_s)
    assert [wait.timeout_s for wait in step(half).waits] == [timeout_s or OPTIONS.grant_wait_s]


def test_a_leg_with_a_senseless_timeout_is_computed_here(half: SchedulerHalf, caplog: pytest.LogCaptureFixture) -> None:
    request = waiting(half, timeout_s="soon")
    assert half.matched(request, 0) == 0
    assert step(half).waits == ()
    assert "timeout_s" in caplog.text


def test_a_wait_that_ends_with_an_error_is_computed_here_and_says_why(half: SchedulerHalf) -> None:
    request = waiting(half)
    step(half)
    half.stands([GONE])
    assert half.matched(request, 0) == 0
    half.allocated(request, [[1, 2, 3, 4]], 0)
    orders = step(half, {"r": ([1, 2, 3, 4], 0, 49)})
    assert (orders.loads, [remote.request_id for remote in orders.releases]) == ((), ["r"])
    assert [report.code for report in half.take_ended()] == ["peer_gone"]
    request.status = Status.FINISHED_STOPPED
    _, answer = half.finished(request, [[1, 2, 3, 4]])
    assert answer is not None
    values = {name: answer["kvxfer"][name] for name in ("code", "text", "seconds", "attempts")}
    assert values == {"code": "peer_gone", "text": "the engine made no step", "seconds": 11.0, "attempts": 0}


def test_where_vllm_fails_requests_a_wait_that_ended_is_a_load_that_fails() -> None:
    half = new_half(will_fail=True)
    request = waiting(half)
    step(half)
    half.stands([GONE])
    assert half.matched(request, 0) == 48
    half.allocated(request, [[1, 2, 3, 4]], 48)
    orders = step(half)
    assert [(load.code, load.text) for load in orders.loads] == [("peer_gone", "the engine made no step")]
    assert [remote.request_id for remote in orders.releases] == ["r"]
    assert half.take_ended() == []


def test_where_vllm_fails_requests_one_of_unknown_weights_is_computed_all_the_same() -> None:
    half = new_half(will_fail=True)
    request = waiting(half)
    half.stands([dataclasses.replace(GONE, code="weights_unknown")])
    assert half.matched(request, 0) == 0
    assert [report.code for report in half.take_ended()] == ["weights_unknown"]


def test_prompt_in_the_prefix_cache_is_not_awaited(half: SchedulerHalf) -> None:
    request = waiting(half)
    assert half.matched(request, 32) is None
    assert half.matched(request, 48) == 0
    half.allocated(request, [[1, 2, 3, 4]], 0)
    orders = step(half)
    assert (orders.waits, [remote.request_id for remote in orders.releases]) == ((), ["r"])


def test_a_request_that_is_aborted_and_back_in_one_step_is_kept_once(half: SchedulerHalf) -> None:
    first = waiting(half)
    first.status = Status.FINISHED_ABORTED
    half.finished(first, [[]])
    assert step(half).keeps == ()  # it came and went
    waiting(half).status = Status.FINISHED_ABORTED
    step(half)
    half.finished(Request("r", first.prompt_token_ids, None, Status.FINISHED_ABORTED), [[]])
    waiting(half)
    orders = step(half)
    assert [[one.request_id for one in some] for some in (orders.releases, orders.keeps, orders.waits)] == [["r"]] * 3


def test_a_request_that_is_aborted_while_it_waits_is_let_go(half: SchedulerHalf) -> None:
    request = waiting(half)
    step(half)
    request.status = Status.FINISHED_ABORTED
    assert half.finished(request, [[]]) == (False, None)
    assert [remote.request_id for remote in step(half).releases] == ["r"]
    half.stands([GRANTED])  # which comes late
    assert step(half) == StepOrders()


def test_of_several_answers_to_one_prompt_the_others_wait_for_the_first(half: SchedulerHalf) -> None:
    first, second = waiting(half, "0_r"), waiting(half, "1_r")
    assert [wait.request_id for wait in step(half).waits] == ["0_r"]
    assert (half.matched(first, 0), half.matched(second, 0)) == (None, None)
    half.stands([dataclasses.replace(GRANTED, request_id="0_r")])
    assert (half.matched(first, 0), half.matched(second, 0)) == (48, None)
    half.allocated(first, [[1, 2, 3, 4]], 48)
    assert half.matched(second, 0) is None
    half.received({"0_r"})
    assert half.matched(second, 48) == 0


def test_a_prompt_of_one_token_waits_for_nothing(half: SchedulerHalf) -> None:
    request = waiting(half, tokens=1)
    assert half.matched(request, 0) == 0
    assert step(half).waits == ()


def test_a_prompt_is_accepted_when_it_comes_and_withdrawn_when_it_ends_before(half: SchedulerHalf) -> None:
    ends = {"transfer_id": str(ID)}
    request = Request("r", list(range(60)), {**PREFILL, **ends})
    half.on_new_request(request)
    assert step(half).accepts == (Accept("r", ID),)
    assert step(half).accepts == ()
    request.status = Status.FINISHED_ABORTED
    assert half.finished(request, [[]]) == (False, None)
    closes = step(half).closes
    assert [(close.transfer_id, close.will_resume, close.code) for close in closes] == [(ID, False, "grant_revoked")]


def test_minted_id_is_not_accepted_early() -> None:
    half, request = new_half(), Request("r", list(range(60)), PREFILL)
    half.on_new_request(request)
    assert step(half) == StepOrders()


def test_a_prompt_that_will_not_be_kept_is_declined_when_it_comes() -> None:
    half, request = new_half(lambda: "not read yet"), Request("r", list(range(60)), concurrent("decode"))
    half.on_new_request(request)
    orders = step(half)
    assert (orders.accepts, orders.closes) == ((), (Close("r", ID, "not read yet", False, "weights_unknown"),))


def test_gauges_say_how_it_stands_with_what_waits(half: SchedulerHalf) -> None:
    request = waiting(half)
    assert half.take_gauges() == Gauges(1, 0, 0, 0)
    assert half.take_gauges() is None
    half.stands([Standing("r", True)])
    assert half.take_gauges() == Gauges(0, 1, 0, 0)
    half.stands([GRANTED])
    assert half.take_gauges() == Gauges(0, 0, 1, 0)
    half.matched(request, 0)
    half.allocated(request, [[1, 2, 3, 4]], 48)
    assert half.take_gauges() == Gauges(0, 0, 0, 0)
    prefill = Request("p", list(range(33)), PREFILL, Status.FINISHED_LENGTH_CAPPED)
    half.finished(prefill, [[5, 6, 7]])
    assert half.take_gauges() == Gauges(0, 0, 0, 3)
    half.read(["p"])
    assert half.take_gauges() == Gauges(0, 0, 0, 0)
    half.sent(["p"])
    assert half.take_gauges() is None


def test_while_a_computed_prompt_has_no_blocks_and_nothing_runs_none_is_computed_to_be_kept(
    half: SchedulerHalf,
) -> None:
    kept = Request("k", list(range(33)), PREFILL, Status.FINISHED_LENGTH_CAPPED)
    half.finished(kept, [[1, 2, 3]])
    request = waiting(half)
    half.stands([GRANTED])
    prefill = Request("p", list(range(33)), PREFILL)
    half.on_new_request(prefill)
    plain = Request("plain", list(range(33)), None)
    assert half.matched(request, 0) == 48
    step(half)  # vLLM had no blocks for it
    assert (half.matched(prefill, 0), half.matched(plain, 0)) == (None, 0)
    half.allocated(plain, [[8, 9, 10]], 0)
    half.allocated(request, [[4, 5, 6, 7]], half.matched(request, 0) or 0)
    step(half)
    assert half.matched(prefill, 0) == 0
