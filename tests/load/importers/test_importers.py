"""What each tool's results become. aiperf's and guidellm's files are theirs, cut to what is read, of runs against
``kvxfer mock-engine --ttft-ms 200 --itl-ms 20`` with one answer of 503 and one that was cut; vllm bench's and
inference-perf's are made by hand from their source."""

from __future__ import annotations

import copy
import json
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError, KvxferError
from kvxfer.load.conclude import judge
from kvxfer.load.importers import aiperf_raw
from kvxfer.load.importers.read import ImportFormat, join_router_log, read_results
from kvxfer.load.options import GoalOptions
from kvxfer.load.run import LoadRun

DATA = pathlib.Path(__file__).parent / "data"
FILES = {
    ImportFormat.AIPERF: DATA / "aiperf_schedule" / "profile_export.jsonl",
    ImportFormat.GUIDELLM: DATA / "guidellm.json",
    ImportFormat.VLLM_BENCH: DATA / "vllm_bench.json",
    ImportFormat.INFERENCE_PERF: DATA / "inference_perf" / "per_request_lifecycle_metrics.json",
}


def one(path: pathlib.Path) -> LoadRun:
    [run] = read_results(path)
    return run


def near(value: float | None, wanted: float, within: float = 0.02) -> bool:
    return value is not None and abs(value - wanted) <= within


@pytest.mark.parametrize("tool", list(ImportFormat))
def test_the_tool_is_found_out_and_every_record_is_whole(tool: ImportFormat) -> None:
    run = one(FILES[tool])
    assert run.driver == tool.value
    assert run.settings["due_is"]
    dues = [record.due_s for record in run.records]
    assert dues == sorted(dues)
    assert dues[0] == 0
    assert [record.number for record in run.records] == list(range(len(dues)))
    assert {record.run for record in run.records} == {run.name}
    assert run.counted == run.records
    for record in run.records:
        assert bool(record.error) != record.is_good
        assert record.sent_s is not None
        assert record.sent_s >= record.due_s
        if record.is_good:
            assert record.tokens_from
            assert record.status == 200
            assert near(record.ttft_since_sent_s, 0.2, 0.16)
            assert record.sent_s <= record.first_s <= record.last_s <= record.end_s + 1e-9


@pytest.mark.parametrize(
    ("tool", "said", "unsaid"),
    [
        (ImportFormat.INFERENCE_PERF, "when requests were to be sent", "how long answers were asked to be"),
        (ImportFormat.VLLM_BENCH, "how long answers were asked to be", "the gaps between chunks"),
        (ImportFormat.GUIDELLM, "the gaps between chunks", "when requests were to be sent"),
    ],
)
def test_what_a_tool_does_not_tell_is_no_good_sign(tool: ImportFormat, said: str, unsaid: str) -> None:
    """A generator is not in time, and answers are not as long as asked, where nobody knows."""
    run = read_results(FILES[tool])[0]
    [untold] = [one for one in judge(run, GoalOptions()).verdicts if one.name == "untold"]
    assert untold.sentence.startswith(f"{tool.value} does not tell: ")
    assert said in untold.sentence
    assert unsaid not in untold.sentence
    assert not untold.is_failure


def test_aiperf_with_a_schedule() -> None:
    run = one(DATA / "aiperf_schedule")
    assert len(run.records) == 10
    assert {r.number: (r.error, r.status) for r in run.records if r.error} == {
        2: ("InternalServerError", 503),
        5: ("connection_lost", None),
        7: ("timeout", None),
    }
    good = [record for record in run.records if record.is_good]
    assert all(near(record.tpot_s, 0.02, 0.001) and record.chunks == record.output_tokens == 8 for record in good)
    assert all(record.tokens_from == "usage" and record.cached_tokens == 0 for record in good)
    assert all(len(record.request_id) == 36 for record in run.records)
    assert all(0 < record.sent_s - record.due_s < 0.02 for record in good), "with what it took to connect"
    assert run.settings["version"] == "0.13.0"
    assert run.settings["schedule"] == "fixed_schedule"
    assert near(run.window_s[1], 1.5, 0.01)
    assert run.settings["not_told"] == ["output_tokens_asked"]
    assert run.began_unix_s > 1.7e9


def test_aiperf_s_raw_records_say_the_same_and_more() -> None:
    raw = one(DATA / "aiperf_raw.jsonl")
    records = {record.request_id: record for record in one(DATA / "aiperf_schedule").records}
    assert len(raw.records) == 5
    for record in raw.records:
        same = records[record.request_id]
        assert record.output_tokens_asked == 8
        assert (record.error, record.due_s) == (same.error, pytest.approx(same.due_s))
        if record.is_good:
            assert record.first_s == pytest.approx(same.first_s)
            assert record.last_s == pytest.approx(same.last_s)
            assert record.longest_gap_s == pytest.approx(same.longest_gap_s)
            assert (record.output_tokens, record.chunks) == (same.output_tokens, same.chunks)
    [cut] = [record for record in raw.records if record.error == "connection_lost"]
    assert (cut.chunks, cut.status) == (3, 200)
    assert near(cut.ttft_since_sent_s, 0.2)


