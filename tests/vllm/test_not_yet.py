"""A decode leg that was told "not yet" before another leg's load took most of the blocks: vLLM before 0.32 looks at
waiting requests in their order and stops at the first that gets no blocks, so that the finished load behind it would
never run, and nothing would be freed.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.support.vllm.checks import prompt, wait_free
from tests.support.vllm.engines import Cluster, both_legs

pytestmark = pytest.mark.asyncio(loop_scope="package")

BLOCKS = 23
"""That vLLM can give away, of 128 tokens; each prompt takes 14."""
LENGTH, TOKENS = 1780, 8
TIMEOUT_S = 30.0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_a_finished_load_runs_before_a_leg_that_waited_for_its_blocks(cluster: Cluster, policy: str) -> None:
    room = {"num_gpu_blocks_override": BLOCKS + 1, "enable_prefix_caching": False, "scheduling_policy": policy}
    decode = await cluster.start(f"tight-{policy}", "kv_consumer", extra={"unknown_wait_s": 60.0}, **room)
    slow = await cluster.start(f"slow-{policy}", "kv_producer", max_num_batched_tokens=64, pause_s=0.05)
    try:
        await asyncio.gather(decode.wait_ready(), slow.wait_ready())
        first, second = prompt(LENGTH, seed=f"first {policy}"), prompt(LENGTH, seed=f"second {policy}")
        wanted = [(await cluster["mono"].generate(ids, TOKENS)).tokens for ids in (first, second)]
        legs = both_legs(slow, decode)
        early = decode.add(first, TOKENS, {**legs[1], "timeout_s": 60.0})
        others = both_legs(slow, decode)
        late = decode.add(second, TOKENS, {**others[1], "timeout_s": 60.0})
        slow.add(second, 1, others[0])
        await wait_free(decode, BLOCKS - 14, within_s=10.0)  # the second one's load is under way
        slow.add(first, 1, legs[0])
        answers = [await decode.wait(request_id, TIMEOUT_S) for request_id in (late, early)]
        assert [answer.tokens for answer in answers] == [wanted[1], wanted[0]]
        assert [answer.report["code"] for answer in answers] == ["", ""]
        await wait_free(decode, BLOCKS)
    finally:
        for engine in (decode, slow):
            await cluster.engines.pop(engine.name).stop()
