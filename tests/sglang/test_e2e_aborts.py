"""Requests of real servers are aborted, at any moment and at either role: every page comes back, and no client sees a
token of another request (`make test-sglang-e2e`).
"""

from __future__ import annotations

import asyncio
import os
import random
import time

import pytest

from tests.support.sglang.cluster import Asked, Client, Cluster, ask, prompt_of, tokens_of

pytestmark = pytest.mark.timeout(900)

ABORTS = 200
AT_ONCE = 8
ROUNDS_MAX = 2 * ABORTS // AT_ONCE
"""Some requests are over before their moment comes."""
KINDS = ("decode", "prefill", "both", "decode, while it answers")
VICTIM_TOKENS, SURVIVOR_TOKENS = 256, 12
MOMENT_S = 0.6
"""The aborts of a round are spread over so long: queued, computed, moved, generating."""
LOOK_S, LOOKS_MAX = 0.03, 1000
BACK_S = 1.0 if os.environ.get("BARS") == "1" else 10.0
"""So soon pages are back: on a host that does nothing else (``BARS=1``), and on any other."""


async def test_200_aborts_return_every_page_and_show_no_token_of_another(cluster: Cluster) -> None:
    draw = random.Random(25)
    waits: list[float] = []
    aborted: list[Asked] = []
    async with Client(cluster) as client:
        for round_ in range(ROUNDS_MAX):
            if len(aborted) >= ABORTS:
                break
            victims = [prompt_of(draw.randrange(30, 700), seed=1000 + AT_ONCE * round_ + n) for n in range(AT_ONCE)]
            survivor = prompt_of(draw.randrange(30, 700), seed=5000 + round_)
            async with Pages(cluster) as pages:
                asked = await asyncio.gather(
                    client.send(survivor, SURVIVOR_TOKENS),
                    *(client.send(prompt, VICTIM_TOKENS, n, Abort(cluster, draw)) for n, prompt in enumerate(victims)),
                )
                over_s = max(one.over_s for one in asked)
                waits.append(await pages.back_s(over_s) - over_s)
            assert asked[0].decode.is_done, asked[0]
            for one in asked:
                if one.prefill.gave_up:  # decode had not asked it for this prompt yet, so prefill heard of no end
                    await asyncio.to_thread(cluster.prefill.abort, one.rid)
            for one, wanted in zip(
                asked, await asyncio.gather(*(wanted_of(cluster, one) for one in asked)), strict=True
            ):
                one.check_tokens(wanted)
            aborted += [one for one in asked if one.is_aborted]
    partly = sum(bool(one.decode.tokens) for one in aborted)
    waits.sort()
    print(
        f"\n{len(aborted)} requests were aborted, {partly} of them after their first token; pages were back after",
        end=" ",
    )
    print(f"{waits[len(waits) // 2]:.2f} s (median of {len(waits)} rounds), at most {waits[-1]:.2f} s")
    assert waits[-1] < BACK_S, waits
    assert len(aborted) >= ABORTS, "the others were over before"
    assert 0.1 * len(aborted) < partly < 0.9 * len(aborted), "aborts come before and after the first token"
    cluster.check_pools()


def test_all_at_once_leave_no_page_behind(cluster: Cluster) -> None:
    """And what is asked after them is answered as by one server."""

    async def ask_and_abort() -> None:
        async def abort(asked: Asked) -> None:
            await asyncio.sleep(0.3)
            for server in (cluster.decode, cluster.prefill):
                await asyncio.to_thread(server.abort, "")

        async with Client(cluster) as client:
            await asyncio.gather(*(client.send(prompt_of(600, seed), 400, began=abort) for seed in range(6)))

    asyncio.run(ask_and_abort())
    cluster.wait_returned(BACK_S)
    prompt = prompt_of(300, seed=9)
    assert tokens_of(ask(cluster.proxy.url, prompt)) == tokens_of(ask(cluster.one.url, prompt))
    cluster.wait_returned(BACK_S)
    cluster.check_pools()


class Abort:
    """Aborts a request at one role, or at both, at a moment of its own."""

    def __init__(self, cluster: Cluster, draw: random.Random) -> None:
        self._cluster, self._after_s = cluster, draw.uniform(0, MOMENT_S)

    async def __call__(self, asked: Asked) -> None:
        kind = KINDS[asked.number % len(KINDS)]
        if kind == KINDS[3]:
            await asked.decode.has_begun.wait()
        await asyncio.sleep(self._after_s)
        servers = {"prefill": [self._cluster.prefill], "both": [self._cluster.decode, self._cluster.prefill]}
        for server in servers.get(kind, [self._cluster.decode]):
            await asyncio.to_thread(server.abort, asked.rid)
        asked.aborted_s = time.monotonic()


class Pages:
    """Looks at both roles' pools again and again, as SGLang counts them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._seen: list[tuple[float, int, int]] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Pages:
        self._task = asyncio.ensure_future(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def back_s(self, since_s: float) -> float:
        """When both had every page back, the first time after ``since_s``."""
        assert self._task is not None
        for _ in range(LOOKS_MAX):  # counted: a machine that stands still for a while is no leak
            for at_s, *tokens in self._seen:
                if at_s >= since_s and not any(tokens):
                    return at_s
            assert not self._task.done(), self._task
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"after {since_s:.2f} s prefill and decode had {self._seen[-5:]} tokens in use")

    async def _look(self) -> None:
        while True:
            servers = (self._cluster.prefill, self._cluster.decode)
            used = await asyncio.gather(*(asyncio.to_thread(server.used_tokens) for server in servers))
            self._seen.append((min(one.at_s for one in used), used[0].tokens, used[1].tokens))
            await asyncio.sleep(LOOK_S)


async def wanted_of(cluster: Cluster, asked: Asked) -> list[int]:
    """As many tokens of one server as were seen."""
    return tokens_of(
        await asyncio.to_thread(ask, cluster.one.url, asked.prompt, tokens=max(1, len(asked.decode.tokens)))
    )
