"""One leg of a request: the HTTP exchange with one worker, ended at once when it is dropped.

Turns every way in which an exchange can end into a value; it must never decide whether to try again. Bodies and
errors are bounded, nothing is read from the environment, and events are passed on as the bytes they came in.
"""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import AsyncGenerator, AsyncIterator
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import h11
import httpx

from kvxfer.errors import ProtocolError
from kvxfer.openai.sse import CONTENT_TYPE, Event, EventDecoder
from kvxfer.router import failure
from kvxfer.router.failure import Failure

PREFILL_TIMINGS = {
    "queue_s": "prefill_queue_s",
    "prefill_s": "prefill_s",
    "ended_unix_s": "prefill_ended_unix_s",
}
CACHED_TOKENS = (
    ("usage", "cached_tokens"),
    ("usage", "prompt_tokens_details", "cached_tokens"),
    ("kv_transfer_params", "remote_prefill_cached_tokens"),
)
"""Where P says how much its prefix cache held: kvxfer's engine; vLLM where it is told to; newer vLLM in any case."""
ERROR_BYTES_MAX = 1 << 20
PREFILL_BYTES_MAX = 1 << 20
HELD_EVENTS_MAX = 64
CAUSES_MAX = 64
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


def new_client(*, connect_timeout_s: float, connections_max: int) -> httpx.AsyncClient:
    """The one client that all legs share: no proxies, no redirects, no cookies (a worker's would go out with another
    client's request); callers bound how long a leg takes.

    Each leg has a connection of its own. One that was kept might lead nowhere by now, which only the wait for an answer
    would show; a new one shows within ``connect_timeout_s`` whether the worker can be reached.
    """
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=connect_timeout_s),
        limits=httpx.Limits(max_connections=connections_max, max_keepalive_connections=0),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        trust_env=False,
        follow_redirects=False,
    )


@dataclasses.dataclass(frozen=True)
class Leg:
    """Where one half of a request goes, and with what."""

    what: str
    url: str
    headers: dict[str, str]
    content: bytes


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """P's part is done: its usage and timings, as it said them."""

    answer: dict[str, Any]

    def account(self) -> dict[str, Any]:
        """P's timings and cache hits under the names they have in the account of the whole request."""
        timings, cached = self.answer.get("timings"), self.cached_tokens
        account = {} if cached is None else {"prefill_cached_tokens": cached}
        if not isinstance(timings, dict):
            return account
        return account | {new: timings[old] for old, new in PREFILL_TIMINGS.items() if old in timings}

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that P's prefix cache held; None where it does not say."""
        for *path, name in CACHED_TOKENS:
            values: Any = self.answer
            for step in path:
                values = values.get(step) if isinstance(values, dict) else None
            count = values.get(name) if isinstance(values, dict) else None
            if type(count) is int and count >= 0:
                return count
        return None


@dataclasses.dataclass(frozen=True)
class Answered:
    """D's whole answer to a request without streaming."""

    content: bytes


class Exchange:
    """One POST to one worker. ``aclose`` drops the connection at once if the answer was not read to its end."""

    def __init__(self, client: httpx.AsyncClient, leg: Leg) -> None:
        self._client = client
        self._leg = leg
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None

    async def open(self) -> Failure | None:
        """Send the request and read the answer's head; a Failure if there is no 200."""
        leg = self._leg
        try:
            request = self._client.build_request("POST", leg.url, content=leg.content, headers=leg.headers)
            self._response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            return failure.out_of_sockets() if is_exhausted(error) else failure.unreachable(leg.what)
        except httpx.HTTPError as error:
            return failure.lost(leg.what) if is_unreadable(error) else failure.unread(leg.what)
        self._chunks = self._response.aiter_raw()
        if self._response.status_code == 200:
            return None
        content = await self.read(ERROR_BYTES_MAX)
        if isinstance(content, Failure):
            content = b""
        return failure.from_answer(leg.what, self._response.status_code, content)

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        assert self._response is not None
        kind: str = self._response.headers.get("content-type", "")
        return kind.startswith(CONTENT_TYPE)

    async def read(self, bytes_max: int) -> bytes | Failure:
        """The rest of the body, at most ``bytes_max``."""
        parts: list[bytes] = []
        size = 0
        while chunk := await self.next_chunk():
            if isinstance(chunk, Failure):
                return chunk
            size += len(chunk)
            if size > bytes_max:
                return failure.malformed(self._leg.what, f"longer than {bytes_max} bytes")
            parts.append(chunk)
        return b"".join(parts)

    async def next_chunk(self) -> bytes | Failure:
        """The next bytes as they come; empty at the end."""
        assert self._chunks is not None
        try:
            async for chunk in self._chunks:
                if chunk:
                    return chunk
        except httpx.HTTPError:
            return failure.lost(self._leg.what)
        return b""

    async def aclose(self) -> None:
        if self._response is not None:
            await self._response.aclose()
        if isinstance(self._chunks, AsyncGenerator):
            await self._chunks.aclose()