def test_accounts_are_found_by_request_id(tmp_path: pathlib.Path) -> None:
    lines = [json.loads(line) for line in (DATA / "aiperf_raw.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "error" not in line]
    packets = [{"name": "comment", "value": 'kvxfer-account {"queue_s": 0.5}'}]
    lines[0]["responses"].insert(0, {"perf_ns": 1, "packets": packets})
    lines[1]["responses"].insert(
        1, {"perf_ns": 1, "packets": [{"name": "data", "value": '{"kvxfer": {"attempt": 1}}'}]}
    )
    path = tmp_path / "raw.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    names = [line["metadata"]["x_request_id"] for line in lines]
    wanted = {names[0]: {"queue_s": 0.5}, names[1]: {"attempt": 1}}
    assert aiperf_raw.accounts(path) == wanted
    assert aiperf_raw.accounts(tmp_path / "none") == {}
    assert {record.request_id: record.account for record in one(path).records if record.account} == wanted


def test_a_routers_log_gives_its_accounts(tmp_path: pathlib.Path) -> None:
    run = one(FILES[ImportFormat.AIPERF])
    wanted = run.records[0].request_id
    log = tmp_path / "router.log"
    log.write_text(json.dumps({"message": "request", "request_id": wanted, "account": {"first_s": 0.2}}) + "\n")
    assert join_router_log([run], log) == 1
    assert [record.request_id for record in run.records if record.account == {"first_s": 0.2}] == [wanted]
    log.write_text("another log\n")
    with pytest.raises(ConfigError, match="has no account of these requests"):
        join_router_log([run], log)
    with pytest.raises(ConfigError, match="cannot be read"):
        join_router_log([run], tmp_path / "none")


def test_aiperf_in_a_closed_loop_has_no_rate_and_its_warmup_does_not_count() -> None:
    run = one(DATA / "aiperf_concurrency")
    assert sum(record.is_warmup for record in run.records) == 2
    assert len(run.counted) == 10
    assert run.offered_per_s is None
    assert run.settings["concurrency"] == 2
    assert run.window_s[1] >= max(record.end_s or 0 for record in run.records)


def test_an_interrupted_aiperf_leaves_half_a_line(tmp_path: pathlib.Path) -> None:
    text = FILES[ImportFormat.AIPERF].read_text()
    lines = text.splitlines(keepends=True)
    path = tmp_path / "some.jsonl"
    path.write_text("".join(lines[:4]) + lines[4][:100])
    assert len(one(path).records) == 4


def test_guidellm() -> None:
    run = one(FILES[ImportFormat.GUIDELLM])
    assert run.name == "guidellm-constant-5"
    assert run.offered_per_s == 5
    assert near(run.window_s[1], 1.6, 0.001)
    assert [record.error for record in run.records if record.error] == ["http_503", "connection_lost"]
    assert near(run.records[1].due_s, 0.2, 0.001)
    assert {record.output_tokens_asked for record in run.records if record.is_good} == {8}


def test_guidellm_in_a_closed_loop_without_streaming() -> None:
    runs = read_results(DATA / "guidellm_concurrent.json")
    assert [run.name for run in runs] == ["guidellm-concurrent-1", "guidellm-concurrent-2"]
    for streams, run in enumerate(runs, 1):
        assert run.settings["concurrency"] == streams
        assert run.offered_per_s is None
        cut = [record for record in run.records if record.error == "cancelled"]
        assert len(cut) == streams, "those that its time limit cut"
        whole = [record for record in run.records if record.is_good]
        assert all(record.first_s == record.last_s and record.tpot_s is None for record in whole)


def test_several_benchmarks_of_one_report_are_runs_of_different_names(tmp_path: pathlib.Path) -> None:
    report = json.loads(FILES[ImportFormat.GUIDELLM].read_text())
    report["benchmarks"] *= 2
    path = tmp_path / "some.json"
    path.write_text(json.dumps(report))
    runs = read_results(path)
    assert len({run.name for run in runs}) == 2
    assert all(record.run == run.name for run in runs for record in run.records)


def test_vllm_bench() -> None:
    run = one(FILES[ImportFormat.VLLM_BENCH])
    assert run.offered_per_s == 4
    assert run.began_unix_s == 0
    assert "began_unix_s" in run.settings["not_told"]
    assert [record.error for record in run.records] == ["", "", "failed", "", "connection_lost"]
    late = run.records[1]
    assert near(late.lateness_s, 0.01, 1e-6)
    assert near(late.longest_gap_s, 0.05, 1e-6)
    assert near(late.last_s - late.sent_s, 0.38, 1e-6)
    assert run.records[3].tpot_s is None


def test_results_that_vllm_bench_appended_to_one_file(tmp_path: pathlib.Path) -> None:
    text = FILES[ImportFormat.VLLM_BENCH].read_text()
    path = tmp_path / "some.json"
    path.write_text(text + "\n" + text)
    assert [run.name for run in read_results(path)] == ["vllm-bench-0", "vllm-bench-1"]


def test_inference_perf() -> None:
    run = one(DATA / "inference_perf")
    assert [record.error for record in run.records] == ["", "", "InternalServerError", "", "timeout"]
    assert [record.tokens_from for record in run.records] == ["usage", "inference-perf", "", "usage", ""]
    whole = run.records[3]
    assert whole.first_s == whole.last_s == whole.end_s
    assert whole.tpot_s is None
    assert "request_id" in run.settings["not_told"]


@pytest.mark.parametrize(
    ("tool", "change", "said"),
    [
        (ImportFormat.AIPERF, lambda d: d["metadata"].pop("request_start_ns"), "line 1: metadata.request_start_ns"),
        (ImportFormat.AIPERF, lambda d: d["metrics"].update(request_latency=3), "line 1: metrics.request_latency must"),
        (ImportFormat.GUIDELLM, lambda d: d["benchmarks"][0].pop("requests"), r"benchmarks\[0\].requests is missing"),
        (ImportFormat.GUIDELLM, lambda d: d.update(benchmarks=[]), "benchmarks is empty"),
        (
            ImportFormat.GUIDELLM,
            lambda d: d["benchmarks"][0]["requests"]["errored"][1]["info"].update(timings=[]),
            r"benchmarks\[0\].requests.errored\[1\].info.timings must be an object, not a list",
        ),
        (ImportFormat.VLLM_BENCH, lambda d: d.pop("ttfts"), "ttfts is missing: use --save-detailed"),
        (ImportFormat.VLLM_BENCH, lambda d: d["ttfts"].pop(), "ttfts must have 5 values"),
        (ImportFormat.VLLM_BENCH, lambda d: d["itls"].__setitem__(1, ["a"]), r"request 1.itls\[0\] must be a number"),
        (ImportFormat.INFERENCE_PERF, lambda d: d[2].pop("end_time"), r"\[2\].end_time is missing"),
    ],
)
def test_a_wrong_member_is_named_with_its_place(tool: ImportFormat, change: Any, said: str, tmp_path: Any) -> None:
    text = FILES[tool].read_text()
    value = json.loads(text.splitlines()[0] if tool is ImportFormat.AIPERF else text)
    change(value)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=said) as raised:
        read_results(path, tool)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{}", "has results of no known tool; known are aiperf"),
        ("[]", "no known tool"),
        ("nothing", "line 1: is not JSON"),
        ('{"a": 1}\n{"b"', "no known tool"),
        ("\xff", "not UTF-8|is not JSON"),
    ],
)
def test_a_file_of_no_tool_is_a_sentence(text: str, said: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "some"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=said):
        read_results(path)


