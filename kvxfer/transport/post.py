"""One post: the transfers that it was cut into, as one. Decides what their states are together; must never be told of
an event that is not its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvxfer._native import _core
from kvxfer.clock import NS_PER_S
from kvxfer.errors import InvalidArgument, KvxferError, TransferCancelled, from_code
from kvxfer.policy.calibration import Order
from kvxfer.policy.lanes import explain
from kvxfer.transport.base import LANES_BACK, STATES
from kvxfer.transport.plan import Plan
from kvxfer.types import Lane, TransferId, TransferState

if TYPE_CHECKING:
    from kvxfer.transport.posts import Poster

SLEEP_S = 50e-3
"""Of one wait, so that signals are seen to."""

_CONNECTING, _COMMITTED = TransferState.CONNECTING, TransferState.COMMITTED
_CORE_COMMITTED = _core.TransferState.COMMITTED
"""An attribute of an enumeration takes a while, and so does one of an event: whoever waits for a small post, waits for
each."""

BRIEF_S = 100e-6
BRIEF_BYTES = 64 << 10
"""How long, and for how small a post, an event loop waits in place instead of sleeping."""


class PostStatistics(NamedTuple):
    """One post in numbers (a tuple, because that is quick to make). ``post_us``: the call that started it;
    ``transfer_us``: from that call's begin until it was final here (until now, while it is not). ``seconds``: of its
    slowest transfer, by phase as in TransferResult."""

    bytes: int
    pieces: int
    parts: int
    post_us: float
    transfer_us: float
    lane: Lane | None
    attempts: int
    pieces_checked: int
    """Whose CRC-32C was verified before the commit, here or by the peer that is written to."""
    is_checked: bool | None
    """Whether that is all of them; ``None``: nobody asked, or it is not committed."""
    seconds: Mapping[str, float]
    reasons: Mapping[Lane, str]
    lane_notes: str
    order: Order | None
    """In which its lanes were to be tried, and why; ``None``: there was one alone."""

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in zip(self._fields[:-3], self, strict=False))
        return f"PostStatistics({', '.join(shown)})"

    @property
    def lane_reason(self) -> str:
        """Why this lane, and why not those that were allowed before it. Found out when it is asked for."""
        passed_over = self.order.passed_over(self.lane) if self.order and self.lane else None
        return explain(self.lane, self.reasons, self.lane_notes, passed_over=passed_over, is_checked=self.is_checked)


class Post:
    """Made by :meth:`Poster.start`. After it is final the memory of a read may be used; after it drained, any of it may
    be given back.
    """

    plan: Plan

    __slots__ = (
        "__weakref__",
        "_begun_ns",
        "_end_with",
        "_error",
        "_failed",
        "_final_ns",
        "_finals",
        "_has_asked_sums",
        "_is_final",
        "_live",
        "_notification",
        "_on_drained",
        "_on_final",
        "_order",
        "_post_ns",
        "_poster",
        "_reasons",
        "_state",
        "_states",
        "plan",
        "transfer_ids",
    )

    def __init__(
        self,
        poster: Poster,
        ids: Sequence[bytes],
        reasons: Mapping[Lane, str],
        has_asked_sums: bool,
    ) -> None:
        """Its plan, and what differs from one start of it to the next, is set by :meth:`Poster.start`."""
        self.transfer_ids = tuple(ids)
        self._poster = poster
        self._reasons = reasons
        self._order: Order | None = None
        self._notification: bytes | None = None
        self._on_final: Callable[[Post], None] | None = None
        self._on_drained: Callable[[Post], None] | None = None
        self._states = dict.fromkeys(ids, _CONNECTING)
        self._live = len(ids)  # transfers that have not drained
        self._is_final = False
        self._state = _CONNECTING
        self._error: KvxferError | None = None
        self._end_with: KvxferError | None = None
        self._finals: list[_core.TransferFinal] = []
        self._failed: _core.TransferFinal | None = None
        self._has_asked_sums = has_asked_sums
        self._begun_ns = self._post_ns = self._final_ns = 0

    def __repr__(self) -> str:
        drained = "" if self.is_drained or not self.is_final else ", draining"
        return (
            f"<Post {self.plan.op} {self.plan.nbytes} bytes in {self.plan.pieces} pieces, peer {self.plan.peer.ref}: "
            f"{self._state.name.lower()}{drained}>"
        )

    @property
    def is_final(self) -> bool:
        return self._is_final

    @property
    def is_drained(self) -> bool:
        """Whether the transport is done with our memory."""
        return not self._live

    @property
    def error(self) -> KvxferError | None:
        """What ended it, where it is final and not committed."""
        return self._error

    def poll(self) -> TransferState:
        """The state now; takes the transport's events first. Never waits. Raises only what on_event callbacks raise."""
        if self._live or not self._is_final:
            self._poster.poll()
        return self._state

    def wait(self, timeout_s: float) -> TransferState:
        """Poll until the post is final, at most ``timeout_s``; the state then."""
        self._wait(lambda: self._is_final, timeout_s)
        return self._state

    def wait_briefly(self) -> bool:
        """Wait for it about 100 us (a millisecond where no processor is free), if it is small and nothing else is under
        way; whether it is final. To sleep and be woken takes as long, so an event loop that has no other post to see to
        may wait for this one here."""
        if not self.is_final and self.plan.nbytes <= BRIEF_BYTES and self._poster.is_alone(self):
            self._poster.transport.wait(BRIEF_S)
            self._poster.poll()
        return self.is_final

    def wait_drained(self, timeout_s: float) -> bool:
        """Poll until the post drained, at most ``timeout_s``; whether it did."""
        return self._wait(lambda: self.is_drained, timeout_s)

    def result(self) -> PostStatistics:
        """What it took. Raises the error that ended it; InvalidArgument while it is not final."""
        if self._error is not None:
            raise self._error
        if not self.is_final:
            raise InvalidArgument(f"{self!r} is not over")
        return self.statistics()

    def cancel(self, error: KvxferError | None = None) -> None:
        """Give it up: it ends as cancelled (with ``error``, where given), unless it has ended. Returns at once."""
        if not self._is_final:
            with self._poster._lock:
                self._end_with = self._end_with or error
                self._cancel_rest()

    def statistics(self) -> PostStatistics:
        finals, plan = self._finals, self.plan
        final = self._failed or self._slowest()
        if final is None:
            lane, notes, queue_ns, wire_ns, confirm_ns = None, "", 0, 0, 0
        else:
            lane, notes = LANES_BACK[final.lane], final.lane_notes
            queue_ns, wire_ns, confirm_ns = final.queue_ns, final.wire_ns, final.confirm_ns
        checked = sum(each.blocks_checked for each in finals)
        has_committed = self._state is _COMMITTED
        end_ns = self._final_ns or time.monotonic_ns()
        return PostStatistics(
            bytes=plan.nbytes,
            pieces=plan.pieces,
            parts=len(plan.parts),
            post_us=self._post_ns / 1e3,
            transfer_us=(end_ns - self._begun_ns) / 1e3,
            lane=lane,
            attempts=sum(each.attempts for each in finals),
            pieces_checked=checked,
            is_checked=checked == plan.pieces if self._has_asked_sums and has_committed else None,
            seconds={"queue": queue_ns / NS_PER_S, "wire": wire_ns / NS_PER_S, "confirm": confirm_ns / NS_PER_S},
            reasons=self._reasons,
            lane_notes=notes,
            order=self._order,
        )

    def _wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """The core does the post's work on this thread while it waits, so that comes before a look at its events."""
        end_s = time.monotonic() + timeout_s
        while not until():
            left_s = end_s - time.monotonic()
            if left_s > 0:
                self._poster.transport.wait(min(SLEEP_S, left_s))
            self._poster.poll()
            if left_s <= 0:
                return until()
        return True

    # --- for the poster; its lock is held ---

    def _abandon(self, error: KvxferError) -> None:
        """Not all of its transfers could be started: the call raises, and those that were are cancelled."""
        self._live = sum(identity in self._poster._posts for identity in self.transfer_ids)
        self._on_final = self._on_drained = None
        self._cancel_rest()
        if not self._is_final:
            self._end(TransferState.FAILED, error)

    def _skip(self, unstarted: int) -> None:
        """It has ended, and so many transfers of it will not be started."""
        if self._live:
            self._live -= unstarted
            self._tell_drained()

    def _moved(self, event: _core.TransferProgress) -> None:
        if not self._is_final:
            self._states[event.id] = STATES[event.state]
            self._state = min(min(self._states.values()), TransferState.CONFIRMING)

    def _finished(self, identity: bytes, event: _core.TransferFinal) -> None:
        """Reads no more of the event than it must: the rest is there for whoever asks. Where a signal's handler raises
        in between, it is called again with the same event."""
        native, states, finals = event.state, self._states, self._finals
        if not finals or finals[-1] is not event:
            finals.append(event)
        if native is not _CORE_COMMITTED:
            self._broke(identity, event)
            return
        states[identity] = _COMMITTED
        if self._is_final:
            self._tell_final()
            return
        if len(states) == 1:
            self._poster.calibrations.committed(self.plan.peer, self.plan.nbytes, event)
            self._end(_COMMITTED, None)
        elif all(other is _COMMITTED for other in states.values()):
            self._commit_all()

    def _broke(self, identity: bytes, event: _core.TransferFinal) -> None:
        state = self._states[identity] = STATES[event.state]
        if self._is_final:
            self._tell_final()
            return
        text = f"{self.plan.op} with {self.plan.peer.ref}: {event.text}"
        self._failed = event
        self._cancel_rest()
        self._end(state, self._end_with or from_code(event.code.name, text))

    def _commit_all(self) -> None:
        """Of several transfers."""
        if self._notification is not None:
            try:
                self._poster.transport.notify(self.plan.peer.ref, self._notification)
            except KvxferError as error:
                self._end(TransferState.FAILED, error)
                return
            self._notification = None  # this may be called again
        slowest, peer = self._slowest(), self.plan.peer
        assert slowest is not None
        seconds = (time.monotonic_ns() - self._begun_ns) / NS_PER_S
        measured = self._poster.calibrations.measured
        measured(peer.ref, peer.address.host_id, LANES_BACK[slowest.lane], self.plan.nbytes, seconds)
        self._end(_COMMITTED, None)

    def _slowest(self) -> _core.TransferFinal | None:
        """The last of those that took longest."""
        finals = self._finals
        return finals[0] if len(finals) == 1 else max(reversed(finals), key=_duration_ns, default=None)

    def _end(self, state: TransferState, error: KvxferError | None) -> None:
        self._state, self._error, self._is_final = state, error, True
        self._tell_final()

    def _tell_final(self) -> None:
        """Once."""
        self._final_ns = self._final_ns or time.monotonic_ns()
        on_final, self._on_final = self._on_final, None
        if on_final is not None:
            on_final(self)

    def _tell_drained(self) -> None:
        """Once, and only if it did."""
        on_drained = self._on_drained
        if not self._live and on_drained is not None:
            self._on_drained = None
            on_drained(self)

    def _broken(self, error: KvxferError) -> None:
        self._live = 0
        if not self._is_final:
            is_cancel = isinstance(error, TransferCancelled)
            self._end(TransferState.CANCELLED if is_cancel else TransferState.FAILED, self._end_with or error)
        self._tell_drained()

    def _cancel_rest(self) -> None:
        for identity, state in self._states.items():
            if not state.is_final and identity in self._poster._posts:
                with contextlib.suppress(KvxferError):  # a transport that is gone has nothing left to cancel
                    self._poster.transport.cancel(TransferId(identity))


def _duration_ns(event: _core.TransferFinal) -> int:
    return event.queue_ns + event.wire_ns + event.confirm_ns
