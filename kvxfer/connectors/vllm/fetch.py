"""One load as :mod:`.loads` sees it: what it pulls from one source, and its report at the end. Decides nothing; `loads`
does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterable, Sequence

from kvxfer.agent import Transfer, TransferResult
from kvxfer.connectors.vllm.shares import RankShare
from kvxfer.connectors.vllm.staging import Landing
from kvxfer.connectors.vllm.steps import LoadOrder, Report
from kvxfer.connectors.vllm.wire import KEEPS_MAX, PartReady, Refuse
from kvxfer.errors import DeadlineExceededError, GrantGoneError, InvalidArgumentError, KvxferError, RefusedError
from kvxfer.observe import OpenSpan
from kvxfer.types import AgentRef, TransferId

DIRECT_WAIT_S = 1.0
"""The grant of a whole prompt exists when its source answers, or soon. After this time the source is asked instead."""
NO_DIRECT = (GrantGoneError, RefusedError, DeadlineExceededError)
"""What a pull under that grant fails with if the source may still have the prompt for this engine."""


@dataclasses.dataclass
class LoadEnded:
    """A load that is over and drained. ``error`` is ``None`` if it was committed."""

    order: LoadOrder
    error: KvxferError | None
    report: Report


class Fetch:
    """What one load takes from one source."""

    def __init__(self, order: LoadOrder, share: RankShare, readers: int) -> None:
        """``readers`` ranks of this engine take something from that source, or tell it that they do not."""
        self.order = order
        self.readers = readers
        self.share = share
        self.source = order.sources[share.source_rank]
        self.source_rank = share.source_rank
        self.started_s = time.monotonic()
        self.span = OpenSpan("kvxfer.load", order.traceparent)
        self.transfers: list[Transfer] = []
        self.results: list[TransferResult] = []
        self.attempt = 0
        self.parts = 0
        self.early_bytes = 0
        self.wire_s = 0.0
        self.is_all_announced = order.has_direct
        self.inbox: asyncio.Queue[PartReady | Refuse | KvxferError] = asyncio.Queue()
        self.task: asyncio.Task[Landing | None] | None = None
        self.why: KvxferError | None = None
        self.source_ref: AgentRef | None = None
        """The source's, once it was found."""
        self.landings = contextlib.AsyncExitStack()
        """The memory in which bytes land; left when none can land any more."""
        self.is_begun = self.is_adopted = self.is_ended = self.is_told = False
        """Whether the forward thread began it; the loop has taken it over; its pull has drained or belongs to the loop;
        it committed and was reported."""
        self.lock = threading.Lock()
        self.left = 0
        """What must end before that pull has: its transfers, and the call that starts them."""

    def end(self, error: KvxferError) -> None:
        """Cancel it, unless it has ended."""
        if self.why is not None or (self.task is not None and self.task.done()):
            return
        self.why = error
        if self.task is not None:
            self.task.cancel()

    async def drain(self) -> None:
        """End its transfers. Returns when no byte can land in its blocks any more."""
        for transfer in self.transfers:
            transfer.cancel()
        for transfer in self.transfers:
            await transfer.wait_drained()

    def take(self, results: Sequence[TransferResult]) -> None:
        """A part that was fetched."""
        self.results += results
        self.parts += 1
        self.wire_s += max((result.seconds["wire"] + result.seconds["confirm"] for result in results), default=0.0)
        self.early_bytes += sum(
            result.bytes_before_complete if self.is_all_announced else result.bytes for result in results
        )

    def end_span(self, report: Report) -> None:
        told = ("request_id", "transfer_id", "lane", "blocks", "bytes", "early_bytes", "parts", "attempts")
        self.span.end(report.code or None, **{name: getattr(report, name) for name in told})

    def begin_again(self) -> None:
        """Drop what was fetched. Its transfers have drained."""
        self.attempt += 1
        self.parts = self.early_bytes = 0
        self.wire_s = 0.0
        self.is_all_announced = self.order.has_direct
        self.inbox = asyncio.Queue()
        self.transfers.clear()
        self.results.clear()

    def pull_ended(self, pull: asyncio.Task[None]) -> None:
        error = None if pull.cancelled() else pull.exception()
        if isinstance(error, KvxferError):
            self.inbox.put_nowait(error)


def report_of(order: LoadOrder, fetches: list[Fetch], error: KvxferError | None) -> Report:
    """The outcome of a load."""
    results = [result for fetch in fetches for result in fetch.results]
    return Report(
        request_id=order.request_id,
        transfer_id=str(order.transfer_id),
        code="" if error is None else error.code,
        text="" if error is None else str(error),
        lane=results[-1].lane.value if results else "",
        blocks=len(order.blocks),
        bytes=sum(result.bytes for result in results),
        parts=sum(fetch.parts for fetch in fetches),
        seconds=time.monotonic() - fetches[0].started_s,
        wire_seconds=max(fetch.wire_s for fetch in fetches),
        early_bytes=sum(fetch.early_bytes for fetch in fetches),
        attempts=1 + max(fetch.attempt for fetch in fetches),
    )


def ended_early(order: LoadOrder, error: KvxferError) -> tuple[Fetch, LoadEnded]:
    """Of a load that is over before it began."""
    fetch = Fetch(order, RankShare(0, (), range(0)), 1)
    return fetch, LoadEnded(order, error, report_of(order, [fetch], error))


def taken() -> InvalidArgumentError:
    """The error of a load whose transfer id another load has."""
    return InvalidArgumentError("another request under this transfer id is being fetched, or cancelled")


def batches(wanted: list[TransferId]) -> Iterable[list[TransferId]]:
    """As many of them at a time as one message names."""
    for begin in range(0, len(wanted), KEEPS_MAX):
        yield wanted[begin : begin + KEEPS_MAX]
