"""Callbacks that wait for a device. A callback that relies on what vLLM's forward thread asked of a GPU (announcing
what a forward wrote, filling what a forward may still use) waits for a CUDA event behind it, in order.

Decides when a callback may run; must never know what it does. No thread blocks: the agent's loop polls the events.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

log = logging.getLogger("kvxfer.vllm")

POLL_S = 0.0005
"""How often the oldest event is polled."""

Callback: TypeAlias = Callable[[], None]


class Fence(Protocol):
    """A point in a device's work, such as a recorded ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether everything before it is done. Raises what the device failed with."""


class StreamCallbacks:
    """``record`` sets a fence behind all work of the calling thread; ``call_soon`` calls on the agent's loop."""

    def __init__(self, record: Callable[[], Fence], call_soon: Callable[..., None]) -> None:
        self._record = record
        self._call_soon = call_soon
        self._waiting: collections.deque[tuple[Fence, Callback]] = collections.deque()
        self._has_failed = False

    def after(self, callback: Callback) -> None:
        """Call ``callback`` on the loop once the device has done what the calling thread asked of it until now.
        Callbacks run in the order of the calls, and none runs after the device failed."""
        self._call_soon(self._add, self._record(), callback)

    def _add(self, fence: Fence, callback: Callback) -> None:
        if self._has_failed:
            return
        self._waiting.append((fence, callback))
        if len(self._waiting) == 1:
            self._look()

    def _look(self) -> None:
        try:
            while self._waiting and self._is_passed(self._waiting[0][0]):
                _, callback = self._waiting.popleft()
                callback()
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_later(POLL_S, self._look)

    def _is_passed(self, fence: Fence) -> bool:
        try:
            return fence.query()
        except Exception:
            log.exception("the device failed: no peer gets what was computed since")
            self._has_failed = True
            self._waiting.clear()
            return False


def at_once(callback: Callback) -> None:
    """``after`` for memory of the host: what was asked of it is done."""
    callback()


def cuda_events(device: int) -> Callable[[], Fence]:
    """What records an event on the calling thread's current stream of that CUDA device."""
    import torch

    return lambda: torch.cuda.current_stream(device).record_event()
