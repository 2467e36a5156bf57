"""Threads that a service leaves behind when it is told to stop: what they do cannot be ended, and is of no more use.

The interpreter's orderly end would tear such a thread down in the middle of native code, so a process that has one ends
without that.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Final

ABANDONABLE: Final = "kvxfer-abandonable"
"""The name of such a thread, which is a daemon."""


def end_where_abandoned(code: int = 0) -> None:
    """End the process with ``code`` at once where such a thread still runs; otherwise return."""
    if any(thread.name == ABANDONABLE and thread.is_alive() for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
