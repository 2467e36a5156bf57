"""Mooncake JSONL that we write: it is read back as the same workload, and a payload row is what aiperf takes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.workload.bodies import BodyMaker
from kvxfer.workload.prompts import PromptMaker
from kvxfer.workload.readers.json_rows import read_mooncake
from kvxfer.workload.request import DispatchMode, Workload, WorkloadRequest
from kvxfer.workload.sessions import grouped, with_mode
from kvxfer.workload.write_mooncake import mooncake_lines

MAKER = BodyMaker("m", "completions", PromptMaker())
microseconds = st.integers(0, 10**12).map(lambda value: value / 1e6)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(1, 12))
    begin = draw(st.integers(0, count - 1))
    requests = []
    for number in range(count):
        prompt = draw(st.integers(1, 1300))
        needed = -(-prompt // 512)
        requests.append(
            WorkloadRequest(
                number,
                prompt,
                draw(st.integers(1, 99)),
                0.0 if number == begin else draw(microseconds),
                session=draw(st.none() | st.integers(0, 3)),
                hash_ids=draw(st.just(()) | st.tuples(*[st.integers(0, (1 << 64) - 1)] * needed)),
            )
        )
    return Workload("w", grouped(requests, draw(st.lists(st.none() | microseconds, min_size=count, max_size=count))))


@given(workloads(), st.sampled_from(DispatchMode))
def test_what_is_written_is_read_back(workload: Workload, mode: DispatchMode) -> None:
    workload = with_mode(workload, mode)
    read = with_mode(Workload("r", read_mooncake(mooncake_lines(workload)).requests), mode)
    lone = {r.session for r in workload.requests} - {r.session for r in workload.requests if r.turn}
    names: dict[int | None, int | None] = {None: None}

    def shown(request: WorkloadRequest) -> tuple[object, ...]:
        due = None if request.due_s is None else round(request.due_s, 6)
        return (
            due,
            round(request.think_s, 6),
            request.turn,
            request.prompt_tokens,
            request.output_tokens,
            request.hash_ids,
        )

    if mode is DispatchMode.TIMESTAMP:
        assert [shown(r) for r in read.requests] == [shown(r) for r in workload.requests]
        for before, after in zip(workload.requests, read.requests, strict=True):
            expected = None if before.session in lone else before.session
            assert names.setdefault(expected, after.session) == after.session
    else:
        assert sorted(map(str, map(shown, read.requests))) == sorted(map(str, map(shown, workload.requests)))


@given(workloads(), st.sampled_from(DispatchMode))
@settings(max_examples=25)
def test_a_payload_row_is_a_whole_body_and_one_input_only(workload: Workload, mode: DispatchMode) -> None:
    workload = with_mode(workload, mode)
    turned = {request.session for request in workload.requests if request.turn}
    for request, line in zip(workload.requests, mooncake_lines(workload, MAKER.body), strict=True):
        row = json.loads(line)
        assert row["payload"] == json.loads(MAKER.body(request))
        assert MAKER.body(request).decode() in line
        assert not {"input_length", "hash_ids", "text_input", "messages"} & set(row)
        assert row["output_length"] == request.output_tokens
        if mode is DispatchMode.TIMESTAMP:
            assert "session_id" not in row
            assert row["timestamp"] == pytest.approx((request.due_s or 0) * 1e3)
        else:
            assert ("session_id" in row) == (request.session in turned)
            assert ("timestamp" in row) == (request.turn == 0)
            assert ("delay" in row) == (request.turn > 0)


def test_text_is_written_as_text_input() -> None:
    workload = Workload("w", [WorkloadRequest(0, 2, 3, 0.0, text="Why?\n")])
    assert [json.loads(line) for line in mooncake_lines(workload)] == [
        {"timestamp": 0, "output_length": 3, "text_input": "Why?\n"}
    ]
