"""What both implementations of an exchange have in common: the request, where the answer stands, and the callbacks.

Decides when a callback is called. It must never know how an answer travels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvxfer.errors import UsageError
from kvxfer.serving.bodies import check_encoding
from kvxfer.serving.exchange import ClientGoneError, Headers

Callback = Callable[[], None]


class ExchangeBase:
    __slots__ = (
        *("_on_gone", "_on_pause", "_was_read", "client", "headers", "is_ended", "is_gone", "is_started", "method"),
        *("on_resume", "path", "raw_target"),
    )

    def __init__(self, method: str, path: str, raw_target: bytes, headers: Headers, client: str) -> None:
        self.method = method
        self.path = path
        self.raw_target = raw_target
        self.headers = headers
        self.client = client
        self.on_resume: Callback | None = None
        self._on_gone: Callback | None = None
        self._on_pause: Callback | None = None
        self._was_read = False
        self.is_started = False
        self.is_ended = False
        self.is_gone = False

    @property
    def is_paused(self) -> bool:
        """Whether the client reads more slowly than the answer is written."""
        raise NotImplementedError

    @property
    def is_over(self) -> bool:
        """Whether calls do nothing any more."""
        return self.is_ended or self.is_gone

    @property
    def on_gone(self) -> Callback | None:
        return self._on_gone

    @on_gone.setter
    def on_gone(self, callback: Callback | None) -> None:
        self._on_gone = callback
        if callback is not None and self.is_gone and not self.is_ended:
            asyncio.get_running_loop().call_soon(self._call_gone)

    @property
    def on_pause(self) -> Callback | None:
        return self._on_pause

    @on_pause.setter
    def on_pause(self, callback: Callback | None) -> None:
        self._on_pause = callback
        self.pause_if_paused()

    def header(self, name: bytes) -> bytes | None:
        for found, value in self.headers:
            if found == name:
                return value
        return None

    def begin_reading(self) -> None:
        """Raise UsageError at the second call, ClientGoneError where the client has left, and RequestError (415) for a
        body that is compressed."""
        if self._was_read:
            raise UsageError("the body of this request was read before")
        self._was_read = True
        if self.is_gone:
            raise ClientGoneError("the client left before its request was read")
        check_encoding(self.headers)

    def pause_if_paused(self) -> None:
        if self._on_pause is not None and self.is_paused and not self.is_over:
            self._on_pause()

    def resume(self) -> None:
        """The client has caught up."""
        if self.on_resume is not None and not self.is_over:
            self.on_resume()

    def forget_callbacks(self) -> None:
        """They may refer back to this exchange."""
        self._on_gone = self._on_pause = self.on_resume = None

    def leave(self) -> None:
        """The client has left: nothing of the answer is sent any more."""
        self.is_gone = True
        self._on_pause = self.on_resume = None
        self._call_gone()

    def _call_gone(self) -> None:
        callback, self._on_gone = self._on_gone, None
        if callback is not None and not self.is_ended:
            callback()
