"""Under load, either role of real servers is stopped, or killed and replaced on the same address, by one with other
prefix caches: what was under way ends with a reason, and all later requests are answered as by one server (`make
test-sglang-e2e`).
"""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from tests.support.sglang.cluster import GONE_S, Cluster, Load, answers_are_those_of_one, ask, prompt_of
from tests.support.sglang.servers import Server

pytestmark = pytest.mark.timeout(900)

BEFORE, AFTER = 12, 24
"""Requests that succeed before a role is lost, and after it is back."""
STOPPED_S = 6.0
SOON_S = 60.0
LENGTHS = [5, 64, 300, 1900]
FLAGS = {"decode": ("--disaggregation-decode-enable-radix-cache",), "prefill": ("--disable-radix-cache",)}
"""Of one in a killed one's place. Only prefill has a prefix cache at first, then both have, then only decode."""


def server_of(cluster: Cluster, role: str) -> Server:
    return cluster.prefill if role == "prefill" else cluster.decode


def check_told(load: Load, role: str, lost_s: float) -> None:
    """The other role heard soon that this one is gone."""
    told = load.told(role, lost_s)
    print(f"\n{role} lost: {len(told)} failures at the other, after", [round(leg.ended_s - lost_s, 2) for leg in told])
    assert told, load.last_lines()
    for leg in told:
        assert "peer_gone" in leg.why, leg
        assert leg.ended_s - lost_s < GONE_S, leg


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_stopped_under_load(cluster: Cluster, role: str) -> None:
    server = server_of(cluster, role)
    async with Load(cluster) as load:
        await load.successes(BEFORE, SOON_S)
        await load.computing(2, SOON_S)
        stopped_s = time.monotonic()
        try:
            server.signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
        finally:
            server.signal(signal.SIGCONT)
        await load.successes(AFTER, SOON_S)
    check_told(load, role, stopped_s)
    await asyncio.to_thread(cluster.wait_returned)
    cluster.check_pools()


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_killed_and_replaced_under_load(cluster: Cluster, role: str) -> None:
    server = server_of(cluster, role)
    async with Load(cluster) as load:
        await load.successes(BEFORE, SOON_S)
        await load.computing(2, SOON_S)
        killed_s = time.monotonic()
        server.kill()
        for _ in range(2):  # nothing is remembered against the address, so a request may come as often as it likes
            begun_s = time.monotonic()
            answer = await asyncio.to_thread(ask, cluster.proxy.url, prompt_of(50))
            assert answer.status_code != 200
            assert time.monotonic() - begun_s < GONE_S, answer.text
        await asyncio.sleep(max(0.0, killed_s + GONE_S - time.monotonic()))
        server.flags = FLAGS[role]
        server.start()
        await asyncio.to_thread(server.wait_ready)
        await load.successes(AFTER, SOON_S)
        back_s = time.monotonic()
        await load.successes(AFTER, SOON_S)
    check_told(load, role, killed_s)
    failed = [one for one in load.asked if one.begun_s >= back_s and not one.decode.is_done]
    assert not failed, failed[:3]
    await asyncio.to_thread(answers_are_those_of_one, cluster, cluster.proxy.url, LENGTHS, 31)
    await asyncio.to_thread(cluster.wait_returned)
    cluster.check_pools()
