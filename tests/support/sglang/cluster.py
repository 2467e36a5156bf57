"""The servers that the end-to-end tests share, what they are asked, and what they answer; and load on both roles, as a
router makes it. Decides what a right answer is: token for token that of one server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import pathlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

import aiohttp
import requests

from tests.support.sglang.launch import make_tiny_llama
from tests.support.sglang.servers import Proxy, Server

TOKENS = 12
GONE_S = 3.5
"""A peer that is gone is known within 3 s, on a host that does other things too."""
IDLE_S = 30.0
PROMPTS = 40
MOMENT_S = 0.1
"""So long after it came a request is known at both roles, as a rule."""


def body_of(prompt: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, **more}


def ask(url: str, prompt: Sequence[int], *, tokens: int = TOKENS, **more: Any) -> requests.Response:
    return requests.post(f"{url}/generate", json=body_of(prompt, tokens, **more), timeout=120)


def tokens_of(answer: requests.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    value: Any = answer.json()
    return list(value["output_ids"])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(3, 400), k=length)


class Cluster:
    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.model = model = make_tiny_llama(directory / "tiny")
        self.prefill = Server(directory, model, "prefill")
        self.decode = Server(directory, model, "decode", bootstrap=self.prefill.bootstrap)
        self.one = Server(directory, model, "", "--disable-radix-cache")
        self.proxy = Proxy(self.prefill, self.decode)
        self.known: list[tuple[list[int], list[int]]] = []
        """Prompts, each with the tokens of one server."""

    @property
    def servers(self) -> tuple[Server, ...]:
        return self.prefill, self.decode, self.one

    def __enter__(self) -> Cluster:
        try:
            for server in self.servers:
                server.start()
            for server in self.servers:
                server.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.kill()

    def wait_returned(self, timeout_s: float = IDLE_S) -> None:
        """Until both roles have every page back."""
        begun_s = time.monotonic()
        while True:
            used = [server.used_tokens() for server in (self.prefill, self.decode)]
            if all(one.tokens == 0 and one.at_s >= begun_s for one in used):
                return
            assert time.monotonic() - begun_s < timeout_s, f"after {timeout_s:g} s prefill and decode still use {used}"
            time.sleep(0.02)

    def check_pools(self) -> None:
        """SGLang's idle loop checks that every page is accounted for, and says so where one is not."""
        for server in (self.prefill, self.decode):
            assert server.process is not None
            assert server.process.poll() is None, server.last_lines()
            assert "memory leak" not in server.log.read_text(errors="replace").lower(), server.last_lines()


def answers_are_those_of_one(cluster: Cluster, url: str, lengths: Sequence[int], seed: int) -> None:
    """Each prompt once, and once more out of the prefix caches; and one that begins as it does."""
    for length in lengths:
        for prompt in (prompt_of(length, seed), prompt_of(length, seed), [*prompt_of(length, seed), 7, 8, 9]):
            wanted = tokens_of(ask(cluster.one.url, prompt))
            assert tokens_of(ask(url, prompt)) == wanted, length


@dataclasses.dataclass
class Leg:
    """What one role said of one request. ``tokens``: those that were seen; ``status``: 0 where it did not answer."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    status: int = 0
    why: str = ""
    """Of a failure, in SGLang's words."""
    ended_s: float = 0.0
    gave_up: bool = False
    """The test hung up."""
    has_begun: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """The first token was seen."""

    @property
    def is_done(self) -> bool:
        return self.status == 200 and not self.why


@dataclasses.dataclass
class Asked:
    """One request, with a leg at each role."""

    number: int
    prompt: list[int]
    rid: str
    begun_s: float
    aborted_s: float = 0.0
    """When a role had been told to abort it, where the test did that before it was over."""
    prefill: Leg = dataclasses.field(default_factory=Leg)
    decode: Leg = dataclasses.field(default_factory=Leg)

    @property
    def over_s(self) -> float:
        """From when on nothing holds pages for it, but what is slow to notice."""
        if self.is_aborted:
            return self.aborted_s
        return max(leg.ended_s for leg in (self.prefill, self.decode) if not leg.gave_up)

    @property
    def is_aborted(self) -> bool:
        """The abort was quicker than the last token."""
        return self.aborted_s > 0 and not self.decode.is_done

    def check_tokens(self, wanted: Sequence[int]) -> None:
        """Not one that another request should have; all of them where it succeeded."""
        seen = self.decode.tokens
        assert seen == list(wanted[: len(seen)]), f"{self.rid}: {seen} is not how {list(wanted)} begins"
        assert seen or not self.decode.is_done


