"""The state of one room that this rank sends. Decides nothing; must never know an agent's calls."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from kvxfer.agent import Grant
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.connectors.sglang.views import SharedRows
from kvxfer.connectors.sglang.watch import PeerLeg
from kvxfer.errors import KvxferError
from kvxfer.observe import OpenSpan
from kvxfer.transport.base import Blocks
from kvxfer.types import TransferId

COMMITTED = "committed"


@dataclasses.dataclass(frozen=True)
class RoomReader:
    """One decode rank that wants a room: the transfer id that it made, its agent and rank, how many of its own pages it
    wants, and its shape, if known. ``lead``: how many tokens at the start of the first sent page the reader already
    has. It is not 0 only if the source's pages are larger than the reader's."""

    transfer_id: TransferId
    agent_id: str
    rank: int
    pages: int
    shape: KvShape | None = None
    lead: int = 0


@dataclasses.dataclass(frozen=True)
class SourceCallbacks:
    """Called on the agent's thread, each at most once for each room. Either ``on_done`` or ``on_failed`` comes, and
    neither after :meth:`SourceRooms.abort` or :meth:`SourceRooms.clear`, unless it was already on its way. They must
    not block."""

    on_done: Callable[[int], None] = lambda room: None
    """Every reader has committed everything, and no grant over the room's pages is alive."""
    on_failed: Callable[[int, str, str], None] = lambda room, code, text: None
    """(room, code of an error, text): no reader will get it, and no grant over its pages is alive."""
    on_began: Callable[[int], None] = lambda room: None
    """A reader has begun to read; reported within a tenth of a second, and before ``on_done``."""
    on_over: Callable[[int, str], None] = lambda room, outcome: None
    """(room, COMMITTED or the code of an error): of every room that was accepted, also one that was aborted."""


@dataclasses.dataclass(frozen=True)
class Moved:
    """What was sent of one room: bytes, counted for each reader, and seconds from the first grant to the last commit,
    or until now."""

    bytes: int
    seconds: float


@dataclasses.dataclass(eq=False)
class SourceLeg(PeerLeg):
    """One reader's part of a room that is sent."""

    cut: SharedRows | None = None
    """The pages of this reader's view; ``None`` only if the reader was refused."""
    wanted: int = 0
    """Blocks of the view that the reader wants."""
    lead: int = 0
    """Blocks at the start of the first page that the reader already has, and does not want."""
    parts: int = 0
    is_done: bool = False


@dataclasses.dataclass(eq=False)
class SourceRoom:
    """A room that is, or will be, sent."""

    number: int
    made_s: float
    legs: list[SourceLeg] = dataclasses.field(default_factory=list)
    grants: dict[TransferId, Grant] = dataclasses.field(default_factory=dict)
    """Grants whose end has not been reported yet."""
    pages: list[Blocks] = dataclasses.field(default_factory=list)
    """The pages of this room that the page ledger counts as given."""
    is_sending: bool = False
    is_all_sent: bool = False
    is_done: bool = False
    has_begun: bool = False
    error: KvxferError | None = None
    traceparent: str | None = None
    span: OpenSpan | None = None
    """The trace span; it begins when the engine accepts the prompt."""
    bytes: int = 0
    began_s: float | None = None
    ended_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self.is_done or self.error is not None

    def accept(self, traceparent: str | None) -> None:
        """The engine here accepted its prompt."""
        self.traceparent, self.span = traceparent, OpenSpan("kvxfer.send", traceparent, room=self.number)

    def end(self) -> None:
        """It is over, and no grant over its pages is alive."""
        self.ended_s = time.monotonic()
        if self.span is not None:
            code = None if self.error is None else self.error.code
            self.span.end(code, readers=len(self.legs), bytes=self.bytes)

    def grant_span(self, leg: SourceLeg, part: int, blocks: int) -> OpenSpan:
        transfer_id = str(leg.transfer_id)
        return OpenSpan(
            "kvxfer.grant", self.traceparent, room=self.number, transfer_id=transfer_id, part=part, blocks=blocks
        )

    @property
    def moved(self) -> Moved:
        if self.began_s is None:
            return Moved(0, 0.0)
        return Moved(self.bytes, (self.ended_s or time.monotonic()) - self.began_s)
