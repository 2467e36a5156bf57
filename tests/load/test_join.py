"""Phases of a request, from its client's times and any account, without a clock or a socket."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.load.join import PHASES, join_log, phases_of
from kvxfer.load.record import MeasuredRequest

ROUTER: dict[str, Any] = {
    "request_id": "r",
    "attempts": 1,
    "dialect": "kvxfer",
    "prefill_agent": "p",
    "decode_agent": "d",
    "reason": "remote",
    "prefill": {"queue_s": 0.1, "prefill_s": 0.25, "cached_tokens": 3},
    "decode": {
        "prefill": "remote",
        "lane": "unix",
        "seconds": {"queue": 9.0, "plan": 0.01, "wire": 0.03, "confirm": 0.01},
    },
    "placed_s": 0.01,
    "prefill_sent_s": 0.02,
    "decode_sent_s": 0.02,
    "prefill_ended_s": 0.42,
    "first_s": 0.5,
    "ended_s": 1.5,
}
"""A stream's, whole."""
ENGINE: dict[str, Any] = {
    "transfer_id": "t",
    "prefill": "remote",
    "seconds": {"queue": 0.4, "plan": 0.01, "wire": 0.03, "confirm": 0.01},
    "ttft_s": 0.5,
    "queue_s": 0.45,
    "total_s": 1.5,
}


def request(account: Any, **more: Any) -> MeasuredRequest:
    times: dict[str, Any] = {"due_s": 10.0, "sent_s": 10.2, "first_s": 10.71, "last_s": 11.7, "end_s": 11.7}
    return MeasuredRequest("run", 0, "r", prompt_tokens=4, output_tokens_asked=8, account=account, **{**times, **more})


def found(record: MeasuredRequest) -> dict[str, float]:
    phases = phases_of(record)
    assert phases is not None
    assert math.isclose(phases.total_s, record.e2e_s, abs_tol=1e-6)
    return {name: round(getattr(phases, f"{name}_s"), 6) for name in PHASES}


def without(account: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in account.items() if name not in names} | more


def test_a_whole_account_of_a_stream() -> None:
    record = request(ROUTER)
    assert found(record) == {
        "late": 0.2,
        "queue": 0.12,
        "prefill": 0.3,
        "transfer": 0.05,
        "gap": 0.03,
        "decode": 0.99,
        "unexplained": 0.01,
    }
    phases = phases_of(record)
    assert phases is not None
    assert (phases.prefill_worker, phases.decode_worker, phases.attempts) == ("p", "d", 1)
    assert phases.is_queue_told
    assert phases.is_transfer_told
    spans = phases.spans()
    names = ["late", "queue", "prefill", "transfer", "gap", "unexplained", "decode"]
    assert [name for name, _, _, _ in spans] == names
    assert [worker for _, _, _, worker in spans] == [None, "p", "p", "d", "d", None, "d"]
    assert (spans[0][1], round(spans[-1][1], 6), round(spans[-1][2], 6)) == (10.0, 10.71, 11.7)
    assert all(before[2] == after[1] for before, after in itertools.pairwise(spans))


def test_what_the_router_alone_knows_of_a_stream() -> None:
    """As of vLLM and SGLang: P's leg is queue and prefill together, and the gap has the transfer."""
    record = request(without(ROUTER, "prefill", "decode"))
    phases = phases_of(record)
    assert phases is not None
    assert not phases.is_queue_told
    assert not phases.is_transfer_told
    assert found(record) == {
        "late": 0.2,
        "queue": 0.02,
        "prefill": 0.4,
        "transfer": 0.0,
        "gap": 0.08,
        "decode": 0.99,
        "unexplained": 0.01,
    }


def test_the_transfer_is_what_prefill_does_not_hide() -> None:
    early = without(ROUTER["decode"], bytes_moved=100, bytes_before_prefill_end=50)
    assert found(request(without(ROUTER, decode=early)))["transfer"] == 0.035
    assert found(request(without(ROUTER, prefill_ended_s=0.48)))["transfer"] == 0.02
    assert found(request(without(ROUTER, prefill_ended_s=0.48)))["gap"] == 0.0
    late = found(request(without(ROUTER, prefill_ended_s=0.6)))  # P's answer came after D's first token
    assert (late["prefill"], late["transfer"], late["gap"]) == (0.38, 0.0, 0.0)
    vllm = found(request(without(ROUTER, decode={"lane": "unix", "seconds": 0.2, "wire_seconds": 0.02})))
    assert (vllm["transfer"], vllm["gap"]) == (0.02, 0.06)


