"""The engine's heartbeats. Decides that none is lost: an engine may start before its agent, and an idle one sends no
second heartbeat. The transport judges what a heartbeat means."""

from __future__ import annotations

from kvxfer.transport.base import Transport


class EnginePulse:
    """Keeps the last heartbeat until there is a transport to give it to. From any thread."""

    def __init__(self) -> None:
        self._last: tuple[bool, bool] | None = None
        self._transport: Transport | None = None

    def pulse(self, has_work: bool, took_in: bool) -> None:
        self._last = (has_work, took_in)  # before the look at the transport: `open` sets that before it looks here
        if self._transport is not None:
            self._transport.pulse(has_work=has_work, took_in=took_in)

    def open(self, transport: Transport) -> None:
        self._transport = transport
        if self._last is not None:
            has_work, took_in = self._last
            transport.pulse(has_work=has_work, took_in=took_in)
