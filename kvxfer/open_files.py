"""How many file descriptors this process may have open. Decides nothing about which part gets them."""

from __future__ import annotations

import contextlib
import os
import resource

UNLIMITED = 1 << 20
"""Stands for a limit that the system does not give."""


def limit() -> int:
    """The soft limit: the descriptor of this number cannot be opened any more."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> int:
    """Raise the soft limit to the hard one, which needs no privilege; returns what it is then.

    Shells give 1024 for the sake of programs that call select(2); nothing of ours does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = UNLIMITED if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # forbidden here: go on with what there is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def count() -> int:
    """How many are open now; an estimate where the system does not say (no /proc)."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # the listing's own
    except OSError:
        return 32
