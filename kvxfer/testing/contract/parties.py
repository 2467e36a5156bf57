"""The tools of the lane contract: parties (a transport with one pool and a log of its events) and makers, which
open transports of one lane and let time pass. Decides how long a check waits; must never know what is checked.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvxfer._native import _core
from kvxfer.clock import NS_PER_S
from kvxfer.config import AgentConfig
from kvxfer.transport.base import Region, Transport, allocate_region
from kvxfer.transport.engine import TransferEngine
from kvxfer.transport.memory import MemoryBinding
from kvxfer.transport.memory_bytes import BlockMemory
from kvxfer.transport.native import NativeBinding
from kvxfer.transport.network import MemoryNetwork
from kvxfer.types import (
    AgentRef,
    CompatibilityRecord,
    EncryptMode,
    Exposure,
    GrantState,
    Incarnation,
    Lane,
    PoolRecord,
    ProgressMode,
    Segment,
    TransferId,
    TransferState,
)

POOL_ID = 7
POISON = 0xEE

RECORD = CompatibilityRecord(
    model="contract",
    config_fingerprint="c",
    weights_fingerprint="w",
    dtype="float32",
    layers=2,
    kv_heads=1,
    head_dim=8,
    block_tokens=4,
    axes="layer,kv,token,head,dim",
    packing="plain",
    rope="none",
    attention_backend="none",
)


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """The shape of a pool: ``block_count`` blocks made of ``segments`` in memory of ``length_bytes``."""

    block_count: int
    segments: tuple[Segment, ...]
    length_bytes: int

    @classmethod
    def plain(cls, block_count: int, block_bytes: int) -> PoolLayout:
        return cls(block_count, (Segment(0, block_bytes, block_bytes),), block_count * block_bytes)

    @classmethod
    def cut(cls, block_count: int, lengths: Sequence[int], gap_bytes: int = 0) -> PoolLayout:
        """One plane a segment, each block's part ``gap_bytes`` away from the next one's."""
        offset, segments = gap_bytes, []
        for length in lengths:
            segments.append(Segment(offset, length + gap_bytes, length))
            offset += block_count * (length + gap_bytes) + gap_bytes
        return cls(block_count, tuple(segments), offset)

    @property
    def block_bytes(self) -> int:
        return sum(segment.length_bytes for segment in self.segments)


class LaneParty:
    """One transport with one pool, POOL_ID, poisoned; its events are kept by kind."""

    def __init__(
        self,
        transport: Transport,
        layout: PoolLayout,
        region: Region,
        record: CompatibilityRecord,
        config: AgentConfig | None = None,
        *,
        has_checksums: bool = False,
    ) -> None:
        self.transport = transport
        self.pool = PoolRecord(
            POOL_ID, record, layout.block_count, layout.block_bytes, Exposure.POOL, region.shared is not None
        )
        self._region = region
        self._blocks = BlockMemory(self.pool, region, layout.segments)
        self.finals: dict[bytes, list[_core.TransferFinal]] = collections.defaultdict(list)
        self.drained: collections.Counter[bytes] = collections.Counter()
        self.granted: collections.Counter[bytes] = collections.Counter()
        self.done: dict[bytes, int] = {}
        self.ended: dict[bytes, list[GrantState]] = collections.defaultdict(list)
        self.poster = TransferEngine(transport, config=config, drain=self.drain)
        self.offers: list[_core.OfferEnded] = []
        self.on_received: Callable[[bytes], None] = lambda payload: None
        self.received: list[tuple[int, bytes]] = []
        self.delivered: list[int] = []
        self.undelivered: list[int] = []
        self.poison()
        transport.add_pool(self.pool, region, layout.segments, has_checksums=has_checksums)

    @property
    def ref(self) -> AgentRef:
        return self.transport.ref

    def poison(self) -> None:
        """Overwrite the whole memory, between the blocks too."""
        everything = Segment(0, self._region.length_bytes, self._region.length_bytes)
        one = dataclasses.replace(self.pool, block_count=1, block_bytes=self._region.length_bytes)
        BlockMemory(one, self._region, [everything]).write(
            [0], np.full((1, self._region.length_bytes), POISON, np.uint8)
        )

    def fill(self, seed: int) -> npt.NDArray[np.uint8]:
        """Random bytes in every block; returns them, shape [block_count, block_bytes]."""
        shape = (self.pool.block_count, self.pool.block_bytes)
        data = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        self._blocks.write(range(self.pool.block_count), data)
        return data

    def read(self, blocks: Sequence[int] | None = None) -> npt.NDArray[np.uint8]:
        """The bytes of ``blocks``, or of all, shape [n, block_bytes]."""
        return self._blocks.read(range(self.pool.block_count) if blocks is None else blocks)

    def write(self, blocks: Sequence[int], value: int) -> None:
        self._blocks.write(blocks, np.full((len(blocks), self.pool.block_bytes), value, np.uint8))

    def drain(self) -> None:
        """Sort what the transport reports."""
        for event in self.transport.drain():
            self.poster.handle(event)
            if isinstance(event, _core.TransferFinal):
                self.finals[event.id].append(event)
            elif isinstance(event, _core.TransferDrained):
                assert self.finals[event.id], "a transfer drained before it was final"
                self.drained[event.id] += 1
            elif isinstance(event, _core.TransferGranted):
                self.granted[event.id] += 1
            elif isinstance(event, _core.TransferProgress):
                assert event.done >= self.done.get(event.id, 0), "progress went back"
                self.done[event.id] = event.done
            elif isinstance(event, _core.GrantEnded):
                self.ended[event.id].append(GrantState(int(event.state)))
            elif isinstance(event, _core.NotifReceived):
                self.received.append((event.seq, event.payload))
                self.on_received(event.payload)
            elif isinstance(event, _core.OfferEnded):
                self.offers.append(event)
            elif isinstance(event, _core.NotifDelivered):
                self.delivered.append(event.seq)
            elif isinstance(event, _core.NotifFailed):
                self.undelivered.append(event.seq)
            elif isinstance(event, _core.CoreFailed):
                raise AssertionError(f"the core of {self.ref} failed: {event.text}")

    def outcome(self, transfer_id: TransferId) -> str:
        """``committed``, the error's code, or ``""`` while the transfer has not ended."""
        finals = self.finals.get(transfer_id.raw)
        if not finals:
            return ""
        is_committed = TransferState(int(finals[0].state)) is TransferState.COMMITTED
        return "committed" if is_committed else finals[0].code.name


