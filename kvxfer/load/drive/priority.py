"""How soon the system lets a sending process run when it wakes: a process that waits behind others sends late.

Decides what is asked of the kernel. A refusal changes nothing but the lateness, which every run tells.
"""

from __future__ import annotations

import os

REALTIME = "realtime"
ORDINARY = "ordinary"


def wake_soon() -> str:
    """Ask that this process runs as soon as it wakes; says what it is now: REALTIME or ORDINARY.

    Where the system allows it (root, or a limit RLIMIT_RTPRIO), the process gets the lowest real-time priority, before
    all ordinary ones. It sleeps most of the time, and Linux leaves ordinary processes 5 % of each second in any case.
    What it starts has no such priority.
    """
    try:
        least = os.sched_get_priority_min(os.SCHED_RR)
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(least))
    except (OSError, AttributeError):
        return ORDINARY
    return REALTIME


def can_be_realtime() -> bool:
    """Whether :func:`wake_soon` would be granted; the calling thread stays as it is."""
    try:
        policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
        is_granted = wake_soon() == REALTIME
        if is_granted:
            os.sched_setscheduler(0, policy, param)
    except (OSError, AttributeError):
        return False
    return is_granted
