"""When an engine takes back a finished prompt that it keeps for another engine, because its pool has no room.

One pool may serve both roles: it keeps prompts that were computed here until their readers fetched them (*held*), and
it needs blocks for prompts whose grants exist elsewhere, or that are computed here. Two such engines can wait for each
other: what one holds is what the other's pulls need room for. Room breaks that circle. Something that cannot get its
blocks waits while anything that runs in this engine will free some. When nothing will, or no block was freed for
``patience_s``, the engine revokes the youngest held prompt whose reader has not begun to read; the reader then
computes that prompt itself. One prompt at a time: the next one only after the blocks of the last came back, or after
``patience_s`` again.

Why this ends every circle: each revocation gives back the blocks of at least one held prompt, nothing that was revoked
is held again under the same transfer id, and a reader that has begun to read is bounded by its own deadline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from kvxfer.config import check_positive

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Held(Generic[Key]):
    """A finished prompt that is kept for its reader since ``since_ns``. ``has_begun``: the reader has asked for blocks
    of it; one that only asked whether the grant exists, and reserved nothing, has not."""

    key: Key
    since_ns: int
    has_begun: bool


class Room(Generic[Key]):
    """The rule above, for one engine. Not for more than one thread."""

    def __init__(self, patience_s: float = 2.0) -> None:
        """Raises ConfigError for a ``patience_s`` that is not above 0."""
        check_positive("room_wait_s", patience_s, maximum=86400.0)
        self._patience_ns = round(patience_s * 1e9)
        self._wanted_since_ns: int | None = None
        self._freed_ns: int | None = None
        self._taken: Key | None = None
        self._taken_ns = self._tried_ns = 0
        self.revoked = 0

    def __repr__(self) -> str:
        return f"<Room: {self.revoked} prompts revoked>"

    def freed(self, now_ns: int) -> None:
        """Blocks of anything came back to the pool."""
        self._freed_ns = now_ns
        self._taken = None

    def victim(self, held: Iterable[Held[Key]], *, is_wanted: bool, will_free: bool, now_ns: int) -> Key | None:
        """The prompt to revoke now; ``None``: none, or not yet.

        ``is_wanted``: something that may run, a prompt whose grant exists elsewhere or one that is computed here, did
        not get its blocks. ``will_free``: something runs, or is read, that gives blocks back when it ends.
        """
        if not is_wanted:
            self._wanted_since_ns = None
            return None
        if self._wanted_since_ns is None:
            self._wanted_since_ns = now_ns
        is_patience_over = now_ns >= self._since_ns() + self._patience_ns
        if will_free and not is_patience_over:
            return None
        if self._taken is not None and now_ns < self._taken_ns + self._patience_ns:
            return None
        self._tried_ns = now_ns
        choice = max((one for one in held if not one.has_begun), key=lambda one: one.since_ns, default=None)
        if choice is None:
            return None
        self._taken, self._taken_ns = choice.key, now_ns
        self.revoked += 1
        return choice.key

    def look_at_ns(self) -> int | None:
        """When to ask :meth:`victim` again though nothing else has happened; ``None``: never."""
        if self._wanted_since_ns is None:
            return None
        return max(self._since_ns(), self._taken_ns, self._tried_ns) + self._patience_ns

    def _since_ns(self) -> int:
        """The last moment at which waiting made sense."""
        wanted_ns = self._wanted_since_ns or 0
        return wanted_ns if self._freed_ns is None else max(wanted_ns, self._freed_ns)
