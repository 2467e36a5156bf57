"""A prefix cache that knew a run's prompts before the run is told, and one that learns them from the run is not."""

from __future__ import annotations

import pytest

from kvxfer.load.conclude import judge
from kvxfer.load.judge import summarize
from kvxfer.load.limits import LatencyLimits
from kvxfer.load.offered import workload_from
from kvxfer.load.options import GoalOptions, WorkloadOptions
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun
from kvxfer.load.search import SearchOptions, search
from kvxfer.load.seek import SoughtRate
from kvxfer.load.settle import WarmedUp
from kvxfer.load.warmth import PREFIXES, prefixes_of, warmth_of
from kvxfer.workload.prompts import PromptMaker
from kvxfer.workload.request import Workload, WorkloadRequest
from tests.support.load_queues import queue_run
from tests.support.load_records import answered, failed, run_of

BLOCK = 16
SETTLED = WarmedUp((1.0, 1.0))


def cached_run(workload: Workload, *, runs_before: int = 0, api: str = "completions", template: int = 0) -> LoadRun:
    """As a server with a perfect cache of whole blocks counts, which never has the last token."""
    maker = PromptMaker(token_high=1 << 30, hash_tokens=workload.hash_tokens)
    seen: set[bytes] = set()
    records: list[MeasuredRequest] = []
    for _ in range(runs_before + 1):
        records = []
        for request in workload.requests:
            tokens = [*range(template), *maker.tokens(request).tolist()]
            blocks = [str(tokens[:end]).encode() for end in range(BLOCK, len(tokens), BLOCK)]
            cached = BLOCK * next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
            seen.update(blocks)
            one = answered(request.number, request.due_s or 0.0, cached_tokens=cached)
            one.prompt_tokens = len(tokens)
            records.append(one)
    run = run_of(records, 1000.0, settings={"target": {"api": api}})
    run.settings[PREFIXES] = prefixes_of(run, workload)
    return run


@pytest.mark.parametrize("shared", [0, 256])
@pytest.mark.parametrize("turns", [1, 4])
@pytest.mark.parametrize(("api", "template"), [("completions", 0), ("chat", 64)])
def test_only_what_the_run_cannot_explain_is_warm(shared: int, turns: int, api: str, template: int) -> None:
    workload = workload_from(WorkloadOptions(requests=24, turns=turns, shared_prefix_tokens=shared, prompt_tokens=512))
    assert warmth_of(cached_run(workload, api=api, template=template)) is None
    found = warmth_of(cached_run(workload, runs_before=1, api=api, template=template))
    assert found is not None
    assert found.answers == 24
    assert found.cached > 0.9
    assert (found.explained == 0) == (shared == 0 and turns == 1)


def test_the_same_text_again_and_again_is_the_runs_own() -> None:
    requests = [WorkloadRequest(number, 500, 1, 0.0, text="x" * 2000) for number in range(20)]
    run = run_of([answered(number, 0.0, cached_tokens=496 if number else 0) for number in range(20)])
    for record in run.records:
        record.prompt_tokens = 500
    run.settings[PREFIXES] = prefixes_of(run, Workload("texts", requests))
    assert warmth_of(run) is None
    run.settings[PREFIXES] = prefixes_of(run, Workload("ids", [WorkloadRequest(n, 500, 1, 0.0) for n in range(20)]))
    assert warmth_of(run) is not None


def test_answers_that_failed_explain_no_more_than_they_can() -> None:
    """The whole of what the prompts share may be in the answers that are left."""
    run = run_of([answered(0, 0.0, cached_tokens=992), *(failed(number, 0.0) for number in range(1, 9))])
    for record in run.records:
        record.prompt_tokens = 1000
    run.settings[PREFIXES] = {"prompt_tokens": 9000, "shared_tokens": 1000}
    assert warmth_of(run) is None


def test_nothing_is_known_of_a_cache_that_is_not_told() -> None:
    workload = workload_from(WorkloadOptions(requests=5))
    run = run_of([answered(number, 0.0) for number in range(5)])
    assert prefixes_of(run, workload) == {}
    assert warmth_of(run) is None
    told = cached_run(workload, runs_before=1)
    assert prefixes_of(told, workload, tokens_differ=False) == {}


def test_a_decode_engine_that_counts_what_it_loaded_is_named_as_a_reason() -> None:
    workload = workload_from(WorkloadOptions(requests=50))
    run = cached_run(workload)
    for record in run.records:
        record.cached_tokens = record.prompt_tokens - 1
    said = {one.name: one for one in judge(run, GoalOptions()).verdicts}["cache_was_warm"]
    assert "counts what it loaded" in said.sentence
    assert not said.is_failure
    again = {one.name: one for one in judge(cached_run(workload, runs_before=1), GoalOptions()).verdicts}
    assert "counts what it loaded" not in again["cache_was_warm"].sentence


def test_a_search_says_it_of_the_whole() -> None:
    limits, goal = LatencyLimits.parse("ttft:400"), GoalOptions(goodput="ttft:400")
    judged = []

    def run_at(probe: object, *, cached: int) -> LoadRun:
        run = queue_run(4.0, 25.0, 100, seed=1)
        for record in run.records:
            record.prompt_tokens, record.cached_tokens = 512, cached
        run.settings[PREFIXES] = {"prompt_tokens": 51200, "shared_tokens": 0}
        judged.append(judge(run, goal))
        return run

    options = SearchOptions(start_rate=4.0, probes_max=2, probe_requests=100)
    found = search(lambda probe: run_at(probe, cached=496), limits, 0.9, options)
    assert all("cache_was_warm" in {one.name for one in probe.verdicts} for probe in found.probes)
    [finding] = SoughtRate(found, judged, SETTLED).findings
    assert (finding.name, finding.is_failure) == ("cache_was_warm", False)
    assert f"{len(judged)} of {len(judged)} probes" in finding.sentence
    judged.clear()
    cold = search(lambda probe: run_at(probe, cached=0), limits, 0.9, options)
    assert SoughtRate(cold, judged, SETTLED).findings == []
    for record in judged[0].run.records:
        record.output_tokens_asked, record.is_length_asked = 200, True
    [finding] = SoughtRate(cold, [judge(judged[0].run, goal), *judged[1:]], SETTLED).findings
    assert finding.name == "short_answers"
    assert finding.sentence.startswith(f"In 1 of {len(judged)} probes, by the last of them: ")


def test_an_interrupted_run_of_no_request_is_no_division_by_zero() -> None:
    run = run_of([], settings={PREFIXES: {"prompt_tokens": 5, "shared_tokens": 0}})
    assert warmth_of(run) is None
    summarize(run, LatencyLimits.parse("ttft:1"), 0.9)
