"""``/live`` and ``/health`` say that the router serves, ``/ready`` says what placement would."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.router.auth import ApiKeys
from kvxfer.types import Membership, Role
from tests.support.fake_workers import FakeWorker, Running, eventually, router_over


def pair() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("p0", Role.PREFILL), FakeWorker("d0", Role.DECODE)


async def ready(router: Running, query: str = "") -> tuple[int, str | None, str]:
    answer = await router.client.get(f"/ready{query}")
    body = answer.json()
    assert (body["status"] == "ready") == (answer.status_code == 200)
    assert ("retry-after" in answer.headers) == (answer.status_code == 503)
    return answer.status_code, body.get("reason"), body.get("message", "")


async def check_agrees(router: Running) -> bool:
    """Whether a request is served, and that ``/ready`` said the same before it."""
    status, _, _ = await ready(router)
    assert (await router.complete()).status_code == status
    return status == 200


async def test_ready_without_any_worker_is_503_and_live_is_200() -> None:
    async with router_over() as router:
        assert await ready(router) == (503, "no_worker", "no worker is known")
        assert await router.metric("kvxfer_router_ready") == 0
        live, health = await router.client.get("/live"), await router.client.get("/health")
        assert (live.status_code, health.status_code) == (200, 200)
        assert live.json() == health.json() == {"status": "ok", "coordinator_connected": True, "inflight": 0}


async def test_ready_is_what_placement_answers_as_workers_come_and_go() -> None:
    p, d = pair()
    async with router_over(p, d) as router:
        assert await check_agrees(router)
        assert await router.metric("kvxfer_router_ready") == 1
        assert await router.metric('kvxfer_router_workers_ready{part="decode"}') == 1
        router.publish(p)
        assert not await check_agrees(router)
        assert "no decode worker" in (await ready(router))[2]
        router.publish(d)
        assert await check_agrees(router)
        router.publish(p, d, is_draining=True)
        assert not await check_agrees(router)
        [entry, _] = (await router.client.get("/v1/workers")).json()["data"]
        assert entry["is_ready"] is False
        router.publish(p, d, is_suspect=True)
        assert await check_agrees(router)
        router.publish(p, d)
        assert [entry["is_ready"] for entry in (await router.client.get("/v1/workers")).json()["data"]] == [True, True]


async def test_ready_without_prefill_worker_where_the_decoder_may_not_prefill_is_503() -> None:
    """It said that it was ready while every request was refused."""
    p, d = pair()
    async with router_over(p, d, local_prefill="off") as router:
        assert await check_agrees(router)
        router.publish(d)
        assert not await check_agrees(router)
        assert "local prefill is off" in (await ready(router))[2]


async def test_ready_of_one_model_says_nothing_of_another() -> None:
    here, gone = FakeWorker("d0"), FakeWorker("d1", model="other")
    async with router_over(here, gone) as router:
        assert await ready(router, "?model=other") == (200, None, "")
        gone_member = gone.member
        router.publish(here)
        assert (await ready(router, "?model=other"))[:2] == (503, "no_worker")
        assert (await ready(router))[0] == 200
        router.workers.update(Membership(3, (gone_member,)))
        assert (await ready(router))[0] == 200


@pytest.mark.parametrize("is_served", [True, False])
async def test_losing_the_coordinator_changes_no_readiness(is_served: bool) -> None:
    p, d = pair()
    async with router_over(p, d) as router:
        router.publish(*((p, d) if is_served else (p,)))
        before = await ready(router)
        router.workers.is_connected = False
        assert await ready(router) == before
        assert await check_agrees(router) is is_served
        assert (await router.client.get("/live")).json()["coordinator_connected"] is False


async def test_a_draining_router_is_live_and_not_ready() -> None:
    d = FakeWorker("d0")
    d.hold = asyncio.Event()
    async with router_over(d, shutdown_grace_s=30.0) as router:
        held = asyncio.create_task(router.complete())
        await asyncio.wait_for(d.arrived.wait(), 5.0)
        router.stop.set()

        async def is_stopping() -> bool:
            return (await ready(router))[0] == 503

        await eventually(is_stopping)
        assert (await ready(router))[1] == "draining"
        live = await router.client.get("/live")
        assert (live.status_code, live.json()["status"]) == (200, "draining")
        d.hold.set()
        assert (await held).status_code == 200


async def test_ready_asks_for_no_key_and_then_names_no_model() -> None:
    async with router_over(FakeWorker("p0", Role.PREFILL, model="secret-model"), keys=ApiKeys(("one",))) as router:
        answer = await router.client.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "no_worker")
        assert "secret-model" not in answer.text
