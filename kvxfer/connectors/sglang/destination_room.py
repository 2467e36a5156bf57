"""What is known of one room that this rank receives. Decides nothing; must never know an agent's calls."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

from kvxfer.agent import Transfer
from kvxfer.connectors.sglang.messages import Chunk, End
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.connectors.sglang.views import Cut
from kvxfer.connectors.sglang.watch import Leg
from kvxfer.errors import KvxferError
from kvxfer.transport.base import Blocks
from kvxfer.types import TransferId


class Source(NamedTuple):
    """One prefill rank that has the room: its agent, its rank, and its shape, where it is known there."""

    agent_id: str
    rank: int
    shape: KvShape | None = None


@dataclasses.dataclass(frozen=True)
class DestinationCallbacks:
    """Called on the agent's thread; exactly one of them, once, for each room that was begun and not cleared before.
    They must not block."""

    on_done: Callable[[int], None] = lambda room: None
    """Everything of every source is committed, the auxiliary row too."""
    on_failed: Callable[[int, str, str], None] = lambda room, code, text: None
    """(room, code of an error, text): nothing of it lands any more, its pages may be used anew."""


@dataclasses.dataclass(eq=False, kw_only=True)
class DestinationLeg(Leg):
    """One source's part of a room that is received."""

    cut: Cut
    """What of the pages it gives."""
    rows: list[Blocks]
    """That it gives: of the pages in that cut, then of each state component."""
    covered: list[int]
    """Of each of them: how many are announced."""
    is_first: bool = False
    """The auxiliary row is this source's."""
    is_asked: bool = False
    is_known: bool = False
    """It has the pool that the pages are read from, as far as is known here."""
    waiting: list[Chunk | End] = dataclasses.field(default_factory=list)
    """Said before both were so."""
    parts: int = 0
    """Announced."""
    committed: int = 0
    is_all_announced: bool = False
    has_end: bool = False
    """Its last part is committed."""

    @property
    def is_done(self) -> bool:
        return self.is_all_announced and self.has_end and self.committed == self.parts


@dataclasses.dataclass(eq=False)
class DestinationRoom:
    """What is known of a room that is received."""

    number: int
    transfer_id: TransferId
    legs: dict[str, DestinationLeg]
    aux: Blocks
    pages: Blocks
    """In the book of those that are filled."""
    timeout_s: float | None
    is_booked: bool = False
    transfers: dict[TransferId, Transfer] = dataclasses.field(default_factory=dict)
    filling: set[TransferId] = dataclasses.field(default_factory=set)
    """Transfers that have rows of it, and have not drained."""
    error: KvxferError | None = None
    is_done: bool = False
    is_told: bool = False
    bytes: int = 0
    began_s: float = dataclasses.field(default_factory=time.monotonic)
    granted_s: float | None = None
    ended_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self.is_done or self.error is not None

    @property
    def is_drained(self) -> bool:
        return self.is_over and not self.filling


@dataclasses.dataclass(frozen=True)
class Received:
    """Of one room: bytes committed, and seconds from the first grant heard of to the last commit, or until now."""

    bytes: int
    seconds: float
