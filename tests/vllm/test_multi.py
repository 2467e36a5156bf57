"""The connector beside vLLM's OffloadingConnector with a tier of kvxfer's, under MultiConnector, in either order, on
both engines: nothing of one makes the other's work be lost without a word.
"""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import pytest

from tests.support.vllm.checks import prompt, wait_free
from tests.support.vllm.engines import ROOT, Answer, Cluster, both_legs

pytestmark = pytest.mark.asyncio(loop_scope="package")

ROW = 4 * 2 * 2 * 64 * 128 * 4
"""Bytes of a block: layers, K and V, heads, dims, tokens, float32."""
BLOCKS, PROMPTS, TOKENS = 24, 20, 8
"""The prompts take four times the blocks."""
FAR_S = 90.0


def beside(cluster: Cluster, name: str, role: str, tier: pathlib.Path, *, is_first: bool) -> dict[str, Any]:
    """Settings of an engine whose connectors are kvxfer's, first or not, and vLLM's."""
    token = str(cluster.directory / "cluster-token")
    own = {
        "kv_connector": "KvxferConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"coordinator": cluster.address, "token_file": token, "agent_id": name},
    }
    extra = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "tests.support.vllm.host_tiering",
        "cpu_bytes_to_use": 64 * ROW,
        "secondary_tiers": [{"type": "kvxfer", "store": "file", "path": str(tier), "capacity_bytes": 1 << 30}],
    }
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [own, other] if is_first else [other, own]},
    }


@pytest.mark.parametrize("is_first", [True, False], ids=["kvxfer first", "offloading first"])
async def test_beside_an_offloading_connector_every_prompt_is_right_and_accounted_for(
    cluster: Cluster, tmp_path: pathlib.Path, is_first: bool
) -> None:
    place = "first" if is_first else "second"
    names = [f"p-{place}", f"d-{place}"]
    for name, role in zip(names, ("kv_producer", "kv_consumer"), strict=True):
        (tmp_path / name).mkdir()
        transfer = beside(cluster, name, role, tmp_path / name, is_first=is_first)
        environment = {"PYTHONPATH": str(ROOT)}
        room = {"num_gpu_blocks_override": BLOCKS + 1, "max_num_seqs": 6}
        await cluster.start(name, None, transfer=transfer, environment=environment, **room)
    prefill, decode = (cluster[name] for name in names)
    try:
        await asyncio.gather(prefill.wait_ready(), decode.wait_ready())
        prompts = [prompt(300 + 40 * number, seed=f"{place} {number}") for number in range(PROMPTS)]
        wanted = [(await cluster["mono"].generate(ids, TOKENS)).tokens for ids in prompts]

        async def ask(number: int, *, is_aborted: bool = False) -> Answer | None:
            legs = both_legs(prefill, decode)
            reading = decode.add(prompts[number], TOKENS, {**legs[1], "timeout_s": 30.0})
            computing = prefill.add(prompts[number], 1, legs[0])
            if is_aborted:
                await asyncio.sleep(0.015 * number)  # at another moment of each
                await asyncio.gather(decode.abort(reading), prefill.abort(computing))
                return None
            answer = await decode.wait(reading, FAR_S)
            await prefill.wait(computing, FAR_S)
            return answer

        fresh = await asyncio.gather(*(ask(number) for number in range(PROMPTS)))
        again = await asyncio.gather(*(ask(number) for number in range(PROMPTS)))
        half = await asyncio.gather(*(ask(number, is_aborted=number % 2 == 0) for number in range(PROMPTS)))
        for answers in (fresh, again, half):
            for answer, tokens in zip(answers, wanted, strict=True):
                if answer is not None:
                    assert (answer.tokens, answer.report["code"]) == (tokens, "")
        assert all(answer is not None and answer.report["bytes"] > 0 for answer in fresh)
        passed_over = 0
        for answer in again:
            assert answer is not None
            is_passed_over = "another connector" in answer.report["text"]
            # The other one may have stored only the first block of a prompt before the next took its place.
            assert answer["cached"] >= (128 if is_passed_over else 256)
            assert is_passed_over == (answer.report["bytes"] == 0)
            passed_over += is_passed_over
        assert (passed_over == 0) if is_first else (passed_over > 0)
        await wait_free(decode, BLOCKS, within_s=5.0)
        await wait_free(prefill, BLOCKS, within_s=5.0)
    finally:
        for name in names:
            await cluster.engines.pop(name).stop()
