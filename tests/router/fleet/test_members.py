"""The coordinator's members as workers."""

from __future__ import annotations

import dataclasses

import pytest

from kvxfer.router.fleet.members import workers_of
from kvxfer.types import Membership
from tests.support.fleet import member


def test_members_of_vllm_run_kvxfers_connector() -> None:
    [worker] = workers_of(Membership(1, (member("d", dialect="vllm"),)))
    assert (worker.dialect, worker.member.info.dialect, worker.source) == ("vllm-kvxfer", "vllm-kvxfer", "coordinator")
    assert worker.has_lease
    [worker] = workers_of(Membership(1, (member("d"),)))
    assert (worker.dialect, worker.bootstrap_port) == ("kvxfer", None)
    [worker] = workers_of(Membership(1, (member("d", dialect="sglang"),)))
    assert (worker.dialect, worker.bootstrap_port) == ("sglang", 8998)
    [worker] = workers_of(Membership(1, (member("d", dialect="another"),)))
    assert worker.dialect == "another"


def test_members_that_follow_an_engine_by_number_are_its_ranks() -> None:
    names = ("p", "p.1", "p.2", "p.4", "p.x")
    members = [member(name, dialect="vllm", port=name == "p") for name in names]
    members += [member("q", dialect="vllm"), member("q.1", dialect="vllm")]
    ranks = {worker.agent_id: worker.ranks for worker in workers_of(Membership(1, tuple(members)))}
    assert (ranks["p"], ranks["q"]) == (3, 1)


def test_ranks_of_pipeline_stages_do_not_divide_heads() -> None:
    names = ("p", "p.1", "p.2", "p.3")
    members = [member(name, dialect="vllm", port=name == "p") for name in names]
    staged = [dataclasses.replace(one, info=dataclasses.replace(one.info, stages="16,32")) for one in members]
    worker, *_ = workers_of(Membership(1, tuple(staged)))
    assert (worker.ranks, worker.tensor_ranks, worker.stages) == (4, 2, "16,32")
    worker, *_ = workers_of(Membership(1, tuple(members)))
    assert (worker.ranks, worker.tensor_ranks, worker.stages) == (4, 4, "")


@pytest.mark.parametrize("dialects", [("kvxfer", "kvxfer"), ("kvxfer", "vllm"), ("vllm", "kvxfer")])
def test_member_of_another_kind_with_such_a_name_is_no_rank(dialects: tuple[str, str]) -> None:
    members = (member("w", dialect=dialects[0]), member("w.1", dialect=dialects[1], port=0))
    assert [worker.ranks for worker in workers_of(Membership(1, members))] == [1, 1]


def test_members_that_share_an_address_are_told_apart_by_rank() -> None:
    engines = tuple(member(f"engine_dp{n}", dialect="vllm", port=7) for n in range(3))
    assert [worker.dp_rank for worker in workers_of(Membership(1, engines))] == [0, 1, 2]
    assert [worker.dp_rank for worker in workers_of(Membership(1, engines[1:2]))] == [None]
    assert [worker.dp_rank for worker in workers_of(Membership(1, (member("x_dp1"), member("x_dp2"))))] == [None, None]
