"""What a client may not set never reaches a worker, however it is spelled, and every other byte does."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.openai import scanner
from kvxfer.router.dialects import CLIENT_FIELDS, DIALECTS, Handover, Leg, Order, dialect
from kvxfer.router.inbound import Inbound
from tests.support.native.json_bodies import NAMES, bodies, loaded, written_texts, written_values
from tests.support.router_bodies import CHAT, COMPLETIONS, GENERATE, LEAST, MESSAGES, PAIR, RESPONSES, D, inbound, sent

HANDED = b'{"do_remote_prefill":true,"remote_engine_id":"e","remote_block_ids":[[1,2]]}'
PATHS = [COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE]
FIELDS = scanner.Fields(["model"])
TOUCHED = CLIENT_FIELDS | {
    *("stream_options", "min_tokens", "echo", "prompt_logprobs", "logprobs", "top_logprobs", "logprob_token_ids"),
    *("return_token_ids", "return_prompt_text", "return_token_offsets", "include", "stop_token_ids", "vllm_xargs"),
    *("stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "store", "ignore_eos", "request_id"),
}
"""What any dialect changes in any leg."""


def members_of(body: bytes) -> list[tuple[str, bytes]]:
    """Every member of a body, with its value as it is written."""
    return [(member.name, body[slice(*member.value)]) for member in scanner.members_of(FIELDS.scan(body))]


def legs_of(name: str, read: Inbound) -> list[Leg]:
    """Every leg that a dialect makes of a request."""
    spoken = dialect(name)
    legs = [spoken.alone_leg(read, D)]
    if spoken.order is Order.ALONE:
        return legs
    handover = Handover(HANDED) if spoken.order is Order.PREFILL_FIRST else None
    legs += [spoken.prefill_leg(read, PAIR), spoken.decode_leg(read, PAIR, handover)]
    forgone = spoken.forgo_leg(read, PAIR, handover)
    return legs if forgone is None else [*legs, forgone]


@st.composite
def bodies_with_fields(draw: st.DrawFn) -> tuple[str, bytes]:
    """A valid request whose other members may be any, among them what no client may set, repeated and escaped."""
    path = draw(st.sampled_from(PATHS))
    names = st.sampled_from(
        [*sorted(CLIENT_FIELDS), "stream_options", "min_tokens", "n", "echo", "tools", "user", *NAMES]
    )
    members = []
    for _ in range(draw(st.integers(0, 6))):
        members.append(f"{draw(written_texts(names))} : {draw(written_values(2))}")
    least = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in {"model": "m", **LEAST[path]}.items()]
    stream = [f'"stream":{draw(st.sampled_from(["true", "false", "null"]))}']
    return path, ("{" + ",".join([*members, *stream, *least]) + "}").encode()


@settings(max_examples=300, deadline=None)
@given(bodies_with_fields(), st.sampled_from(sorted(DIALECTS)))
@example(
    (COMPLETIONS, b'{"kv_transfer_\\u0070arams":{"mine":1},"prompt":"x","model":"m","kv_transfer_params":{"mine":2}}'),
    "vllm",
)
@example((GENERATE, b'{"boot\\u0073trap_room":1,"text":"x","bootstrap_room":2,"bootstrap_host":"evil"}'), "sglang")
@example((COMPLETIONS, b'{"model":"m","prompt":"x","vllm_xargs":{"a":1,"kv_transfer_p\\u0061rams":"x"}}'), "plain")
def test_only_what_a_dialect_says_is_changed(written: tuple[str, bytes], name: str) -> None:
    path, body = written
    theirs = members_of(body)
    for leg in legs_of(name, inbound(path, body)):
        ours = members_of(leg.content())
        assert [member for member in ours if member[0] not in TOUCHED] == [
            member for member in theirs if member[0] not in TOUCHED
        ]
        for field in TOUCHED:
            written_by_client = [value for name, value in theirs if name == field]
            found = [value for name, value in ours if name == field]
            if field in CLIENT_FIELDS:
                assert len(found) <= 1
                assert not found or found[0] not in written_by_client
            else:
                assert len(found) <= 1 or found == written_by_client


@settings(max_examples=100, deadline=None)
@given(bodies(), st.sampled_from(sorted(DIALECTS)))
def test_a_body_without_such_fields_goes_to_one_worker_byte_for_byte(body: bytes, name: str) -> None:
    content = body.rstrip()[:-1] + (b"," if loaded(body) else b"") + b'"model":"m","prompt":"x","stream":null}'
    read = inbound(COMPLETIONS, content)
    assert dialect(name).alone_leg(read, D).content() == content


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("path", PATHS)
def test_each_forbidden_field_is_gone_on_every_route(name: str, path: str) -> None:
    for field in sorted(CLIENT_FIELDS):
        escaped = "".join(f"\\u{ord(letter):04x}" for letter in field)
        least = json.dumps(LEAST[path])[1:-1]
        body = f'{{"{field}":"evil","{escaped}":["evil"],{least},"{escaped}":"evil"}}'.encode()
        for leg in legs_of(name, inbound(path, body)):
            assert b"evil" not in leg.content()
            assert sent(leg)


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("path", PATHS)
def test_a_client_chooses_no_id_under_which_an_engine_keeps_its_response(name: str, path: str) -> None:
    """It could be another client's."""
    least = json.dumps(LEAST[path])[1:-1]
    for leg in legs_of(name, inbound(path, f'{{"request_id":"evil","request_\\u0069d":"evil",{least}}}'.encode())):
        assert leg.content().count(b"evil") == (0 if path == RESPONSES else 2)


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
def test_transfer_parameters_do_not_come_in_by_the_arguments_of_extensions(name: str, field: str) -> None:
    for value in ("evil", {"evil": 1}, ["evil"]):
        read = inbound(CHAT, vllm_xargs={"other": 1, field: value})
        for leg in legs_of(name, read):
            assert sent(leg)["vllm_xargs"] == {"other": 1}
    untouched = inbound(CHAT, vllm_xargs={"other": 1})
    assert all(b'"vllm_xargs": {"other": 1}' in leg.content() for leg in legs_of(name, untouched))


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_every_leg_has_the_requests_headers(name: str) -> None:
    read = inbound(CHAT)
    assert all(leg.headers == read.leg_headers for leg in legs_of(name, read))
    assert all(leg.path == CHAT for leg in legs_of(name, read))
