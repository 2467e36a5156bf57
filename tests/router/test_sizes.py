"""Requests that some worker cannot hold: another one is asked, or D computes the prompt; 400 only where none can."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, failing, router_over

PROMPT = list(range(5, 305))


def too_long(*, prompt_tokens: int | None = None, param: str = "prompt") -> tuple[int, dict[str, Any]]:
    """As the built-in engine says it."""
    status, body = failing(400, "context_length_exceeded", retryable=False, kind="invalid_request_error")
    body["error"] |= {"param": param} | ({} if prompt_tokens is None else {"prompt_tokens": prompt_tokens})
    return status, body


def vllm_says(message: str, param: str | None = "input_tokens") -> tuple[int, dict[str, Any]]:
    return 400, {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}


def prefiller(name: str = "p0", blocks: int = 8, **more: Any) -> FakeWorker:
    return FakeWorker(name, Role.PREFILL, **more).has_blocks(blocks)


def decoder(name: str = "d0", blocks: int = 64, **more: Any) -> FakeWorker:
    d = FakeWorker(name, Role.DECODE, **more).has_blocks(blocks)
    d.needs_prefill = True
    return d


async def test_token_ids_that_no_prefiller_holds_are_computed_by_the_decoder_and_ask_no_prefiller() -> None:
    p, d = prefiller(), decoder()
    async with router_over(p, d) as router:
        answer = await router.complete(prompt=PROMPT)
        assert answer.status_code == 200
        assert answer.headers["x-kvxfer-prefill"] == "local"
        assert answer.headers["x-kvxfer-prefill-reason"] == "prefill_too_small"
        assert p.received == []
        assert "kv_transfer_params" not in d.received[0].body


async def test_token_ids_go_to_the_workers_that_hold_them_each_time() -> None:
    small, large, narrow, wide = prefiller("p0"), prefiller("p1", 64), decoder("d0", 8), decoder("d1", 64)
    async with router_over(small, large, narrow, wide) as router:
        for _ in range(12):  # ties are drawn
            answer = await router.complete(prompt=PROMPT)
            assert (answer.status_code, answer.headers["x-kvxfer-prefill"]) == (200, "remote")
        assert (len(small.received), len(narrow.received)) == (0, 0)
        assert (len(large.received), len(wide.received)) == (12, 12)


async def test_a_request_that_no_worker_holds_is_a_400_that_names_the_field_and_asks_nobody() -> None:
    d = decoder("d0", 8)
    async with router_over(prefiller("p0", 64), d) as router:
        for more, param in (
            ({"prompt": PROMPT}, "prompt"),
            ({"prompt": PROMPT[:100], "max_tokens": 100}, "max_tokens"),
            ({"max_tokens": 5000}, "max_tokens"),  # text: whatever it becomes, the answer alone is too long
        ):
            answer = await router.complete(**more)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"], error["retryable"]) == ("context_length_exceeded", param, False)
            assert error["type"] == "invalid_request_error"
            assert "the largest holds 129 tokens" in error["message"]
        answer = await router.chat(max_completion_tokens=5000)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_completion_tokens")
        assert d.received == []


async def test_a_worker_that_could_hold_it_and_takes_nothing_now_makes_it_a_503() -> None:
    small, large = decoder("d0", 8), decoder("d1", 64)
    async with router_over(small, large) as router:
        router.publish(large, is_draining=True)
        drained = large.member
        router.publish(small)
        assert (await router.complete(prompt=PROMPT)).status_code == 400
        router.publish(small, large, is_draining=True)
        assert drained.pools
        answer = await router.complete(prompt=PROMPT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_text_that_a_prefiller_refuses_for_its_size_is_asked_of_one_that_holds_it(is_stream: bool) -> None:
    """How many tokens a text has is known once a worker counted them."""
    small, middle, large, d = prefiller("p0"), prefiller("p1", 16), prefiller("p2", 64), decoder()
    small.always_fails = middle.always_fails = too_long(prompt_tokens=300)
    async with router_over(small, middle, large, d) as router:
        router.publish(small, middle, d)
        answer = await router.complete(stream=is_stream)  # neither: the count of one speaks for the other
        assert (answer.status_code, answer.headers["x-kvxfer-prefill-reason"]) == (200, "prefill_too_small")
        assert len(small.received) + len(middle.received) == 1
        assert answer.headers["x-kvxfer-attempt"] == "2"

        router.publish(small, middle, large, d)
        for _ in range(8):
            answer = await router.complete(stream=is_stream)
            assert (answer.status_code, answer.headers["x-kvxfer-prefill"]) == (200, "remote")
        assert len(large.received) == 8
        ids = [leg.params["transfer_id"] for leg in d.received if leg.params]
        assert len(set(ids)) == len(ids)


async def test_a_refusal_for_size_is_not_counted_against_the_worker_nor_against_the_attempts() -> None:
    small, d = [prefiller(f"p{n}", 8 + n) for n in range(5)], decoder()
    for p in small:
        p.always_fails = too_long()  # counts nothing: the largest refuses last
    async with router_over(*small, d, attempts_max=1) as router:
        answer = await router.complete()
        assert (answer.status_code, answer.headers["x-kvxfer-prefill"]) == (200, "local")
        assert await router.metric("kvxfer_router_workers_ejected") == 0
        for p in small:
            p.always_fails = None
        assert (await router.complete()).headers["x-kvxfer-prefill"] == "remote"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_decoder_that_refuses_for_its_size_is_replaced_by_a_larger_one(is_stream: bool) -> None:
    p, small, large = prefiller(blocks=64), decoder("d0", 8), decoder("d1", 64)
    small.always_fails = too_long(prompt_tokens=120, param="max_tokens")
    async with router_over(p, small, large, attempts_max=1) as router:
        while not small.received:
            answer = await router.complete(stream=is_stream)
            assert answer.status_code == 200
        assert answer.headers["x-kvxfer-attempt"] == "2"
        router.publish(p, small)
        answer = await router.complete(stream=is_stream)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "scripted context_length_exceeded"
        outcome = 'kvxfer_router_requests_total{outcome="client_error",route="/v1/completions"}'
        await router.wait_metric(outcome, 1)


async def test_a_worker_of_both_parts_that_cannot_prefill_it_is_not_asked_to_decode_it() -> None:
    small, large = FakeWorker("b0", Role.BOTH).has_blocks(8), FakeWorker("b1", Role.BOTH).has_blocks(64)
    small.always_fails = too_long()
    small.needs_prefill = large.needs_prefill = True
    async with router_over(small, large) as router:
        for _ in range(6):
            answer = await router.complete()
            assert answer.status_code == 200
            roles = [leg.params["role"] for leg in small.received if leg.params]
            assert roles in ([], ["prefill"], ["decode", "prefill"])
            small.received.clear()


async def test_local_prefill_off_refuses_what_no_prefiller_holds() -> None:
    p, d = prefiller(), decoder()
    async with router_over(p, d, local_prefill="off") as router:
        assert (await router.complete(prompt=PROMPT)).status_code == 400
        p.always_fails = too_long(prompt_tokens=300)
        answer = await router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert len(p.received) == 1


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 128 tokens. However, your prompt contains at least 129 input tokens",
        "'max_tokens' or 'max_completion_tokens' is too large: 900. This model's maximum context length is 128 tokens",
        "You passed 129 input tokens and requested 0 output tokens. However, the model's context length is only 128",
        "You passed 999 input characters and requested 0 output tokens. However, the model's context length is only",
        "max_tokens=900 cannot be greater than max_model_len=128. Please request fewer output tokens.",
        "max_completion_tokens=900cannot be greater than max_model_len=max_total_tokens=128. Please request",
        "truncate_prompt_tokens=900 cannot be greater than max_model_len - max_tokens = 120. Please request a smaller",
        "The decoder prompt (length 300) is longer than the maximum model length of 128. ",
        "The decoder prompt (length 128) plus the number of requested output tokens (at least 1) is longer than the "
        "maximum model length of 128. ",
    ],
)
async def test_an_engine_of_vllm_says_in_words_that_it_is_too_small(message: str) -> None:
    small, large = (prefiller(name, dialect="vllm") for name in ("p0", "p1"))
    small.context_tokens, large.context_tokens = 128, 1024
    small.pools = large.pools = ()
    narrow, wide = FakeWorker("d0", dialect="vllm"), FakeWorker("d1", dialect="vllm")
    narrow.context_tokens = 128
    narrow.needs_prefill = wide.needs_prefill = True
    small.always_fails = narrow.always_fails = vllm_says(message)
    async with router_over(small, large, narrow, wide) as router:
        for _ in range(8):
            assert (await router.complete()).status_code == 200
        router.publish(small, narrow)
        answer = await router.complete()
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert error["message"] == message


async def test_other_refusals_of_vllm_are_the_clients_own() -> None:
    d = FakeWorker("d0", dialect="vllm")
    d.always_fails = vllm_says("temperature must be non-negative, got -1.0.", "temperature")
    async with router_over(d, FakeWorker("d1", dialect="vllm")) as router:
        router.publish(d)
        answer = await router.complete()
        assert (answer.status_code, len(d.received)) == (400, 1)
        assert answer.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    "message",
    [
        "1 validation error: {'input': 'This model's maximum context length is 128 tokens'}",
        "tool_choice names no tool: max_tokens=900 cannot be greater than max_model_len=128",
        "maximum model length is no role of a message",
        "max_model_len is no field of a request",
    ],
)
async def test_a_clients_own_words_in_a_refusal_say_nothing_of_the_workers_size(message: str) -> None:
    d, other = (FakeWorker(name, dialect="vllm") for name in ("d0", "d1"))
    d.always_fails = other.always_fails = vllm_says(message)
    async with router_over(d, other) as router:
        answer = await router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "400")
        assert len(d.received) + len(other.received) == 1


async def test_a_prompt_that_vllm_itself_cuts_is_not_judged_by_its_length() -> None:
    p, d = FakeWorker("p0", Role.PREFILL, dialect="vllm"), FakeWorker("d0", dialect="vllm")
    p.context_tokens = d.context_tokens = 128
    async with router_over(p, d) as router:
        assert (await router.complete(prompt=PROMPT)).status_code == 400
        assert (await router.complete(prompt=PROMPT, truncate_prompt_tokens=64)).status_code == 200
        assert (await router.complete(prompt=PROMPT[:100], max_tokens=100)).status_code == 200  # it clips the answer


async def test_a_body_that_is_too_long_for_one_worker_is_asked_of_another() -> None:
    p, d = prefiller(), decoder()
    p.always_fails = failing(413, "invalid_argument", retryable=False, kind="invalid_request_error")
    async with router_over(p, d) as router:
        answer = await router.complete()
        assert (answer.status_code, answer.headers["x-kvxfer-prefill"]) == (200, "local")
        d.always_fails = p.always_fails
        assert (await router.complete()).status_code == 413
        assert await router.metric("kvxfer_router_workers_ejected") == 0
