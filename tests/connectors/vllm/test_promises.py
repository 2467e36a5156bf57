"""What a source may promise, and when: nothing before it is written, nothing that will be written again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvxfer.agent import Delivery
from kvxfer.connectors.vllm.groups import KvGroups
from kvxfer.connectors.vllm.scheduler import SchedulerHalf
from kvxfer.connectors.vllm.steps import ComputedBlocks, LoadOrder, StepOrders
from kvxfer.connectors.vllm.wire import Release
from kvxfer.errors import LimitExceededError
from tests.support.vllm_connector.pair import (
    LAYERS,
    OPTIONS,
    Rank,
    arrives,
    code_of,
    finish_order,
    is_idle,
    load_order,
    new_id,
    open_order,
    until,
)


async def test_blocks_of_another_prompt_of_the_step_are_announced_once_written(p: Rank, d: Rank) -> None:
    """Two prompts that begin alike come at once: vLLM counts as cached for the second what the first will write."""
    p.memory[...] = 0xEE  # another prompt's
    half = SchedulerHalf(OPTIONS, groups=KvGroups.plain(4), agents=("p",), mint=new_id, adapter_fingerprint=str)
    for seed, name in enumerate("ab", 1):
        params = {"do_remote_decode": True, "transfer_id": str(new_id(seed)), "destination": {"agent_id": "d"}}
        half.on_new_request(
            SimpleNamespace(
                request_id=name,
                prompt_token_ids=[*range(8), *[seed] * 5],
                num_prompt_tokens=13,
                kv_transfer_params=params,
            )
        )
    orders = half.build(
        SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id="a", block_ids=([3, 4, 5, 6],), num_computed_tokens=0),
                SimpleNamespace(req_id="b", block_ids=([3, 4, 7, 8],), num_computed_tokens=8),
            ],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
            num_scheduled_tokens={"a": 13, "b": 5},
            total_num_scheduled_tokens=18,
        )
    )
    loading = d.load(LoadOrder("l", new_id(2), ("p",), 0, (0, 1, 2), 12, orders.opens[1].content_digest, False))
    await asyncio.sleep(0.05)
    p.source.begin_step(orders)
    await asyncio.sleep(0.1)
    assert not d.memory.any()
    for layer in range(LAYERS):
        p.write(layer, [3, 4, 5, 7], 5)
        p.source.layer_saved(layer)
    p.source.step_saved()
    assert (await loading).error is None
    assert (d.memory[:, [0, 1, 2]] == p.memory[:, [3, 4, 7]]).all()


async def test_blocks_of_a_failed_forward_are_never_committed(p: Rank, d: Rank) -> None:
    p.memory[...] = 0xEE
    loading = d.load(load_order(0, (0, 1, 2), has_direct=False))
    await asyncio.sleep(0.05)
    p.source.begin_step(open_order(3))
    p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (4,)),)), [4])
    p.source.begin_step(StepOrders(True, chunks=(ComputedBlocks("r", (5, 6)),)))
    p.write(0, [5, 6], 0)
    p.source.layer_saved(0)
    p.source.step_failed()
    assert await code_of(loading) == "grant_revoked"
    assert not p.agent.statistics().grants.alive
    await is_idle(d)


async def test_blocks_of_a_forward_with_unknown_end_are_never_committed(p: Rank, d: Rank) -> None:
    """Where vLLM defers the end of a step to the draft model, a forward that raises has none: the next step begins."""
    p.memory[...] = 0xEE
    loading = d.load(load_order(0, (0, 1, 2), has_direct=False))
    await until(lambda: bool(p.source._early))
    p.source.begin_step(open_order(3))
    p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (4,)),)), [4])
    p.source.begin_step(StepOrders(True, chunks=(ComputedBlocks("r", (5, 6)),)))
    p.write(0, [5, 6], 0)
    p.forward(StepOrders(True), [7])
    assert await code_of(loading) == "grant_revoked"
    assert not p.agent.statistics().grants.alive
    await is_idle(d)


async def test_a_prompt_that_was_opened_for_a_reader_may_be_pulled_as_a_whole(p: Rank, d: Rank) -> None:
    p.source.begin_step(open_order(3))
    p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (4, 5, 6)),)), [4, 5, 6])
    p.source.begin_step(finish_order((4, 5, 6), "d"))
    await arrives(asyncio.wait_for(d.load(load_order(0, (0, 1, 2), has_direct=True)), 2.0), p, [4, 5, 6], d, [0, 1, 2])
    await until(lambda: p.freed == ["r"])


async def test_a_reader_that_confirms_slowly_is_told_every_part_in_order(
    p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = d.load(load_order(0, (0, 1, 2), has_direct=False))
    await asyncio.sleep(0.05)
    notify, refusals = p.agent.notify, iter(range(3))

    def full(agent_id: str, payload: bytes) -> Delivery:
        if next(refusals, None) is not None:
            raise LimitExceededError("1024 notifications are not confirmed")
        return notify(agent_id, payload)

    monkeypatch.setattr(p.agent, "notify", full)
    p.source.begin_step(open_order(3))
    for block in (4, 5, 6):
        p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (block,)),)), [block])
    over = await asyncio.wait_for(loading, 2.0)
    assert over.error is None
    assert next(refusals, None) is None
    assert (d.memory[:, [0, 1, 2]] == p.memory[:, [4, 5, 6]]).all()


@pytest.mark.parametrize("has_asked", [True, False])
async def test_an_engine_that_will_not_be_the_reader_cannot_let_go(p: Rank, d: Rank, has_asked: bool) -> None:
    if not has_asked:
        p.source.on_message("other", Release(new_id(), 0, 1))
    loading = d.load(load_order(0, (0, 1, 2), has_direct=False))
    await until(lambda: bool(p.source._early))
    if has_asked:
        p.source.on_message("other", Release(new_id(), 0, 1))
    p.source.begin_step(open_order(3))
    p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (4, 5, 6)),)), [4, 5, 6])
    await arrives(asyncio.wait_for(loading, 2.0), p, [4, 5, 6], d, [0, 1, 2])
