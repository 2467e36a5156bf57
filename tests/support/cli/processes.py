"""Whether processes that a command started are still there."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterable


def is_running(pid: int) -> bool:
    """It is there and no zombie."""
    try:
        return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pids: Iterable[int], timeout_s: float = 30.0) -> None:
    """Raises AssertionError where one is still there after that."""
    deadline_s = time.monotonic() + timeout_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline_s, f"still there: {left}"
        time.sleep(0.02)
