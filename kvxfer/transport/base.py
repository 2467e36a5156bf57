"""The interface between an agent and its transport: the calls of a transport, and its events.

It decides that interface and nothing else; it must never know sockets, asyncio or a coordinator. A transport owns the
machines of one agent (sessions, grants, transfers, notifications) and performs their effects. It is thread-safe; its
calls return at once, and later results come out of :meth:`Transport.drain` as the machines' own events, in order. A
program waits for them in :meth:`Transport.wait`, or for :meth:`Transport.fileno` to become readable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer._native import _core
from kvxfer.clock import NS_PER_S
from kvxfer.config import AgentConfig
from kvxfer.errors import InvalidArgumentError, LaneUnavailableError, LimitExceededError
from kvxfer.transport.counts import WireCounts
from kvxfer.transport.private_memory import allocate_private
from kvxfer.types import (
    AgentRef,
    DataAddress,
    GrantState,
    Incarnation,
    Lane,
    MemoryKind,
    PoolRecord,
    RegionRecord,
    Segment,
    TransferId,
    TransferState,
    check_kind,
)

Blocks: TypeAlias = npt.NDArray[np.uint32]

NO_CONTENT_DIGEST = bytes(32)
"""The content digest that means: not given."""

Event: TypeAlias = (
    _core.GrantEnded
    | _core.TransferProgress
    | _core.TransferFinal
    | _core.TransferGranted
    | _core.TransferDrained
    | _core.OfferEnded
    | _core.NotifReceived
    | _core.NotifDelivered
    | _core.NotifFailed
    | _core.SessionUp
    | _core.SessionRefused
    | _core.CoreFailed
)
"""What :meth:`Transport.drain` returns. Ids of transfers are ``bytes`` of 16; :func:`read_ref` reads agents.

