"""Rooms that this rank reads: which parts are asked of whom, and when all of them are there. Decides when a room is
done, and when its pages may be used anew; must never know SGLang, nor wait on the thread that calls it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy.typing as npt

from kvxfer.types import TransferId


@dataclasses.dataclass(frozen=True)
class DestinationCallbacks:
    """Called on the agent's thread; exactly one of them, once, for each room that was begun and not cleared before."""

    on_done: Callable[[int], None] = lambda room: None
    """Everything of every source is committed, the auxiliary row too."""
    on_failed: Callable[[int, str, str], None] = lambda room, code, text: None
    """(room, code of an error, text): nothing of it lands any more, its pages may be used anew."""


class DestinationRooms:
    """All methods may be called from any thread, and return at once."""

    def begin(
        self,
        room: int,
        transfer_id: TransferId,
        sources: Sequence[tuple[str, int]],
        pages: npt.ArrayLike,
        aux_row: int,
        states: Sequence[npt.ArrayLike | None] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Wait for that prompt, and read it as it is computed: ``pages`` (may be empty), the row of the auxiliary
        buffers, and rows of each state component (``None``: nothing of it), from each of ``sources``: (agent id, rank).
        They belong to this until the room is over and drained. ``timeout_s``: until the last of it is granted.

        Raises InvalidArgument for a room or transfer id in use, and for rows that there are none of; Closed."""
        raise NotImplementedError

    def abort(self, room: int, why: str) -> None:
        """Give it up: ``on_failed`` (code ``cancelled``) comes once it drained. Harmless again, and for a room that is
        not known or over."""
        raise NotImplementedError

    def is_drained(self, room: int) -> bool:
        """Whether the room is over and no read into its pages is under way; True for one that is not known."""
        raise NotImplementedError

    def clear(self, room: int) -> None:
        """Forget it, after :meth:`abort` where it is not over; no callback comes any more. Its reads end all the same,
        and :meth:`is_drained` is False until they have. Harmless again."""
        raise NotImplementedError
