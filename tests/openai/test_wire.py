"""Events, error bodies and the transfer parameters as they stand on the wire."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import errors
from kvxfer.openai.errors import RequestError, error_body, status_for
from kvxfer.openai.sse import DONE, LATE_LF, EventDecoder, encode_event
from kvxfer.openai.transfer_params import Part, TransferEnd, TransferParams, parse_transfer_params
from kvxfer.types import TransferId

OBJECTS = st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=8) | st.integers(), max_size=3), max_size=5)


@given(OBJECTS, st.lists(st.integers(0, 400), max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_events_survive_any_cut(objects: list[dict[str, Any]], cuts: list[int], line_end: bytes) -> None:
    stream = b"".join(encode_event(obj) for obj in objects) + b": comment\n\n" + DONE
    stream = stream.replace(b"\n", line_end)
    edges = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    decoder = EventDecoder()
    found = [event for at, end in itertools.pairwise(edges) for event in decoder.feed(stream[at:end])]
    assert b"".join(event.raw for event in found) == stream
    found = [event for event in found if event != LATE_LF]
    assert [event.json() for event in found[:-2]] == objects
    assert found[-2].data == b""
    assert found[-1].is_done
    assert not decoder.has_partial_event


def test_data_lines_are_joined_and_other_fields_ignored() -> None:
    [event] = EventDecoder().feed(b"event: x\ndata:a\ndata: b\rid: 3\r\ndata\n\n")
    assert event.data == b"a\nb\n"
    with pytest.raises(errors.ProtocolError):
        event.json()


@pytest.mark.parametrize("rest", [b"", b"\n", b"\ndata: [DONE]\r\n\r\n", b"data: [DONE]\r\r"])
def test_a_cr_ends_an_event_at_once(rest: bytes) -> None:
    """Before, the event waited for the next byte, which a worker sends with its next event, or never."""
    decoder = EventDecoder()
    [event] = decoder.feed(b"data: a\r\n\r")
    assert (event.raw, event.data) == (b"data: a\r\n\r", b"a")
    found = decoder.feed(rest)
    assert b"".join(event.raw for event in found) == rest
    assert [event.data for event in found if event.data] == ([b"[DONE]"] if b"DONE" in rest else [])
    assert not decoder.has_partial_event


def test_half_an_event_is_kept_and_bounded() -> None:
    decoder = EventDecoder(event_bytes_max=100)
    assert decoder.feed(b"data: {") == []
    assert decoder.has_partial_event
    with pytest.raises(errors.ProtocolError, match="event_bytes_max 100"):
        decoder.feed(b"x" * 100)


@given(st.binary(max_size=200))
def test_the_decoder_takes_any_bytes(data: bytes) -> None:
    decoder = EventDecoder()
    for event in decoder.feed(data):
        assert event.raw


def test_encoding_never_breaks_a_line() -> None:
    encoded = encode_event({"text": "a\n\nb\r\u2028\ud800"})
    assert encoded.count(b"\n") == 2
    assert json.loads(encoded[6:]) == {"text": "a\n\nb\r\u2028\ud800"}


@pytest.mark.parametrize("kind", sorted(errors.BY_CODE.values(), key=lambda kind: kind.code))
def test_every_error_has_a_body_and_a_status(kind: type[errors.KvxferError]) -> None:
    body = error_body(kind("it broke"))["error"]
    of_caller = (errors.InvalidArgumentError, errors.AuthenticationError, errors.ForbiddenError)
    assert body == {
        "message": "it broke",
        "type": "invalid_request_error" if issubclass(kind, of_caller) else "server_error",
        "param": None,
        "code": kind.code,
        "retryable": kind.retryable,
    }
    assert status_for(kind("it broke")) in (400, 401, 403, 500, 502, 503, 504)
    assert errors.from_code(body["code"], "x").retryable == body["retryable"]


def test_a_foreign_exception_says_nothing_of_its_insides() -> None:
    body = error_body(ValueError("token abc at /srv/x"))["error"]
    assert body["message"] == "internal error (ValueError)"
    assert (body["code"], body["retryable"], status_for(ValueError())) == ("internal", False, 500)


def test_request_errors_carry_field_status_and_code() -> None:
    error = RequestError("too long", param="prompt", error_code="context_length_exceeded")
    assert status_for(error) == 400
    assert error_body(error)["error"] == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
        "retryable": False,
    }
    assert error_body("plain", code="overloaded", retryable=True)["error"]["type"] == "server_error"


PARAMS = TransferParams(
    TransferId(bytes(range(16))), 2, Part.PREFILL, TransferEnd("p0", 1, "http://a"), TransferEnd("d0", 1, "http://b")
)


def test_transfer_params_round_trip() -> None:
    values = json.loads(json.dumps(PARAMS.to_json()))
    assert parse_transfer_params({**values, "later": 1}) == PARAMS


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"transfer_id": "xyz"}, "transfer_id"),
        ({"transfer_id": None}, "transfer_id"),
        ({"transfer_id": "00"}, "transfer_id"),
        ({"attempt": 0}, "attempt"),
        ({"attempt": True}, "attempt"),
        ({"role": "both"}, "role"),
        ({"role": []}, "role"),
        ({"first_token": "prefill"}, "first_token"),
        ({"source": None}, "source"),
        ({"source": {"agent_id": "../x"}}, "source.agent_id"),
        ({"destination": {"agent_id": "d", "ranks": 2}}, "destination.ranks"),
        ({"destination": {"agent_id": "d", "address": 3}}, "destination.address"),
    ],
)
def test_wrong_transfer_params_are_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_transfer_params({**PARAMS.to_json(), **change})
    assert caught.value.param == f"kv_transfer_params.{param}"
