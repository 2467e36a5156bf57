"""Workers over real agents and a real coordinator, all in this process: the prompt's bytes cross a real lane."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from kvxfer.coordinator.options import CoordinatorOptions
from kvxfer.coordinator.server import serve as serve_coordinator
from kvxfer.types import Lane, Role
from tests.support.engine.engine_harness import make_prompt, new_id, reference
from tests.support.engine.worker_harness import body, params, serving


@contextlib.asynccontextmanager
async def coordinator(token_file):
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    options = CoordinatorOptions(token_file=str(token_file), stop_grace_s=0.2)
    task = asyncio.create_task(serve_coordinator(options, on_ready=ready.set_result, stop=stop))
    await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield ready.result()["address"]
    finally:
        stop.set()
        await task


@pytest.fixture
async def cluster(tmp_path):
    async with coordinator(tmp_path / "token") as address:
        yield {"coordinator": address, "token_file": str(tmp_path / "token")}


async def both_legs(p, d, prompt, transfer_id, **more):
    legs = [body(prompt, kv_transfer_params=params(role, transfer_id), **more) for role in ("prefill", "decode")]
    done, answer = await asyncio.gather(
        p.client.post("/v1/completions", json=legs[0]), d.client.post("/v1/completions", json=legs[1])
    )
    assert done.status_code == 200, done.text
    assert answer.status_code == 200, answer.text
    return done.json(), answer.json()


@pytest.mark.parametrize("lane", [Lane.MAPPED, Lane.STREAM])
async def test_prefill_and_decode_equal_the_single_process(tiny_path, tiny_model, cluster, lane):
    common = {**cluster, "lanes": (lane,), "record_block_digests": True, "chunk_tokens": 32}
    async with (
        serving(tiny_path, role=Role.PREFILL, agent_id="p", **common) as p,
        serving(tiny_path, role=Role.DECODE, agent_id="d", **common) as d,
    ):
        prompts = [make_prompt(length) for length in (1, 2, 15, 16, 17, 32, 33, 500)]
        ids = [new_id() for _ in prompts]
        answers = await asyncio.gather(
            *(both_legs(p, d, prompt, transfer_id) for prompt, transfer_id in zip(prompts, ids, strict=True))
        )
        source = (await p.client.get("/debug/block-digests")).json()
        destination = (await d.client.get("/debug/block-digests")).json()
        for prompt, transfer_id, (_, answer) in zip(prompts, ids, answers, strict=True):
            assert answer["choices"][0]["token_ids"] == reference(tiny_model, prompt, 8)
            account = answer["kvxfer"]
            if len(prompt) == 1:
                continue
            assert account["failure"] is None, account
            assert account["lane"] == lane
            assert account["lane_reason"]
            theirs, ours = source[f"{transfer_id}/source"], destination[f"{transfer_id}/destination"]
            assert theirs["blocks"][ours["first"] :] == ours["blocks"]
            assert len(ours["blocks"]) == account["blocks_moved"]
        for worker in (p, d):
            now = await worker.wait_idle()
            assert now["pool"]["quarantined"] == 0
        metrics = (await d.client.get("/metrics")).text
        assert f'kvxfer_transfers_total{{lane="{lane}",outcome="committed"}} 7.0' in metrics


async def test_a_prefill_leg_that_never_comes_is_given_up_with_the_client(tiny_path, cluster):
    async with (
        serving(tiny_path, role=Role.PREFILL, agent_id="p", **cluster),
        serving(tiny_path, role=Role.DECODE, agent_id="d", **cluster) as d,
    ):
        content = body(make_prompt(40), kv_transfer_params=params("decode", new_id()))
        with pytest.raises(httpx.ReadTimeout):
            await d.client.post("/v1/completions", json=content, timeout=httpx.Timeout(30, read=0.3))
        await d.wait_idle()


async def test_a_source_that_is_gone_is_recomputed(tiny_path, tiny_model, cluster):
    async with serving(tiny_path, role=Role.DECODE, agent_id="d", **cluster) as d:
        async with serving(tiny_path, role=Role.PREFILL, agent_id="p", **cluster):
            pending = asyncio.create_task(
                d.client.post(
                    "/v1/completions", json=body(make_prompt(40), kv_transfer_params=params("decode", new_id()))
                )
            )
            await asyncio.sleep(0.3)
        answer = (await pending).json()
        assert answer["choices"][0]["token_ids"] == reference(tiny_model, make_prompt(40), 8)
        assert answer["kvxfer"]["failure"] == "peer_gone"
        await d.wait_idle()
