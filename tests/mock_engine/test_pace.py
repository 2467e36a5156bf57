"""The two clocks: how long an answer takes at least, and that the step model's queue, cache and preemption show."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.mock_engine.mocks import Engine, mocks


@pytest.fixture(scope="module")
def stepping() -> Iterator[Engine]:
    flags = ("--pace", "steps", "--step-ms", "5", "--blocks", "24", "--max-num-seqs", "8")
    with mocks(*flags, "--max-num-batched-tokens", "64") as started:
        yield started.engines[0]


def test_fixed_pace_has_its_times() -> None:
    with mocks("--ttft-ms", "100", "--itl-ms", "20") as started:
        before_s = time.monotonic()
        assert started.engines[0].complete("x", 6, stream=True).status == 200
        assert time.monotonic() - before_s >= 0.1 + 5 * 0.02 - 0.002


def test_answer_takes_a_step_for_each_chunk_and_token(stepping: Engine) -> None:
    before, before_s = stepping.statistics()["steps"], time.monotonic()
    assert stepping.complete(list(range(130)), 10).status == 200
    assert stepping.statistics()["steps"] - before == 3 + 9  # chunks of 64, 64 and 2 tokens; the last gives a token
    assert time.monotonic() - before_s >= 12 * 0.005 - 0.002


def test_prompt_that_was_seen_is_cached(stepping: Engine) -> None:
    prompt = list(range(5000, 5040))
    usage = [stepping.complete(prompt, 2).json()["usage"] for _ in range(2)]
    assert [one["prompt_tokens_details"]["cached_tokens"] for one in usage] == [0, 32]
    salted = stepping.complete(prompt, 2, cache_salt="other").json()["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_conversation_finds_its_last_answer_in_the_cache(stepping: Engine) -> None:
    first = stepping.complete(list(range(7000, 7016)), 17, return_token_ids=True).json()["choices"][0]
    following = first["prompt_token_ids"] + first["token_ids"]
    usage = stepping.complete(following, 1).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32


def test_sequences_beyond_the_batch_wait(stepping: Engine) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(stepping.complete, [one], 30) for one in range(12)]
        seen = stepping.wait(lambda now: now["running"] == 8 and now["waiting"] > 0)
        assert seen["running"] + seen["waiting"] <= 12
        assert {answer.result().status for answer in answers} == {200}


def test_sequences_are_preempted_where_blocks_run_out_and_still_answer(stepping: Engine) -> None:
    before = stepping.statistics()["preemptions"]
    prompts = [[number] * 40 for number in range(9000, 9006)]
    with ThreadPoolExecutor(6) as pool:
        texts = [answer.text for answer in pool.map(lambda prompt: stepping.complete(prompt, 30), prompts)]
    assert stepping.statistics()["preemptions"] > before
    assert texts == [stepping.complete(prompt, 30).text for prompt in prompts]
    assert stepping.statistics()["blocks_used"] == 0


def test_request_that_fits_no_engine_is_refused(stepping: Engine) -> None:
    answer = stepping.complete(list(range(380)), 10)
    assert (answer.status, "384 tokens" in answer.body.decode()) == (400, True)
