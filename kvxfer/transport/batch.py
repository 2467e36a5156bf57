"""One batch of reads or writes, which is cut into several transfers. Decides the state of the batch from the states of
its transfers; must never get an event of another batch.

A batch is committed when all of its transfers are. The first transfer that fails gives the batch its error, and the
others are cancelled. The peer gets the batch's notification after all bytes are committed. A single transfer carries
the notification itself. Where there are several transfers, the batch sends it after the last commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from kvxfer._native import _core
from kvxfer.clock import NS_PER_S
from kvxfer.errors import InvalidArgumentError, KvxferError, TransferCancelledError, from_code
from kvxfer.policy.calibration import LaneOrder
from kvxfer.policy.lanes import explain
from kvxfer.transport.base import LANES_BACK, STATES
from kvxfer.transport.lane_choice import LaneChooser
from kvxfer.transport.plan import TransferPlan
from kvxfer.transport.transfers import TransferTable
from kvxfer.types import Lane, TransferId, TransferState

SLEEP_S = 50e-3
"""The longest single wait, so that signal handlers run."""
BRIEF_S = 100e-6
BRIEF_BYTES = 64 << 10
"""How long an event loop waits in place, instead of sleeping, and the largest batch for which it does."""


@dataclasses.dataclass(frozen=True)
class BatchStatistics:
    """One batch in numbers. ``post_us``: the call that started it; ``transfer_us``: from the start of that call until
    it was final here (until now, while it is not). ``seconds``: of its slowest transfer, by phase as in
    TransferResult."""

    bytes: int
    elements: int
    parts: int
    post_us: float
    transfer_us: float
    lane: Lane | None
    attempts: int
    elements_checked: int
    """Elements whose CRC-32C was verified before the commit, here or by the destination."""
    is_checked: bool | None
    """Whether that is all of them; ``None``: checksums were not asked for, or it is not committed."""
    seconds: Mapping[str, float]
    reasons: Mapping[Lane, str] = dataclasses.field(repr=False)
    lane_notes: str = dataclasses.field(repr=False)
    order: LaneOrder = dataclasses.field(repr=False)
    """The order in which its lanes were to be tried, and why."""

    @property
    def lane_reason(self) -> str:
        """Why this lane, and why not the allowed ones before it. Computed on access."""
        passed_over = self.order.passed_over(self.lane) if self.lane else None
        return explain(self.lane, self.reasons, self.lane_notes, passed_over=passed_over, is_checked=self.is_checked)


class TransferBatch:
    """Made by :meth:`TransferEngine.start`. The caller may use the memory of a read after the batch is final, and may
    release any memory of the batch after it drained. The table maps each of its transfer ids to it.
    """

    def __init__(
        self,
        table: TransferTable,
        lanes: LaneChooser,
        plan: TransferPlan,
        ids: tuple[bytes, ...],
        reasons: Mapping[Lane, str],
        order: LaneOrder,
        *,
        notification: bytes | None,
        has_asked_checksums: bool,
        begun_ns: int,
    ) -> None:
        """``ids``: one for each part of the plan. ``notification``: sent when the last of several has committed.
        ``begun_ns``: when the call began that starts it."""
        self.plan = plan
        self.transfer_ids = ids
        self._table = table
        self._transport = table.transport
        self._lanes = lanes
        self._reasons = reasons
        self._order = order
        self._notification = notification
        self._has_asked_checksums = has_asked_checksums
        self._on_final: OnBatch | None = None
        self._on_drained: OnBatch | None = None
        self._states = dict.fromkeys(ids, TransferState.CONNECTING)
        self._live: dict[bytes, None] = {}
        """Transfers that the transport was asked for, and that have not drained."""
        self._is_final = False
        self._state = TransferState.CONNECTING
        self._error: KvxferError | None = None
        self._cancel_error: KvxferError | None = None
        """The error that :meth:`cancel` was given, in place of that of the first transfer that ends."""
        self._finals: dict[bytes, _core.TransferFinal] = {}
        self._failed: _core.TransferFinal | None = None
        """The end of the first transfer that did not commit."""
        self._begun_ns, self._started_ns, self._final_ns = begun_ns, 0, 0

    def __repr__(self) -> str:
        drained = "" if self.is_drained or not self.is_final else ", draining"
        return (
            f"<TransferBatch {self.plan.op} {self.plan.nbytes} bytes in {self.plan.elements} elements, "
            f"peer {self.plan.peer.ref}: {self._state.name.lower()}{drained}>"
        )

    @property
    def is_final(self) -> bool:
        return self._is_final

    @property
    def is_drained(self) -> bool:
        """Whether the transport no longer uses our memory."""
        return self._is_final and not self._live

    @property
    def error(self) -> KvxferError | None:
        """The error that ended it, if it is final and not committed."""
        return self._error

    def poll(self) -> TransferState:
        """The state now; takes the transport's events first. Never waits. Raises only what on_event callbacks raise."""
        if not self.is_drained:
            self._table.poll()
        return self._state

    def wait(self, timeout_s: float) -> TransferState:
        """Poll until it is final, at most ``timeout_s``; the state then."""
        self._wait(lambda: self._is_final, timeout_s)
        return self._state

    def wait_briefly(self) -> bool:
        """Wait for it about 100 us (a millisecond where no processor is free), if it is small and nothing else is under
        way; whether it is final. To sleep and be woken takes as long, so an event loop that has no other transfer may
        wait for this one here."""
        if not self.is_final and self.plan.nbytes <= BRIEF_BYTES and self._table.is_alone(self):
            self._transport.wait(BRIEF_S)
            self._table.poll()
        return self.is_final

    def wait_drained(self, timeout_s: float) -> bool:
        """Poll until it drained, at most ``timeout_s``; whether it did."""
        return self._wait(lambda: self.is_drained, timeout_s)

    def result(self) -> BatchStatistics:
        """Its numbers. Raises the error that ended it; InvalidArgumentError while it is not final."""
        if self._error is not None:
            raise self._error
        if not self.is_final:
            raise InvalidArgumentError(f"{self!r} is not over")
        return self.statistics()

    def cancel(self, error: KvxferError | None = None) -> None:
        """Cancel it: it ends as cancelled (with ``error``, if given), unless it has ended. Returns at once."""
        if not self._is_final:
            with self._table.lock:
                self._cancel_error = self._cancel_error or error
                self._cancel_rest()

    def statistics(self) -> BatchStatistics:
        finals, plan = list(self._finals.values()), self.plan
        final = self._failed or _slowest(finals)
        queue_ns, wire_ns, confirm_ns = (final.queue_ns, final.wire_ns, final.confirm_ns) if final else (0, 0, 0)
        post_ns = max(self._started_ns - self._begun_ns, 0)
        checked = sum(each.blocks_checked for each in finals)
        is_known = self._has_asked_checksums and self._state is TransferState.COMMITTED
        end_ns = self._final_ns or time.monotonic_ns()
        return BatchStatistics(
            bytes=plan.nbytes,
            elements=plan.elements,
            parts=len(plan.parts),
            post_us=post_ns / 1e3,
            transfer_us=(end_ns - self._begun_ns) / 1e3,
            lane=None if final is None else LANES_BACK[final.lane],
            attempts=sum(each.attempts for each in finals),
            elements_checked=checked,
            is_checked=checked == plan.elements if is_known else None,
            seconds={
                "queue": queue_ns / NS_PER_S,
                "plan": post_ns / NS_PER_S,
                "wire": wire_ns / NS_PER_S,
                "confirm": confirm_ns / NS_PER_S,
            },
            reasons=self._reasons,
            lane_notes="" if final is None else final.lane_notes,
            order=self._order,
        )

    def _wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Wait in the transport first and take its events after that: the core runs on this thread while it waits."""
        end_s = time.monotonic() + timeout_s
        while not until():
            left_s = end_s - time.monotonic()
            if left_s > 0:
                self._transport.wait(min(SLEEP_S, left_s))
            self._table.poll()
            if left_s <= 0:
                return until()
        return True

    # --- the call that starts it ---

    def enter(self, identity: bytes) -> None:
        """The transport is about to be asked for one of its transfers."""
        self._live[identity] = None
        self._table.add(identity, self)

    def started(self, on_final: OnBatch | None, on_drained: OnBatch | None) -> None:
        """All of its transfers were asked for, or, where it ended meanwhile, as many as were to be."""
        self._started_ns = time.monotonic_ns()
        self._on_final, self._on_drained = on_final, on_drained
        self._make_callbacks()

    def abandon(self, error: KvxferError) -> None:
        """The call that starts the batch raises: make no callback, and cancel the transfers that have begun."""
        with self._table.lock:
            self._on_final = self._on_drained = None
            for identity in tuple(self._live):
                if not self._has_begun(identity):
                    self._live.pop(identity, None)
                    self._table.remove(identity, self)
            self._cancel_rest()
            if not self._is_final:
                self._end(TransferState.FAILED, error)

    def _has_begun(self, identity: bytes) -> bool:
        with contextlib.suppress(KvxferError):  # a transport that is gone has begun nothing
            return self._transport.transfer_state(TransferId(identity)) is not None
        return False

    # --- events ---

    def progressed(self, event: _core.TransferProgress) -> None:
        with self._table.lock:
            if not self._is_final:
                self._states[event.id] = STATES[event.state]
                self._state = min(min(self._states.values()), TransferState.CONFIRMING)

    def granted(self) -> None:
        """Does nothing: only a pull has a grant."""

    def finished(self, event: _core.TransferFinal) -> None:
        with self._table.lock:
            state = self._states[event.id] = STATES[event.state]
            self._finals[event.id] = event
            if not self._is_final:
                if state is not TransferState.COMMITTED:
                    self._failed = event
                    self._cancel_rest()
                    text = f"{self.plan.op} with {self.plan.peer.ref}: {event.text}"
                    self._end(state, self._cancel_error or self._table.explain(from_code(event.code.name, text)))
                elif all(other is TransferState.COMMITTED for other in self._states.values()):
                    self._commit(event)
            self._make_callbacks()

    def drained(self, event: _core.TransferDrained) -> None:
        with self._table.lock:
            self._live.pop(event.id, None)
            self._make_callbacks()
            self._table.remove(event.id, self)  # last, so that all of it can be done again

    def fail(self, error: KvxferError) -> None:
        with self._table.lock:
            for identity in self.transfer_ids:
                self._table.remove(identity, self)
            self._live.clear()
            if not self._is_final:
                is_cancel = isinstance(error, TransferCancelledError)
                state = TransferState.CANCELLED if is_cancel else TransferState.FAILED
                self._end(state, self._cancel_error or error)
            self._make_callbacks()

    def _commit(self, last: _core.TransferFinal) -> None:
        plan, peer = self.plan, self.plan.peer
        if self._notification is not None:
            try:
                self._transport.notify(peer.ref, self._notification)
            except KvxferError as error:
                self._end(TransferState.FAILED, error)
                return
            self._notification = None
        if len(plan.parts) == 1:
            seconds = (last.wire_ns + last.confirm_ns) / NS_PER_S
        else:
            seconds = (time.monotonic_ns() - self._begun_ns) / NS_PER_S
        lane = LANES_BACK[(_slowest(list(self._finals.values())) or last).lane]
        self._lanes.measured(peer.ref, peer.address, lane, plan.nbytes, seconds)
        self._end(TransferState.COMMITTED, None)

    def _end(self, state: TransferState, error: KvxferError | None) -> None:
        self._state, self._error, self._final_ns = state, error, time.monotonic_ns()
        self._is_final = True

    def _make_callbacks(self) -> None:
        """Make the callbacks that are due, each once: one when the batch is final, one when it drained."""
        if self._is_final and self._on_final is not None:
            on_final, self._on_final = self._on_final, None
            on_final(self)
        if self.is_drained and self._on_drained is not None:
            on_drained, self._on_drained = self._on_drained, None
            on_drained(self)

    def _cancel_rest(self) -> None:
        for identity in tuple(self._live):
            if not self._states[identity].is_final:
                with contextlib.suppress(KvxferError):  # a transport that is gone has nothing left to cancel
                    self._transport.cancel(TransferId(identity))


OnBatch: TypeAlias = Callable[[TransferBatch], None]


def _slowest(finals: Sequence[_core.TransferFinal]) -> _core.TransferFinal | None:
    """The last of those that took longest."""
    return max(reversed(finals), key=_duration_ns, default=None)


def _duration_ns(event: _core.TransferFinal) -> int:
    return event.queue_ns + event.wire_ns + event.confirm_ns
