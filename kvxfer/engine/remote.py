"""The engine's side of the agent: grants for prompts computed here, pulls of prompts computed elsewhere.

It decides how agent calls and their results cross between the engine thread and the agent's event loop: results come
back to the engine thread through one ``post`` call, in order. It must never know of scheduling, tokens or HTTP, and it
never looks at bytes. The agent is known by its shape only, so that tests may bring their own.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvxfer.engine.request import Remote
from kvxfer.errors import (
    GrantExpiredError,
    GrantReleasedError,
    GrantRevokedError,
    KvxferError,
    PeerGoneError,
    TransferCancelledError,
)
from kvxfer.types import GrantState, Lane, Load, TransferId

_log = logging.getLogger(__name__)

Blocks = npt.NDArray[np.uint32]
Post = Callable[[Callable[[], None]], None]


class GrantLike(Protocol):
    """What the engine uses of :class:`kvxfer.agent.Grant`."""

    @property
    def state(self) -> GrantState: ...
    @property
    def has_begun(self) -> bool: ...
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
    def reserve(self, blocks: Blocks, *, first: int = 0) -> None: ...
    def unreserve(self) -> bool: ...
    def cancel(self) -> None: ...
    async def wait_drained(self) -> None: ...


class AgentLike(Protocol):
    """What the engine uses of :class:`kvxfer.agent.Agent`. ``Any`` stands for the agent's own pool type."""

    def load(self, load: Load) -> None: ...
    def expect(self, transfer_id: TransferId, *, reader: str | None = None) -> None: ...
    def pulse(self, *, has_work: bool, took_in: bool = True) -> None: ...
    def grant(
        self,
        pool: Any,
        blocks: Blocks,
        *,
        transfer_id: TransferId,
        reader: str | None = None,
        ready_blocks: int = 0,
        ttl_s: float | None = None,
        content_digest: bytes | None = None,
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
        timeout_s: float | None = None,
        content_digest: bytes | None = None,
        on_granted: Callable[[Any], None] | None = None,
    ) -> TransferLike: ...
    def ask(
        self,
        pool: Any,
        count: int,
        *,
        transfer_id: TransferId,
        source: str,
        timeout_s: float | None = None,
        content_digest: bytes | None = None,
        on_granted: Callable[[Any], None] | None = None,
    ) -> TransferLike: ...
    def give_up(self, transfer_id: TransferId, source: str) -> None: ...


def ended_error(state: GrantState) -> KvxferError:
    """The error of a prefill leg whose grant ended while it was still being computed."""
    if state is GrantState.EXPIRED:
        return GrantExpiredError("the grant expired before the prompt was computed: no reader renewed it")
    if state is GrantState.READER_GONE:
        return PeerGoneError("the reader of this prompt died before it was computed")
    if state is GrantState.RELEASED:
        return GrantReleasedError("the reader gave the grant back before the prompt was computed")
    return GrantRevokedError("the grant was revoked before the prompt was computed")


