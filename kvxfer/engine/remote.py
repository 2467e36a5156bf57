"""The engine's side of the agent: grants for prompts computed here, pulls of prompts computed elsewhere.

It decides how agent calls and their results cross between the engine thread and the agent's event loop: results come
back to the engine thread through one ``post`` call, in order. It must never know of scheduling, tokens or HTTP, and it
never looks at bytes. The agent is known by its shape only, so that tests may bring their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvxfer.engine.request import Remote
from kvxfer.errors import (
    GrantExpired,
    GrantReleased,
    GrantRevoked,
    KvxferError,
    PeerGone,
    TransferCancelled,
)
from kvxfer.types import GrantState, Lane, Load, TransferId

_log = logging.getLogger(__name__)

Blocks = npt.NDArray[np.uint32]
Post = Callable[[Callable[[], None]], None]


class GrantLike(Protocol):
    """What the engine uses of :class:`kvxfer.agent.Grant`."""

    @property
    def state(self) -> GrantState: ...
    def ready(self, blocks: int, *, layers: int = 0, complete: bool = False) -> None: ...
    def revoke(self, reason: str = "") -> GrantState: ...
    def on_ended(self, callback: Callable[[GrantState], None]) -> None: ...


class ResultLike(Protocol):
    """What the engine uses of :class:`kvxfer.agent.TransferResult`."""

    @property
    def lane(self) -> Lane: ...
    @property
    def lane_reason(self) -> str: ...
    @property
    def blocks(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def seconds(self) -> Mapping[str, float]: ...
    @property
    def bytes_before_complete(self) -> int: ...


class TransferLike(Protocol):
    """What the engine uses of :class:`kvxfer.agent.Transfer`."""

    def __await__(self) -> Generator[Any, None, ResultLike]: ...
    def cancel(self) -> None: ...
    async def wait_drained(self) -> None: ...


class AgentLike(Protocol):
    """What the engine uses of :class:`kvxfer.agent.Agent`. ``Any`` stands for the agent's own pool type."""

    def load(self, load: Load) -> None: ...
    def grant(
        self,
        pool: Any,
        blocks: Blocks,
        *,
        transfer_id: TransferId,
        reader: str | None = None,
        ready_blocks: int = 0,
        ttl_s: float | None = None,
        content: bytes | None = None,
    ) -> GrantLike: ...
    def decline(self, transfer_id: TransferId) -> None: ...
    def pull(
        self,
        pool: Any,
        blocks: Blocks,
        *,
        transfer_id: TransferId,
        source: str,
        first: int = 0,
        content: bytes | None = None,
    ) -> TransferLike: ...
    def give_up(self, transfer_id: TransferId, source: str) -> None: ...


def ended_error(state: GrantState) -> KvxferError:
    """The error of a prefill leg whose grant ended while it was still being computed."""
    if state is GrantState.EXPIRED:
        return GrantExpired("the grant expired before the prompt was computed: no reader renewed it")
    if state is GrantState.READER_GONE:
        return PeerGone("the reader of this prompt died before it was computed")
    if state is GrantState.RELEASED:
        return GrantReleased("the reader gave the grant back before the prompt was computed")
    return GrantRevoked("the grant was revoked before the prompt was computed")


class Pull:
    """One pull.

    Its callbacks run on the engine thread: either ``on_committed``, or ``on_failed`` and later
    ``on_drained``, which ``on_failed`` may still replace.
    """

    def __init__(
        self,
        *,
        on_committed: Callable[[ResultLike], None],
        on_failed: Callable[[KvxferError], None],
        on_drained: Callable[[], None],
    ) -> None:
        self.on_committed = on_committed
        self.on_failed = on_failed
        self.on_drained = on_drained
        self.transfer: TransferLike | None = None
        self.is_cancelled = False


class BlockExchange:
    """Grants and pulls over one agent pool.

    Methods are called on the engine thread; ``post`` brings results back to it.
    """

    def __init__(self, agent: AgentLike, pool: Any, loop: asyncio.AbstractEventLoop, post: Post) -> None:
        self._agent = agent
        self._pool = pool
        self._loop = loop
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pulls_in_flight(self) -> int:
        """Pulls that have not drained yet."""
        return len(self._tasks)

    def load(self, load: Load) -> None:
        """What the next heartbeat says."""
        self._agent.load(load)

    def grant(
        self,
        blocks: list[int],
        remote: Remote,
        *,
        content: bytes,
        ready_blocks: int,
        on_ended: Callable[[GrantState], None],
    ) -> GrantLike:
        """Promise ``blocks``, which will hold ``content``, to the remote's agent.

        ``on_ended`` runs on the engine thread once the promise is over.
        """
        grant = self._agent.grant(
            self._pool,
            np.asarray(blocks, dtype=np.uint32),
            transfer_id=remote.transfer_id,
            reader=remote.agent_id,
            ready_blocks=ready_blocks,
            content=content,
        )
        self._on_loop(lambda: grant.on_ended(lambda state: self._post(lambda: on_ended(state))))
        return grant

    def decline(self, remote: Remote) -> None:
        """Let a reader, who may wait for its grant already, know that none will come."""
        try:
            self._agent.decline(remote.transfer_id)
        except KvxferError as error:
            _log.debug("a reader could not be told", extra={"code": error.code, "agent_id": remote.agent_id})

    def give_up(self, remote: Remote) -> None:
        """Let a source know that its grant will not be read: the pull never began."""

        def give_up() -> None:
            try:
                self._agent.give_up(remote.transfer_id, remote.agent_id)
            except KvxferError as error:
                _log.debug("a source could not be told", extra={"code": error.code, "agent_id": remote.agent_id})

        self._on_loop(give_up)

    def start(self, pull: Pull, blocks: list[int], remote: Remote, *, content: bytes, first: int) -> None:
        """Pull grant positions ``first...`` into ``blocks``, which are the agent's until a callback says otherwise.

        ``content`` is what they are taken to hold.
        """
        destination = np.asarray(blocks, dtype=np.uint32)

        def spawn() -> None:
            task = self._loop.create_task(self._run(pull, destination, remote, content, first))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._on_loop(spawn)

    def cancel(self, pull: Pull) -> None:
        """Give a pull up. It still ends with one of its callbacks."""

        def cancel() -> None:
            pull.is_cancelled = True
            if pull.transfer is not None:
                pull.transfer.cancel()

        self._on_loop(cancel)

    async def _run(self, pull: Pull, blocks: Blocks, remote: Remote, content: bytes, first: int) -> None:
        try:
            if pull.is_cancelled:
                raise TransferCancelled("cancelled before the pull began")
            pull.transfer = self._agent.pull(
                self._pool,
                blocks,
                transfer_id=remote.transfer_id,
                source=remote.agent_id,
                first=first,
                content=content,
            )
            result = await pull.transfer
        except Exception as error:
            failure = error if isinstance(error, KvxferError) else KvxferError(f"the pull failed: {error!r}")
            if failure is not error:
                _log.exception("a pull ended with an error from outside kvxfer's tree")
            self._post(lambda: pull.on_failed(failure))
            if pull.transfer is not None:
                await pull.transfer.wait_drained()
            self._post(lambda: pull.on_drained())
        else:
            await pull.transfer.wait_drained()
            self._post(lambda: pull.on_committed(result))

    def _on_loop(self, call: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(call)
