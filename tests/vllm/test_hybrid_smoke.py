"""The shortest way of a hybrid model through real vLLM: two engines, one prompt longer than a window, tokens and the
bytes of every group. For sliding windows (Gemma 3), and for states (Qwen3-Next); all kinds are in `test_hybrid`."""

from __future__ import annotations

import pathlib

import pytest

from tests.support.vllm.hybrid import alone, assert_same_group_bytes, assert_same_tokens, through, token_ids, trio
from tests.support.vllm.hybrid_models import KINDS

pytestmark = pytest.mark.asyncio

TOKENS = 300


@pytest.mark.parametrize("name", ["gemma3", "qwen3next"])
async def test_one_prompt_is_handed_over_by_tokens_and_bytes(tmp_path: pathlib.Path, name: str) -> None:
    async with trio(tmp_path, KINDS[name], has_mono=False) as pair:
        ids = token_ids(TOKENS, "smoke")
        whole = await alone(pair["d"], KINDS[name], ids)
        pair["d"].poison()
        _, answer, sent_id, arrived_id = await through(pair, ids)
        assert answer.report["code"] == ""
        assert_same_tokens(KINDS[name], answer, whole, name)
        assert await assert_same_group_bytes(pair, sent_id, arrived_id) > 0
