"""Rooms that this rank computes and others read: what is promised of their pages, to whom, and how it ends. Decides
when a room is done and when it has failed; must never know SGLang, nor wait on the thread that calls it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy.typing as npt

from kvxfer.types import TransferId

Fence: TypeAlias = Callable[[], object]
"""Blocks until the pages are written, such as ``torch.cuda.Event.synchronize``. Raises what the device failed with."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """One decode rank that wants a room: the id that it minted, its agent and rank, and how many pages it wants."""

    transfer_id: TransferId
    agent_id: str
    rank: int
    pages: int


@dataclasses.dataclass(frozen=True)
class SourceCallbacks:
    """Called on the agent's thread, each at most once for each room; ``on_done`` or ``on_failed``, never both, and
    neither after :meth:`SourceRooms.abort`. They must not block."""

    on_done: Callable[[int], None] = lambda room: None
    """Every reader has committed everything, and no grant over the room's pages is alive."""
    on_failed: Callable[[int, str, str], None] = lambda room, code, text: None
    """(room, code of an error, text): it will not be read, and no grant over its pages is alive."""
    on_began: Callable[[int], None] = lambda room: None
    """A reader has begun to read."""


class SourceRooms:
    """All methods may be called from any thread, and return at once."""

    def accept(self, room: int) -> None:
        """The engine here accepted that prompt. Raises InvalidArgument where the room is in use; Closed."""
        raise NotImplementedError

    def reader(self, room: int, reader: Reader) -> None:
        """A decode rank wants it; may come before :meth:`accept`. One that comes too late, or for a room that another
        has, is told so (``refused``) and changes nothing. A dummy rank is no reader."""
        raise NotImplementedError

    def send(
        self,
        room: int,
        first: int,
        pages: npt.ArrayLike,
        *,
        is_last: bool,
        aux_row: int | None = None,
        states: Sequence[npt.ArrayLike | None] = (),
        fence: Fence | None = None,
    ) -> None:
        """``pages`` (may be empty) are written, or are once ``fence`` returns, and stay as they are until the room is
        over: they are those from ``first`` on of every reader's pages. With ``is_last`` come the row of the auxiliary
        buffers and the rows of each state component (``None``: nothing of it). Nothing happens for a room that is over
        or not known. What is wrong about it fails the room."""
        raise NotImplementedError

    def abort(self, room: int, why: str) -> None:
        """Nothing more of it is read: when this returns its pages may be used anew. Readers are told. No callback
        comes for it any more. Harmless again, and for a room that is not known or over."""
        raise NotImplementedError

    def clear(self, room: int) -> None:
        """Forget it, after :meth:`abort` where it is not over. Harmless again."""
        raise NotImplementedError

    def pulse(self, has_work: bool) -> None:
        """A sign of life of the engine's loop, which is about to step; ``has_work=False``: it has nothing to do. At
        most one each PULSE_S is taken; :meth:`clear` of the last room says by itself that there is nothing to do."""
        raise NotImplementedError
