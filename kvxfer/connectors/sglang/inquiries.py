"""Questions to other hosts that may take long, asked on separate threads. Decides how many run at once, and how often
one is repeated; must never know the question, nor wait on the thread that calls it.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger("kvxfer.sglang")

Answer = TypeVar("Answer")

THREADS_MAX = 16
"""How many hosts are asked at once; further questions wait. A thread ends when no question is left."""
AGAIN_S = 0.5
"""How often a host is asked at most."""
STALE_S = 5.0
"""An answer that was not wanted for so long is not asked for, and not kept."""


@dataclasses.dataclass(eq=False)
class _Inquiry(Generic[Answer]):
    wanted_s: float
    began_s: float
    answer: Answer | None = None
    is_answered: bool = False
    is_due: bool = True
    """Whether it waits for its turn, or is being asked."""


class Inquiries(Generic[Answer]):
    """One question to many addresses. From any thread; returns at once."""

    def __init__(self, ask: Callable[[str], Answer]) -> None:
        """``ask(address)`` may take long. If it raises, that is logged, and the address is asked again when its answer
        is wanted again."""
        self._ask = ask
        self._lock = threading.Lock()
        self._asked: dict[str, _Inquiry[Answer]] = {}
        self._waiting: collections.deque[str] = collections.deque()
        self._threads = 0

    def __repr__(self) -> str:
        return f"<Inquiries: {len(self._asked)} addresses, {self._threads} threads>"

    def take(self, address: str) -> Answer | None:
        """The answer, once; ``None``: there is none yet, and the address is asked."""
        now_s = time.monotonic()
        with self._lock:
            self._forget(now_s)
            asked = self._asked.get(address)
            if asked is not None:
                asked.wanted_s = now_s
                if asked.is_answered:
                    asked.is_answered, answer, asked.answer = False, asked.answer, None
                    return answer
                if asked.is_due or now_s - asked.began_s < AGAIN_S:
                    return None
            self._asked[address] = _Inquiry(now_s, now_s)
            self._waiting.append(address)
            if self._threads < THREADS_MAX:
                self._threads += 1
                threading.Thread(target=self._work, name="kvxfer inquiry", daemon=True).start()
        return None

    def look(self, address: str) -> Answer | None:
        """The answer that :meth:`take` would give."""
        with self._lock:
            asked = self._asked.get(address)
            return None if asked is None else asked.answer

    def _forget(self, now_s: float) -> None:
        stale = [at for at, asked in self._asked.items() if not asked.is_due and now_s - asked.wanted_s >= STALE_S]
        for address in stale:
            del self._asked[address]

    def _next(self) -> tuple[str, _Inquiry[Answer]] | None:
        """The addresses to ask now."""
        with self._lock:
            while self._waiting:
                address = self._waiting.popleft()
                asked, now_s = self._asked[address], time.monotonic()
                if now_s - asked.wanted_s < STALE_S:
                    asked.began_s = now_s
                    return address, asked
                del self._asked[address]
            self._threads -= 1
            return None

    def _work(self) -> None:
        while (found := self._next()) is not None:
            address, asked = found
            try:
                answer = self._ask(address)
            except Exception:
                log.exception("%s could not be asked", address)
                answer = None
            with self._lock:
                asked.answer, asked.is_answered, asked.is_due = answer, answer is not None, False