def test_a_prompt_that_d_computes() -> None:
    alone = without(ROUTER, "prefill", "decode", "prefill_sent_s", "prefill_ended_s", prefill_agent=None)
    record = request(alone)
    assert found(record)["prefill"] == 0.48
    phases = phases_of(record)
    assert phases is not None
    assert [span[3] for span in phases.spans()] == [None, "d", "d", None, "d"]
    told = without(alone, decode={"prefill": "local", "queue_s": 0.08})
    assert (found(request(told))["queue"], found(request(told))["prefill"]) == (0.1, 0.4)
    lost = without(ROUTER, "prefill", decode={"prefill": "local"}, prefill_failure="lost", prefill_ended_s=0.1)
    assert (found(request(lost))["prefill"], found(request(lost))["gap"]) == (0.48, 0.0)


def test_a_whole_answer_by_the_router() -> None:
    """First and last content are one moment: what no one tells apart is decode."""
    times = {"first_s": 11.71, "last_s": 11.71, "end_s": 11.71}
    whole = found(request(without(ROUTER, "first_s"), **times))
    assert (whole["transfer"], whole["gap"], whole["decode"]) == (0.05, 0.0, 1.03)
    decode = {**ROUTER["decode"], "ttft_s": 0.48, "total_s": 1.48}
    told = found(request(without(ROUTER, "first_s", decode=decode), **times))
    assert (told["gap"], told["decode"], told["unexplained"]) == (0.03, 1.0, 0.01)
    phases = phases_of(request(without(ROUTER, "first_s"), **times))
    assert phases is not None
    assert [span[0] for span in phases.spans()][-2:] == ["decode", "unexplained"]


def test_an_engines_account_without_a_router() -> None:
    alone = found(request(ENGINE))
    assert (alone["queue"], alone["prefill"], alone["transfer"], alone["gap"]) == (0.0, 0.4, 0.05, 0.05)
    assert alone["unexplained"] == 0.01
    whole = found(request(ENGINE, first_s=11.71, last_s=11.71, end_s=11.71))
    assert (whole["gap"], whole["decode"], whole["unexplained"]) == (0.05, 1.0, 0.01)
    merged = {
        **ENGINE,
        "prefill_queue_s": 0.1,
        "prefill_s": 0.3,
        "prefill_agent": "p",
        "decode_agent": "d",
        "attempt": 2,
    }
    phases = phases_of(request(merged))
    assert phases is not None
    assert (phases.prefill_worker, phases.decode_worker, phases.attempts) == ("p", "d", 2)
    assert (found(request(merged))["queue"], found(request(merged))["prefill"]) == (0.1, 0.3)
    local = found(request({**ENGINE, "prefill": "local", "queue_s": 0.1, "seconds": {}}))
    assert (local["queue"], local["prefill"], local["transfer"]) == (0.1, 0.4, 0.0)


@pytest.mark.parametrize("wrap", [lambda account: {"kvxfer": account}, lambda a: {"kv_transfer_params": {"kvxfer": a}}])
def test_an_account_inside_an_answers_object(wrap: Any) -> None:
    assert found(request(wrap(ENGINE))) == found(request(ENGINE))


@pytest.mark.parametrize("account", [None, {}, {"lane": "unix", "blocks": 3}, {"placed_s": "x"}, [], "x", 3])
def test_nothing_is_known_where_no_time_is_told(account: Any) -> None:
    assert phases_of(request(account)) is None


def test_a_request_that_failed_has_no_phases() -> None:
    assert phases_of(request(ROUTER, error="status_503")) is None
    assert phases_of(request(ROUTER, first_s=None, last_s=None)) is None


def test_a_tool_that_does_not_say_when_it_sent() -> None:
    assert found(request(ROUTER, sent_s=None))["late"] == 0.0


