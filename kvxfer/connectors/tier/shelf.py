"""Which blocks a store keeps, how many bytes they take, and which one goes first: the least recently used. Of the
blocks of one request the last is evicted first, because a prefix is of use without its end, but not without its
beginning. Pure; must never know where the bytes are."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from kvxfer.errors import InvalidArgumentError, StoreFullError

Key = TypeVar("Key", bound=Hashable)


class Shelf(Generic[Key]):
    """The blocks are ordered by when they were used last. One that is *pinned* is never evicted."""

    def __init__(self, capacity_bytes: int) -> None:
        """Raises InvalidArgumentError unless it is positive."""
        if capacity_bytes < 1:
            raise InvalidArgumentError(f"a store needs at least one byte, not {capacity_bytes}")
        self._promised = self._capacity = capacity_bytes
        self._used = 0
        self._sizes: collections.OrderedDict[Key, int] = collections.OrderedDict()
        """The least recently used first."""
        self._pins: collections.Counter[Key] = collections.Counter()

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    @property
    def used_bytes(self) -> int:
        return self._used

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[Key]:
        """In the order of eviction."""
        return iter(self._sizes)

    def size_of(self, key: Key) -> int:
        """Bytes of a block that is there."""
        return self._sizes[key]

    def shrink(self, capacity_bytes: int) -> None:
        """The store holds less than it was made for, until :meth:`restore`."""
        self._capacity = max(1, min(self._capacity, capacity_bytes))

    def restore(self) -> None:
        """The store may hold again what it was made for."""
        self._capacity = self._promised

    def make_room(self, size_bytes: int) -> list[Key]:
        """Take blocks off until ``size_bytes`` more fit; returns them, the first to go first. Raises StoreFullError,
        and takes none off, where that cannot be."""
        if size_bytes > self._capacity:
            raise StoreFullError(f"a block of {size_bytes} bytes is more than the store's {self._capacity}")
        missing = self._used + size_bytes - self._capacity
        victims: list[Key] = []
        for key, size in self._sizes.items() if missing > 0 else ():
            if self._pins[key]:
                continue
            victims.append(key)
            missing -= size
            if missing <= 0:
                break
        if missing > 0:
            raise StoreFullError(f"{self._used} of {self._capacity} bytes are taken by blocks that are in use")
        for key in victims:
            self.remove(key)
        return victims

    def put(self, key: Key, size_bytes: int) -> None:
        """Add a block, as the most recently used. Raises InvalidArgumentError if it is there, or has no room."""
        if key in self._sizes or size_bytes < 0 or self._used + size_bytes > self._capacity:
            raise InvalidArgumentError(f"there is no room for {size_bytes} bytes, or the block is there")
        self._sizes[key] = size_bytes
        self._used += size_bytes

    def remove(self, key: Key) -> bool:
        """Take it off, pinned or not; returns whether it was there."""
        size = self._sizes.pop(key, None)
        if size is None:
            return False
        self._used -= size
        return True

    def pin(self, key: Key) -> None:
        """Keep it until as many :meth:`unpin`."""
        self._pins[key] += 1

    def unpin(self, key: Key) -> None:
        """Undo one :meth:`pin`."""
        self._pins[key] -= 1
        if self._pins[key] <= 0:
            del self._pins[key]

    @property
    def pinned(self) -> int:
        """How many blocks are pinned."""
        return len(self._pins)

    def use(self, keys: Sequence[Key]) -> None:
        """A request used those of them that are there, in the order of its tokens."""
        for key in reversed(keys):
            if key in self._sizes:
                self._sizes.move_to_end(key)
