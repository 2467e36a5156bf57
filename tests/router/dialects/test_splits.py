"""Which requests each dialect has D answer alone, and by the name of which field; and what P says of its part."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvxfer.router.dialects import DIALECTS, Order, Prefilled, dialect
from tests.support.router_bodies import CHAT, COMPLETIONS, GENERATE, LEAST, MESSAGES, RESPONSES, P, inbound

STOCK = ("vllm", "vllm-mooncake")
OF_VLLM = (*STOCK, "vllm-kvxfer")
SPLITTING = tuple(sorted(DIALECTS - {"plain"}))


def refused(name: str, path: str, **fields: Any) -> str | None:
    return dialect(name).refuses_split(inbound(path, **fields))


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("path", sorted(LEAST))
def test_an_ordinary_request_is_split(name: str, path: str) -> None:
    function = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    fields = {"stream": True, "tools": function, "response_format": {"type": "json_object"}, "seed": 1, "stop": ["x"]}
    fields |= {"n": 1, "logprobs": 3, "echo": False, "background": False, "return_logprob": True, "unknown": 1}
    fields |= {"prompt_logprobs": None, "previous_response_id": None, "logprob_start_len": -1}
    assert refused(name, path, **fields) is None


@pytest.mark.parametrize("name", SPLITTING)
@pytest.mark.parametrize("field", ["n", "best_of", "use_beam_search"])
def test_several_answers_are_not_split(name: str, field: str) -> None:
    assert refused(name, CHAT, **{field: 2}) == field
    assert refused(name, GENERATE, sampling_params={"n": 2}) == "sampling_params.n"


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]])
def test_a_list_of_prompts_is_split_by_sglang_only(prompt: Any) -> None:
    for name in SPLITTING:
        assert refused(name, COMPLETIONS, prompt=prompt) == (None if name == "sglang" else "prompt")


@pytest.mark.parametrize("name", SPLITTING)
def test_a_list_of_one_prompt_is_split_as_that_prompt(name: str) -> None:
    for prompt in (["a"], [[1, 2]]):
        assert refused(name, COMPLETIONS, prompt=prompt) is None
    assert refused(name, GENERATE, text=["a"]) is None
    assert refused(name, GENERATE, text=None, input_ids=[[1, 2]]) is None


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (COMPLETIONS, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (COMPLETIONS, {"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"echo": True}, None),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, "echo"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"previous_response_id": "r"}, "previous_response_id"),
        (RESPONSES, {"previous_input_messages": []}, "previous_input_messages"),
        (RESPONSES, {"tools": []}, None),
        (RESPONSES, {"tools": [{"type": "function"}, {"type": "custom"}]}, None),
        (RESPONSES, {"tools": [{"type": "function"}, {"type": "code_interpreter"}]}, "tools"),
        (RESPONSES, {"tools": [{"type": "mcp"}]}, "tools"),
        (RESPONSES, {"tools": "all"}, "tools"),
        (RESPONSES, {"tools": [{"type": "function", "description": "x" * (300 << 10)}]}, "tools"),
        (CHAT, {"tools": [{"type": "mcp"}]}, None),
    ],
)
def test_what_stock_vllm_cannot_split(path: str, fields: dict[str, Any], field: str | None) -> None:
    for name in STOCK:
        assert refused(name, path, **fields) == field


def test_escapes_hide_no_tool_that_vllm_runs() -> None:
    body = b'{"model":"m","input":"hi","tools":[{"type":"\\u006dcp"}]}'
    for name in OF_VLLM:
        assert dialect(name).refuses_split(inbound(RESPONSES, body)) == "tools"


def test_kvxfers_connector_leaves_to_d_what_it_cannot_load() -> None:
    """D computes the whole prompt for these itself, and says so in its account."""
    for fields in ({"prompt_logprobs": 1}, {"truncate_prompt_tokens": -1}, {"echo": True}):
        assert refused("vllm-kvxfer", CHAT, **fields) is None


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (COMPLETIONS, {"echo": True}, None),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, None),
        (CHAT, {"echo": True, "logprobs": True}, None),
        (GENERATE, {"return_logprob": True}, None),
        (GENERATE, {"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        (GENERATE, {"return_logprob": [True], "logprob_start_len": [0]}, "logprob_start_len"),
        (GENERATE, {"return_logprob": False, "logprob_start_len": 0}, None),
        (GENERATE, {"return_hidden_states": True}, "return_hidden_states"),
        (CHAT, {"return_routed_experts": True}, "return_routed_experts"),
        (GENERATE, {"session_params": {"id": "s"}}, "session_params"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"previous_response_id": "r"}, "previous_response_id"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, None),
    ],
)
def test_what_sglang_cannot_split(path: str, fields: dict[str, Any], field: str | None) -> None:
    assert refused("sglang", path, **fields) == field


def test_what_each_dialect_can() -> None:
    spoken = {name: dialect(name) for name in DIALECTS}
    assert {name for name, one in spoken.items() if one.order is Order.PREFILL_FIRST} == {"vllm"}
    assert {name for name, one in spoken.items() if one.order is Order.ALONE} == {"plain"}
    assert {name for name, one in spoken.items() if one.keeps_prefill} == {"vllm"}
    assert {name for name, one in spoken.items() if not one.computes_alone} == {"sglang"}
    assert {name for name, one in spoken.items() if one.discovery_url(P) is not None} == {"vllm-mooncake"}


TIMINGS = {"queue_s": 0.5, "prefill_s": 0.25, "ended_unix_s": 7.0, "other": 1}
ACCOUNT = {"prefill_queue_s": 0.5, "prefill_s": 0.25, "prefill_ended_unix_s": 7.0}


@pytest.mark.parametrize(
    ("answer", "account"),
    [
        (
            {"usage": {"prompt_tokens": 9, "cached_tokens": 4}, "timings": TIMINGS},
            {"prefill_cached_tokens": 4, **ACCOUNT},
        ),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}, {"prefill_cached_tokens": 0}),
        ({"kv_transfer_params": {"remote_prefill_cached_tokens": 5}}, {"prefill_cached_tokens": 5}),
        ({"text": "a", "meta_info": {"cached_tokens": 6}}, {"prefill_cached_tokens": 6}),
        ({"usage": {"prompt_tokens_details": None}}, {}),
        ({"usage": {"cached_tokens": True}, "timings": None}, {}),
        ({"usage": {"cached_tokens": -1}}, {}),
        ({"usage": [], "timings": 3, "meta_info": "x", "kv_transfer_params": 1}, {}),
        ({}, {}),
    ],
)
def test_ps_own_words_become_the_account(answer: dict[str, Any], account: dict[str, Any]) -> None:
    for name in DIALECTS:
        assert dialect(name).prefilled(json.dumps(answer).encode()).account() == account


def test_what_cannot_be_read_was_not_said() -> None:
    for name in DIALECTS:
        for answer in (b"", b"[]", b"{", b"\xff", b"data: {}\n\n"):
            assert dialect(name).prefilled(answer) == Prefilled()


def test_sglangs_streamed_prefill_answer_is_read_at_its_end() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}
    answer = b'data: {"choices":[]}\n\ndata: ' + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n"
    assert dialect("sglang").prefilled(answer).cached_tokens == 8
