"""Ends what one task waits for, from outside, with a reason: a client left, a worker's incarnation ended, P failed.

A cancellation alone says only that something is to end. Here the first reason wins, and the task gets it as
:class:`InterruptedWithReason`; a cancellation that came from elsewhere stays one. That costs no task and no future.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Generic, TypeVar

_R = TypeVar("_R")
_T = TypeVar("_T")


class ClientLeft(Exception):
    """The client left before its answer was whole."""


class InterruptedWithReason(Exception):
    """What :meth:`Interrupts.run` raises; the reason is in ``Interrupts.reason``."""


class Interrupts(Generic[_R]):
    """Of the task that makes it. A reason that comes while nothing runs ends the next :meth:`run` before it begins."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._is_running = False
        self._is_cancelling = False
        self.reason: _R | None = None

    def interrupt(self, reason: _R) -> None:
        """End what runs. Only the first call counts; it may come from the task itself."""
        if self.reason is None:
            self.reason = reason
            if asyncio.current_task() is self._task:
                self._loop.call_soon(self._cancel)  # at its next wait
            else:
                self._cancel()

    async def run(self, work: Awaitable[_T]) -> _T:
        """``work``'s result. Raises InterruptedWithReason where a reason came before the work was done."""
        if self.reason is not None:
            if asyncio.iscoroutine(work):
                work.close()
            raise InterruptedWithReason
        self._is_running = True
        try:
            return await work
        except BaseException:
            if self._is_cancelling and not self._task.uncancel():
                self._is_cancelling = False
                raise InterruptedWithReason from None  # whatever the cancellation became on its way out
            raise
        finally:
            self._is_running = False
            if self._is_cancelling:
                self._is_cancelling = False
                self._task.uncancel()

    def _cancel(self) -> None:
        if self._is_running and not self._is_cancelling:
            self._is_cancelling = True
            self._task.cancel()
