"""The chart's preStop of workers, run as a pod runs it: at real routers, over mock engines."""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys
from typing import Any

import pytest

from tests.support.certificates import Authority
from tests.support.child import environment
from tests.support.fake_workers import eventually
from tests.support.helm.chart import CHART
from tests.support.local_http import free_ports
from tests.support.routers import RouterProcess, Site, check, engines_of, site

pytestmark = [pytest.mark.checkout, pytest.mark.deep]

SCRIPT = CHART / "files" / "drain.sh"


class Pod:
    """What the script finds: a ``kvxfer`` and a ``python3``, and the variables that the chart gives it."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.admin_key = directory / "admin-key"
        self.admin_key.write_text("secret\n")
        for name, module in (("kvxfer", "-m kvxfer.cli"), ("python3", "")):
            program = directory / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
            program.chmod(0o755)
        self._path = f"{directory}{os.pathsep}{os.environ['PATH']}"

    async def drains(self, worker: dict[str, Any], routers: str, live_url: str, *, ca_file: str = "") -> str:
        """What the script prints; it must end without an error."""
        process = await asyncio.create_subprocess_exec(
            "sh",
            str(SCRIPT),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment(
                PATH=self._path,
                DRAIN_AGENT=worker["agent_id"],
                DRAIN_ROUTERS=routers,
                DRAIN_SECONDS="60",
                DRAIN_LIVE_URL=live_url,
                DRAIN_ADMIN_KEY_FILE=str(self.admin_key),
                DRAIN_CA_FILE=ca_file,
            ),
        )
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, out
        return out.decode()


@pytest.fixture
def pod(tmp_path: pathlib.Path) -> Pod:
    return Pod(tmp_path)


async def one_of(there: Site) -> tuple[dict[str, Any], str]:
    """A decode worker as the router lists it, and its URL."""
    url = there.decoders[0].engines[0].url
    return (await there.workers())[url], url


def admin(pod: Pod) -> tuple[str, ...]:
    return (f"--admin-key-file={pod.admin_key}",)


async def test_it_waits_for_what_runs_and_passes_over_a_router_that_is_away(pod: Pod) -> None:
    slow = ("--ttft-ms=5", "--itl-ms=50")
    async with site(1, 2, engine_flags=slow, router_flags=admin(pod)) as there:
        there.client.headers["authorization"] = "Bearer secret"
        worker, url = await one_of(there)
        running = [asyncio.create_task(there.complete(tokens=60)) for _ in range(4)]
        engine = there.decoders[0].engines[0]
        await eventually(lambda: asyncio.to_thread(lambda: engine.statistics()["running"] > 0))
        [nobody] = free_ports(1)
        said = await pod.drains(worker, f"http://127.0.0.1:{nobody} {there.router.url}", f"{url}/health")
        assert "is drained" in said
        assert engine.statistics()["running"] == 0
        for answer in await asyncio.gather(*running):
            check(answer, 60)
        assert (await one_of(there))[0]["is_drained_here"]


async def test_a_worker_that_does_not_answer_is_not_drained(pod: Pod) -> None:
    """Its container is restarted under the same name, which would stay drained."""
    async with site(1, 2, router_flags=admin(pod)) as there:
        there.client.headers["authorization"] = "Bearer secret"
        worker, _ = await one_of(there)
        [nobody] = free_ports(1)
        await pod.drains(worker, there.router.url, f"http://127.0.0.1:{nobody}/live")
        assert not (await one_of(there))[0]["is_drained_here"]


async def test_a_router_with_tls_is_asked_by_the_ca_of_its_secret(pod: Pod, tmp_path: pathlib.Path) -> None:
    authority = Authority(tmp_path)
    identity = authority.issue("router")
    with engines_of("decode", 1) as (mock,):
        url = mock.engines[0].url
        tls = (f"--tls-cert-file={identity.cert}", f"--tls-key-file={identity.key}")
        router = await asyncio.to_thread(RouterProcess, f"--decode={url}?name=pod-0", *tls, *admin(pod))
        try:
            assert router.url.startswith("https://")
            worker = {"agent_id": "pod-0"}
            said = await pod.drains(worker, router.url, f"{url}/health")
            assert "CERTIFICATE_VERIFY_FAILED" in said
            said = await pod.drains(worker, router.url, f"{url}/health", ca_file=authority.cert)
            assert "pod-0 is drained" in said
        finally:
            await asyncio.to_thread(router.stop)
