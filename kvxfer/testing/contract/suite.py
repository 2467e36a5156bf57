"""What every lane must do, as plain functions: give each of :data:`CHECKS` a maker of your lane and let it raise.

It decides what a lane may never do (a wrong byte, a byte outside a reservation, a second final state, a commit that
the source did not confirm, a block that is not given back) and must never know how a lane is made::

for check in CHECKS: maker = MyLaneMaker() try: check(maker) finally: maker.close()

Like trio's ``check_one_way_stream``: a lane that fails here is a bug, a fake that fails here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvxfer.testing.contract.byte_checks import BYTE_CHECKS
from kvxfer.testing.contract.ending_checks import ENDING_CHECKS
from kvxfer.testing.contract.grant_checks import GRANT_CHECKS
from kvxfer.testing.contract.parties import LaneMaker
from kvxfer.testing.contract.post_checks import POST_CHECKS
from kvxfer.testing.contract.post_ending_checks import POST_ENDING_CHECKS
from kvxfer.testing.contract.promise_checks import PROMISE_CHECKS
from kvxfer.testing.contract.waiting_checks import WAITING_CHECKS

CHECKS: tuple[Callable[[LaneMaker], None], ...] = (
    *BYTE_CHECKS,
    *GRANT_CHECKS,
    *ENDING_CHECKS,
    *PROMISE_CHECKS,
    *WAITING_CHECKS,
    *POST_CHECKS,
    *POST_ENDING_CHECKS,
)
"""Every check."""

BY_NAME: Mapping[str, Callable[[LaneMaker], None]] = {check.__name__: check for check in CHECKS}
