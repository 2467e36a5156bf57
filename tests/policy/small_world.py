"""A small world in virtual time, for tests of policies: workers with caches and true speeds, requests with prefixes.

A P computes one prompt after another, a D runs its streams side by side, a transfer takes its time. What is right here
is what `seconds` is to find out by itself: it sees ends and counts, as the router does.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from kvxfer.policy.candidates import Candidate
from kvxfer.policy.chooser import Chooser, Policy, Prompt
from kvxfer.policy.curves import Curve
from kvxfer.policy.place import place
from kvxfer.policy.prefixes import Chain
from kvxfer.types import AgentRef, DataAddress, Incarnation, Load, Member, Role, WorkerInfo

BLOCK = 512
"""Tokens of a key."""
TRUE_CURVE = Curve(0.02, 1e-4, 2e-9)
"""Of an 8B model on one fast GPU: 10,000 tokens a second."""


@dataclasses.dataclass
class Request:
    """``blocks``: the names of its prompt's blocks, each of BLOCK tokens; the last may be a part of one."""

    at_s: float
    blocks: tuple[str, ...]
    answer: int = 100
    ttft_s: float = 0.0
    cached: float = 0.0
    prefill: str = ""
    decode: str = ""
    predicted_s: float | None = None

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK

    @property
    def chain(self) -> Chain:
        keys, text = [], ""
        for block in self.blocks:
            text += "/" + block
            keys.append(hash(text))
        return Chain(keys, [4 * BLOCK * at for at in range(1, len(keys) + 1)])


class Engine:
    """One worker: ``factor`` of TRUE_CURVE's times; ``cache`` tokens; ``lie``: what it says in place of its cached
    tokens."""

    def __init__(
        self,
        name: str,
        role: Role,
        *,
        factor: float = 1.0,
        cache: int = 1 << 30,
        lie: Callable[[int], int | None] = int,
    ) -> None:
        self.ref = AgentRef(name, Incarnation(1, bytes(16)))
        self.role, self.factor, self.cache, self.lie = role, factor, cache, lie
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.free_s = 0.0
        self.busy_s = 0.0
        self.prefilling = self.decoding = 0

    def candidate(self) -> Candidate:
        info = WorkerInfo(self.ref.agent_id, self.role, "m", "http://x", max_context_tokens=1 << 30)
        member = Member(self.ref, info, DataAddress("", 0, "", ""), (), Load())
        return Candidate(member, prefill_inflight=self.prefilling, decode_inflight=self.decoding)

    def compute(self, request: Request, now_s: float, scale: float) -> tuple[float, int]:
        """When the prompt is computed, and how many tokens were in the cache."""
        chain = request.chain
        hit = next((at for at in range(len(chain.keys), 0, -1) if chain.keys[at - 1] in self.blocks), 0)
        cached = min(hit * BLOCK, request.tokens - 1)
        self.keep(chain)
        seconds = TRUE_CURVE.seconds(request.tokens - cached, cached) * self.factor * scale
        self.free_s = max(self.free_s, now_s) + seconds
        self.busy_s += seconds
        return self.free_s, cached

    def keep(self, chain: Chain) -> None:
        for key in reversed(chain.keys):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) * BLOCK > self.cache:
            self.blocks.popitem(last=False)