class LaneMaker(Protocol):
    """Makes transports of one lane, and waits for them."""

    @property
    def lane(self) -> Lane: ...

    def open(self, agent_id: str, config: AgentConfig) -> Transport:
        """A fresh incarnation of that name."""
        ...

    def wait(self, parties: Sequence[LaneParty], until: Callable[[], bool], within_s: float) -> bool:
        """Let things happen and drain the parties until ``until()`` holds; False if it does not ``within_s``."""
        ...

    def cut(self, one: LaneParty, other: LaneParty) -> None:
        """Break every connection between the two; both are told, and may connect again."""
        ...

    def close(self) -> None: ...


_numbers = itertools.count(1)


class MemoryLaneMaker:
    """The ``memory`` lane, on virtual time; slow enough that checks which race a read meet it in every phase."""

    lane = Lane.MEMORY

    def __init__(self) -> None:
        self.network = MemoryNetwork(seed=1, latency_ns=150_000)
        self._boots = itertools.count(1)

    def open(self, agent_id: str, config: AgentConfig) -> Transport:
        number = next(self._boots)
        ref = AgentRef(agent_id, Incarnation(number, number.to_bytes(16, "big")))
        return MemoryBinding(self.network).open(ref, config)

    def wait(self, parties: Sequence[LaneParty], until: Callable[[], bool], within_s: float) -> bool:
        limit_ns = self.network.now_ns + round(within_s * NS_PER_S)
        while True:
            for party in parties:
                party.drain()
            if until():
                return True
            if self.network.next_ns() > limit_ns:
                self.network.advance(max(limit_ns - self.network.now_ns, 0) / NS_PER_S)
                return until()
            self.network.step()

    def cut(self, one: LaneParty, other: LaneParty) -> None:
        self.network.cut(one.ref, other.ref)

    def close(self) -> None:
        """Nothing outlives the network."""


class NativeLaneMaker:
    """A lane of the native core, on this host and in real time."""

    def __init__(
        self,
        lane: Lane,
        progress: ProgressMode = ProgressMode.THREAD,
        encrypt: EncryptMode = EncryptMode.AUTO,
    ) -> None:
        self._lane = lane
        self._progress = progress
        self._encrypt = encrypt

    @property
    def lane(self) -> Lane:
        return self._lane

    def open(self, agent_id: str, config: AgentConfig) -> Transport:
        ref = AgentRef(agent_id, Incarnation(next(_numbers), secrets.token_bytes(16)))
        config = dataclasses.replace(config, lanes=(self._lane,), progress=self._progress, encrypt=self._encrypt)
        return NativeBinding(config).open(ref, config)

    def wait(self, parties: Sequence[LaneParty], until: Callable[[], bool], within_s: float) -> bool:
        end_s = time.monotonic() + within_s
        poller = select.poll()
        for party in parties:
            poller.register(party.transport.fileno(), select.POLLIN)
        while True:
            for party in parties:
                party.drain()
            if until():
                return True
            if time.monotonic() >= end_s:
                return False
            poller.poll(5)

    def cut(self, one: LaneParty, other: LaneParty) -> None:
        """Shut down whatever sockets of this process are connected to where one of the two listens."""
        addresses = [party.transport.address for party in (one, other)]
        ours = {address.unix_path for address in addresses} | {address.tcp_port for address in addresses}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as connected:
                        ends = (connected.getsockname(), connected.getpeername())
                        if ours.intersection(end[1] if isinstance(end, tuple) else end for end in ends):
                            connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Every transport holds its own sockets."""


def make_party(
    maker: LaneMaker,
    agent_id: str,
    layout: PoolLayout,
    config: AgentConfig | None = None,
    record: CompatibilityRecord = RECORD,
    *,
    has_checksums: bool = False,
) -> LaneParty:
    """A party on a fresh incarnation, in memory that the lane can use; ``has_checksums``: its blocks go with
    checksums."""
    transport = maker.open(agent_id, config or AgentConfig())
    return LaneParty(
        transport, layout, allocate_region(layout.length_bytes), record, config, has_checksums=has_checksums
    )


def introduce(
    one: LaneParty, other: LaneParty, *, key: bytes = bytes(range(32)), other_key: bytes | None = None
) -> None:
    """Make two incarnations known to each other."""
    one.transport.set_peer(other.ref, other.transport.address, key)
    other.transport.set_peer(one.ref, one.transport.address, other_key or key)


def fresh_id() -> TransferId:
    return TransferId(secrets.token_bytes(16))