def test_a_path_where_nothing_is(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_results(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="has none of the files"):
        read_results(tmp_path)
    with pytest.raises(ConfigError, match="was not written by vllm-bench but by guidellm"):
        read_results(FILES[ImportFormat.GUIDELLM], ImportFormat.VLLM_BENCH)


_WRONG = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=5)),
    *(st.just([]), st.just({}), st.lists(st.none(), max_size=2)),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found += _places(child, (*path, key))
    return found


@pytest.mark.parametrize("file", [*FILES.values(), DATA / "aiperf_raw.jsonl"], ids=lambda file: file.name)
def test_any_wrong_member_is_read_or_refused_in_words(file: pathlib.Path, tmp_path_factory: Any) -> None:
    """Total: no value anywhere in the file makes an error of another kind."""
    text, is_lines = file.read_text(), file.suffix == ".jsonl"
    tool = next((tool for tool, path in FILES.items() if path == file), ImportFormat.AIPERF)
    value = [json.loads(line) for line in text.splitlines()] if is_lines else json.loads(text)
    places = _places(value)
    path = tmp_path_factory.mktemp("wrong") / "file"

    @given(st.sampled_from(places), _WRONG)
    def check(place: tuple[Any, ...], wrong: Any) -> None:
        changed = copy.deepcopy(value)
        parent = changed
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = wrong
        if is_lines:
            path.write_text("\n".join(json.dumps(line) for line in changed))
        else:
            path.write_text(json.dumps(changed))
        try:
            for run in read_results(path, tool):
                assert all(json.loads(record.to_json()) for record in run.records)
        except KvxferError:
            pass

    check()


@pytest.mark.parametrize("name", ["ttfts", "output_lens", "input_lens", "itls"])
def test_a_length_below_0_is_no_length(name: str, tmp_path: pathlib.Path) -> None:
    """An answer of -5 tokens would have no TPOT, and meet any limit."""
    values = json.loads(FILES[ImportFormat.VLLM_BENCH].read_text())
    values[name][0] = [-5.0] if name == "itls" else -5
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="must be 0 or more"):
        read_results(path)
