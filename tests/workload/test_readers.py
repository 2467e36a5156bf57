"""Readers of traces: what they read in real rows, and that any other lines are one error with its line."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.workload.readers import rows
from kvxfer.workload.readers.csv_rows import nanoseconds_of, read_azure, read_burstgpt
from kvxfer.workload.readers.detect import FORMATS, detected_format, read_prompts, read_trace
from kvxfer.workload.readers.json_rows import read_json_prompts, read_mooncake
from kvxfer.workload.readers.rows import TraceRead, TraceRowError
from kvxfer.workload.request import TOKENS_MAX

TRACES = pathlib.Path(__file__).parent / "traces"
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST_HEADER = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


def lines(name: str) -> list[str]:
    return (TRACES / name).read_text().splitlines(keepends=True)


def test_the_cut_of_mooncake() -> None:
    trace = read_mooncake(lines("mooncake_conversation_200.jsonl"))
    assert len(trace.requests) == 200
    assert trace.has_times
    first = trace.requests[0]
    assert (first.due_s, first.prompt_tokens, first.output_tokens) == (0.0, 6758, 500)
    assert first.hash_ids == tuple(range(14))
    assert trace.hash_tokens == 512


def test_the_cut_of_azure() -> None:
    trace = read_azure(lines("azure_2023_conversation_200.csv"))
    assert len(trace.requests) == 200
    assert [(r.due_s, r.prompt_tokens, r.output_tokens) for r in trace.requests[:2]] == [
        (0.0, 374, 44),
        (4.314579, 396, 109),
    ]
    assert not any(r.hash_ids for r in trace.requests)


def test_azure_of_2024_and_2025_have_zones_and_more_columns() -> None:
    rows_2024 = [AZURE_HEADER, "2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 02:00:00.5+0200,10,1"]
    assert [r.due_s for r in read_azure(rows_2024).requests] == pytest.approx([0.0, 0.49007])
    rows_2025 = ["TIMESTAMP,NumImages,ContextTokens,GeneratedTokens", "2024-10-15T00:00:00.2,1,7,3"]
    assert read_azure(rows_2025).requests[0].prompt_tokens == 7


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01 00:00:00", 0.0),
        ("2000-02-29 12:00:00.25", 951825600.25),
        ("2024-02-29 00:00:00", 1709164800.0),
        ("2023-11-16 18:15:46.6805900", 1700158546.68059),
        ("2100-03-01 00:00:00", 4107542400.0),
    ],
)
def test_dates_are_counted_from_1970(text: str, seconds: float) -> None:
    assert nanoseconds_of(1, "t", text) == round(seconds * 1e5) * 10**4


def test_burstgpt_leaves_failures_out_and_has_sessions() -> None:
    trace = read_burstgpt(
        [
            BURST_HEADER,
            "5,,2.5,ChatGPT,472,18,490,API log",
            "45,7,10,GPT-4,1087,230,1317,Conversation log",
            "50,,1,ChatGPT,417,0,417,API log",
            "118,7,4,GPT-4,1200,88,1288,Conversation log",
        ]
    )
    assert trace.left_out == 1
    assert [(r.due_s, r.session, r.turn) for r in trace.requests] == [(0.0, None, 0), (40.0, 0, 0), (113.0, 0, 1)]
    assert trace.requests[2].think_s == pytest.approx(118 - 45 - 10)


def test_burstgpt_of_the_first_release_has_no_sessions() -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    assert read_burstgpt([header, "5.0,ChatGPT,472,18,490,API log"]).requests[0].prompt_tokens == 472


def test_sessions_of_aiperf_and_dynamo() -> None:
    trace = read_mooncake(
        json.dumps(row)
        for row in (
            {"session_id": "a", "timestamp": 1000, "input_length": 300, "output_length": 40},
            {"session_id": "b", "timestamp": 1500.5, "input_length": 300, "output_length": 40},
            {"session_id": "a", "delay": 250, "input_length": 600, "output_length": 20},
            {"session_id": "a", "timestamp": 9000, "input_length": 900, "output_length": 20},
        )
    )
    assert [(r.session, r.turn, r.due_s, r.think_s) for r in trace.requests] == [
        (0, 0, 0.0, 0.0),
        (0, 1, 0.25, 0.25),
        (1, 0, 0.5005, 0.0),
        (0, 2, 8.0, 7.75),
    ]


def test_text_of_mooncake_rows_is_sent_as_it_is() -> None:
    trace = read_mooncake(
        ['{"text_input": "Hello world", "output_length": 4}', '{"messages": [{"role": "user", "content": "Hi"}]}'],
        output_tokens=9,
    )
    assert [(r.text, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [("Hello world", 3, 4), ("Hi", 1, 9)]
    assert not trace.has_times


def test_prompts_are_lines_or_json() -> None:
    plain = read_prompts(["\ufeffWhy?\n", "\n", "  How so?  \n"], output_tokens=5)
    assert [(r.text, r.output_tokens) for r in plain.requests] == [("Why?", 5), ("How so?", 5)]
    asked = [
        {"prompt": "Why?", "output_tokens": 3},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How?"}]},
    ]
    written = read_prompts(map(json.dumps, asked))
    assert [(r.text, r.output_tokens) for r in written.requests] == [("Why?", 3), ("Be brief.\nHow?", 64)]


def test_a_row_without_a_prompt_shows_what_it_has_instead() -> None:
    with pytest.raises(TraceRowError, match=r"not \['max_tokens', 'promt'\]"):
        read_prompts(['{"promt": "Why?", "max_tokens": 3}'])
    with pytest.raises(TraceRowError, match=r"not \['output_length', 'timestamp'\]"):
        read_mooncake(['{"timestamp": 0, "output_length": 3}'])


def test_rows_max_takes_the_first_rows_and_reads_no_further() -> None:
    def endless() -> Any:
        for number in range(10):
            yield json.dumps({"timestamp": number, "input_length": 1, "output_length": 1})
        raise AssertionError("read on")

    assert len(read_mooncake(endless(), rows_max=10).requests) == 10


@pytest.mark.parametrize(
    ("first", "name"),
    [
        ('{"timestamp": 0, "input_length": 1}', "mooncake"),
        ('{"text_input": "a"}', "mooncake"),
        ('{"prompt": "a"}', "prompts"),
        ('{"messages": []}', "prompts"),
        (AZURE_HEADER, "azure"),
        (BURST_HEADER, "burstgpt"),
        ('"Timestamp","Request tokens","Response tokens"', "burstgpt"),
        ("0,1.3,8.5,Weibull,0.37,0.39", "servegen"),
        ("600,0,0,,0,0", "servegen"),
        ('{"messages": [], "session_id": "a"}', "mooncake"),
        ('{"messages": [], "timestamp": 1, "output_length": 5}', "mooncake"),
    ],
)
def test_the_format_is_found_by_the_first_line(first: str, name: str) -> None:
    assert detected_format(first) == name
    assert name in FORMATS


@pytest.mark.parametrize(
    "first",
    [
        "# kvxfer",
        "Why is the sky blue?",
        '[{"conversations": []}]',
        "time,prompt tokens,answer tokens",
        "a,b,c,,d,e",
        '{"conversations": []}',
        '{"timestamp": 12.5}',
        '{"timestamp": 12.5, "messages": []}',
        '{"session_id": "a", "prompt": "b"}',
    ],
)
def test_a_format_that_is_not_certain_must_be_named(first: str) -> None:
    """A page of text, a CSV with columns of its own, a published data set, times whose unit nothing says."""
    with pytest.raises(TraceRowError, match=r"line 1: .*say with --trace-format which of mooncake, azure"):
        detected_format(first)
    with pytest.raises(TraceRowError, match="--trace-format"):
        read_trace([first, first])


MOONCAKE_ROW = {"timestamp": 1, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"input_length": -1}, "input_length", "whole number"),
        ({"input_length": 1.5}, "input_length", "whole number"),
        ({"input_length": TOKENS_MAX + 1}, "input_length", "whole number"),
        ({"input_length": True}, "input_length", "whole number"),
        ({"output_length": None}, "output_length", "whole number"),
        ({"timestamp": -1}, "timestamp", "number"),
        ({"timestamp": "soon"}, "timestamp", "number"),
        ({"timestamp": None}, "timestamp", "there: other rows have one"),
        ({"hash_ids": [1]}, "hash_ids", "2 numbers, one for each 512 tokens"),
        ({"hash_ids": [1, -2]}, "hash_ids", "whole number"),
        ({"hash_ids": {"a": 1}}, "hash_ids", "a list"),
        ({"session_id": ["a"]}, "session_id", "text or a whole number"),
        ({"text_input": "a"}, "", "one of input_length, text_input and messages"),
        ({"input_length": None, "payload": {"prompt": "a"}}, "", "one of input_length, text_input and messages"),
        ({"input_length": None, "messages": [{"role": "user", "content": ["a"]}]}, "messages", "content is text"),
        ({"input_length": None, "text_input": ""}, "text_input", "not empty"),
    ],
)
def test_a_wrong_value_of_mooncake_names_its_line_and_field(changes: dict[str, Any], field: str, expected: str) -> None:
    with pytest.raises(TraceRowError, match=expected) as caught:
        read_mooncake(["", json.dumps(MOONCAKE_ROW), json.dumps({**MOONCAKE_ROW, **changes})])
    assert (caught.value.line, caught.value.field) == (3, field)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("2023-02-29 00:00:00,1,1", "TIMESTAMP"),
        ("2023-01-01 24:00:00,1,1", "TIMESTAMP"),
        ("2023-01-01 00:00:00,1.5,1", "ContextTokens"),
        ("2023-01-01 00:00:00,1,", "GeneratedTokens"),
        ("2023-01-01 00:00:00,1", ""),
        ('"2023-01-01 00:00:00,1,1', ""),
    ],
)
def test_a_wrong_value_of_azure_names_its_line_and_field(row: str, field: str) -> None:
    with pytest.raises(TraceRowError) as caught:
        read_azure([AZURE_HEADER, "2023-01-01 00:00:00,1,1", row])
    assert (caught.value.line, caught.value.field) == (3, field)


def test_lines_and_rows_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LINE_MAX", 10)
    monkeypatch.setattr(rows, "REQUESTS_MAX", 3)
    with pytest.raises(TraceRowError, match="line 2: a line must have at most 10 characters"):
        read_prompts(["a", "b" * 11])
    with pytest.raises(TraceRowError, match="line 4: a trace must have at most 3 requests"):
        read_prompts(["a"] * 5, rows_max=9)


def test_an_empty_trace_is_a_sentence() -> None:
    for read in (read_mooncake, read_prompts, read_trace, read_azure):
        with pytest.raises(TraceRowError, match="line 1: the trace is empty"):
            read(["\n", "  \n"])
    with pytest.raises(TraceRowError, match="the trace is empty: its 1 rows have no prompt or no answer"):
        read_burstgpt([BURST_HEADER, "5,,1,GPT-4,10,0,10,API log"])


READERS: list[Callable[[list[str]], TraceRead]] = [
    read_mooncake,
    read_json_prompts,
    read_azure,
    read_burstgpt,
    read_prompts,
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content"]), inner, max_size=2)
    ),
    max_leaves=4,
)
members = st.sampled_from(
    [
        *("timestamp", "delay", "input_length", "output_length", "hash_ids", "session_id", "text_input", "messages"),
        *("prompt", "output_tokens", "max_tokens", "payload"),
    ]
)
wild = st.lists(
    st.text(max_size=60)
    | st.dictionaries(members, values, max_size=5).map(json.dumps)
    | st.sampled_from(
        [AZURE_HEADER, BURST_HEADER, "2023-01-01 00:00:00,5,5", "1,a,1,m,5,5,10,l", json.dumps(MOONCAKE_ROW)]
    )
    | st.lists(st.text(max_size=6) | st.integers().map(str) | st.floats().map(str), max_size=8).map(",".join),
    max_size=6,
)


@given(st.sampled_from([*READERS, read_trace]), wild)
def test_any_lines_are_a_trace_or_one_error(read: Callable[[list[str]], TraceRead], given_lines: list[str]) -> None:
    try:
        trace = read(given_lines)
    except TraceRowError as error:
        wrong = error
    else:
        due = [request.due_s for request in trace.requests if request.due_s is not None]
        assert [request.number for request in trace.requests] == list(range(len(due)))
        assert due == sorted(due)
        assert due[0] == 0.0
        return
    assert 1 <= wrong.line <= max(1, len(given_lines))
    assert str(wrong).startswith(f"line {wrong.line}: ")