CoreFailed is the last event of a transport: every later call raises, and nothing moves any more.
"""

DURATION_MAX_S = 86400.0 * 365

ADDRESS_END = 1 << 63
"""No process has memory at this address or above it."""

SEGMENTS_MAX = 4096
"""Segments of one pool; what one MAP frame can carry."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of the host's or of a device's memory, and the object that keeps it alive. Raises InvalidArgumentError for
    a place where no process has memory."""

    address: int
    length_bytes: int
    owner: object = dataclasses.field(repr=False)
    """Held as long as the region: the tensor, array or mapping that the address belongs to."""
    shared: _core.Region | None = None
    """The memory file behind it, if kvxfer allocated it so that readers may map it."""
    is_allocated: bool = dataclasses.field(default=False, kw_only=True)
    """Whether kvxfer made the memory; ``owner`` is a uint8 array over it then."""
    memory: MemoryKind = MemoryKind.HOST
    device: int = 0
    """The number of the device, as this process numbers them."""

    def __post_init__(self) -> None:
        check_kind("address", self.address, int)
        check_kind("length_bytes", self.length_bytes, int)
        if min(self.address, self.length_bytes) < 0 or self.address + self.length_bytes > ADDRESS_END:
            raise InvalidArgumentError(
                f"memory of {self.length_bytes} bytes at {self.address:#x} is no memory of a process"
            )


class PostOrder(NamedTuple):
    """The fixed arguments of all transfers of one part of a post."""

    peer: AgentRef
    local: _core.Elements
    remote: _core.Elements
    lanes: Sequence[Lane]
    """Allowed, best first."""


class StartPost(Protocol):
    """Starts one transfer of a :class:`PostOrder`. TransferFinal and TransferDrained follow."""

    def __call__(self, identity: bytes, timeout_ns: int, notification: bytes | None, wants_checksums: bool, /) -> None:
        """``identity``: the 16 bytes of a :class:`~kvxfer.types.TransferId`; ``timeout_ns``: from now, see
        :func:`as_nanoseconds`. ``notification`` goes to the peer once the bytes are committed; ``wants_checksums``:
        they go with CRC-32Cs.

        Raises InvalidArgumentError (lists that do not match, a local element outside its region), LimitExceededError,
        PeerGoneError, LaneUnavailableError, ClosedError.
        """
        ...


class Transport(Protocol):
    """The machines of one incarnation of one agent, with a wire under them. All methods may be called from any thread.

    After :meth:`close` every call raises ClosedError, except :meth:`close` itself, :meth:`drain` and :meth:`fileno`.
    """

    @property
    def ref(self) -> AgentRef: ...
    @property
    def address(self) -> DataAddress:
        """Where peers reach this transport."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while events wait; valid until :meth:`close`."""
        ...

    def drain(self) -> list[Event]:
        """The events since the last call, oldest first; of a transfer's progress perhaps only the newest."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Sleep until :meth:`drain` has more to give than progress, at most so long; whether it has anything. Another
        thread may have taken it by then. A signal may end it early."""
        ...

    def add_pool(
        self, pool: PoolRecord, region: Region, segments: Sequence[Segment], *, has_checksums: bool = False
    ) -> None:
        """Register memory. The segments' lengths add up to ``block_bytes``. ``has_checksums``: blocks read from it
        always go with CRC-32Cs. Raises InvalidArgumentError."""
        ...

    def describe_pool(self, pool: PoolRecord) -> None:
        """Have another record for a pool that is known: later pulls are judged by that. Raises InvalidArgumentError."""
        ...

    def remove_pool(self, pool_id: int) -> None:
        """Forget a pool. Raises BlocksBusyError while anything of it is granted, reserved or quarantined."""
        ...

    def add_region(self, record: RegionRecord, region: Region) -> None:
        """Register memory that proven peers may read and write at any time, as far as ``record`` says, until it is
        removed: an open-ended grant and offer. Raises InvalidArgumentError (an id that is or was in use).
        """
        ...

    def remove_region(self, region_id: int) -> None:
        """End it: reads by peers are revoked, writes by peers cancelled; once this returned no byte lands there.

        Raises BlocksBusyError, and may be called again, while an own read or a peer's write may still fill it.
        """
        ...

    def admit(self, admission: _core.PeerAdmission) -> None:
        """Accept unregistered peers that prove what ``admission`` says. SessionUp names such a peer. Unless
        :meth:`set_peer` registers it, it is forgotten when it has no session and no transfer in progress. Raises
        InvalidArgumentError if an admission of another kind was set before."""
        ...

    def is_connected(self, ref: AgentRef) -> bool:
        """Whether a session with exactly this incarnation is up."""
        ...

    def set_peer(self, ref: AgentRef, address: DataAddress, key: bytes) -> None:
        """Make one incarnation of a peer known, or its address new. ``key``: the pair's 32 bytes."""
        ...

    def peer_dead(self, ref: AgentRef) -> None:
        """The known death of exactly this incarnation: its grants and transfers end, it is forgotten."""
        ...

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
        """Promise ``blocks`` to the agent ``reader`` (empty: the first to ask).

        ``content_digest``: 32 bytes over the content of the blocks; a reader with another digest is refused.

        Raises InvalidArgumentError, BlocksBusyError, LimitExceededError, GrantReleasedError (the reader
        aborted before).
        """
        ...

    def ready(self, transfer_id: TransferId, blocks: int, *, layers: int, complete: bool) -> None:
        """Announce the first ``blocks`` blocks of a grant. Raises GrantGoneError's kinds and InvalidArgumentError."""
        ...

    def expect(self, transfer_id: TransferId, *, reader: str) -> None:
        """The engine here accepted the prompt of this id, for the agent ``reader`` (empty: the first to ask): pulls
        that come before its grant get QUEUED. Ends by :meth:`grant` or :meth:`abort_grant`.

        Raises InvalidArgumentError (an id used before), LimitExceededError, GrantReleasedError (the reader
        aborted before).
        """
        ...

    def pulse(self, *, has_work: bool, took_in: bool = True) -> None:
        """A heartbeat of the engine here, which is about to step, or has nothing to do. ``took_in``: it has taken
        in all requests that had reached it by its last such pulse."""
        ...

    def has_begun(self, transfer_id: TransferId) -> bool:
        """Whether the reader of that grant has asked for blocks of it; False for an unknown one."""
        ...

    def abort_grant(self, transfer_id: TransferId) -> None:
        """The grant will never be made: readers that wait for it, or ask later, get GrantRevokedError. Raises
        InvalidArgumentError."""
        ...

    def revoke_grant(self, transfer_id: TransferId, why: str = "") -> GrantState:
        """End a grant; once this returns the blocks may be overwritten. Its reader gets ``why``, cut to 512 bytes.
        Returns the state it ended in.

        Raises GrantUnknownError.
        """
        ...

    def release_grant(self, transfer_id: TransferId) -> GrantState:
        """End a grant that is no longer needed; otherwise as :meth:`revoke_grant`."""
        ...

    def bind_grant(self, transfer_id: TransferId, reader: str) -> str:
        """Let only the agent ``reader`` read it from now on (empty: leave it open), unless another was named, or came
        first. Returns the only agent that may read it; empty: none yet, or never. Raises GrantUnknownError.
        """
        ...

    def grant_state(self, transfer_id: TransferId) -> GrantState | None:
        """The state judged now, or ``None`` for an id that was never granted here or is long forgotten."""
        ...

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
        """Start to fill ``blocks`` from the grant's positions ``first...``; the transport owns them until
        TransferDrained. ``content_digest`` as in :meth:`grant`. ``wants_checksums``: CRC-32Cs are checked if the
        source has them.

        No blocks and a ``count``: ask whether the grant exists. TransferGranted answers (with ``tells_granted`` also
        for a pull that has blocks), and :meth:`reserve` gives it its blocks. ``deadline_s`` bounds everything; with
        ``granted_s`` it bounds the wait for the grant, and ``granted_s`` the transfer from the moment when it hears
        of its grant.

        Raises InvalidArgumentError, BlocksBusyError, LimitExceededError, PeerGoneError (that incarnation is not known).
        """
        ...

    def reserve(self, transfer_id: TransferId, blocks: Blocks, *, first: int) -> None:
        """Give blocks to a pull that has none, for the grant's positions ``first...``. Raises InvalidArgumentError
        if it has ended or has blocks, BlocksBusyError."""
        ...

    def unreserve(self, transfer_id: TransferId) -> bool:
        """Take back the blocks of a pull whose grant is not known to exist: it waits on without them. False, and
        nothing changed: they are in use, or it has ended."""
        ...

    def prepare_fetch(self, order: PostOrder) -> StartPost:
        """Prepare reads of the peer's elements into ours, one by one of equal length. The start checks them."""
        ...

    def prepare_push(self, order: PostOrder) -> StartPost:
        """Prepare a push: the peer's core reads our elements into its own; otherwise as :meth:`prepare_fetch`.
        TransferDrained comes once no byte of our memory can be in transit any more.
        """
        ...

    def cancel(self, transfer_id: TransferId) -> None:
        """End a pull, a fetch or a push, unless it has ended; TransferFinal and TransferDrained follow."""
        ...

    def abort_pull(self, transfer_id: TransferId, source: AgentRef) -> None:
        """Let ``source`` know, if it can be reached, that this id will never be pulled. Raises InvalidArgumentError."""
        ...

    def transfer_state(self, transfer_id: TransferId) -> TransferState | None:
        """The state now, or ``None`` for an id that was never pulled here or is long forgotten."""
        ...

    def notify(self, to: AgentRef, payload: bytes) -> int:
        """Send a small message; returns its number. Raises PeerGoneError, InvalidArgumentError, LimitExceededError."""
        ...

    def counts(self) -> _core.EndpointCounts:
        """The machines' current objects, and the grants and verdicts so far."""
        ...

    def wire_counts(self) -> WireCounts:
        """What the sockets carry, and what was wrong on them so far."""
        ...

    def close(self) -> None:
        """Hang up and end at once, without another event; after it returned no byte lands any more. Callable twice."""
        ...


