"""For each dialect: a body in, the legs out, as JSON; and what the mock engine understands of them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.mock_engine.legs import LegPart, read_leg
from kvxfer.mock_engine.options import EngineKind, EngineRole
from kvxfer.openai.transfer_params import LEG_BYTES_MAX, Part, parse_transfer_params
from kvxfer.protocol.http_url import URL_CHARS_MAX
from kvxfer.router.dialects import DIALECTS, Handover, HandoverError, Order, Pair, dialect
from kvxfer.router.dialects.sglang import ROOM_MAX
from kvxfer.types import STAGES
from tests.support.router_bodies import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    LEAST,
    MESSAGES,
    PAIR,
    RESPONSES,
    TRACE,
    TRANSFER_ID,
    BareWorker,
    D,
    P,
    inbound,
    sent,
)

ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
FETCHES = {"do_remote_decode": False, "do_remote_prefill": True}
OURS: dict[str, Any] = {
    "timeout_s": 30.0,
    "transfer_id": str(TRANSFER_ID),
    "attempt": 2,
    "source": {"agent_id": "p", "ranks": 1, "address": P.url},
    "destination": {"agent_id": "d", "ranks": 1, "address": D.url},
    "first_token": "decode",
}
FROM_P: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine-p",
    "remote_request_id": "cmpl-req-1-0",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
NIXL_ASK = {
    **ASKED,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
FULL: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "min_tokens": 3,
    "logprobs": True,
    "top_logprobs": -1,
    "return_token_ids": True,
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "unknown": {"deep": [1, 2.50, "\u00e9"]},
}
LEFT_OUT = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "return_token_ids")


def short(path: str, fields: dict[str, Any], **limits: Any) -> dict[str, Any]:
    """What P gets of a body: everything but what makes an answer long, and the bounds."""
    kept = {**LEAST[path], **{name: value for name, value in fields.items() if name not in LEFT_OUT}}
    return {**kept, "stream": False, **limits}


def legs(name: str, path: str, pair: Pair = PAIR, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    spoken, read = dialect(name), inbound(path, **fields)
    handover = None
    if spoken.order is Order.PREFILL_FIRST:
        handover = spoken.handover(json.dumps({"choices": [], "kv_transfer_params": FROM_P}).encode())
    return sent(spoken.prefill_leg(read, pair)), sent(spoken.decode_leg(read, pair, handover))


def test_the_names_are_these() -> None:
    assert sorted(DIALECTS) == ["kvxfer", "plain", "sglang", "vllm", "vllm-kvxfer", "vllm-mooncake"]
    assert all(dialect(name).name == name for name in DIALECTS)
    with pytest.raises(ConfigError, match="vllm-mooncake, sglang, plain"):
        dialect("nixl")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_kvxfers_engine_gets_the_clients_body_and_its_part(path: str) -> None:
    prefill, decode = legs("kvxfer", path, **FULL)
    body = {**LEAST[path], **FULL}
    assert prefill == {**body, "kv_transfer_params": {**OURS, "role": "prefill"}}
    assert decode == {**body, "kv_transfer_params": {**OURS, "role": "decode"}}
    parsed = parse_transfer_params(decode["kv_transfer_params"])
    assert (parsed.role, parsed.timeout_s, parsed.transfer_id) == (Part.DECODE, 30.0, TRANSFER_ID)


@pytest.mark.parametrize("dialect", ["kvxfer", "vllm-kvxfer"])
def test_a_leg_says_where_the_sources_stages_end(dialect: str) -> None:
    staged = dataclasses.replace(PAIR, prefill=BareWorker(ranks=4, stages="16,32"))
    for leg in legs(dialect, CHAT, staged):
        assert leg["kv_transfer_params"]["source"] == {**OURS["source"], "ranks": 4, "stages": "16,32"}
        assert leg["kv_transfer_params"]["destination"] == OURS["destination"]


def test_a_pair_without_a_timeout_says_none() -> None:
    prefill, _ = legs("kvxfer", CHAT, dataclasses.replace(PAIR, timeout_s=None))
    assert "timeout_s" not in prefill["kv_transfer_params"]


LIMITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (COMPLETIONS, {}, {"max_tokens": 1}),
    (COMPLETIONS, {"max_tokens": 7}, {"max_tokens": 1}),
    (CHAT, {}, {"max_tokens": 1}),
    (CHAT, {"max_tokens": 7, "max_completion_tokens": 8}, {"max_tokens": 1, "max_completion_tokens": 1}),
    (CHAT, {"max_completion_tokens": None}, {"max_tokens": 1, "max_completion_tokens": 1}),
    (RESPONSES, {"max_output_tokens": 9}, {"max_output_tokens": 1, "store": False}),
    (RESPONSES, {"store": True}, {"max_output_tokens": 1, "store": False}),
    (MESSAGES, {}, {"max_tokens": 1}),
]


@pytest.mark.parametrize(("path", "limits", "one"), LIMITS)
def test_vllms_prefill_leg_is_a_short_request_for_one_token(
    path: str, limits: dict[str, Any], one: dict[str, Any]
) -> None:
    fields = {**FULL, **limits}
    on = {} if path == MESSAGES else {"ignore_eos": True}
    for name, params in (("vllm", NIXL_ASK), ("vllm-mooncake", {**ASKED, "transfer_id": str(TRANSFER_ID)})):
        prefill, decode = legs(name, path, **fields)
        assert prefill == short(path, fields, **one, **on, kv_transfer_params=params)
        decode.pop("kv_transfer_params")
        assert decode == {**LEAST[path], **fields}


@pytest.mark.parametrize(("path", "limits", "one"), LIMITS)
def test_the_prefill_leg_for_kvxfers_connector_has_the_transfer_and_the_trace(
    path: str, limits: dict[str, Any], one: dict[str, Any]
) -> None:
    fields = {**FULL, **limits}
    prefill, decode = legs("vllm-kvxfer", path, **fields)
    expected = short(path, fields, **one, logprobs=True)
    expected["kv_transfer_params"] = {**OURS, "role": "prefill", **ASKED, "traceparent": TRACE}
    del expected["stream"]
    assert prefill == expected
    params = {**OURS, "role": "decode", **FETCHES, "traceparent": TRACE}
    assert decode == {**LEAST[path], **fields, "kv_transfer_params": params}


def test_vllms_decode_leg_gets_what_p_answered_in_its_own_bytes() -> None:
    raw = json.dumps(FROM_P, indent=1).replace("5600", "5600 ").encode()
    spoken, read = dialect("vllm"), inbound(CHAT, **FULL)
    handover = spoken.handover(b'{"id": "x", "kv_transfer_params": ' + raw + b', "choices": []}')
    assert handover.params == raw
    leg = spoken.decode_leg(read, PAIR, handover)
    assert b'"kv_transfer_params":' + raw in leg.content()
    assert sent(leg) == {**LEAST[CHAT], **FULL, "kv_transfer_params": FROM_P}
    with pytest.raises(HandoverError):
        spoken.decode_leg(read, PAIR, None)


def test_vllm_gives_ps_blocks_back_by_a_leg_for_one_token() -> None:
    spoken, read = dialect("vllm"), inbound(CHAT, **FULL)
    forgone = spoken.forgo_leg(read, PAIR, Handover(json.dumps(FROM_P).encode()))
    assert forgone is not None
    assert sent(forgone) == short(CHAT, FULL, max_tokens=1, kv_transfer_params=FROM_P)
    assert spoken.forgo_leg(read, PAIR, None) is None
    assert all(dialect(name).forgo_leg(read, PAIR, None) is None for name in DIALECTS)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (b"", "no JSON object"),
        (b"[]", "no JSON object"),
        (b"{}", "no kv_transfer_params"),
        (b'{"kv_transfer_params":null}', "no kv_transfer_params"),
        (b'{"kv_transfer_params":{}}', "empty"),
        *(
            (json.dumps({"kv_transfer_params": {**FROM_P, **wrong}}).encode(), word)
            for wrong, word in (
                ({"do_remote_prefill": False}, "remote prefill"),
                ({"more": "x" * (1 << 20)}, "longer than"),
            )
        ),
    ],
)
def test_a_prefill_that_hands_nothing_over_is_an_error_by_name(answer: bytes, word: str) -> None:
    with pytest.raises(HandoverError, match=word) as caught:
        dialect("vllm").handover(answer)
    assert (caught.value.code, caught.value.retryable) == ("handover", True)


@pytest.mark.parametrize(
    "said",
    [
        {"ticket": "x"},
        {name: value for name, value in FROM_P.items() if name != "remote_request_id"},
        *({name: value for name, value in FROM_P.items() if name != left_out} for left_out in FROM_P),
        {"do_remote_prefill": True, "remote_block_ids": None, "remote_block_hashes": ["a"]},
    ],
)
def test_what_p_says_is_handed_over_as_it_is(said: dict[str, Any]) -> None:
    """Connectors and their versions differ in what they say, and the router needs none of it."""
    raw = json.dumps(said, indent=1).encode()
    handed = dialect("vllm").handover(b'{"kv_transfer_params":' + raw + b"}")
    assert handed.params == raw
    assert sent(dialect("vllm").decode_leg(inbound(CHAT), PAIR, handed))["kv_transfer_params"] == said


def test_mooncakes_decode_leg_names_ps_engine_and_bootstrap_server() -> None:
    prefill, decode = legs("vllm-mooncake", COMPLETIONS, prompt="hi")
    assert decode["kv_transfer_params"] == {
        **FETCHES,
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "engine-1",
        "transfer_id": prefill["kv_transfer_params"]["transfer_id"],
    }
    spoken, worker = dialect("vllm-mooncake"), BareWorker("p", "http://[::1]:8000", bootstrap_port=9000, dp_rank=1)
    assert spoken.discovery_url(worker) == "http://[::1]:9000/query"
    answer = {"0": {"engine_id": "a", "worker_addr": {}}, "1": {"engine_id": "b", "worker_addr": {}}}
    assert spoken.engine_id(worker, json.dumps(answer).encode()) == "b"
    assert spoken.engine_id(P, json.dumps(answer).encode()) == "a"
    assert spoken.engine_id(worker, b'{"a":{"0":{}},"b":{"1":{}}}') == "b"  # as older versions say it
    for wrong in (
        b"",
        b"[]",
        b"{}",
        b'{"1":{}}',
        b'{"1":{"engine_id":7}}',
        b'{"1":{"engine_id":""}}',
        b'{"a":{"0":1}}',
    ):
        with pytest.raises(HandoverError):
            spoken.engine_id(worker, wrong)
    with pytest.raises(HandoverError, match="has not said"):
        legs("vllm-mooncake", CHAT, dataclasses.replace(PAIR, prefill_engine_id=None))


@pytest.mark.parametrize("path", sorted(LEAST))
def test_both_legs_of_sglang_are_the_clients_body_and_one_room(path: str) -> None:
    prefill, decode = legs("sglang", path, stream=True)
    room = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 1 << 40}
    assert prefill == decode == {**LEAST[path], "stream": True, **room}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": ["a", "b,", '"'], "stream": True}),
        (COMPLETIONS, {"prompt": [[1, 2], [3], [4]]}),
        (GENERATE, {"text": ["a", "b", "c"]}),
        (GENERATE, {"text": None, "input_ids": [[1], [2], [3]]}),
    ],
)
def test_a_list_of_prompts_takes_as_many_rooms_of_sglang(path: str, fields: dict[str, Any]) -> None:
    pair = dataclasses.replace(PAIR, prefill=BareWorker("p", "http://p.example:1", bootstrap_port=7))
    prefill, decode = legs("sglang", path, pair, **fields)
    rooms = [(1 << 40) + number for number in range(3)]
    assert prefill == decode
    assert (prefill["bootstrap_host"], prefill["bootstrap_port"]) == (["p.example"] * 3, [7] * 3)
    assert prefill["bootstrap_room"] == rooms


def test_a_long_list_of_prompts_takes_its_first_room_alone() -> None:
    """SGLang counts on from it (GenerateReqInput._normalize_bootstrap_params)."""
    prefill, _ = legs("sglang", COMPLETIONS, prompt=[str(number) for number in range(1000)])
    assert (prefill["bootstrap_host"], prefill["bootstrap_room"]) == ("10.0.0.1", 1 << 40)


@pytest.mark.parametrize(("room", "count", "first"), [(0, 1, 1), (ROOM_MAX, 1, ROOM_MAX), (ROOM_MAX, 3, ROOM_MAX - 2)])
def test_rooms_stay_within_63_bits(room: int, count: int, first: int) -> None:
    prefill, _ = legs("sglang", COMPLETIONS, dataclasses.replace(PAIR, room=room), prompt=["a"] * count)
    assert prefill["bootstrap_room"] == list(range(first, first + count))
    assert prefill["bootstrap_room"][-1] <= ROOM_MAX


def test_sglangs_legs_name_the_engine_behind_an_address_in_the_body() -> None:
    p, d = BareWorker("p", P.url, dp_rank=1), BareWorker("d", D.url, dp_rank=0)
    prefill, decode = legs("sglang", GENERATE, dataclasses.replace(PAIR, prefill=p, decode=d))
    assert (prefill["routed_dp_rank"], prefill["disagg_prefill_dp_rank"]) == (1, 1)
    assert (decode["routed_dp_rank"], decode["disagg_prefill_dp_rank"]) == (0, 1)
    assert sent(dialect("sglang").alone_leg(inbound(CHAT), d))["routed_dp_rank"] == 0


@pytest.mark.parametrize("name", ["vllm", "vllm-kvxfer", "vllm-mooncake"])
def test_vllms_legs_name_the_engine_behind_an_address_in_a_header(name: str) -> None:
    p, d = BareWorker("p", P.url, dp_rank=1), BareWorker("d", D.url)
    spoken, read, pair = dialect(name), inbound(CHAT), dataclasses.replace(PAIR, prefill=p, decode=d)
    assert spoken.prefill_leg(read, pair).headers == (*read.leg_headers, (b"x-data-parallel-rank", b"1"))
    assert spoken.decode_leg(read, pair, Handover(b'{"x":1}')).headers == read.leg_headers
    assert spoken.alone_leg(read, p).headers[-1] == (b"x-data-parallel-rank", b"1")


def test_a_plain_engine_gets_the_clients_body() -> None:
    spoken, read = dialect("plain"), inbound(CHAT, **FULL)
    alone = Pair(None, D, TRANSFER_ID)
    assert spoken.alone_leg(read, D).content() == read.body == spoken.decode_leg(read, alone, None).content()
    with pytest.raises(HandoverError):
        spoken.prefill_leg(read, PAIR)


@pytest.mark.parametrize(
    ("name", "kind", "path"),
    [
        ("kvxfer", EngineKind.KVXFER, CHAT),
        ("vllm-kvxfer", EngineKind.VLLM, CHAT),
        ("vllm", EngineKind.VLLM, RESPONSES),
        ("vllm-mooncake", EngineKind.VLLM, MESSAGES),
        ("sglang", EngineKind.SGLANG, GENERATE),
    ],
)
def test_the_mock_engine_understands_both_legs_as_one_transfer(name: str, kind: EngineKind, path: str) -> None:
    prefill, decode = (
        read_leg(body, role, kind, "cmpl-req-1-0")
        for body, role in zip(legs(name, path), (EngineRole.PREFILL, EngineRole.DECODE), strict=True)
    )
    assert (prefill.part, decode.part) == (LegPart.PREFILL, LegPart.DECODE)
    assert prefill.keys == decode.keys
    assert prefill.dialect is decode.dialect
    assert not decode.is_incomplete


@pytest.mark.parametrize("name", sorted(DIALECTS - {"plain"}))
def test_a_leg_grows_by_no_more_than_workers_leave_room_for(name: str) -> None:
    host = "h" * (URL_CHARS_MAX - len("http://:65535"))
    stages = ",".join(["9999"] * 32)
    worker = BareWorker("a" * 64, f"http://{host}:65535", 65535, 1 << 15, ranks=1 << 31, stages=stages)
    assert STAGES.fullmatch(stages)
    pair = Pair(worker, worker, TRANSFER_ID, 1 << 16, ROOM_MAX, 86399.123456789, prefill_engine_id="e" * 256)
    spoken = dialect(name)
    for path, fields in (
        (CHAT, {}),
        (CHAT, {"max_completion_tokens": 5, "kv_transfer_params": {}}),
        (RESPONSES, {"stream": True}),
        *((COMPLETIONS, {"prompt": ["\u9de1"] * count}) for count in (1, 2, 9, 50, 1000)),
    ):
        read = inbound(path, **fields)
        handover = Handover(b"{}") if spoken.order is Order.PREFILL_FIRST else None
        for leg in (spoken.prefill_leg(read, pair), spoken.decode_leg(read, pair, handover)):
            assert len(leg.content()) <= len(read.body) + LEG_BYTES_MAX
