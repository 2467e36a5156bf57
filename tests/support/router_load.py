"""An open loop of requests through the real `openai` client, as clients come: each second as many as were said,
whatever became of those before. Decides what a lost request is: one whose answer is an error, or not the right one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import openai


class OpenLoop:
    """Completions of one ``body``, greedy, every second one a stream. ``failures`` says what became of those that were
    lost; ``done`` counts the others. ``alone``: an engine that says before the loop begins what is right."""

    def __init__(self, url: str, alone: str, body: dict[str, Any], *, per_s: float) -> None:
        self._url, self._per_s = url, per_s
        self._body: Any = {**body, "temperature": 0}
        self._is_over = threading.Event()
        self._wanted = asyncio.run(self._ask_once(alone))
        self.asked, self.done = 0, 0
        self.failures: list[str] = []

    def _client(self, url: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120)

    async def _ask_once(self, url: str) -> list[str]:
        async with self._client(url) as client:
            return [await self._text(client, stream=stream) for stream in (False, True)]

    async def _ask_all(self) -> None:
        async with self._client(self._url) as client:
            tasks = []
            while not self._is_over.is_set():
                tasks.append(asyncio.ensure_future(self._ask(client, self.asked)))
                self.asked += 1
                await asyncio.sleep(1 / self._per_s)
            await asyncio.gather(*tasks)

    async def _ask(self, client: openai.AsyncOpenAI, number: int) -> None:
        wanted = self._wanted[number % 2]
        try:
            text = await self._text(client, stream=number % 2 == 1)
        except openai.APIError as error:
            self.failures.append(f"{number}: {type(error).__name__}: {error}")
            return
        if text == wanted:
            self.done += 1
        else:
            self.failures.append(f"{number}: {text!r} is not {wanted!r}")

    async def _text(self, client: openai.AsyncOpenAI, *, stream: bool) -> str:
        if not stream:
            return str((await client.completions.create(**self._body)).choices[0].text)
        chunks = [chunk async for chunk in await client.completions.create(**self._body, stream=True)]
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Leaving it waits for those that are under way."""
        thread = threading.Thread(target=asyncio.run, args=(self._ask_all(),), name="open loop")
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()
