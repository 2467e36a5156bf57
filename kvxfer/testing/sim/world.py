"""One seed, one world: slots with processes, a coordinator, links, a router that posts requests, and the reference
models that judge it; must never give the same seed two histories.
"""

from __future__ import annotations

import collections
import hashlib
import random
from typing import Any

from kvxfer.testing.sim.chaos import Chaos
from kvxfer.testing.sim.checkers import Checkers, Invariant, Violation
from kvxfer.testing.sim.connection_end import ConnectionEnd
from kvxfer.testing.sim.control_plane import Client, Coordinator
from kvxfer.testing.sim.destination_owner import DestinationOwner
from kvxfer.testing.sim.fake_router import FakeRouter
from kvxfer.testing.sim.faults import FaultWeights, Kind, TransferPhase
from kvxfer.testing.sim.links import Half, Links, Unit
from kvxfer.testing.sim.process import Process
from kvxfer.testing.sim.region_poster import RegionPoster
from kvxfer.testing.sim.region_reference import RegionReference
from kvxfer.testing.sim.report import SimReport
from kvxfer.testing.sim.source_owner import SourceOwner
from kvxfer.testing.sim.view import DecodeOrder, EndView, ProcessView, Slot, Track
from kvxfer.testing.sim.virtual_clock import MS, S, VirtualClock
from kvxfer.testing.sim.world_options import WorldOptions
from kvxfer.types import AgentRef

_LOG_KEPT = 120


def world(seed: int, *, machines: Any, options: WorldOptions = WorldOptions()) -> World:  # noqa: B008
    """The world of one seed. ``machines``: the native module that decides, ``_core`` or ``_machines_bugs``."""
    return World(seed, machines, options)


