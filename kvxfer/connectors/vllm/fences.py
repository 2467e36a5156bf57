"""Acts that must wait for a device. What vLLM's forward thread asks of a GPU is done later, in order: an act that
relies on it (announcing what a forward wrote, filling what a forward may still use) waits for an event behind it.

Decides when an act may happen; must never know what it does. Nobody is blocked: events are asked now and then, on the
agent's loop.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

log = logging.getLogger("kvxfer.vllm")

POLL_S = 0.0005
"""How often the oldest event is asked."""

Act: TypeAlias = Callable[[], None]


class Fence(Protocol):
    """A point in a device's work, such as a recorded ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether everything before it is done. Raises what the device failed with."""


class Fences:
    """``record`` sets a fence behind all work of the calling thread; ``post`` calls on the agent's loop."""

    def __init__(self, record: Callable[[], Fence], post: Callable[..., None]) -> None:
        self._record = record
        self._post = post
        self._waiting: collections.deque[tuple[Fence, Act]] = collections.deque()
        self._has_failed = False

    def after(self, act: Act) -> None:
        """Call ``act`` on the loop once the device has done what the calling thread asked of it until now. Acts come in
        the order of the calls; none comes any more after the device failed."""
        self._post(self._add, self._record(), act)

    def _add(self, fence: Fence, act: Act) -> None:
        if self._has_failed:
            return
        self._waiting.append((fence, act))
        if len(self._waiting) == 1:
            self._look()

    def _look(self) -> None:
        try:
            while self._waiting and self._is_passed(self._waiting[0][0]):
                _, act = self._waiting.popleft()
                act()
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_later(POLL_S, self._look)

    def _is_passed(self, fence: Fence) -> bool:
        try:
            return fence.query()
        except Exception:
            log.exception("the device failed: nothing that was computed since is given to anybody")
            self._has_failed = True
            self._waiting.clear()
            return False


def at_once(act: Act) -> None:
    """``after`` for memory of the host: what was asked of it is done."""
    act()


def cuda_events(device: int) -> Callable[[], Fence]:
    """What records an event on the calling thread's current stream of that CUDA device."""
    import torch

    return lambda: torch.cuda.current_stream(device).record_event()
