"""Requests with known answers, one after the other in several lines, while parts of a cluster are killed.

Decides what counts as failed, retried and wrong. A client knows both routers. It asks the other one where no byte of an
answer has come; the answers are not streamed, so that is true until an answer is whole.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import pathlib
import ssl
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from tests.support.e2e.client import completion
from tests.support.e2e.reference import Reference

SURE = 1e-2
"""Smallest distance between the two best logits of each token of a known answer: far more than sums in another order
can move them."""
QUESTIONS, PROMPT_TOKENS, ANSWER_TOKENS = 12, (40, 300), 24
ANSWER_S = 60.0
TRIES = 4
"""Of one request, in turn at the routers."""
BUSY = (429, 502, 503, 504)
"""Answers after which a client may ask elsewhere."""
PAUSE_S = 0.1
"""Between two requests of a line, and before a request is asked again."""


@dataclasses.dataclass(frozen=True)
class KnownAnswer:
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]


def known_answers(model: pathlib.Path, count: int = QUESTIONS, seed: int = 0) -> list[KnownAnswer]:
    """What ``transformers`` alone says to random prompts, where it is sure of every token."""
    reference, random = Reference(model), np.random.Generator(np.random.PCG64(seed))
    found: list[KnownAnswer] = []
    while len(found) < count:
        prompt = tuple(int(token) for token in random.integers(3, 300, random.integers(*PROMPT_TOKENS)))
        expected = reference.expect(prompt, ANSWER_TOKENS)
        if min(expected.gaps) >= SURE:
            found.append(KnownAnswer(prompt, expected.token_ids))
    return found


@dataclasses.dataclass
class Tally:
    """Of requests that ended: ``retried`` are asks beyond the first of a request, ``remote`` answers whose prompt a
    prefill worker computed."""

    done: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    retried: int = 0
    wrong: int = 0
    remote: int = 0


class Clients:
    """Runs inside ``async with``. ``whole`` counts everything; ``tally`` what ended since :meth:`begin`."""

    def __init__(
        self, routers: Sequence[str], context: ssl.SSLContext, known: Sequence[KnownAnswer], lines: int
    ) -> None:
        """``routers``: their URLs. Half of the lines prefer the first, half the second."""
        self.tally = self.whole = Tally()
        self.retry_reasons: dict[str, int] = {}
        self._routers, self._known = list(routers), known
        self._client = httpx.AsyncClient(trust_env=False, verify=context, timeout=ANSWER_S)
        self._lines = lines
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    async def __aenter__(self) -> Clients:
        self._tasks = [asyncio.create_task(self._line(number)) for number in range(self._lines)]
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        """Waits for the last answers, unless something broke."""
        self._is_over = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)
        await self._client.aclose()

    def begin(self) -> Tally:
        """Count anew."""
        self.tally = Tally()
        return self.tally

    async def some(self, count: int, *, at_least_s: float = 0.0) -> None:
        """Wait until so many more requests have ended, and so long."""
        goal, until_s = self.whole.done + count, time.monotonic() + at_least_s
        while self.whole.done < goal or time.monotonic() < until_s:
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(PAUSE_S / 2)

    async def _line(self, number: int) -> None:
        for turn in itertools.count():
            if self._is_over:
                return
            known = self._known[(number + turn * self._lines) % len(self._known)]
            await self._ask(number, known)
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, number: int, known: KnownAnswer) -> None:
        body = completion(known.prompt, ANSWER_TOKENS, "tiny")
        retried = 0
        for attempt in range(TRIES):
            answer, failure, may_retry = await self._answer(
                self._routers[(number + attempt) % len(self._routers)], body
            )
            if not failure or not may_retry or attempt + 1 == TRIES:
                break
            retried += 1
            self.retry_reasons[failure] = self.retry_reasons.get(failure, 0) + 1
            await asyncio.sleep(PAUSE_S * attempt)
        is_wrong = not failure and tuple(answer["choices"][0]["token_ids"]) != known.token_ids
        is_remote = not failure and answer.get("kvxfer", {}).get("prefill") == "remote"
        for tally in {id(one): one for one in (self.whole, self.tally)}.values():
            tally.done += 1
            tally.retried += retried
            tally.wrong += is_wrong
            tally.remote += is_remote
            if failure:
                tally.failed.append(failure)

    async def _answer(self, router: str, body: dict[str, Any]) -> tuple[dict[str, Any], str, bool]:
        """The answer, or why there is none, and whether a client may ask elsewhere."""
        try:
            answer = await self._client.post(f"{router}/v1/completions", json=body)
        except (httpx.TimeoutException, httpx.TransportError) as error:
            return {}, type(error).__name__, not isinstance(error, httpx.ReadTimeout)
        if answer.status_code == 200:
            return answer.json(), "", False
        return {}, f"{answer.status_code} {answer.text:.200}", answer.status_code in BUSY
