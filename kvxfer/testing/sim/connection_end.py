"""One process's end of a simulated connection. It encodes the frames that the endpoint sends, reads the bytes of a
payload block by block, as the kernel would, decodes what arrives, and writes arriving blocks to memory one by one. It
must never decide whether a block may land: the endpoint does.
"""

from __future__ import annotations

import collections
import struct
from typing import Any

from kvxfer.testing.sim.links import Half, Reassembly, Sample, Unit
from kvxfer.testing.sim.tagged_memory import BLOCK_BYTES, Cell, TaggedMemory, cells, checksum, flipped
from kvxfer.testing.sim.view import ProcessView
from kvxfer.testing.sim.virtual_clock import MS, US

_Pending = tuple[Unit, Any, Any]


class ConnectionEnd:
    """Made by the world for both sides of a connection; ``session`` is what the endpoint called it."""

    def __init__(self, process: ProcessView, kind: Any) -> None:
        self.process, self.kind = process, kind
        self.session = 0
        self.peer: ConnectionEnd = self
        self.half: Half
        self.mapped: dict[tuple[int, Any], TaggedMemory] = {}
        self.is_open = True
        self.is_dialer = False
        self._outbox: collections.deque[_Pending] = collections.deque()
        self._is_sending = False
        self._muted: set[bytes] = set()
        self._decoder = process.machines.Decoder()
        self._reassembly = Reassembly()
        self._inbox: collections.deque[tuple[bytes, Sample | None]] = collections.deque()
        self._samples: collections.deque[Sample] = collections.deque()
        self._landing: _Landing | None = None
        self._is_landing = False

    # --- sending ---

    def mute(self, id_: bytes) -> None:
        """From now on every frame of this side about that transfer is lost, until the faults stop."""
        self._muted.add(id_)

    def send(self, frame: Any) -> None:
        is_muted = getattr(frame, "id", None) in self._muted and not self.process.world.is_calm
        if self.is_open and not is_muted:
            unit = self.process.world.unit(self, frame)
            self._outbox.append((unit, frame, None))
            self._pump()

    def send_data(self, effect: Any) -> None:
        if self.is_open:
            frame = self._zero_copy(effect.frame)
            unit = self.process.world.unit(self, frame)
            self._outbox.append((unit, frame, effect))
            self._pump()

    def _pump(self) -> None:
        while self._outbox and not self._is_sending:
            unit, frame, effect = self._outbox.popleft()
            self.half.send(unit, self.process.machines.encode(frame), None, is_last=effect is None)
            if effect is not None:
                self._is_sending = True
                payload = _Payload(unit, frame, effect, self.process.world.slowness(frame.id))
                if frame.has_checksums and self.process.world.chaos.corrupts():
                    payload.corrupted = self.process.rng.randrange(len(payload.cells))
                payload.is_for_good = self.process.world.is_gone(frame.id, is_one_sided=False)
                if payload.is_for_good or self.process.world.chaos.loses_memory():
                    payload.lost = self.process.rng.randrange(len(payload.cells))
                self.process.later(self._pause(payload.slow), self._take_block, payload)

    def _pause(self, slow: int) -> int:
        return self.process.rng.randrange(20 * US, 500 * US) * slow

    def _zero_copy(self, frame: Any) -> Any:
        """The DATA frame as the kernel sends it: a copy of its blocks, or zero-copy, which depends on the frame alone,
        so that a seed always does the same."""
        is_odd = (frame.id[0] + frame.attempt + frame.first) % 2
        if frame.has_checksums or self.kind == self.process.machines.SessionKind.MEMORY or is_odd:
            return frame
        data = self.process.machines.Data
        said = frame.id, frame.attempt, frame.first, frame.count, frame.complete, frame.payload_bytes
        return data(*said, is_zero_copy=True)

    def _take_block(self, payload: _Payload) -> None:
        """The kernel takes one block of a payload. It reads the bytes now, or, zero-copy, when they land."""
        if not self.is_open:
            return
        process, memory, frame = self.process, self.process.memory, payload.frame
        cell = payload.cells[len(payload.checksums)]
        if payload.lost == len(payload.checksums):
            process.world.memory_lost(frame.id)
            if payload.is_for_good:
                process.world.chaos.loses_session(self, frame.id)
            code, serial = process.machines.Code.memory_gone, payload.effect.serial
            process.perform(process.endpoint.data_failed(frame.id, code, "unmapped", process.clock.now, serial))
        is_lost = 0 <= payload.lost <= len(payload.checksums)
        data = bytes(BLOCK_BYTES) if is_lost else memory.read(cell)
        is_read_later = frame.is_zero_copy and not is_lost
        sample = Sample(process.clock.now, memory.incarnation, cell, data, memory if is_read_later else None)
        is_corrupted = payload.corrupted == len(payload.checksums)
        payload.checksums.append(checksum(data))
        is_last = len(payload.checksums) == len(payload.cells)
        self.half.send(
            payload.unit, flipped(data) if is_corrupted else data, sample, is_last=is_last and not frame.has_checksums
        )
        if not is_last:
            process.later(self._pause(payload.slow), self._take_block, payload)
            return
        if frame.has_checksums:
            checksums = struct.pack(
                f"<{len(payload.checksums)}I",
                *(payload.checksums if is_lost else payload.effect.checksums or payload.checksums),
            )
            self.half.send(payload.unit, checksums, None, is_last=True)
        self._is_sending = False
        process.perform(
            process.endpoint.data_sent(
                self.session, frame.id, frame.attempt, len(payload.cells), process.clock.now, frame.is_zero_copy
            )
        )
        self._pump()

    # --- ending ---

    def hang_up(self) -> None:
        """The endpoint closes the connection. Queued frames are still sent, up to the first payload; a payload that is
        under way is cut."""
        while self._outbox and not self._is_sending:
            unit, frame, effect = self._outbox.popleft()
            if effect is not None:
                break
            self.half.send(unit, self.process.machines.encode(frame), None, is_last=True)
        self._shut()
        self.half.end(self.peer.lost)

    def lost(self) -> None:
        """The kernel says that the other side is gone."""
        self.process.run(self._lost)

    def _lost(self) -> None:
        if not self.is_open:
            return
        self._shut()
        process = self.process
        if process.ends.pop(self.session, None) is not None:
            process.perform(process.endpoint.closed(self.session, process.clock.now))

    def _shut(self) -> None:
        self.is_open = False
        self._outbox.clear()
        self._inbox.clear()
        self.peer.half.cut()
        if self._landing is not None and not self._is_landing:
            self.process.afterwards(self._stop_landing)

    # --- receiving ---

    def deliver(self, unit: Unit, data: bytes, sample: Sample | None, is_last: bool) -> None:
        """Bytes are in this side's kernel."""
        self.process.run(self._receive, unit, data, sample, is_last)

    def _receive(self, unit: Unit, data: bytes, sample: Sample | None, is_last: bool) -> None:
        if self.is_open and self.session:
            self._inbox.extend(self._reassembly.take(unit, data, sample, is_last))
            self._read()

    def _read(self) -> None:
        process, decoder = self.process, self._decoder
        while self.is_open and not self._is_landing:
            if self._landing is not None:
                if self._landing.done == self._landing.count and decoder.buffered >= 4 * self._landing.count:
                    self._check(self._landing)
                    continue
                if self._landing.done < self._landing.count and decoder.buffered >= BLOCK_BYTES:
                    self._next_block(self._landing)
                    continue
            else:
                frame = decoder.next()
                if frame is not None:
                    self._on_frame(frame)
                    continue
            if not self._inbox:
                return
            data, sample = self._inbox.popleft()
            if sample is not None:
                self._samples.append(sample)
            decoder.feed(data)
            process.endpoint.heard(self.session, process.clock.now)

    def _on_frame(self, frame: Any) -> None:
        process, name = self.process, type(frame).__name__
        now = process.clock.now
        if name == "Data":
            landing = process.endpoint.data_arrives(self.session, frame, now)
            self._landing = _Landing(frame, landing.token, cells(landing.to) if landing.token else [])
            if landing.token:
                process.world.read_began(frame.id)
            process.perform([])
            return
        if name == "Map":
            if frame.region_bytes:
                self.mapped[frame.pool, frame.lane] = self.peer.process.memory
        elif name == "Renew":
            process.world.checkers.renewed(
                process.incarnation, frame.id, self.peer.process.incarnation, frame.seq, frame.ttl_ms * MS, now
            )
        elif name == "Verdict" and frame.code == process.machines.Code.ok:
            process.verdict_arrived(frame, self.peer.process)
        process.perform(process.endpoint.on_frame(self.session, frame, now))

    def _next_block(self, landing: _Landing) -> None:
        process = self.process
        data, sample = self._decoder.take_payload(BLOCK_BYTES), self._samples.popleft()
        if landing.token and not process.endpoint.is_landing(landing.id, landing.token):
            self._stop_landing()
        if landing.token:
            self._is_landing = True
            slow = process.world.slowness(landing.id)
            process.later(process.rng.randrange(5 * US, 200 * US) * slow, self._land, landing, data, sample)
        else:
            self._count_block(landing)

    def _land(self, landing: _Landing, data: bytes, sample: Sample) -> None:
        self._is_landing = False
        if sample.memory is not None:  # read now, out of the source's memory
            data = sample.memory.read(sample.cell)
            sample = Sample(self.process.clock.now, sample.incarnation, sample.cell, data)
        if data != sample.data:
            self.process.world.corruption_landed(landing.id)
        self.process.landed(landing.id, landing.cells[landing.done], data, sample, is_checked=landing.has_checksums)
        landing.checksums.append(checksum(data))
        self._count_block(landing)
        if not self.is_open and self._landing is not None:
            self._stop_landing()
        self._read()

    def _count_block(self, landing: _Landing) -> None:
        """One more block of a payload has landed, or was thrown away."""
        landing.done += 1
        if landing.done == landing.count and not landing.has_checksums:
            self._finish(landing)

    def _finish(self, landing: _Landing) -> None:
        """All blocks of a payload have landed, and their checksums were right where it has any."""
        self._landing = None
        if landing.token:
            process = self.process
            process.perform(process.endpoint.read_landed(landing.id, landing.token, process.clock.now))

    def _check(self, landing: _Landing) -> None:
        """Compare the checksums, which come after a payload, with those of the blocks that landed."""
        checksums = struct.unpack(f"<{landing.count}I", self._decoder.take_payload(4 * landing.count))
        process = self.process
        if not landing.token or list(checksums) == landing.checksums:
            return self._finish(landing)
        self._landing = None
        code = process.machines.Code.checksum
        process.perform(process.endpoint.read_stopped(landing.id, landing.token, code, "checksum", process.clock.now))

    def _stop_landing(self) -> None:
        """Nothing more of this payload is written; the rest of it is thrown away on arrival."""
        landing = self._landing
        if landing is None or not landing.token or self._is_landing:
            return
        token, landing.token = landing.token, 0
        process = self.process
        code = process.machines.Code.transport
        process.perform(process.endpoint.read_stopped(landing.id, token, code, "the payload ended", process.clock.now))


class _Payload:
    """One SendData that the kernel takes block by block. ``corrupted`` and ``lost`` are the index of a block that
    changes on the way, and of the first block whose memory is gone (-1: none); ``is_for_good``: that memory stays
    gone."""

    __slots__ = ("cells", "checksums", "corrupted", "effect", "frame", "is_for_good", "lost", "slow", "unit")

    def __init__(self, unit: Unit, frame: Any, effect: Any, slow: int) -> None:
        self.unit, self.frame, self.effect, self.slow = unit, frame, effect, slow
        self.cells = cells(effect.source)
        self.checksums: list[int] = []
        self.corrupted = self.lost = -1
        self.is_for_good = False


class _Landing:
    """One payload that arrives. ``token`` is the endpoint's name for the read that it fills; 0: throw the bytes
    away."""

    __slots__ = ("cells", "checksums", "count", "done", "has_checksums", "id", "token")

    def __init__(self, frame: Any, token: int, where: list[Cell]) -> None:
        self.id, self.token, self.cells, self.count = frame.id, token, where, frame.count
        self.has_checksums = frame.has_checksums
        self.done = 0
        self.checksums: list[int] = []