class Binding(Protocol):
    """A transport with an address and no incarnation yet: the address is published first, and only then does the
    coordinator give the agent its incarnation. Peers that connect meanwhile wait.
    """

    @property
    def address(self) -> DataAddress: ...

    def open(self, ref: AgentRef, config: AgentConfig) -> Transport:
        """The transport of the incarnation ``ref`` at this address; takes the binding over."""
        ...

    def close(self) -> None:
        """Give the address back; nothing happens after :meth:`open`. Callable twice."""
        ...


def as_content_digest(content_digest: bytes | None) -> bytes:
    """A content digest of 32 bytes; ``None``: not given. Raises InvalidArgumentError for another length."""
    if content_digest is None:
        return NO_CONTENT_DIGEST
    if not isinstance(content_digest, bytes) or len(content_digest) != len(NO_CONTENT_DIGEST):
        raise InvalidArgumentError(f"content_digest must be {len(NO_CONTENT_DIGEST)} bytes")
    return content_digest


def as_nanoseconds(name: str, duration_s: float) -> int:
    """A duration in the machines' unit. Raises InvalidArgumentError for one that is no finite time."""
    if not abs(duration_s) <= DURATION_MAX_S:
        raise InvalidArgumentError(f"{name} must be at most {DURATION_MAX_S:g}, not {duration_s}")
    return round(duration_s * NS_PER_S)


def allocate_region(length_bytes: int) -> Region:
    """Zeroed memory, all of it resident, that readers on this host may map, and only this process can change.

    If the host forbids shared memory it is private: lane ``mapped`` cannot carry it, and a warning says so.
    ``owner`` is a uint8 array over it. Raises InvalidArgumentError, and LimitExceededError if the host has too
    little.
    """
    check_kind("length_bytes", length_bytes, int)
    if length_bytes < 1:
        raise InvalidArgumentError(f"length_bytes must be at least 1, not {length_bytes}")
    if length_bytes >= ADDRESS_END:
        raise LimitExceededError(f"cannot map {length_bytes} bytes: no process has so many")
    try:
        shared = _core.Region(length_bytes)
    except LaneUnavailableError as error:
        array = allocate_private(length_bytes, error)
        return Region(int(array.__array_interface__["data"][0]), length_bytes, array, is_allocated=True)
    array = np.frombuffer(shared, dtype=np.uint8)  # type: ignore[call-overload]
    return Region(shared.address, shared.nbytes, array, shared, is_allocated=True)


