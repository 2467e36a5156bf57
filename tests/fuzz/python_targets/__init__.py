"""What `make fuzz` feeds to each Python decoder of foreign bytes: one that comes back is a value, else its one error.

A target says what must hold of a value too: it can be written again, passed on, looked up.
"""

from __future__ import annotations

from tests.fuzz.python_targets import control, http_requests, nixl, serving, sglang
from tests.fuzz.python_targets.samples import Target

TARGETS: dict[str, Target] = nixl.TARGETS | control.TARGETS | http_requests.TARGETS | serving.TARGETS | sglang.TARGETS
