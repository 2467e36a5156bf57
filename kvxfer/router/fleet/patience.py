"""How long a silent stream of a worker is waited for: asks `policy.silence`, and has the worker probed meanwhile.

Decides nothing of its own. It must never know what the stream carries.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvxfer.policy.silence import is_dead_silence, is_to_be_asked, look_again_s
from kvxfer.router.fleet.entry import WorkerClaim
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.upstream import Patience


def patience(
    workers: Workers, claim: WorkerClaim, limit_s: float, now: Callable[[], float] = time.monotonic
) -> Patience:
    """Of one stream at the worker of ``claim``, which is held as long as the stream runs."""

    def more_s(silent_s: float) -> float:
        now_s, signs = now(), workers.signs(claim.ref)
        if silent_s >= limit_s and is_dead_silence(signs, now_s=now_s, limit_s=limit_s):
            return 0.0
        if is_to_be_asked(signs, now_s=now_s, limit_s=limit_s):
            claim.failed("silent")
        return look_again_s(limit_s)

    return more_s