def check_segments(segments: Sequence[Segment], *, block_count: int, block_bytes: int, length_bytes: int) -> None:
    """Raise InvalidArgumentError unless the segments make up blocks of ``block_bytes`` and lie inside
    ``length_bytes``."""
    if not 1 <= len(segments) <= SEGMENTS_MAX:
        raise InvalidArgumentError(f"a pool has 1 to SEGMENTS_MAX={SEGMENTS_MAX} segments, not {len(segments)}")
    total = sum(segment.length_bytes for segment in segments)
    if total != block_bytes:
        raise InvalidArgumentError(f"the segments of a block add up to {total} bytes, not block_bytes={block_bytes}")
    for segment in segments:
        end = segment.offset_bytes + (block_count - 1) * segment.stride_bytes + segment.length_bytes
        if end > length_bytes:
            raise InvalidArgumentError(
                f"{segment} with {block_count} blocks ends at byte {end}, outside memory of {length_bytes} bytes"
            )


def as_blocks(blocks: npt.ArrayLike, name: str = "blocks") -> Blocks:
    """Block indices as a contiguous uint32 array of one dimension; raises InvalidArgumentError for anything else."""
    try:
        array = np.asarray(blocks)
    except ValueError as error:
        raise InvalidArgumentError(f"{name} must be a list of indices: {error}") from None
    if array.ndim != 1 or array.size == 0:
        raise InvalidArgumentError(f"{name} must be a non-empty list of indices, not of shape {array.shape}")
    if array.dtype != np.uint32:
        if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() > 0xFFFFFFFF:
            raise InvalidArgumentError(f"block indices must be integers of 0 to {0xFFFFFFFF}")
        array = array.astype(np.uint32)
    return np.ascontiguousarray(array)


def write_ref(ref: AgentRef) -> _core.AgentRef:
    """The machines' own name of an incarnation."""
    return _core.AgentRef(ref.agent_id, ref.incarnation.number, ref.incarnation.boot_nonce)


def read_ref(ref: _core.AgentRef) -> AgentRef:
    return AgentRef(ref.agent_id, Incarnation(ref.number, ref.boot_nonce))


LANES: dict[Lane, _core.Lane] = {
    Lane.MAPPED: _core.Lane.MAPPED,
    Lane.STREAM: _core.Lane.STREAM,
    Lane.MEMORY: _core.Lane.MEMORY,
    Lane.CMA: _core.Lane.CMA,
    Lane.UCX: _core.Lane.UCX,
    Lane.UNIX: _core.Lane.UNIX,
}
LANES_BACK: dict[_core.Lane, Lane] = {native: lane for lane, native in LANES.items()}
STATES: dict[_core.TransferState, TransferState] = {
    native: TransferState(int(native)) for native in _core.TransferState
}


def limits_from(config: AgentConfig, lanes: Sequence[Lane]) -> _core.EndpointLimits:
    """An agent's settings as the machines take them; ``lanes`` are those that it serves and uses."""
    limits = _core.EndpointLimits()
    grants, transfers = limits.grants, limits.transfers
    grants.grants_max = grants.tombstones_max = config.grants_max
    grants.waiting_max = config.pull_wait_count_max
    grants.ttl_ns = round(config.grant_ttl_s * NS_PER_S)
    grants.lifetime_max_ns = round(config.grant_lifetime_max_s * NS_PER_S)
    grants.wait_max_ns = round(config.grant_wait_s * NS_PER_S)
    grants.unknown_wait_ns = round(config.unknown_wait_s * NS_PER_S)
    transfers.ttl_ns = grants.ttl_ns
    transfers.engine_silent_ns = round(config.engine_silent_s * NS_PER_S)
    transfers.stall_ns = round(config.stall_s * NS_PER_S)
    transfers.reconnect_ns = round(config.reconnect_s * NS_PER_S)
    limits.grants, limits.transfers = grants, transfers
    limits.transfers_max = limits.finished_max = config.transfers_max
    limits.stripes = config.stripes
    limits.lanes = sum(1 << int(LANES[lane].value) for lane in set(lanes))
    limits.notifications_max = config.notifications_max
    limits.notification_bytes_max = config.notification_bytes_max
    limits.notification_queue_bytes_max = config.notification_queue_bytes_max
    limits.refusals_max = config.refusals_max
    return limits
