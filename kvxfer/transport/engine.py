"""Registered memory, and reads and writes of it, from any thread and without an event loop. Decides which regions are
registered and how a plan is started; must never judge a grant or move a byte (the transport does), nor wait where the
caller only asked.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from kvxfer.config import AgentConfig
from kvxfer.errors import BlocksBusyError, InvalidArgumentError, KvxferError, TransportError
from kvxfer.policy.checksums import carries_checksums
from kvxfer.transport.base import Event, PostOrder, Region, StartPost, Transport, allocate_region, as_nanoseconds
from kvxfer.transport.batch import TransferBatch
from kvxfer.transport.descriptors import Descriptors, MemoryTable, Prepared, RemotePeer
from kvxfer.transport.host_memory import region_of
from kvxfer.transport.lane_choice import LaneChooser
from kvxfer.transport.plan import Op, Route, RouteKey, TransferPlan, make_plan
from kvxfer.transport.transfers import TransferTable
from kvxfer.types import ChecksumMode, Exposure, Lane, RegionRecord

__all__ = ["MemoryRegistration", "Op", "RemotePeer", "TransferBatch", "TransferEngine", "TransferPlan"]

TRANSFER_ID_BYTES = 16
REGION_ID_FIRST = 1 << 24
"""Region ids begin here, pool ids are lower: an id on the wire names one memory."""
ROUTES_MAX = 8
"""How many routes (lanes, checksums) a plan keeps."""


class MemoryRegistration:
    """One registered region: its record, to be given to peers, and its memory, which it keeps alive."""

    def __init__(self, record: RegionRecord, region: Region) -> None:
        self.record = record
        self.region = region

    def __repr__(self) -> str:
        record = self.record
        return f"<MemoryRegistration {record.region_id}: {record.length_bytes} bytes at {record.address:#x}>"


class TransferEngine:
    """The registered memory of one agent, and its batches of reads and writes. Thread-safe."""

    def __init__(
        self,
        transport: Transport,
        *,
        config: AgentConfig | None = None,
        lanes: LaneChooser | None = None,
        drain: Callable[[], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Without ``drain`` a poll takes the transport's events, and gives those of no transfer to ``on_event``, which
        must not block. With it, the owner takes them and gives each to :meth:`handle`, and a poll calls ``drain`` to
        have that done.
        """
        self.transport = transport
        self.config = config or AgentConfig()
        self.lanes = lanes or LaneChooser(transport.address, is_calibrated=self.config.calibrate)
        self.transfers = TransferTable(transport, drain=drain, on_event=on_event)
        self._lock = self.transfers.lock
        self._numbers = itertools.count(REGION_ID_FIRST)
        self._registrations: dict[int, MemoryRegistration] = {}
        self._table: MemoryTable | None = None

    def __repr__(self) -> str:
        return (
            f"<TransferEngine of {self.transport.ref}: {len(self._registrations)} regions, {len(self.batches)} batches>"
        )

    # --- memory ---

    def register(
        self, memory: Any, *, can_read: bool = True, can_write: bool = True, exposure: Exposure = Exposure.POOL
    ) -> MemoryRegistration:
        """Let proven peers read and write ``memory`` (see :func:`~kvxfer.transport.host_memory.region_of`; or a Region)
        until :meth:`deregister`, which keeps it alive.

        Raises InvalidArgumentError, LaneUnavailableError for memory of a device that cannot be used.
        """
        region = memory if isinstance(memory, Region) else region_of(memory)
        with self._lock:
            if self.transfers.failure is not None:
                raise self.transfers.failure
            record = RegionRecord(
                next(self._numbers),
                region.address,
                region.length_bytes,
                can_read=can_read,
                can_write=can_write,
                memory=region.memory,
                device=region.device,
                is_shareable=region.shared is not None and exposure is Exposure.POOL,
                exposure=exposure,
            )
            self.transport.add_region(record, region)
            registration = self._registrations[record.region_id] = MemoryRegistration(record, region)
            self._table = None
        return registration

    def allocate(self, length_bytes: int, *, can_read: bool = True, can_write: bool = True) -> MemoryRegistration:
        """Register zeroed memory made by kvxfer, which readers on this host can map; ``region.owner`` is a uint8 array
        over it. Raises LimitExceededError if the host has too little."""
        return self.register(allocate_region(length_bytes), can_read=can_read, can_write=can_write)

    def deregister(self, registration: MemoryRegistration) -> None:
        """Remove a region; once this returns no peer reads or writes a byte of it any more.

        Raises BlocksBusyError while a batch of ours uses it or a peer's write into it has not drained (that is being
        cancelled: try again); InvalidArgumentError for a region that is not registered here.
        """
        region_id = registration.record.region_id
        with self._lock:
            if self._registrations.get(region_id) is not registration:
                raise InvalidArgumentError(f"{registration!r} is not registered here")
            busy = next((batch for batch in self.batches if region_id in batch.plan.local.regions), None)
            if busy is not None:
                raise BlocksBusyError(f"{registration!r} is used by {busy!r}")
            self.transport.remove_region(region_id)
            del self._registrations[region_id]
            self._table = None

    def records(self) -> tuple[RegionRecord, ...]:
        """What peers need to know to read and write here."""
        with self._lock:
            return tuple(registration.record for registration in self._registrations.values())

    # --- reads and writes ---

    def prepare(self, descriptors: Any, *, peer: RemotePeer | None = None) -> Prepared:
        """Find descriptors (whatever :meth:`Descriptors.of` takes) in our registered memory, or in a peer's.

        Raises InvalidArgumentError, naming the first descriptor that lies in no region.
        """
        parsed = Descriptors.of(descriptors)
        if peer is not None:
            return peer.table.resolve(parsed, peer)
        with self._lock:
            table = self._table
            if table is None:
                table = self._table = MemoryTable(self.records())
        return table.resolve(parsed)

    def plan(
        self,
        op: Op,
        local: Prepared,
        local_ids: npt.ArrayLike | None,
        remote: Prepared,
        remote_ids: npt.ArrayLike | None,
    ) -> TransferPlan:
        """Check a batch and cut it, to be started once or many times. Raises InvalidArgumentError; see
        :func:`make_plan`."""
        return make_plan(op, local, local_ids, remote, remote_ids, shares=self.config.stripes)

    def start(
        self,
        plan: TransferPlan,
        *,
        lanes: Sequence[Lane] | None = None,
        notification: bytes | None = None,
        deadline_s: float | None = None,
        wants_checksums: bool | None = None,
        on_final: Callable[[TransferBatch], None] | None = None,
        on_drained: Callable[[TransferBatch], None] | None = None,
    ) -> TransferBatch:
        """Begin to move the bytes. ``lanes``: allowed, best first; ``wants_checksums``: whether all bytes go with
        CRC-32Cs, which excludes lanes that have none (not given: as configured). Until the batch drained, the
        transport owns the memory that it fills (a read) or reads (a write). The thread that handles the event makes the
        callbacks, in the order of the events, and must not block.

        Raises InvalidArgumentError, LimitExceededError, PeerGoneError, LaneUnavailableError (names each lane's
        obstacle).
        """
        begun_ns = time.monotonic_ns()
        route = self._route(plan, None if lanes is None else tuple(lanes), wants_checksums)
        order = self.lanes.order(plan.peer.ref, plan.peer.address, route.choice.lanes, plan.nbytes)
        starts = self._starts(plan, route, order.lanes)
        deadline_s = self.config.transfer_deadline_s if deadline_s is None else deadline_s
        timeout_ns = as_nanoseconds("deadline_s", deadline_s)
        is_near = self.lanes.is_near(plan.peer.address)
        ids = tuple(os.urandom(TRANSFER_ID_BYTES) for _ in plan.parts)
        are_checked = [carries_checksums(route.checksum, identity, is_same_host=is_near) for identity in ids]
        batch = TransferBatch(
            self.transfers,
            self.lanes,
            plan,
            ids,
            route.choice.reasons,
            order,
            notification=None if len(ids) == 1 else notification,
            has_asked_checksums=all(are_checked),
            begun_ns=begun_ns,
        )
        rides = notification if len(ids) == 1 else None
        try:
            with self._lock:
                if self.transfers.failure is not None:
                    raise self.transfers.failure
                for identity, start, is_checked in zip(ids, starts, are_checked, strict=True):
                    if batch.is_final:  # a signal handler polled, and found that one had failed
                        break
                    batch.enter(identity)
                    start(identity, timeout_ns, rides, is_checked)
                batch.started(on_final, on_drained)
        except BaseException as error:
            batch.abandon(error if isinstance(error, KvxferError) else TransportError(repr(error)))
            raise
        return batch

    def _starts(self, plan: TransferPlan, route: Route, lanes: tuple[Lane, ...]) -> tuple[StartPost, ...]:
        """One of each part, by these lanes."""
        found = route.starts.get(lanes)
        if found is None:
            prepare = self.transport.prepare_fetch if plan.op is Op.READ else self.transport.prepare_push
            orders = (PostOrder(plan.peer.ref, part.local, part.remote, lanes) for part in plan.parts)
            found = route.starts[lanes] = tuple(prepare(order) for order in orders)
        return found

    def _route(self, plan: TransferPlan, lanes: tuple[Lane, ...] | None, wants_checksums: bool | None) -> Route:
        """Found once for each key, and kept with the plan. Raises LaneUnavailableError."""
        key: RouteKey = (self.transport, lanes, wants_checksums)
        route = plan.routes.get(key)
        if route is None:
            route = self._find_route(plan, lanes, wants_checksums)
            if len(plan.routes) >= ROUTES_MAX:
                plan.routes.clear()
            plan.routes[key] = route
        return route

    def _find_route(self, plan: TransferPlan, lanes: tuple[Lane, ...] | None, wants_checksums: bool | None) -> Route:
        checksum = self.config.post_checksum
        if wants_checksums is not None:
            checksum = ChecksumMode.ON if wants_checksums else ChecksumMode.OFF
        choice = self.lanes.possible(
            plan.peer.ref,
            plan.peer.address,
            plan.local.traits,
            plan.remote.traits,
            self.config.lanes if lanes is None else lanes,
            is_read=plan.op is Op.READ,
            must_check=checksum == ChecksumMode.ON,
        )
        return Route(choice, checksum)

    def post(
        self,
        op: Op,
        local: Prepared,
        local_ids: npt.ArrayLike | None,
        remote: Prepared,
        remote_ids: npt.ArrayLike | None,
        **options: Any,
    ) -> TransferBatch:
        """:meth:`plan` and :meth:`start` in one."""
        return self.start(self.plan(op, local, local_ids, remote, remote_ids), **options)

    @property
    def batches(self) -> tuple[TransferBatch, ...]:
        """Those that have not drained."""
        return tuple(handle for handle in self.transfers.handles if isinstance(handle, TransferBatch))

    def poll(self) -> None:
        """See :meth:`TransferTable.poll`."""
        self.transfers.poll()

    def handle(self, event: Event) -> bool:
        """See :meth:`TransferTable.handle`."""
        return self.transfers.handle(event)