class EnginePull:
    """One pull.

    Its callbacks run on the engine thread: ``on_granted``, perhaps more than once; then either
    ``on_committed``, or ``on_failed`` and later ``on_drained``, which ``on_failed`` may still replace.
    """

    def __init__(
        self,
        *,
        on_granted: Callable[[], None],
        on_committed: Callable[[ResultLike], None],
        on_failed: Callable[[KvxferError], None],
        on_drained: Callable[[], None],
    ) -> None:
        self.on_granted = on_granted
        self.on_committed = on_committed
        self.on_failed = on_failed
        self.on_drained = on_drained
        self.transfer: TransferLike | None = None
        self.lock = threading.Lock()
        self.is_unreserved = False
        """Its blocks were taken back before it began; under the lock, as ``transfer`` until it is set."""
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

    def expect(self, remote: Remote) -> None:
        """The prompt of a prefill leg was accepted: its reader, who may be early, is told that it is queued. From any
        thread. Raises GrantReleasedError where its reader gave it up, InvalidArgumentError for an id used before,
        LimitExceededError."""
        self._agent.expect(remote.transfer_id, reader=remote.agent_id)

    def pulse(self, *, has_work: bool, took_in: bool) -> None:
        """A sign of life of the engine; see :meth:`kvxfer.agent.Agent.pulse`."""
        try:
            self._agent.pulse(has_work=has_work, took_in=took_in)
        except KvxferError as error:
            _log.debug("the agent takes no sign of life", extra={"code": error.code})

    def grant(
        self,
        blocks: list[int],
        remote: Remote,
        *,
        content_digest: bytes,
        ready_blocks: int,
        on_ended: Callable[[GrantState], None],
    ) -> GrantLike:
        """Promise ``blocks``, which will hold ``content_digest``, to the remote's agent.

        ``on_ended`` runs on the engine thread once the promise is over.
        """
        grant = self._agent.grant(
            self._pool,
            np.asarray(blocks, dtype=np.uint32),
            transfer_id=remote.transfer_id,
            reader=remote.agent_id,
            ready_blocks=ready_blocks,
            content_digest=content_digest,
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

    def start(
        self,
        pull: EnginePull,
        blocks: list[int],
        remote: Remote,
        *,
        content_digest: bytes,
        first: int = 0,
        count: int = 0,
    ) -> None:
        """Pull grant positions ``first...`` into ``blocks``, which are the agent's until a callback says otherwise, or
        :meth:`unreserve`. No blocks: ask whether the grant of ``count`` blocks exists, and wait for :meth:`reserve`.

        ``content_digest`` is what they are taken to hold.
        """
        destination = np.asarray(blocks, dtype=np.uint32)

        def spawn() -> None:
            task = self._loop.create_task(self._run(pull, destination, remote, content_digest, first, count))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._on_loop(spawn)

    def reserve(self, pull: EnginePull, blocks: list[int], *, first: int) -> None:
        """Give a pull that asked its blocks, for grant positions ``first...``."""
        if pull.transfer is None:
            raise AssertionError("a pull is granted before it has begun")
        try:
            pull.transfer.reserve(np.asarray(blocks, dtype=np.uint32), first=first)
        except KvxferError as error:  # it is over, and its end is on the way
            _log.debug("a pull took no blocks any more", extra={"code": error.code})

    def unreserve(self, pull: EnginePull) -> bool:
        """Take the blocks of a pull back, unless its grant exists, or it is over."""
        with pull.lock:
            if pull.transfer is None:
                pull.is_unreserved = True
                return True
        try:
            return pull.transfer.unreserve()
        except KvxferError as error:  # the agent has ended, and tells its transfers so
            _log.debug("a pull gave no blocks back", extra={"code": error.code})
            return False

    def cancel(self, pull: EnginePull) -> None:
        """Give a pull up. It still ends with one of its callbacks."""

        def cancel() -> None:
            pull.is_cancelled = True
            if pull.transfer is not None:
                pull.transfer.cancel()

        self._on_loop(cancel)

    def _begin(
        self, pull: EnginePull, blocks: Blocks, remote: Remote, content_digest: bytes, first: int, count: int
    ) -> TransferLike:
        say_granted = functools.partial(self._post, pull.on_granted)
        if pull.is_unreserved or not len(blocks):
            return self._agent.ask(
                self._pool,
                count,
                transfer_id=remote.transfer_id,
                source=remote.agent_id,
                timeout_s=remote.timeout_s,
                content_digest=content_digest,
                on_granted=lambda _: say_granted(),
            )
        return self._agent.pull(
            self._pool,
            blocks,
            transfer_id=remote.transfer_id,
            source=remote.agent_id,
            first=first,
            timeout_s=remote.timeout_s,
            content_digest=content_digest,
            on_granted=lambda _: say_granted(),
        )

    async def _run(
        self, pull: EnginePull, blocks: Blocks, remote: Remote, content_digest: bytes, first: int, count: int
    ) -> None:
        try:
            if pull.is_cancelled:
                self.give_up(remote)
                raise TransferCancelledError("cancelled before the pull began")
            with pull.lock:
                pull.transfer = self._begin(pull, blocks, remote, content_digest, first, count)
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
