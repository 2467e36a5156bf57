"""Engines of several ranks of SGLang's classes, cut however: what every head of every token should be, and is."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.support.sglang.ranks import (
    HEAD_BYTES,
    LAYERS,
    POISON,
    SUCCESS,
    Rank,
    World,
    give,
    make_model,
    send,
    start,
    wait_for,
)

TOKENS_MAX = 256


@dataclasses.dataclass(frozen=True)
class Cutting:
    """``heads=0``: a latent."""

    prefill: int
    decode: int
    heads: int = 4
    tokens: tuple[int, int] = (16, 16)
    stages: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        stages = "" if self.stages == (1, 1) else " in {}:{} stages".format(*self.stages)
        sizes = "" if self.tokens == (16, 16) else " of {} and {} tokens".format(*self.tokens)
        kind = {0: " latent", 4: ""}.get(self.heads, f" {self.heads} heads")
        return f"{self.prefill}:{self.decode}{kind}{sizes}{stages}"


class Engines:
    """Both, with all their ranks. Decode's pages are poisoned."""

    def __init__(self, world: World, cutting: Cutting) -> None:
        self.world, self.cutting = world, cutting
        self.p, self.d = (
            [
                world.rank(role, rank=rank, tp=tp, stage=stage, stages=stages, heads=cutting.heads, tokens=tokens)
                for stage in range(stages)
                for rank in range(tp)
            ]
            for role, tp, stages, tokens in zip(
                *(("prefill", "decode"), (cutting.prefill, cutting.decode), cutting.stages, cutting.tokens), strict=True
            )
        )

    def heads_of(self, rank: Rank) -> slice:
        """Of a model's heads, those of a rank."""
        total = max(1, self.cutting.heads)
        held = max(1, total // rank.of)
        first = rank.at * total // rank.of
        return slice(first, first + held)

    def content(self, seed: int) -> list[np.ndarray]:
        """What a prompt's tokens are in each buffer: uint8 of [tokens, heads, bytes]."""
        draw, total = np.random.default_rng(seed), max(1, self.cutting.heads)
        shape = (TOKENS_MAX, total, HEAD_BYTES)
        return [draw.integers(0, 256, shape, np.uint8) for _ in range(LAYERS * (2 if self.cutting.heads else 1))]

    def write(self, pages: Sequence[int], seed: int, first: int = 0) -> None:
        """Prefill computes: those pages hold the tokens from the ``first`` on."""
        model, tokens = self.content(seed), self.cutting.tokens[0]
        for rank in self.p:
            for array, held in zip(rank.kv, [model[buffer] for buffer in rank.buffers], strict=True):
                for place, page in enumerate(pages):
                    begin = first + place * tokens
                    array[page] = held[begin : begin + tokens, self.heads_of(rank)].reshape(-1)

    def check(self, *arrived: tuple[Sequence[int], int, int, int], rows: Sequence[tuple[int, int]] = ()) -> None:
        """Decode's pages are those of prompts: (pages, seed, first token, tokens that came), its rows are prefill's
        (``rows``: of decode, and of prefill), and everything else is poisoned still."""
        tokens = self.cutting.tokens[1]
        for at, rank in enumerate(self.d):
            for buffer, array in zip(rank.buffers, rank.kv, strict=True):
                expected = np.full_like(array, POISON)
                for pages, seed, first, count in arrived:
                    held = self.content(seed)[buffer][first : first + count, self.heads_of(rank)]
                    flat = np.full((len(pages) * tokens, *held.shape[1:]), POISON, np.uint8)
                    flat[:count] = held
                    expected[list(pages)] = flat.reshape(len(pages), -1)
                assert np.array_equal(array, expected), f"rank {at}, buffer {buffer}"
            whose = self.p[-1] if rank.stages == 1 else self.p[rank.stage * self.cutting.prefill]
            for mine, theirs in zip(rank.aux, whose.aux, strict=True):
                expected = np.full_like(mine, POISON)
                for here, there in rows:
                    expected[here] = theirs[there]
                assert np.array_equal(mine, expected), f"rank {at}, auxiliary"


class Room:
    """A prompt of so many tokens, of which decode has the first ``prefix``."""

    def __init__(
        self, engines: Engines, tokens: int, source: Sequence[int], target: Sequence[int], row: int = 0, prefix: int = 0
    ) -> None:
        theirs, ours = engines.cutting.tokens
        self.engines, self.row, self.prefix = engines, row, prefix
        self.number = engines.world.room()
        self.base = prefix - prefix % theirs
        self.source = list(source)[: -(-(tokens - self.base) // theirs)]
        self.target = list(target)[: -(-(tokens - prefix) // ours)]
        self.arrived = min(self.base + len(self.source) * theirs, prefix + len(self.target) * ours) - prefix
        self.senders: list[Any] = []
        self.receivers: list[Any] = []

    def open(self) -> None:
        """SGLang has it on every rank of both sides, and decode knows prefill."""
        self.senders = [rank.sender(self.number) for rank in self.engines.p]
        self.receivers = [rank.receiver(self.number) for rank in self.engines.d]
        for rank, receiver in zip(self.engines.d, self.receivers, strict=True):
            rank.greet(receiver)

    def give(self) -> None:
        """Decode has pages, and prefill knows."""
        for receiver in self.receivers:
            give(receiver, self.target, self.row, prefix=self.prefix)
        for sender in self.senders:
            assert start(sender, len(self.source), self.row + 1) == self.base

    def send(self, first: int, last: int) -> None:
        self.engines.write(self.source[first:last], self.number, self.base + first * self.engines.cutting.tokens[0])
        for sender in self.senders:
            send(sender, self.source[first:last])

    def run(self, chunk: int = 2) -> None:
        self.open()
        self.give()
        for first in range(0, max(1, len(self.source)), chunk):
            self.send(first, min(first + chunk, len(self.source)))

    def wait(self) -> None:
        for side in (*self.receivers, *self.senders):
            wait_for(side, SUCCESS)

    @property
    def result(self) -> tuple[Sequence[int], int, int, int]:
        return self.target, self.number, self.prefix, self.arrived

    def clear(self) -> None:
        for side in (*self.receivers, *self.senders):
            side.clear()


def engines_of(directory: pathlib.Path, cutting: Cutting) -> Iterator[Engines]:
    """For a fixture."""
    model = make_model(directory / "model", num_key_value_heads=max(1, cutting.heads))
    with World(model, is_bare=True) as world:
        yield Engines(world, cutting)


def are_idle(engines: Engines) -> bool:
    """Whether nothing is granted, read or awaited on any rank, and no page is in a ledger."""
    cores = [rank.manager.core for rank in (*engines.p, *engines.d)]
    return all(core.statistics().agent.is_idle and core._pools.ledger.is_idle for core in cores)
