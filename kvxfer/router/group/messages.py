"""What the leader tells the processes that serve, and what they tell it. Values only; `plain` writes them.

Leader to member, by its first word: ``hello`` (:class:`MemberStart`), ``update`` (:class:`Update`), ``keys``
(:class:`KeysTold`), ``measure``, ``answer`` (of a control route), ``stop``. Member to leader: ``keys`` (it wants them),
``serving``, ``applied`` and ``keys_applied`` (a version), ``samples`` (with its history), ``ask``, and the reports:
``failed``, ``succeeded``, ``trial``, ``pair_started``, ``pair_succeeded``, ``pair_failed``.
"""

from __future__ import annotations

import dataclasses

from kvxfer.policy.health import HealthAccount
from kvxfer.router.fleet.facts import EngineIdentity, EngineLoad
from kvxfer.router.fleet.worker import Worker
from kvxfer.router.keyfile import KeyEntry
from kvxfer.router.options import RouterOptions
from kvxfer.types import AgentRef

NO_SEAT = -1


@dataclasses.dataclass(frozen=True)
class MemberStart:
    """The first message: what a member needs before it serves."""

    options: RouterOptions
    processes: int
    """That serve. The leader is one more."""


@dataclasses.dataclass(frozen=True)
class WorkerAccount:
    """One worker, as the leader knows it."""

    given: Worker
    identity: EngineIdentity | None
    said: EngineLoad | None
    is_drained: bool
    trouble: str
    health: HealthAccount
    worked_s: float | None = None
    """`WorkerEntry.worked_s`: by a clock that all processes have."""
    seat: int = NO_SEAT
    """Where its load is in the shared memory."""


@dataclasses.dataclass(frozen=True)
class ClosedPair:
    """A pair that is ejected, or (with a due time of 0) one that failed and is not ejected."""

    prefill: AgentRef
    decode: AgentRef
    due_s: float = 0.0
    delay_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Update:
    """What is new since the version before; the first that a member gets has everything. ``unseated`` are workers of
    which no process counts anything any more."""

    version: int
    is_connected: bool | None
    workers: tuple[WorkerAccount, ...] = ()
    gone: tuple[AgentRef, ...] = ()
    unseated: tuple[AgentRef, ...] = ()
    pairs: tuple[ClosedPair, ...] | None = None
    """All of them; None where nothing is new."""


@dataclasses.dataclass(frozen=True)
class LimitLevel:
    """How full the leader's bucket was at a time, when all processes together had ever used ``seen`` millionths."""

    level: float
    at_s: float
    seen: int


@dataclasses.dataclass(frozen=True)
class KeyAccount:
    """One holder of API keys, as the leader knows it."""

    entry: KeyEntry
    """Without its models."""
    models: int
    """Which of the lists of models; below 0: all models."""
    seat: int = NO_SEAT
    """Where its use is in the shared memory."""
    requests: LimitLevel | None = None
    """None: no bound."""
    tokens: LimitLevel | None = None


@dataclasses.dataclass(frozen=True)
class KeysTold:
    """All holders."""

    version: int
    models: tuple[frozenset[str], ...]
    """Each list once, as many holders may have the same long one."""
    holders: tuple[KeyAccount, ...]
