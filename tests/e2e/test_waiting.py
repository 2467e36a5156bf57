"""A decode leg that waits holds nothing that others need, as long as its prefill worker is alive, and not
longer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from tests.support.e2e.client import ANSWER_S, Answer, ask, completion, leg, new_transfer_id
from tests.support.e2e.cluster import Cluster, until
from tests.support.e2e.reference import make_prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 4
SLOW = 1500
"""Tokens of a prompt that takes long where a step computes one."""
BLOCK_TOKENS = 16
POOL_BLOCKS = 23
"""Of a worker that is both: less than three prompts of EIGHT_BLOCKS."""
EIGHT_BLOCKS = 8 * BLOCK_TOKENS
BARS = os.environ.get("BARS") == "1"
"""Whether times are judged as on a machine that does nothing else."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory, tiny_model) -> AsyncIterator[Cluster]:
    """``p1`` computes a token a step, one prompt after the other; ``p2`` is quick; ``d1`` runs two requests at once and
    has room for a few prompts."""
    async with Cluster(tmp_path_factory.mktemp("waiting"), tiny_model) as cluster:
        await cluster.coordinator()
        slow = {"chunk_tokens": 1, "max_batch_tokens": 1, "max_running": 1}
        both = {"pool_blocks": POOL_BLOCKS, "max_running": 4}
        await asyncio.gather(
            cluster.worker("p1", "prefill", **slow),
            cluster.worker("p2", "prefill"),
            cluster.worker("d1", "decode", max_running=2, pool_blocks=220),
            *(cluster.worker(name, "both", **both) for name in ("b1", "b2", "b3")),
        )
        yield cluster


def start(
    cluster: Cluster, prompt: Sequence[int], source: str, reader: str, tokens: int = TOKENS, timeout_s: float = ANSWER_S
) -> Any:
    """Both legs of one request at once, as a router sends them; the decode leg's answer may be awaited."""
    transfer_id = new_transfer_id()
    body = completion(prompt, tokens, "tiny")
    legs = [leg(body, transfer_id, part, source, reader) for part in ("prefill", "decode")]
    first = asyncio.ensure_future(ask(cluster.url(source), legs[0], timeout_s=timeout_s))
    second = asyncio.ensure_future(ask(cluster.url(reader), legs[1], timeout_s=timeout_s))

    async def answered() -> Answer:
        await asyncio.wait([first])
        return await second

    return asyncio.ensure_future(answered()), second


def moved(answer: Answer) -> None:
    assert answer.status == 200, answer.body
    assert (answer.account["prefill"], answer.account["failure"]) == ("remote", None), answer.account


async def test_a_prompt_of_an_idle_worker_waits_behind_nothing(cluster: Cluster, tiny_reference) -> None:
    """However many wait for a slow one: they hold neither slots nor blocks that this one needs."""
    slow = [start(cluster, make_prompt(SLOW, seed=n), "p1", "d1") for n in range(8)]

    async def are_waiting() -> bool:
        engine = (await cluster.statistics("d1"))["engine"]
        return bool(engine["asking"] >= 6)

    await until(are_waiting, "the decode legs wait for the slow worker", within_s=10.0)
    took_s = []
    for n in range(5):
        prompt = make_prompt(500, seed=100 + n)
        began_s = time.monotonic()
        answer = await start(cluster, prompt, "p2", "d1")[1]
        took_s.append(time.monotonic() - began_s)
        moved(answer)
        tiny_reference.check(answer.token_ids, prompt, TOKENS)
    print(f"behind eight that wait: {sorted(took_s)}")
    assert (await cluster.statistics("d1"))["engine"]["asking"] >= 1, "they were over before: nothing was shown"
    assert sorted(took_s)[2] < 1.0
    for n, (whole, _) in enumerate(slow):
        answer = await whole
        moved(answer)
        tiny_reference.check(answer.token_ids, make_prompt(SLOW, seed=n), TOKENS)
    await cluster.assert_drained()