HOSTILE: st.SearchStrategy[Any] = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(10**400), 10**400),
    st.floats(0.0, 3.0),
    st.sampled_from([None, True, "", "local", "remote", "x" * 1000, [], {}, {"queue_s": -1.0}]),
)
NAMES = sorted({*ROUTER, *ENGINE, "prefill_queue_s", "prefill_s", "bytes_moved", "bytes_before_prefill_end", "attempt"})
PARTS = ("queue", "plan", "wire", "confirm", "queue_s", "prefill_s", "ttft_s", "total_s", "wire_seconds", "prefill")
ACCOUNTS = st.dictionaries(
    st.sampled_from([*NAMES, "wire_seconds", "kvxfer", "bytes", "early_bytes"]),
    st.one_of(HOSTILE, st.dictionaries(st.sampled_from(PARTS), HOSTILE)),
)


@given(
    account=st.one_of(ACCOUNTS, ACCOUNTS.map(lambda changes: {**ROUTER, **changes}), HOSTILE),
    times=st.lists(st.floats(-2.0, 1e5), min_size=4, max_size=4),
    is_sorted=st.booleans(),
)
def test_phases_add_up_whatever_an_account_says(account: Any, times: list[float], is_sorted: bool) -> None:
    due_s, sent_s, first_s, last_s = sorted(times) if is_sorted else times
    record = request(account, due_s=due_s, sent_s=sent_s, first_s=first_s, last_s=last_s)
    phases = phases_of(record)
    if phases is None:
        return
    parts = [getattr(phases, f"{name}_s") for name in PHASES]
    assert all(math.isfinite(part) and part >= 0 for part in parts), phases
    assert math.isclose(phases.total_s, record.e2e_s, abs_tol=1e-6, rel_tol=0)
    assert 0 <= phases.first_unexplained_s <= phases.unexplained_s + 1e-9
    spans = phases.spans()
    assert math.isclose(math.fsum(end - begin for _, begin, end, _ in spans), record.e2e_s, abs_tol=1e-6)
    assert phases.attempts >= 1
    json.dumps(spans, allow_nan=False)


@given(
    steps=st.lists(st.floats(0.0, 10.0), min_size=7, max_size=7),
    share=st.floats(0.0, 1.0),
)
def test_what_is_told_truly_is_found(steps: list[float], share: float) -> None:
    """Of clocks that agree nothing is lost: each phase is as long as it was."""
    late_s, queue_s, prefill_s, transfer_s, gap_s, decode_s, way_s = steps
    asked_s = queue_s * share
    prefilled_s = asked_s + queue_s * (1 - share) + prefill_s
    first_s = prefilled_s + transfer_s + gap_s
    account = {
        **ROUTER,
        "prefill": {"queue_s": queue_s * (1 - share)},
        "decode": {"seconds": {"wire": transfer_s}},
        "prefill_sent_s": asked_s,
        "prefill_ended_s": prefilled_s,
        "first_s": first_s,
        "ended_s": first_s + decode_s,
    }
    record = request(
        account,
        due_s=1.0,
        sent_s=1.0 + late_s,
        first_s=1.0 + late_s + first_s + way_s,
        last_s=1.0 + late_s + first_s + way_s + decode_s,
    )
    phases = phases_of(record)
    if math.isclose(record.e2e_s, 0.0):
        return
    assert phases is not None
    made = [getattr(phases, f"{name}_s") for name in PHASES]
    assert made == pytest.approx([late_s, queue_s, prefill_s, transfer_s, gap_s, decode_s, way_s], abs=1e-6)


def test_a_routers_log_is_joined_by_request_id() -> None:
    records = [request(None) for _ in range(4)]
    for number, record in enumerate(records):
        record.request_id = f"r{number}"
    lines: list[str | bytes] = [
        'no JSON with "account"',
        json.dumps({"message": "request", "request_id": "r0", "account": ROUTER}),
        json.dumps({"message": "request", "request_id": "r1", "account": ROUTER}).encode(),
        json.dumps({"message": "request", "request_id": "r2"}),
        json.dumps({"message": "request", "request_id": "r3", "account": "x"}),
        json.dumps({"message": "request", "request_id": 3, "account": ROUTER}),
        json.dumps(["account"]),
        '{"account": ' + "[" * 100_000,
    ]
    assert join_log(records, lines) == 2
    assert [record.account is not None for record in records] == [True, True, False, False]
    assert [phases_of(record) is not None for record in records] == [True, True, False, False]
