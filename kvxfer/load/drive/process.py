"""One sending process, from its start to its end: decides how the system treats it, and nothing of what it sends."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import signal
import socket
from collections.abc import Callable

from kvxfer import open_files
from kvxfer.load.drive import control, priority
from kvxfer.load.drive.control import ControlLine
from kvxfer.load.drive.endpoint import LoadEndpoint
from kvxfer.load.drive.schedule import SharePlan
from kvxfer.load.drive.sender import Sender
from kvxfer.workload.request import WorkloadRequest

PR_SET_TIMERSLACK = 29
SLACK_NS = 1_000


def run_process(
    plan: SharePlan, body: Callable[[WorkloadRequest], bytes], endpoint: LoadEndpoint, sock: socket.socket
) -> None:
    """What a sending process runs. Ctrl-C and SIGTERM, which a shell sends to all processes of a command, are the
    command's to hear; this process is told over ``sock``, and ends when the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    line = ControlLine(sock)
    try:
        open_files.raise_limit()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)
        sender = Sender(plan, body, endpoint, line)
        gc.collect()  # now: of many planned requests it takes longer than there is between ready and the beginning
        gc.freeze()
        gc.disable()
        if sender.prepare():
            sender.run(priority.wake_soon())
    except Exception as error:  # the command says it; a traceback of this process says nothing to its user
        line.say(control.FAILED, f"{type(error).__name__}: {error}".replace("\n", " ").encode())
        line.flush()
    finally:
        line.close()
