"""The KV blocks of an engine: which are free, which are used by sequences, and which hold a prefix that can be reused.

Decides which block is taken next, and which cached prefix a prompt finds, as vLLM's block pool does:

- A block that no sequence uses keeps its content until it is taken again. Blocks without a key hold nothing that can be
  found, so they are taken first, the one that was given back last before all others (vLLM #42656). Then come blocks
  with a key, the least recently used first, and of one sequence its last first.
- Sequences that compute the same tokens at the same time store the same key in a block each. The copies stay: each one
  is announced, and announced again when its block is taken. A prompt finds the key as long as one copy is left.

It must never know tokens, requests or time: a full block is named by a key of the caller's, which stands for the
block's tokens and all tokens before them.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvxfer.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class CacheChange:
    """One block that holds ``key`` from now on, or no longer. A key that several blocks hold has one change for each of
    them: it is gone with the last. ``parent`` is the key of the block before, if any.
    """

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
        """The block that a prompt finds: of several copies the one that was stored first."""
        self._copies: dict[int, list[int]] = {}
        """Other blocks with the same key, in the order in which they were stored."""
        self._cached = 0
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        """Blocks that no sequence uses; the next to be taken is first. All without a key are before all with one."""
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
        """Blocks that hold a prefix, used or not, copies included."""
        return self._cached

    @property
    def keys(self) -> int:
        """Different keys that blocks hold."""
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
        """A sequence uses these blocks no longer. Those without a key are taken again before all others, and the last
        of the sequence first. Those with a key are taken after all others, and also the last first: its prefix is the
        longest, so that the fewest prompts can reuse it.

        Raises InvalidArgumentError for a block that no sequence uses.
        """
        keyless: list[int] = []
        for block in reversed(blocks):
            uses = self._uses[block] = self._uses[block] - 1
            if uses < 0:
                self._uses[block] = 0
                raise InvalidArgumentError(f"block {block} was given back more often than it was taken")
            if uses:
                continue
            self._free[block] = None
            if self._keys[block] is None:
                keyless.append(block)
        for block in reversed(keyless):
            self._free.move_to_end(block, last=False)

    def store(self, block: int, key: int, parent: int | None) -> None:
        """``block``, which a sequence uses, is full and holds ``key``, as other blocks may. A block that holds a key
        already keeps that.
        """
        if self._keys[block] is not None:
            return
        self._keys[block] = key
        self._cached += 1
        if self._by_key.setdefault(key, block) != block:
            self._copies.setdefault(key, []).append(block)
        if self._changes is not None:
            self._changes.append(CacheChange(key, True, parent))

    def clear(self) -> None:
        """Forget every prefix. Used blocks stay used."""
        for block in range(self.blocks):
            self._forget(block)

    def drain_changes(self) -> list[CacheChange]:
        """What changed since the last call, in order."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is None:
            return
        self._keys[block] = None
        self._cached -= 1
        copies = self._copies.get(key)
        if copies is None:
            del self._by_key[key]
        else:
            if self._by_key[key] == block:
                self._by_key[key] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                del self._copies[key]
        if self._changes is not None:
            self._changes.append(CacheChange(key, False))

    def __repr__(self) -> str:
        return f"PagedCache(blocks={self.blocks}, used={self.used}, cached={self.cached})"
