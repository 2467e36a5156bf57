"""Registered memory and posts on the agent's loop: the awaitable side of :mod:`kvxfer.transport.posts`. Decides which
life of a peer a name means, and whom an end is told; must never decide whether a post may commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy.typing as npt

from kvxfer.agent.books import Books
from kvxfer.agent.metrics import AgentMetrics
from kvxfer.agent.peers import Peers
from kvxfer.config import AgentConfig
from kvxfer.errors import InvalidArgument, KvxferError
from kvxfer.transport.base import Event, Transport
from kvxfer.transport.descriptors import Prepared, RemotePeer
from kvxfer.transport.lane_choice import LaneChooser
from kvxfer.transport.post import Post, PostStatistics
from kvxfer.transport.posts import Op, Poster
from kvxfer.types import Lane, RegionRecord, TransferState

log = logging.getLogger("kvxfer.agent")


class AgentPost:
    """Made by :meth:`Agent.post`. Awaiting it gives its :class:`~kvxfer.transport.post.PostStatistics`, or raises what
    ended it; :meth:`poll` asks without waiting. As with a Transfer, cancelling a task that awaits it does not cancel
    it, and as a scope it is cancelled on the way out and waited for until it drained.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._post: Post | None = None
        self._future: asyncio.Future[PostStatistics] = loop.create_future()
        self._drained: asyncio.Future[None] = loop.create_future()

    @property
    def post(self) -> Post:
        """What it is underneath."""
        assert self._post is not None
        return self._post

    @property
    def is_final(self) -> bool:
        return self.post.is_final

    @property
    def is_drained(self) -> bool:
        """Whether the memory is the caller's again."""
        return self.post.is_drained

    def poll(self) -> TransferState:
        """The state now, everything that has happened taken into account. Never waits. On the agent's loop."""
        return self.post.poll()

    def statistics(self) -> PostStatistics:
        """Bytes, pieces and times, also while it is under way."""
        return self.post.statistics()

    def cancel(self) -> None:
        """Give it up: it ends with TransferCancelled, unless it has ended. Returns at once."""
        self.post.cancel()

    async def wait_drained(self) -> None:
        """Wait until it is over and the transport is done with our memory."""
        await asyncio.shield(self._drained)

    def __await__(self) -> Generator[Any, None, PostStatistics]:
        if not self._future.done() and self.post.wait_briefly():
            yield  # the loop's other tasks: who awaits one post after the other must not keep them waiting
        return (yield from asyncio.shield(self._future).__await__())

    async def __aenter__(self) -> AgentPost:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()
        await self.wait_drained()

    def __repr__(self) -> str:
        return f"<AgentPost {self._post!r}>"

    # --- for Posts ---

    def _finish(self, post: Post) -> None:
        if self._future.done():
            return
        if post.error is None:
            self._future.set_result(post.statistics())
        else:
            self._future.set_exception(post.error)
            self._future.exception()  # a post that nobody awaits is told of in statistics and metrics, not in a log

    def _drain(self, _: Post) -> None:
        if not self._drained.done():
            self._drained.set_result(None)


class Posts:
    """Lives on the agent's loop."""

    def __init__(
        self,
        transport: Transport,
        config: AgentConfig,
        peers: Peers,
        books: Books,
        metrics: AgentMetrics,
        lanes: LaneChooser,
        drain: Callable[[], None],
    ) -> None:
        self.poster = Poster(transport, config=config, lanes=lanes, drain=drain)
        self._peers = peers
        self._books = books
        self._metrics = metrics
        self._remote: dict[str, RemotePeer] = {}

    def __len__(self) -> int:
        """Posts that have not drained."""
        return len(self.poster.posts)

    def prepare(self, descriptors: Any, peer: str | None, records: Sequence[RegionRecord] | None) -> Prepared:
        """See :meth:`Agent.prepare`."""
        if peer is None:
            if records is not None:
                raise InvalidArgument("records are a peer's: name the peer")
            return self.poster.prepare(descriptors)
        return self.poster.prepare(descriptors, peer=self._remote_peer(peer, records))

    def post(
        self,
        op: Op,
        local: Prepared,
        local_ids: npt.ArrayLike | None,
        remote: Prepared,
        remote_ids: npt.ArrayLike | None,
        *,
        lanes: Sequence[Lane] | None,
        notification: bytes | None,
        deadline_s: float | None,
    ) -> AgentPost:
        """See :meth:`Agent.post`."""
        handle = AgentPost(asyncio.get_running_loop())

        def finish(post: Post) -> None:
            self._count(post)
            handle._finish(post)

        handle._post = self.poster.post(
            op,
            local,
            local_ids,
            remote,
            remote_ids,
            lanes=lanes,
            notification=notification,
            deadline_s=deadline_s,
            on_final=finish,
            on_drained=handle._drain,
        )
        return handle

    def handle(self, event: Event) -> bool:
        """Take an event; False where it belongs to no post."""
        return self.poster.handle(event)

    def cancel_all(self, error: KvxferError) -> None:
        self.poster.cancel_all(error)

    def fail_all(self, error: KvxferError) -> None:
        self.poster.fail_all(error)

    def _remote_peer(self, agent_id: str, records: Sequence[RegionRecord] | None) -> RemotePeer:
        member = self._peers.get(agent_id)
        known = self._remote.get(agent_id)
        is_same_life = known is not None and known.ref == member.ref
        is_same_memory = known is not None and (records is None or tuple(records) == known.records)
        if known is not None and is_same_life and is_same_memory and known.address == member.address:
            return known
        if records is None and not is_same_life:
            raise InvalidArgument(f"the registered memory of {member.ref} is not known yet: give its records")
        memory = known.records if records is None and known is not None else tuple(records or ())
        self._remote[agent_id] = found = RemotePeer(member.ref, member.address, memory)
        return found

    def _count(self, post: Post) -> None:
        numbers = post.statistics()
        if post.error is None and numbers.lane is not None:
            self._books.committed(numbers.lane, numbers.bytes)
            self._metrics.committed({**numbers.seconds, "plan": numbers.post_us / 1e6})
        elif post.error is not None:
            log.info("%r ended: %s", post, post.error)
            self._books.failed(numbers.lane, post.error)
