"""A grant that expired says so, and blocks that were given to another prompt meanwhile never reach an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.e2e.client import ask, completion, leg, new_transfer_id
from tests.support.e2e.cluster import DEAD_AFTER_S, Cluster
from tests.support.e2e.reference import make_prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

TTL_S = 2.0
"""A prompt must be computed within it, on a busy machine too."""
assert TTL_S + 0.5 < DEAD_AFTER_S, "the reader must be late, not dead"
PROMPT = 500
"""32 blocks of 16 tokens."""
POOL_BLOCKS = 40
"""So that the next prompt of that length takes the same blocks."""
TOKENS = 16
LANES = ("mapped", "stream")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory, slow_model) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path_factory.mktemp("grants"), slow_model) as cluster:
        await cluster.coordinator()
        await asyncio.gather(
            cluster.worker("p1", "prefill", pool_blocks=POOL_BLOCKS, grant_ttl_s=TTL_S, chunk_tokens=16),
            cluster.worker("d1", "decode", lanes="mapped"),
            cluster.worker("d2", "decode", lanes="stream"),
        )
        yield cluster


async def prefill(cluster: Cluster, prompt: list[int], reader: str, transfer_id=None):
    """The prefill leg alone, as a router sends it; returns its transfer id."""
    transfer_id = transfer_id or new_transfer_id()
    body = leg(completion(prompt, TOKENS, "slow"), transfer_id, "prefill", "p1", reader)
    answer = await ask(cluster.url("p1"), body)
    assert answer.status == 200, answer.body
    assert answer.body["object"] == "kvxfer.prefill"
    assert answer.body["usage"]["prompt_tokens"] == len(prompt)
    return transfer_id


def decode(cluster: Cluster, prompt: list[int], reader: str, transfer_id):
    body = leg(completion(prompt, TOKENS, "slow"), transfer_id, "decode", "p1", reader)
    return ask(cluster.url(reader), body)


async def overwrite(cluster: Cluster, seed: int) -> None:
    """Have the prefill worker compute another prompt into the very same blocks, and forget that one too."""
    evicted = (await cluster.statistics("p1"))["pool"]
    assert evicted["used"] == 0
    other = make_prompt(POOL_BLOCKS * 16, seed=seed)
    await prefill(cluster, other, "absent")
    now = (await cluster.statistics("p1"))["pool"]
    assert now["granted"] == POOL_BLOCKS


@pytest.mark.parametrize("reader", ["d1", "d2"], ids=LANES)
async def test_pulled_before_it_expires(cluster: Cluster, slow_reference, reader: str) -> None:
    prompt = make_prompt(PROMPT, seed=1 + (reader == "d2"))
    transfer_id = await prefill(cluster, prompt, reader)
    answer = await decode(cluster, prompt, reader, transfer_id)
    assert (answer.account["prefill"], answer.account["failure"]) == ("remote", None), answer.account
    assert answer.account["lane"] == LANES[reader == "d2"]
    slow_reference.check(answer.token_ids, prompt, TOKENS)
    await cluster.assert_drained()


@pytest.mark.parametrize("reader", ["d1", "d2"], ids=LANES)
async def test_expired_before_the_pull_and_blocks_reused(cluster: Cluster, slow_reference, reader: str) -> None:
    prompt = make_prompt(PROMPT, seed=3 + (reader == "d2"))
    transfer_id = await prefill(cluster, prompt, reader)
    assert (await cluster.statistics("p1"))["pool"]["granted"] == 32
    await cluster.assert_drained(TTL_S + 1.0)
    await overwrite(cluster, seed=13)
    answer = await decode(cluster, prompt, reader, transfer_id)
    assert answer.status == 200, answer.body
    assert (answer.account["prefill"], answer.account["failure"]) == ("local", "grant_expired"), answer.account
    slow_reference.check(answer.token_ids, prompt, TOKENS)
    await cluster.assert_drained(TTL_S + 1.0)


@pytest.mark.parametrize("reader", ["d1", "d2"], ids=LANES)
async def test_reader_sleeps_mid_pull_past_the_expiry_and_blocks_are_reused(
    cluster: Cluster, slow_reference, reader: str
) -> None:
    """The late reader wakes up in the middle of its pull and reads, or asks for, bytes of another prompt."""
    for attempt in range(5):
        prompt = make_prompt(PROMPT, seed=5 + (reader == "d2") + 1000 * attempt)
        transfer_id = new_transfer_id()
        decoding = asyncio.create_task(decode(cluster, prompt, reader, transfer_id))
        prefilling = asyncio.create_task(prefill(cluster, prompt, reader, transfer_id))
        await cluster.mid_pull(reader, "p1", blocks=4)
        cluster.pause(reader)
        slept_s = time.monotonic()
        if (await cluster.statistics("p1"))["engine"]["computing"]:
            break
        cluster.unpause(reader)  # on a busy host it may have read all before it was stopped
        await asyncio.gather(decoding, prefilling)
        await cluster.assert_drained(TTL_S + 1.0)
    else:
        raise AssertionError("the reader was never stopped in the middle of its pull")
    (ended,) = await asyncio.gather(prefilling, return_exceptions=True)
    assert ended == transfer_id or "expired" in str(ended)
    await cluster.assert_drained(TTL_S + 1.0)
    await overwrite(cluster, seed=15)
    cluster.unpause(reader)
    assert time.monotonic() - slept_s > TTL_S / 2
    answer = await decoding
    assert answer.status == 200, answer.body
    assert answer.account["prefill"] == "local", answer.account
    assert answer.account["failure"] in ("grant_expired", "peer_gone", "grant_unknown"), answer.account
    print(f"{answer.account['failure']}: {answer.account['reason']}")
    slow_reference.check(answer.token_ids, prompt, TOKENS)
    await cluster.assert_drained(TTL_S + 1.0)


async def test_a_reader_that_was_not_named_gets_nothing(cluster: Cluster, slow_reference) -> None:
    prompt = make_prompt(PROMPT, seed=7)
    transfer_id = await prefill(cluster, prompt, "d1")
    answer = await decode(cluster, prompt, "d2", transfer_id)
    assert answer.status == 200, answer.body
    assert answer.account["prefill"] == "local", answer.account
    assert answer.account["failure"] in ("refused", "grant_unknown"), answer.account
    slow_reference.check(answer.token_ids, prompt, TOKENS)
    await cluster.assert_drained(TTL_S + 1.0)


async def test_a_grant_is_pulled_once(cluster: Cluster, slow_reference) -> None:
    """After the release a second pull of the same transfer id is refused, and the answer computed."""
    prompt = make_prompt(PROMPT, seed=8)
    transfer_id = await prefill(cluster, prompt, "d1")
    first = await decode(cluster, prompt, "d1", transfer_id)
    assert first.account["prefill"] == "remote"
    other = make_prompt(PROMPT, seed=9)
    second = await decode(cluster, other, "d1", transfer_id)
    assert second.status == 200, second.body
    assert second.account["prefill"] == "local", second.account
    print(second.account["failure"], second.account["reason"])
    slow_reference.check(second.token_ids, other, TOKENS)
    await cluster.assert_drained(TTL_S + 1.0)


@pytest.mark.parametrize("reader", ["d1", "d2"], ids=LANES)
async def test_a_reader_that_means_another_prompt_gets_nothing(cluster: Cluster, slow_reference, reader: str) -> None:
    """Two legs of one transfer id with different prompts of one length: the blocks would fit, and be wrong."""
    theirs, ours = make_prompt(PROMPT, seed=10), make_prompt(PROMPT, seed=11 + (reader == "d2"))
    transfer_id = await prefill(cluster, theirs, reader)
    answer = await decode(cluster, ours, reader, transfer_id)
    assert answer.status == 200, answer.body
    assert answer.account["prefill"] == "local", answer.account
    assert answer.account["failure"] is not None
    print(f"{answer.account['failure']}: {answer.account['reason']}")
    slow_reference.check(answer.token_ids, ours, TOKENS)
    await cluster.assert_drained(TTL_S + 1.0)


async def test_many_late_readers_at_once(cluster: Cluster, slow_reference) -> None:
    """Pulls before, around and after the expiry, while other prompts take the blocks: always the right tokens."""
    failures: list[str | None] = []

    async def one(n: int) -> None:
        reader = f"d{1 + n % 2}"
        prompt = make_prompt(150, seed=20 + n)
        transfer_id = await prefill(cluster, prompt, reader)
        await asyncio.sleep(TTL_S * (n % 5) / 3)
        answer = await decode(cluster, prompt, reader, transfer_id)
        assert answer.status == 200, answer.body
        slow_reference.check(answer.token_ids, prompt, TOKENS)
        failures.append(answer.account["failure"])

    await asyncio.gather(*(one(n) for n in range(20)))
    print({code: failures.count(code) for code in set(failures)})
    assert set(failures) <= {None, "grant_expired"}  # on a loaded host even those that did not wait may come too late
    assert failures.count("grant_expired") >= 1
    await cluster.assert_drained(TTL_S + 1.0)
