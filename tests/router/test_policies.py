"""The router's policies over HTTP: whom each asks for the next request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.options import POLICIES, RouterOptions
from kvxfer.types import AgentRef, Incarnation, Membership, Role
from tests.support.fake_workers import MODEL, FakeWorker, Received, Running, router_over


class CachingWorker(FakeWorker):
    """One with a prefix cache. It takes ``token_s`` for each token that it does not hold, and says what it held."""

    def __init__(self, name: str, role: Role) -> None:
        super().__init__(name, role)
        self.texts: list[str] = []
        self.token_s = 0.0

    async def _answer(self, request: Received, send: Any) -> None:
        text = "\n".join(message["content"] for message in request.body["messages"])
        held = max((len(os.path.commonprefix([text, other])) for other in self.texts), default=0)  # noqa: RUF071
        self.prompt_tokens, self.cached_tokens = len(text) // 4, held // 4
        self.texts.append(text)
        await asyncio.sleep(self.token_s * (self.prompt_tokens - self.cached_tokens))
        await super()._answer(request, send)


@contextlib.asynccontextmanager
async def pair_of_prefillers(policy: str, **options: Any) -> AsyncIterator[tuple[Running, list[CachingWorker]]]:
    sources = [CachingWorker(name, Role.PREFILL) for name in ("p1", "p2")]
    decoder = FakeWorker("d")
    decoder.needs_prefill, decoder.peers = True, tuple(sources)
    for worker in (*sources, decoder):
        worker.context_tokens = 1 << 20
    async with router_over(*sources, decoder, policy=policy, min_remote_prefill_tokens=0, **options) as running:
        yield running, sources


def turn(session: int, count: int, *, size: int) -> dict[str, Any]:
    """The ``count``-th turn of a session whose first message has ``size`` bytes."""
    texts = [f"{session} " * (size // 2), *(f"answer {at} or question {at} of {session}" for at in range(2 * count))]
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return {"model": MODEL, "messages": messages, "stream": True}


@pytest.mark.parametrize("size", [8 << 10, 200 << 10])
async def test_the_turns_of_a_session_stay_at_one_worker(size: int) -> None:
    async with pair_of_prefillers("seconds") as (running, sources):
        for source in sources:
            source.token_s = 0.5 / size
        places: dict[int, set[str]] = {session: set() for session in range(4)}
        for count in range(5):
            for session in places:
                before = [len(source.received) for source in sources]
                answer = await running.client.post("/v1/chat/completions", json=turn(session, count, size=size))
                assert answer.status_code == 200
                after = [len(source.received) for source in sources]
                places[session] |= {s.name for s, b, a in zip(sources, before, after, strict=True) if a > b}
    # A machine that stands still for long while a worker computes makes it look slow.
    assert sum(len(names) == 1 for names in places.values()) >= 3, places


async def test_round_robin_takes_turns_and_random_does_not() -> None:
    asked: dict[str, list[str]] = {}
    for policy in ("round-robin", "random"):
        async with pair_of_prefillers(policy) as (running, sources):
            for _ in range(24):
                before = [len(source.received) for source in sources]
                assert (await running.client.post("/v1/chat/completions", json=turn(1, 1, size=64))).status_code == 200
                after = [len(source.received) for source in sources]
                asked.setdefault(policy, []).extend(
                    s.name for s, b, a in zip(sources, before, after, strict=True) if a > b
                )
    assert Counter(asked["round-robin"]) == {"p1": 12, "p2": 12}
    assert all(one != other for one, other in zip(asked["round-robin"], asked["round-robin"][1:], strict=False))
    assert min(Counter(asked["random"]).values()) >= 2


def test_the_policy_hears_of_a_worker_that_is_gone() -> None:
    worker, gone = FakeWorker("p"), list[AgentRef]()
    workers = Workers()
    workers.on_left = gone.append
    workers.update(Membership(1, (worker.member,)))
    again = dataclasses.replace(worker.member, ref=AgentRef("p", Incarnation(99, bytes(16))))
    workers.update(Membership(2, (again,)))
    workers.update(Membership(3, ()))
    assert gone == [worker.member.ref, again.ref]


@pytest.mark.parametrize("bad", ["", "Seconds", "cache_aware"])
def test_a_policy_has_a_name(bad: str) -> None:
    with pytest.raises(ConfigError, match="policy must be one of seconds, least-loaded, round-robin, random, not"):
        RouterOptions(policy=bad)
    assert {RouterOptions(policy=name).policy for name in POLICIES} == set(POLICIES)
