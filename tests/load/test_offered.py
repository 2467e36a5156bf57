"""The workload that options ask for: what each option does to it, and what is said where it cannot be made."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import threading
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import ConfigError
from kvxfer.load.offered import at_rate, body_maker, mean_rate, prompt_maker, with_warmup, workload_from
from kvxfer.load.options import ApiKind, ArrivalKind, TargetOptions, WorkloadOptions
from kvxfer.workload.request import DispatchMode, Workload

TRACES = pathlib.Path(__file__).parents[1] / "workload" / "traces"
MOONCAKE = str(TRACES / "mooncake_conversation_200.jsonl")
AZURE = str(TRACES / "azure_2023_conversation_200.csv")


def made(**options: Any) -> Workload:
    return workload_from(WorkloadOptions(**options))


def dues(workload: Workload) -> list[float]:
    return [request.due_s for request in workload.requests if request.due_s is not None]


def test_no_option_makes_a_hundred_poisson_requests() -> None:
    workload = made()
    assert [request.number for request in workload.requests] == list(range(100))
    assert {(request.prompt_tokens, request.output_tokens) for request in workload.requests} == {(512, 64)}
    assert "poisson" in workload.name


def test_a_trace_keeps_its_times_and_lengths() -> None:
    workload = made(trace=MOONCAKE)
    rows = [json.loads(line) for line in pathlib.Path(MOONCAKE).read_text().splitlines()]
    assert dues(workload) == [row["timestamp"] / 1e3 for row in rows]
    assert [request.prompt_tokens for request in workload.requests] == [row["input_length"] for row in rows]
    assert [list(request.hash_ids) for request in workload.requests] == [row["hash_ids"] for row in rows]


def test_speedup_divides_the_times() -> None:
    slow, fast = made(trace=AZURE), made(trace=AZURE, speedup=4.0)
    assert dues(fast) == pytest.approx([due / 4 for due in dues(slow)])


def test_a_trace_with_another_arrival_has_the_asked_rate() -> None:
    workload = made(trace=AZURE, arrival=ArrivalKind.CONSTANT, rate=20.0)
    assert mean_rate(workload) == pytest.approx(20.0)
    lengths = [request.prompt_tokens for request in made(trace=AZURE).requests]
    assert [request.prompt_tokens for request in workload.requests] == lengths


@pytest.mark.parametrize(
    "case",
    [
        {"trace": MOONCAKE},
        {"trace": AZURE, "arrival": ArrivalKind.TRACE, "speedup": 3.0},
        {"trace": AZURE, "arrival": ArrivalKind.CONSTANT},
        {"arrival": ArrivalKind.CONSTANT, "requests": 500},
        {"arrival": ArrivalKind.RAMP, "rate": 1.0, "end_rate": 3.0, "requests": 5000},
    ],
)
def test_any_workload_is_had_at_another_rate(case: dict[str, Any]) -> None:
    options = at_rate(WorkloadOptions(**case), 12.0)
    expected = 24.0 if options.end_rate else 12.0
    assert mean_rate(workload_from(options)) == pytest.approx(expected, rel=0.1 if options.end_rate else 1e-6)


def test_a_trace_that_is_due_at_once_has_no_other_rate(tmp_path: pathlib.Path) -> None:
    (tmp_path / "trace").write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n')
    with pytest.raises(ConfigError, match="has no rate of its own"):
        at_rate(WorkloadOptions(trace=str(tmp_path / "trace")), 5.0)


def test_requests_cuts_a_trace_and_duration_cuts_what_is_due_later() -> None:
    assert len(made(trace=AZURE, requests=7).requests) == 7
    cut = made(trace=AZURE, duration_s=30.0)
    assert dues(cut) == [due for due in dues(made(trace=AZURE)) if due < 30]


def test_duration_alone_says_how_many_are_made_up() -> None:
    workload = made(rate=50.0, duration_s=40.0)
    assert 1700 < len(workload.requests) < 2300
    assert max(dues(workload)) < 40
    assert dues(made(rate=50.0, duration_s=20.0)) == [due for due in dues(workload) if due < 20]


def test_a_ramp_lasts_as_long_as_the_duration() -> None:
    times = np.array(dues(made(arrival=ArrivalKind.RAMP, rate=10.0, end_rate=90.0, duration_s=60.0)))
    assert 2600 < len(times) < 3400
    assert 1.9 < (times > 30).sum() / (times < 30).sum() < 2.9


def test_made_up_sessions_make_the_asked_rate_of_requests() -> None:
    workload = made(requests=4000, turns=4, rate=10.0, think_s=0.5, session_mode=DispatchMode.TIMESTAMP)
    assert mean_rate(workload) == pytest.approx(10.0, rel=0.1)
    assert made(requests=10, turns=4).has_sessions


def test_the_mode_takes_the_times_of_later_turns_away() -> None:
    think = made(requests=30, turns=3, session_mode=DispatchMode.THINK)
    assert think.mode is DispatchMode.THINK
    assert all((request.due_s is None) == (request.turn > 0) for request in think.requests)
    timed = made(requests=30, turns=3, session_mode=DispatchMode.TIMESTAMP)
    assert dues(timed) == sorted(dues(timed))
    assert len(dues(timed)) == 30


def test_lengths_are_scaled_and_cut_with_their_hash_ids() -> None:
    workload = made(trace=MOONCAKE, prompt_scale=0.5, output_scale=2.0, prompt_max=1000, output_max=300)
    whole = made(trace=MOONCAKE)
    prompts = prompt_maker(WorkloadOptions(), workload)
    for request, before in zip(workload.requests, whole.requests, strict=True):
        assert request.prompt_tokens == min(1000, -(-before.prompt_tokens // 2))
        assert request.output_tokens == min(300, 2 * before.output_tokens)
        assert len(prompts.tokens(request)) == request.prompt_tokens


def test_warm_up_requests_come_first_and_share_nothing() -> None:
    workload, begins_s = with_warmup(made(trace=MOONCAKE, requests=50), 10, rate=5.0)
    assert begins_s == pytest.approx(2.0)
    warmup, rest = workload.requests[:10], workload.requests[10:]
    assert all(request.due_s is not None and request.due_s < begins_s and not request.hash_ids for request in warmup)
    assert all(request.due_s is not None and request.due_s >= begins_s for request in rest)
    assert [request.number for request in workload.requests] == list(range(60))
    assert [r.hash_ids for r in rest] == [r.hash_ids for r in made(trace=MOONCAKE, requests=50).requests]


def test_no_warm_up_changes_nothing() -> None:
    workload = made(requests=5)
    assert with_warmup(workload, 0) == (workload, 0.0)


def test_the_source_says_the_licence_of_a_known_file_and_the_digest_of_another(tmp_path: pathlib.Path) -> None:
    assert "SHA-256" in made(trace=AZURE).source


def test_a_body_is_made_for_the_target() -> None:
    options = WorkloadOptions(requests=3)
    workload = workload_from(options)
    target = TargetOptions(api=ApiKind.CHAT, extra_body='{"min_tokens": 1}')
    body = json.loads(body_maker(target, options, workload, "m").body(workload.requests[0]))
    assert body["messages"][0]["role"] == "user"
    assert body["min_tokens"] == 1


def servegen(folder: pathlib.Path) -> None:
    lengths = {"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{5: 1.0}"}}
    for client in range(2):
        (folder / f"chunk-{client}-trace.csv").write_text(
            "0,1.0,2.0,Gamma,0.25,4\n600,0,0,,0,0\n1200,0.5,1,Weibull,1,2\n"
        )
        (folder / f"chunk-{client}-dataset.json").write_text(json.dumps(lengths))


def test_a_directory_of_servegen_is_drawn_from(tmp_path: pathlib.Path) -> None:
    servegen(tmp_path)
    workload = made(trace=str(tmp_path))
    assert 1200 + 600 - 4 <= len(workload.requests) <= 1200 + 600 + 4
    assert {request.prompt_tokens for request in workload.requests} == {10, 20}
    assert workload == made(trace=str(tmp_path))
    alone = made(trace=str(tmp_path / "chunk-0-trace.csv"))
    assert set(dues(alone)) < set(dues(workload))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"line 1: the trace is empty"),
        ("\n \n", r"line 1: the trace is empty"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 1}\n', r"line 2: a row must have"),
        ('{"input_length": "many", "output_length": 1}\n', r"line 1: input_length must be a whole number"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,0\n", r"its 1 rows have no prompt"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,1\n", r"line 2: TIMESTAMP must be a date and time"),
        ("Timestamp,Request tokens,Response tokens\n5,1\n", r"line 2: a row must have 3 values"),
        ('{"what": 1}\n', r"line 1: a row must have input_length"),
        ("0,1,1,Gamma,0.5\n0,1,1,Gamma,0.5,2\n", r"line 1: no known format begins so: say with --trace-format"),
        ("# A page of text\n\nThat is no trace.\n", r"line 1: no known format begins so: say with --trace-format"),
    ],
)
def test_a_wrong_trace_is_a_sentence_with_file_and_line(tmp_path: pathlib.Path, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path)) + ".*" + said):
        made(trace=str(path))


def test_bytes_that_are_no_text_are_a_sentence(tmp_path: pathlib.Path) -> None:
    (tmp_path / "trace").write_bytes(b"first\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 2: a trace must be UTF-8"):
        made(trace=str(tmp_path / "trace"), trace_format="prompts")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trace": "/nowhere/at all"}, "cannot be read: No such file"),
        ({"trace": AZURE, "requests": 300}, "has 200 requests, which is less than the 300"),
        ({"trace": AZURE, "arrival": ArrivalKind.POISSON, "speedup": 2.0}, "speedup has no place in arrival poisson"),
        ({"trace": AZURE, "rate": 5.0}, "rate has no place in arrival trace: speedup"),
        ({"speedup": 2.0}, "speedup has no place in arrival poisson"),
        ({"end_rate": 2.0}, "end_rate has no place in arrival poisson: say arrival ramp"),
        ({"burstiness": 0.5}, "burstiness has no place in arrival poisson: say arrival gamma"),
        ({"trace": AZURE, "duration_s": 0.0, "prompt_scale": 1e5}, "more than 16777216 tokens"),
        ({"trace": AZURE, "trace_format": "burstgpt"}, "line 1: the header must have Timestamp"),
        ({"trace": AZURE, "trace_format": "parquet"}, "one of the formats mooncake, azure"),
        ({"trace": str(TRACES)}, "is no directory of ServeGen's"),
        ({"trace": str(TRACES), "trace_format": "azure"}, "only servegen has directories"),
        ({"rate": 0.001, "duration_s": 0.001}, "no request is due within"),
        ({"rate": 1e6, "duration_s": 1e6}, "more than 10000000"),
    ],
)
def test_what_cannot_be_made_is_a_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**options)


def test_a_trace_may_be_a_pipe(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=[pathlib.Path(MOONCAKE).read_bytes()])
    writer.start()
    workload = made(trace=str(tmp_path / "pipe"))
    writer.join()
    assert workload.requests == made(trace=MOONCAKE).requests
    assert workload.source == "pipe"


def test_a_line_without_an_end_is_not_read_into_memory() -> None:
    with pytest.raises(ConfigError, match="/dev/zero, line 1: a line must have at most"):
        made(trace="/dev/zero")


def test_prompts_without_times_need_an_arrival(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Why is the sky blue?\nAnd the sea?\n")
    workload = made(trace=str(path), trace_format="prompts")
    assert [request.text for request in workload.requests] == ["Why is the sky blue?", "And the sea?"]
    with pytest.raises(ConfigError, match="says not when requests are due"):
        made(trace=str(path), trace_format="prompts", arrival=ArrivalKind.TRACE)


def test_seeds_and_salts_of_any_value_are_taken() -> None:
    options = WorkloadOptions(requests=2, seed=-5, salt="another day")
    workload = workload_from(options)
    other = dataclasses.replace(options, salt="")
    assert (
        prompt_maker(options, workload).tokens(workload.requests[0]).tolist()
        != prompt_maker(other, workload).tokens(workload.requests[0]).tolist()
    )
