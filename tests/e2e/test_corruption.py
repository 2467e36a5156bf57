"""The comparison of blocks means something: one flipped byte between computing and sending is noticed, and where."""

from __future__ import annotations

import pytest

from tests.support.e2e.client import ask, completion, leg, new_transfer_id
from tests.support.e2e.cluster import Cluster
from tests.support.e2e.reference import make_prompt
from tests.support.e2e.source import Source, serving_source

pytestmark = pytest.mark.asyncio(loop_scope="package")

TOKENS = 32
PLACES = ((0, 0), (7, 1), (11, 0))
"""(block, layer) that are corrupted, one at a time."""


@pytest.fixture
def cluster(tiny_cluster: Cluster) -> Cluster:
    return tiny_cluster


async def pulled(cluster: Cluster, source: Source, prompt: list[int], place: tuple[int, int] | None, values: int = 1):
    """Let ``d1`` pull ``prompt``, corrupted at ``place`` after it was recorded; both records, and the tokens."""
    transfer_id = new_transfer_id()
    blocks = source.compute(prompt)
    sent = source.digests(transfer_id, blocks)
    if place is not None:
        source.flip(*place, values=values)
    grant = source.agent.grant(source.pool, blocks, transfer_id=transfer_id, reader="d1", ready_blocks=len(blocks))
    grant.ready(len(blocks), complete=True)
    body = leg(completion(prompt, TOKENS, "tiny"), transfer_id, "decode", Source.AGENT_ID, "d1")
    answer = await ask(cluster.url("d1"), body)
    assert answer.status == 200, answer.body
    assert answer.account["prefill"] == "remote", answer.account
    await grant.wait_ended()
    arrived = (await cluster.digests("d1"))[f"{transfer_id}/destination"]
    assert arrived["first"] == 0
    await cluster.assert_drained()
    return sent, arrived["blocks"], answer.token_ids


def differences(sent: list[list[str]], arrived: list[list[str]]) -> list[tuple[int, int]]:
    """(block, layer) of every digest that differs."""
    assert len(sent) == len(arrived)
    return [
        (block, layer)
        for block, (theirs, ours) in enumerate(zip(sent, arrived, strict=True))
        for layer, (one, other) in enumerate(zip(theirs, ours, strict=True))
        if one != other
    ]


async def test_one_corrupted_byte_is_noticed_in_its_block_and_layer(cluster: Cluster, tiny_reference) -> None:
    async with serving_source(cluster, tiny_reference) as source:
        prompt = make_prompt(200)
        sent, arrived, tokens = await pulled(cluster, source, prompt, None)
        assert differences(sent, arrived) == []
        tiny_reference.check(tokens, prompt, TOKENS)
        for seed, place in enumerate(PLACES, start=1):
            sent, arrived, _ = await pulled(cluster, source, make_prompt(200, seed=seed), place)
            assert differences(sent, arrived) == [place]


async def test_one_corrupted_block_changes_the_tokens(cluster: Cluster, tiny_reference) -> None:
    """So that equal tokens, too, say something about the blocks."""
    async with serving_source(cluster, tiny_reference) as source:
        for seed, place in enumerate(PLACES, start=len(PLACES) + 1):
            prompt = make_prompt(200, seed=seed)
            sent, arrived, tokens = await pulled(cluster, source, prompt, place, source.layer_values)
            assert differences(sent, arrived) == [place]
            assert tuple(tokens) != tiny_reference.expect(prompt, TOKENS).token_ids
