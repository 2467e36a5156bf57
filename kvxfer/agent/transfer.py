"""The caller's handle on one pull, from the call to the moment the destination blocks are the caller's again. Decides
how a native final state becomes a result or a named error; must never decide whether a transfer may commit.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy.typing as npt

from kvxfer._native import _core
from kvxfer.clock import NS_PER_S
from kvxfer.errors import InvalidArgument, KvxferError, TransferCancelled, from_code
from kvxfer.policy.calibration import Order
from kvxfer.policy.lanes import explain
from kvxfer.transport.base import LANES_BACK, Blocks, as_blocks
from kvxfer.types import AgentRef, Lane, TransferId, TransferState


@dataclasses.dataclass(frozen=True)
class TransferProgress:
    """Where a transfer stands. ``lane`` is ``None`` until one was tried; bytes count whole blocks."""

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
    """Why this lane, and why not those that were allowed before it."""
    blocks: int
    bytes: int
    seconds: Mapping[str, float]
    """``queue`` (asked until the first block was ready), ``plan`` (finding the source, comparing, choosing a lane),
    ``wire`` (in which blocks were read, added up; on stream and unix a read begins when
    bytes are there), ``confirm`` (last byte to verdict)."""
    bytes_before_complete: int
    """Landed before the source had announced that it is complete."""
    attempts: int
    blocks_checked: int = 0
    """Whose CRC-32C was verified before the commit."""

    @property
    def bytes_per_second(self) -> float:
        """Over wire and confirm together; 0 where nothing could be measured."""
        duration_s = self.seconds["wire"] + self.seconds["confirm"]
        return self.bytes / duration_s if duration_s > 0 else 0.0


class Transfer:
    """Made by :meth:`Agent.pull`. Awaiting it gives the :class:`TransferResult`, or raises what ended it.

    It may be awaited by several tasks and more than once. Cancelling a task that awaits it does *not* cancel it: the
    waiter of a moment does not own the blocks, and a transfer always ends by itself, at its deadline at the latest.
    To give it up call :meth:`cancel`, or use it as a scope, which cancels on the way out and waits until it drained::

        async with agent.pull(...) as transfer:
            result = await transfer

    After the end, whatever it was, the destination blocks may be reused once :meth:`wait_drained` returned.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transfer_id: TransferId,
        source: str,
        blocks: int,
        block_bytes: int,
        cancel: Callable[[Transfer], None],
        look: Callable[[TransferId], TransferState | None],
        on_ended: Callable[[Transfer], None] | None = None,
        *,
        reserve: Callable[[TransferId, Blocks, int], None],
        unreserve: Callable[[TransferId], bool],
        on_granted: Callable[[Transfer], None] | None = None,
    ) -> None:
        self._transfer_id = transfer_id
        self._source_id = source
        self._source: AgentRef | None = None
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._cancel = cancel
        self._look = look
        self._on_ended = on_ended
        self._reserve = reserve
        self._unreserve = unreserve
        self._on_granted = on_granted
        self._outcome: TransferResult | KvxferError | None = None
        self._future: asyncio.Future[TransferResult] = loop.create_future()
        self._drained: asyncio.Future[None] = loop.create_future()
        self._is_drained = False
        self._state = TransferState.CONNECTING
        self._done = 0
        self._lane: Lane | None = None
        self._order: Order | None = None
        self._reasons: Mapping[Lane, str] = {}
        self._plan_s = 0.0
        self._has_asked_sums = False
        self._end_with: KvxferError | None = None

    @property
    def wants_granted(self) -> bool:
        """Whether its caller wants to hear when its grant exists."""
        return self._on_granted is not None

    @property
    def transfer_id(self) -> TransferId:
        return self._transfer_id

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
        """Where it stands in this moment; ``state`` may be final a little before the waiters hear of it."""
        state = self._state
        if not state.is_final and self._source is not None:
            state = self._look(self._transfer_id) or state
        return TransferProgress(self._done, self._blocks, self._done * self._block_bytes, state, self._lane)

    def result(self) -> TransferResult:
        """What it became, at once. Raises the error that ended it; InvalidArgument while it is under way."""
        if self._outcome is None:
            raise InvalidArgument(f"{self!r} is not over")
        if isinstance(self._outcome, KvxferError):
            raise self._outcome
        return self._outcome

    def reserve(self, blocks: npt.ArrayLike, *, first: int = 0) -> None:
        """Give a transfer that :meth:`Agent.ask` made its destination blocks, for the grant's positions ``first...``.
        They are the agent's from now until it drained, or :meth:`unreserve` gave them back. From any thread.

        Raises InvalidArgument where it is over, has blocks, or its source is not known yet; BlocksBusy.
        """
        index = as_blocks(blocks)
        before, self._blocks = self._blocks, len(index)
        try:
            self._reserve(self._transfer_id, index, first)
        except BaseException:
            self._blocks = before
            raise

    def unreserve(self) -> bool:
        """Take its blocks back as long as its grant is not known to exist: nothing has landed in them, and it waits on
        without them. False: they are in use, or it is over. From any thread."""
        return self._unreserve(self._transfer_id)

    def cancel(self) -> None:
        """Give the transfer up: it ends with TransferCancelled, unless it has ended. Returns at once."""
        if not self._state.is_final:
            self._cancel(self)

    async def wait_drained(self) -> None:
        """Wait until the transfer is over and no byte can land in the destination blocks any more."""
        await asyncio.shield(self._drained)

    def __await__(self) -> Generator[Any, None, TransferResult]:
        return asyncio.shield(self._future).__await__()

    async def __aenter__(self) -> Transfer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()
        await self.wait_drained()

    def __repr__(self) -> str:
        lane = self._lane.value if self._lane else "no lane yet"
        drained = "" if self.is_drained or not self.is_final else ", draining"
        return (
            f"<Transfer {self._transfer_id} from {self._source or self._source_id}: "
            f"{self._done}/{self._blocks} blocks, {self._state.name.lower()}{drained}, {lane}>"
        )

    # --- for the agent, on any thread; `_tell` and `_tell_drained` on its loop ---

    def _begin(
        self,
        source: AgentRef,
        order: Order,
        reasons: Mapping[Lane, str],
        plan_s: float,
        *,
        has_asked_sums: bool = False,
    ) -> None:
        self._source, self._order, self._reasons, self._plan_s = source, order, reasons, plan_s
        self._has_asked_sums = has_asked_sums
        self._lane = order.lanes[0]

    def _granted(self) -> None:
        if not self._state.is_final and self._on_granted is not None:
            self._on_granted(self)

    def _moved(self, event: _core.TransferProgress) -> None:
        if not self._state.is_final:
            self._state = TransferState(int(event.state))
            self._done = event.done

    def _finish(self, event: _core.TransferFinal) -> TransferResult | KvxferError:
        """End as the machines' final state says; what it became."""
        self._state = TransferState(int(event.state))
        self._done = event.blocks_done
        self._lane = LANES_BACK[event.lane]
        if self._state is not TransferState.COMMITTED or self._source is None:
            error = self._end_with or from_code(event.code.name, f"transfer {self._transfer_id}: {event.text}")
            return self._fail(error, self._state)
        is_checked = event.blocks_checked == self._blocks if self._has_asked_sums or event.blocks_checked else None
        passed_over = self._order.passed_over(self._lane) if self._order else None
        notes = event.lane_notes
        self._outcome = result = TransferResult(
            transfer_id=self._transfer_id,
            source=self._source,
            lane=self._lane,
            lane_reason=explain(self._lane, self._reasons, notes, passed_over=passed_over, is_checked=is_checked),
            blocks=self._blocks,
            bytes=self._blocks * self._block_bytes,
            seconds={
                "queue": event.queue_ns / NS_PER_S,
                "plan": self._plan_s,
                "wire": event.wire_ns / NS_PER_S,
                "confirm": event.confirm_ns / NS_PER_S,
            },
            bytes_before_complete=event.blocks_before_complete * self._block_bytes,
            attempts=event.attempts,
            blocks_checked=event.blocks_checked,
        )
        return result

    def _fail(self, error: KvxferError, state: TransferState | None = None) -> KvxferError:
        """End with an error, which is returned; the blocks are drained by :meth:`_drain`."""
        is_cancel = isinstance(error, TransferCancelled)
        self._state = state or (TransferState.CANCELLED if is_cancel else TransferState.FAILED)
        self._outcome = error
        return error

    def _drain(self) -> None:
        self._is_drained = True
        if self._on_ended is not None:
            self._on_ended(self)

    def _tell(self, outcome: TransferResult | KvxferError) -> None:
        """Who awaits it."""
        if self._future.done():
            return
        if isinstance(outcome, TransferResult):
            self._future.set_result(outcome)
        else:
            self._future.set_exception(outcome)
            self._future.exception()  # a transfer that nobody awaits is told of in statistics and metrics, not in a log

    def _tell_drained(self) -> None:
        if not self._drained.done():
            self._drained.set_result(None)
