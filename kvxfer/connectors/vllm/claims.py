"""Which engine reads a prompt whose request named no reader: the first rank of the engine that has it says so, before
another rank's part is read or released. Runs on the agent's loop; decides nothing, and must never know a block.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from kvxfer.connectors.vllm.wire import Claim, Claimed
from kvxfer.errors import DeadlineExceededError, KvxferError, from_code
from kvxfer.types import TransferId


class Claims:
    """The claims of one rank."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._waiting: dict[tuple[TransferId, str], list[asyncio.Future[Claimed]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def win(self, transfer_id: TransferId, source: str, ask: Callable[[Claim], Awaitable[object]]) -> None:
        """Return once the agent ``source`` says that this engine is the one reader. ``ask`` sends it a message. Raises
        the error that it was refused with (RefusedError: another engine's), DeadlineExceededError, and what ``ask``
        raises."""
        answer: asyncio.Future[Claimed] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault((transfer_id, source), [])
        waiting.append(answer)
        try:
            async with asyncio.timeout(self._timeout_s):
                await ask(Claim(transfer_id, self._rank, is_early=True))
                claimed = await answer
        except TimeoutError:
            raise DeadlineExceededError(f"agent {source!r} did not say for {self._timeout_s:g} s whose it is") from None
        finally:
            waiting.remove(answer)
            if not waiting and self._waiting.get((transfer_id, source)) is waiting:
                del self._waiting[transfer_id, source]
        if claimed.code:
            raise from_code(claimed.code, f"the source will not send it: {claimed.text}")

    def when_won(self, claim: Awaitable[None], callback: Callable[[], None]) -> None:
        """Call ``callback`` once ``claim`` (a :meth:`win`) is won; never where it is not."""
        task = asyncio.ensure_future(self._call(claim, callback))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, claim: Awaitable[None], callback: Callable[[], None]) -> None:
        with contextlib.suppress(KvxferError):  # it is another's, or the source is gone
            await claim
            callback()

    async def close(self) -> None:
        """Give up what waits for :meth:`when_won`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_message(self, agent_id: str, message: Claimed) -> None:
        """What a source's first rank says."""
        for answer in self._waiting.get((message.transfer_id, agent_id), ()):
            if not answer.done():
                answer.set_result(message)
