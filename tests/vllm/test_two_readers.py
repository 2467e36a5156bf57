"""A router's retry: what one prefill leg was answered is copied into two decode legs, on two engines, at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.vllm.checks import assert_same_bytes, prompt, wait_free
from tests.support.vllm.engines import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_one_answer_given_to_two_engines_is_read_by_one(cluster: Cluster) -> None:
    """The other computes the prompt itself, says why, and takes nothing from the one that reads."""
    if "e" not in cluster.engines:
        await cluster.start("e", "kv_consumer")
        await cluster["e"].wait_ready()
    for seed in range(8):
        ids = prompt(900, seed=f"two readers {seed}")
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        first = await cluster["p"].generate(ids, 1, params)
        legs = [cluster[name].generate(ids, 12, first["kv"]) for name in ("de" if seed % 2 else "ed")]
        *answers, whole = await asyncio.gather(*legs, cluster["mono"].generate(ids, 12))
        assert [answer.tokens for answer in answers] == [whole.tokens] * 2
        codes = sorted(answer.report["code"] for answer in answers)
        assert codes[0] == ""
        assert codes[1] in ("refused", "grant_released"), answers
        (reader,) = [name for name in "de" if await has_arrived(cluster, name, answers[0].report["transfer_id"])]
        await assert_same_bytes(cluster["p"], cluster[reader], answers[0].report["transfer_id"])
        await wait_free(cluster["p"])


async def has_arrived(cluster: Cluster, name: str, transfer_id: str) -> bool:
    return any(key.startswith(transfer_id) for key in await cluster[name].ask("digests"))
