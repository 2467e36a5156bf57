"""What the client is sent: one JSON body, or a stream of events that always ends well formed.

Keeps the order of an HTTP answer (head, body, end) whatever happens above it; it must never know what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvxfer.openai.sse import CONTENT_TYPE, KEEP_ALIVE, encode_object
from kvxfer.router import headers
from kvxfer.router.account import RequestAccount
from kvxfer.router.apis import StreamStyle
from kvxfer.serving.exchange import ClientExchange, Headers

RETRY_AFTER_STATUS = (429, 503)
SLOW_CLIENT_S = 1.0
"""How long an answer that is given up waits for a client that does not read."""
_JSON = (b"content-type", b"application/json")
_STREAM_HEAD = (
    (b"content-type", f"{CONTENT_TYPE}; charset=utf-8".encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientAnswer:
    """The answer of one request. After its end everything is ignored.

    ``style`` has the words of the client's API for an error.
    """

    def __init__(
        self,
        exchange: ClientExchange,
        request_id: str,
        style: StreamStyle,
        *,
        common: Headers = (),
    ) -> None:
        """``common`` headers are in the answer whatever it is."""
        self._exchange = exchange
        self._common = ((headers.REQUEST_ID.encode(), request_id.encode("latin-1")), *common)
        self._style = style
        self.retry_after_s = 1
        self.account: RequestAccount | None = None
        """What the client is told of its request, where it asked."""
        self.write: Callable[[bytes], None] = exchange.write
        """Bytes of whole events. The exchange's own: it is called for each piece of a stream."""
        self.chunk_writer = exchange.chunk_writer
        """The same for whole chunks of HTTP/1.1, where the answer has such."""
        self.status = 0
        self.bytes_written = 0
        """What was written, but for that of ``relayed``."""
        self.relayed: Callable[[], int] = int
        """The bytes of the stream that runs now."""
        self.heard: Callable[[], int] = int
        """As ``relayed``, without an engine's keep-alives."""
        self.is_begun = False
        """Whether the client has some of the answer, and not only its head or keep-alives: from then on no other
        worker can be asked."""

    @property
    def bytes_sent(self) -> int:
        """That the client was sent so far, without the router's own keep-alives."""
        return self.bytes_written + self.relayed()

    @property
    def progress(self) -> int:
        """It changes while there is more of the answer: no keep-alive, of whomever, is any."""
        return self.bytes_written + self.heard()

    def count_relayed(self) -> None:
        """The stream that ran is over."""
        self.bytes_written, self.relayed, self.heard = self.bytes_sent, int, int

    @property
    def is_started(self) -> bool:
        return self._exchange.is_started

    @property
    def is_ended(self) -> bool:
        return self._exchange.is_ended

    @property
    def is_client_gone(self) -> bool:
        return self._exchange.is_gone

    def json(self, status: int, body: dict[str, Any] | bytes, extra: Headers = ()) -> None:
        """A whole JSON answer."""
        content = body if isinstance(body, bytes) else encode_object(body)
        head = [_JSON, *self._common, *extra]
        if self.account is not None:
            head.append((headers.ACCOUNT_BYTES, self.account.header()))
        if status in RETRY_AFTER_STATUS:
            head.append((headers.RETRY_AFTER.encode(), b"%d" % self.retry_after_s))
        self.status, self.is_begun = status, True
        self.bytes_written += len(content)
        self._exchange.respond(status, head, content)

    def open_stream(self, extra: Headers = ()) -> None:
        """The head of a stream of events, unless it was sent. It says nothing of how the request ends."""
        if not self.is_started:
            self.status = 200
            self._exchange.start(200, [*_STREAM_HEAD, *self._common, *extra])

    def begin_stream(self, extra: Headers = ()) -> None:
        """As :meth:`open_stream`; some of the answer follows."""
        self.open_stream(extra)
        self.is_begun = True

    def start(self, status: int, fields: Headers) -> None:
        """The head of an answer of any kind; its bytes follow by ``write``."""
        self.status, self.is_begun = status, True
        self._exchange.start(status, [*fields, *self._common])

    def keep_alive(self, extra: Headers = ()) -> None:
        """A comment, after the head of the stream: nothing for the client, and a keep-alive for what is between. Not
        where the client reads too slowly anyway."""
        if not (self.is_ended or self._exchange.is_paused):
            self.open_stream(extra)
            self._exchange.write(KEEP_ALIVE)

    def account_comment(self) -> bytes:
        """What stands before the last event of a stream."""
        return b"" if self.account is None else self.account.comment()

    def end(self) -> None:
        """The regular end of a stream."""
        self._exchange.end()

    def fail(self, status: int, body: dict[str, Any], extra: Headers = ()) -> None:
        """An error, whatever was sent so far: a JSON answer, or one error event and the end of the stream."""
        if not self.is_started:
            self.json(status, self._style.error_answer(body), extra)
        elif not self.is_ended:
            self._exchange.write(self.account_comment() + self._style.end_with_error(body))
            self._exchange.end()

    async def give_up(self, status: int, body: dict[str, Any]) -> None:
        """As :meth:`fail`. A client that has not read it after SLOW_CLIENT_S never will: its connection is cut."""
        if not self.is_started or self.is_ended:
            self.fail(status, body)
            return
        self._exchange.write(self.account_comment() + self._style.end_with_error(body))
        if await self._exchange.drained(SLOW_CLIENT_S):
            self._exchange.end()
        else:  # before the end: a connection whose answer has ended is no longer this answer's to cut
            self._exchange.abort()

    def throttle(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Tell the writer's source to pause while the client reads too slowly. It may pause at once."""
        self._exchange.on_resume = resume
        self._exchange.on_pause = pause

    def unthrottle(self) -> None:
        self._exchange.on_pause = self._exchange.on_resume = None

    def on_client_gone(self, call: Callable[[], None] | None) -> None:
        """``call`` once where the client leaves before the answer has ended; at once if it has left already."""
        self._exchange.on_gone = call
        if call is not None and self.is_client_gone:
            call()
