"""ServeGen's clients: what their files say, and the requests that are drawn from them. The rows are made by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.workload.readers.rows import TraceRowError
from kvxfer.workload.readers.servegen import (
    ClientRate,
    LengthChances,
    ServeGenClient,
    drawn_requests,
    read_lengths,
    read_rates,
)

RATES = ["0,2.0,4.0,Gamma,0.0625,8.0\n", "600,0,0,,0,0\n", "1200,1.5,1.2,Weibull,0.8,0.6\n"]
LENGTHS = {
    "0": {"input_tokens": "{100: 0.25, 300: 0.75}", "output_tokens": "{7: 1.0}"},
    "600": {"input_tokens": "{}", "output_tokens": "{}"},
    "1200": {"input_tokens": "{50: 1.0}", "output_tokens": "{0: 0.5, 9: 0.5}", "reason_ratio": "{0.5: 1.0}"},
}


def client(name: str = "chunk-0", **more: Any) -> ServeGenClient:
    return ServeGenClient(
        name, more.get("rates", read_rates(RATES)), more.get("lengths", read_lengths(json.dumps(LENGTHS)))
    )


def test_windows_without_requests_are_left_out() -> None:
    assert read_rates(RATES) == [
        ClientRate(0.0, 600.0, 2.0, "Gamma", 0.0625),
        ClientRate(1200.0, 600.0, 1.5, "Weibull", 0.8),
    ]


def test_lengths_are_those_of_the_last_time_that_has_any() -> None:
    lengths = client().lengths_at(1199.0)
    assert lengths is not None
    assert lengths[0].tokens.tolist() == [100, 300]
    later = client()
    assert later.lengths_at(5000.0) is later.lengths[1200.0]


def test_requests_follow_rates_and_lengths() -> None:
    trace = drawn_requests([client()], seed=4)
    early = [request for request in trace.requests if (request.due_s or 0) < 600]
    late = [request for request in trace.requests if (request.due_s or 0) >= 1200]
    assert len(early) + len(late) == len(trace.requests)
    assert abs(len(early) - 1200) <= 1
    assert abs(len(late) - 900) <= 1
    assert np.mean([request.prompt_tokens for request in early]) == pytest.approx(250, rel=0.05)
    assert {request.output_tokens for request in early} == {7}
    assert {request.output_tokens for request in late} == {1, 9}, "an answer has at least one token"


def test_bursts_are_as_strong_as_the_window_says() -> None:
    gaps = np.diff([request.due_s or 0 for request in drawn_requests([client()], seed=1, end_s=600).requests])
    assert gaps.std() / gaps.mean() > 2.5
    calm = client(rates=[ClientRate(0, 600, 20, "Weibull", 1.0)])
    gaps = np.diff([request.due_s or 0 for request in drawn_requests([calm], seed=1).requests])
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)


def test_a_rate_of_less_than_one_request_a_window_is_kept_on_average() -> None:
    rare = client(rates=[ClientRate(600.0 * at, 600, 0.3 / 600, "Gamma", 1.0) for at in range(3000)])
    assert len(drawn_requests([rare], seed=2).requests) == pytest.approx(900, abs=4 * 26)


@given(st.integers(1, 300), st.integers(0, 9))
@settings(max_examples=25)
def test_a_bound_takes_the_first_requests(rows_max: int, seed: int) -> None:
    clients = [
        client("a"),
        client("b", rates=[ClientRate(300, 50, 1.0, "Gamma", 1.0), ClientRate(900, 900, 0.1, "Gamma", 2.0)]),
    ]
    every = drawn_requests(clients, seed=seed)
    assert list(drawn_requests(clients, seed=seed, rows_max=rows_max).requests) == list(every.requests)[:rows_max]
    end_s = every.requests[rows_max].due_s or 1.0
    before_end = [request for request in every.requests if (request.due_s or 0) < end_s]
    assert list(drawn_requests(clients, seed=seed, end_s=end_s).requests) == before_end


def test_a_client_draws_the_same_beside_others() -> None:
    alone = {request.due_s for request in drawn_requests([client("a")], seed=3).requests}
    both = drawn_requests([client("b"), client("a")], seed=3).requests
    assert alone < {request.due_s for request in both}
    assert alone != {request.due_s for request in drawn_requests([client("b")], seed=3).requests}


def test_clients_without_lengths_send_nothing() -> None:
    with pytest.raises(TraceRowError, match="the trace is empty: its clients send no request"):
        drawn_requests([client(lengths={})], seed=0)


def test_too_many_requests_are_refused() -> None:
    with pytest.raises(TraceRowError, match="at most 10000000 requests"):
        drawn_requests([client(rates=[ClientRate(0, 1e6, 1e6, "Gamma", 1.0)])], seed=0)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("0,1,1,Gamma,0.5", ""),
        ("x,1,1,Gamma,0.5,1", "begin"),
        ("0,-1,1,Gamma,0.5,1", "rate"),
        ("0,1,1,Pareto,0.5,1", "distribution"),
        ("0,1,1,Gamma,0,1", "shape"),
        ("0,1,1,Gamma,0.5,1\n0,1,1,Gamma,0.5,1", "begin"),
    ],
)
def test_a_wrong_row_names_its_line_and_field(row: str, field: str) -> None:
    with pytest.raises(TraceRowError) as caught:
        read_rates(row.split("\n"))
    assert (caught.value.line, caught.value.field) == (len(row.split("\n")), field)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{\n'0'", "line 2: lengths must be JSON"),
        ("[]", "lengths must be a JSON object"),
        ('{"soon": {}}', "time must be a number"),
        ('{"0": 5}', "0 must be an object with input_tokens"),
        ('{"0": {"input_tokens": "{1: 1.0}"}}', "output_tokens of 0 must be text like"),
        ('{"0": {"input_tokens": "{1: 0.5}", "output_tokens": "{}"}}', "whose chances add to 1"),
        ('{"0": {"input_tokens": "{one: 1}", "output_tokens": "{}"}}', "a whole number"),
        ('{"0": {"input_tokens": "{1: 2.0}", "output_tokens": "{}"}}', "a number, 0 to 1"),
    ],
)
def test_wrong_lengths_are_a_sentence(text: str, said: str) -> None:
    with pytest.raises(TraceRowError, match=said):
        read_lengths(text)


wild = st.text(max_size=50) | st.dictionaries(
    st.sampled_from(["0", "600", "x"]),
    st.dictionaries(
        st.sampled_from(["input_tokens", "output_tokens"]),
        st.text(max_size=10)
        | st.sampled_from(["{1: 1.0}", "{}", "{1: 0.5, 2: 0.5}", "{1:1}", "{:}", "{1}"])
        | st.integers(),
    )
    | st.none(),
).map(json.dumps)


@given(wild)
def test_any_lengths_are_distributions_or_one_error(text: str) -> None:
    try:
        lengths = read_lengths(text)
    except TraceRowError:
        return
    for pair in lengths.values():
        assert all(isinstance(one, LengthChances) and len(one.tokens) for one in pair)
