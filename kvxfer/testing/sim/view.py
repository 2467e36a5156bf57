"""What the parts of a simulated world see of each other: the world, its processes, their connections and their owners.
Decides nothing. Every part imports this file and none of the other parts, so that none of them can be imported before
another.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, Protocol

from kvxfer.testing.sim.checkers import Checkers
from kvxfer.testing.sim.faults import FaultWeights, Kind, TransferPhase
from kvxfer.testing.sim.links import Half, Links, Sample, Unit
from kvxfer.testing.sim.region_reference import RegionReference
from kvxfer.testing.sim.report import SimReport
from kvxfer.testing.sim.tagged_memory import Cell, TaggedMemory
from kvxfer.testing.sim.virtual_clock import VirtualClock
from kvxfer.testing.sim.world_options import WorldOptions
from kvxfer.types import AgentRef


class EndView(Protocol):
    """One process's end of one connection."""

    is_open: bool
    half: Half
    mapped: dict[tuple[int, Any], TaggedMemory]

    @property
    def process(self) -> ProcessView: ...

    @property
    def peer(self) -> EndView: ...

    def mute(self, id_: bytes) -> None: ...

    def send(self, frame: Any) -> None: ...

    def send_data(self, effect: Any) -> None: ...

    def hang_up(self) -> None: ...

    def lost(self) -> None: ...


class RegionsView(Protocol):
    """The two registered regions of a process."""

    ids: list[int | None]
    free: set[int]

    def overwrite(self) -> None: ...

    def leave(self, area: int) -> int | None: ...


class ClientView(Protocol):
    """A process's connection to the coordinator."""

    def connect(self) -> None: ...

    def cut(self, ended: int | None) -> None: ...

    def died(self) -> None: ...


class ProcessView(Protocol):
    """One process run of one agent. ``ref`` and ``endpoint`` are None until it has its number."""

    world: WorldView
    slot: Slot
    life: int
    name: str
    clock: VirtualClock
    rng: random.Random
    machines: Any
    memory: TaggedMemory
    has_checks: bool
    ref: Any
    endpoint: Any
    owner: Any
    ends: dict[int, EndView]
    is_alive: bool
    is_paused: bool

    @property
    def registered(self) -> RegionsView: ...

    def run(self, act: Callable[..., None], *args: Any) -> None: ...

    def later(self, delay_ns: int, act: Callable[..., None], *args: Any) -> None: ...

    def afterwards(self, act: Callable[..., None], *args: Any) -> None: ...

    def resume(self) -> None: ...

    def boot(self, ref: Any) -> None: ...

    def perform(self, effects: list[Any]) -> None: ...

    def dial_failed(self, peer: Any, kind: Any, text: str) -> None: ...

    def landed(self, id_: bytes, cell: Cell, data: bytes, sample: Sample, *, is_checked: bool) -> None: ...

    def verdict_arrived(self, frame: Any, sender: ProcessView) -> None: ...

    def notify(self, to: ProcessView, payload: bytes) -> None: ...


@dataclasses.dataclass
class Slot:
    """A place in the cluster: one agent id, and the processes that run there one after the other."""

    name: str
    host: int
    blocks: int
    process: ProcessView | None = None
    client: ClientView | None = None
    control_blocked_until: int = 0


@dataclasses.dataclass
class Track:
    """A transfer that some side still holds something for."""

    id: bytes
    destination: ProcessView
    source: ProcessView
    is_pulled: bool = False
    is_granted: bool = False


@dataclasses.dataclass(frozen=True)
class DecodeOrder:
    """What the router asks of a destination: fetch positions ``first`` to ``count`` of a prompt from a source."""

    id: bytes
    source: ProcessView
    source_ref: Any
    first: int
    count: int
    lanes: tuple[Any, ...]
    deadline_ns: int
    content: bytes


class CoordinatorView(Protocol):
    """The coordinator, as its clients and faults see it."""

    is_up: bool

    @property
    def run(self) -> int: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def register(self, client: Any, run: int, attempt: int) -> None: ...

    def heartbeat(self, client: Any, stream: int, run: int) -> None: ...

    def ended(self, stream: int, run: int) -> None: ...


class ChaosView(Protocol):
    """The faults that strike in the middle of an act."""

    def corrupts(self) -> bool: ...

    def loses_memory(self) -> bool: ...

    def loses_session(self, end: EndView, id_: bytes) -> None: ...


class PosterView(Protocol):
    """The poster of reads and writes, which hears how they end."""

    def final(self, process: ProcessView, effect: Any) -> None: ...

    def drained(self, process: ProcessView, id_: bytes) -> None: ...

    def offer_ended(self, process: ProcessView, effect: Any) -> None: ...

    def fetching_from(self, life: int, region: int) -> list[bytes]: ...


class WorldView(Protocol):
    """The world of one seed."""

    rng: random.Random
    clock: VirtualClock
    checkers: Checkers
    reference: RegionReference
    links: Links
    weights: FaultWeights
    machines: Any
    limits: Any
    control_kind: Any
    grant_life_max_ns: int
    is_calm: bool
    slots: dict[str, Slot]
    open: dict[bytes, Track]
    tracks: dict[bytes, Track]
    connections: list[tuple[EndView, EndView]]

    @property
    def options(self) -> WorldOptions: ...

    @property
    def report(self) -> SimReport: ...

    @property
    def coordinator(self) -> CoordinatorView: ...

    @property
    def chaos(self) -> ChaosView: ...

    @property
    def poster(self) -> PosterView: ...

    def log(self, text: str) -> None: ...

    # --- processes ---

    def start(self, slot: Slot) -> None: ...

    def booted(self, process: ProcessView) -> None: ...

    def kill(self, slot: Slot) -> None: ...

    def living(self) -> list[ProcessView]: ...

    def native(self, ref: AgentRef, process: ProcessView | None = None) -> Any: ...

    def public_ref(self, process: ProcessView) -> AgentRef: ...

    def life_of(self, native: Any) -> int: ...

    def is_control_blocked(self, name: str) -> bool: ...

    # --- connections ---

    def dial(self, process: ProcessView, peer: Any, kind: Any) -> None: ...

    def cut(self, connection: tuple[EndView, EndView]) -> None: ...

    def unit(self, end: EndView, frame: Any) -> Unit: ...

    # --- transfers ---

    def slowness(self, id_: bytes) -> int: ...

    def slow_down(self, id_: bytes, factor: int) -> None: ...

    def read_began(self, id_: bytes) -> None: ...

    def between(self, one: str, other: str) -> list[Track]: ...

    def touching(self, name: str) -> list[Track]: ...

    def phase(self, track: Track) -> TransferPhase | None: ...

    def strike(self, kind: Kind, tracks: list[Track]) -> None: ...

    def pulled(self, process: ProcessView, order: DecodeOrder) -> None: ...

    def not_pulled(self, id_: bytes) -> None: ...

    def fetched(self, process: ProcessView, id_: bytes, source: ProcessView) -> None: ...

    def pull_over(self, id_: bytes) -> None: ...

    def finished(self, process: ProcessView, order: DecodeOrder, effect: Any) -> None: ...

    def granted(self, process: ProcessView, id_: bytes) -> None: ...

    def grant_over(self, process: ProcessView, id_: bytes, state: str) -> None: ...

    def corruption_landed(self, id_: bytes) -> None: ...

    def memory_lost(self, id_: bytes) -> None: ...

    def is_gone(self, id_: bytes, *, is_one_sided: bool = True) -> bool: ...
