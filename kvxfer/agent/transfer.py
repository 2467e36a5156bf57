"""What a caller awaits: one pull, or one batch of reads or writes. Decides nothing; must never know which thread
handles the transport's events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, Self, TypeVar

import numpy.typing as npt

from kvxfer.agent.arguments import judged
from kvxfer.errors import KvxferError
from kvxfer.transport.batch import BatchStatistics, TransferBatch
from kvxfer.transport.pull import Pull, TransferProgress, TransferResult
from kvxfer.types import Lane, TransferId, TransferState

Result = TypeVar("Result")


class Awaited(Generic[Result]):
    """An object that a task awaits for its result, or for the error that ended it. Cancelling a task that awaits it
    does not cancel it. Leaving it as a context manager cancels it and waits until it has drained."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[Result] = loop.create_future()
        self._drained: asyncio.Future[None] = loop.create_future()

    @property
    def lane(self) -> Lane | None:
        """The lane tried last; ``None`` until there is one."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancel it: it ends with TransferCancelledError, unless it has ended. Returns at once."""
        raise NotImplementedError

    async def wait_drained(self) -> None:
        """Wait until it has ended and the transport no longer uses our memory: no byte lands in it any more."""
        await asyncio.shield(self._drained)

    def __await__(self) -> Generator[Any, None, Result]:
        return asyncio.shield(self._future).__await__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()
        await self.wait_drained()

    # --- for Transfers, on the loop ---

    def _settle(self, outcome: Result | KvxferError) -> None:
        if self._future.done():
            return
        if isinstance(outcome, KvxferError):
            self._future.set_exception(outcome)
            self._future.exception()  # where no task awaits it, statistics and metrics say it, and no warning is logged
        else:
            self._future.set_result(outcome)

    def _settle_drained(self) -> None:
        if not self._drained.done():
            self._drained.set_result(None)


class Transfer(Awaited[TransferResult]):
    """One pull, made by :meth:`Agent.pull` or :meth:`Agent.ask`::

        async with agent.pull(...) as transfer:
            result = await transfer

    After the end, whatever it was, the destination blocks may be reused once :meth:`wait_drained` returned. All methods
    but the awaited ones may be called from any thread.
    """

    _pull: Pull

    def __init__(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        """``settle``: called after an end that no event announces."""
        super().__init__(loop)
        self._settle_soon = settle

    @property
    def transfer_id(self) -> TransferId:
        return self._pull.transfer_id

    @property
    def lane(self) -> Lane | None:
        return self._pull.lane

    @property
    def is_final(self) -> bool:
        return self._pull.is_final

    @property
    def is_drained(self) -> bool:
        return self._pull.is_drained

    def progress(self) -> TransferProgress:
        """Its progress now. ``state`` may be final shortly before awaiting tasks continue."""
        return self._pull.progress()

    def result(self) -> TransferResult:
        """The result, without waiting. Raises the error that ended it, or InvalidArgumentError while it is running."""
        return self._pull.result()

    @judged
    def reserve(self, blocks: npt.ArrayLike, *, first: int = 0) -> None:
        """Give a transfer that :meth:`Agent.ask` made its destination blocks, for the grant's positions ``first...``.
        They belong to the agent until the transfer has drained, or :meth:`unreserve` gave them back.

        Raises InvalidArgumentError if the transfer has ended, has blocks, or has no known source yet; BlocksBusyError.
        """
        self._pull.reserve(blocks, first=first)

    def unreserve(self) -> bool:
        """Take its blocks back while its grant is not known to exist: nothing has landed in them, and the transfer
        waits on without blocks. Returns False if the blocks are in use or the transfer has ended."""
        return self._pull.unreserve()

    def cancel(self) -> None:
        self._pull.cancel()
        self._settle_soon()

    def __repr__(self) -> str:
        return repr(self._pull).replace("<Pull", "<Transfer", 1)


class AgentPost(Awaited[BatchStatistics]):
    """Reads or writes of registered memory, made by :meth:`Agent.post`. :meth:`poll` asks without waiting."""

    batch: TransferBatch
    """What it is underneath."""

    @property
    def lane(self) -> Lane | None:
        return self.batch.statistics().lane

    @property
    def is_final(self) -> bool:
        return self.batch.is_final

    @property
    def is_drained(self) -> bool:
        """Whether the caller may use the memory again."""
        return self.batch.is_drained

    def poll(self) -> TransferState:
        """The state after all events so far. Never waits. On the agent's loop."""
        return self.batch.poll()

    def statistics(self) -> BatchStatistics:
        """Bytes, pieces and times, also while it is running."""
        return self.batch.statistics()

    def cancel(self) -> None:
        self.batch.cancel()

    def __await__(self) -> Generator[Any, None, BatchStatistics]:
        if not self._future.done() and self.batch.wait_briefly():
            yield  # the loop's other tasks: a task that awaits one post after the other must not keep them waiting
        return (yield from super().__await__())

    def __repr__(self) -> str:
        return f"<AgentPost {self.batch!r}>"
