"""Two coordinators with certificates on one etcd: what one holds, the other tells."""

from __future__ import annotations

import logging
import pathlib

import pytest

from kvxfer.errors import ForbiddenError
from kvxfer.rpc import MembershipWatch, drain
from kvxfer.trust.identity import CertRole
from kvxfer.types import Load
from tests.support.coordinator import running, until
from tests.support.etcd import etcd_nodes, needs_etcd
from tests.support.trust import CertifiedAgent, ClusterAuthority

pytestmark = needs_etcd


@pytest.fixture
def ca(tmp_path: pathlib.Path) -> ClusterAuthority:
    return ClusterAuthority(tmp_path / "certs")


@pytest.mark.parametrize("whole_view_max", [256, 0])
async def test_loads_and_keys_cross_between_certified_coordinators(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: pathlib.Path,
    ca: ClusterAuthority,
    caplog: pytest.LogCaptureFixture,
    whole_view_max: int,
) -> None:
    caplog.set_level(logging.INFO, "kvxfer.audit")
    with etcd_nodes(tmp_path_factory.mktemp("etcd"), 1) as nodes:
        store = {"store": f"etcd:{nodes.endpoints}", "whole_view_max": whole_view_max}
        async with (
            running(tmp_path, **store, **ca.coordinator_options("c0")) as one,
            running(tmp_path, **store, **ca.coordinator_options("c1")) as two,
        ):
            agents = {
                name: CertifiedAgent(cluster.address, name, ca.followed(CertRole.WORKER, name))
                for name, cluster in (("w0", one), ("w1", two))
            }
            for agent in agents.values():
                await agent.session.start()
            agents["w0"].session.ask("w1")
            await until(lambda: "w1" in agents["w0"].keys and "w0" in agents["w1"].keys, "each to know the other")
            assert agents["w0"].keys["w1"] == agents["w1"].keys["w0"]
            audited = [vars(record) for record in caplog.records if vars(record).get("call") == "acquaint"]
            if whole_view_max == 0:
                assert {(line["caller"], line["outcome"]) for line in audited} >= {
                    ("kvxfer://default/coordinator/c0", "ok")
                }
            else:
                assert audited == []
            agents["w0"].session.set_load(Load(queued_requests=7))
            router = ca.followed(CertRole.ROUTER, "r0")
            async with MembershipWatch(two.address, b"", tls=router) as watch:
                await watch.wait_connected()
                await until(
                    lambda: {7} <= {member.load.queued_requests for member in watch.membership.members},
                    "the load of w0 at the other coordinator",
                )
            with pytest.raises(ForbiddenError):
                await drain(two.address, b"", "w0", tls=ca.followed(CertRole.COORDINATOR, "c9"))
            for agent in agents.values():
                await agent.session.close()
