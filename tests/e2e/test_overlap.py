"""The pull runs while the prompt is still being computed."""

from __future__ import annotations

import statistics

from tests.support.e2e.client import ask, completion
from tests.support.e2e.cluster import running
from tests.support.e2e.reference import make_prompt

PROMPT_TOKENS = 1000
CHUNK_TOKENS = 128
ROUNDS = 5
EARLY_SHARE = 0.8
"""Of 63 blocks the last chunk brings 7: at most 56, 89 %, can be there before; 80 % is 51 of them."""


async def test_most_bytes_are_pulled_before_prefill_ends(tmp_path, slow_model, slow_reference) -> None:
    async with running(tmp_path, slow_model, {"p1": {"chunk_tokens": CHUNK_TOKENS}, "d1": {}}) as cluster:
        shares = []
        for seed in range(ROUNDS):
            prompt = make_prompt(PROMPT_TOKENS, seed=seed)
            answer = await ask(cluster.url("router"), completion(prompt, 4, "slow"))
            account = answer.account
            assert account["prefill"] == "remote", account
            assert account["blocks_moved"] == 63
            shares.append(account["bytes_before_prefill_end"] / account["bytes_moved"])
            slow_reference.check(answer.token_ids, prompt, 4)
        print(
            f"{PROMPT_TOKENS} tokens in chunks of {CHUNK_TOKENS}: pulled before prefill ended: "
            + ", ".join(f"{share:.1%}" for share in shares)
        )
        assert statistics.median(shares) >= EARLY_SHARE
        await cluster.assert_drained()
