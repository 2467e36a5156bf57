"""Each alert, over what the running service exports: quiet before the fault, and firing while it lasts. The pages are
scraped from real processes, and ``promtool`` evaluates the rules over them.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from kvxfer.policy.pairs import PairVerdict
from kvxfer.types import Role
from tests.support.alerts import FAULT_AT_M, MISSING, PROMTOOL, alerts, firing, is_firing, samples, series
from tests.support.e2e.client import ask, completion, leg, new_transfer_id
from tests.support.e2e.cluster import Cluster
from tests.support.etcd import etcd_nodes, needs_etcd
from tests.support.fake_workers import FakeWorker, eventually, failing, router_over
from tests.support.routers import site
from tests.support.trust import ClusterAuthority, coordinator_process

pytestmark = [
    pytest.mark.checkout,
    pytest.mark.nightly,
    pytest.mark.skipif(PROMTOOL is None, reason=MISSING),
]

PROMPT = list(range(5, 105))
SHOWN: set[str] = set()
"""Alerts that a test here fires."""


def fires(*names: str) -> set[str]:
    SHOWN.update(names)
    return set(names)


PAIR = fires("KvxferPairFails")
COORDINATOR = fires("KvxferCoordinatorLost")
STORE = fires("KvxferStoreUnavailable")
CERTIFICATE = fires("KvxferCertificateEnds")
NO_PREFILL = fires("KvxferPromptsComputedAtDecode")
NOT_READY = fires("KvxferRouterNotReady", "KvxferRequestsFail")
STRANDED = fires("KvxferBlocksStranded")
NOT_FETCHED = fires("KvxferPromptsNobodyFetched")
TRANSFERS = fires("KvxferTransfersFail")
LOST = fires("KvxferPrefillWorkersLost")
OUT = fires("KvxferWorkerOut")
RETRIES = fires("KvxferRetriesRefused")
ABSENT = fires("KvxferRouterAbsent")


async def page(url: str) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
        answer = await client.get(f"{url}/metrics")
        assert answer.status_code == 200
        return answer.text


async def has(url: str, line: str) -> bool:
    """Whether a page of metrics has a line that begins so."""
    return any(one.startswith(line) for one in (await page(url)).splitlines())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    from kvxfer.engine.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("alerts") / "tiny", max_position_embeddings=1024, seed=1)


@pytest.fixture
async def cluster(tmp_path: pathlib.Path, model: pathlib.Path) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path, model) as cluster:
        yield cluster


async def asked(cluster: Cluster) -> int:
    return (await ask(cluster.url("router"), completion(PROMPT, 4, "tiny"))).status


async def check_fires(
    wanted: set[str], directory: pathlib.Path, urls: dict[str, str], fault: Callable[[], Awaitable[None]]
) -> None:
    """Scrape ``urls`` (by job), do the fault, scrape again: ``wanted`` fire over the second page and not the first."""
    before = {job: await page(url) for job, url in urls.items()}
    await fault()
    pages = {job: (before[job], await page(url)) for job, url in urls.items()}
    early, late = await asyncio.to_thread(firing, pages, wanted, directory)
    assert early == set()
    assert late == wanted


async def test_prompts_that_no_prefill_worker_took(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    await cluster.whole({"p1": {}, "d1": {}})
    assert await asked(cluster) == 200

    async def fault() -> None:
        await cluster.stop("p1")
        await cluster.seen("d1")
        assert await asked(cluster) == 200  # right, and computed at decode

    await check_fires(NO_PREFILL, tmp_path, {"router": cluster.url("router")}, fault)


async def test_a_coordinator_that_is_gone(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    await cluster.whole({"d1": {}})
    urls = {"router": cluster.url("router"), "decode": cluster.url("d1")}

    async def fault() -> None:
        await cluster.kill("coordinator")
        await eventually(lambda: has(urls["router"], "kvxfer_router_coordinator_connected 0"), within_s=30)
        await eventually(lambda: has(urls["decode"], "kvxfer_coordinator_connected 0"), within_s=30)
        assert await asked(cluster) == 200

    await check_fires(COORDINATOR, tmp_path, urls, fault)
    only_workers = {"decode": (await page(urls["decode"]),) * 2}
    assert firing(only_workers, COORDINATOR, tmp_path)[1] == COORDINATOR


@needs_etcd
async def test_a_store_that_cannot_be_had(tmp_path: pathlib.Path) -> None:
    """What is running goes on, and only an alert shows it."""
    with etcd_nodes(tmp_path, 1) as nodes:
        options = {"store": f"etcd:{nodes.endpoints}", "metrics_port": "0"}
        async with coordinator_process(tmp_path, options) as coordinator:
            up = "kvxfer_coordinator_store_available 1"
            await eventually(lambda: has(coordinator.metrics_url, up), within_s=30)

            async def fault() -> None:
                nodes.kill(0)
                await eventually(lambda: has(coordinator.metrics_url, up[:-1] + "0"), within_s=30)

            await check_fires(STORE, tmp_path, {"coordinator": coordinator.metrics_url}, fault)


async def test_a_certificate_that_nobody_renews(tmp_path: pathlib.Path) -> None:
    """From 20 days to 5, by files that changed: the alert goes by the certificate that is used."""
    authority = ClusterAuthority(tmp_path / "certs")
    options = {**authority.coordinator_options(days=20), "metrics_port": "0"}
    async with coordinator_process(tmp_path, options) as coordinator:
        name = "kvxfer_coordinator_certificate_ends_timestamp_seconds"

        async def ends() -> str:
            page_now = await page(coordinator.metrics_url)
            return next(line for line in page_now.splitlines() if line.startswith(f"{name} "))

        first = await ends()

        async def fault() -> None:
            authority.coordinator_options(days=5)

            async def changed() -> bool:
                return await ends() != first

            await eventually(changed, within_s=30)

        await check_fires(CERTIFICATE, tmp_path, {"coordinator": coordinator.metrics_url}, fault)


async def test_a_router_without_workers(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    await cluster.whole({"d1": {}})
    assert await asked(cluster) == 200

    async def fault() -> None:
        await cluster.stop("d1")
        await cluster.seen()
        assert await asked(cluster) == 503

    await check_fires(NOT_READY, tmp_path, {"router": cluster.url("router")}, fault)


def lasting(text: str, job: str, minutes: int, *end: str) -> list[dict[str, str]]:
    """What was scraped, for so many minutes, and then ``end``."""
    once = samples(text, job)
    firsts = [(line, line["values"].partition("x")[0]) for line in series(once, once)]
    return [{**line, "values": " ".join((f"{first}x{minutes}", *end))} for line, first in firsts]


async def test_routers_that_are_gone(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    """What a router exported ends with it. All else is scraped as before, also where another service has a router."""
    await cluster.whole({"d1": {}})
    url = cluster.url("router")
    await eventually(lambda: has(url, "kvxfer_router_ready 1"), within_s=30)
    router, decode = await page(url), await page(cluster.url("d1"))
    assert await asked(cluster) == 200
    await cluster.kill("router")
    with pytest.raises(httpx.ConnectError):
        await page(url)
    gone = lasting(router, "routers", FAULT_AT_M - 1, "stale") + lasting(decode, "decode", 200)
    others = lasting(router, "others", 200)
    [alert] = ABSENT

    async def firing_at(lines: list[dict[str, str]], *minutes: int) -> list[bool]:
        return [await asyncio.to_thread(is_firing, alert, f"{at_m}m", lines, tmp_path) for at_m in minutes]

    begins = (FAULT_AT_M - 1, FAULT_AT_M + 1, FAULT_AT_M + 3)
    assert await firing_at(gone, *begins, 180) == [False, False, True, True]
    assert await firing_at(gone + others, *begins, 60, 70) == [False, False, True, True, False]


async def test_blocks_that_are_kept_where_nothing_runs(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    await cluster.coordinator()
    await cluster.worker("p1", "prefill", grant_ttl_s=600.0)

    async def fault() -> None:
        body = leg(completion(PROMPT, 4, "tiny"), new_transfer_id(), "prefill", "p1", "absent")
        assert (await ask(cluster.url("p1"), body)).status == 200

    await check_fires(STRANDED, tmp_path, {"prefill": cluster.url("p1")}, fault)


async def test_prompts_that_nobody_fetches(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    await cluster.coordinator()
    await cluster.worker("p1", "prefill", grant_ttl_s=0.5)

    async def fault() -> None:
        body = leg(completion(PROMPT, 4, "tiny"), new_transfer_id(), "prefill", "p1", "absent")
        assert (await ask(cluster.url("p1"), body)).status == 200
        expired = 'kvxfer_grants_ended_total{state="expired"} 1'
        await eventually(lambda: has(cluster.url("p1"), expired), within_s=30)

    await check_fires(NOT_FETCHED, tmp_path, {"prefill": cluster.url("p1")}, fault)


async def test_transfers_that_fail(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    """A decode leg whose prompt was never asked of its prefill worker: the answer is right, the transfer failed."""
    await cluster.whole({"p1": {}, "d1": {}})
    assert await asked(cluster) == 200

    async def fault() -> None:
        body = leg(completion(PROMPT, 4, "tiny"), new_transfer_id(), "decode", "p1", "d1")
        assert (await ask(cluster.url("d1"), body)).status == 200

    await check_fires(TRANSFERS, tmp_path, {"decode": cluster.url("d1")}, fault)


async def test_a_pair_that_fails(tmp_path: pathlib.Path) -> None:
    fakes = [FakeWorker(name, Role.PREFILL) for name in ("p0", "p1")] + [FakeWorker(name) for name in ("d0", "d1")]
    async with router_over(*fakes) as router:
        refs = {candidate.agent_id: candidate.member.ref for candidate in router.workers.candidates()}

        async def fault() -> None:
            router.workers.pair_succeeded(refs["p0"], refs["d1"])
            router.workers.pair_succeeded(refs["p1"], refs["d0"])
            verdicts = [router.workers.pair_failed(refs["p0"], refs["d0"], f"r{number}") for number in range(3)]
            assert verdicts[-1] is PairVerdict.PAIR

        await check_fires(PAIR, tmp_path, {"router": router.url}, fault)


async def test_a_worker_that_fails_is_out(tmp_path: pathlib.Path) -> None:
    fakes = [FakeWorker("d0"), FakeWorker("d1")]
    async with router_over(*fakes, eject_base_s=600.0, eject_cap_s=600.0) as router:
        assert (await router.complete()).status_code == 200

        async def fault() -> None:
            fakes[0].always_fails = failing(500, "internal", retryable=True)
            for _ in range(12):
                assert (await router.complete()).status_code == 200
            await eventually(lambda: has(router.url, 'kvxfer_router_workers{state="out"} 1'))

        await check_fires(OUT, tmp_path, {"router": router.url}, fault)


async def test_a_budget_of_retries_that_is_used_up(tmp_path: pathlib.Path) -> None:
    fakes = [FakeWorker("d0"), FakeWorker("d1")]
    async with router_over(*fakes, retry_share=0.0, retry_floor_per_s=0.0) as router:
        assert (await router.complete()).status_code == 200

        async def fault() -> None:
            for fake in fakes:
                fake.always_fails = failing(500, "internal", retryable=True)
            for _ in range(20):
                await router.complete()

        await check_fires(RETRIES, tmp_path, {"router": router.url}, fault)


async def test_requests_that_lose_their_prefill_worker(tmp_path: pathlib.Path) -> None:
    flags = ("--failures-to-eject=1000", "--retry-floor-per-s=1000")
    async with site(1, 1, router_flags=flags) as there:
        assert (await there.complete()).status_code == 200

        async def fault() -> None:
            there.prefillers[0].engines[0].fault("status", status=500, leg="prefill")
            for number in range(5):
                await there.complete(prompt=f"Say {number}.")

        await check_fires(LOST, tmp_path, {"router": there.router.url}, fault)


async def test_a_service_at_work_fires_none(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    await cluster.whole({"p1": {}, "d1": {}})
    urls = {"router": cluster.url("router"), "prefill": cluster.url("p1"), "decode": cluster.url("d1")}
    before = {job: await page(url) for job, url in urls.items()}
    for number in range(4):
        answer = await ask(cluster.url("router"), completion([number + 5, *PROMPT], 4, "tiny"))
        assert answer.prefill == "remote"
    await cluster.assert_drained()
    pages = {job: (before[job], await page(url)) for job, url in urls.items()}
    assert await asyncio.to_thread(firing, pages, set(alerts()), tmp_path) == (set(), set())


def made_up(engine: str, failed: int, expired: int, blocks: int, running: int) -> str:
    """A page of an engine that is not kvxfer's, by docs/metrics.md: it was not scraped from one."""
    label = 'model_name="m"'
    said = [
        ("counter", "kvxfer_loads_total", f'{label},outcome="committed",lane="stream"', 100),
        ("counter", "kvxfer_loads_total", f'{label},outcome="peer_gone",lane="none"', failed),
        ("gauge", "kvxfer_unread_blocks", label, blocks),
    ]
    if engine == "vllm":
        said += [("counter", "kvxfer_expired_prompts_total", label, expired)]
        said += [("gauge", name, label, running) for name in ("num_requests_running", "num_requests_waiting")]
    else:
        said += [("gauge", "num_running_reqs", label, running)]
    lines = []
    for kind, name, labels, value in said:
        lines += [f"# TYPE {engine}:{name} {kind}"] if f":{name}" not in "".join(lines) else []
        lines += [f"{engine}:{name}{{{labels}}} {value}"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_alerts_about_engines_of_others(engine: str, tmp_path: pathlib.Path) -> None:
    wanted = TRANSFERS | STRANDED | (NOT_FETCHED if engine == "vllm" else set())
    well = made_up(engine, failed=0, expired=0, blocks=40, running=3)
    broken = made_up(engine, failed=10, expired=1, blocks=5, running=0)
    assert firing({"engine": (well, well)}, wanted, tmp_path) == (set(), set())
    assert firing({"engine": (well, broken)}, wanted, tmp_path) == (set(), wanted)


def test_every_alert_is_fired_here() -> None:
    assert set(alerts()) == SHOWN
