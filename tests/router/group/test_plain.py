"""Values that go from one process of a router to another come out as they went in."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ProtocolError
from kvxfer.policy.health import HealthAccount, HealthState
from kvxfer.router.fleet.facts import EngineIdentity, EngineLoad
from kvxfer.router.fleet.worker import Worker
from kvxfer.router.group.messages import ClosedPair, MemberStart, Update, WorkerAccount
from kvxfer.router.group.plain import from_plain, to_plain
from kvxfer.router.options import RouterOptions
from kvxfer.types import AgentRef, CompatibilityRecord, Exposure, Incarnation, Load, PoolRecord
from tests.support.fleet import member, stock


def through(kind: type[Any], value: Any) -> Any:
    return from_plain(kind, json.loads(json.dumps(to_plain(value))))


def of_the_coordinator() -> Worker:
    record = CompatibilityRecord(
        "m", "c", "w", "bf16", 2, 2, 8, 16, axes="a", packing="p", rope="r", attention_backend="b"
    )
    pool = PoolRecord(0, record, 10, 4096, Exposure.GRANT, True)
    known = member("p", pools=(pool,), load=Load(1, 2, 3, 4, 5), is_suspect=True)
    return Worker(known, "kvxfer", "coordinator", dp_rank=3, ranks=2, aliases=frozenset({"x", "y"}))


@pytest.mark.parametrize(
    "worker", [stock("d0"), stock("p0", dialect="sglang"), of_the_coordinator()], ids=lambda one: one.agent_id
)
def test_plain_worker_comes_out_equal(worker: Worker) -> None:
    came = through(Worker, worker)
    assert came == worker
    assert hash(came.ref) == hash(worker.ref)


def test_plain_update_comes_out_equal() -> None:
    worker = stock("d0")
    account = WorkerAccount(
        worker,
        EngineIdentity(("m", "n"), 4096),
        EngineLoad(running=1, used=0.5),
        True,
        "why",
        HealthAccount(HealthState.SLOW_START, 12.25, tries=2, ejected_for="lost"),
        7,
    )
    pair = ClosedPair(worker.ref, stock("d1").ref, 3.5, 1.0)
    for update in (
        Update(1, True),
        Update(2, False, (account,), (worker.ref,), (worker.ref,), (pair,)),
        Update(3, True, pairs=()),
    ):
        assert through(Update, update) == update


def test_plain_hello_carries_every_option() -> None:
    options = RouterOptions(
        prefill=("http://a:1",), decode=("http://b:2", "http://c:3"), retry_floor_per_s=1.25, forward_authorization=True
    )
    hello = MemberStart(options, 4)
    assert through(MemberStart, hello) == hello


@given(st.integers(0, (1 << 64) - 1), st.binary(min_size=16, max_size=16))
def test_plain_ref_comes_out_equal(number: int, nonce: bytes) -> None:
    ref = AgentRef("agent", Incarnation(number, nonce))
    assert through(AgentRef, ref) == ref


@pytest.mark.parametrize(
    ("kind", "plain"),
    [(AgentRef, ["a"]), (AgentRef, ["a", [0, "xx"]]), (AgentRef, None), (Load, ["1", 0, 0, 0, 0]), (HealthState, "no")],
)
def test_plain_refuses_what_is_no_value(kind: type[Any], plain: Any) -> None:
    with pytest.raises(ProtocolError):
        from_plain(kind, plain)


def test_plain_writes_no_value_of_an_unknown_type() -> None:
    @dataclasses.dataclass
    class Odd:
        value: object

    with pytest.raises(ProtocolError, match="object"):
        to_plain(Odd(object()))


def test_plain_keeps_infinity() -> None:
    assert through(float, math.inf) == math.inf
