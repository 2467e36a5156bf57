"""Clients of both routers. Each asks what it knows the answer of, and does what a careful client does: before the first
byte it asks the other router again, after it never.

Decides what each failure is called; must never know which fault there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from kvxfer.openai.sse import EventDecoder
from soaking.records import TOO_LONG, Asked, Attempt, Question

ACCOUNT, ACCOUNT_COMMENT = "x-kvxfer-account", b": kvxfer-account "
CONNECT_S, SILENT_S, WHOLE_ANSWER_S = 3.0, 30.0, 90.0
AGAIN_AFTER_S = 0.2
ATTEMPTS_MAX = 8
LEFT_SHARE, STREAM_SHARE = 0.05, 0.6
PAUSE_S = 0.3


class _LeftError(Exception):
    """The client leaves."""


class Clients:
    """``lines`` clients at once until ``stop``."""

    def __init__(
        self, routers: dict[str, str], questions: Sequence[Question], model: str, seed: int, began_s: float
    ) -> None:
        self.asked: list[Asked] = []
        self._routers, self._questions, self._model, self._began_s = routers, questions, model, began_s
        self._seed, self._is_over = seed, False
        timeout = httpx.Timeout(SILENT_S, connect=CONNECT_S)
        self._clients = {name: httpx.AsyncClient(trust_env=False, timeout=timeout) for name in routers}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, lines: int) -> None:
        self._tasks = [asyncio.create_task(self._line(number)) for number in range(lines)]

    async def stop(self) -> None:
        """Let what runs end."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        for client in self._clients.values():
            await client.aclose()

    def now_s(self) -> float:
        return round(time.monotonic() - self._began_s, 3)

    async def _line(self, line: int) -> None:
        random = np.random.Generator(np.random.PCG64([self._seed, 2, line]))
        while not self._is_over:
            question = self._questions[int(random.integers(len(self._questions)))]
            names = list(self._routers)
            if random.random() < 0.5:
                names.reverse()
            asked = Asked(len(self.asked), question.number, self.now_s(), bool(random.random() < STREAM_SHARE))
            self.asked.append(asked)
            leaves_after = int(random.integers(0, 4)) if random.random() < LEFT_SHARE else None
            await self._ask(asked, question, names, leaves_after)
            asked.took_s = round(self.now_s() - asked.at_s, 3)
            await asyncio.sleep(float(random.exponential(PAUSE_S)))

    async def _ask(self, asked: Asked, question: Question, names: Sequence[str], leaves_after: int | None) -> None:
        for number in range(ATTEMPTS_MAX):
            attempt = Attempt(self.now_s(), names[number % len(names)])
            asked.attempts.append(attempt)
            try:
                async with asyncio.timeout(WHOLE_ANSWER_S):
                    await self._attempt(asked, attempt, question, leaves_after)
            except _LeftError:
                asked.outcome = "left"
            except TimeoutError:
                attempt.name, attempt.is_named = TOO_LONG, False
            except httpx.HTTPError as error:
                attempt.name, attempt.is_named = _name_of(error, attempt.had_byte)
                attempt.said = repr(error)
            except Exception as error:
                attempt.name, attempt.is_named, attempt.said = "client_error", False, repr(error)
            attempt.ended_s = self.now_s()
            if asked.outcome:
                return
            if attempt.had_byte:
                asked.outcome = "cut"
                return
            await asyncio.sleep(AGAIN_AFTER_S)
        asked.outcome = "failed"

    async def _attempt(self, asked: Asked, attempt: Attempt, question: Question, leaves_after: int | None) -> None:
        body = {
            "model": self._model,
            "prompt": list(question.prompt),
            "max_tokens": len(question.right),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": asked.is_stream,
        }
        url = f"{self._routers[attempt.router]}/v1/completions"
        got: list[int] = []
        async with self._clients[attempt.router].stream("POST", url, json=body, headers={ACCOUNT: "1"}) as response:
            if told := response.headers.get(ACCOUNT):
                _note_agents(attempt, json.loads(told))
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                attempt.name, attempt.is_named = _code_of(response.status_code, text)
                attempt.said = text[:300]
                return
            asked.prefill = response.headers.get("x-kvxfer-prefill", "")
            is_done, count = False, 0
            async for event in _events(response, attempt):
                if not asked.first_s and attempt.had_byte:
                    asked.first_s = round(self.now_s() - attempt.at_s, 3)
                if event is None:
                    is_done = True
                    continue
                if "error" in event:
                    attempt.name = str(event["error"].get("code") or "")
                    attempt.is_named, attempt.said = bool(attempt.name), json.dumps(event["error"])[:300]
                    attempt.name = attempt.name or "error_without_code"
                account = event.get("kvxfer") or {}
                asked.transfer = str(account.get("prefill", asked.transfer))
                _note_agents(attempt, account)
                for choice in event.get("choices", ()):
                    got += choice.get("token_ids") or ()
                attempt.had_token = bool(got)
                if tuple(got) != question.right[: len(got)]:
                    asked.outcome, asked.wrong = "wrong", f"{got} is not {list(question.right)}"
                    return
                count += 1
                if leaves_after is not None and count > leaves_after:
                    raise _LeftError
        if attempt.name:
            return
        if not is_done:
            attempt.name, attempt.is_named = "ended_without_a_word", False
        elif len(got) != len(question.right):
            asked.outcome, asked.wrong = "wrong", f"{len(got)} tokens, not {len(question.right)}"
        else:
            asked.outcome = "right"


async def _events(response: httpx.Response, attempt: Attempt) -> AsyncIterator[dict[str, Any] | None]:
    """The events of a stream and None for its end mark; or the one object of an answer, and None."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        text = await response.aread()
        attempt.had_byte = True
        yield json.loads(text)
        yield None
        return
    decoder = EventDecoder()
    async with contextlib.aclosing(response.aiter_bytes()) as chunks:
        async for chunk in chunks:
            attempt.had_byte = attempt.had_byte or bool(chunk)
            for event in decoder.feed(chunk):
                if event.data:
                    yield None if event.is_done else event.json()
                elif event.raw.lstrip().startswith(ACCOUNT_COMMENT):
                    _note_agents(attempt, json.loads(event.raw.lstrip().removeprefix(ACCOUNT_COMMENT)))


def _note_agents(attempt: Attempt, account: Mapping[str, Any]) -> None:
    """The workers that had it, as far as the router's account names them."""
    attempt.prefill_agent = str(account.get("prefill_agent") or attempt.prefill_agent)
    attempt.decode_agent = str(account.get("decode_agent") or attempt.decode_agent)


def _code_of(status: int, text: str) -> tuple[str, bool]:
    try:
        code = str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return f"{status}:without_code", False
    return f"{status}:{code}", True


def _name_of(error: httpx.HTTPError, had_byte: bool) -> tuple[str, bool]:
    """What a client calls it. After the first byte the router owes an end that says why."""
    kinds = {
        httpx.ConnectTimeout: "connect_timeout",
        httpx.ConnectError: "connect_refused",
        httpx.ReadTimeout: "silent",
        httpx.WriteTimeout: "silent",
        httpx.ReadError: "reset",
        httpx.WriteError: "reset",
        httpx.RemoteProtocolError: "closed",
    }
    name = kinds.get(type(error), type(error).__name__)
    return (f"{name}_in_answer", False) if had_byte else (name, type(error) in kinds)
