"""EndpointSlices as workers."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.router.fleet.sources.endpoint_slices import workers_of_slices
from kvxfer.router.fleet.worker import WorkerSource
from tests.support.fleet import fleet
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


def test_pod_of_several_slices_is_one_worker_at_all_their_addresses() -> None:
    metrics = [{"name": "http", "port": 9}]
    slices = [
        endpoint_slice("a-v6", "decode", endpoint("fd00::1", "w")),
        endpoint_slice("a-v4", "decode", endpoint("10.0.0.1", "w")),
        endpoint_slice("b", "decode", endpoint("10.0.0.1", "w"), ports=metrics),
        endpoint_slice("c", "decode", endpoint("10.0.0.1", None)),
    ]
    for order in itertools.permutations(slices):
        [worker], reasons = workers_of_slices(order, dialect="vllm")
        assert worker.addresses == ("http://10.0.0.1:8000", "http://10.0.0.1:9", "http://[fd00::1]:8000")
        assert (worker.agent_id, worker.url, reasons) == ("w", worker.addresses[0], [])


def test_pod_takes_every_role_that_a_slice_gives_it() -> None:
    slices = [endpoint_slice(role, role, endpoint("10.0.0.1", "w")) for role in ("prefill", "decode")]
    assert seen(*slices) == seen(*reversed(slices)) == [("w", "http://10.0.0.1:8000", "both", "vllm", None)]


@pytest.mark.parametrize(("label", "values"), [("dialect", ("vllm", "sglang")), ("bootstrap-port", ("8998", "9000"))])
def test_pod_of_which_slices_say_different_things_is_left_out_by_name(label: str, values: tuple[str, str]) -> None:
    common = {} if label == "dialect" else {"kvxfer.io/dialect": "sglang"}
    slices = [
        endpoint_slice(value, "decode", endpoint("10.0.0.1", "w"), labels={**common, f"kvxfer.io/{label}": value})
        for value in values
    ]
    assert seen(*slices) == []
    said = " and ".join(sorted(values))
    assert why(*slices) == why(*reversed(slices)) == [f"w: its slices say kvxfer.io/{label} {said}: it can be one only"]


def test_pod_is_of_the_dialect_that_one_slice_names() -> None:
    named = endpoint_slice("a", "decode", endpoint("10.0.0.1", "w"), labels={"kvxfer.io/dialect": "sglang"})
    assert seen(named, endpoint_slice("b", "decode", endpoint("10.0.0.1", "w")))[0][3] == "sglang"


def test_pod_with_a_long_name_is_one_worker_too() -> None:
    pods = ["p" * 100 + end for end in "ab"]
    slices = [endpoint_slice(f"{at}", "decode", endpoint(f"10.0.0.{at}", pods[at % 2])) for at in range(1, 5)]
    workers, _ = workers_of_slices(slices, dialect="vllm")
    assert [len(worker.addresses) for worker in workers] == [2, 2]
    assert len({worker.agent_id for worker in workers}) == 2


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "169.254.1.1", "fe80::1", "::ffff:169.254.169.254"),
        *("0.0.0.0", "::", "224.0.0.1", "255.255.255.255"),
    ],
)
def test_slice_that_names_an_address_of_no_pod_is_refused_by_name(address: str) -> None:
    """Who may write EndpointSlices must not have the router ask the host's own services for what it posts."""
    slices = [endpoint_slice("bad", "decode", endpoint(address, "w"), endpoint("10.0.0.1", "v"))]
    assert [name for name, *_ in seen(*slices)] == ["v"]
    [reason] = why(*slices)
    assert reason.startswith("bad: url must have an address")
    slices.append(endpoint_slice("good", "decode", endpoint("10.0.0.2", "w")))
    assert [row[:2] for row in seen(*slices)] == [("v", "http://10.0.0.1:8000"), ("w", "http://10.0.0.2:8000")]


LISTED = st.tuples(
    st.sampled_from(["s0", "s1", "s2", "s3", "s4"]),
    st.sampled_from(["prefill", "decode"]),
    st.sampled_from([8000, 9]),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["10.0.0.", "fd00::"]), st.booleans()), max_size=3),
)


def put(listed: Any) -> dict[str, Any]:
    name, role, port, endpoints = listed
    made = [
        endpoint(f"{net}{pod + 1}", f"pod-{pod}", uid=f"uid-{pod}", conditions={"ready": is_ready})
        for pod, net, is_ready in endpoints
    ]
    return endpoint_slice(name, role, *made, ports=[{"name": "http", "port": port}])


@given(st.lists(LISTED, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_slice_events_in_any_order_give_the_same_workers_and_no_new_incarnations(
    events: list[Any], random: Random
) -> None:
    workers, _ = fleet()
    slices: dict[str, Any] = {}
    before: dict[str, Any] = {}
    for event in events:
        slices[event[0]] = put(event)
        given = list(slices.values())
        random.shuffle(given)
        workers.replace(WorkerSource.KUBERNETES, workers_of_slices(given, dialect="vllm")[0])
        now = {one.ref.agent_id: one.ref for one in workers.members()}
        assert {pod: now[pod] for pod in before if pod in now} == {pod: before[pod] for pod in before if pod in now}
        before = now
    final = list(slices.values())
    random.shuffle(final)
    told = {(one.agent_id, one.addresses, one.member.info.role) for one in workers_of_slices(final, dialect="vllm")[0]}
    whole = {(one.worker.agent_id, one.given.addresses, one.given.member.info.role) for one in workers.entries()}
    assert told == whole


def test_pod_that_is_replaced_under_its_name_is_a_new_incarnation() -> None:
    workers, _ = fleet()
    refs = []
    for address, uid in (("10.0.0.1", "a"), ("10.0.0.1", "a"), ("10.0.0.2", "a"), ("10.0.0.2", "b"), ("10.0.0.3", "c")):
        slices = [endpoint_slice("s", "decode", endpoint(address, "w", uid=uid))]
        workers.replace(WorkerSource.KUBERNETES, workers_of_slices(slices, dialect="vllm")[0])
        refs.append(workers.members()[0].ref)
    assert refs[0] == refs[1] == refs[2]
    assert len(set(refs)) == 3
    assert workers.entries()[0].worker.url == "http://10.0.0.3:8000"


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
