"""One incarnation of one agent: the shell around a native Endpoint, which performs its effects on the fake network and
memory; must never decide anything that the machines decide.

A process can be killed (nothing of it runs any more; its memory may still be read), and stopped (nothing of it runs
until it is resumed; what reached it meanwhile waits, as it would in the kernel).
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, ClassVar

from kvxfer.errors import KvxferError
from kvxfer.testing.sim.checkers import Invariant, Violation
from kvxfer.testing.sim.links import Sample
from kvxfer.testing.sim.one_sided_read import OneSidedRead
from kvxfer.testing.sim.region_owner import REGION_CELLS, RegionOwner
from kvxfer.testing.sim.tagged_memory import BLOCK_BYTES, POOL, Cell, TaggedMemory
from kvxfer.testing.sim.view import EndView, ProcessView, Slot, WorldView
from kvxfer.testing.sim.virtual_clock import MS, NEVER, US

DIGEST = b"\x11" * 32


class Process:
    """``owner`` is set by the world before the first effect: it gets ``grant_ended``, ``final``, ``drained``, and
    ``granted`` for pulls without blocks."""

    def __init__(self, world: WorldView, slot: Slot, incarnation: int) -> None:
        self.world, self.slot, self.incarnation = world, slot, incarnation
        self.name = slot.name
        self.clock, self.rng, self.machines = world.clock, world.rng, world.machines
        self.memory = TaggedMemory(slot.blocks, incarnation, REGION_CELLS)
        self.registered = RegionOwner(self)
        self.has_checksums = self.rng.random() < 0.3
        lane = self.machines.Lane
        self.unreadable = {one for one in (lane.CMA, lane.UCX) if self.rng.random() < 0.15}
        """Lanes whose maps this incarnation cannot make."""
        self.ref: Any = None
        self.endpoint: Any = None
        self.owner: Any = None
        self.ends: dict[int, EndView] = {}
        self.is_alive = True
        self.is_paused = False
        self._deferred: collections.deque[tuple[Callable[..., None], tuple[Any, ...]]] = collections.deque()
        self._timer_at = NEVER
        self._depth = 0
        self._afterwards: collections.deque[tuple[Callable[..., None], tuple[Any, ...]]] = collections.deque()

    def __repr__(self) -> str:
        return f"{self.name}.{self.incarnation}"

    # --- running ---

    def run(self, callback: Callable[..., None], *args: Any) -> None:
        """Do it inside this process: now, when it is resumed, or never."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._deferred.append((callback, args))
        else:
            callback(*args)

    def later(self, delay_ns: int, callback: Callable[..., None], *args: Any) -> None:
        self.clock.call_after(delay_ns, self.run, callback, *args)

    def resume(self) -> None:
        if not self.is_alive or not self.is_paused:
            return
        self.is_paused = False
        waiting = list(self._deferred)
        self._deferred.clear()
        chance = self.rng.random()
        if chance < 0.3 and self.endpoint is not None:
            self._tick()
        elif chance < 0.7:  # a loop that reads its sockets before it looks at its timers
            waiting.sort(key=lambda deferred: deferred[0] == self._timer)
        for callback, args in waiting:
            self.run(callback, *args)

    def boot(self, ref: Any) -> None:
        """The coordinator gave this incarnation its number: from now on it has machines."""
        self.ref = ref
        self.endpoint = self.machines.Endpoint(ref, self.world.limits)
        shareable, exposed = (self.rng.random() < 0.8 for _ in range(2))
        blocks = self.slot.blocks
        self.endpoint.add_pool(
            self.machines.PoolInfo(POOL, blocks, BLOCK_BYTES, DIGEST, shareable, exposed, self.has_checksums)
        )
        self.registered.begin()

    # --- the machines ---

    def perform(self, effects: list[Any]) -> None:
        """Every effect in order; what owners do in answer happens after the last one."""
        self._depth += 1
        for effect in effects:
            self._PERFORM[type(effect).__name__](self, effect)
        self._depth -= 1
        if self._depth == 0:
            while self._afterwards and self._depth == 0:
                callback, args = self._afterwards.popleft()
                callback(*args)
            self._arm()

    def afterwards(self, callback: Callable[..., None], *args: Any) -> None:
        """Do it when the effects that are being performed are done."""
        if self._depth:
            self._afterwards.append((callback, args))
        else:
            callback(*args)

    def _arm(self) -> None:
        due = self.endpoint.next_deadline()
        if due < self._timer_at:
            self._timer_at = due
            lateness = self.rng.randrange(0, 80 * MS) if self.rng.random() < 0.2 else 0
            self.clock.call_at(min(due + lateness, NEVER), self.run, self._timer, due)

    def _timer(self, due: int) -> None:
        if due == self._timer_at:
            self._tick()

    def _tick(self) -> None:
        self._timer_at = NEVER
        effects = self.endpoint.tick(self.clock.now)
        if self.endpoint.next_deadline() <= self.clock.now:
            raise Violation(Invariant.FINAL, f"{self!r} asks to be woken in the past: it would never sleep")
        self.perform(effects)
        self._arm()

    # --- effects towards the wire ---

    def _dial(self, effect: Any) -> None:
        self.later(self.rng.randrange(100 * US, 3 * MS), self.world.dial, self, effect.peer, effect.kind)

    def dial_failed(self, peer: Any, kind: Any, text: str) -> None:
        self.perform(self.endpoint.dial_failed(peer, kind, self.machines.Code.transport, text, self.clock.now))

    def _hangup(self, effect: Any) -> None:
        end = self.ends.pop(effect.session, None)
        if end is not None:
            end.hang_up()
            self.later(self.rng.randrange(0, MS), self._closed, effect.session)

    def _closed(self, session: int) -> None:
        self.perform(self.endpoint.closed(session, self.clock.now))

    def _send_frame(self, effect: Any) -> None:
        frame = effect.frame
        if type(frame).__name__ == "Verdict" and frame.code == self.machines.Code.ok:
            reference = (
                self.world.reference
                if self.world.reference.knows_source(self.incarnation, frame.id)
                else self.world.checkers
            )
            reference.confirmed(self.incarnation, frame.id, frame.nonce, self.clock.now)
        end = self.ends.get(effect.session)
        if end is not None:
            end.send(frame)

    def _send_map(self, effect: Any) -> None:
        end = self.ends.get(effect.session)
        if end is None:
            return
        size, blocks, segments = REGION_CELLS * BLOCK_BYTES, 0, []
        if effect.pool == POOL:
            blocks, segments = self.slot.blocks, [(0, BLOCK_BYTES, BLOCK_BYTES)]
            size = blocks * BLOCK_BYTES
        if effect.lane in self.unreadable:
            size = 0
        end.send(self.machines.Map(effect.pool, size, blocks, segments, effect.lane))

    def _send_data(self, effect: Any) -> None:
        end = self.ends.get(effect.session)
        if end is not None:
            end.send_data(effect)

    def _read_blocks(self, effect: Any) -> None:
        OneSidedRead(self, effect).begin()

    # --- bytes ---

    def landed(self, id_: bytes, cell: Cell, data: bytes, sample: Sample, *, is_checked: bool) -> None:
        """Bytes of transfer ``id_`` reach ``cell``, whichever transfer has it by now."""
        self.memory.write(cell, data)
        if cell.region == POOL:
            self.world.checkers.landed(
                self.incarnation,
                id_,
                cell.slot,
                data,
                sampled_at=sample.at,
                sampled_from=sample.incarnation,
                is_checked=is_checked,
            )
        else:
            self.world.reference.landed(self.incarnation, id_, cell, data, sample)

    def verdict_arrived(self, frame: Any, sender: ProcessView) -> None:
        """A verdict ok came; the machines and the checkers judge whether it counts."""
        reference = (
            self.world.reference
            if self.world.reference.knows_target(self.incarnation, frame.id)
            else self.world.checkers
        )
        reference.verdict_arrived(self.incarnation, frame.id, sender.incarnation, frame.nonce)

    # --- effects towards the owner ---

    def _grant_ended(self, effect: Any) -> None:
        self.world.log(f"{self!r} grant {effect.id.hex()[:6]} {effect.state.name}")
        self.world.checkers.grant_ended(self.incarnation, effect.id, effect.state.name, self.clock.now)
        self.owner.grant_ended(effect.id, effect.state.name)

    def _granted(self, effect: Any) -> None:
        self.world.log(f"{self!r} transfer {effect.id.hex()[:6]} hears of its grant")
        self.owner.granted(effect.id)

    def _final(self, effect: Any) -> None:
        self.world.log(
            f"{self!r} transfer {effect.id.hex()[:6]} {effect.state.name} {effect.code.name} after {effect.attempts}"
        )
        if self.world.reference.knows_post(self.incarnation, effect.id):
            self.world.reference.final(self.incarnation, effect.id, effect.state.name, self.clock.now)
            self.world.poster.final(self, effect)
            return
        self.world.checkers.final(self.incarnation, effect.id, effect.state.name, self.clock.now)
        self.owner.final(effect)

    def _drained(self, effect: Any) -> None:
        self.world.log(f"{self!r} transfer {effect.id.hex()[:6]} drained")
        if self.world.reference.knows_post(self.incarnation, effect.id):
            self.world.reference.drained(self.incarnation, effect.id)
            self.world.poster.drained(self, effect.id)
            return
        self.world.checkers.drained(self.incarnation, effect.id)
        self.owner.drained(effect.id)

    def _stop_read(self, effect: Any) -> None:
        self.world.log(f"{self!r} transfer {effect.id.hex()[:6]} reads for nothing")

    def _offer_ended(self, effect: Any) -> None:
        state = effect.state.name
        self.world.log(f"{self!r} offered {effect.id.hex()[:6]} {state} {effect.code.name}")
        self.world.reference.offer_ended(self.incarnation, effect.id, state, self.clock.now)
        self.world.poster.offer_ended(self, effect)

    def _progress(self, effect: Any) -> None:
        self.world.log(f"{self!r} transfer {effect.id.hex()[:6]} {effect.done}/{effect.total}")

    def _notif_received(self, effect: Any) -> None:
        sender = self.world.incarnation_of(effect.sender)
        if effect.seq == 0:
            self.world.reference.notified(sender, self.incarnation, effect.payload)
            return
        self.world.checkers.notification_received(sender, self.incarnation, effect.seq, effect.payload)

    def _notif_delivered(self, effect: Any) -> None:
        receiver = self.world.incarnation_of(effect.receiver)
        self.world.checkers.notification_settled(self.incarnation, receiver, effect.seq, is_delivered=True)

    def _notif_failed(self, effect: Any) -> None:
        receiver = self.world.incarnation_of(effect.receiver)
        self.world.checkers.notification_settled(self.incarnation, receiver, effect.seq, is_delivered=False)

    def _session_up(self, effect: Any) -> None:
        self.world.log(f"{self!r} session {effect.session} up to {effect.peer!r} {effect.kind.name}")

    def notify(self, to: ProcessView, payload: bytes) -> None:
        """Raises what the endpoint raises."""
        try:
            seq, effects = self.endpoint.notify(to.ref, payload, self.clock.now)
        except KvxferError:
            return
        self.world.checkers.notified(self.incarnation, to.incarnation, seq, payload)
        self.perform(effects)

    _PERFORM: ClassVar[dict[str, Callable[[Process, Any], None]]] = {
        "Dial": _dial,
        "Hangup": _hangup,
        "SendFrame": _send_frame,
        "SendMap": _send_map,
        "SendData": _send_data,
        "ReadBlocks": _read_blocks,
        "StopRead": _stop_read,
        "GrantEnded": _grant_ended,
        "TransferProgress": _progress,
        "TransferGranted": _granted,
        "TransferFinal": _final,
        "TransferDrained": _drained,
        "OfferEnded": _offer_ended,
        "NotifReceived": _notif_received,
        "NotifDelivered": _notif_delivered,
        "NotifFailed": _notif_failed,
        "SessionUp": _session_up,
    }
