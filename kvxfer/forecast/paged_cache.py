"""The KV blocks of an engine: which are free, which are used by sequences, and which hold a prefix that can be reused.

Decides which block is taken next, and which cached prefix a prompt finds. A block that no sequence uses keeps its
content until it is taken again, the least recently used first, as in vLLM. It must never know tokens, requests or time:
a full block is named by a key of the caller's, which stands for the block's tokens and all tokens before them.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvxfer.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class CacheChange:
    """A key that the cache has from now on, or has no longer. ``parent`` is the key of the block before, if any."""

    key: int
    is_stored: bool
    parent: int | None = None


class PagedCache:
    """``blocks`` blocks. With ``records_changes`` the caller must call :meth:`drain_changes` regularly."""

    def __init__(self, blocks: int, *, records_changes: bool = False) -> None:
        if blocks < 1:
            raise InvalidArgumentError(f"blocks must be 1 or more, not {blocks}")
        self.blocks = blocks
        self._uses = [0] * blocks
        self._keys: list[int | None] = [None] * blocks
        self._by_key: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        """Blocks that no sequence uses; the next to be taken is first."""
        self._changes: list[CacheChange] | None = [] if records_changes else None

    @property
    def free(self) -> int:
        """Blocks that no sequence uses, whether or not they hold a prefix."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.blocks - len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that hold a prefix, used or not."""
        return len(self._by_key)

    def match(self, keys: Iterable[int]) -> list[int]:
        """The blocks of the longest beginning of ``keys`` that is cached. They are not taken yet."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def unused_of(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` count as free as long as no sequence shares them."""
        return sum(not self._uses[block] for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence uses these blocks."""
        for block in blocks:
            if not self._uses[block]:
                del self._free[block]
            self._uses[block] += 1

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks for one sequence, or None if fewer are free. What they held is forgotten."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._uses[block] = 1
            self._forget(block)
            taken.append(block)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """A sequence uses these blocks no longer. The last is the first to be taken again: its prefix is the longest,
        so that the fewest prompts can reuse it.
        """
        for block in reversed(blocks):
            uses = self._uses[block] = self._uses[block] - 1
            if not uses:
                self._free[block] = None
            elif uses < 0:
                raise InvalidArgumentError(f"block {block} was given back more often than it was taken")

    def store(self, block: int, key: int, parent: int | None) -> None:
        """``block``, which a sequence uses, is full and holds ``key``. A key that another block holds stays there."""
        if self._keys[block] is not None or key in self._by_key:
            return
        self._keys[block] = key
        self._by_key[key] = block
        if self._changes is not None:
            self._changes.append(CacheChange(key, True, parent))

    def clear(self) -> None:
        """Forget every prefix. Used blocks stay used."""
        for block in list(self._by_key.values()):
            self._forget(block)

    def drain_changes(self) -> list[CacheChange]:
        """What changed since the last call, in order."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._by_key[key]
            if self._changes is not None:
                self._changes.append(CacheChange(key, False))

    def __repr__(self) -> str:
        return f"PagedCache(blocks={self.blocks}, used={self.used}, cached={self.cached})"
