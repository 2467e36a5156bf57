"""Reads and writes of registered memory, posted and polled: no event loop, any thread. Decides which events of a
transport belong to which post, and what the transfers that one post was cut into are together; must never judge a grant
or move a byte (the transport does), nor wait where the caller only asked.

A post is committed once every transfer of it is; the first that fails names its error, and the others are cancelled.
Its notification is told to the peer exactly once, after all of its bytes are committed: it goes with the transfer where
there is one, and is sent when the last has committed where there are several.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, starmap
from time import monotonic_ns
from typing import Any

import numpy.typing as npt

from kvxfer._native import _core
from kvxfer._native._core import TransferDrained, TransferFinal, TransferProgress
from kvxfer.config import AgentConfig
from kvxfer.errors import BlocksBusy, InvalidArgument, KvxferError, LaneUnavailable, TransportError
from kvxfer.policy.calibration import Order
from kvxfer.policy.lanes import checking_lanes, explain, is_same_host
from kvxfer.transport.base import Event, PostOrder, Region, StartPost, Transport, allocate_region, as_nanoseconds
from kvxfer.transport.calibrations import Calibrations
from kvxfer.transport.descriptors import Descriptors, MemoryTable, Prepared
from kvxfer.transport.host_memory import region_of
from kvxfer.transport.peer import RemotePeer
from kvxfer.transport.plan import Op, Plan, Route, make_plan
from kvxfer.transport.post import Post
from kvxfer.types import Exposure, Lane, RegionRecord, TransferId

__all__ = ["Op", "Plan", "Post", "Poster", "Registration", "RemotePeer"]

REGION_ID_FIRST = 1 << 24
"""Regions are numbered from here on, pools below: one name on the wire is one memory."""
ID_BYTES = 16
IDS = 64
"""Drawn at a time."""
ONCE = ((),)
"""The arguments of one call."""
ROUTES_MAX = 8
"""Ways of asking (lanes, checksums) for which a plan keeps how it is started."""
SAMPLE = 16
"""One transfer of so many is checked where checks are sampled."""


class Registration:
    """One registered region: its record, to be given to peers, and its memory, which is kept alive as long as it."""

    def __init__(self, record: RegionRecord, region: Region) -> None:
        self.record = record
        self.region = region

    def __repr__(self) -> str:
        return f"<Registration {self.record.region_id}: {self.record.length_bytes} bytes at {self.record.address:#x}>"


class Poster:
    """The registered memory of one agent, and its posts. Thread-safe."""

    def __init__(
        self,
        transport: Transport,
        *,
        config: AgentConfig | None = None,
        calibrations: Calibrations | None = None,
        drain: Callable[[], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Without ``drain`` the poster takes the transport's events itself whenever it is polled, and gives those that
        are not its own to ``on_event``, which must not block. With it, whoever takes the events gives each to
        :meth:`handle`, and ``drain`` is how a poll asks for that.
        """
        self.transport = transport
        self.config = config or AgentConfig()
        self.calibrations = calibrations or Calibrations(transport.address.host_id, is_used=self.config.calibrate)
        self._drain = drain
        self._on_event = on_event
        self._lock = threading.RLock()
        self._drain_lock = threading.RLock()
        self._numbers = itertools.count(REGION_ID_FIRST)
        self._registrations: dict[int, Registration] = {}
        self._table: MemoryTable | None = None
        self._posts: dict[bytes, Post] = {}
        self._ids: list[bytes] = []
        self._failure: KvxferError | None = None
        self._left: deque[Event] = deque()  # taken from the transport, and not by a post yet
        self._drained: dict[bytes, Post] = {}  # the last transfer that did

    def __repr__(self) -> str:
        return f"<Poster of {self.transport.ref}: {len(self._registrations)} regions, {len(self.posts)} posts>"

    # --- memory ---

    def register(
        self, memory: Any, *, can_read: bool = True, can_write: bool = True, exposure: Exposure = Exposure.POOL
    ) -> Registration:
        """Let proven peers read and write ``memory`` (see :func:`~kvxfer.transport.host_memory.region_of`; or a Region)
        until :meth:`deregister`. It is kept alive so long.

        Raises InvalidArgument, LaneUnavailable for memory of a device that cannot be used.
        """
        region = memory if isinstance(memory, Region) else region_of(memory)
        with self._lock:
            if self._failure is not None:
                raise self._failure
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
            registration = self._registrations[record.region_id] = Registration(record, region)
            self._table = None
        return registration

    def allocate(self, length_bytes: int, *, can_read: bool = True, can_write: bool = True) -> Registration:
        """Register zeroed memory made by kvxfer, which readers on this host can map; ``region.owner`` is a uint8 array
        over it. Raises LimitExceeded where the host has not so much."""
        return self.register(allocate_region(length_bytes), can_read=can_read, can_write=can_write)

    def deregister(self, registration: Registration) -> None:
        """Take a region back; once this returns no byte of it is read or written by a peer any more.

        Raises BlocksBusy while a post of ours uses it or a peer's write into it has not drained (its cancelling has
        begun: try again); InvalidArgument for a region that is not registered here.
        """
        region_id = registration.record.region_id
        with self._lock:
            if self._registrations.get(region_id) is not registration:
                raise InvalidArgument(f"{registration!r} is not registered here")
            busy = next((post for post in self.posts if region_id in post.plan.local.regions), None)
            if busy is not None:
                raise BlocksBusy(f"{registration!r} is used by {busy!r}")
            self.transport.remove_region(region_id)
            del self._registrations[region_id]
            self._table = None

    def records(self) -> tuple[RegionRecord, ...]:
        """What peers need to know to read and write here."""
        with self._lock:
            return tuple(registration.record for registration in self._registrations.values())

    # --- posts ---

    def prepare(self, descriptors: Any, *, peer: RemotePeer | None = None) -> Prepared:
        """Find descriptors (whatever :meth:`Descriptors.of` takes) in our registered memory, or in a peer's.

        Raises InvalidArgument, naming the first descriptor that lies in no region.
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
    ) -> Plan:
        """Check a post and cut it, to be started once or many times. Raises InvalidArgument; see :func:`make_plan`."""
        return make_plan(op, local, local_ids, remote, remote_ids, shares=self.config.stripes)

    def start(
        self,
        plan: Plan,
        *,
        lanes: Sequence[Lane] | None = None,
        notification: bytes | None = None,
        deadline_s: float | None = None,
        wants_sums: bool | None = None,
        on_final: Callable[[Post], None] | None = None,
        on_drained: Callable[[Post], None] | None = None,
    ) -> Post:
        """Begin to move the bytes. ``lanes``: allowed, best first; ``wants_sums``: whether all bytes go with CRC-32Cs,
        on the lanes that have them alone (not given: as configured). Until the post drained, the memory that it fills
        (a read) or reads (a write) is the transport's. The callbacks are made by whoever drains, in the order of the
        events, and must not block.

        Raises InvalidArgument, LimitExceeded, PeerGone, LaneUnavailable (names each lane's obstacle).
        """
        # Little is called from here, nothing is found out twice, and what the next start needs is made when this one's
        # bytes are on their way: between two small posts a processor forgets what it ran, and to run it anew takes as
        # long as the wire.
        begun_ns = monotonic_ns()
        asked = (None if lanes is None else tuple(lanes), wants_sums)
        for route in plan.routes:
            if route.asked == asked and route.config is self.config and route.transport is self.transport:
                is_again = True
                break
        else:
            route, is_again = self._route(plan, *asked), False
        timeout_ns = route.timeout_ns if deadline_s is None else as_nanoseconds("deadline_s", deadline_s)
        starts, order = (route.starts[1], None) if len(route.lanes) == 1 else self._best_starts(plan, route)
        post: Post | None = None
        begun = 0
        try:
            with self._lock:
                if self._failure is not None:
                    raise self._failure
                post, sums = route.spare.pop() if route.spare else self._new_post(len(starts), route)
                post.plan, ids = plan, post.transfer_ids
                rides = None
                if len(ids) == 1:
                    rides = notification
                else:
                    post._notification = notification
                post._begun_ns, post._order, post._on_final, post._on_drained = begun_ns, order, on_final, on_drained
                try:
                    for identity in ids:
                        if post._is_final:  # a signal's handler polled, and found that one had failed
                            post._skip(len(ids) - begun)
                            break
                        self._posts[identity] = post  # before anybody can hear of it
                        starts[begun](identity, timeout_ns, rides, sums[begun])
                        begun += 1
                    if is_again and not route.spare:
                        route.spare.append(self._new_post(len(starts), route))
                    post._post_ns = monotonic_ns() - begun_ns  # before anybody else may hear that it drained
                except BaseException as error:
                    self._abandon(post, begun, error)  # ... and before anybody else hears of those that were begun
                    raise
        except BaseException as error:
            if post is not None and not post._is_final:  # a signal's handler may have raised when all was done
                self._abandon(post, begun, error)
            raise
        return post

    def _abandon(self, post: Post, begun: int, error: BaseException) -> None:
        """The call that starts it raises, after so many of its transfers, and perhaps right after one more."""
        with self._lock:
            for identity in post.transfer_ids[begun : begun + 1]:
                if not self._has_begun(identity):
                    self._posts.pop(identity, None)
            post._abandon(error if isinstance(error, KvxferError) else TransportError(repr(error)))

    def _new_post(self, count: int, route: Route) -> tuple[Post, Sequence[bool]]:
        """One of so many transfers that has not begun, and which of them ask for checksums. It knows no plan yet: one
        that lies with a plan's route would keep it for ever."""
        ids = self._new_ids(count)
        checks = route.checks
        sums = [checks] * count if checks is not None else [_is_sampled(identity) for identity in ids]
        return Post(self, ids, route.reasons, False not in sums), sums

    def _best_starts(self, plan: Plan, route: Route) -> tuple[tuple[StartPost, ...], Order]:
        """By those of the route's lanes first that are likely the fastest now."""
        order = self.calibrations.order(plan.peer.ref, plan.peer.address.host_id, route.lanes, plan.nbytes)
        by, starts = route.starts
        if by != order.lanes:
            starts = self._prepare_parts(plan, order.lanes)
            route.starts = order.lanes, starts
        return starts, order

    def _prepare_parts(self, plan: Plan, lanes: tuple[Lane, ...]) -> tuple[StartPost, ...]:
        prepare = self.transport.prepare_fetch if plan.op is Op.READ else self.transport.prepare_push
        return tuple(prepare(PostOrder(plan.peer.ref, part.local, part.remote, lanes)) for part in plan.parts)

    def _route(self, plan: Plan, lanes: tuple[Lane, ...] | None, wants_sums: bool | None) -> Route:
        """Found, and kept with the plan. Raises LaneUnavailable."""
        config, peer, ours = self.config, plan.peer, self.transport.address
        allowed = tuple(config.lanes) if lanes is None else lanes
        chosen, reasons = peer.lanes(ours, plan.local, plan.remote, allowed, is_read=plan.op is Op.READ)
        policy = config.stream_checks if wants_sums is None else "on" if wants_sums else "off"
        if policy == "on":
            chosen, reasons = checking_lanes(chosen, reasons)
            if not chosen:
                raise LaneUnavailable(f"no lane joins us and {peer.ref}: {explain(None, reasons)}")
        is_near = is_same_host(ours, peer.address)
        is_sampled = policy == "sampled"
        checks = None if is_sampled else asks_for_sums(policy, b"", is_same_host=is_near)
        timeout_ns = as_nanoseconds("transfer_deadline_s", config.transfer_deadline_s)
        starts = chosen, self._prepare_parts(plan, chosen)
        asked = (lanes, wants_sums)
        route = Route(asked, self.transport, config, chosen, reasons, timeout_ns, checks, starts)
        live = [old for old in plan.routes if old.config is config and old.transport is self.transport]
        plan.routes[:] = [*(old for old in live[1 - ROUTES_MAX :] if old.asked != asked), route]
        return route

    def _new_ids(self, count: int) -> list[bytes]:
        """Drawn many at a time: a system call for each takes a microsecond and more. Taken one by one, because a
        signal's handler may post in between. A fork of this process would draw the same, but has no use of the core."""
        ids: list[bytes] = []
        while len(ids) < count:
            try:
                ids.append(self._ids.pop())
            except IndexError:
                drawn = os.urandom(ID_BYTES * IDS)
                self._ids += [drawn[at : at + ID_BYTES] for at in range(0, len(drawn), ID_BYTES)]
        return ids

    def _has_begun(self, identity: bytes) -> bool:
        with contextlib.suppress(KvxferError):  # a transport that is gone has begun nothing
            return self.transport.transfer_state(TransferId(identity)) is not None
        return False

    def post(
        self,
        op: Op,
        local: Prepared,
        local_ids: npt.ArrayLike | None,
        remote: Prepared,
        remote_ids: npt.ArrayLike | None,
        **options: Any,
    ) -> Post:
        """:meth:`plan` and :meth:`start` in one."""
        return self.start(self.plan(op, local, local_ids, remote, remote_ids), **options)

    @property
    def posts(self) -> tuple[Post, ...]:
        """Those that have not drained."""
        with self._lock:
            return tuple(dict.fromkeys(self._posts.values()))

    def is_alone(self, post: Post) -> bool:
        """Whether every other post is final."""
        with self._lock:
            return all(other is post or other.is_final for other in self._posts.values())

    def poll(self) -> None:
        """Take what happened since; never waits. Raises what a callback raises (each is called once all the same), and
        whatever a signal's handler does; the next poll goes on where that came between."""
        if self._drain is not None:
            self._drain()
            return
        with self._drain_lock:
            left = self._left
            # From the drain until they are kept one call of C, and no signal's handler runs in between.
            left.extend(chain.from_iterable(starmap(self.transport.drain, ONCE)))
            while left:
                event = left[0]
                if not self.handle(event):
                    try:
                        self._tell(event)
                    except Exception:  # as it would again
                        self._taken(event)
                        raise
                self._taken(event)

    def _tell(self, event: Event) -> None:
        if isinstance(event, _core.CoreFailed):
            self.fail_all(TransportError(f"the native core failed: {event.text}"))
        if self._on_event is not None:
            self._on_event(event)

    def _taken(self, event: Event) -> None:
        """Unless a signal's handler polled, and took it before."""
        if self._left and self._left[0] is event:
            self._left.popleft()

    def handle(self, event: Any) -> bool:
        """Take one event of the transport (an Event); False where it belongs to no post here. If a signal's handler
        raised before it returned, it is to be called again with the same event."""
        kind = type(event)  # isinstance() asks the metaclass wherever it says no
        if kind is not TransferFinal and kind is not TransferDrained and kind is not TransferProgress:
            return False
        identity = event.id
        with self._lock:
            post = self._posts.get(identity)
            if post is None:
                if kind is not TransferDrained or identity not in self._drained:
                    return False
                self._drained.pop(identity)._tell_drained()
            elif kind is TransferFinal:
                post._finished(identity, event)
            elif kind is TransferDrained:
                self._drained = {identity: post}
                post._live -= 1  # and without a call in between, which a signal could end:
                del self._posts[identity]
                post._tell_drained()
            else:
                post._moved(event)
        return True

    def cancel_all(self, error: KvxferError | None = None) -> None:
        """Give every post up; they end with ``error``."""
        for post in self.posts:
            post.cancel(error)

    def fail_all(self, error: KvxferError) -> None:
        """The transport moves nothing any more: end what is still open."""
        with self._lock:
            posts, self._failure = self.posts, error
            self._posts.clear()
            for post in posts:
                post._broken(error)


def asks_for_sums(checks: str, identity: bytes, *, is_same_host: bool) -> bool:
    """Whether checksums are asked for one transfer, by a policy of ``config.CHECKS``; of sampled ones for one in
    SAMPLE, the same one whoever asks."""
    is_sampled = checks == "sampled" and _is_sampled(identity)
    return checks == "on" or is_sampled or (checks == "auto" and not is_same_host)


def _is_sampled(identity: bytes) -> bool:
    return zlib.crc32(identity) % SAMPLE == 0
