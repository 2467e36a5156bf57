"""The owner's handle on one grant. Decides nothing: the transport judges, and this asks it and remembers how the grant
ended. Must never know which request the blocks belong to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvxfer.agent.arguments import check_count, judged
from kvxfer.errors import KvxferError
from kvxfer.transport.base import Transport
from kvxfer.types import GrantState, TransferId, check_agent_id


class Grant:
    """Made by :meth:`Agent.grant`.

    The promise: blocks that :meth:`ready` announced do not change until the grant has ended, and the owner frees or
    overwrites blocks only after :attr:`state` has left ALIVE. Any thread may use :meth:`ready`, :meth:`bind`,
    :attr:`bound`, :meth:`revoke`, :meth:`release`, :attr:`state` and :meth:`on_ended`.
    """

    def __init__(
        self, transport: Transport, loop: asyncio.AbstractEventLoop, transfer_id: TransferId, blocks: int, reader: str
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._transfer_id = transfer_id
        self._blocks = blocks
        self._reader = reader
        self._ended: GrantState | None = None
        self._callbacks: list[Callable[[GrantState], None]] = []

    @property
    def transfer_id(self) -> TransferId:
        return self._transfer_id

    @property
    def blocks(self) -> int:
        """How many blocks are promised."""
        return self._blocks

    @property
    def reader(self) -> str | None:
        """The agent that may read, or ``None`` for the first that presents the transfer id."""
        return self._reader or None

    @property
    def state(self) -> GrantState:
        """Judged in this moment: an expired grant is EXPIRED before its expiry was reported."""
        if self._ended is not None:
            return self._ended
        try:
            state = self._transport.grant_state(self._transfer_id)
        except KvxferError:  # the transport is gone: it will never confirm this grant
            state = None
        return GrantState.REVOKED if state is None else state

    @judged
    def ready(self, blocks: int, *, layers: int = 0, complete: bool = False) -> None:
        """Announce that the first ``blocks`` of the grant's blocks are written and will not change; cumulative.
        ``complete``: no further blocks will be announced.

        Raises GrantExpiredError, GrantRevokedError or GrantReleasedError once the grant has ended, InvalidArgumentError
        for fewer blocks than before or more than granted.
        """
        check_count("blocks", blocks)
        check_count("layers", layers)
        self._transport.ready(self._transfer_id, int(blocks), layers=int(layers), complete=complete)

    @judged
    def bind(self, reader: str) -> str | None:
        """Let only the agent ``reader`` read from now on, unless another agent was named or came first.

        Returns the agent that may read, also once the grant has ended; ``None`` if it ended before a reader came.
        """
        return self._bind(check_agent_id(reader))

    @property
    def has_begun(self) -> bool:
        """Whether its reader has requested blocks. A reader that only asked whether the grant exists has not."""
        try:
            return self._transport.has_begun(self._transfer_id)
        except KvxferError:  # the transport is gone, and its readers with it
            return False

    @property
    def bound(self) -> str | None:
        """The only agent that may read: named, or the first that came; ``None`` while any agent may."""
        return self._bind("")

    def _bind(self, reader: str) -> str | None:
        try:
            return self._transport.bind_grant(self._transfer_id, reader) or None
        except KvxferError:  # long forgotten, or the transport is gone
            return None

    @judged
    def revoke(self, reason: str = "") -> GrantState:
        """End the grant now. Once this has returned the blocks may be overwritten, because reads that are in progress
        will not be confirmed. Returns how the grant ended, which may have happened before.

        The reader is told ``reason``, in which what UTF-8 cannot say is escaped: no text of it leaves a grant alive.
        """
        text = reason.encode(errors="backslashreplace").decode()
        return self._end(lambda transfer_id: self._transport.revoke_grant(transfer_id, text))

    def release(self) -> GrantState:
        """End the grant because its reader no longer needs it; otherwise as :meth:`revoke`."""
        return self._end(self._transport.release_grant)

    @judged
    def on_ended(self, callback: Callable[[GrantState], None]) -> None:
        """Call ``callback(state)`` on the agent's loop, exactly once: when the grant ends, or soon if it has ended."""
        self._loop.call_soon_threadsafe(self._add_callback, callback)

    async def wait_ended(self) -> GrantState:
        """Wait on the agent's loop until the grant has ended; returns how."""
        if self._ended is not None:
            return self._ended
        ended: asyncio.Future[GrantState] = asyncio.get_running_loop().create_future()
        self._callbacks.append(lambda state: None if ended.done() else ended.set_result(state))
        return await ended

    def __repr__(self) -> str:
        reader = self._reader or "the first reader"
        return f"<Grant {self._transfer_id} of {self._blocks} blocks to {reader}, {self.state.name.lower()}>"

    def _end(self, end: Callable[[TransferId], GrantState]) -> GrantState:
        if self._ended is not None:
            return self._ended
        try:
            return end(self._transfer_id)
        except KvxferError:
            return GrantState.REVOKED if self._ended is None else self._ended

    def _add_callback(self, callback: Callable[[GrantState], None]) -> None:
        if self._ended is None:
            self._callbacks.append(callback)
        else:
            callback(self._ended)

    def _settle(self, state: GrantState) -> None:
        """The agent's: the grant ended. On the loop, once."""
        if self._ended is not None:
            return
        self._ended = state
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._loop.call_soon(callback, state)
