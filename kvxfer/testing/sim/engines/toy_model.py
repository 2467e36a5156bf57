"""What an executor needs of a model and a runner, without either: it writes in every block what that block would mean,
and its logits are zeros. It must never decide which engine computes what.

A block's tag is a checksum over all tokens up to its last one that is computed, made from the tag of the block before
as it stands in memory: so wrong bytes are found by the next computation on top of them.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence

import torch

from kvxfer.engine.runner import Chunk
from kvxfer.testing.sim.checkers import Invariant, Violation
from kvxfer.testing.sim.tagged_memory import tag_of
from kvxfer.testing.sim.view import ProcessView

VOCABULARY = 8


def tag(token_ids: Sequence[int], before: int = 0) -> int:
    """The checksum of a prefix that ends with ``token_ids``, after one of the tag ``before``."""
    return zlib.crc32(array("q", token_ids).tobytes(), before)


class ToyDetokenizer:
    def push(self, token: int) -> str:
        return "."

    def flush(self) -> str:
        return ""


class ToyModel:
    """As much of a LoadedModel as the executor asks of it."""

    config_fingerprint = "simulated"
    weights_fingerprint = "simulated"
    eos_ids: frozenset[int] = frozenset()

    def detokenizer(self, prompt_ids: Sequence[int]) -> ToyDetokenizer:
        return ToyDetokenizer()


class ToyRunner:
    """``tokens_of(block_table)``: the tokens of the sequence whose table that is, by which its blocks are judged."""

    def __init__(
        self, process: ProcessView, block_tokens: int, tokens_of: Callable[[Sequence[int]], list[int]]
    ) -> None:
        self.block_count, self.block_tokens = process.slot.blocks, block_tokens
        self._process = process
        self._tokens_of = tokens_of

    def wait_written(self) -> None:
        """Nothing is written late here."""

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        for chunk in chunks:
            self.check(chunk.block_table, self._tokens_of(chunk.block_table), chunk.start)
            self._compute(chunk)
        return torch.zeros(sum(chunk.need_logits for chunk in chunks), VOCABULARY)

    def check(self, blocks: Sequence[int], tokens: Sequence[int], computed: int) -> None:
        """The first ``computed`` of ``tokens`` stand in ``blocks``. Raises Violation."""
        step, found = self.block_tokens, 0
        for index in range(-(-computed // step)):
            found = tag(tokens[index * step : min((index + 1) * step, computed)], found)
            data = self._process.memory.blocks[blocks[index]]
            if tag_of(data) != found:
                raise Violation(
                    Invariant.CONFIRMED,
                    f"{self._process!r} computes on block {blocks[index]}, which does not hold the KV of its tokens",
                )

    def _compute(self, chunk: Chunk) -> None:
        process, step = self._process, self.block_tokens
        last = (chunk.start - 1) // step
        before = tag_of(process.memory.blocks[chunk.block_table[last]]) if chunk.start else 0
        at = chunk.start
        while at < chunk.end:
            index = at // step
            end = min((index + 1) * step, chunk.end)
            before = tag(chunk.token_ids[at - chunk.start : end - chunk.start], before)
            process.world.checkers.written(process.incarnation, chunk.block_table[index])
            process.memory.compute(chunk.block_table[index], before, index)
            at = end
