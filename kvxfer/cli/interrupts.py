"""What Ctrl-C and SIGTERM mean to a command that ends with a report: the first asks for the end, a second one ends the
process at once. Decides nothing about what is still done after the first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class CommandInterrupts(contextlib.AbstractContextManager["CommandInterrupts"]):
    """While the block runs, in the main thread."""

    def __init__(self, *, on_forced: Callable[[], None] = lambda: None) -> None:
        """``on_forced`` is called before the process ends at once; it must not wait."""
        self.stop = threading.Event()
        """Set by the first signal."""
        self.exit_code = 0
        """130 after Ctrl-C, 143 after SIGTERM; 0: no signal came."""
        self._on_forced = on_forced
        self._before: dict[int, Any] = {}

    def __enter__(self) -> CommandInterrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.stop.is_set():
            with contextlib.suppress(Exception):
                self._on_forced()
            _say(b"kvxfer: interrupted twice, ending at once\n")
            os._exit(128 + number)
        self.exit_code = 128 + number
        self.stop.set()
        if number == signal.SIGINT:
            _say(b"\nkvxfer: stopping; what ran is reported (Ctrl-C again ends at once)\n")


def _say(line: bytes) -> None:
    """To stderr, past its buffer: a signal may come while that is written to."""
    with contextlib.suppress(OSError):
        os.write(2, line)
