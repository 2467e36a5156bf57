"""What the kernel that tests run on can do; must never ask the code that is tested."""

from __future__ import annotations

import os
import re


def has_zero_copy_on_unix() -> bool:
    """Whether pages spliced into a Unix socket stay their owner's: from Linux 6.5 on (MSG_SPLICE_PAGES)."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return release is not None and tuple(map(int, release.groups())) >= (6, 5)