class Client:
    """Sends both legs of a request at once, as a router does, and keeps what each role said, token for token."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._session: aiohttp.ClientSession | None = None
        self._name, self._numbers = secrets.token_hex(4), itertools.count()

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=120), connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(
        self, prompt: list[int], tokens: int, number: int = 0, began: Callable[[Asked], Awaitable[None]] | None = None
    ) -> Asked:
        """Once both legs are over: where one failed, the other is given up after GONE_S. ``began`` is run beside them,
        and ended with them."""
        rid = f"{self._name}-{next(self._numbers)}-"  # SGLang aborts all that begin so
        asked = Asked(number, prompt, rid, time.monotonic())
        more = {
            "rid": rid,
            "stream": True,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._cluster.prefill.bootstrap,
            "bootstrap_room": random.getrandbits(62) + 1,
        }
        body = body_of(prompt, tokens, **more)
        legs = [
            asyncio.ensure_future(self._leg(server.url, body, leg))
            for server, leg in ((self._cluster.prefill, asked.prefill), (self._cluster.decode, asked.decode))
        ]
        beside = asyncio.ensure_future(began(asked)) if began is not None else None
        try:
            await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
            has_failed = any(task.done() and not leg.is_done for leg, task in self._pairs(asked, legs))
            await asyncio.wait(legs, timeout=GONE_S if has_failed else None)
            for leg, task in self._pairs(asked, legs):
                if not task.done():
                    leg.gave_up, leg.ended_s = True, time.monotonic()
        finally:
            for task in (*legs, *([beside] if beside is not None else ())):
                task.cancel()
            await asyncio.gather(*legs, *([beside] if beside is not None else ()), return_exceptions=True)
        return asked

    @staticmethod
    def _pairs(asked: Asked, legs: Sequence[asyncio.Task[None]]) -> list[tuple[Leg, asyncio.Task[None]]]:
        return list(zip((asked.prefill, asked.decode), legs, strict=True))

    async def _leg(self, url: str, body: dict[str, Any], leg: Leg) -> None:
        assert self._session is not None
        try:
            async with self._session.post(f"{url}/generate", json=body) as answer:
                status = answer.status
                if status != 200:
                    leg.why = (await answer.text())[:1000]
                else:
                    await self._read(answer, leg)
                leg.status = status
        except (aiohttp.ClientError, TimeoutError) as error:
            leg.why = f"{type(error).__name__}: {error}"
        leg.ended_s = time.monotonic()

    @staticmethod
    async def _read(answer: aiohttp.ClientResponse, leg: Leg) -> None:
        async for line in answer.content:
            text = line.decode().removeprefix("data:").strip()
            if not text or text == "[DONE]":
                continue
            value: Any = json.loads(text)
            if "error" in value:
                leg.why = str(value["error"])
                return
            leg.tokens = list(value["output_ids"])
            leg.has_begun.set()
            reason = value["meta_info"]["finish_reason"]
            if reason is not None and reason["type"] == "abort":
                leg.why = str(reason.get("message") or "aborted")


class Load:
    """Requests, ``width`` at once, from the beginning to the end of the context, of more prompts than the prefix caches
    hold; ``asked`` has them in the order in which they ended."""

    def __init__(self, cluster: Cluster, *, width: int = 4) -> None:
        self._cluster, self._width = cluster, width
        self._tasks: list[asyncio.Task[None]] = []
        self._turn = itertools.count()
        self._is_over = False
        self._under_way: list[Asked] = []
        self.asked: list[Asked] = []

    async def __aenter__(self) -> Load:
        if not self._cluster.known:
            prompts = [prompt_of(100 + 40 * number, seed=77) for number in range(PROMPTS)]
            answers = await asyncio.gather(*(asyncio.to_thread(ask, self._cluster.one.url, one) for one in prompts))
            self._cluster.known += zip(prompts, map(tokens_of, answers), strict=True)
        self._tasks = [asyncio.ensure_future(self._work()) for _ in range(self._width)]
        return self

    async def __aexit__(self, kind: object, error: object, where: object) -> None:
        self._is_over = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, BaseException) and kind is None:
                raise result

    async def successes(self, count: int, timeout_s: float) -> None:
        """Wait until so many requests that begin from now on have succeeded."""
        begun_s = time.monotonic()
        while sum(one.decode.is_done and one.begun_s >= begun_s for one in self.asked) < count:
            for task in self._tasks:
                if task.done():
                    task.result()
            assert time.monotonic() - begun_s < timeout_s, self.last_lines()
            await asyncio.sleep(0.02)

    async def computing(self, count: int, timeout_s: float) -> None:
        """Wait until so many requests are under way that prefill has had for a moment, and still has."""
        begun_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if sum(not one.prefill.ended_s and now_s - one.begun_s > MOMENT_S for one in self._under_way) >= count:
                return
            assert now_s - begun_s < timeout_s, self.last_lines()
            await asyncio.sleep(0.005)

    def told(self, role: str, lost_s: float) -> list[Leg]:
        """Where ``role`` was lost then: the failures at the other one, of requests that were under way; without those
        that the test gave up, since the lost one had not asked for their pages yet, or never came to."""
        legs = [
            one.decode if role == "prefill" else one.prefill
            for one in self.asked
            if one.begun_s < lost_s and not one.decode.is_done
        ]
        return [leg for leg in legs if leg.ended_s >= lost_s and not leg.is_done and not leg.gave_up]

    def last_lines(self) -> str:
        return "\n".join(f"{one.rid} prefill {one.prefill} decode {one.decode}" for one in self.asked[-8:])

    async def _note(self, asked: Asked) -> None:
        self._under_way.append(asked)

    async def _work(self) -> None:
        async with Client(self._cluster) as client:
            while not self._is_over:
                number = next(self._turn) % PROMPTS
                prompt, wanted = self._cluster.known[number]
                one = await client.send(prompt, TOKENS, number, self._note)
                self._under_way.remove(one)
                one.check_tokens(wanted)
                self.asked.append(one)
                if not one.decode.is_done:
                    await asyncio.sleep(0.05)
