"""Prompts that the scheduler half keeps for other engines after they were computed, and which of them is revoked if an
engine of both roles has no room. :mod:`kvxfer.policy.room` has the rule; this module feeds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.steps import Revoke
from kvxfer.policy.room import Held, Room
from kvxfer.types import Role

TURN_NS = 50_000_000
"""A prompt that is kept for less than this is about to be read: its reader hears of it, and its engine has its turn."""


@dataclasses.dataclass
class _Kept:
    since_ns: int
    blocks: int
    is_read: bool


class KeptPrompts:
    """Of one engine."""

    def __init__(self, options: ConnectorOptions, now_ns: Callable[[], int]) -> None:
        self._room: Room[str] | None = Room(options.room_wait_s) if options.role is Role.BOTH else None
        self._now_ns = now_ns
        self._kept: dict[str, _Kept] = {}
        self._revoked = 0

    def __bool__(self) -> bool:
        """Whether it keeps any that may have to be taken back."""
        return self._room is not None and bool(self._kept)

    def keep(self, request_id: str, blocks: int, *, is_read: bool) -> None:
        """It is computed; ``is_read``: its reader has begun already."""
        self._kept[request_id] = _Kept(self._now_ns(), blocks, is_read)

    def read(self, request_id: str) -> None:
        """Its reader has begun."""
        kept = self._kept.get(request_id)
        if kept is not None:
            kept.is_read = True

    def gone(self, request_id: str) -> None:
        """Its blocks are vLLM's again."""
        if self._kept.pop(request_id, None) is not None:
            self.freed()

    def freed(self) -> None:
        """Blocks of anything came back."""
        if self._room is not None:
            self._room.freed(self._now_ns())

    def take_back(self, *, is_stuck: bool, is_offered: bool, lacks_more: bool, will_free: bool) -> Revoke | None:
        """What is to be taken back in this step. ``is_stuck``: a request whose prompt was granted elsewhere, or that is
        computed here instead, does not run; ``is_offered``: vLLM looked at some request, and had no blocks for it.
        ``lacks_more``: the prompt of one was fetched, and vLLM asks nothing more of those. ``will_free``: something
        runs, or is fetched, that gives blocks back when it ends.

        A prompt that is computed here for others is no reason to hurry: no circle of waits is closed without a request
        that is stuck. A request that vLLM does not even look at lacks no blocks: while something runs it waits for a
        seat or for its share of the step. Where nothing runs, one whose prompt is here lacks the blocks for its tokens,
        or the engine is paused: that is no reason to hurry either."""
        if self._room is None:
            return None
        now_ns = self._now_ns()
        is_awaited = any(kept.is_read or now_ns < kept.since_ns + TURN_NS for kept in self._kept.values())
        name = self._room.victim(
            (Held(name, kept.since_ns, kept.is_read) for name, kept in self._kept.items()),
            is_wanted=bool(self._kept)
            and ((is_offered and is_stuck) or (not will_free and (is_offered or lacks_more))),
            will_free=will_free or is_awaited or not (is_stuck and is_offered),
            now_ns=now_ns,
        )
        if name is None:
            return None
        self._revoked += 1
        self._kept[name].is_read = True  # its blocks are on their way
        return Revoke(name, "no_room: this engine needed the blocks, and no engine had begun to read them")

    @property
    def blocks_unread(self) -> int:
        """Blocks that are kept for readers that have not begun."""
        return sum(kept.blocks for kept in self._kept.values() if not kept.is_read)

    def take_revoked(self) -> int:
        """Prompts that were taken back, since the last call."""
        revoked, self._revoked = self._revoked, 0
        return revoked
