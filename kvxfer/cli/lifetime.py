"""When a service process ends: SIGINT, SIGTERM, or the death of the process that started it.

Decides nothing about what a service does while stopping; it sets one event, and forces the end on a second signal.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import sys
import threading
import time

from kvxfer.errors import ConfigError

PARENT_GRACE_S = 15.0
"""An orphan that did not stop by itself within this time is ended hard."""
_PR_SET_PDEATHSIG = 1


def stop_on_signals(stop: asyncio.Event, *, is_forced_by_sigterm: bool = False) -> None:
    """Set ``stop`` on SIGINT and SIGTERM; a second SIGINT ends the process at once with code 130. Call on the loop.

    ``is_forced_by_sigterm``: a second SIGTERM does the same with code 143. That is for services that may take long to
    stop; of others a supervisor's second SIGTERM means no more than the first.
    """
    loop = asyncio.get_running_loop()

    def stopped(number: signal.Signals) -> None:
        if stop.is_set() and (number is signal.SIGINT or is_forced_by_sigterm):
            what = "interrupted" if number is signal.SIGINT else "told to stop"
            print(f"kvxfer: {what} twice, ending at once", file=sys.stderr, flush=True)
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped, number)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM when the parent dies; raise ConfigError where ``parent_pid`` is not the parent.

    To be called before the service loads anything: SIGTERM's default action ends a process that is not ready yet.
    """
    _have_sent(signal.SIGTERM)
    if os.getppid() != parent_pid:
        raise ConfigError(f"process {parent_pid}, with which this one should live, is not its parent or is gone")


def watch_parent(parent_pid: int, stop: asyncio.Event) -> None:
    """Set ``stop`` when the parent is gone, and end the process if it is still there ``PARENT_GRACE_S`` later.

    The kernel sends nothing from then on: a parent with threads that is killed would be reported once for each of them,
    and a second SIGTERM would force the end.
    """
    _have_sent(0)
    loop = asyncio.get_running_loop()

    def wait() -> None:
        _wait_gone(parent_pid)
        loop.call_soon_threadsafe(stop.set)
        time.sleep(PARENT_GRACE_S)
        os._exit(1)

    threading.Thread(target=wait, name="kvxfer-parent", daemon=True).start()


def _have_sent(number: int) -> None:
    """Of a parent's death."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _wait_gone(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:
        while os.getppid() == pid:
            time.sleep(1.0)
        return
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while os.getppid() == pid and not poller.poll(60_000):
            pass
    finally:
        os.close(descriptor)