@pytest.mark.nightly
async def test_a_queue_of_minutes_at_a_live_worker_moves_every_prompt(cluster: Cluster, tiny_reference) -> None:
    moved(await start(cluster, make_prompt(SLOW, seed=1990), "p1", "d1")[1])
    began_s = time.monotonic()
    for answered in [start(cluster, make_prompt(SLOW, seed=1991 + n), "p1", "d1")[1] for n in range(8)]:
        moved(await answered)
    pace_s = (time.monotonic() - began_s) / 8
    asked: list[tuple[list[int], Any]] = []
    queued_s: list[float] = []
    began_s = time.monotonic()
    while not asked or len(queued_s) < len(asked):
        # So many that the last of them waits for more than a minute, by the pace of this machine now.
        while len(asked) < 90 / pace_s:
            prompt = make_prompt(SLOW, seed=2000 + len(asked))
            asked.append((prompt, start(cluster, prompt, "p1", "d1", timeout_s=400.0)[1]))
        prompt, answered = asked[len(queued_s)]
        answer = await answered
        moved(answer)
        tiny_reference.check(answer.token_ids, prompt, TOKENS)
        queued_s.append(answer.account["queue_s"])
        pace_s = (time.monotonic() - began_s) / len(queued_s)
    print(f"{len(asked)} prompts in {time.monotonic() - began_s:.0f} s, the last waited {max(queued_s):.0f} s")
    assert max(queued_s) > 60.0, "the queue was too short to show anything"
    await cluster.assert_drained()


async def test_a_leg_that_never_arrived_costs_little(cluster: Cluster, tiny_reference) -> None:
    prompt = make_prompt(300, seed=7)
    for source in ("p2", "p1"):
        began_s = time.monotonic()
        body = leg(completion(prompt, TOKENS, "tiny"), new_transfer_id(), "decode", source, "d1")
        answer = await ask(cluster.url("d1"), body)
        took_s = time.monotonic() - began_s
        assert answer.account["failure"] == "grant_unknown", answer.account
        tiny_reference.check(answer.token_ids, prompt, TOKENS)
        assert took_s < 3.0, f"{took_s:.2f} s"
    await cluster.assert_drained()


async def test_a_leg_says_how_long_it_may_wait(cluster: Cluster, tiny_reference) -> None:
    """The prefill worker knows the prompt, and has many before it."""
    busy = [start(cluster, make_prompt(SLOW, seed=20 + n), "p1", "d1")[0] for n in range(4)]

    async def are_before_it() -> bool:
        engine = (await cluster.statistics("p1"))["engine"]
        return bool(engine["waiting"] + engine["computing"] >= 4)

    await until(are_before_it, "the slow worker has the others' prompts", within_s=10.0)
    prompt = make_prompt(300, seed=8)
    transfer_id = new_transfer_id()
    body = completion(prompt, TOKENS, "tiny")
    prefilling = asyncio.ensure_future(ask(cluster.url("p1"), leg(body, transfer_id, "prefill", "p1", "d1")))
    late = leg(body, transfer_id, "decode", "p1", "d1")
    late["kv_transfer_params"]["timeout_s"] = 0.5
    answer = await ask(cluster.url("d1"), late)
    assert answer.account["failure"] == "deadline", answer.account
    assert "no grant came" in answer.account["reason"]
    tiny_reference.check(answer.token_ids, prompt, TOKENS)
    await asyncio.gather(*busy)
    assert (await prefilling).status != 200, "its reader had given it up before it was begun"
    await cluster.assert_drained()


@pytest.mark.parametrize("wrong", [0, -1, "5", 1e6, True])
async def test_a_timeout_that_makes_no_sense_is_refused_by_name(cluster: Cluster, wrong: Any) -> None:
    body = leg(completion(make_prompt(20), TOKENS, "tiny"), new_transfer_id(), "decode", "p2", "d1")
    body["kv_transfer_params"]["timeout_s"] = wrong
    answer = await ask(cluster.url("d1"), body)
    assert answer.status == 400
    assert answer.error["param"] == "kv_transfer_params.timeout_s"


