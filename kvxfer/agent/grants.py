"""The grants of one agent: makes them, and settles each when the transport says that it ended. Never decides whether
one is alive: the transport does, at the moment when it is asked.
"""

from __future__ import annotations

import asyncio

from kvxfer._native import _core
from kvxfer.agent.grant import Grant
from kvxfer.errors import InvalidArgumentError
from kvxfer.transport.base import Blocks, Transport
from kvxfer.types import GrantState, TransferId


class Grants:
    """:meth:`make` and :meth:`abort` may be called from any thread, the rest on the agent's loop."""

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._alive: dict[bytes, Grant] = {}

    def __len__(self) -> int:
        """Grants whose end was not told yet."""
        return len(self._alive)

    def make(
        self,
        pool_id: int,
        blocks: Blocks,
        *,
        transfer_id: TransferId,
        reader: str,
        ready_blocks: int,
        ttl_s: float,
        content_digest: bytes,
    ) -> Grant:
        """Raises what :meth:`Transport.grant` raises."""
        grant = Grant(self._transport, self._loop, transfer_id, len(blocks), reader)
        if self._alive.setdefault(transfer_id.raw, grant) is not grant:
            raise InvalidArgumentError("this transfer id was used before; a retry needs a new one")
        try:
            self._transport.grant(
                transfer_id,
                pool_id,
                blocks,
                reader=reader,
                ttl_s=ttl_s,
                ready_blocks=ready_blocks,
                content_digest=content_digest,
            )
        except BaseException:
            self._alive.pop(transfer_id.raw, None)  # unless the end of the transport has settled it already
            raise
        return grant

    def expect(self, transfer_id: TransferId, reader: str) -> None:
        """From any thread. Raises what :meth:`Transport.expect` raises."""
        self._transport.expect(transfer_id, reader=reader)

    def abort(self, transfer_id: TransferId) -> None:
        self._transport.abort_grant(transfer_id)

    def handle(self, event: _core.GrantEnded) -> None:
        grant = self._alive.pop(event.id, None)
        if grant is not None:
            grant._settle(GrantState(int(event.state)))

    def revoke_all(self, reason: str) -> None:
        for grant in list(self._alive.values()):
            grant.revoke(reason)

    def fail_all(self) -> None:
        """The transport says nothing any more: every grant is over."""
        for grant in list(self._alive.values()):
            grant._settle(GrantState.REVOKED)
        self._alive.clear()
