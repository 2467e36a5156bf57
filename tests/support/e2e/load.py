"""Requests one after the other, in several lines at once, while a test breaks things. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.support.e2e.client import ask, completion
from tests.support.e2e.cluster import until
from tests.support.e2e.reference import Reference, make_prompt

LINES = 3
TOKENS = 8
WITNESS_S = 0.2


class Load:
    """Runs inside ``async with``; ``failed`` says what went wrong with each request that was not answered whole, and
    ``wrong`` which answers were not the reference's. No prompt is asked twice."""

    def __init__(
        self, *urls: str, model: str = "tiny", reference: Reference | None = None, pause_s: float = 0.0, seed: int = 0
    ) -> None:
        """The lines ask the ``urls`` in turn, and wait ``pause_s`` after each answer. ``seed``: its prompts are others
        than those of other seeds."""
        self.failed: list[str] = []
        self.wrong: list[str] = []
        self.done = 0
        self.remote = 0
        self._urls, self._model, self._reference = urls, model, reference
        self._pause_s, self._seed = pause_s, seed
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._line(number)) for number in range(max(LINES, len(self._urls)))]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def some(self, count: int, within_s: float = 60.0) -> None:
        """Wait until ``count`` more requests were answered."""
        goal = self.done + count

        async def are_answered() -> bool:
            return self.done >= goal

        await until(are_answered, f"{count} more answers", within_s=within_s)

    async def _line(self, number: int) -> None:
        seed = 1_000_000 * self._seed + 1000 * number
        url = self._urls[number % len(self._urls)]
        while not self._is_over:
            seed += 1
            prompt = make_prompt(100, seed=seed)
            try:
                answer = await ask(url, completion(prompt, TOKENS, self._model))
                if answer.status != 200 or len(answer.token_ids) != TOKENS:
                    self.failed.append(f"{answer.status} {answer.body}")
                elif self._reference is not None:
                    self._check(answer.token_ids, prompt, self._reference)
                self.remote += answer.account.get("prefill") == "remote"
            except Exception as error:
                self.failed.append(repr(error))
            self.done += 1
            await asyncio.sleep(self._pause_s)

    def _check(self, got: Sequence[int], prompt: Sequence[int], reference: Reference) -> None:
        try:
            reference.check(got, prompt, TOKENS)
        except AssertionError as error:
            self.wrong.append(str(error))


class Witness:
    """Looks again and again, inside ``async with``, at what should stay as it was at the start; ``other`` says what it
    saw instead."""

    def __init__(self, look: Callable[[], Awaitable[Any]]) -> None:
        self.other: list[str] = []
        self._look = look
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Witness:
        self._task = asyncio.create_task(self._watch(await self._look()))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self, first: Any) -> None:
        last = first
        while True:
            await asyncio.sleep(WITNESS_S)
            try:
                seen = await self._look()
            except Exception as error:
                seen = repr(error)
            if seen not in (first, last):
                self.other.append(str(seen))
            last = seen