def is_exhausted(error: BaseException) -> bool:
    """Whether a connection failed for want of something in this process or on this host: descriptors, memory, ports."""
    seen: list[BaseException | None] = [error]
    for _ in range(CAUSES_MAX):
        if not seen:
            return False
        cause = seen.pop()
        if isinstance(cause, OSError) and cause.errno in EXHAUSTED:
            return True
        if isinstance(cause, BaseExceptionGroup):
            seen += cause.exceptions
        if cause is not None:
            seen += [cause.__cause__, cause.__context__]
    return False


def is_unreadable(error: BaseException) -> bool:
    """Whether an answer began and is not HTTP, rather than that the connection ended."""
    cause: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if cause is None or isinstance(cause, h11.RemoteProtocolError):
            break
        cause = cause.__cause__ or cause.__context__  # httpcore raises anew "from None"
    return isinstance(cause, h11.RemoteProtocolError)


async def prefill(client: httpx.AsyncClient, leg: Leg) -> Prefilled | Failure:
    """Run the prefill leg to its answer. Cancelling it drops the connection, which is how P learns of an abort."""
    exchange = Exchange(client, leg)
    try:
        failed = await exchange.open()
        if failed is not None:
            return failed
        content = await exchange.read(PREFILL_BYTES_MAX)
        if isinstance(content, Failure):
            return content
        if not _is_object(content):
            return failure.malformed(leg.what, "not a JSON object")
        return Prefilled(json.loads(content))
    finally:
        await exchange.aclose()


def _is_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False


class DecodeLeg:
    """The decode leg: ``begin`` until there is something worth sending to the client, then ``events`` to the end."""

    def __init__(self, client: httpx.AsyncClient, leg: Leg, *, streams: bool, answer_bytes_max: int) -> None:
        self._exchange = Exchange(client, leg)
        self._what = leg.what
        self._streams = streams
        self._answer_bytes_max = answer_bytes_max
        self._decoder = EventDecoder()
        self._held: list[Event] = []
        self.error_event: Failure | None = None
        """The error that the worker itself put into the stream, once it was passed on."""

    async def begin(self) -> Answered | Failure | None:
        """None once the stream has an event with an answer in it; Answered where the client asked for no stream.

        Events without text (the role, a comment) are held back until then, so that a worker lost before its first
        token can still be replaced.
        """
        failed = await self._exchange.open()
        if failed is not None:
            return failed
        if not self._streams:
            content = await self._exchange.read(self._answer_bytes_max)
            if isinstance(content, Failure):
                return content
            return Answered(content) if _is_object(content) else failure.malformed(self._what, "not a JSON object")
        if not self._exchange.is_stream:
            return failure.malformed(self._what, "not an event stream")
        while True:
            events = await self._next_events()
            if isinstance(events, Failure):
                return events
            if not events:
                return failure.lost(self._what)
            for event in events:
                failed = failure.from_event(self._what, event.data)
                if failed is not None:
                    return failed
            self._held += events
            if any(has_answer(event) for event in events) or len(self._held) > HELD_EVENTS_MAX:
                return None

    async def events(self) -> AsyncIterator[list[Event] | Failure]:
        """Whole events as they come. A Failure is the last item; without one the stream said ``[DONE]`` or an error."""
        pending, self._held = self._held, []
        is_ended = False
        while pending:
            yield pending
            for event in pending:
                self.error_event = self.error_event or failure.from_event(self._what, event.data)
                is_ended = is_ended or event.is_done
            following = await self._next_events()
            if isinstance(following, Failure):
                if not is_ended and self.error_event is None:
                    yield following
                return
            pending = following
        if not is_ended and self.error_event is None:
            yield failure.lost(self._what)

    async def _next_events(self) -> list[Event] | Failure:
        while chunk := await self._exchange.next_chunk():
            if isinstance(chunk, Failure):
                return chunk
            try:
                events = self._decoder.feed(chunk)
            except ProtocolError as error:
                return failure.malformed(self._what, str(error))
            if events:
                return events
        return []

    async def aclose(self) -> None:
        await self._exchange.aclose()


def has_answer(event: Event) -> bool:
    """Whether an event carries some of the answer (text, a tool's call, reasoning, the reason why it ended), not only
    its frame."""
    if event.is_done:
        return True
    if not event.data:
        return False
    try:
        chunk = event.json()
        choices = chunk["choices"]
        return any(
            choice.get("finish_reason")
            or choice.get("text")
            or any(value for name, value in (choice.get("delta") or {}).items() if name != "role")
            for choice in choices
        )
    except (ProtocolError, KeyError, TypeError, AttributeError):
        return True
