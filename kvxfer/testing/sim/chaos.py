"""Carries faults out: decides the fate of each frame, and at times of its own strikes links, processes, the coordinator
and owners; must never act once the world is calm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from kvxfer.testing.sim.faults import TIMED_KINDS, Kind, TransferPhase
from kvxfer.testing.sim.links import FrameFate
from kvxfer.testing.sim.region_owner import IN, OUT
from kvxfer.testing.sim.view import EndView, Slot, WorldView
from kvxfer.testing.sim.virtual_clock import MS, S

_FRAME_FATES = (
    (Kind.DROP, FrameFate.DROPPED),
    (Kind.DUPLICATE, FrameFate.DOUBLED),
    (Kind.DELAY, FrameFate.LATE),
    (Kind.REORDER, FrameFate.OVERTAKEN),
)
MEMORY_GONE_RARELY = 8
"""A transfer that meets it never commits: it is rarer than faults that transfers survive."""
GONE_FOR_GOOD_RARELY = 2
"""Few transfers begin by a lane that reads and end by one that sends."""
_BY_FRAME = {"Verdict": Kind.LOST_VERDICT, "Renew": Kind.LOST_RENEWAL}


class Chaos:
    def __init__(self, world: WorldView) -> None:
        self._world, self._rng, self._clock = world, world.rng, world.clock
        self._fates = [(kind, fate, world.weights[kind]) for kind, fate in _FRAME_FATES if world.weights[kind]]

    def begin(self) -> None:
        for kind in TIMED_KINDS:
            if self._world.weights[kind]:
                self._next(kind)
        self._clock.call_after(self._rng.randrange(50 * MS, 600 * MS), self._notify)

    def fate(self, name: str) -> tuple[FrameFate, Kind | None]:
        """The fate of one frame of that name."""
        world = self._world
        if world.is_calm:
            return FrameFate.ARRIVES, None
        lost = _BY_FRAME.get(name)
        if lost is not None and self._rng.random() < world.weights[lost]:
            return FrameFate.DROPPED, lost
        for kind, fate, weight in self._fates:
            if self._rng.random() < weight:
                return fate, kind
        return FrameFate.ARRIVES, None

    def corrupts(self) -> bool:
        """Whether a payload that goes with checksums loses a bit on its way."""
        return not self._world.is_calm and self._rng.random() < self._world.weights[Kind.CORRUPTION]

    def loses_memory(self) -> bool:
        """Whether memory that a payload is taken from, or a read goes to, turns out to be unmapped."""
        return (
            not self._world.is_calm and self._rng.random() < self._world.weights[Kind.MEMORY_GONE] / MEMORY_GONE_RARELY
        )

    def loses_memory_for_good(self) -> bool:
        """Whether a one-sided read finds memory unmapped that no other lane will find either: then the lane that sends
        sends something else instead, the source's word of that is lost, and the session with it."""
        weight = self._world.weights[Kind.GONE_THEN_LOST] / GONE_FOR_GOOD_RARELY
        return not self._world.is_calm and self._rng.random() < weight

    def loses_session(self, end: EndView, id_: bytes) -> None:
        """The source's side ``end`` sends something else instead of the bytes of ``id_``."""
        end.mute(id_)
        self._clock.call_after(self._rng.randrange(1 * MS, 60 * MS), self._lose_session, end, id_)

    def _lose_session(self, end: EndView, id_: bytes) -> None:
        world = self._world
        if not world.is_calm and end.is_open:
            world.log(f"{end.process!r} has not got {id_.hex()[:6]} any more, and its session is lost")
            track = world.tracks.get(id_)
            if track is not None and world.phase(track) in (TransferPhase.READING, TransferPhase.CONFIRMING):
                world.strike(Kind.GONE_THEN_LOST, [track])
            world.cut((end, end.peer))

    def _next(self, kind: Kind) -> None:
        self._clock.call_after(int(self._rng.expovariate(self._world.weights[kind]) * S), self._strike, kind)

    def _strike(self, kind: Kind) -> None:
        if not self._world.is_calm:
            self._ACTS[kind](self, kind)
            self._next(kind)

    def _notify(self) -> None:
        """Not a fault: two agents exchange a word beside the transfers."""
        world, rng = self._world, self._rng
        if world.is_calm:
            return
        living = [process for process in world.living() if process.endpoint is not None]
        if len(living) >= 2:
            one, other = rng.sample(living, 2)
            one.run(one.notify, other, rng.randbytes(8))
        self._clock.call_after(rng.randrange(50 * MS, 600 * MS), self._notify)

    # --- acts ---

    def _slot(self, prefix: str) -> Slot:
        return self._rng.choice([slot for slot in self._world.slots.values() if slot.name.startswith(prefix)])

    def _cut(self, kind: Kind) -> None:
        world = self._world
        world.connections[:] = [pair for pair in world.connections if pair[0].is_open and pair[1].is_open]
        if world.connections:
            pair = self._rng.choice(world.connections)
            one, other = pair[0].process, pair[1].process
            world.log(f"the connection of {one!r} and {other!r} is cut")
            world.strike(kind, world.between(one.name, other.name))
            world.cut(pair)

    def _partition(self, kind: Kind) -> None:
        world, rng = self._world, self._rng
        one, other = self._slot("p").name, self._slot("d").name
        until = self._clock.now + rng.randrange(20 * MS, 2500 * MS)
        directions = [(one, other), (other, one)]
        if kind is Kind.ONE_WAY_PARTITION:
            directions = [rng.choice(directions)]
        world.log(f"{kind.value} {directions} until {until / S:.3f}")
        world.strike(kind, world.between(one, other))
        for source, target in directions:
            world.links.block(source, target, until)

    def _kill(self, kind: Kind) -> None:
        world = self._world
        slot = self._slot("p" if kind is Kind.KILL_SOURCE else "d")
        if slot.process is None or not slot.process.is_alive or slot.process.endpoint is None:
            return
        world.strike(kind, world.touching(slot.name))
        world.kill(slot)
        away = (
            self._rng.randrange(5 * MS, 150 * MS)
            if self._rng.random() < 0.5
            else self._rng.randrange(150 * MS, 2500 * MS)
        )
        self._clock.call_after(away, self._restart, slot)

    def _restart(self, slot: Slot) -> None:
        if not self._world.is_calm and slot.process is not None and not slot.process.is_alive:
            self._world.start(slot)

    def _pause(self, kind: Kind) -> None:
        world = self._world
        process = self._slot("p" if kind is Kind.PAUSE_SOURCE else "d").process
        if process is None or not process.is_alive or process.is_paused:
            return
        world.log(f"{process!r} is stopped")
        world.strike(kind, world.touching(process.name))
        process.is_paused = True
        self._clock.call_after(self._rng.randrange(20 * MS, 3000 * MS), process.resume)

    def _coordinator_cut(self, kind: Kind) -> None:
        world = self._world
        slot = self._slot("")
        world.log(f"{slot.name} loses the coordinator")
        world.strike(kind, world.touching(slot.name))
        slot.control_blocked_until = self._clock.now + self._rng.randrange(20 * MS, 2500 * MS)
        if slot.client is not None:
            slot.client.cut(None)

    def _coordinator_restart(self, kind: Kind) -> None:
        world = self._world
        if not world.coordinator.is_up:
            return
        world.log("the coordinator is killed")
        world.strike(kind, list(world.open.values()))
        world.coordinator.stop()
        self._clock.call_after(self._rng.randrange(10 * MS, 2000 * MS), self._coordinator_start)

    def _coordinator_start(self) -> None:
        if not self._world.coordinator.is_up:
            self._world.log("the coordinator is back")
            self._world.coordinator.start()

    def _end_grant(self, kind: Kind) -> None:
        world = self._world
        process = self._slot("p").process
        if process is None or not process.is_alive or process.is_paused or process.owner is None:
            return
        live = process.owner.live(is_ready=kind is Kind.PREEMPTION)
        if live:
            id_ = self._rng.choice(live)
            world.log(f"{process!r} {kind.value} {id_.hex()[:6]}")
            world.strike(kind, [world.open[id_]] if id_ in world.open else [])
            process.owner.end(id_, "REVOKE" if kind is Kind.PREEMPTION else "RELEASE")

    def _cancel(self, kind: Kind) -> None:
        world = self._world
        among = world.open if self._rng.random() < 0.9 else world.tracks
        tracks = [t for t in among.values() if t.destination.is_alive and not t.destination.is_paused]
        if tracks:
            track = self._rng.choice(tracks)
            process = track.destination
            world.log(f"{process!r} cancels {track.id.hex()[:6]}")
            world.strike(kind, [track])
            process.perform(process.endpoint.cancel(track.id, self._clock.now))

    def _remove_region(self, kind: Kind) -> None:
        world = self._world
        living = [p for p in world.living() if p.endpoint is not None and not p.is_paused]
        if not living:
            return
        process = self._rng.choice(living)
        region = process.registered.leave(self._rng.choice((OUT, IN)))
        if region is not None:
            ids = world.poster.fetching_from(process.incarnation, region)
            world.strike(kind, [world.tracks[id_] for id_ in ids])

    _ACTS: ClassVar[dict[Kind, Callable[[Chaos, Kind], None]]] = {
        Kind.CUT: _cut,
        Kind.PARTITION: _partition,
        Kind.ONE_WAY_PARTITION: _partition,
        Kind.KILL_SOURCE: _kill,
        Kind.KILL_DESTINATION: _kill,
        Kind.PAUSE_SOURCE: _pause,
        Kind.PAUSE_DESTINATION: _pause,
        Kind.COORDINATOR_CUT: _coordinator_cut,
        Kind.COORDINATOR_RESTART: _coordinator_restart,
        Kind.PREEMPTION: _end_grant,
        Kind.OWNER_RELEASE: _end_grant,
        Kind.CANCEL: _cancel,
        Kind.REGION_REMOVED: _remove_region,
    }
