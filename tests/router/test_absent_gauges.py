"""A gauge of a part that is not there is absent: 0 would say that the part is there and ill."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.coordinator.metrics import CoordinatorMetrics
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.following import following
from kvxfer.router.metrics import RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.types import Membership, Role
from tests.support.fake_workers import free_port
from tests.support.fleet import fleet, member, stock

CONNECTED = "kvxfer_router_coordinator_connected"
READY = "kvxfer_router_workers_ready"
CERTIFICATE = "kvxfer_coordinator_certificate_ends_timestamp_seconds"


def page(workers: Workers) -> str:
    return RouterMetrics(workers).render().decode()


def test_a_router_without_a_coordinator_says_nothing_of_one() -> None:
    workers, _ = fleet()
    workers.replace("flags", [stock("d")])
    assert CONNECTED not in page(workers)


@pytest.mark.parametrize(("is_connected", "value"), [(False, "0.0"), (True, "1.0")])
def test_a_router_with_a_coordinator_says_whether_it_hears_it(is_connected: bool, value: str) -> None:
    workers, _ = fleet()
    workers.is_connected = is_connected
    assert f"{CONNECTED} {value}\n" in page(workers)


async def test_a_coordinator_that_was_never_heard_is_there() -> None:
    workers, _ = fleet()
    options = RouterOptions(coordinator=f"127.0.0.1:{free_port()}")
    task = asyncio.create_task(follow(options, workers))
    await asyncio.sleep(0)
    assert workers.is_connected is False
    task.cancel()
    await asyncio.wait({task})


async def follow(options: RouterOptions, workers: Workers) -> None:
    async with following(options, workers, b"0123456789abcdef0123456789abcdef"):
        await asyncio.Event().wait()


def test_a_part_without_any_worker_is_absent_until_there_was_one() -> None:
    workers, _ = fleet()
    metrics = RouterMetrics(workers)
    workers.replace("flags", [stock("d")])
    assert f'{READY}{{part="decode"}} 1.0\n' in metrics.render().decode()
    assert f'{READY}{{part="prefill"}}' not in metrics.render().decode()
    workers.update(Membership(1, (member("p", Role.PREFILL),)))
    assert f'{READY}{{part="prefill"}} 1.0\n' in metrics.render().decode()
    workers.update(Membership(2))
    assert f'{READY}{{part="prefill"}} 0.0\n' in metrics.render().decode()


def test_a_coordinator_without_tls_has_no_certificate_that_ends() -> None:
    from prometheus_client import generate_latest

    metrics = CoordinatorMetrics()
    assert CERTIFICATE not in generate_latest(metrics.registry).decode()
    for ends_s in (1.5, 2.5):
        metrics.certificate_ends(ends_s)
        assert f"{CERTIFICATE} {ends_s}\n" in generate_latest(metrics.registry).decode()
