"""What a process holds, before and after many rounds of something: nothing may be left of them."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tests.support.faults.parties import Party, resources

COUNTED = ("descriptors", "sockets", "mappings", "threads")
MARGINS = {"mappings": 10}
MARGIN = 2
"""Of what comes and goes by itself (a timer of UCX, an allocator's arenas)."""
QUIET_S = 0.6
"""More than a connection takes to be hung up on by both sides (0.5 s)."""
RSS_MARGIN_KIB = 3 << 10
"""Of an allocator: a thousand rounds that leak 3 KiB each leave more."""
GAUGES = ("connections", "sessions_tcp", "sessions_unix", "sessions_tls")


class Rounds(Protocol):
    """``outcomes``: how often what was begun ended how."""

    outcomes: dict[str, int]

    def parties(self) -> Sequence[Party]:
        """Those of this process, as they are now."""

    def round(self, number: int) -> None: ...

    def settle(self) -> None:
        """Nothing is under way, and what was written down for the test is forgotten."""


def held() -> dict[str, int]:
    """What this process holds once what is closing has closed: nothing of it changes any more."""
    last, since_s = resources(), time.monotonic()
    end_s = since_s + 10.0
    while time.monotonic() < min(since_s + QUIET_S, end_s):
        gc.collect()  # more than once: it does nothing while another thread is at it
        time.sleep(0.05)
        now = resources()
        if any(now[name] != last[name] for name in COUNTED):
            since_s = time.monotonic()
        last = now
    return last


def descriptors() -> collections.Counter[str]:
    """How many are open of each kind."""
    kinds: collections.Counter[str] = collections.Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the directory
            kinds[re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{number}"))] += 1
    return kinds


def expect_no_more(before: Mapping[str, int], after: Mapping[str, int], what: object = "") -> None:
    for name in COUNTED:
        assert after[name] <= before[name] + MARGINS.get(name, MARGIN), (name, before, after, what)
    assert after["rss_kib"] <= before["rss_kib"] + RSS_MARGIN_KIB, (before, after)


def check_rounds(made: Rounds, rounds: int, warm_up: int, record_property: Any) -> None:
    """Play ``rounds`` of them after some to warm up; nothing is held afterwards that was not before."""
    for number in range(warm_up):
        made.round(number)
    made.settle()
    before, open_before, threads = held(), descriptors(), threading.active_count()
    gauges = [{name: party.statistics()[name] for name in GAUGES} for party in made.parties()]
    for number in range(rounds):
        made.round(number)
    made.settle()
    after = held()
    record_property("before", before)
    record_property("after", after)
    print(f"before {before} after {after} outcomes {made.outcomes}")
    expect_no_more(before, after, descriptors() - open_before)
    assert threading.active_count() <= threads + MARGIN
    for party, most in zip(made.parties(), gauges, strict=True):
        found = party.statistics()
        assert all(found[name] <= most[name] for name in GAUGES), (most, found)
        assert [pool.quarantined for pool in party.transport.counts().pools] == [0]
