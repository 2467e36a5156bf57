"""What the parts of a world of engines see of each other, beside what those of any world do. Decides nothing."""

from __future__ import annotations

import collections.abc
import dataclasses
from typing import Any, Protocol

from kvxfer.engine.executor import Executor
from kvxfer.engine.request import Event, FailurePolicy, Request, Sequence
from kvxfer.engine.scheduler import SchedulerLimits
from kvxfer.testing.sim.engines.bug import EngineBug
from kvxfer.testing.sim.engines.engine_options import EngineOptions
from kvxfer.testing.sim.view import ProcessView, Slot, WorldView


@dataclasses.dataclass(frozen=True)
class Profile:
    """What kind of engine runs in a slot; all incarnations there are alike."""

    can_prefill: bool
    can_decode: bool
    step_ns: int
    """A step takes half as long to one and a half times as long."""
    limits: SchedulerLimits
    policy: FailurePolicy

    @property
    def step_max_ns(self) -> int:
        return self.step_ns * 3 // 2


class TicketView(Protocol):
    """Stands for the answer in the making; an executor's events come here."""

    sequence: Sequence | None

    def put(self, event: Event) -> None: ...


class EngineOwnerView(Protocol):
    """The engine of one process."""

    process: ProcessView
    profile: Profile
    executor: Executor
    hung_since: int
    was_disturbed: bool

    @property
    def is_hung(self) -> bool: ...
    def hang(self, until_ns: int) -> None: ...
    def arrive(self, request: Request, ticket: TicketView) -> None: ...
    def abort(self, sequence: Sequence) -> None: ...


class EngineWorldView(WorldView, Protocol):
    """The world of engines of one seed."""

    bug: EngineBug
    prompt_blocks: int
    chunk_tokens: int
    granted_ns: int
    prefillers: list[str]
    decoders: list[str]
    step_max_ns: int

    @property
    def options(self) -> EngineOptions: ...
    @property
    def report(self) -> Any: ...
    def owner(self, process: ProcessView) -> EngineOwnerView | None: ...
    def owners(self) -> collections.abc.Sequence[EngineOwnerView]: ...
    def restart(self, slot: Slot) -> None: ...
    def is_granted(self, process: ProcessView, id_: bytes) -> bool: ...
    def revoking(self, process: ProcessView, reason: str) -> None: ...
    def lanes(self, process: ProcessView) -> list[Any]: ...
