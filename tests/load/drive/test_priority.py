"""A sending process runs before others where the system allows it, and says what it got."""

from __future__ import annotations

import subprocess
import sys

from kvxfer.load.drive.priority import ORDINARY, REALTIME

CODE = """
import os
from kvxfer.load.drive import priority

before = os.sched_getscheduler(0)
can = priority.can_be_realtime()
assert os.sched_getscheduler(0) == before
got = priority.wake_soon()
assert can == (got == priority.REALTIME)
assert (os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR) == can
child = os.fork()
if not child:
    os._exit(int(os.sched_getscheduler(0) == os.SCHED_RR))
assert os.waitpid(child, 0)[1] == 0, "what it starts is ordinary"
print(got)
"""


def test_what_the_system_allows_is_asked_and_told() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (REALTIME, ORDINARY)
