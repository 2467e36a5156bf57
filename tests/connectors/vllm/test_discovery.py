"""Engines without a coordinator: the request carries the agent metadata of its source."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.steps import LoadOrder, RemotePrompt
from kvxfer.types import Incarnation
from tests.support.vllm_connector.pair import Rank, finish_order, load_order, new_id, two_ranks, until

ALONE = ConnectorOptions.from_config("kv_both", "x", {"discovery": True, "kv_lease_duration": 0.8})


def discovered(order: LoadOrder, p: Rank, metadata: str | None = None) -> LoadOrder:
    return dataclasses.replace(
        order,
        incarnations=(p.agent.ref.incarnation,),
        agent_metadata=(p.agent.export_metadata() if metadata is None else metadata,),
    )


@pytest.mark.parametrize("has_direct", [False, True])
async def test_unregistered_peer_fetches_a_computed_prompt(has_direct: bool) -> None:
    async with two_ranks(ALONE) as (p, d):
        p.forward(finish_order((4, 5, 6)), [4, 5, 6])
        done = await d.load(discovered(load_order(0, (0, 1, 2), has_direct=has_direct), p))
        assert done.error is None
        assert (d.memory[:, [0, 1, 2]] == p.memory[:, [4, 5, 6]]).all()
        await until(lambda: bool(p.freed))


async def test_unregistered_peer_releases_a_prompt_that_it_does_not_need() -> None:
    """The first that the prefill engine hears of it, long before the prompt's time is over."""
    async with two_ranks(dataclasses.replace(ALONE, kv_lease_duration=60.0)) as (p, d):
        p.forward(finish_order((4, 5, 6)), [4, 5, 6])
        d.loads.release(RemotePrompt("r", new_id(), ("p",), (p.agent.ref.incarnation,), (p.agent.export_metadata(),)))
        await until(lambda: bool(p.freed))


async def test_unregistered_peer_that_waits_keeps_the_prompt() -> None:
    async with two_ranks(ALONE) as (p, d):
        p.forward(finish_order((4, 5, 6)), [4, 5, 6])
        order = discovered(load_order(0, (0, 1, 2), has_direct=True), p)
        d.loads.keep(
            [RemotePrompt(order.request_id, order.transfer_id, order.sources, order.incarnations, order.agent_metadata)]
        )
        began_s = time.monotonic()
        while time.monotonic() - began_s < 2 * ALONE.kv_lease_duration:
            assert not p.freed
            await asyncio.sleep(0.02)
        assert (await d.load(order)).error is None


@pytest.mark.parametrize("kind", ["no metadata", "another incarnation"])
async def test_load_with_wrong_metadata_fails_at_once(kind: str) -> None:
    async with two_ranks(ALONE) as (p, d):
        p.forward(finish_order((4, 5, 6)), [4, 5, 6])
        order = discovered(
            load_order(0, (0, 1, 2), has_direct=True), p, "no metadata" if kind == "no metadata" else None
        )
        if kind == "another incarnation":
            order = dataclasses.replace(order, incarnations=(Incarnation(1, bytes(16)),))
        began_s = time.monotonic()
        done = await d.load(order)
        assert done.error is not None
        assert (done.report.code, done.report.text) == (
            "peer_gone",
            "the request's metadata does not lead to agent 'p'",
        )
        assert time.monotonic() - began_s < 1.0
        assert d.agent.members() == ()


async def test_engines_with_a_coordinator_ignore_agent_metadata(p: Rank, d: Rank) -> None:
    p.forward(finish_order((4, 5, 6)), [4, 5, 6])
    assert (await d.load(discovered(load_order(0, (0, 1, 2), has_direct=True), p, "no metadata"))).error is None