class World:
    def __init__(self, seed: int, machines: Any, options: WorldOptions) -> None:
        self.seed, self.machines, self.options = seed, machines, options
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.checkers = Checkers()
        self.reference = RegionReference()
        self.report = SimReport(seed)
        self.links = Links()
        self.weights = FaultWeights.swarm(self.rng) if options.has_faults else FaultWeights.none()
        self.grant_lifetime_max_ns = self.rng.choice(options.grant_lifetime_max_ns)
        self.limits = self._limits()
        self.control_kind = self.rng.choice((machines.SessionKind.TCP, machines.SessionKind.MEMORY))
        self.is_calm = False
        self.recent: collections.deque[str] = collections.deque(maxlen=_LOG_KEPT)
        self._hash = hashlib.blake2b(digest_size=16)
        self._incarnations: list[ProcessView] = []
        self._incarnation_of: dict[Any, int] = {}
        self._natives: dict[AgentRef, Any] = {}
        self._publics: dict[int, AgentRef] = {}
        self.open: dict[bytes, Track] = {}
        """Those of which a side still holds something."""
        self.tracks: dict[bytes, Track] = {}
        self.connections: list[tuple[EndView, EndView]] = []
        self._slow: dict[bytes, int] = {}
        self._gone: set[bytes] = set()
        """Transfers whose source's memory is unmapped for good."""
        self.slots = {
            name: Slot(name, index % 2, options.pool_blocks)
            for prefix, count in (("p", options.sources), ("d", options.destinations))
            for index, name in enumerate(f"{prefix}{i}" for i in range(count + self.rng.randint(0, options.extra_max)))
        }
        self.coordinator = Coordinator(self)
        self.router = FakeRouter(self)
        self.poster = RegionPoster(self)
        self.chaos = Chaos(self)

    # --- running ---

    def run(self) -> SimReport:
        """Play the whole seed. Raises :class:`Violation` with the invariant that broke."""
        for slot in self.slots.values():
            self.start(slot)
        self.clock.run_until(100 * MS)
        self.router.begin()
        self.poster.begin()
        self.chaos.begin()
        self._look()
        self.clock.run_until(self.options.chaos_ns)
        self._calm()
        last_fault = self.clock.now
        while not self._is_at_rest() and self.clock.now < last_fault + self.options.rest_ns:
            self.clock.run_until(self.clock.now + 100 * MS)
        self._check_rest(last_fault)
        last_final = max(self.checkers.last_final_ns(), self.reference.last_final_ns())
        self.report.rest_max_ns = max(0, last_final - last_fault)
        self.report.events = self.clock.fired
        self.report.digest = self._hash.hexdigest()
        return self.report

    def _calm(self) -> None:
        """No fault from here on; of the dead, some come back and some do not."""
        self.is_calm = True
        self.links.heal()
        self.router.stop()
        if not self.coordinator.is_up:
            self.coordinator.start()
        for slot in self.slots.values():
            slot.control_blocked_until = 0
            process = slot.process
            assert process is not None
            process.resume()
            if process.is_alive and process.owner is not None:
                process.owner.stop_queue()
            if not process.is_alive and self.rng.random() < 0.5:
                self.start(slot)

    def living(self) -> list[ProcessView]:
        return [slot.process for slot in self.slots.values() if slot.process is not None and slot.process.is_alive]

    def _is_at_rest(self) -> bool:
        incarnations = {process.incarnation for process in self.living()}
        is_said = self.checkers.is_at_rest(incarnations) and self.reference.is_at_rest(incarnations)
        return is_said and all(self._leftover(process) is None for process in self.living())

    def _check_rest(self, last_fault: int) -> None:
        living = {process.incarnation for process in self.living()}
        self.checkers.check_rest(living, self.clock.now - last_fault, self.clock.now)
        self.reference.check_rest(living, self.clock.now)
        for process in self.living():
            leftover = self._leftover(process)
            if leftover is not None:
                raise Violation(Invariant.FINAL, f"{process!r} still has {leftover} long after the last fault")

    def _leftover(self, process: ProcessView) -> str | None:
        if process.endpoint is None:
            return None
        counts = process.endpoint.counts()
        found = {
            "live grants": counts.grants.alive,
            "waiting pulls": counts.grants.waiting_pulls,
            "live transfers": counts.transfers_live,
            "draining transfers": counts.transfers_draining,
            "unacknowledged notifications": counts.notifications_pending,
        }
        for pool in counts.pools:
            found |= {"granted": pool.granted, "reserved": pool.reserved, "quarantined": pool.quarantined}
        for region in counts.regions:
            found |= {"grants of a region": region.grants, "landings in a region": region.transfers}
        found["blocks that the owner misses"] = process.slot.blocks - process.owner.free_count
        return next((f"{count} {name}" for name, count in found.items() if count), None)

    def log(self, text: str) -> None:
        line = f"{self.clock.now / S:.9f} {text}"
        self._hash.update(line.encode())
        self.recent.append(line)

    # --- incarnations ---

    def start(self, slot: Slot) -> None:
        """A new process in this slot, with empty memory and no number yet."""
        process = Process(self, slot, len(self._incarnations))
        self._incarnations.append(process)
        slot.process = process
        slot.client = Client(process)
        self.log(f"{process!r} starts")
        slot.client.connect()

    def booted(self, process: ProcessView) -> None:
        is_source = process.name.startswith("p")
        process.owner = SourceOwner(process) if is_source else DestinationOwner(process)
        self.router.booted(process)

    def kill(self, slot: Slot) -> None:
        """kill -9: no farewell; the kernel resets its connections, and some peers miss even that for a while."""
        process = slot.process
        assert process is not None
        self.log(f"{process!r} is killed")
        process.is_alive = False
        process.memory.is_process_alive = False
        if slot.client is not None:
            slot.client.died()
        for end in process.ends.values():
            end.is_open = False
            end.half.cut()
            end.peer.half.cut()
            self._tell_of_cut(end.peer)
        for track in [t for t in self.open.values() if t.destination is process]:
            self.pull_over(track.id)
        for track in [t for t in self.open.values() if t.source is process]:
            track.is_granted = False
            self._close(track)

    def native(self, ref: AgentRef, process: ProcessView | None = None) -> Any:
        """The machines' name of an incarnation."""
        native = self._natives.get(ref)
        if native is None:
            native = self.machines.AgentRef(ref.agent_id, ref.incarnation.number, ref.incarnation.boot_nonce)
            self._natives[ref] = native
        if process is not None:
            self._incarnation_of[native] = process.incarnation
            self._publics[process.incarnation] = ref
        return native

    def public_ref(self, process: ProcessView) -> AgentRef:
        return self._publics[process.incarnation]

    def incarnation_of(self, native: Any) -> int:
        return self._incarnation_of[native]

    def is_control_blocked(self, name: str) -> bool:
        return self.clock.now < self.slots[name].control_blocked_until

    # --- connections ---

    def dial(self, process: ProcessView, peer: Any, kind: Any) -> None:
        """A process connects to where that agent runs now; the handshake finds out whether it is that incarnation."""
        here, there = process.slot, self.slots[peer.agent_id]
        target = there.process
        if kind == self.machines.SessionKind.UNIX and here.host != there.host:
            return process.dial_failed(peer, kind, "another host")
        blocked = max(self.links.blocked_until(here.name, there.name), self.links.blocked_until(there.name, here.name))
        if blocked > self.clock.now:
            return process.later(self.rng.randrange(50 * MS, 500 * MS), process.dial_failed, peer, kind, "timed out")
        if target is None or not target.is_alive or target.endpoint is None:
            return process.dial_failed(peer, kind, "connection refused")
        dialer, acceptor = ConnectionEnd(process, kind), ConnectionEnd(target, kind)
        dialer.peer, acceptor.peer = acceptor, dialer
        dialer.half = Half(self.clock, self.rng, self.links, (here.name, there.name), acceptor.deliver)
        acceptor.half = Half(self.clock, self.rng, self.links, (there.name, here.name), dialer.deliver)
        dialer.session, effects = process.endpoint.dialed(peer, kind, self.rng.randbytes(32), self.clock.now)
        process.ends[dialer.session] = dialer
        self.connections.append((dialer, acceptor))
        target.run(self._accept, acceptor)
        process.perform(effects)

    def _accept(self, end: ConnectionEnd) -> None:
        if not end.is_open:
            return
        process = end.process
        end.session, effects = process.endpoint.accepted(end.kind, self.rng.randbytes(32), self.clock.now)
        process.ends[end.session] = end
        process.perform(effects)

    def cut(self, connection: tuple[EndView, EndView]) -> None:
        """The connection breaks; each side learns of it when its kernel does."""
        for end in connection:
            end.half.cut()
        for end in connection:
            self._tell_of_cut(end)

    def _tell_of_cut(self, end: EndView) -> None:
        is_late = self.rng.random() < 0.2
        self.clock.call_after(
            self.rng.randrange(1 * S, 3 * S) if is_late else self.rng.randrange(MS, 20 * MS), end.lost
        )

    def unit(self, end: EndView, frame: Any) -> Unit:
        """Name a frame for the network, and decide what becomes of it."""
        name, id_ = type(frame).__name__, getattr(frame, "id", None)
        fate, kind = self.chaos.fate(name)
        if kind is not None:
            self.log(f"{end.process!r} to {end.peer.process!r} {name} {fate.value}")
            if id_ is not None and id_ != bytes(16):
                self._strike_one(kind, id_, but=TransferPhase.FINAL if kind is Kind.LOST_RENEWAL else None)
            else:
                self.strike(kind, self.between(end.process.name, end.peer.process.name))
        return Unit(name, id_, fate)

    # --- transfers ---

    def slowness(self, id_: bytes) -> int:
        return self._slow.get(id_, 1)

    def slow_down(self, id_: bytes, factor: int) -> None:
        self._slow[id_] = factor

    def read_began(self, id_: bytes) -> None:
        if id_ in self._slow and id_ in self.open:
            self.strike(Kind.SLOW_READ, [self.open[id_]])

    def between(self, one: str, other: str) -> list[Track]:
        pair = {one, other}
        return [t for t in self.open.values() if {t.source.name, t.destination.name} == pair]

    def touching(self, name: str) -> list[Track]:
        return [t for t in self.open.values() if name in (t.source.name, t.destination.name)]

    def phase(self, track: Track) -> TransferPhase | None:
        """Where a transfer stands at its destination; ``None`` if that is unknown."""
        process = track.destination
        if not process.is_alive or process.endpoint is None:
            return None
        state = process.endpoint.transfer_state(track.id)
        if state is None:
            return None
        return _PHASES.get(state.name, TransferPhase.FINAL)

    def strike(self, kind: Kind, tracks: list[Track]) -> None:
        """Count what a fault hit."""
        for track in tracks:
            phase = self.phase(track)
            if phase is not None:
                self.report.struck[kind, phase] += 1

    def _strike_one(self, kind: Kind, id_: bytes, *, but: TransferPhase | None) -> None:
        """As :meth:`strike`, of one transfer; not where it is in the phase ``but``."""
        track = self.tracks.get(id_)
        if track is not None and self.phase(track) is not but:
            self.strike(kind, [track])

    def pulled(self, process: ProcessView, order: DecodeOrder) -> None:
        self.tracks[order.id] = self.open[order.id] = track = Track(order.id, process, order.source)
        track.is_pulled = True
        track.is_granted = self.checkers.has_live_grant(order.source.incarnation, order.id)
        self.router.pulled(order)

    def fetched(self, process: ProcessView, id_: bytes, source: ProcessView) -> None:
        self.tracks[id_] = self.open[id_] = Track(id_, process, source, is_pulled=True)

    def corruption_landed(self, id_: bytes) -> None:
        self.strike(Kind.CORRUPTION, [self.tracks[id_]] if id_ in self.tracks else [])

    def is_gone(self, id_: bytes, *, is_one_sided: bool = True) -> bool:
        """Whether the source's memory is unmapped for good; a one-sided read may be the first that finds it so."""
        if is_one_sided and self.chaos.loses_memory_for_good():
            self._gone.add(id_)
        return id_ in self._gone

    def memory_lost(self, id_: bytes) -> None:
        self._strike_one(Kind.MEMORY_GONE, id_, but=TransferPhase.CONFIRMING)

    def not_pulled(self, id_: bytes) -> None:
        self.router.not_pulled(id_)

    def pull_over(self, id_: bytes) -> None:
        track = self.open.get(id_)
        if track is not None:
            track.is_pulled = False
            self._close(track)

    def finished(self, process: ProcessView, order: DecodeOrder, effect: Any) -> None:
        state, code = effect.state.name, effect.code.name
        self.report.finals[state, code] += 1
        if state == "COMMITTED":
            self.report.lanes[effect.lane.name.lower()] += 1
        self.router.finished(process, order, state, code)

    def granted(self, process: ProcessView, id_: bytes) -> None:
        track = self.tracks.get(id_)
        if track is None:
            return
        if track.source is process:
            track.is_granted = True
            self.open[id_] = track
            self.strike(Kind.PULL_BEFORE_GRANT, [track])
        elif track.source.name == process.name:
            self.strike(Kind.REGRANT, [track])

    def grant_over(self, process: ProcessView, id_: bytes, state: str) -> None:
        track = self.tracks.get(id_)
        if track is None or track.source is not process:
            return
        if state == "EXPIRED":
            self.strike(Kind.EXPIRED_GRANT, [track])
        track.is_granted = False
        self._close(track)

    def _look(self) -> None:
        """Now and then: what the machines count is what the reference model says."""
        for process in self.living():
            if process.endpoint is not None:
                (pool,) = process.endpoint.counts().pools
                self.checkers.counted(process.incarnation, pool.reserved + pool.quarantined, pool.granted)
        self.clock.call_after(self.options.heartbeat_ns, self._look)

    def _close(self, track: Track) -> None:
        if not track.is_pulled and not track.is_granted:
            self.open.pop(track.id, None)

    def _limits(self) -> Any:
        machines, options = self.machines, self.options
        grants, transfers, limits = machines.GrantLimits(), machines.TransferLimits(), machines.EndpointLimits()
        grants.ttl_ns, grants.lifetime_max_ns, grants.wait_max_ns = (
            options.grant_ttl_ns,
            self.grant_lifetime_max_ns,
            options.wait_ns,
        )
        grants.data_bytes_max = self.rng.choice((16, 32, 48, 1024))
        transfers.stall_ns, transfers.reconnect_ns, transfers.ttl_ns = (
            options.stall_ns,
            options.reconnect_ns,
            options.grant_ttl_ns,
        )
        transfers.engine_silent_ns = 10_000 * MS
        transfers.read_bytes_max = self.rng.choice((16, 32, 48, 1024))
        limits.grants, limits.transfers, limits.handshake_ns = grants, transfers, options.handshake_ns
        limits.stripes = self.rng.choice((1, 1, 2, 3))
        return limits


_PHASES = {
    "CONNECTING": TransferPhase.CONNECTING,
    "WAITING": TransferPhase.WAITING,
    "READING": TransferPhase.READING,
    "CONFIRMING": TransferPhase.CONFIRMING,
}
