"""Requests that wait here, without blocks, until another engine begins their prompts: what that engine is asked, and
when a wait ends.

The source's first rank is asked every AWAIT_S, and it reports at once when a prompt has begun, or never will. A wait
also ends at the request's own timeout, and with an error if that engine is gone, if it has work but makes no step, or
if it is silent. Everything here runs on the agent's loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence

from kvxfer.connectors.common.pauses import Pauses
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.steps import Standing, WaitOrder
from kvxfer.connectors.vllm.wire import KEEPS_MAX, Await, Begun, Queued
from kvxfer.errors import DeadlineExceededError, KvxferError, PeerGoneError, from_code

AWAIT_S = 0.5
"""The interval at which a source is asked about the prompts that requests here wait for."""


@dataclasses.dataclass
class _Waiting:
    order: WaitOrder
    since_s: float
    timer: asyncio.TimerHandle
    heard_s: float
    asked_s: float = -AWAIT_S
    is_known: bool = False


class Waits:
    """The waiting requests of one engine, at its first rank."""

    def __init__(
        self,
        options: ConnectorOptions,
        notify: Callable[[str, Sequence[Await]], Awaitable[object]],
        tell: Callable[[Standing], None],
    ) -> None:
        """``notify`` sends a message to an agent, and raises PeerGoneError if it does not take it. ``tell`` is called
        with every change."""
        self._options = options
        self._notify = notify
        self._tell = tell
        self._waiting: dict[str, _Waiting] = {}
        self._new: dict[str, asyncio.Event] = {}
        """By source, set if a request has begun to wait: the source is then asked at once."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self, order: WaitOrder) -> None:
        """The request waits for that order's source from now on. An earlier wait of the request is dropped."""
        self.leave(order.request_id)
        loop, now_s = asyncio.get_running_loop(), time.monotonic()
        timer = loop.call_later(order.timeout_s, self._time_out, order.request_id)
        self._waiting[order.request_id] = _Waiting(order, now_s, timer, now_s)
        self._new.setdefault(order.source, asyncio.Event()).set()
        if order.source not in self._tasks:
            self._tasks[order.source] = loop.create_task(self._ask(order.source))

    def leave(self, request_id: str) -> None:
        """The request waits no more; nothing is reported of it."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.timer.cancel()

    def on_message(self, agent_id: str, message: Queued | Begun) -> None:
        """What a source says."""
        if isinstance(message, Begun):
            error = from_code(message.code, f"the source: {message.text}") if message.code else None
            for waiting in self._of(agent_id):
                if waiting.order.transfer_id == message.transfer_id:
                    self._end(waiting, error)
            return
        now_s, silent_s = time.monotonic(), self._options.engine_silent_s
        positions = dict(zip(message.transfer_ids, message.positions, strict=True))
        for waiting in self._of(agent_id):
            position = positions.get(waiting.order.transfer_id)
            if position is None:
                continue
            waiting.heard_s = now_s
            if message.has_work and message.step_age_ms >= silent_s * 1e3:
                age_s = message.step_age_ms / 1e3
                self._end(
                    waiting, PeerGoneError(f"the engine of {agent_id!r} has work, and made no step for {age_s:.1f} s")
                )
            elif waiting.is_known != (position > 0):
                waiting.is_known = position > 0
                self._tell(Standing(waiting.order.request_id, waiting.is_known))

    async def close(self) -> None:
        """Forget everything."""
        for request_id in list(self._waiting):
            self.leave(request_id)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- inside ---

    def _of(self, source: str) -> list[_Waiting]:
        return [waiting for waiting in self._waiting.values() if waiting.order.source == source]

    def _end(self, waiting: _Waiting, error: KvxferError | None) -> None:
        """The wait is over: there is a grant, or there will be none."""
        request_id = waiting.order.request_id
        if self._waiting.get(request_id) is not waiting:
            return
        self.leave(request_id)
        seconds = time.monotonic() - waiting.since_s
        code, text = ("", "") if error is None else (error.code, str(error))
        self._tell(Standing(request_id, waiting.is_known, True, code, text, seconds))

    def _time_out(self, request_id: str) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            queue = "in the source's queue" if waiting.is_known else "unknown to the source"
            self._end(waiting, DeadlineExceededError(f"timeout_s {waiting.order.timeout_s:g} passed, {queue}"))

    async def _ask(self, source: str) -> None:
        """Ask that source as long as a request waits for it."""
        new, pauses = self._new[source], Pauses(AWAIT_S)
        try:
            while waitings := self._of(source):
                new.clear()
                now_s = time.monotonic()
                paused_s = pauses.look(now_s)
                due = [waiting for waiting in waitings if now_s >= waiting.asked_s + AWAIT_S]
                for waiting in due:
                    waiting.asked_s = now_s
                ids = [waiting.order.transfer_id for waiting in due]
                batches = [ids[begin : begin + KEEPS_MAX] for begin in range(0, len(ids), KEEPS_MAX)]
                try:
                    await self._notify(source, [Await(tuple(batch)) for batch in batches])
                except KvxferError as error:
                    for waiting in due:
                        self._end(waiting, error)
                for waiting in waitings:
                    waiting.heard_s += paused_s
                    if time.monotonic() >= waiting.heard_s + self._options.engine_silent_s:
                        silent_s = self._options.engine_silent_s
                        self._end(waiting, PeerGoneError(f"agent {source!r} said nothing for {silent_s:g} s"))
                try:
                    async with asyncio.timeout(AWAIT_S):
                        await new.wait()
                except TimeoutError:
                    pass
        finally:
            del self._tasks[source]
            del self._new[source]
