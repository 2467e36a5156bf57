"""The report as a file: its size, what it escapes, what it leaves out, and that it names no other place."""

from __future__ import annotations

import json
import math
import pathlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs

from kvxfer.load.artefacts import RunDirectory, StoredLoadTest, read
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.report.columns import columns_of, percentile_of, width_for, windows
from kvxfer.load.report.figure import POINTS_MAX, ReportFigure, log_axis, rounded, thinned
from kvxfer.load.report.rates import SummarizedRun, by_rate, pareto, split_map
from kvxfer.load.report.write import figures_of, shown_run, write_report
from kvxfer.load.run import LoadRun
from tests.support.load_made_up import MadeUp, finished, made_up_run, made_up_search, made_up_sweep
from tests.support.load_records import answered, failed, run_of

BYTES_MAX = 8_000_000
REQUESTS = 100_000
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">&amp;\u2028"


def stored(path: pathlib.Path, made: MadeUp) -> StoredLoadTest:
    with RunDirectory.create(path) as directory:
        for run in made.runs:
            for record in run.records:
                directory.append(record)
        directory.finish(made.kind, made.runs, made.summaries, made.verdicts, made.extra)
    return read(path)


def page(path: pathlib.Path, made: MadeUp) -> str:
    return write_report(path, stored(path, made)).read_text()


