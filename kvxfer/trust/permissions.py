"""Which caller may make which call of the coordinator: least privilege, as a table.

Decides from the caller's identity, the call and its subject. Pure; it must never know how a caller proved its identity.
A row or a call that is not listed is forbidden. docs/security.md shows the table; a test walks it over real gRPC.
"""

from __future__ import annotations

import dataclasses
import enum

from kvxfer.errors import ForbiddenError
from kvxfer.trust.identity import CertIdentity, CertRole
from kvxfer.types import Role


class ControlCall(enum.StrEnum):
    """What can be asked of the coordinator, beside its health."""

    REGISTER = "register"
    """Open an agent's session: join, hear of the others, get the keys of one's own pairs."""
    WATCH = "watch"
    """Follow the membership, without keys."""
    DRAIN = "drain"
    """Have an agent take no new work."""
    ACQUAINT = "acquaint"
    """From another coordinator: have agents be told of others that look for them."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """The agent that a call is about. ``role`` and ``has_http`` are those that an agent registers with."""

    agent_id: str = ""
    role: Role = Role.BOTH
    has_http: bool = False


NO_SUBJECT = Subject()

CALLS: dict[CertRole, frozenset[ControlCall]] = {
    CertRole.COORDINATOR: frozenset({ControlCall.WATCH, ControlCall.ACQUAINT}),
    CertRole.PREFILL: frozenset({ControlCall.REGISTER}),
    CertRole.DECODE: frozenset({ControlCall.REGISTER}),
    CertRole.WORKER: frozenset({ControlCall.REGISTER}),
    CertRole.ROUTER: frozenset({ControlCall.WATCH, ControlCall.DRAIN}),
    CertRole.TIER: frozenset({ControlCall.REGISTER}),
    CertRole.OPERATOR: frozenset({ControlCall.WATCH, ControlCall.DRAIN}),
    CertRole.METRICS: frozenset(),
}
SERVES: dict[CertRole, frozenset[Role]] = {
    CertRole.PREFILL: frozenset({Role.PREFILL}),
    CertRole.DECODE: frozenset({Role.DECODE}),
    CertRole.WORKER: frozenset(Role),
    CertRole.TIER: frozenset(),
}
"""As what an agent may register that serves HTTP, and so is given requests."""
JOINS: dict[CertRole, frozenset[Role]] = {
    CertRole.PREFILL: frozenset({Role.PREFILL, Role.BOTH}),
    CertRole.DECODE: frozenset({Role.DECODE, Role.BOTH}),
    CertRole.WORKER: frozenset(Role),
    CertRole.TIER: frozenset({Role.BOTH}),
}
"""The same of an agent without HTTP, which is given none: a rank, or a helper of role both."""


def check(caller: CertIdentity | None, call: ControlCall, subject: Subject = NO_SUBJECT) -> None:
    """Return if ``caller`` may make ``call`` about ``subject``. Raises ForbiddenError, which says what is missing.

    ``None`` is a caller that showed the cluster token and no certificate: it may do everything.
    """
    if caller is None:
        return
    if call not in CALLS[caller.role]:
        raise ForbiddenError(f"{caller} may not {call}: that is not for the role {caller.role}")
    if call is not ControlCall.REGISTER:
        return
    if not caller.speaks_for(subject.agent_id):
        raise ForbiddenError(
            f"{caller} may not register as {subject.agent_id}: only as {caller.name}, or {caller.name}. and more"
        )
    allowed = (SERVES if subject.has_http else JOINS)[caller.role]
    if subject.role not in allowed:
        what = "with an http_url" if subject.has_http else "without an http_url"
        roles = ", ".join(sorted(allowed)) or "none"
        raise ForbiddenError(f"{caller} may not register {what} for the part {subject.role}: its parts are {roles}")


class HttpPart(enum.StrEnum):
    """What can be asked of a worker over HTTP."""

    LEG = "leg"
    """Everything that is not below: inference, models, prompts that are held for others."""
    LOOK = "look"
    """``/statistics``, and what is below ``/debug/``."""
    METRICS = "metrics"
    PROBE = "probe"
    """``/live``, ``/ready``, ``/health``."""


PARTS: dict[str, HttpPart] = {
    "/statistics": HttpPart.LOOK,
    "/debug": HttpPart.LOOK,
    "/metrics": HttpPart.METRICS,
    "/live": HttpPart.PROBE,
    "/ready": HttpPart.PROBE,
    "/health": HttpPart.PROBE,
}
WORKER_HTTP: dict[CertRole, frozenset[HttpPart]] = {
    CertRole.ROUTER: frozenset(HttpPart),
    CertRole.OPERATOR: frozenset({HttpPart.LOOK, HttpPart.METRICS, HttpPart.PROBE}),
    CertRole.METRICS: frozenset({HttpPart.METRICS, HttpPart.PROBE}),
}
KEYLESS = frozenset({HttpPart.METRICS, HttpPart.PROBE})
"""What a worker without certificates shows to every caller, also where it takes legs with a key only."""


def part_of(path: str) -> HttpPart:
    """Which part of a worker's HTTP ``path`` (percent-decoded) belongs to."""
    if path.startswith("/debug/"):
        return HttpPart.LOOK
    return PARTS.get(path, HttpPart.LEG)


def check_http(caller: CertIdentity, part: HttpPart) -> None:
    """Return if ``caller`` may ask a worker for ``part``. Raises ForbiddenError."""
    if part not in WORKER_HTTP.get(caller.role, frozenset()):
        raise ForbiddenError(f"{caller} may not ask for {part} here: that is not for the role {caller.role}")


def sends_legs(caller: CertIdentity | None) -> bool:
    """Whether a watcher is given what the keys of legs are derived from; ``caller`` as :func:`check`'s."""
    return caller is None or caller.role is CertRole.ROUTER
