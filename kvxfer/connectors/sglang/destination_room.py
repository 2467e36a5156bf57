"""The state of one room that this rank receives. Decides nothing; must never know an agent's calls."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

from kvxfer.agent import Transfer, TransferResult
from kvxfer.connectors.sglang.messages import End, PartGranted
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.connectors.sglang.source_room import COMMITTED
from kvxfer.connectors.sglang.views import SharedRows
from kvxfer.connectors.sglang.watch import PeerLeg
from kvxfer.errors import KvxferError
from kvxfer.observe import OpenSpan
from kvxfer.transport.base import Blocks
from kvxfer.types import TransferId


class RoomSource(NamedTuple):
    """One prefill rank that has the room: its agent, its rank, and its shape, if known."""

    agent_id: str
    rank: int
    shape: KvShape | None = None


@dataclasses.dataclass(frozen=True)
class RoomReport:
    """The outcome of one room. ``outcome``: COMMITTED, or the code of an error. ``lane``: of its last part, or
    ``none``. ``early_bytes`` landed before a source granted its last part. ``wait_seconds``: until the first part was
    granted, or the room was over. ``wire_seconds``: while parts were read, and from the last byte of each to its
    verdict, added up, of the slowest source."""

    room: int
    outcome: str
    lane: str
    bytes: int
    early_bytes: int
    seconds: float
    wait_seconds: float
    wire_seconds: float


@dataclasses.dataclass(frozen=True)
class DestinationCallbacks:
    """Called on the agent's thread: exactly one of them, once, for each room that was begun and not cleared before.
    They must not block."""

    on_done: Callable[[int], None] = lambda room: None
    """Everything of every source is committed, the auxiliary row too."""
    on_failed: Callable[[int, str, str], None] = lambda room, code, text: None
    """(room, code of an error, text): no byte of it lands any more, and its pages may be reused."""
    on_over: Callable[[RoomReport], None] = lambda load: None
    """For every room that was begun, once it is over and drained, also if it was cleared before."""


@dataclasses.dataclass(eq=False, kw_only=True)
class DestinationLeg(PeerLeg):
    """One source's part of a room that is received."""

    cut: SharedRows
    """What of the pages it gives."""
    rows: list[Blocks]
    """That it gives: of the pages in that cut, then of each state component."""
    covered: list[int]
    """Of each of them: how many are announced."""
    is_first: bool = False
    """The auxiliary row is this source's."""
    is_asked: bool = False
    is_known: bool = False
    """Whether it has the pool that the pages are read from, as far as known here."""
    waiting: list[PartGranted | End] = dataclasses.field(default_factory=list)
    """Messages that came before both were so."""
    parts: int = 0
    """Announced."""
    committed: int = 0
    wire_s: float = 0.0
    is_all_announced: bool = False
    has_end: bool = False
    """Its last part is committed."""

    @property
    def is_done(self) -> bool:
        return self.is_all_announced and self.has_end and self.committed == self.parts


@dataclasses.dataclass(eq=False)
class DestinationRoom:
    """A room that is received."""

    number: int
    transfer_id: TransferId
    legs: dict[str, DestinationLeg]
    aux: Blocks
    pages: Blocks
    """In the ledger, among those that are filled."""
    timeout_s: float | None
    span: OpenSpan
    is_in_ledger: bool = False
    transfers: dict[TransferId, Transfer] = dataclasses.field(default_factory=dict)
    filling: set[TransferId] = dataclasses.field(default_factory=set)
    """Transfers that have rows of it, and have not drained."""
    error: KvxferError | None = None
    is_done: bool = False
    is_told: bool = False
    is_computed: bool = False
    """A source granted its last part."""
    is_settled: bool = False
    """Whether it is over, drained, and reported."""
    bytes: int = 0
    early_bytes: int = 0
    lane: str = ""
    began_s: float = dataclasses.field(default_factory=time.monotonic)
    granted_s: float | None = None
    ended_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self.is_done or self.error is not None

    @property
    def is_drained(self) -> bool:
        return self.is_over and not self.filling

    def take(self, leg: DestinationLeg, result: TransferResult) -> None:
        """A part of that leg is committed."""
        self.bytes += result.bytes
        self.early_bytes += 0 if self.is_computed else result.bytes
        self.lane = result.lane.value
        leg.wire_s += result.seconds["wire"] + result.seconds["confirm"]

    def end(self) -> RoomReport:
        """It is over and drained."""
        ended_s = self.ended_s or time.monotonic()
        load = RoomReport(
            room=self.number,
            outcome=COMMITTED if self.error is None else self.error.code,
            lane=self.lane or "none",
            bytes=self.bytes,
            early_bytes=self.early_bytes,
            seconds=ended_s - self.began_s,
            wait_seconds=(self.granted_s or ended_s) - self.began_s,
            wire_seconds=max((leg.wire_s for leg in self.legs.values()), default=0.0),
        )
        told = {"lane": load.lane, "blocks": len(self.pages), "bytes": load.bytes, "early_bytes": load.early_bytes}
        parts = sum(leg.committed + leg.has_end for leg in self.legs.values())
        self.span.end(None if self.error is None else self.error.code, parts=parts, **told)
        return load


@dataclasses.dataclass(frozen=True)
class Received:
    """Of one room: bytes committed, and seconds from the first grant heard of to the last commit, or until now."""

    bytes: int
    seconds: float
