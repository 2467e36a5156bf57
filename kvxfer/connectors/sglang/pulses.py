"""Heartbeats of one rank's engine, as its agent passes them on to waiting readers. Decides when a silent engine is
nevertheless alive: it is paused, or its scheduler handles a control request; must never know SGLang.

A paused engine takes no step, and SGLang's front keeps new prompts to itself until the pause is over. So readers go on
waiting, as long as their own limits allow, and a prompt that the engine does not know yet counts as unknown no sooner
than ``unknown_wait_s`` after the pause.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from kvxfer.agent import Agent
from kvxfer.errors import KvxferError

log = logging.getLogger("kvxfer.sglang")

PULSE_S = 0.05
CALL_S = 0.5
"""A control request that takes longer is a pause. Most take milliseconds, and clients may send them at any rate."""


class Pulses:
    """Of one rank. From any thread."""

    def __init__(self, agent: Agent, unknown_wait_s: float) -> None:
        self._agent = agent
        self._unknown_wait_s = unknown_wait_s
        self._lock = threading.Lock()
        self._sent: tuple[float, bool] = (0.0, False)
        self._call_s: float | None = None
        self._is_paused = False
        self._took_in_from_s = 0.0

    @property
    def is_paused(self) -> bool:
        """Whether readers are told so."""
        return self._is_paused

    def step(self, has_work: bool) -> None:
        """The engine's loop is about to step or, with ``has_work=False``, is idle. At most one call in PULSE_S counts.
        During a pause none does."""
        with self._lock:
            now_s = time.monotonic()
            if not self._is_paused:
                self._send(has_work, now_s, took_in=now_s >= self._took_in_from_s)

    def come_round(self, *, is_paused: bool, has_work: bool) -> None:
        """The engine's loop comes round: in a pause, or not (any more). ``has_work``: what is true without a pause."""
        with self._lock:
            now_s = time.monotonic()
            if is_paused:
                self._pause(now_s)
            elif self._is_paused:
                log.info("the engine continues")
                self._is_paused = False
                self._took_in_from_s = now_s + self._unknown_wait_s
                self._send(has_work, now_s, took_in=False, is_forced=True)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """The engine's loop handles a control request, such as a change of its weights. If that takes longer than
        CALL_S, it counts as a pause until the loop comes round."""
        self._call_s = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._call_s = None

    def sweep(self, now_s: float) -> None:
        """Several times a second, from another thread than the engine's."""
        with self._lock:
            if self._call_s is not None and now_s >= self._call_s + CALL_S:
                self._pause(now_s)

    def _pause(self, now_s: float) -> None:
        if not self._is_paused:
            log.info("the engine is paused: decode engines go on waiting for its prompts")
            self._is_paused = True
        self._send(True, now_s, took_in=False)

    def _send(self, has_work: bool, now_s: float, *, took_in: bool, is_forced: bool = False) -> None:
        at_s, had_work = self._sent
        if has_work == had_work and now_s - at_s < PULSE_S and not is_forced:
            return
        self._sent = (now_s, has_work)
        with contextlib.suppress(KvxferError):
            self._agent.pulse(has_work=has_work, took_in=took_in)
