"""One pull: blocks of a pool of ours, filled from a grant of a peer, from the call until the blocks are the caller's
again. Decides how a native final state becomes a result or a named error; must never decide whether a
transfer may commit, nor know an event loop.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer._native import _core
from kvxfer.clock import NS_PER_S
from kvxfer.errors import InvalidArgumentError, KvxferError, TransferCancelledError, from_code
from kvxfer.policy.calibration import LaneOrder
from kvxfer.policy.checksums import carries_checksums
from kvxfer.policy.lanes import explain
from kvxfer.transport.base import DURATION_MAX_S, LANES_BACK, NO_CONTENT_DIGEST, STATES, Blocks, as_blocks
from kvxfer.transport.lane_choice import LaneChoice, LaneChooser
from kvxfer.transport.transfers import TransferTable
from kvxfer.types import AgentRef, ChecksumMode, Lane, Member, PoolRecord, TransferId, TransferState

POSITION_MAX = 0xFFFFFFFF
NO_BLOCKS: Blocks = np.empty(0, dtype=np.uint32)


def _check_first(first: int) -> None:
    if not 0 <= first <= POSITION_MAX:
        raise InvalidArgumentError(f"first must be 0 to {POSITION_MAX}, not {first}")


@dataclasses.dataclass(frozen=True)
class PullOrder:
    """The arguments of a pull. ``lanes``: allowed, best first. Blocks are uint32, shape [n]; ``None``: ``count`` of
    them are given once the grant exists, for which ``timeout_s`` are allowed. ``deadline_s`` counts from then."""

    transfer_id: TransferId
    source: str
    pool: PoolRecord
    blocks: Blocks | None
    count: int
    first: int
    lanes: tuple[Lane, ...]
    timeout_s: float
    deadline_s: float
    content_digest: bytes = NO_CONTENT_DIGEST
    checksum: ChecksumMode = ChecksumMode.OFF
    started_s: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError for numbers that no transport can take."""
        for name in ("timeout_s", "deadline_s"):
            if not 0 < getattr(self, name) <= DURATION_MAX_S:
                raise InvalidArgumentError(
                    f"{name} must be above 0 and at most {DURATION_MAX_S:g}, not {getattr(self, name)}"
                )
        if not 0 < self.count <= POSITION_MAX:
            raise InvalidArgumentError(f"count: a transfer needs 1 to {POSITION_MAX} blocks, not {self.count}")
        _check_first(self.first)


@dataclasses.dataclass(frozen=True)
class TransferProgress:
    """The progress of a transfer. ``lane`` is ``None`` until one was tried; bytes count whole blocks."""

    blocks_done: int
    blocks_total: int
    bytes_done: int
    state: TransferState
    lane: Lane | None


@dataclasses.dataclass(frozen=True)
class TransferResult:
    """A committed transfer: every byte landed, and the source confirmed afterwards that its grant was still alive."""

    transfer_id: TransferId
    source: AgentRef
    lane: Lane
    lane_reason: str
    """Why this lane, and why not the allowed ones before it."""
    blocks: int
    bytes: int
    seconds: Mapping[str, float]
    """``queue`` (asked until the first block was ready), ``plan`` (finding the source, comparing, choosing a lane),
    ``wire`` (in which blocks were read, added up; on stream and unix a read begins when
    bytes are there), ``confirm`` (last byte to verdict)."""
    bytes_before_complete: int
    """Blocks that landed before the source had announced all of them."""
    attempts: int
    blocks_checked: int = 0
    """Blocks whose CRC-32C was verified before the commit."""

    @property
    def bytes_per_second(self) -> float:
        """Over wire and confirm together; 0 where nothing could be measured."""
        duration_s = self.seconds["wire"] + self.seconds["confirm"]
        return self.bytes / duration_s if duration_s > 0 else 0.0


Outcome: TypeAlias = TransferResult | KvxferError


@dataclasses.dataclass(frozen=True)
class _Begun:
    """The state of a pull whose source is known."""

    source: Member
    order: LaneOrder
    reasons: Mapping[Lane, str]
    plan_s: float
    has_asked_checksums: bool