def specs(text: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="specs">(.*?)</script>', text, re.DOTALL)
    assert found
    return list(json.loads(found[1]))


def points(trace: dict[str, Any]) -> int:
    return max((len(trace[name]) for name in ("x", "y", "z") if name in trace), default=0)


@pytest.fixture(scope="module")
def search_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page(tmp_path_factory.mktemp("search"), made_up_search(200))


def test_a_search_has_every_figure_with_its_sentence(search_page: str) -> None:
    drawn = [spec["key"] for spec in specs(search_page)]
    assert drawn == ["rates", "pareto", "curves", "over-time", "phases", "timeline", "lateness"]
    for key in drawn:
        figure = search_page.partition(f'<figure id="figure-{key}">')[2].partition("</figure>")[0]
        assert re.search(r"<p>[A-Z][^<]{60,}\.</p>", figure), key
    assert "Goodput by split of workers: it takes runs with two splits or more: a sweep over P:D." in search_page
    assert re.search(r"It holds [\d.]+ requests/s", search_page)


def test_a_sweep_has_the_map_of_splits(tmp_path: pathlib.Path) -> None:
    text = page(tmp_path, made_up_sweep(40))
    assert "splits" in [spec["key"] for spec in specs(text)]
    assert "Run by run" in text, "of many runs the verdicts are folded"


@pytest.mark.deep
@pytest.mark.parametrize("runs", [1, 40])
def test_a_hundred_thousand_requests_fit(tmp_path: pathlib.Path, runs: int) -> None:
    each = REQUESTS // runs
    rates = [500.0 - at for at in range(runs)]
    made = finished("search", [made_up_run(f"at {rate}", requests=each, rate=rate, split=(64, 64)) for rate in rates])
    with RunDirectory.create(tmp_path) as directory:
        whole = directory.finish(made.kind, made.runs, made.summaries, made.verdicts, made.extra)
    path = write_report(tmp_path, whole)
    assert path.stat().st_size <= BYTES_MAX
    for spec in specs(path.read_text()):
        assert max(map(points, spec["traces"])) <= POINTS_MAX
    assert f"of {each:,} requests are drawn" in path.read_text()


def test_the_page_names_no_other_place(search_page: str) -> None:
    own = search_page.replace(get_plotlyjs().replace("\r\n", "\n"), "")
    assert len(own) < len(search_page) - 1_000_000, "plotly.js is there, once"
    assert re.findall(r"(?:src|href|srcset|action)\s*=|url\(|@import|\bimport\s*\(|\bfetch\s*\(", own) == []
    assert set(re.findall(r"\w+://[^\s\"'<]*", own)) == {"http://127.0.0.1:8000"}, "the server that was tested"
    assert "default-src 'none'" in own
    assert "unsafe-eval" not in own
    policy = own.partition("script-src ")[2].partition(";")[0]
    assert re.fullmatch(r"('sha256-[\w+/=]{44}' ?){2}", policy)


def test_foreign_texts_stay_texts(tmp_path: pathlib.Path) -> None:
    runs = [made_up_run(f"{HOSTILE}{at}", requests=30, rate=rate) for at, rate in enumerate((2.0, 4.0))]
    for run in runs:
        run.settings = {"target": {"model": HOSTILE, "url": "http://127.0.0.1:8000"}}
        run.workload = run.source = run.driver = run.ended = HOSTILE
        run.point |= {"policy": HOSTILE, "lane": HOSTILE}
        for record in run.records:
            if record.account:
                record.account |= {"prefill_agent": HOSTILE, "decode_agent": HOSTILE}
    runs[0].records += [failed(40, 1.0, error=HOSTILE, message=HOSTILE)]
    runs[0].records[-1].run = runs[0].name
    text = page(tmp_path, finished("search", runs, HOSTILE))
    assert len(re.findall("<script", text.replace(get_plotlyjs(), ""))) == 3
    assert "<img" not in text.replace(get_plotlyjs(), "")
    for spec in specs(text):
        labels = json.dumps([spec["layout"], [{**trace, "customdata": None} for trace in spec["traces"]]])
        assert "<script" not in labels
        assert "<img" not in labels


def no_request_was_answered() -> MadeUp:
    return finished("run", [run_of([failed(at, at / 10) for at in range(20)])])


@pytest.mark.parametrize(
    ("made", "drawn"),
    [
        (no_request_was_answered(), ["lateness"]),
        (finished("run", [run_of([])]), []),
        (finished("sweep", []), []),
        (finished("run", [run_of([answered(0, 0.0)])]), ["curves", "over-time", "timeline", "lateness"]),
        (
            finished("run", [run_of([answered(0, 0.0, output_tokens=1)])]),
            ["curves", "over-time", "timeline", "lateness"],
        ),
    ],
    ids=["all failed", "nothing was due", "no run", "one request", "one token"],
)
def test_a_figure_without_data_says_why(tmp_path: pathlib.Path, made: MadeUp, drawn: list[str]) -> None:
    text = page(tmp_path, made)
    assert [spec["key"] for spec in specs(text)] == drawn
    missing = re.findall(r'<li id="missing-([\w-]+)">[^<:]+: [^<]{10,}\.</li>', text)
    assert missing
    assert not set(missing) & set(drawn)


def test_a_directory_without_run_json_can_be_drawn(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory.create(tmp_path)
    for record in made_up_run(requests=40).records:
        directory.append(record)
    directory.close()
    text = write_report(tmp_path, read(tmp_path)).read_text()
    assert "cut off before its end" in text
    assert "over-time" in [spec["key"] for spec in specs(text)]


def test_the_same_test_gives_the_same_bytes(tmp_path: pathlib.Path) -> None:
    made = made_up_search(40)
    stored(tmp_path, made)
    first = write_report(tmp_path, read(tmp_path)).read_bytes()
    assert write_report(tmp_path, read(tmp_path)).read_bytes() == first


def test_failures_lower_the_end_of_a_curve() -> None:
    records = [answered(at, at / 10, ttft_s=0.1 + at / 1000) for at in range(80)]
    records += [failed(at, at / 10) for at in range(80, 100)]
    [figure] = [one for one in figures(run_of(records)) if one.key == "curves"]
    for trace in figure.traces:
        assert trace["y"][-1] == pytest.approx(80.0)


def test_a_percentile_that_failures_reach_is_a_gap() -> None:
    records = [answered(at, at / 100) if at % 5 else failed(at, at / 100) for at in range(1000)]
    [figure] = [one for one in figures(run_of(records)) if one.key == "over-time"]
    lines = {trace["name"]: trace["y"] for trace in figure.traces if trace.get("showlegend")}
    assert None not in lines["p50"]
    assert set(lines["p90"]) == {None}


def figures(run: LoadRun) -> list[ReportFigure]:
    return figures_of([SummarizedRun(run, {})], [columns_of(run)], StoredLoadTest("run", {}, [run]))


def summarized(goodput: float, *, is_attained: bool = True, each: float | None = None, **point: Any) -> SummarizedRun:
    run = LoadRun("one", "native", 0.0, (0.0, 1.0), offered_per_s=point.pop("rate", 1.0), point=point)
    summary = {"goodput_per_s": goodput, "is_attained": is_attained, "goodput_per_device_per_s": each}
    summary["attainment"] = {"share": 0.9, "low": 0.8, "high": 0.95}
    return SummarizedRun(run, summary)


def test_the_map_shows_the_best_rate_that_a_split_held() -> None:
    runs = [
        summarized(5.0, prefill=1, decode=1, each=2.5),
        summarized(9.0, prefill=1, decode=1, is_attained=False),
        summarized(3.0, prefill=1, decode=2, is_attained=False),
        summarized(2.0, prefill=1, decode=2, is_attained=False),
        summarized(7.0, prefill=2, decode=1),
    ]
    figure = split_map(runs)
    assert figure.traces[0]["z"] == [[5.0, 3.0], [7.0, None]]
    assert figure.traces[0]["text"] == [["5<br>2.5 each", "(3)"], ["7", ""]]


def test_the_line_of_the_unbeaten_runs() -> None:
    found = [(1, 9), (2, 8), (2, 9), (4, 5), (3, 4), (5, 1), (6, 10)]
    runs = []
    for x, y in found:
        run = summarized(1.0, is_attained=x < 6)
        runs.append(
            SummarizedRun(run.run, {**run.summary, "tokens_per_s_per_user": x, "output_tokens_per_s_per_device": y})
        )
    edge = pareto(runs).traces[0]
    assert list(zip(edge["x"], edge["y"], strict=True)) == [(2.0, 9.0), (4.0, 5.0), (5.0, 1.0)]


def test_runs_at_one_rate_are_no_curve() -> None:
    assert by_rate([summarized(1.0), summarized(2.0)]).missing
    figure = by_rate([summarized(1.0), summarized(2.0, rate=2.0)], {"rate": 1.5, "low": 1.2, "high": 1.9})
    assert figure.traces[0]["error_y"]["array"] == pytest.approx([5.0, 5.0])
    assert "crosses at 1.5/s" in json.dumps(figure.layout)


def test_the_run_that_is_shown_is_the_best_that_held() -> None:
    runs = [columns_of(run_of([answered(0, 0.0)])) for _ in range(4)]
    worth = [(5.0, True), (7.0, True), (9.0, False), (1.0, True)]
    told = [summarized(goodput, is_attained=held) for goodput, held in worth]
    assert shown_run(told, runs) is runs[1]
    assert shown_run([summarized(5.0, each=4.0 - at) for at in range(4)], runs) is runs[0], "of one worker, where known"
    assert shown_run([summarized(1.0, is_attained=False)] * 4, runs) is runs[3]
    assert shown_run([], []) is None


SECONDS = st.none() | st.floats(-5, 1e6) | st.integers(0, 100)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
RECORDS = st.builds(
    MeasuredRequest,
    run=st.just("run"),
    number=st.integers(0, 9),
    request_id=st.text(max_size=3),
    due_s=st.floats(-5, 1e6),
    prompt_tokens=st.integers(-1, 1 << 24),
    output_tokens_asked=st.integers(0, 9),
    sent_s=SECONDS,
    first_s=SECONDS,
    last_s=SECONDS,
    end_s=SECONDS,
    output_tokens=st.none() | st.integers(-1, 1 << 24),
    first_chunk_tokens=st.integers(-1, 9),
    error=st.sampled_from(["", "", "overloaded"]),
    account=st.none()
    | st.dictionaries(
        st.sampled_from(
            ["prefill_agent", "decode_agent", "placed_s", "prefill_sent_s", "first_s", "ended_s", "decode"]
        ),
        st.floats(0, 10) | st.text(max_size=3) | ANY_JSON,
    ),
)


@given(st.lists(RECORDS, max_size=12), st.sampled_from([(0.0, 10.0), (0.0, math.inf), (5.0, 5.0), (-1.0, 2e6)]))
def test_whatever_was_recorded_can_be_drawn(records: list[MeasuredRequest], window: tuple[float, float]) -> None:
    run = LoadRun("run", "native", 0.0, window, records=records)
    for figure in figures(run):
        json.dumps(figure.spec(), allow_nan=False)
        assert figure.missing or figure.traces
        assert figure.height < 3_000


@given(st.integers(0, 50_000), st.integers(2, 6_000))
def test_thinning_keeps_both_ends(count: int, most: int) -> None:
    kept = thinned(count, most)
    assert len(kept) == min(count, most) or (len(kept) <= most and count > most)
    if count:
        assert kept[0] == 0
        assert kept[-1] == count - 1
    assert (np.diff(kept) > 0).all()


@given(st.lists(st.floats(0, 1e4), max_size=60), st.floats(100, 5e3))
def test_windows_have_each_request_once(due: list[float], width: float) -> None:
    columns = columns_of(run_of([answered(at, one) for at, one in enumerate(due)], seconds=1e4 + 1))
    parts = windows(columns, width)
    assert sum(where.stop - where.start for _, where in parts) == len(due)
    for begin, where in parts:
        assert all(begin - 1e-6 <= one <= begin + width + 1e-6 for one in columns.due[where])
    assert len(windows(columns, width_for(columns))) <= 121


@given(st.lists(st.floats(1e-6, 1e9) | st.just(math.inf), max_size=50))
def test_numbers_of_a_figure_are_json(values: list[float]) -> None:
    assert [one is None for one in rounded(values)] == [math.isinf(one) for one in values]
    json.dumps(rounded(values), allow_nan=False)
    array = np.array(values, dtype=np.float64)
    ticks = log_axis("x", array)
    assert len(ticks["tickvals"]) == len(ticks["ticktext"]) < 60
    assert ticks["range"][0] < ticks["range"][1]
    assert math.isnan(percentile_of(np.array([math.nan]), 0.5))


def test_a_missing_figure_needs_no_words() -> None:
    assert ReportFigure("a", "b", "", missing="c").spec()["traces"] == []