@pytest.mark.parametrize("engines", [("b1", "b2"), ("b1", "b2", "b3")], ids=["two", "three"])
async def test_engines_that_are_both_do_not_wait_for_each_other(cluster: Cluster, tiny_reference, engines) -> None:
    """Six prompts of eight blocks, in opposite order: what one keeps for another is in the way of what it needs."""
    alone_s = await time_alone(cluster, engines[0], 6 * len(engines) // 2)
    before = {name: (await cluster.statistics(name))["engine"]["revoked_prompts"] for name in engines}
    began_s = time.monotonic()
    asked = []
    for n in range(6 * len(engines) // 2):
        source, reader = engines[n % len(engines)], engines[(n + 1) % len(engines)]
        prompt = make_prompt(EIGHT_BLOCKS, seed=1000 * len(engines) + n)
        asked.append((prompt, start(cluster, prompt, source, reader, tokens=12)[1]))
    failures: list[str | None] = []
    answers = []
    for prompt, answering in asked:
        answer = await answering
        answers.append(answer)
        assert answer.status == 200, answer.body
        failures.append(answer.account["failure"])
        if failures[-1] is not None:
            assert failures[-1] == "grant_revoked", answer.account
            assert "no_room" in answer.account["reason"], answer.account
        tiny_reference.check(answer.token_ids, prompt, 12)
    took_s = time.monotonic() - began_s
    await cluster.assert_drained()
    now = {name: (await cluster.statistics(name))["engine"]["revoked_prompts"] - before[name] for name in engines}
    ratio = seconds_of(answers) / alone_s
    print(f"{len(asked)} prompts on {len(engines)} engines in {took_s:.2f} s, {ratio:.2f} of one alone, revoked {now}")
    assert sum(now.values()) == sum(failure is not None for failure in failures)
    assert ratio < 1.5 if BARS else took_s < 10.0


async def time_alone(cluster: Cluster, engine: str, count: int) -> float:
    """How long one of these engines takes for as many such prompts by itself."""
    prompts = [make_prompt(EIGHT_BLOCKS, seed=5000 + 100 * count + n) for n in range(count)]
    answers = await asyncio.gather(*(ask(cluster.url(engine), completion(prompt, 12, "tiny")) for prompt in prompts))
    assert all(answer.status == 200 for answer in answers)
    return seconds_of(answers)


def seconds_of(answers: Sequence[Answer]) -> float:
    """From when the first of them reached its worker to the last one's end: a dozen clients take longer to make."""
    ends_s = [answer.account["ended_unix_s"] for answer in answers]
    begins_s = [end_s - answer.account["total_s"] for end_s, answer in zip(ends_s, answers, strict=True)]
    return float(max(ends_s) - min(begins_s))


async def test_a_prompt_that_was_given_up_is_not_computed_again(cluster: Cluster, tiny_reference) -> None:
    """It stays in the prefix cache: a retry under a new id gets a second grant for one block's work at most."""
    prompt = make_prompt(400, seed=9)
    body = completion(prompt, TOKENS, "tiny")
    first = new_transfer_id()
    answer = await ask(cluster.url("p2"), leg(body, first, "prefill", "p2", "d1"))
    assert answer.status == 200
    refused = leg(completion(make_prompt(400, seed=10), TOKENS, "tiny"), first, "decode", "p2", "d1")
    answer = await ask(cluster.url("d1"), refused)  # another prompt: the grant ends, and nothing was committed
    assert answer.account["failure"] == "incompatible", answer.account

    async def is_over() -> bool:
        return bool((await cluster.statistics("p2"))["engine"]["holding"] == 0)

    await until(is_over, "the first grant is over", within_s=15.0)
    before = (await cluster.statistics("p2"))["engine"]["prefill_tokens"]
    _, second = start(cluster, prompt, "p2", "d1")
    answer = await second
    moved(answer)
    tiny_reference.check(answer.token_ids, prompt, TOKENS)
    assert (await cluster.statistics("p2"))["engine"]["prefill_tokens"] - before <= BLOCK_TOKENS
    await cluster.assert_drained()
