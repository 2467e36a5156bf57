"""What the client reads of cached prompt tokens: each counted once over both legs, streamed or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvxfer.router import attempt
from kvxfer.router.dialects import dialect
from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, Running, events, failing, router_over

PROMPT = 300


@pytest.fixture(autouse=True)
def _is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does, P's answer is waited for."""
    monkeypatch.setattr(attempt, "PREFILL_ANSWER_WAIT_S", 30.0)


def pair(theirs: int | None, ours: int | None, *, dialect: str = "kvxfer") -> tuple[FakeWorker, FakeWorker]:
    p, d = FakeWorker("p0", Role.PREFILL, dialect=dialect), FakeWorker("d0", dialect=dialect)
    p.prompt_tokens = d.prompt_tokens = PROMPT
    p.cached_tokens, d.cached_tokens = theirs, ours
    d.account = {"prefill": "remote", "cached_tokens": ours}
    d.needs_prefill = True
    return p, d


async def usage_of(router: Running, *, is_chat: bool, is_stream: bool) -> dict[str, Any]:
    ask = router.chat if is_chat else router.complete
    if not is_stream:
        return dict((await ask()).json()["usage"])
    chunks = events((await ask(stream=True, stream_options={"include_usage": True})).text)
    [usage] = [chunk["usage"] for chunk in chunks[:-1] if chunk.get("usage")]
    return dict(usage)


async def cached(router: Running) -> int | None:
    """The same, however it is asked for."""
    found = []
    for is_chat in (False, True):
        for is_stream in (False, True):
            usage = await usage_of(router, is_chat=is_chat, is_stream=is_stream)
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (PROMPT, 3)
            found.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
    assert len(set(found)) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("theirs", "ours", "counted"),
    [(0, 0, 0), (256, 0, 256), (0, 64, 64), (256, 64, 256), (64, 256, 256), (128, 128, 128), (999, 0, PROMPT)],
)
async def test_a_token_that_either_cache_held_is_counted_once_and_never_more_than_the_prompt(
    theirs: int, ours: int, counted: int
) -> None:
    p, d = pair(theirs, ours)
    async with router_over(p, d) as router:
        assert await cached(router) == counted
        details = (await router.complete()).json()["usage"]["prompt_tokens_details"]
        assert details["audio_tokens"] == 0  # what else it says stays
        account = (await router.complete()).json()["kvxfer"]
        assert (account["cached_tokens"], account["prefill_cached_tokens"]) == (ours, theirs)


async def test_what_the_prefiller_had_cached_counts_for_nothing_where_the_decoder_computed_the_prompt() -> None:
    p, d = pair(256, 64)
    d.account = {"prefill": "local", "failure": "grant_expired", "cached_tokens": 64}
    async with router_over(p, d) as router:
        assert await cached(router) == 64
        router.publish(d)
        assert await cached(router) == 64
        router.publish(p, d)
        d.account |= {"prefill": "remote"}
        p.always_fails = failing(500, "internal", retryable=False)
        d.needs_prefill = False
        assert await cached(router) == 64


async def test_an_answer_without_a_prefill_leg_passes_byte_for_byte() -> None:
    d = FakeWorker("d0")
    d.cached_tokens, d.account = 2, {"prefill": "local"}
    async with router_over(d) as router:
        answer = await router.complete(stream=True, stream_options={"include_usage": True})
        assert '"prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": 0}}' in answer.text


async def test_an_answer_of_the_prefiller_that_is_still_under_way_is_waited_for() -> None:
    p, d = pair(256, 0)
    p.hold = asyncio.Event()
    d.needs_prefill = False
    async with router_over(p, d) as router:
        pending = asyncio.create_task(usage_of(router, is_chat=True, is_stream=True))
        await asyncio.wait_for(asyncio.gather(p.arrived.wait(), d.arrived.wait()), 5.0)
        p.hold.set()
        assert (await pending)["prompt_tokens_details"]["cached_tokens"] == 256


@pytest.mark.parametrize(
    ("theirs", "said", "ours", "counted"),
    [
        (256, 299, 0, 256),  # vLLM counts what it loaded as cached, all but the last token
        (0, 299, 0, 0),
        (64, 299, 128, 128),
        (64, 128, 128, 128),
        (256, None, None, 256),  # asked to say nothing: then P's, which it always says
        (None, 299, None, 0),
        (None, None, None, None),
    ],
)
async def test_what_vllm_loaded_from_the_prefiller_is_not_counted_as_cached(
    theirs: int | None, said: int | None, ours: int | None, counted: int | None
) -> None:
    p, d = pair(theirs, said, dialect="vllm")
    d.account = {} if ours is None else {"cached_tokens": ours}
    async with router_over(p, d) as router:
        usage = await usage_of(router, is_chat=False, is_stream=False)
        assert (usage.get("prompt_tokens_details") or {}).get("cached_tokens") == counted


async def test_a_stream_of_vllm_has_no_account_and_counts_the_prefillers() -> None:
    p, d = pair(256, 299, dialect="vllm")
    async with router_over(p, d) as router:
        for is_chat in (True, False):
            usage = await usage_of(router, is_chat=is_chat, is_stream=True)
            assert usage["prompt_tokens_details"]["cached_tokens"] == 256
        d.cached_tokens = 128  # fewer than it could have loaded: it loaded nothing
        p.cached_tokens = 0
        assert (await usage_of(router, is_chat=True, is_stream=True))["prompt_tokens_details"]["cached_tokens"] == 128


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ({"usage": {"cached_tokens": 5}}, 5),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 6}}}, 6),
        ({"usage": {"prompt_tokens_details": None}, "kv_transfer_params": {"remote_prefill_cached_tokens": 7}}, 7),
        ({"usage": [], "kv_transfer_params": None}, None),
        ({"usage": {"cached_tokens": -1}}, None),
        ({"usage": {"cached_tokens": True}}, None),
        ({"usage": {"cached_tokens": "9"}}, None),
    ],
)
def test_where_a_prefiller_says_what_it_had_cached(answer: dict[str, Any], count: int | None) -> None:
    assert dialect("vllm").prefilled(json.dumps(answer).encode()).cached_tokens == count