class World:
    """Runs requests over engines. All its times are multiplied by ``scale``. The state of D is 30 us of a step for each
    stream, and transfers take 5 ms and 2 us a token."""

    def __init__(
        self, engines: list[Engine], policy: Policy, *, scale: float = 1.0, seed: int = 0, **chooser: Any
    ) -> None:
        self.engines = {engine.ref: engine for engine in engines}
        self.chooser = Chooser(policy, **chooser)
        self.scale = scale
        self.draw = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()

    def run(self, requests: list[Request]) -> list[Request]:
        for request in requests:
            self._at(request.at_s * self.scale, lambda now_s, one=request: self._arrive(one, now_s))
        while self._events:
            at_s, _, act = heapq.heappop(self._events)
            act(at_s)
        return requests

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), act))

    def _arrive(self, request: Request, now_s: float) -> None:
        candidates = {ref: engine.candidate() for ref, engine in self.engines.items()}
        prompt = Prompt("m", 0.0, request.chain.size, request.chain)
        scores = self.chooser.scores(prompt, now_s)
        placed = place(candidates.values(), model="m", tie_break=self.draw.getrandbits(60), scores=scores)
        decode = self.engines[placed.decode.ref]
        source = None if placed.prefill is None else candidates[placed.prefill.ref]
        choice = self.chooser.chosen(prompt, placed, source, candidates[placed.decode.ref], now_s)
        request.predicted_s = choice.predicted_s
        request.decode = decode.ref.agent_id
        decode.decoding += 1
        if placed.prefill is None:
            ended_s, request.cached = decode.compute(request, now_s, self.scale)
            self._at(ended_s, lambda at_s: first(at_s))
        else:
            engine = self.engines[placed.prefill.ref]
            request.prefill = engine.ref.agent_id
            engine.prefilling += 1
            ended_s, cached = engine.compute(request, now_s, self.scale)
            request.cached = cached

            def computed(at_s: float) -> None:
                engine.prefilling -= 1
                choice.prefilled(at_s, tokens=request.tokens, cached=engine.lie(cached))
                decode.keep(request.chain)
                self._at(at_s + self.scale * (0.005 + 2e-6 * request.tokens), first)

            self._at(ended_s, computed)

        def first(at_s: float) -> None:
            request.ttft_s = at_s - now_s
            choice.first_token(at_s)
            self._at(at_s + self.scale * request.answer * (0.01 + 3e-5 * decode.decoding), last)

        def last(at_s: float) -> None:
            decode.decoding -= 1
            choice.answered(at_s)
            choice.over(at_s)


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Poisson arrivals of so many a second."""
    draw, at_s = random.Random(seed), 0.0
    while True:
        at_s += draw.expovariate(rate)
        yield at_s


def no_sharing(count: int, rate: float, seed: int = 0) -> list[Request]:
    draw, times = random.Random(seed), arrivals(rate, seed)
    return [
        Request(next(times), tuple(f"{seed}-{n}-{at}" for at in range(min(60, 1 + int(draw.expovariate(1 / 6))))))
        for n in range(count)
    ]


def sessions(count: int, turns: int, rate: float, seed: int = 0, *, think_s: float = 5.0) -> list[Request]:
    """Each turn is the one before, its answer and some more."""
    draw, times, made = random.Random(seed), arrivals(rate / turns, seed), []
    for session in range(count):
        at_s, blocks = next(times), tuple(f"{seed}-{session}-{at}" for at in range(draw.randint(1, 8)))
        for turn in range(turns):
            made.append(Request(at_s, blocks))
            at_s += draw.expovariate(1 / think_s) + 1.0
            blocks += tuple(f"{seed}-{session}-{turn}-{at}" for at in range(draw.randint(1, 3)))
    return sorted(made, key=lambda one: one.at_s)


def hot_prefix(count: int, rate: float, seed: int = 0) -> list[Request]:
    """Half of the requests begin with the same 20 blocks."""
    draw, made = random.Random(seed), no_sharing(count, rate, seed)
    for request in made:
        if draw.random() < 0.5:
            request.blocks = tuple(f"hot-{at}" for at in range(20)) + request.blocks[:3]
    return made


def percentile(requests: list[Request], part: float, *, skip: int = 0) -> float:
    """Of the times to the first token, without the first ``skip`` requests."""
    times = sorted(one.ttft_s for one in requests[skip:])
    return times[min(len(times) - 1, int(part * len(times)))]


def cluster(prefills: int, decodes: int, **engine: Any) -> list[Engine]:
    return [Engine(f"p{n}", Role.PREFILL, **engine) for n in range(prefills)] + [
        Engine(f"d{n}", Role.DECODE, **engine) for n in range(decodes)
    ]
