"""What the two legs of a request say to the connector."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.vllm.params import DecodeLeg, PrefillLeg, handed_over, parse, trace_of
from kvxfer.errors import InvalidArgumentError
from kvxfer.protocol.signed_metadata import TEXT_MAX
from kvxfer.types import Incarnation, TransferId

ID = TransferId(bytes(range(16)))
ANSWERED = {"version": 1, "agents": ["p"], "tokens": 1}
INCARNATION = f"{(1 << 64) - 1}.{'a' * 32}"
WAITING = {"transfer_id": str(ID), "source": {"agent_id": "p", "ranks": 1}}


def test_a_prefill_leg_of_any_router() -> None:
    nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    assert parse({"do_remote_decode": True, "do_remote_prefill": False, **nothing}) == PrefillLeg(None, None)


def test_answer_of_a_prefill_leg_parses_as_the_decode_leg() -> None:
    assert parse(handed_over(ID, ("p", "p.1"), "request", 41)) == DecodeLeg(ID, ("p", "p.1"), 41)
    incarnations = tuple(Incarnation((1 << 64) - 1 - rank, bytes([rank]) * 16) for rank in range(2))
    metadata = ("metadata", "metadata.1")
    answer = handed_over(ID, ("p", "p.1"), "request", 41, incarnations=incarnations, agent_metadata=metadata)
    assert parse(answer) == DecodeLeg(ID, ("p", "p.1"), 41, incarnations, metadata)
    del answer["kvxfer"]["lives"], answer["kvxfer"]["cards"]
    assert parse(answer) == DecodeLeg(ID, ("p", "p.1"), 41)


def test_no_word_of_a_client_says_that_a_prompt_is_promised_to_one_engine() -> None:
    """Answers of older versions had such a word, which a client could change."""
    for word in ({}, {"open": False}, {"open": True}, {"open": "no"}):
        leg = parse({"do_remote_prefill": True, "transfer_id": str(ID), "kvxfer": {**ANSWERED, **word}})
        assert isinstance(leg, DecodeLeg)
        assert leg.is_open


def test_both_legs_of_kvxfers_router() -> None:
    ends = {"source": {"agent_id": "p", "ranks": 2}, "destination": {"agent_id": "d", "ranks": 1, "address": ""}}
    shared = {"transfer_id": str(ID), "attempt": 1, **ends}
    assert parse({"do_remote_decode": True, "role": "prefill", **shared}) == PrefillLeg(ID, "d")
    assert parse({"do_remote_prefill": True, "role": "decode", **shared}) == DecodeLeg(ID, ("p", "p.1"), None)


@pytest.mark.parametrize("timeout_s", [None, 3, 0.5, 86400])
def test_a_decode_leg_says_how_long_it_waits(timeout_s: float | None) -> None:
    leg = parse({"do_remote_prefill": True, **WAITING, "timeout_s": timeout_s})
    assert isinstance(leg, DecodeLeg)
    assert leg.timeout_s == timeout_s


def test_the_trace_of_a_request_is_its_headers_else_its_parameters() -> None:
    one, other = (f"00-{digit * 32}-{digit * 16}-01" for digit in "12")
    assert trace_of({"traceparent": one}, {"traceparent": other}) == one
    assert trace_of(None, {"traceparent": other}) == other
    assert trace_of({"traceparent": "nonsense"}, handed_over(ID, ("p",), "r", 1, other)) == other
    for nothing in (None, {}, {"traceparent": 5}, {"traceparent": ["x"]}, handed_over(ID, ("p",), "r", 1)):
        assert trace_of(None, nothing) is None


@pytest.mark.parametrize("params", [None, {}, {"anything": 1}, {"do_remote_prefill": False}])
def test_other_requests_are_none_of_ours(params: dict[str, Any] | None) -> None:
    assert parse(params) is None


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({}, "transfer id"),
        ({"transfer_id": str(ID)}, "source"),
        ({"transfer_id": str(ID), "source": {"agent_id": "p", "ranks": 0}}, "source.ranks"),
        ({"transfer_id": str(ID), "source": {"agent_id": "/"}}, "agent id"),
        ({"transfer_id": str(ID), "kvxfer": {"version": 2}}, "version"),
        ({"transfer_id": str(ID), "kvxfer": {"version": 1, "agents": [], "tokens": 1}}, "agents"),
        ({"transfer_id": str(ID), "kvxfer": {"version": 1, "agents": ["p"], "tokens": "1"}}, "tokens"),
        ({"transfer_id": str(ID), "kvxfer": {**ANSWERED, "lives": [INCARNATION, INCARNATION]}}, "lives"),
        ({"transfer_id": str(ID), "kvxfer": {**ANSWERED, "lives": [f"9{INCARNATION[1:]}"]}}, "64 bits"),
        ({"transfer_id": str(ID), "kvxfer": {**ANSWERED, "lives": [1]}}, "an incarnation of"),
        ({"transfer_id": str(ID), "kvxfer": {**ANSWERED, "cards": ["a", "b"]}}, "cards"),
        ({"transfer_id": str(ID), "kvxfer": {**ANSWERED, "cards": ["a" * (TEXT_MAX + 1)]}}, "cards"),
        ({"transfer_id": str(ID), "kvxfer": {**ANSWERED, "cards": [1]}}, "cards"),
        ({"transfer_id": str(ID), "kvxfer": {**ANSWERED, "agents": ["p"] * 17, "cards": ["a"] * 17}}, "at most 16"),
        *[({**WAITING, "timeout_s": wrong}, "timeout_s") for wrong in (0, -1, 86400.5, 10**400, "1", True, [1], {})],
        *[({**WAITING, "timeout_s": float(wrong)}, "timeout_s") for wrong in ("nan", "inf", "-inf")],
    ],
)
def test_a_wrong_field_is_named(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        parse({"do_remote_prefill": True, **params})


@given(st.dictionaries(st.sampled_from(["transfer_id", "source", "destination", "kvxfer", "timeout_s"]), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["agent_id", "ranks", "version", "agents", "tokens", "lives", "cards"]), inner, max_size=5),
    max_leaves=6,
)), st.booleans())  # fmt: skip
def test_any_params_are_a_leg_or_one_error(values: dict[str, Any], is_decode: bool) -> None:
    try:
        leg = parse({"do_remote_prefill" if is_decode else "do_remote_decode": True, **values})
    except InvalidArgumentError:
        return
    assert isinstance(leg, DecodeLeg if is_decode else PrefillLeg)
