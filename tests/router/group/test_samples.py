"""One ``/metrics`` of several processes: a sum, in which no count goes down when a process is replaced."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvxfer.router.fleet.workers import Workers
from kvxfer.router.group.samples import Collected, GroupMetrics, samples_of
from kvxfer.router.metrics import RequestOutcome, RouterMetrics
from tests.support.fleet import stock


def told(metrics: RouterMetrics) -> list[Any]:
    return list(json.loads(json.dumps(samples_of(metrics.registry))))


def values(metrics: GroupMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def of(metrics: GroupMetrics, name: str, **labels: str) -> float:
    return values(metrics).get((name, frozenset(labels.items())), 0.0)


def test_counts_of_all_processes_add_up() -> None:
    collected = Collected()
    shown = GroupMetrics(Workers(), collected)
    ones = [RouterMetrics(Workers()) for _ in range(3)]
    for row, one in enumerate(ones):
        for _ in range(row + 1):
            one.ended("/v1/completions", RequestOutcome.OK, 0.2)
        one.retried("lost")
        collected.take(row, told(one))
    ok = {"route": "/v1/completions", "outcome": "ok"}
    assert of(shown, "kvxfer_router_requests_total", **ok) == 6
    assert of(shown, "kvxfer_router_retries_total", reason="lost") == 3
    assert of(shown, "kvxfer_router_request_seconds_count", route="/v1/completions") == 6
    assert of(shown, "kvxfer_router_request_seconds_bucket", route="/v1/completions", le="0.1") == 0
    assert of(shown, "kvxfer_router_request_seconds_bucket", route="/v1/completions", le="0.2") == 6
    assert of(shown, "kvxfer_router_request_seconds_bucket", route="/v1/completions", le="+Inf") == 6


def test_no_count_goes_down_when_a_process_is_replaced() -> None:
    collected = Collected()
    shown = GroupMetrics(Workers(), collected)
    before: dict[Any, float] = {}
    for _number in range(3):
        one = RouterMetrics(Workers())
        for _ in range(4):
            one.ended("/generate", RequestOutcome.FAILED, 1.0)
            collected.take(0, told(one))
            now = values(shown)
            assert all(now.get(key, 0.0) >= value for key, value in before.items() if "_inflight" not in key[0])
            before = now
        collected.ended(0)
    assert of(shown, "kvxfer_router_requests_total", route="/generate", outcome="failed") == 12
    collected.ended(0)  # a process that said nothing
    assert of(shown, "kvxfer_router_requests_total", route="/generate", outcome="failed") == 12


def test_gauges_are_the_leaders_alone() -> None:
    workers, others = Workers(), Workers()
    workers.replace("flags", [stock("d0"), stock("d1")])
    others.replace("flags", [stock(f"x{number}") for number in range(7)])
    collected = Collected()
    shown = GroupMetrics(workers, collected)
    collected.take(0, told(RouterMetrics(others)))
    assert of(shown, "kvxfer_router_workers", state="in") == 2
    assert of(shown, "kvxfer_router_inflight", worker="d0", part="decode") == 0
    assert ("kvxfer_router_inflight", frozenset({("worker", "x1"), ("part", "decode")})) not in values(shown)


def test_gauges_of_what_processes_have_now_add_up_and_end_with_them() -> None:
    collected = Collected()
    shown = GroupMetrics(Workers(), collected)
    for row in range(3):
        one = RouterMetrics(Workers())
        for _ in range(row + 1):
            one.key_began("team")
        collected.take(row, told(one))
    assert of(shown, "kvxfer_router_key_inflight", key="team") == 6
    collected.ended(2)
    assert of(shown, "kvxfer_router_key_inflight", key="team") == 3


def test_a_single_counter_is_read_of_all_processes() -> None:
    collected = Collected()
    shown = GroupMetrics(Workers(), collected)
    one = RouterMetrics(Workers())
    one.placed("remote")
    one.placed("remote")
    collected.take(0, told(one))
    [family] = shown.collected(shown.placements)
    assert {sample.labels["reason"]: sample.value for sample in family.samples if sample.name.endswith("_total")} == {
        "remote": 2
    }


def test_a_family_that_only_another_process_has_is_shown() -> None:
    collected = Collected()
    collected.take(0, [["kvxfer_router_new", "counter", "New", [["kvxfer_router_new_total", [], 2.0]]]])
    shown = GroupMetrics(Workers(), collected)
    assert of(shown, "kvxfer_router_new_total") == 2
