"""One process's end of one connection: encodes what the endpoint sends, reads the bytes of blocks as the kernel takes
them, decodes what arrives and lets payload land block by block; must never judge whether it may (the endpoint does).
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from kvxfer.testing.clock import MS, US
from kvxfer.testing.memory import BLOCK_BYTES, Memory
from kvxfer.testing.network import Half, Reassembly, Sample, Unit

if TYPE_CHECKING:
    from kvxfer.testing.process import Process

_Pending = tuple[Unit, Any, list[int] | None]


class End:
    """Made by the world for both sides of a connection; ``session`` is what the endpoint called it."""

    def __init__(self, process: Process, kind: Any) -> None:
        self.process, self.kind = process, kind
        self.session = 0
        self.peer: End = self
        self.half: Half
        self.mapped: dict[int, Memory] = {}
        self.is_open = True
        self.is_dialer = False
        self._outbox: collections.deque[_Pending] = collections.deque()
        self._is_sending = False
        self._decoder = process.machines.Decoder()
        self._reassembly = Reassembly()
        self._inbox: collections.deque[tuple[bytes, Sample | None]] = collections.deque()
        self._samples: collections.deque[Sample] = collections.deque()
        self._landing: _Landing | None = None
        self._is_landing = False

    # --- sending ---

    def send(self, frame: Any) -> None:
        if self.is_open:
            unit = self.process.world.unit(self, frame)
            self._outbox.append((unit, frame, None))
            self._pump()

    def send_data(self, frame: Any, blocks: list[int]) -> None:
        if self.is_open:
            self._outbox.append((self.process.world.unit(self, frame), frame, blocks))
            self._pump()

    def _pump(self) -> None:
        while self._outbox and not self._is_sending:
            unit, frame, blocks = self._outbox.popleft()
            self.half.send(unit, self.process.machines.encode(frame), None, is_last=blocks is None)
            if blocks is not None:
                self._is_sending = True
                slow = self.process.world.slowness(frame.id)
                self.process.later(self._pause(slow), self._take, unit, frame, blocks, 0, slow)

    def _pause(self, slow: int) -> int:
        return self.process.rng.randrange(20 * US, 500 * US) * slow

    def _take(self, unit: Unit, frame: Any, blocks: list[int], index: int, slow: int) -> None:
        """The kernel takes the bytes of one block: this is the moment in which they are read."""
        if not self.is_open:
            return
        memory = self.process.memory
        is_last = index + 1 == len(blocks)
        sample = Sample(self.process.clock.now, memory.life)
        self.half.send(unit, memory.blocks[blocks[index]], sample, is_last=is_last)
        if not is_last:
            self.process.later(self._pause(slow), self._take, unit, frame, blocks, index + 1, slow)
            return
        self._is_sending = False
        process = self.process
        process.perform(
            process.endpoint.data_sent(self.session, frame.id, frame.attempt, len(blocks), process.clock.now)
        )
        self._pump()

    # --- ending ---

    def hang_up(self) -> None:
        """The endpoint wants it closed after what was queued; a payload that is under way cannot be ended well."""
        while self._outbox and not self._is_sending:
            unit, frame, blocks = self._outbox.popleft()
            if blocks is not None:
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
                if decoder.buffered >= BLOCK_BYTES:
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
            self._landing = _Landing(frame.id, landing.token, landing.blocks, frame.count)
            if landing.token:
                process.world.read_began(frame.id)
            process.perform([])
            return
        if name == "Map":
            self.mapped[frame.pool] = self.peer.process.memory
        elif name == "Renew":
            process.world.checkers.renewed(
                process.life, frame.id, self.peer.process.life, frame.seq, frame.ttl_ms * MS, now
            )
        elif name == "Verdict" and frame.code == process.machines.Code.ok:
            process.world.checkers.verdict_arrived(process.life, frame.id, self.peer.process.life, frame.nonce)
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
            self._count(landing)

    def _land(self, landing: _Landing, data: bytes, sample: Sample) -> None:
        process, block = self.process, landing.blocks[landing.done]
        self._is_landing = False
        process.memory.blocks[block] = data
        process.world.checkers.landed(
            process.life, landing.id, block, data, sampled_at=sample.at, sampled_from=sample.life
        )
        self._count(landing)
        if not self.is_open and self._landing is not None:
            self._stop_landing()
        self._read()

    def _count(self, landing: _Landing) -> None:
        landing.done += 1
        if landing.done == landing.count:
            self._landing = None
            if landing.token:
                process = self.process
                process.perform(process.endpoint.read_landed(landing.id, landing.token, process.clock.now))

    def _stop_landing(self) -> None:
        """Nothing more of this payload is written; the rest of it is thrown away as it comes."""
        landing = self._landing
        if landing is None or not landing.token or self._is_landing:
            return
        token, landing.token = landing.token, 0
        process = self.process
        code = process.machines.Code.transport
        process.perform(process.endpoint.read_stopped(landing.id, token, code, "the payload ended", process.clock.now))


class _Landing:
    __slots__ = ("blocks", "count", "done", "id", "token")

    def __init__(self, id_: bytes, token: int, blocks: list[int], count: int) -> None:
        self.id, self.token, self.blocks, self.count = id_, token, blocks, count
        self.done = 0
