"""The consumer's end of one answer: status, headers, and the body, piece by piece.

It decides when the consumer waits and when the engine has to. It must never know sockets or HTTP: bytes, the end and
errors are told to it, and it asks its link to pause, to resume and to give up.

A consumer takes the body in one of three ways: ``async for``, ``read(limit)``, or ``pipe(write)``, which calls
``write`` from within the read of the socket, without a task that wakes up for each chunk. Leaving ``async with`` gives
up what has not come yet.
"""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Callable
from typing import Protocol, Self

from kvxfer.errors import UsageError
from kvxfer.router.upstream.errors import UpstreamTooLargeError
from kvxfer.router.upstream.limits import UpstreamPhase

Take = Callable[[bytes], int]
"""Gets bytes of the engine that begin with a chunk of HTTP/1.1, frames included. Where they are whole chunks, it may
take all of them, and then says how many bytes of body they have; otherwise 0."""


class ResponseLink(Protocol):
    """What an answer asks of the connection that it comes by."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def redirect(self, emit: Callable[[bytes], object]) -> None: ...
    def give_up(self) -> None: ...
    def leave(self, late: LateAnswer) -> None: ...


Late = Callable[[bytes], None]
"""Gets the whole body of a 200 that no one waited for any more."""


class UpstreamResponse:
    __slots__ = (
        *("_late", "_so_far"),
        *("_chunks", "_error", "_is_held", "_is_over", "_link", "_waiter"),
        *("address", "has_head", "headers", "heard", "is_piped", "status", "take", "taken"),
    )

    def __init__(self, link: ResponseLink, address: str) -> None:
        self._link: ResponseLink | None = link
        self._chunks: collections.deque[bytes] = collections.deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._is_over = False
        self._is_held = False
        self._late: Late | None = None
        self._so_far: list[bytes] = []
        """What ``read`` has taken."""
        self.address = address
        self.has_head = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """As the engine wrote them, in its order; ``headers`` of interim answers and trailers are not among them."""
        self.is_piped = False
        self.take: Take | None = None
        self.heard: Callable[[], int] | None = None
        """A count of what came of the body, where not all bytes of it are signs of an engine that works."""
        self.taken: float = 0
        """Body bytes that the consumer has. Infinite once the body is piped: then nothing waits here."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._is_over:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            await self._wait()
        return self._take()

    async def read(self, limit: int) -> bytes:
        """The whole body, of at most ``limit`` bytes; a longer one is given up."""
        chunks = self._so_far
        size = 0
        async for chunk in self:
            size += len(chunk)
            if size > limit:
                self.abort()
                text = f"the answer has more than {limit} bytes"
                raise UpstreamTooLargeError(text, address=self.address, phase=UpstreamPhase.BODY)
            chunks.append(chunk)
        self._late = None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def pipe(
        self,
        write: Callable[[bytes], object],
        take: Take | None = None,
        heard: Callable[[], int] | None = None,
    ) -> None:
        """Hands every chunk to ``write`` and returns when the body is over. What ``take`` takes does not come to
        ``write``. The body is silent while ``heard`` does not change; without it, while no byte comes.

        ``write`` may call ``pause`` (at most one more read of the socket follows), ``resume`` and ``abort``. What it
        raises ends the request, and is raised here.
        """
        while self._chunks or not (self._is_over or self.is_piped):
            if self._is_held:
                await self._wait()
            elif self._chunks:
                try:
                    write(self._take())
                except BaseException:
                    self.abort()
                    raise
            elif self._link is not None:
                self.is_piped = True
                self.taken = math.inf
                self._link.redirect(write)
                self.take, self.heard = take, heard
        while not self._is_over:
            await self._wait()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """The consumer takes no more for now. The engine is held up once the buffers between are full."""
        self._is_held = True
        if self._link is not None:
            self._link.pause()

    def resume(self) -> None:
        self._is_held = False
        self.wake()
        if self._link is not None:
            self._link.resume()

    def abort(self) -> None:
        """Gives up what has not come yet: the connection is closed. Nothing happens where the answer is over."""
        late, self._late = self._late, None
        link = self._link
        if late is None:
            if link is not None:
                link.give_up()
            return
        answer = LateAnswer(self, late)
        if link is not None:
            link.leave(answer)
        else:
            answer.end(self._error)

    def hear_late(self, late: Late) -> None:
        """Where this answer is given up before ``read`` has it whole: have ``late`` called with it, should the engine
        have sent it all the same before it saw the connection end."""
        self._late = late

    async def wait_for_head(self) -> None:
        """What ``UpstreamPool.request`` waits for."""
        while not self.has_head:
            if self._error is not None:
                raise self._error
            await self._wait()

    @property
    def is_held(self) -> bool:
        return self._is_held

    def receive(self) -> Callable[[bytes], object]:
        """Where the connection puts chunks until they are piped."""
        return self._chunks.append

    def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = headers
        self.has_head = True
        self.wake()

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes; chunks that came before are still read."""
        self._error = error
        self._is_over = True
        self._link = self.take = None
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _take(self) -> bytes:
        chunk = self._chunks.popleft()
        self.taken += len(chunk)
        if self._link is not None and not self._is_held:
            self._link.resume()
        return chunk

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise UsageError("an answer has one reader")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except BaseException:
            self.abort()
            raise
        finally:
            self._waiter = None


class LateAnswer(UpstreamResponse):
    """The rest of an answer that was given up: it has no consumer but ``late``."""

    __slots__ = ("_hear",)

    def __init__(self, left: UpstreamResponse, late: Late) -> None:
        assert left._link is None or left._error is None
        super().__init__(_NO_LINK, left.address)
        self._hear: Late | None = late
        self._chunks.extend((*left._so_far, *left._chunks))
        self.has_head, self.status = left.has_head, left.status

    def end(self, error: BaseException | None) -> None:
        hear, self._hear = self._hear, None
        super().end(error)
        if hear is not None and error is None and self.status == 200:
            hear(b"".join(self._chunks))


class _NoLink:
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def redirect(self, emit: Callable[[bytes], object]) -> None: ...
    def give_up(self) -> None: ...
    def leave(self, late: LateAnswer) -> None: ...


_NO_LINK = _NoLink()
