"""Leg keys: what follows from what, which period it is, and who is given them over real gRPC."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.clock import NS_PER_S
from kvxfer.coordinator.leg_keys import LegKeys
from kvxfer.coordinator.options import CoordinatorOptions
from kvxfer.errors import ConfigError
from kvxfer.protocol.leg_keys import leg_key, leg_secret
from kvxfer.rpc import MembershipWatch
from kvxfer.types import AgentRef, Incarnation
from tests.support.coordinator import running, until
from tests.support.trust import CertifiedAgent

REF = AgentRef("w0", Incarnation(7, bytes(16)))
PERIOD_S = 3600.0


class HandClock:
    def __init__(self) -> None:
        self.now = 5 * NS_PER_S

    def now_ns(self) -> int:
        return self.now


@given(st.binary(min_size=32, max_size=32), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_keys_differ_by_root_period_and_incarnation(root: bytes, one: int, other: int) -> None:
    assert (leg_secret(root, one) == leg_secret(root, other)) == (one == other)
    secret = leg_secret(root, one)
    refs = [REF, AgentRef("w1", REF.incarnation), AgentRef("w0", Incarnation(8, bytes(16)))]
    keys = {leg_key(secret, ref) for ref in refs} | {secret, root}
    assert len(keys) == 5
    assert {len(key) for key in keys} == {32}


@given(st.floats(0, 1e10), st.floats(0, 10 * PERIOD_S), st.floats(0, PERIOD_S))
def test_a_worker_takes_what_a_router_shows_up_to_a_period_earlier_or_later(
    wall_s: float, later_s: float, apart_s: float
) -> None:
    """Both of any coordinator of the cluster, and whichever of the two was told longer ago."""
    root, clock = bytes(32), HandClock()
    first = LegKeys(root, clock, period_s=PERIOD_S, wall_s=wall_s)
    clock.now += round(later_s * NS_PER_S)
    accepted, secret = first.accepted_by(REF), first.secret()
    assert accepted[0] == leg_key(secret, REF)
    clock.now += round(apart_s * NS_PER_S)
    assert leg_key(first.secret(), REF) in accepted
    assert leg_key(secret, REF) in first.accepted_by(REF)


def test_coordinators_that_began_at_other_times_agree() -> None:
    clock = HandClock()
    first = LegKeys(bytes(32), clock, period_s=PERIOD_S, wall_s=1e9)
    clock.now += round(5.5 * PERIOD_S) * NS_PER_S
    second = LegKeys(bytes(32), clock, period_s=PERIOD_S, wall_s=1e9 + 5.5 * PERIOD_S)
    assert first.period == second.period
    assert first.secret() == second.secret()


def test_a_worker_takes_a_key_until_the_end_of_the_period_after_its_own() -> None:
    """Also where a period passes in which it is given none, and while it is given the same ones again."""
    clock = HandClock()
    keys = LegKeys(bytes(32), clock, period_s=PERIOD_S, wall_s=1e9)
    session = CertifiedAgent("127.0.0.1:1", "w0", None, token=b"t" * 32).session
    for periods in (1, 1, 1, 0, 2, 1, 0, 2, 2, 1):
        clock.now += round(periods * PERIOD_S) * NS_PER_S
        session._keep_leg_keys(keys.accepted_by(REF))
        assert session.leg_keys == keys.accepted_by(REF)


def test_keys_of_a_coordinator_that_was_replaced_stay_until_others_come() -> None:
    """One root after the other, and the first again: a router may hear of the change later than the worker."""
    clock = HandClock()
    first, second = (LegKeys(bytes([n]) * 32, clock, period_s=PERIOD_S, wall_s=1e9) for n in (1, 2))
    session = CertifiedAgent("127.0.0.1:1", "w0", None, token=b"t" * 32).session
    session._keep_leg_keys(first.accepted_by(REF))
    for now, before in ((second, first), (second, first), (first, second), (second, first)):
        session._keep_leg_keys(now.accepted_by(REF))
        assert session.leg_keys == now.accepted_by(REF) + before.accepted_by(REF)
        session._keep_leg_keys(())
    clock.now += round(PERIOD_S) * NS_PER_S
    session._keep_leg_keys(second.accepted_by(REF))
    assert session.leg_keys == second.accepted_by(REF)


def test_the_period_has_bounds() -> None:
    for value in (0.0, 0.5, -1.0, 1e9):
        with pytest.raises(ConfigError, match="leg_key_period_s"):
            CoordinatorOptions(leg_key_period_s=value)


@pytest.mark.parametrize(
    "more", [{}, {"heartbeats_a_s_max": 0.1, "whole_view_max": 0}], ids=["fast heartbeats", "few heartbeats"]
)
async def test_workers_get_their_own_and_watchers_the_secret(tmp_path: pathlib.Path, more: dict[str, Any]) -> None:
    """Also where a heartbeat is due every 20 s only, and nothing else changes."""
    async with running(tmp_path, leg_key_period_s=1.0, **more) as cluster:
        worker = CertifiedAgent(cluster.address, "w0", None, http_url="http://127.0.0.1:1", token=cluster.token)
        rank = CertifiedAgent(cluster.address, "w0.1", None, token=cluster.token)
        ref = await worker.session.start()
        await rank.session.start()
        assert rank.session.leg_keys == ()
        assert len(worker.session.leg_keys) == 3
        views: list[int] = []
        async with MembershipWatch(
            cluster.address, cluster.token, on_membership=lambda view: views.append(view.revision)
        ) as watch:
            secrets: list[bytes] = []

            def has_rotated() -> bool:
                secret = watch.leg_secret
                if secret and secret not in secrets:
                    secrets.append(secret)
                    assert leg_key(secret, ref) in worker.session.leg_keys, "the worker knows it before the router"
                return len(secrets) > 2

            await until(has_rotated, "the keys to be replaced twice")
            assert len(views) >= 3, "each new secret counts as a view"
            assert rank.session.leg_keys == ()
            assert len(worker.session.leg_keys) <= 6
        await rank.session.close()
        await worker.session.close()


async def test_only_routers_get_the_secret_by_certificate(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("cryptography")
    from kvxfer.trust.identity import CertRole
    from tests.support.trust import ClusterAuthority

    ca = ClusterAuthority(tmp_path / "ca")
    async with running(tmp_path, **ca.coordinator_options()) as cluster:
        found = {}
        for role in (CertRole.ROUTER, CertRole.OPERATOR):
            async with MembershipWatch(cluster.address, b"", tls=ca.followed(role, "x0")) as watch:
                await watch.wait_connected(20.0)
                found[role] = bool(watch.leg_secret)
        assert found == {CertRole.ROUTER: True, CertRole.OPERATOR: False}
