"""EndpointSlices as workers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.router.fleet.sources.endpoint_slices import workers_of_slices
from tests.support.kubernetes import endpoint, endpoint_slice


def seen(*slices: Any, dialect: str = "vllm") -> list[tuple[Any, ...]]:
    workers, _ = workers_of_slices(slices, dialect=dialect)
    return [(w.agent_id, w.url, w.member.info.role.value, w.dialect, w.bootstrap_port) for w in workers]


def why(*slices: Any) -> list[str]:
    return workers_of_slices(slices, dialect="vllm")[1]


def test_slice_makes_a_worker_of_each_ready_endpoint() -> None:
    one = endpoint_slice("p-1", "prefill", endpoint("10.0.0.1", "p-0"), endpoint("10.0.0.2", "p-1"))
    assert seen(one) == [
        ("p-0", "http://10.0.0.1:8000", "prefill", "vllm", None),
        ("p-1", "http://10.0.0.2:8000", "prefill", "vllm", None),
    ]
    assert seen(endpoint_slice("d", "decode", endpoint("fd00::1", None))) == [
        ("fd00..1-8000", "http://[fd00::1]:8000", "decode", "vllm", None)
    ]


@pytest.mark.parametrize(
    ("conditions", "counts"),
    [
        ({}, True),
        (None, True),
        ({"ready": None}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": False}, False),
        ({"ready": True, "terminating": True}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
    ],
)
def test_slice_endpoint_that_is_not_ready_or_ends_gets_no_new_work(conditions: Any, counts: bool) -> None:
    one = endpoint_slice("d", "decode", {**endpoint("10.0.0.1"), "conditions": conditions})
    assert len(seen(one)) == counts


@pytest.mark.parametrize(
    ("labels", "role", "dialect", "port"),
    [
        ({"kvxfer.io/role": "decode"}, "decode", "vllm", None),
        ({"llm-d.ai/role": "prefill"}, "prefill", "vllm", None),
        ({"llm-d.ai/role": "prefill-decode"}, "both", "vllm", None),
        ({"llm-d.ai/role": "prefill", "kvxfer.io/role": "decode"}, "decode", "vllm", None),
        ({"kvxfer.io/dialect": "plain"}, "both", "plain", None),
        ({"kvxfer.io/role": "prefill", "kvxfer.io/dialect": "sglang"}, "prefill", "sglang", 8998),
        (
            {"kvxfer.io/role": "prefill", "kvxfer.io/dialect": "sglang", "kvxfer.io/bootstrap-port": "9000"},
            *("prefill", "sglang", 9000),
        ),
    ],
)
def test_slice_labels_say_role_and_dialect(labels: dict[str, str], role: str, dialect: str, port: int | None) -> None:
    one = endpoint_slice("s", None, endpoint("10.0.0.1", "w"), labels=labels)
    assert seen(one) == [("w", "http://10.0.0.1:8000", role, dialect, port)]


def test_slice_port_is_the_one_named_http_or_the_only_one() -> None:
    ports = [{"name": "metrics", "port": 9}, {"name": "http", "port": 80}]
    assert seen(endpoint_slice("s", "decode", endpoint("10.0.0.1", "w"), ports=ports))[0][1] == "http://10.0.0.1:80"
    ports = [{"name": "", "port": 81}]
    assert seen(endpoint_slice("s", "decode", endpoint("10.0.0.1", "w"), ports=ports))[0][1] == "http://10.0.0.1:81"
    for wrong in ([], None, [{"port": 1}, {"port": 2}], [{"port": "http"}]):
        assert why(endpoint_slice("s", "decode", endpoint("10.0.0.1"), ports=wrong))[0].startswith(
            "s: it needs one port"
        )


def test_slice_that_makes_no_worker_says_why_and_harms_no_other() -> None:
    good = endpoint_slice("good", "decode", endpoint("10.0.0.1", "w"))
    wrong = [
        endpoint_slice("a", None, endpoint("10.0.0.2")),
        endpoint_slice("b", "encode", endpoint("10.0.0.2")),
        endpoint_slice("c", "decode", endpoint("10.0.0.2"), labels={"kvxfer.io/dialect": "tgi"}),
        endpoint_slice("d", "decode", endpoint("10.0.0.2"), labels={"kvxfer.io/bootstrap-port": "x"}),
        endpoint_slice("e", "decode", endpoint("no address!")),
    ]
    assert [name for name, *_ in seen(good, *wrong)] == ["w"]
    assert [reason.partition(":")[0] for reason in why(good, *wrong)] == ["a", "b", "c", "d", "e"]


def test_slice_endpoints_that_several_slices_list_count_once() -> None:
    slices = [endpoint_slice(name, "decode", endpoint("10.0.0.1", "w")) for name in ("a", "b")]
    assert len(seen(*slices)) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["metadata", "ports", "endpoints"]), JSON | st.lists(JSON, max_size=3)), JSON)
def test_slice_of_any_json_is_workers_or_reasons(value: dict[str, Any], part: Any) -> None:
    workers_of_slices([value], dialect="vllm")
    for name in ("metadata", "ports", "endpoints"):
        workers_of_slices([{**endpoint_slice("s", "decode", endpoint("10.0.0.1")), name: part}], dialect="vllm")
    workers_of_slices([endpoint_slice("s", "decode", {**endpoint("10.0.0.1"), "addresses": part})], dialect="vllm")
