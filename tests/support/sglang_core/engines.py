"""Engines of several ranks, cut however, over numpy buffers: what every head of every token should be, and is."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.connectors.sglang.destination import RoomSource
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.connectors.sglang.source import RoomReader
from kvxfer.types import Role, TransferId
from tests.support.sglang_core.cores import POISON, ROWS, Rank, new_id, options, running, until

LAYERS = 4
SIZES = {"k": 24, "v": 16}
"""Bytes of one head of one token."""
LATENT = {"latent": 40}
TOKENS_MAX = 96


@dataclasses.dataclass(frozen=True)
class Cutting:
    """How an engine is cut."""

    tp: int = 1
    pp: int = 1
    page_tokens: int = 4
    heads: int = 4
    sizes: tuple[tuple[str, int], ...] = tuple(SIZES.items())

    def shape(self, pp_rank: int, tp_rank: int) -> KvShape:
        """Buffers as SGLang has them: all of a part's layers, then the next part's."""
        each = LAYERS // self.pp
        layers = range(pp_rank * each, (pp_rank + 1) * each)
        buffers = [(layer, part, size) for part, size in self.sizes for layer in layers]
        held = tuple(zip(*buffers, strict=True))
        return KvShape(*held, self.page_tokens, tp_rank, self.tp, self.heads)  # type: ignore[arg-type]

    @property
    def shapes(self) -> list[KvShape]:
        return [self.shape(pp_rank, tp_rank) for pp_rank in range(self.pp) for tp_rank in range(self.tp)]


def content(seed: int, cutting: Cutting) -> dict[tuple[int, str], npt.NDArray[np.uint8]]:
    """What a model keeps of a prompt: of each layer and part uint8 of shape [tokens, heads, bytes], never POISON."""
    draw = np.random.default_rng(seed)
    return {
        (layer, part): draw.integers(0, POISON, (TOKENS_MAX, cutting.heads, size), np.uint8)
        for layer in range(LAYERS)
        for part, size in cutting.sizes
    }


@dataclasses.dataclass
class Engine:
    cutting: Cutting
    ranks: list[Rank]

    @classmethod
    def make(cls, name: str, role: Role, directory: pathlib.Path, cutting: Cutting, **more: Any) -> Engine:
        pages, states, changes = more.pop("pages", 24), more.pop("states", 0), more.pop("changes", {})
        chosen = options(directory, **changes)
        return cls(
            cutting,
            [
                Rank(f"{name}.{at}", role, chosen, rank=at, pages=pages, states=states, shape=shape, **more)
                for at, shape in enumerate(cutting.shapes)
            ],
        )

    @property
    def sources(self) -> list[RoomSource]:
        return [RoomSource(r.name, r.rank, s) for r, s in zip(self.ranks, self.cutting.shapes, strict=True)]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.cutting.page_tokens)

    def write(self, pages: Sequence[int], seed: int) -> None:
        """Whole pages, so that what stands behind a prompt's end is known too."""
        model = content(seed, self.cutting)
        for rank, shape in zip(self.ranks, self.cutting.shapes, strict=True):
            for array, layer, part in zip(rank.kv, shape.layers, shape.parts, strict=True):
                for at, page in enumerate(pages):
                    tokens = slice(at * shape.page_tokens, (at + 1) * shape.page_tokens)
                    array[page] = model[layer, part][tokens, shape.heads.start : shape.heads.stop].reshape(-1)

    def expected(self, rank: int, rooms: Sequence[tuple[Sequence[int], int, int]]) -> list[npt.NDArray[np.uint8]]:
        """The buffers of a rank that had (pages, seed, tokens that came) and nothing else."""
        shape = self.cutting.shapes[rank]
        found = [np.full_like(array, POISON) for array in self.ranks[rank].kv]
        for pages, seed, tokens in rooms:
            model = content(seed, self.cutting)
            for array, layer, part in zip(found, shape.layers, shape.parts, strict=True):
                for token in range(tokens):
                    page, slot = pages[token // shape.page_tokens], token % shape.page_tokens
                    held = model[layer, part][token, shape.heads.start : shape.heads.stop].reshape(-1)
                    array[page, slot * held.size : (slot + 1) * held.size] = held
        return found

    def check(self, *rooms: tuple[Sequence[int], int, int]) -> None:
        for at, rank in enumerate(self.ranks):
            wanted = zip(self.expected(at, rooms), rank.kv, strict=True)
            for buffer, (expected, found) in enumerate(wanted):
                where = np.argwhere(expected != found)
                assert not len(where), f"{rank.name}, buffer {buffer}: {len(where)} bytes, first at {where[0]}"

    @property
    def is_free(self) -> bool:
        """No page is in the ledger of any rank, and nothing is under way."""
        return all(r.core._pools.ledger.is_idle and r.core.statistics().agent.is_idle for r in self.ranks)  # type: ignore[union-attr]


@dataclasses.dataclass
class Room:
    """One prompt of so many tokens on its way from ``p`` to ``d``."""

    p: Engine
    d: Engine
    number: int
    tokens: int
    source: Sequence[int]
    target: Sequence[int]
    seed: int = 0
    ids: list[TransferId] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.source = list(self.source)[: self.p.pages_for(self.tokens)]
        self.target = list(self.target)[: self.d.pages_for(self.tokens)]
        self.seed = self.seed or self.number

    @property
    def arrived(self) -> tuple[Sequence[int], int, int]:
        given = [
            len(pages) * engine.cutting.page_tokens for engine, pages in ((self.p, self.source), (self.d, self.target))
        ]
        return self.target, self.seed, min(given)

    def begin(self, aux_row: int = 0) -> None:
        """All decode ranks want it, and tell those that they chose."""
        for rank in self.p.ranks:
            rank.sources.accept(self.number)
        for rank, shape in zip(self.d.ranks, self.d.cutting.shapes, strict=True):
            transfer_id = new_id()
            self.ids.append(transfer_id)
            rank.destinations.begin(self.number, transfer_id, self.p.sources, self.target, aux_row)
            for source in rank.destinations.choose(self.p.sources):
                reader = RoomReader(transfer_id, rank.name, rank.rank, len(self.target), shape)
                self.p.ranks[source.rank].sources.reader(self.number, reader)

    def send(self, first: int, last: int, *, is_last: bool, aux_row: int = 0, **more: Any) -> None:
        """Pages of all prefill ranks."""
        for rank in self.p.ranks:
            rank.sources.send(
                self.number,
                first,
                self.source[first:last],
                is_last=is_last,
                aux_row=aux_row if is_last else None,
                **more,
            )

    def run(self, chunk: int = 2, aux_row: int = 0) -> None:
        self.p.write(self.source, self.seed)
        for rank in self.p.ranks:
            rank.write(rank.aux, (aux_row,), 1000 + self.seed)
        self.begin(aux_row)
        for first in range(0, len(self.source), chunk):
            self.send(first, first + chunk, is_last=False)
        self.send(len(self.source), len(self.source), is_last=True, aux_row=aux_row)

    def wait(self) -> None:
        for rank in self.d.ranks:
            rank.wait("done", self.number)
        for rank in self.p.ranks:
            rank.wait("sent", self.number)

    def arrive(self) -> None:
        """All of it is sent, and is where it should be; nothing else is."""
        self.run()
        self.wait()
        self.d.check(self.arrived)

    def clear(self) -> None:
        for rank in self.p.ranks:
            rank.sources.clear(self.number)
        for rank in self.d.ranks:
            rank.destinations.clear(self.number)


@contextlib.contextmanager
def engines(
    directory: pathlib.Path, prefill: Cutting, decode: Cutting, *, states: int = 0, **changes: Any
) -> Iterator[tuple[Engine, Engine]]:
    """A prefill engine ``p`` and a decode engine ``d``; nothing is under way when it is over."""
    p = Engine.make("p", Role.PREFILL, directory, prefill, states=states, changes=changes)
    d = Engine.make("d", Role.DECODE, directory, decode, states=states, changes=changes)
    with running(*p.ranks, *d.ranks):
        yield p, d
        until(lambda: p.is_free and d.is_free)


def aux_is_of(d: Engine, p: Rank, source_row: int, row: int) -> bool:
    """Whether that auxiliary row of every decode rank is that of one prefill rank, and no other was touched."""
    for rank in d.ranks:
        for ours, theirs in zip(rank.aux, p.aux, strict=True):
            others = [at for at in range(ROWS) if at != row]
            if (ours[row] != theirs[source_row]).any() or (ours[others] != POISON).any():
                return False
    return True
