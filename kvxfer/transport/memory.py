"""The deterministic lane: the transport of agents of one process, over a :class:`MemoryNetwork`. Bytes are really
copied between the registered buffers, by the same machines that production runs; no socket, thread or clock is needed.

It decides how the machines' effects become actions of the network; it must never judge a grant or a transfer.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import select
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from kvxfer._native import _core
from kvxfer.config import AgentConfig, allowed_lanes
from kvxfer.errors import BlocksBusyError, ClosedError, KvxferError
from kvxfer.transport.base import (
    LANES,
    NO_CONTENT_DIGEST,
    Blocks,
    Event,
    PostOrder,
    Region,
    StartPost,
    as_nanoseconds,
    limits_from,
    read_ref,
    write_ref,
)
from kvxfer.transport.counts import WireCounts
from kvxfer.transport.memory_bytes import BlockMemory, Memories, RegionMemory
from kvxfer.transport.network import MemoryNetwork, Passage
from kvxfer.types import (
    AgentRef,
    DataAddress,
    GrantState,
    Lane,
    PoolRecord,
    RegionRecord,
    Segment,
    TransferId,
    TransferState,
)

MEMORY = _core.SessionKind.MEMORY

_Effect: TypeAlias = """(
    Event | _core.Dial | _core.Hangup | _core.SendFrame | _core.SendMap | _core.SendData
    | _core.ReadBlocks | _core.StopRead
)"""


@dataclasses.dataclass
class _Link:
    """One end of a connection."""

    peer: MemoryTransport
    peer_session: int
    decoder: _core.Decoder


@dataclasses.dataclass(frozen=True)
class MemoryBinding:
    """A :class:`~kvxfer.transport.base.Binding` in a MemoryNetwork."""

    network: MemoryNetwork

    @property
    def address(self) -> DataAddress:
        return DataAddress("", 0, "", self.network.name, (Lane.MEMORY,))

    def open(self, ref: AgentRef, config: AgentConfig) -> MemoryTransport:
        return MemoryTransport(self.network, ref, config)

    def close(self) -> None:
        """Nothing is held before :meth:`open`."""


class MemoryTransport:
    """A :class:`~kvxfer.transport.base.Transport` in a MemoryNetwork."""

    def __init__(
        self, network: MemoryNetwork, ref: AgentRef, config: AgentConfig, limits: _core.EndpointLimits | None = None
    ) -> None:
        """``limits`` stands in for those that follow from ``config``."""
        lanes = allowed_lanes((Lane.MEMORY,), os.environ)
        self.endpoint = _core.Endpoint(write_ref(ref), limits or limits_from(config, lanes))
        self.links: dict[int, _Link] = {}
        self._network = network
        self._ref = ref
        self._memories = Memories()
        self._events: collections.deque[Event] = collections.deque()
        self._eventfd: int | None = None
        self._is_closed = False
        with network.lock:
            network.join(self)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self.links)} sessions"
        return f"<MemoryTransport {self._ref} in {self._network.name}, {state}>"

    @property
    def ref(self) -> AgentRef:
        return self._ref

    @property
    def address(self) -> DataAddress:
        return MemoryBinding(self._network).address

    def fileno(self) -> int:
        with self._network.lock:
            if self._eventfd is None:
                self._check_open()
                self._eventfd = os.eventfd(int(bool(self._events)), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return self._eventfd

    def drain(self) -> list[Event]:
        with self._network.lock:
            events = list(self._events)
            self._events.clear()
            if self._eventfd is not None and events:
                os.eventfd_read(self._eventfd)
            return events

    def wait(self, timeout_s: float) -> bool:
        return bool(select.select([self.fileno()], [], [], max(0.0, timeout_s))[0])

    def add_pool(
        self, pool: PoolRecord, region: Region, segments: Sequence[Segment], *, has_checksums: bool = False
    ) -> None:
        with self._open() as endpoint:
            memory = BlockMemory(pool, region, segments)
            endpoint.add_pool(
                _core.PoolInfo(
                    pool.pool_id, pool.block_count, pool.block_bytes, pool.record.digest(), False, False, has_checksums
                ),
                region.address,
                [(part.offset_bytes, part.stride_bytes, part.length_bytes) for part in segments],
            )
            self._memories.pools[pool.pool_id] = memory

    def describe_pool(self, pool: PoolRecord) -> None:
        with self._open() as endpoint:
            endpoint.set_digest(pool.pool_id, pool.record.digest())

    def remove_pool(self, pool_id: int) -> None:
        with self._open() as endpoint:
            endpoint.remove_pool(pool_id)
            del self._memories.pools[pool_id]

    def add_region(self, record: RegionRecord, region: Region) -> None:
        with self._open() as endpoint:
            memory = RegionMemory(region, record.can_read)
            info = _core.RegionInfo(
                record.region_id, record.length_bytes, record.can_read, record.can_write, False, True
            )
            endpoint.add_region(info, region.address)
            self._memories.regions[record.region_id] = memory

    def remove_region(self, region_id: int) -> None:
        with self._open() as endpoint:
            is_gone, effects = endpoint.remove_region(region_id, self._network.now_ns)
            self.perform(effects)
            if not is_gone:
                raise BlocksBusyError(f"region {region_id} may still be written to: a transfer into it has not drained")
            del self._memories.regions[region_id]

    def admit(self, admission: _core.PeerAdmission) -> None:
        with self._open() as endpoint:
            endpoint.admit(admission)

    def is_connected(self, ref: AgentRef) -> bool:
        with self._open() as endpoint:
            return endpoint.is_connected(write_ref(ref))

    def set_peer(self, ref: AgentRef, address: DataAddress, key: bytes) -> None:
        with self._open() as endpoint:
            endpoint.set_peer(write_ref(ref), key, MEMORY)

    def peer_dead(self, ref: AgentRef) -> None:
        with self._open() as endpoint:
            self.perform(endpoint.peer_dead(write_ref(ref), self._network.now_ns))

    def grant(
        self,
        transfer_id: TransferId,
        pool_id: int,
        blocks: Blocks,
        *,
        reader: str,
        ttl_s: float,
        ready_blocks: int,
        content_digest: bytes = NO_CONTENT_DIGEST,
    ) -> None:
        what = (transfer_id.raw, pool_id, blocks.tolist(), reader, as_nanoseconds("ttl_s", ttl_s), ready_blocks)
        with self._open() as endpoint:
            self.perform(endpoint.grant(*what, self._network.now_ns, content_digest))

    def expect(self, transfer_id: TransferId, *, reader: str) -> None:
        with self._open() as endpoint:
            endpoint.expect(transfer_id.raw, reader)

    def pulse(self, *, has_work: bool, took_in: bool = True) -> None:
        with self._open() as endpoint:
            endpoint.pulse(has_work, took_in, self._network.now_ns)

    def has_begun(self, transfer_id: TransferId) -> bool:
        with self._open() as endpoint:
            return endpoint.has_begun(transfer_id.raw)

    def abort_grant(self, transfer_id: TransferId) -> None:
        with self._open() as endpoint:
            self.perform(endpoint.abort_grant(transfer_id.raw))

    def ready(self, transfer_id: TransferId, blocks: int, *, layers: int, complete: bool) -> None:
        with self._open() as endpoint:
            pool_id, fresh = endpoint.becoming_ready(transfer_id.raw, blocks)
            checksums = (
                [_core.crc32c(row.tobytes()) for row in self._memories.pools[pool_id].read(fresh)] if fresh else []
            )
            self.perform(endpoint.ready(transfer_id.raw, blocks, layers, complete, self._network.now_ns, checksums))

    def revoke_grant(self, transfer_id: TransferId, why: str = "") -> GrantState:
        return self._end_grant(transfer_id, _core.GrantEvent.REVOKE, why)

    def release_grant(self, transfer_id: TransferId) -> GrantState:
        return self._end_grant(transfer_id, _core.GrantEvent.RELEASE)

    def bind_grant(self, transfer_id: TransferId, reader: str) -> str:
        with self._open() as endpoint:
            return endpoint.bind_grant(transfer_id.raw, reader, self._network.now_ns)

    def grant_state(self, transfer_id: TransferId) -> GrantState | None:
        with self._open() as endpoint:
            state = endpoint.grant_state(transfer_id.raw, self._network.now_ns)
            return None if state is None else GrantState(int(state))

    def pull(
        self,
        transfer_id: TransferId,
        source: AgentRef,
        pool_id: int,
        blocks: Blocks,
        *,
        first: int,
        lanes: Sequence[Lane],
        deadline_s: float,
        granted_s: float = 0.0,
        tells_granted: bool = False,
        count: int = 0,
        content_digest: bytes = NO_CONTENT_DIGEST,
        wants_checksums: bool = False,
    ) -> None:
        with self._open() as endpoint:
            now_ns = self._network.now_ns
            self.perform(
                endpoint.pull(
                    transfer_id.raw,
                    write_ref(source),
                    pool_id,
                    blocks.tolist(),
                    first,
                    [LANES[lane] for lane in lanes],
                    now_ns + as_nanoseconds("deadline_s", deadline_s),
                    self._network.random.getrandbits(64),
                    now_ns,
                    content_digest,
                    wants_checksums,
                    count,
                    as_nanoseconds("granted_s", granted_s),
                    tells_granted,
                )
            )

    def reserve(self, transfer_id: TransferId, blocks: Blocks, *, first: int) -> None:
        with self._open() as endpoint:
            self.perform(endpoint.reserve(transfer_id.raw, blocks.tolist(), first, self._network.now_ns))

    def unreserve(self, transfer_id: TransferId) -> bool:
        with self._open() as endpoint:
            is_done, effects = endpoint.unreserve(transfer_id.raw, self._network.now_ns)
            self.perform(effects)
        return is_done

    def prepare_fetch(self, order: PostOrder) -> StartPost:
        return functools.partial(self._post, _core.Endpoint.fetch, order)

    def prepare_push(self, order: PostOrder) -> StartPost:
        return functools.partial(self._post, _core.Endpoint.push, order)

    def _post(
        self,
        start: Callable[..., Sequence[_Effect]],
        order: PostOrder,
        identity: bytes,
        timeout_ns: int,
        notification: bytes | None,
        wants_checksums: bool,
    ) -> None:
        local, remote, lanes = order.local, order.remote, [LANES[lane] for lane in order.lanes]
        elements = (local.ranges, local.ids.tolist(), remote.ranges, remote.ids.tolist())
        with self._open() as endpoint:
            now_ns = self._network.now_ns
            when = (now_ns + timeout_ns, self._network.random.getrandbits(64), now_ns)
            self.perform(
                start(endpoint, identity, write_ref(order.peer), *elements, lanes, *when, notification, wants_checksums)
            )

    def abort_pull(self, transfer_id: TransferId, source: AgentRef) -> None:
        with self._open() as endpoint:
            self.perform(endpoint.abort_pull(transfer_id.raw, write_ref(source), self._network.now_ns))

    def cancel(self, transfer_id: TransferId) -> None:
        with self._open() as endpoint:
            self.perform(endpoint.cancel(transfer_id.raw, self._network.now_ns))

    def transfer_state(self, transfer_id: TransferId) -> TransferState | None:
        with self._open() as endpoint:
            state = endpoint.transfer_state(transfer_id.raw)
            return None if state is None else TransferState(int(state))

    def notify(self, to: AgentRef, payload: bytes) -> int:
        with self._open() as endpoint:
            sequence, effects = endpoint.notify(write_ref(to), payload, self._network.now_ns)
            self.perform(effects)
            return int(sequence)

    def counts(self) -> _core.EndpointCounts:
        with self._open() as endpoint:
            return endpoint.counts()

    def wire_counts(self) -> WireCounts:
        return WireCounts()

    def close(self) -> None:
        with self._network.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._network.leave(self)
            for session in list(self.links):
                self.unlink(session)
            self._memories.clear()
            if self._eventfd is not None:
                os.close(self._eventfd)
                self._eventfd = None

    # --- for the network; the lock is held ---

    def tick(self) -> None:
        self.perform(self.endpoint.tick(self._network.now_ns))

    def next_deadline(self) -> int:
        return self.endpoint.next_deadline()

    def cut(self, other: AgentRef) -> None:
        for session, link in list(self.links.items()):
            if link.peer.ref == other:
                self.unlink(session)
                self.perform(self.endpoint.closed(session, self._network.now_ns))

    def unlink(self, session: int) -> None:
        """Forget one end of a connection here; the other end hears of it later."""
        link = self.links.pop(session, None)
        if link is not None:
            self._network.call_soon(lambda: link.peer.lose(link.peer_session))

    def lose(self, session: int) -> None:
        if not self._is_closed and self.links.pop(session, None) is not None:
            self.perform(self.endpoint.closed(session, self._network.now_ns))

    def perform(self, effects: Sequence[_Effect]) -> None:
        """Perform what the machines ask for, in order."""
        for effect in effects:
            if isinstance(effect, _core.SendFrame):
                self._send(effect.session, effect.frame)
            elif isinstance(effect, _core.ReadBlocks):
                self._start_read(effect)
            elif isinstance(effect, _core.Dial):
                self._start_dial(effect)
            elif isinstance(effect, _core.Hangup):
                self.unlink(effect.session)
            elif isinstance(effect, _core.StopRead):
                continue  # what arrives asks first whether it may land
            elif isinstance(effect, (_core.SendData, _core.SendMap)):
                raise KvxferError(f"the memory lane was asked for {type(effect).__name__}")
            else:
                self._events.append(effect)
                if self._eventfd is not None:
                    os.eventfd_write(self._eventfd, 1)

    def _end_grant(self, transfer_id: TransferId, event: _core.GrantEvent, why: str = "") -> GrantState:
        with self._open() as endpoint:
            state, effects = endpoint.end_grant(transfer_id.raw, event, self._network.now_ns, why)
            self.perform(effects)
            return GrantState(int(state))

    def _start_dial(self, effect: _core.Dial) -> None:
        peer, kind = effect.peer, effect.kind

        def fail(text: str = "the connection was lost") -> None:
            if not self._is_closed:
                now_ns = self._network.now_ns
                self.perform(self.endpoint.dial_failed(peer, kind, _core.Code.transport, text, now_ns))

        def arrive() -> None:
            if self._is_closed:
                return
            other = self._network.find(read_ref(peer))
            if kind != MEMORY or not isinstance(other, MemoryTransport):
                fail("that incarnation is not in this network" if kind == MEMORY else "a memory network has no sockets")
                return
            nonces = [self._network.random.randbytes(32) for _ in range(2)]
            mine, effects = self.endpoint.dialed(peer, kind, nonces[0], self._network.now_ns)
            theirs, their_effects = other.endpoint.accepted(kind, nonces[1], self._network.now_ns)
            self.links[mine] = _Link(other, theirs, _core.Decoder())
            other.links[theirs] = _Link(self, mine, _core.Decoder())
            self.perform(effects)
            other.perform(their_effects)

        passage = Passage(self._ref, read_ref(peer), "dial")
        self._network.call_soon(lambda: self._network.judge(passage, arrive, cut=fail, drop=fail))

    def _send(self, session: int, frame: Any) -> None:
        link = self.links.get(session)
        if link is None:
            return
        data = _core.encode(frame)
        passage = Passage(self._ref, link.peer.ref, _core.kind_name(frame))

        def cut() -> None:
            self.unlink(session)
            if not self._is_closed:
                self.perform(self.endpoint.closed(session, self._network.now_ns))

        self._network.call_soon(
            lambda: self._network.judge(passage, lambda: link.peer.receive(link.peer_session, data), cut=cut)
        )

    def receive(self, session: int, data: bytes) -> None:
        """Bytes of a frame came in."""
        link = self.links.get(session)
        if self._is_closed or link is None:
            return
        link.decoder.feed(data)
        frame = link.decoder.next()
        if frame is not None:
            self.perform(self.endpoint.on_frame(session, frame, self._network.now_ns))

    def _start_read(self, effect: _core.ReadBlocks) -> None:
        link = self.links.get(effect.session)
        reader, source = self._ref, link.peer.ref if link is not None else self._ref

        def stop(text: str = "the connection was lost", code: _core.Code = _core.Code.transport) -> None:
            if not self._is_closed:
                now_ns = self._network.now_ns
                self.perform(self.endpoint.read_stopped(effect.id, effect.token, code, text, now_ns))

        def arrive() -> None:
            if self._is_closed:
                return
            if not self.endpoint.is_landing(effect.id, effect.token):
                stop("the transfer is over")
                return
            data = link.peer.read(effect.source) if link is not None and effect.session in self.links else None
            if data is None:
                stop("the source's memory is gone")
                return
            if effect.checksums and list(effect.checksums) != [_core.crc32c(element) for element in data]:
                stop("a block has another checksum than its source said", _core.Code.checksum)
                return
            self._memories.write(effect.to, data)
            self.perform(self.endpoint.read_landed(effect.id, effect.token, self._network.now_ns))

        passage = Passage(source, reader, "read")
        self._network.call_soon(lambda: self._network.judge(passage, arrive, cut=stop, drop=stop))

    def read(self, extent: _core.Extent) -> list[bytes] | None:
        """What a reader sees of our memory, until this transport is closed."""
        return None if self._is_closed else self._memories.read(extent)

    @contextlib.contextmanager
    def _open(self) -> Iterator[_core.Endpoint]:
        """The machines, under the network's lock. Raises ClosedError."""
        with self._network.lock:
            self._check_open()
            try:
                yield self.endpoint
            finally:
                self._network.wake()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{self!r} was closed")
