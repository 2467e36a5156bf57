"""The scheduler half where it is not known which weights or adapter a request is computed with: that is computed where
it is wanted, and the reason is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvxfer.connectors.vllm.params import Declined, declined, parse
from kvxfer.connectors.vllm.steps import Close, Standing
from kvxfer.types import TransferId, unknown_fingerprint
from tests.support.vllm_connector.scheduler import ID, PREFILL, Request, Status, concurrent, new_half, step

WHY = "its weights are still being read"
UNKNOWN = unknown_fingerprint("LoRA adapter 'poet': changed", bytes(16))
POET = SimpleNamespace(lora_path="poet")
FIRST = TransferId((1).to_bytes(16, "big"))


@pytest.mark.parametrize("what", ["weights", "adapter"])
def test_a_decode_leg_is_computed_here_and_says_why(what: str) -> None:
    is_weights = what == "weights"
    half = new_half((lambda: WHY) if is_weights else (lambda: None), {"poet": UNKNOWN})
    params = {"do_remote_prefill": True, "transfer_id": str(ID), "source": {"agent_id": "p"}}
    request = Request("r", list(range(40)), params)
    request.lora_request = None if is_weights else POET
    half.on_new_request(request)
    assert half.matched(request, 0) == 0
    half.allocated(request, [[1, 2, 3]], 0)
    orders = step(half, {"r": ([1, 2, 3], 0, 40)})
    assert (orders.loads, orders.keeps) == ((), ())
    assert [remote.transfer_id for remote in orders.releases] == [ID]  # the source need not keep it
    (report,) = half.take_ended()
    request.status = Status.FINISHED_STOPPED
    is_kept, answer = half.finished(request, [[1, 2, 3]])
    assert not is_kept
    assert answer is not None
    text = WHY if is_weights else "LoRA adapter 'poet': changed"
    assert (answer["kvxfer"]["code"], answer["kvxfer"]["text"]) == ("weights_unknown", text)
    assert (report.code, report.text) == ("weights_unknown", text)


@pytest.mark.parametrize("what", ["weights", "adapter"])
def test_a_prefill_leg_is_not_kept_and_says_why(what: str) -> None:
    is_weights = what == "weights"
    half = new_half((lambda: WHY) if is_weights else (lambda: None), {"poet": UNKNOWN})
    request = Request("r", list(range(40)), PREFILL, lora_request=None if is_weights else POET)
    half.on_new_request(request)
    step(half, {"r": ([1, 2, 3], 0, 40)})
    request.status = Status.FINISHED_LENGTH_CAPPED
    text = WHY if is_weights else "LoRA adapter 'poet': changed"
    assert half.finished(request, [[1, 2, 3]]) == (False, declined(FIRST, "weights_unknown", text))
    assert step(half).finishes == ()


def test_the_reader_of_a_prompt_that_is_not_kept_is_told_why() -> None:
    half = new_half(lambda: WHY)
    request = Request("r", list(range(40)), concurrent("decode"))
    half.on_new_request(request)
    assert step(half, {"r": ([1, 2, 3], 0, 40)}).opens == ()
    request.status = Status.FINISHED_LENGTH_CAPPED
    half.finished(request, [[1, 2, 3]])
    assert step(half).closes == (Close("r", ID, WHY, False, "weights_unknown"),)


def test_a_prompt_under_way_is_taken_back_when_weights_change() -> None:
    whys: list[str] = []
    half = new_half(lambda: whys[0] if whys else None)
    request = Request("r", list(range(80)), concurrent("decode"))
    half.on_new_request(request)
    assert [begun.request_id for begun in step(half, {"r": ([1, 2, 3], 0, 32)}).opens] == ["r"]
    whys.append("update_weights was called")
    orders = step(half, cached={"r": ([4], 32, 32)})
    assert orders.closes == (Close("r", ID, whys[0], False, "weights_unknown"),)
    assert (orders.chunks, orders.opens) == ((), ())
    assert step(half, cached={"r": ([5], 64, 16)}).opens == ()
    request.status = Status.FINISHED_LENGTH_CAPPED
    whys.clear()  # it does not come back
    assert half.finished(request, [[1, 2, 3, 4, 5]])[0] is False


def test_a_prompt_whose_adapter_is_loaded_again_meanwhile_is_not_kept() -> None:
    adapters = {"poet": "one"}
    half, request = new_half(adapters=adapters), Request("r", list(range(40)), PREFILL, lora_request=POET)
    half.on_new_request(request)
    step(half, {"r": ([1, 2, 3], 0, 40)})
    adapters["poet"] = "two"
    request.status = Status.FINISHED_LENGTH_CAPPED
    is_kept, answer = half.finished(request, [[1, 2, 3]])
    assert (is_kept, answer) == (
        False,
        declined(FIRST, "weights_unknown", "its LoRA adapter was loaded again meanwhile"),
    )


def test_a_decode_leg_that_waited_is_not_fetched_once_its_adapter_changed() -> None:
    adapters = {"poet": "one"}
    half = new_half(adapters=adapters)
    params = {"do_remote_prefill": True, "transfer_id": str(ID), "source": {"agent_id": "p"}}
    request = Request("r", list(range(40)), params, lora_request=POET)
    half.on_new_request(request)
    assert half.matched(request, 0) is None
    half.stands([Standing("r", True, is_over=True)])
    assert half.matched(request, 0) == 39
    adapters["poet"] = UNKNOWN
    assert half.matched(request, 0) == 0
    assert [report.code for report in half.take_ended()] == ["weights_unknown"]


RENAMED = SimpleNamespace(lora_path="poet", was_another=True)


@pytest.mark.parametrize("cached", [0, 16])
def test_what_the_prefix_cache_has_of_an_adapter_whose_name_was_anothers_is_not_kept(cached: int) -> None:
    half, request = new_half(), Request("r", list(range(40)), concurrent("decode"), lora_request=RENAMED)
    half.on_new_request(request)
    orders = step(half, {"r": ([1, 2, 3], cached, 40 - cached)})
    assert len(orders.opens) == (cached == 0)
    request.status = Status.FINISHED_LENGTH_CAPPED
    is_kept, answer = half.finished(request, [[1, 2, 3]])
    assert is_kept is (cached == 0)
    assert answer is not None
    assert ("another LoRA adapter had this name" in answer["kvxfer"].get("text", "")) is (cached > 0)


@pytest.mark.parametrize("cached", [0, 16])
def test_what_the_prefix_cache_has_of_an_adapter_whose_name_was_anothers_is_not_completed(cached: int) -> None:
    params = {"do_remote_prefill": True, "transfer_id": str(ID), "source": {"agent_id": "p"}}
    half, request = new_half(), Request("r", list(range(40)), params, lora_request=RENAMED)
    half.on_new_request(request)
    half.stands([Standing("r", True, is_over=True)])
    assert half.matched(request, cached) == (39 if cached == 0 else 0)
    assert [report.code for report in half.take_ended()] == (["weights_unknown"] if cached else [])


def test_prompt_that_its_source_declined_is_computed_here_with_the_reason() -> None:
    half = new_half()
    request = Request("r", list(range(40)), declined(ID, "weights_unknown", WHY))
    half.on_new_request(request)
    assert half.matched(request, 0) == 0
    half.allocated(request, [[1, 2, 3]], 0)
    orders = step(half, {"r": ([1, 2, 3], 0, 40)})
    assert (orders.loads, orders.releases, orders.opens) == ((), (), ())
    request.status = Status.FINISHED_STOPPED
    assert half.finished(request, [[1, 2, 3]]) == (False, {"kvxfer": {"code": "weights_unknown", "text": WHY}})


@pytest.mark.parametrize("value", [None, [], {}, {"code": []}, {"code": {}}, {"code": "no such code"}, {"code": 1}])
def test_malformed_reason_of_a_source_is_a_plain_request(value: object) -> None:
    assert parse({"do_remote_prefill": False, "kvxfer": value}) is None


def test_a_reason_of_a_source_is_bounded() -> None:
    found = parse({"kvxfer": {"code": "weights_unknown", "text": "x" * 10_000}})
    assert found == Declined("weights_unknown", "x" * 512)
