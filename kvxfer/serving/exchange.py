"""One request of a client and its answer, below ASGI: the seam between an HTTP server and a cheap handler.

A handler gets a :class:`ClientExchange` when the request's head is there. It writes the answer with plain calls, so
that a chunk of a stream costs no task, no future and no message. Decides the order in which a handler may call; it must
never know what a request is about.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Protocol

from kvxfer.errors import KvxferError

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case, in the order in which they came."""


class ClientGoneError(KvxferError):
    """The client left before its request was whole. It is no error of a handler: what leaves one is not logged."""

    code: ClassVar[str] = "client_gone"


class ClientExchange(Protocol):
    """What both implementations give: `serving.direct` (on the socket) and `serving.asgi_exchange` (over ASGI).

    An answer is either ``respond``, or ``start``, any number of ``write``, ``end``. Calls after the end, and calls
    after the client has left, do nothing.
    """

    method: str
    path: str
    """Without the query, percent-decoded as uvicorn does it."""
    raw_target: bytes
    """Path and query as the client sent them."""
    headers: Headers
    client: str
    """The client's address, for logs."""

    on_gone: Callable[[], None] | None
    """Called once where the client leaves, or its connection is cut, before the answer has ended: soon, if that is so
    already. Not called for the handler's own ``abort``."""
    on_pause: Callable[[], None] | None
    """Called where the client reads more slowly than the answer is written: at once if that is already so."""
    on_resume: Callable[[], None] | None
    """Called where the client has caught up."""

    @property
    def is_started(self) -> bool:
        """Whether an answer's head was written: then its status cannot change any more."""

    @property
    def is_ended(self) -> bool:
        """Whether the answer is whole, as far as the handler goes."""

    @property
    def is_gone(self) -> bool:
        """Whether the client has left."""

    @property
    def is_paused(self) -> bool:
        """Whether the client reads more slowly than the answer is written."""

    def header(self, name: bytes) -> bytes | None:
        """The value of the first header ``name`` (lower case)."""

    async def read_body(self) -> bytes:
        """The whole body, under the server's budget and clocks; once.

        Raises RequestError (408, 413, 415), OverloadedError, ClosedError where the server stops, and ClientGoneError.
        """

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer: the server adds content-length."""

    def start(self, status: int, headers: Headers) -> None:
        """The head of an answer of unknown length, which goes out in chunks."""

    def write(self, chunk: bytes) -> None:
        """Some of the body; an empty ``chunk`` does nothing."""

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        """As ``write``, for chunks of HTTP/1.1, frames included (not the last one, of size 0). None where this answer
        is not sent in chunks, or not by this server itself."""

    def end(self) -> None:
        """The answer is whole."""

    def abort(self) -> None:
        """Cut the connection: the answer cannot be ended well."""

    async def drained(self, timeout_s: float) -> bool:
        """Wait until the client has taken what was written, but for a bounded rest (as for ``on_resume``), or has left.
        False after ``timeout_s``.
        """


ExchangeHandler = Callable[[ClientExchange], Awaitable[None]]
"""Runs in a task of its own. The server never cancels it because its client left (``on_gone`` says that); it cancels it
only when it must end at once. An exception that leaves it is logged, and the client gets a 500 or a cut connection."""

FindHandler = Callable[[str, str], ExchangeHandler | None]
"""(method, path) -> the handler below ASGI, or None: then the ASGI application serves the request."""
