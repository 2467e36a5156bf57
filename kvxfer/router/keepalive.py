"""Keep-alives towards a client whose stream is silent, so that no proxy between takes the connection for dead.

Decides when one is due; what it looks like is the answer's. It must never know workers or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

LOOKS = 4
"""Looks at the progress in the longest silence. A chunk of a stream sets no timer of its own."""


@contextlib.contextmanager
def keeping_alive(every_s: float, progress: Callable[[], int], send: Callable[[], None]) -> Iterator[None]:
    """Within the block ``send`` is called where ``progress`` has not changed, so often that there is no silence longer
    than ``every_s``: after three to four quarters of it."""
    loop = asyncio.get_running_loop()
    seen, quiet = progress(), 0
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal seen, quiet, timer
        now = progress()
        quiet = quiet + 1 if now == seen else 0
        seen = now
        if quiet == LOOKS - 1:
            quiet = 0
            send()
        timer = loop.call_later(every_s / LOOKS, look)

    timer = loop.call_later(every_s / LOOKS, look)
    try:
        yield
    finally:
        timer.cancel()