class Pull:
    """In the table of its agent from :meth:`enter` until it drained. :meth:`begin` hands it to the transport once its
    source is known."""

    def __init__(
        self,
        table: TransferTable,
        lanes: LaneChooser,
        order: PullOrder,
        *,
        on_granted: Callable[[], None] | None,
        on_final: Callable[[Outcome], None],
        on_drained: Callable[[], None],
    ) -> None:
        """The callbacks are made by the thread that handles the event, and must not raise: ``on_granted`` (again after
        a lost session) when its grant exists and it has no blocks, the others once each."""
        self.order = order
        self._table = table
        self._transport = table.transport
        self._lanes = lanes
        self._on_granted = on_granted
        self._on_final = on_final
        self._on_drained = on_drained
        self._lock = threading.RLock()
        """Held while it goes to the transport: until then a cancel ends it here, and from then on there."""
        self._given = order.blocks
        """The blocks for the transport."""
        self._begun: _Begun | None = None
        self._is_given_up = False
        self._count = order.count
        self._done = 0
        self._state = TransferState.CONNECTING
        self._lane: Lane | None = None
        self._outcome: Outcome | None = None
        self._end_with: KvxferError | None = None
        self._is_drained = False

    @property
    def transfer_id(self) -> TransferId:
        return self.order.transfer_id

    @property
    def lane(self) -> Lane | None:
        """The lane tried last; ``None`` until there is one."""
        return self._lane

    @property
    def is_final(self) -> bool:
        return self._state.is_final

    @property
    def is_drained(self) -> bool:
        return self._is_drained

    def progress(self) -> TransferProgress:
        """Its progress now."""
        state = self._state
        if not state.is_final and self._begun is not None:
            state = self._transport.transfer_state(self.transfer_id) or state
        return TransferProgress(self._done, self._count, self._done * self.order.pool.block_bytes, state, self._lane)

    def result(self) -> TransferResult:
        """Its result. Raises the error that ended it; InvalidArgumentError while it is in progress."""
        if self._outcome is None:
            raise InvalidArgumentError(f"{self!r} is not over")
        if isinstance(self._outcome, KvxferError):
            raise self._outcome
        return self._outcome

    def __repr__(self) -> str:
        lane = self._lane.value if self._lane else "no lane yet"
        drained = "" if self.is_drained or not self.is_final else ", draining"
        return (
            f"<Pull {self.transfer_id} from {self._begun.source.ref if self._begun else self.order.source}: "
            f"{self._done}/{self._count} blocks, {self._state.name.lower()}{drained}, {lane}>"
        )

    # --- what the caller asks for; from any thread ---

    def enter(self) -> None:
        """Raises InvalidArgumentError for an id that is in use."""
        if not self._table.add(self.transfer_id.raw, self):
            raise InvalidArgumentError("this transfer id was used before; a retry needs a new one")

    def withdraw(self) -> None:
        """Its call raises: no callback is made."""
        self._table.remove(self.transfer_id.raw, self)

    def begin(self, source: Member, choice: LaneChoice) -> None:
        """Ask ``source`` for it, by these lanes, unless it was cancelled. Raises what :meth:`Transport.pull` raises."""
        order, ref = self.order, source.ref
        nbytes = order.count * order.pool.block_bytes
        ranked = self._lanes.order(ref, source.address, choice.lanes, nbytes)
        plan_s = time.monotonic() - order.started_s
        checksums = carries_checksums(
            order.checksum, self.transfer_id.raw, is_same_host=self._lanes.is_near(source.address)
        )
        with self._lock:
            if self._is_given_up:
                return
            # Before the transport has it: another thread may hear of its end at once.
            self._begun = _Begun(source, ranked, choice.reasons, plan_s, checksums)
            self._lane = ranked.lanes[0]
            self._transport.pull(
                self.transfer_id,
                ref,
                order.pool.pool_id,
                NO_BLOCKS if self._given is None else self._given,
                first=order.first,
                lanes=ranked.lanes,
                deadline_s=max(order.timeout_s - plan_s, 0.001),
                granted_s=order.deadline_s,
                tells_granted=self._on_granted is not None,
                count=order.count,
                content_digest=order.content_digest,
                wants_checksums=checksums,
            )

    def reserve(self, blocks: npt.ArrayLike, *, first: int = 0) -> None:
        """Give it its blocks. Raises InvalidArgumentError if it has ended, has blocks, or its source is not known yet;
        BlocksBusyError."""
        index = as_blocks(blocks)
        _check_first(first)
        before, self._count = self._count, len(index)
        try:
            self._transport.reserve(self.transfer_id, index, first=first)
        except BaseException:
            self._count = before
            raise

    def unreserve(self) -> bool:
        """Take its blocks back while its grant is not known to exist. False: they are in use, or it has ended."""
        with self._lock:
            if self._begun is None and self._given is not None and not self._is_given_up:
                self._given = None
                return True
        return self._transport.unreserve(self.transfer_id)

    def cancel(self, error: KvxferError | None = None) -> None:
        """Cancel it: it ends as cancelled, or with ``error``, unless it has ended. Returns at once."""
        if self.is_final:
            return
        self._end_with = self._end_with or error
        with self._lock:
            if self._begun is not None:
                self._transport.cancel(self.transfer_id)
                return
            self._is_given_up = True
        self.end(self._end_with or TransferCancelledError(f"transfer {self.transfer_id} was cancelled"))

    def end(self, error: KvxferError) -> None:
        """End it if the transport does not have it (any more), unless another thread has."""
        with self._lock:
            self._is_given_up = True
        if self._table.remove(self.transfer_id.raw, self):
            is_cancel = isinstance(error, TransferCancelledError)
            self._settle(TransferState.CANCELLED if is_cancel else TransferState.FAILED, error)
            self._drain()

    def fail(self, error: KvxferError) -> None:
        if not self.is_final:
            self.end(error)
        elif self._table.remove(self.transfer_id.raw, self):
            self._drain()

    # --- events ---

    def progressed(self, event: _core.TransferProgress) -> None:
        if not self.is_final:
            self._state, self._done = STATES[event.state], event.done

    def granted(self) -> None:
        if not self.is_final and self._on_granted is not None:
            self._on_granted()

    def finished(self, event: _core.TransferFinal) -> None:
        if self.is_final:
            return
        state = STATES[event.state]
        self._done, self._lane = event.blocks_done, LANES_BACK[event.lane]
        if state is TransferState.COMMITTED and self._begun is not None:
            self._settle(state, self._result(event, self._lane, self._begun))
        else:
            text = f"transfer {self.transfer_id}: {event.text}"
            self._settle(state, self._end_with or self._table.explain(from_code(event.code.name, text)))

    def drained(self, event: _core.TransferDrained) -> None:
        if self._table.remove(event.id, self):
            self._drain()

    def _result(self, event: _core.TransferFinal, lane: Lane, begun: _Begun) -> TransferResult:
        block_bytes = self.order.pool.block_bytes
        wire_s, confirm_s = event.wire_ns / NS_PER_S, event.confirm_ns / NS_PER_S
        if event.blocks_before_complete == 0:  # else it waited for the source to compute
            nbytes = self._count * block_bytes
            self._lanes.measured(begun.source.ref, begun.source.address, lane, nbytes, wire_s + confirm_s)
        is_told = begun.has_asked_checksums or event.blocks_checked
        return TransferResult(
            transfer_id=self.transfer_id,
            source=begun.source.ref,
            lane=lane,
            lane_reason=explain(
                lane,
                begun.reasons,
                event.lane_notes,
                passed_over=begun.order.passed_over(lane),
                is_checked=event.blocks_checked == self._count if is_told else None,
            ),
            blocks=self._count,
            bytes=self._count * block_bytes,
            seconds={
                "queue": event.queue_ns / NS_PER_S,
                "plan": begun.plan_s,
                "wire": wire_s,
                "confirm": confirm_s,
            },
            bytes_before_complete=event.blocks_before_complete * block_bytes,
            attempts=event.attempts,
            blocks_checked=event.blocks_checked,
        )

    def _settle(self, state: TransferState, outcome: Outcome) -> None:
        self._outcome = outcome
        self._state = state
        self._on_final(outcome)

    def _drain(self) -> None:
        self._is_drained = True
        self._on_drained()
