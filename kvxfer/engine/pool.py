"""The owner of each block of the paged KV pool: free list, reference counts and the prefix cache.

It decides which block a sequence gets, which cached block is given up first and which blocks a new prompt may share.
It must never touch the bytes of a block, nor know of models, agents or grants: a block that an agent holds is simply
a block with a reference. Pure bookkeeping, for one thread; :meth:`BlockPool.statistics` may be read from any thread.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from array import array
from collections.abc import Sequence

from kvxfer.errors import InvalidArgumentError, OverloadedError

DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True)
class PoolStatistics:
    """Counts of blocks: ``free + cached + used == total``. A block with a reference is used, published or not."""

    free: int
    cached: int
    used: int
    total: int
    hit_blocks: int = 0
    """Blocks that :meth:`BlockPool.match` found, since the pool was made."""
    evicted_blocks: int = 0


class BlockPool:
    """Bookkeeping for ``block_count`` blocks of ``block_tokens`` tokens each.

    ``salt`` separates the content hashes of different models; give the fingerprint of config and weights.
    """

    def __init__(self, block_count: int, block_tokens: int, *, salt: bytes = b"") -> None:
        if block_count < 1 or block_tokens < 1:
            raise InvalidArgumentError(
                f"a pool needs at least one block of one token, not {block_count} of {block_tokens}"
            )
        self.block_count = block_count
        self.block_tokens = block_tokens
        self._root = hashlib.blake2b(salt, digest_size=DIGEST_BYTES).digest()
        self._references = [0] * block_count
        self._digests: list[bytes | None] = [None] * block_count
        self._by_digest: dict[bytes, int] = {}
        self._free = list(range(block_count - 1, -1, -1))
        self._evictable: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._hits = 0
        self._evictions = 0

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<BlockPool {now.total} blocks: {now.free} free, {now.cached} cached, {now.used} used>"

    @property
    def available(self) -> int:
        """How many blocks :meth:`allocate` could give now: free ones and cached ones without a reference."""
        return len(self._free) + len(self._evictable)

    def digests(self, token_ids: Sequence[int]) -> list[bytes]:
        """The content-hash chain of ``token_ids``: for each *full* block one digest, over it and all before it."""
        parent = self._root
        chain = []
        step = self.block_tokens
        for start in range(0, len(token_ids) - step + 1, step):
            content = array("q", token_ids[start : start + step]).tobytes()
            parent = hashlib.blake2b(parent + content, digest_size=DIGEST_BYTES).digest()
            chain.append(parent)
        return chain

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, each with one reference and unknown content.

        Raises OverloadedError, and takes nothing, when free and evictable cached blocks together are fewer.
        """
        if count < 0:
            raise InvalidArgumentError(f"cannot allocate {count} blocks")
        if count > self.available:
            raise OverloadedError(f"{count} KV blocks are needed, {self.available} of {self.block_count} are available")
        while len(self._free) < count:
            block, _ = self._evictable.popitem(last=False)
            self._drop_digest(block)
            self._evictions += 1
            self._free.append(block)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference of each of ``blocks``.

        A block without references stays cached if it was published, otherwise it is free. Of one call, the last
        blocks are evicted first: a prefix is useless without what stands before it.
        """
        self._check_referenced(blocks)
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._digests[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """The longest cached prefix of full blocks, in order, each with one more reference for the caller."""
        return self.match_digests(self.digests(token_ids))

    def match_digests(self, digests: Sequence[bytes]) -> list[int]:
        """:meth:`match` for a chain that :meth:`digests` gave."""
        blocks: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            self._evictable.pop(block, None)
            self._references[block] += 1
            blocks.append(block)
        self._hits += len(blocks)
        return blocks

    def publish(self, block: int, digest: bytes) -> bool:
        """Say that ``block`` is full, holds the content of ``digest`` and stays so while referenced or cached.

        Returns False, and changes nothing, when another block has that content already. Raises InvalidArgumentError for
        a block without a reference or one published with another digest.
        """
        self._check_referenced((block,))
        known = self._digests[block]
        if known is not None and known != digest:
            raise InvalidArgumentError(f"block {block} is published already with other content")
        holder = self._by_digest.setdefault(digest, block)
        if holder != block:
            return False
        self._digests[block] = digest
        return True

    def forget(self, blocks: Sequence[int]) -> None:
        """Take ``blocks`` out of the prefix cache, whatever they hold; those without a reference become free."""
        for block in blocks:
            self._check_block(block)
            self._drop_digest(block)
            if block in self._evictable:
                del self._evictable[block]
                self._free.append(block)

    def references(self, block: int) -> int:
        """How many references ``block`` has."""
        self._check_block(block)
        return self._references[block]

    def statistics(self) -> PoolStatistics:
        """Counts as of now."""
        free, cached = len(self._free), len(self._evictable)
        return PoolStatistics(
            free=free,
            cached=cached,
            used=self.block_count - free - cached,
            total=self.block_count,
            hit_blocks=self._hits,
            evicted_blocks=self._evictions,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless free, cached and used partition the pool and the cache index is a bijection."""
        free, evictable = set(self._free), set(self._evictable)
        used = {block for block, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a block is free twice"
        states = sorted([*free, *evictable, *used])
        assert states == list(range(self.block_count)), "a block has no state, or two"
        assert all(count >= 0 for count in self._references), "a reference count is negative"
        published = {block: digest for block, digest in enumerate(self._digests) if digest is not None}
        index = {digest: block for block, digest in published.items()}
        assert index == self._by_digest, "the cache index is not a bijection"
        assert evictable <= published.keys(), "a cached block has no content"
        assert not free & published.keys(), "a free block is published"

    def _drop_digest(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block] = None

    def _check_block(self, block: int) -> None:
        if not 0 <= block < self.block_count:
            raise InvalidArgumentError(f"block {block} is not one of the pool's {self.block_count}")

    def _check_referenced(self, blocks: Sequence[int]) -> None:
        seen = collections.Counter(blocks)
        for block, count in seen.items():
            self._check_block(block)
            if self._references[block] < count:
                raise InvalidArgumentError(f"block {block} has {self._references[block]} references, not {count}")
