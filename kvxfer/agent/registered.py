"""The part of an agent that is about registered memory: regions that peers may read and write at any time, and posts
between them. Decides nothing; the poster and the transport do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from kvxfer.agent.runtime import AgentRuntime
from kvxfer.agent.transfer import AgentPost
from kvxfer.transport.descriptors import Prepared
from kvxfer.transport.engine import MemoryRegistration, Op
from kvxfer.types import Lane, RegionRecord


class RegisteredMemory:
    """What :class:`~kvxfer.agent.Agent` inherits."""

    _lanes: tuple[Lane, ...]

    def _open(self) -> AgentRuntime:
        raise NotImplementedError

    def register(self, memory: Any, *, can_read: bool = True, can_write: bool = True) -> MemoryRegistration:
        """Let every proven peer read and write ``memory`` (contiguous tensor (CPU, CUDA), array, buffer,
        ``(address, length)`` or Region) at any time until :meth:`deregister`: an open-ended grant and offer. It is kept
        alive so long.

        Raises InvalidArgument for memory with gaps, LaneUnavailable for an unusable device.
        """
        return self._open().transfers.engine.register(memory, can_read=can_read, can_write=can_write)

    def deregister(self, registration: MemoryRegistration) -> None:
        """Take it back: once this returned no peer reads or writes it. Raises BlocksBusy while a post of ours uses it,
        or a peer's write into it drains."""
        self._open().transfers.engine.deregister(registration)

    def memory(self) -> tuple[RegionRecord, ...]:
        """What is registered here, for peers (``to_json``): they need it to prepare."""
        return self._open().transfers.engine.records()

    def prepare(
        self, descriptors: Any, *, peer: str | None = None, records: Sequence[RegionRecord] | None = None
    ) -> Prepared:
        """Find descriptors in our registered memory, or in that of ``peer``, whose :meth:`memory` is ``records``
        (needed when they are new). Descriptors: see :meth:`~kvxfer.transport.descriptors.Descriptors.of`. Once made, a
        list is posted from many times. Raises InvalidArgument naming the first that lies in no region; PeerGone.
        """
        return self._open().transfers.prepare(descriptors, peer, records)

    def post(
        self,
        op: Op,
        local: Prepared,
        local_ids: npt.ArrayLike | None,
        remote: Prepared,
        remote_ids: npt.ArrayLike | None,
        *,
        lanes: Sequence[Lane] | None = None,
        notification: bytes | None = None,
        deadline_s: float | None = None,
    ) -> AgentPost:
        """READ the peer's descriptors ``remote_ids`` into ours, ``local_ids``, one by one (``None``: all), or WRITE the
        other way, which has the peer's agent read. ``notification`` is told to the peer once the bytes are committed.

        A wrong call raises here: InvalidArgument, LimitExceeded, LaneUnavailable, PeerGone. What goes wrong later is
        raised by awaiting.
        """
        allowed = self._lanes if lanes is None else lanes
        return self._open().transfers.post(
            op, local, local_ids, remote, remote_ids, lanes=allowed, notification=notification, deadline_s=deadline_s
        )
