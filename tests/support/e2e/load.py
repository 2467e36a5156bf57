"""Requests one after the other, in several lines at once, while a test breaks things. Decides nothing."""

from __future__ import annotations

import asyncio

from tests.support.e2e.client import ask, completion
from tests.support.e2e.cluster import until
from tests.support.e2e.reference import make_prompt

LINES = 3
TOKENS = 8


class Load:
    """Runs inside ``async with``; ``failed`` says what went wrong with each request that was not answered whole."""

    def __init__(self, url: str, *, model: str = "tiny") -> None:
        self.failed: list[str] = []
        self.done = 0
        self.remote = 0
        self._url, self._model = url, model
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._line(number)) for number in range(LINES)]
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
        seed = 1000 * number
        while not self._is_over:
            seed += 1
            try:
                answer = await ask(self._url, completion(make_prompt(100, seed=seed), TOKENS, self._model))
                if answer.status != 200 or len(answer.token_ids) != TOKENS:
                    self.failed.append(f"{answer.status} {answer.body}")
                self.remote += answer.account.get("prefill") == "remote"
            except Exception as error:
                self.failed.append(repr(error))
            self.done += 1
