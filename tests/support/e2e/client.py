"""An OpenAI client that remembers everything of an answer: status, headers, tokens, the account of the transfer, and
how a stream ended. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from kvxfer.openai.sse import EventDecoder
from kvxfer.openai.transfer_params import Part, TransferEnd, TransferParams
from kvxfer.types import TransferId

TEST_LEG_KEY = "a-key-of-these-tests"
"""Workers take it, beside those that the coordinator hands out to routers; a router passes none of a client's on."""
ANSWER_S = 90.0
"""Longest wait for one answer: above every bound that a test states."""


@dataclasses.dataclass
class Answer:
    """One answer. ``events``: of a stream, parsed; ``is_done``: it ended with its end mark."""

    status: int
    headers: httpx.Headers
    body: dict[str, Any] = dataclasses.field(default_factory=dict)
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    is_done: bool = False
    has_partial_event: bool = False

    @property
    def token_ids(self) -> list[int]:
        objects = self.events or [self.body]
        return [token for one in objects for choice in one.get("choices", ()) for token in choice.get("token_ids", ())]

    @property
    def account(self) -> dict[str, Any]:
        """The ``kvxfer`` object."""
        for one in reversed(self.events or [self.body]):
            if "kvxfer" in one:
                account: dict[str, Any] = one["kvxfer"]
                return account
        return {}

    @property
    def error(self) -> dict[str, Any]:
        for one in reversed(self.events or [self.body]):
            if "error" in one:
                error: dict[str, Any] = one["error"]
                return error
        return {}

    @property
    def prefill(self) -> str:
        return self.headers.get("x-kvxfer-prefill", "")


def completion(prompt: Sequence[int] | str, max_tokens: int, model: str, **more: Any) -> dict[str, Any]:
    """The body of a greedy completion that shows its tokens and does not end before ``max_tokens``."""
    return {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


@contextlib.asynccontextmanager
async def connected(timeout_s: float = ANSWER_S) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_keepalive_connections=0)
    shown = {"x-kvxfer-leg-key": TEST_LEG_KEY}
    async with httpx.AsyncClient(trust_env=False, timeout=timeout_s, limits=limits, headers=shown) as client:
        yield client


async def ask(
    url: str, body: dict[str, Any] | bytes, path: str = "/v1/completions", *, timeout_s: float = ANSWER_S
) -> Answer:
    """Ask and wait for the whole answer, streamed where the body says so."""
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    async with connected(timeout_s) as client, client.stream("POST", f"{url}{path}", **content) as response:
        answer = Answer(response.status_code, response.headers)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            await response.aread()
            answer.body = response.json()
            return answer
        decoder = EventDecoder()
        async for chunk in response.aiter_bytes():
            for event in decoder.feed(chunk):
                answer.is_done = answer.is_done or event.is_done
                if not event.is_done:
                    answer.events.append(event.json())
        answer.has_partial_event = decoder.has_partial_event
        return answer


class Stream:
    """A streamed answer that is read while it comes: ``await first()``, then ``await rest()``."""

    def __init__(self, url: str, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self.first_event = asyncio.Event()
        self._task = asyncio.create_task(self._read(url, {**body, "stream": True}, path))
        self.answer: Answer | None = None

    async def _read(self, url: str, body: dict[str, Any], path: str) -> Answer:
        async with connected() as client, client.stream("POST", f"{url}{path}", json=body) as response:
            self.answer = answer = Answer(response.status_code, response.headers)
            decoder = EventDecoder()
            async for chunk in response.aiter_bytes():
                for event in decoder.feed(chunk):
                    answer.is_done = answer.is_done or event.is_done
                    if not event.is_done:
                        answer.events.append(event.json())
                        self.first_event.set()
            answer.has_partial_event = decoder.has_partial_event
            return answer

    async def first(self) -> None:
        """Wait for the first event; raise what the stream raised where it failed before."""
        waiting = asyncio.create_task(self.first_event.wait())
        await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            raise AssertionError(f"the stream ended before its first event: {self._task.result()}")

    async def rest(self) -> Answer:
        return await self._task

    async def leave(self) -> None:
        """Close the connection, as a client that loses interest does."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def new_transfer_id() -> TransferId:
    return TransferId(secrets.token_bytes(16))


def leg(body: dict[str, Any], transfer_id: TransferId, role: str, source: str, destination: str) -> dict[str, Any]:
    """``body`` as a router would send it to one of the two workers."""
    params = TransferParams(transfer_id, 1, Part(role), TransferEnd(source), TransferEnd(destination))
    return {**body, "kv_transfer_params": params.to_json()}
