"""How long a request a worker can hold: the context that its engine was started with, and the tokens of its KV pool.

Compares sizes of whole workers: it never knows what is free in a pool now, nor how text becomes tokens. A size that a
worker does not report is unknown. An unknown size refuses no request here; the worker refuses it, with the code of
``errors.DoesNotFitError``.
"""

from __future__ import annotations

import dataclasses

from kvxfer.types import Member

PAGES = "page:"
"""The axes of a pool of pages begin with this. A page is a block of one layer, so a block of tokens takes one page for
each layer."""


@dataclasses.dataclass(frozen=True)
class Need:
    """What one request takes at least, in tokens.

    ``prompt_tokens`` is exact where the prompt came as token ids or a worker counted it, else a lower bound. The last
    of the ``answer_tokens`` needs no KV.
    """

    prompt_tokens: int = 1
    answer_tokens: int = 1

    def __str__(self) -> str:
        count = f"{self.prompt_tokens} prompt tokens" if self.prompt_tokens > 1 else "a prompt"
        return f"{count} and {self.answer_tokens} more"


ANY = Need()
"""The need of a request of unknown size."""


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What one worker can hold of one request, in tokens; None where it does not say."""

    context_tokens: int | None = None
    """Prompt and answer together."""
    pool_tokens: int | None = None
    """Tokens whose KV fits: the prompt, and the answer but its last token."""

    def holds_prompt(self, need: Need) -> bool:
        """Whether it could compute the prompt for another worker. Engines ask for one token of answer even then."""
        return self._holds(need.prompt_tokens + 1)

    def holds(self, need: Need) -> bool:
        """Whether it could compute the prompt and the answer."""
        return self._holds(need.prompt_tokens + need.answer_tokens)

    def holds_answer(self, need: Need) -> bool:
        """Whether the answer alone would fit."""
        return self._holds(need.answer_tokens)

    def _holds(self, whole: int) -> bool:
        return not (
            (self.context_tokens is not None and whole > self.context_tokens)
            or (self.pool_tokens is not None and whole - 1 > self.pool_tokens)
        )

    def is_within(self, other: Capacity) -> bool:
        """Whether it is known to hold nothing that ``other`` does not hold."""
        return _is_within(self.context_tokens, other.context_tokens) and _is_within(self.pool_tokens, other.pool_tokens)

    @property
    def tokens(self) -> int | None:
        """Longest prompt and answer together."""
        sizes = [self.context_tokens, None if self.pool_tokens is None else self.pool_tokens + 1]
        return min((size for size in sizes if size is not None), default=None)


def _is_within(size: int | None, other: int | None) -> bool:
    return size == other or (size is not None and other is not None and size < other)


def capacity_of(member: Member) -> Capacity:
    """What ``member`` said of itself: its context, its pools, and the blocks of its heartbeats."""
    info, load = member.info, member.load
    sizes = []
    if load.total_blocks and info.block_tokens:
        sizes.append(load.total_blocks * info.block_tokens)
    whole = [pool for pool in member.pools if not pool.record.axes.startswith(PAGES)]
    sizes += [pool.block_count * pool.record.block_tokens for pool in whole]
    pages = [pool for pool in member.pools if pool.record.axes.startswith(PAGES)]
    if pages:
        record = pages[0].record
        sizes.append(sum(pool.block_count for pool in pages) // max(1, record.layers) * record.block_tokens)
    return Capacity(info.max_context_tokens or None, min(sizes, default=None))
