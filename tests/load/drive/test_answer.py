"""What of an answer is content, what failed and what it counted; whatever pieces the bytes come in."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.load.drive.answer import LINE_BYTES_MAX, AnswerReader, content_of, failure_of
from kvxfer.load.record import MeasuredRequest
from tests.support.load_server import sse, token, usage

STREAM = "text/event-stream"


def delta(**members: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": members}]}


def read(*parts: tuple[bytes, float], status: int = 200, kind: str = STREAM, end_s: float = 9.0) -> MeasuredRequest:
    reader = AnswerReader()
    reader.head(status, kind)
    for part, now_s in parts:
        if not reader.data(part, now_s):
            break
    reader.end(end_s)
    record = MeasuredRequest("run", 0, "id", 0.0, 5, 2)
    reader.fill(record, end_s)
    return record


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (token("a"), True),
        (token(" "), True),
        (token(""), False),
        (delta(content="a"), True),
        (delta(content=""), False),
        (delta(content=None), False),
        (delta(role="assistant"), False),
        (delta(role="assistant", content=""), False),
        (delta(role="assistant", content="a"), True),
        (delta(reasoning_content="hm"), True),
        (delta(reasoning="hm"), True),
        (delta(reasoning=""), False),
        (delta(tool_calls=[{"index": 0, "function": {"name": "f"}}]), True),
        (delta(tool_calls=[]), False),
        ({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, False),
        ({"choices": [{"text": ""}, {"text": "b"}]}, True),
        (usage(3), False),
        ({}, False),
        ({"choices": None}, False),
        ({"choices": [None, 3, "x"]}, False),
        ({"choices": [{"delta": "x"}]}, False),
    ],
)
def test_content(event: dict[str, Any], expected: bool) -> None:
    assert (content_of(event)[0] > 0) is expected


FINISHED = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("body", "kind", "error"),
    [
        (sse(), STREAM, "empty_answer"),
        (sse(delta(role="assistant"), FINISHED), STREAM, "empty_answer"),
        (sse(FINISHED, done=False), STREAM, "empty_answer"),
        (sse(FINISHED, usage(0)), STREAM, "empty_answer"),
        (sse(FINISHED, usage(2)), STREAM, ""),  # tokens without text, as special ones
        (sse(token("a")), STREAM, ""),
        (sse({"error": {"code": "overloaded"}}), STREAM, "overloaded"),
        (json.dumps(FINISHED).encode(), "application/json", "empty_answer"),
        (json.dumps({"choices": []}).encode(), "application/json", "empty_answer"),
        (json.dumps(FINISHED | {"usage": {"completion_tokens": 2}}).encode(), "application/json", ""),
    ],
)
def test_an_answer_with_neither_content_nor_tokens_has_failed(body: bytes, kind: str, error: str) -> None:
    record = read((body, 1.0), kind=kind)
    assert (record.error, record.status, record.end_s is not None) == (error, 200, True)
    assert record.is_good == (not error)


@pytest.mark.parametrize(
    ("value", "status", "expected"),
    [
        ({"error": {"code": "overloaded", "type": "server", "message": "full"}}, 503, ("overloaded", "full")),
        ({"error": {"code": 429, "type": "TooManyRequests", "message": "m"}}, 429, ("TooManyRequests", "m")),
        ({"error": {"message": "m"}}, 400, ("http_400", "m")),
        ({"object": "error", "type": "BadRequest", "message": "m", "code": 400}, 400, ("BadRequest", "m")),
        ({"error": "words"}, 500, ("http_500", "words")),
        ({"detail": [{"loc": 1}]}, 422, ("http_422", '[{"loc": 1}]')),
        (None, 502, ("http_502", "")),
        ({"error": {"message": "x" * 1000}}, 200, ("server_error", "x" * 200)),
    ],
)
def test_failures_have_names(value: Any, status: int, expected: tuple[str, str]) -> None:
    assert failure_of(value, status) == expected


def test_times_and_counts() -> None:
    record = read(
        (sse(delta(role="assistant"), done=False), 1.0),
        (sse(delta(reasoning="a"), done=False), 2.0),
        (sse(delta(content="b"), done=False), 2.5),
        (sse(delta(content="c"), done=False), 4.5),
        (sse(delta(content="d"), done=False), 5.0),
        (sse(usage(6, 11, prompt_tokens_details={"cached_tokens": 8})), 6.0),
        end_s=6.5,
    )
    assert (record.first_s, record.last_s, record.end_s, record.longest_gap_s) == (2.0, 5.0, 6.5, 2.0)
    assert (record.output_tokens, record.tokens_from, record.chunks) == (6, "usage", 4)
    assert (record.prompt_tokens, record.cached_tokens, record.error) == (11, 8, "")


def test_without_usage_chunks_count() -> None:
    record = read((sse(token("a"), token("b")), 1.0))
    assert (record.output_tokens, record.tokens_from, record.prompt_tokens) == (2, "chunks", 5)


def test_usage_in_each_chunk_says_how_many_came_first() -> None:
    many = [token("abc", usage={"completion_tokens": 3}), token("d", usage={"completion_tokens": 4})]
    record = read((sse(many[0], done=False), 1.0), (sse(many[1]), 2.0))
    assert (record.first_chunk_tokens, record.output_tokens) == (3, 4)
    assert read((sse(*many), 1.0)).first_chunk_tokens == 4, "both came at once"


def test_chunks_that_come_at_once_are_one_arrival() -> None:
    """A proxy that buffers gives many events in one read; between them no time was measured."""
    record = read((sse(*[token("abc")] * 9, done=False), 1.0), (sse(token("abc"), usage(10)), 1.0005))
    assert (record.chunks, record.arrivals, record.first_chunk_tokens) == (10, 1, 10)
    assert (record.tpot_s, record.has_later_tokens) == (None, True)
    record = read(*((sse(*[token("abc")] * 5, done=False), 1.0 + at) for at in range(4)), (sse(usage(20)), 4.1))
    assert (record.arrivals, record.first_chunk_tokens, record.tpot_s) == (4, 5, 3 / 15)


def test_of_a_lump_the_first_tokens_are_its_share_of_the_text() -> None:
    even = read(*((sse(token("x" * 75), done=False), 0.5 * at) for at in range(1, 5)), (sse(usage(100)), 2.1))
    assert (even.arrivals, even.first_chunk_tokens, even.tpot_s) == (4, 25, 0.02)
    parts = (sse(token("x" * 270), done=False), 1.0), (sse(token("x" * 30), usage(100)), 2.0)
    uneven = read(*parts)
    assert (uneven.first_chunk_tokens, uneven.tpot_s) == (90, 0.1), "and not 99 tokens in a second"


@pytest.mark.parametrize("shown", ["reasoning", "reasoning_content"])
def test_reasoning_that_is_not_shown_does_not_count_for_tpot(shown: str) -> None:
    counted = usage(500, completion_tokens_details={"reasoning_tokens": 480})
    answer = [(sse(delta(content="abcd"), done=False), 2 + 0.5 * at) for at in range(20)]
    hidden = read(*answer, (sse(counted), 12.0))
    assert (hidden.output_tokens, hidden.hidden_tokens, hidden.tpot_s) == (500, 480, 0.5)
    assert hidden.normalized_e2e_s == 11.5 / 500, "over the whole answer all tokens count"
    thought = [(sse(delta(**{shown: "abcd"}), done=False), 0.025 * at) for at in range(1, 481)]
    record = read(*thought, *((part, at + 10.5) for part, at in answer), (sse(counted), 30.0))
    assert (record.hidden_tokens, record.chunks) == (0, 500)
    untold = read(*((sse(token("x"), done=False), 2 + 0.5 * at) for at in range(20)), (sse(usage(500)), 12.0))
    assert (untold.hidden_tokens, untold.tpot_s) == (480, 0.5), "no text has more tokens than bytes"


def test_a_whole_body_has_no_time_between_its_tokens() -> None:
    body = {"choices": [{"text": "abc" * 5, "finish_reason": "length"}], "usage": {"completion_tokens": 5}}
    record = read((json.dumps(body).encode(), 1.0), kind="application/json")
    assert (record.tpot_s, record.has_later_tokens, record.finish_reason) == (None, True, "length")


@pytest.mark.parametrize(
    ("reason", "tokens", "is_fixed", "is_short"),
    [
        ("stop", 20, True, True),
        ("length", 20, True, True),
        ("length", 20, False, True),
        ("stop", 20, False, False),
        ("stop", 200, True, False),
        ("length", 201, True, False),
        ("stop", None, True, True),
        ("length", None, True, False),
        ({"type": "stop"}, 20, True, True),
    ],
)
def test_an_answer_may_be_shorter_than_asked(reason: Any, tokens: int | None, is_fixed: bool, is_short: bool) -> None:
    """By its count; where only chunks are counted, by the server's own reason. One that may end by itself is short
    only if the server cut it."""
    last = {"choices": [{"index": 0, "text": "", "finish_reason": reason}]}
    ends = [last] if tokens is None else [last, usage(tokens)]
    record = read((sse(token("abc" * 200), *ends), 1.0))
    record.output_tokens_asked, record.is_length_asked = 200, is_fixed
    assert record.is_short is is_short


ACCOUNT = b': kvxfer-account {"queue_s": 0.5}'


@pytest.mark.parametrize(
    "text",
    [
        sse(token(), done=False) + ACCOUNT + b"\n\n" + b"data: [DONE]\n\n",
        sse(token()) + ACCOUNT + b"\n\n",
        sse(token()) + ACCOUNT + b"\n",
        sse(token()) + ACCOUNT,
    ],
)
def test_account_in_a_comment(text: bytes) -> None:
    assert read((text, 1.0)).account == {"queue_s": 0.5}


def test_account_in_the_last_chunk_and_in_a_comment() -> None:
    record = read((sse(token(), {"choices": [], "kvxfer": {"attempt": 1}}) + ACCOUNT + b"\n\n: else {}\n\n", 1.0))
    assert record.account == {"attempt": 1, "queue_s": 0.5}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (sse(token(), done=False), "broken_stream"),
        (b"", "broken_stream"),
        (sse(token(), {"choices": [{"text": "", "finish_reason": "length"}]}, done=False), ""),
        (sse(token()), ""),
        (sse(token(), {"error": {"code": "peer_gone", "message": "m"}}), "peer_gone"),
        (sse(token(), {"error": {"message": "m"}}), "server_error"),
        (sse(token(), b"{nonsense"), "bad_answer"),
        (sse(token(), b"[1]"), "bad_answer"),
        (sse(token(), b"[" * 100_000), "bad_answer"),
        (b"data:" + json.dumps(token()).encode() + b"\r\n\r\ndata: [DONE]\r\n\r\n", ""),
        (b"event: x\nid: 3\n\n" + sse(token()), ""),
        (sse(token()).removesuffix(b"\n\n"), ""),
        (b'data: {"choices":\ndata: [{"text": "a"}]}\n\ndata: [DONE]\n\n', ""),
    ],
)
def test_how_a_stream_ends(text: bytes, error: str) -> None:
    assert read((text, 1.0)).error == error


def test_an_error_ends_when_it_was_said() -> None:
    record = read((sse({"error": {"code": "c"}}, done=False), 3.0), end_s=4.0)
    assert (record.error, record.end_s) == ("c", 3.0)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (200, {"choices": [{"text": "abc"}], "usage": {"completion_tokens": 3}}, ""),
        (200, {"choices": [{"message": {"content": "abc"}}]}, ""),
        (200, {"error": {"code": "c"}}, "c"),
        (200, {}, "bad_answer"),
        (200, b"hello", "bad_answer"),
        (503, {"error": {"code": "overloaded"}}, "overloaded"),
        (503, b"<html>", "http_503"),
        (404, b"", "http_404"),
    ],
)
def test_an_answer_that_is_no_stream(status: int, body: Any, error: str) -> None:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    record = read((text, 1.0), status=status, kind="application/json", end_s=2.0)
    assert (record.error, record.status) == (error, status)
    if not error:
        assert (record.first_s, record.last_s, record.tpot_s) == (2.0, 2.0, None)


WHOLE = (
    sse(delta(role="assistant"), delta(content="é"), token("b"), usage(3), comment=ACCOUNT).replace(b"\n", b"\r\n")
    + b": ping\n\n"
)


@given(st.lists(st.integers(0, len(WHOLE)), max_size=20))
def test_pieces_do_not_matter(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(WHOLE)]
    parts = [(WHOLE[low:high], 1.0) for low, high in itertools.pairwise(places)]
    assert read(*parts) == read((WHOLE, 1.0))


@given(st.binary(max_size=200), st.sampled_from([200, 500]), st.sampled_from([STREAM, "application/json", ""]))
def test_no_bytes_break_it(text: bytes, status: int, kind: str) -> None:
    assert read((text, 1.0), status=status, kind=kind).error


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "choices",
                        "delta",
                        "text",
                        "usage",
                        "error",
                        "kvxfer",
                        "completion_tokens",
                        "prompt_tokens_details",
                        "cached_tokens",
                        "finish_reason",
                        "message",
                        "code",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=20,
    )
)
def test_no_json_breaks_it(value: Any) -> None:
    read((sse(value), 1.0))
    read((json.dumps(value).encode(), 1.0), kind="application/json")


def raw_event(text: bytes) -> bytes:
    return b"data: " + text + b"\n\n"


@pytest.mark.parametrize(
    "account",
    [
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"a": "' + b"x" * 20_000 + b'"}',
    ],
)
def test_an_account_that_a_record_cannot_bear_is_passed_over(account: bytes) -> None:
    event = raw_event(b'{"choices": [{"text": "x"}], "kvxfer": ' + account + b"}")
    comment = b": kvxfer-account " + account + b"\n\n"
    record = read((event + comment + sse(usage(1, kvxfer={})), 1.0))
    assert (record.error, record.output_tokens, record.account) == ("", 1, None)
    record.to_json()


def test_an_account_does_not_grow_by_pieces() -> None:
    events = [token("x", kvxfer={f"{place}": "x" * 1000}) for place in range(100)]
    record = read((sse(*events), 1.0))
    assert len(json.dumps(record.account)) <= 16 << 10


@pytest.mark.parametrize("count", [10**400, 1 << 31, -1, True, 2.0, 0])
def test_a_count_that_cannot_be_is_no_count(count: Any) -> None:
    first = token("a", usage={"completion_tokens": count, "prompt_tokens": count})
    record = read((sse(first, done=False), 1.0), (sse(token("b"), usage(count, 7)), 2.0))
    assert (record.output_tokens, record.tokens_from, record.first_chunk_tokens) == (2, "chunks", 1)
    assert record.tpot_s == 1.0


@pytest.mark.parametrize("reason", ["abort", "error", {"type": "abort", "message": "x", "status_code": 500}])
def test_an_answer_that_the_engine_gave_up_has_failed(reason: Any) -> None:
    last = {"choices": [{"index": 0, "text": "", "finish_reason": reason}]}
    assert read((sse(token("a"), last), 1.0)).error == "aborted"
    assert read((json.dumps(last).encode(), 1.0), kind="application/json").error == "aborted"


def test_an_event_called_error_is_one() -> None:
    stream = sse(token("a"), done=False) + b'event: error\r\ndata: {"message": "out of memory"}\r\n\r\n'
    record = read((stream + sse(token("b")), 1.0))
    assert (record.error, record.message, record.chunks) == ("server_error", "out of memory", 2)
    assert not read((b"event: token\n" + sse(token("a")), 1.0)).error


def test_nothing_counts_after_done() -> None:
    record = read((sse(token("a")), 1.0), (sse(token("b"), usage(9)), 2.0))
    assert (record.chunks, record.last_s, record.output_tokens) == (1, 1.0, 1)


def test_a_byte_order_mark_hides_no_event() -> None:
    assert read((b"\xef\xbb\xbf" + sse(token("a")), 1.0)).chunks == 1


def test_names_of_errors_can_be_printed() -> None:
    body = b'{"error": {"code": "\\ud800a\\u001b[31m\\nb", "message": "m"}}'
    assert read((body, 1.0), status=500, kind="application/json").error == "?a?[31m?b"
    assert read((b'{"error": {"code": " "}}', 1.0), status=500, kind="application/json").error == "http_500"


def test_an_event_without_an_end_is_given_up() -> None:
    reader = AnswerReader()
    reader.head(200, STREAM)
    line = b"data: " + b"x" * (1 << 20) + b"\n"
    assert not all(reader.data(line, 1.0) for _ in range(LINE_BYTES_MAX // (1 << 20) + 2))
    assert reader.error == "bad_answer"


def test_of_a_refusal_the_beginning_is_kept() -> None:
    reader = AnswerReader()
    reader.head(503, "text/html")
    assert all(reader.data(b"busy " * 10_000, 1.0) for _ in range(100))
    reader.end(2.0)
    assert (reader.error, reader.message[:9]) == ("http_503", "busy busy")
