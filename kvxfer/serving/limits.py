"""What clients may cost one HTTP server: connections, bytes of unread requests, and time. Checked once, here.

The bound of connections follows from the descriptors that the process may open: whatever a client does, there are
descriptors left for what the process itself needs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvxfer import open_files
from kvxfer.config import check_positive
from kvxfer.errors import ConfigError
from kvxfer.openai.transfer_params import BODY_BYTES_MAX

CONNECTIONS_MAX = 8192
"""Most connections of a server that was not told otherwise; each costs about 30 KB."""
CONNECTIONS_MIN = 4
SPARE_DESCRIPTORS = 8
"""Left for what opens a file for a moment: reading /proc, a certificate, a name lookup."""
BODY_STEP_BYTES = 4096


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """What the options of the router and of the workers have in common: every field is one flag. Raises ConfigError
    for a bad value.
    """

    max_connections: int = _option(
        0, f"connections open at once; 0: as many as the open files limit has room for, up to {CONNECTIONS_MAX}"
    )
    header_timeout_s: float = _option(10.0, "longest time for a request's head to arrive")
    max_body_bytes: int = _option(BODY_BYTES_MAX, "longest request body")
    body_timeout_s: float = _option(120.0, "longest time for a request's body to arrive")
    body_stall_s: float = _option(5.0, f"longest time for the next {BODY_STEP_BYTES} bytes of a body, or its rest")
    body_budget_bytes: int = _option(
        256 << 20, "what all bodies that are still arriving may hold together; the oldest is refused for more"
    )
    probe_port: int | None = _option(None, "serve /live and /ready, and nothing else, on this port too, without TLS")
    metrics_port: int | None = _option(None, "serve /metrics, and nothing else, on this port too, without TLS")

    def __post_init__(self) -> None:
        for name in ("body_timeout_s", "body_stall_s", "header_timeout_s"):
            check_positive(name, getattr(self, name), maximum=86400.0)
        check_positive("max_body_bytes", self.max_body_bytes, maximum=1 << 30)
        check_positive("body_budget_bytes", self.body_budget_bytes, maximum=1 << 40)
        if self.body_budget_bytes < self.max_body_bytes:
            raise ConfigError(
                f"body_budget_bytes {self.body_budget_bytes} must not be below max_body_bytes {self.max_body_bytes}"
            )
        for name in ("probe_port", "metrics_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 65536:
                raise ConfigError(f"{name} must be 0 to 65535, not {value}")
        if not 0 <= self.max_connections <= 1 << 20:
            raise ConfigError(f"max_connections must be 1 to {1 << 20}, or 0, not {self.max_connections}")


@dataclasses.dataclass(frozen=True)
class Sockets:
    """How the descriptors of one process are shared out."""

    connections: int
    """That clients may have open at once."""
    legs: int
    """That the process itself may open towards others, for clients."""


def share_descriptors(wanted: int, *, legs_each: int, legs_max: int, limit: int, used: int) -> Sockets:
    """Share out the ``limit - used`` descriptors that are left.

    Each connection of a client may need ``legs_each`` more descriptors, all together at most ``legs_max``. ``wanted``
    connections, or with 0 as many as there is room for. Raises ConfigError where that is too much, or where there is
    no room for CONNECTIONS_MIN: it names the limit to raise.
    """
    free = limit - used - SPARE_DESCRIPTORS
    needed = wanted or CONNECTIONS_MIN
    legs_needed = min(legs_max, legs_each * needed)
    if free < needed + legs_needed:
        what = f"max_connections {wanted}" if wanted else f"the fewest connections that make sense, {needed},"
        raise ConfigError(
            f"{what} and {used} descriptors that are open already need a limit of "
            f"{needed + legs_needed + used + SPARE_DESCRIPTORS} open files, and it is {limit}: raise it (ulimit -n)"
        )
    if wanted:
        return Sockets(wanted, legs_needed)
    legs = min(legs_max, free * legs_each // (1 + legs_each))
    return Sockets(min(CONNECTIONS_MAX, free - legs), legs)


def share_now(wanted: int, *, legs_each: int, legs_max: int) -> Sockets:
    """:func:`share_descriptors` for this process as it is now."""
    return share_descriptors(
        wanted, legs_each=legs_each, legs_max=legs_max, limit=open_files.limit(), used=open_files.count()
    )
