"""Events of streamed answers as engines write them: content, ends, errors, and how a broken stream ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import DeadlineExceededError, OverloadedError, PeerGoneError
from kvxfer.openai.errors import RequestError, error_body
from kvxfer.openai.sse import Event, EventDecoder
from kvxfer.router.apis import ROUTES, StreamStyle, api_of
from kvxfer.router.apis.messages_style import MESSAGES
from kvxfer.router.apis.openai_style import GENERATE, OPENAI
from kvxfer.router.apis.responses_style import RESPONSES
from kvxfer.router.failure import Failure, FailureKind

STYLES: list[StreamStyle] = [OPENAI, RESPONSES, MESSAGES, GENERATE]


def event(value: Any, name: str | None = None) -> Event:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return Event(head + b"data: " + data + b"\n\n", data)


def typed(kind: str, **members: Any) -> Event:
    return event({"type": kind, **members}, kind)


def chunk(*choices: Any, **more: Any) -> Event:
    return event({"id": "x", "object": "chat.completion.chunk", "choices": list(choices), **more})


def delta(**values: Any) -> dict[str, Any]:
    return {"index": 0, "delta": values, "finish_reason": None}


RESPONSE: dict[str, Any] = {"id": "r", "object": "response", "error": None, "metadata": {"type": "response.completed"}}


@pytest.mark.parametrize(
    ("style", "value"),
    [
        (OPENAI, chunk(delta(role="assistant", content=""))),
        (OPENAI, chunk(delta(role="assistant", content=None, reasoning_content=None, tool_calls=[]))),
        (OPENAI, chunk(usage={"prompt_tokens": 3}, prompt_token_ids=[1, 2])),
        (OPENAI, chunk({"index": 0, "text": "", "finish_reason": None})),
        (OPENAI, Event(b": ping\n\n", b"")),
        (RESPONSES, typed("response.created", response=RESPONSE)),
        (RESPONSES, typed("response.in_progress", response=RESPONSE)),
        (RESPONSES, typed("response.output_item.added", item={"type": "message"})),
        (RESPONSES, typed("response.content_part.added", part={"type": "output_text", "text": ""})),
        (MESSAGES, typed("message_start", message={"type": "message", "content": []})),
        (MESSAGES, typed("content_block_start", index=0, content_block={"type": "text", "text": ""})),
        (MESSAGES, typed("ping")),
    ],
)
def test_a_frame_is_no_content(style: StreamStyle, value: Event) -> None:
    assert not style.has_content(value.data)
    assert not style.is_end(value)
    assert style.failure("decode", value) is None


@pytest.mark.parametrize(
    ("style", "value"),
    [
        (OPENAI, chunk(delta(content="a"))),
        (OPENAI, chunk(delta(role="assistant", content="a"))),
        (OPENAI, chunk(delta(reasoning_content="a"))),
        (OPENAI, chunk(delta(tool_calls=[{"index": 0, "function": {"name": "f"}}]))),
        (OPENAI, chunk(delta(), delta(content="second"))),
        (OPENAI, chunk({"index": 0, "delta": {}, "finish_reason": "stop"})),
        (OPENAI, chunk({"index": 0, "text": "a", "finish_reason": None})),
        (OPENAI, event(b'{"choices":[{"text":"quoted \\"error\\" and [DONE]"}]}')),
        (OPENAI, event(b"not JSON")),
        (OPENAI, event(b'{"choices":[3]}')),
        (RESPONSES, typed("response.output_text.delta", delta="a")),
        (RESPONSES, typed("response.reasoning_text.delta", delta="a")),
        (RESPONSES, typed("response.function_call_arguments.delta", delta="{")),
        (RESPONSES, typed("response.something.new")),
        (RESPONSES, event(b"[1]")),
        (MESSAGES, typed("content_block_delta", delta={"type": "text_delta", "text": "a"})),
        (MESSAGES, typed("content_block_start", content_block={"type": "tool_use", "name": "f", "input": {}})),
        (MESSAGES, typed("message_delta", delta={"stop_reason": "end_turn"})),
        (GENERATE, event({"text": "a", "output_ids": [1], "meta_info": {"finish_reason": None}})),
    ],
)
def test_some_of_the_answer_is_content(style: StreamStyle, value: Event) -> None:
    assert style.has_content(value.data)
    assert not style.is_end(value)
    assert style.failure("decode", value) is None


@pytest.mark.parametrize(
    ("style", "value"),
    [
        (OPENAI, event(b"[DONE]")),
        (GENERATE, event(b"[DONE]")),
        (RESPONSES, event(b"[DONE]")),
        (RESPONSES, typed("response.completed", response={"error": None, "output": [{"type": "message"}]})),
        (RESPONSES, typed("response.incomplete", response={"error": None})),
        (MESSAGES, typed("message_stop")),
    ],
)
def test_the_end_is_told_and_has_a_mark(style: StreamStyle, value: Event) -> None:
    assert style.is_end(value)
    assert style.has_content(value.data)
    assert style.failure("decode", value) is None
    assert any(mark in value.raw for mark in style.END_MARKS)


BAD = {"object": "error", "message": "wrong", "type": "BadRequestError", "param": None, "code": 400}


@pytest.mark.parametrize(
    ("style", "value", "kind", "status"),
    [
        (OPENAI, event({"error": BAD}), FailureKind.REFUSED, 400),
        (OPENAI, event(BAD), FailureKind.REFUSED, 400),
        (OPENAI, event({"error": {**BAD, "code": 404}}), FailureKind.REFUSED, 404),
        (OPENAI, event({"error": {**BAD, "code": 429}}), FailureKind.OVERLOADED, 503),
        (OPENAI, event({"error": {**BAD, "code": 503}}), FailureKind.OVERLOADED, 503),
        (OPENAI, event({"error": {**BAD, "code": 413}}), FailureKind.DOES_NOT_FIT, 413),
        (OPENAI, event({"error": {**BAD, "code": 500}}), FailureKind.ERROR, 500),
        (OPENAI, event({"error": {"message": "x", "type": "invalid_request_error"}}), FailureKind.REFUSED, 400),
        (OPENAI, event({"error": {"message": "x", "code": "overloaded"}}), FailureKind.OVERLOADED, 503),
        (RESPONSES, typed("error", message="x", code="server_error", param=None), FailureKind.ERROR, 500),
        (RESPONSES, event({"error": BAD}), FailureKind.REFUSED, 400),
        (
            RESPONSES,
            typed("response.failed", response={"error": {"code": "e", "message": "x"}}),
            FailureKind.ERROR,
            500,
        ),
        (RESPONSES, typed("response.failed", response={"error": None}), FailureKind.ERROR, 500),
        (RESPONSES, typed("response.failed"), FailureKind.ERROR, 500),
        (MESSAGES, typed("error", error={"type": "api_error", "message": "x"}), FailureKind.ERROR, 500),
        (MESSAGES, typed("error", error={"type": "invalid_request_error", "message": "x"}), FailureKind.REFUSED, 400),
        (MESSAGES, typed("error", error={"type": "overloaded_error", "message": "x"}), FailureKind.OVERLOADED, 503),
        (MESSAGES, event({"error": BAD}), FailureKind.REFUSED, 400),
        (GENERATE, event({"error": {"message": "x", "code": 400}}), FailureKind.REFUSED, 400),
        *(
            (GENERATE, event({"text": "", "meta_info": {"finish_reason": {"type": "abort", **reason}}}), kind, status)
            for reason, kind, status in (
                ({"message": "x", "status_code": 400}, FailureKind.REFUSED, 400),
                ({"message": "x", "status_code": 503}, FailureKind.OVERLOADED, 503),
                ({"message": "x", "status_code": 500}, FailureKind.ERROR, 500),
                ({}, FailureKind.ERROR, 500),
            )
        ),
    ],
)
def test_an_error_is_told_and_has_a_mark(style: StreamStyle, value: Event, kind: FailureKind, status: int) -> None:
    failed = style.failure("decode", value)
    assert failed is not None
    assert (failed.kind, failed.status) == (kind, status)
    assert failed.body["error"]["message"]
    assert isinstance(failed.is_retryable, bool)
    assert any(mark in value.raw for mark in style.END_MARKS)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "error",
    [PeerGoneError("lost"), OverloadedError("busy"), RequestError("bad", param="x"), DeadlineExceededError("late")],
)
def test_a_broken_stream_ends_well_in_the_clients_shape(style: StreamStyle, error: Exception) -> None:
    body = error_body(error)
    content = style.end_with_error(body)
    events = EventDecoder().feed(content)
    assert b"".join(one.raw for one in events) == content
    failed = style.failure("decode", events[0])
    assert isinstance(failed, Failure)
    assert failed.body["error"]["message"] == str(error)
    assert failed.code == body["error"]["code"]
    assert failed.is_retryable == body["error"]["retryable"]
    assert style.is_end(events[-1]) or style is RESPONSES
    assert json.loads(events[0].data)["error"]["message"] == str(error)


def test_the_error_events_have_the_shapes_of_their_apis() -> None:
    body = error_body(PeerGoneError("lost"))
    error = body["error"]
    assert OPENAI.end_with_error(body) == b"data: " + _compact(body) + b"\n\ndata: [DONE]\n\n"
    assert GENERATE.end_with_error(body) == OPENAI.end_with_error(body)
    responses = {"type": "error", "sequence_number": 0, "code": "peer_gone", "message": "lost", "param": None}
    assert RESPONSES.end_with_error(body) == b"event: error\ndata: " + _compact({**responses, "error": error}) + b"\n\n"
    messages = {"type": "error", "error": {**error, "type": "api_error"}}
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert MESSAGES.end_with_error(body) == b"event: error\ndata: " + _compact(messages) + b"\n\n" + stop


def test_a_whole_error_has_the_shape_of_its_api() -> None:
    busy = error_body(OverloadedError("busy"))
    assert [style.error_answer(busy) for style in (OPENAI, RESPONSES, GENERATE)] == [busy] * 3
    assert MESSAGES.error_answer(busy) == {"type": "error", "error": {**busy["error"], "type": "overloaded_error"}}
    refused = MESSAGES.error_answer(error_body(RequestError("bad", param="x")))
    assert refused["error"]["type"] == "invalid_request_error"
    engines = {"message": "bad", "type": "BadRequestError", "param": None, "code": 400}
    assert MESSAGES.error_answer({"error": engines})["error"]["type"] == "invalid_request_error"
    assert MESSAGES.error_answer({"error": {**engines, "code": 500}})["error"]["type"] == "api_error"


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["error", "abort"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "error", "choices", "delta", "response", "meta_info", "finish_reason", "message", "code"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(JSON | st.binary(max_size=40), st.sampled_from(STYLES))
def test_reading_an_event_is_total(value: Any, style: StreamStyle) -> None:
    one = event(value)
    failed = style.failure("decode", one)
    assert failed is None or json.dumps(failed.body)
    assert style.has_content(one.data) in (True, False)
    assert style.is_end(one) in (True, False)
    if failed is not None or style.is_end(one):
        assert any(mark in one.raw for mark in style.END_MARKS)


def test_every_route_is_found_by_its_path() -> None:
    assert {api.path for api in ROUTES if api.generates} == {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"),
    }
    assert all(api_of(api.path) is api for api in ROUTES)
    assert api_of("/v1/unknown") is None
