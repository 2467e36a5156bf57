"""A store of blocks in the memory of a ``kvxfer tier`` process, over the lanes of two agents.

Decides what is asked when, and that every wait ends: with an answer, with the service's end, or at its deadline. A
block goes out under a grant of this engine's rows that is revoked before the engine hears of its end, and comes in by a
pull that has drained before. Must never know an engine. While the service is not there, no block is here.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import secrets
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvxfer.agent import Agent, Pool
from kvxfer.connectors.common.runtime import Runtime
from kvxfer.connectors.tier.keeper import MOVES_MAX, unit_record
from kvxfer.connectors.tier.messages import (
    KEYS_MAX,
    TEXT_BYTES_MAX,
    Find,
    Found,
    Get,
    Message,
    MoveEnded,
    Put,
    TierHello,
    TierWelcome,
    Used,
    decode,
    encode,
)
from kvxfer.connectors.tier.store import BlockMove, BlockName, Done, Presence, Rows, StoreFigures
from kvxfer.errors import (
    DeadlineExceededError,
    GrantGoneError,
    IncompatibleError,
    KvxferError,
    PeerGoneError,
    StoreBrokenError,
    TransferCancelledError,
    from_code,
)
from kvxfer.types import AgentRef, TransferId

log = logging.getLogger("kvxfer.tier")
AnyT = TypeVar("AnyT")

ANSWER_KEPT_S = 1.0
"""What the service said of a block is believed for so long."""
LOST_S = 1.0
"""The service counts as gone after so long without a session."""
TICK_S = 0.1
WORDS_S = 1.0
"""How long the service's reason for a grant that ended is awaited."""
RETRY_S = 0.5
PING_S = 0.5
"""A service that does not answer is asked whether it is there so often."""
ANSWERS_MAX = 1 << 16


class PoolStore:
    """See :class:`~kvxfer.connectors.tier.store.BlockStore`. Everything but :meth:`find` happens on the agent's
    thread."""

    def __init__(
        self,
        rows: Rows,
        agent: Agent,
        service: str,
        *,
        service_url: str = "",
        lookup_wait_s: float = 1.0,
        deadline_s: float = 10.0,
        window: int = 32,
    ) -> None:
        """``agent``: not started; this store starts and ends it. ``service``: the agent of the ``kvxfer tier`` process,
        which ``service_url`` introduces where no coordinator does. Raises what starting the agent raises."""
        self._address, self._row_count, self._row_bytes = rows.ctypes.data, rows.shape[0], rows.shape[1]
        self._agent = agent
        self._service = service
        self._service_url = service_url
        self._lookup_wait_s = lookup_wait_s
        self._deadline_s = deadline_s
        self._window = min(window, MOVES_MAX)
        self._lock = threading.Lock()
        self._answers: collections.OrderedDict[BlockName, tuple[bool, float]] = collections.OrderedDict()
        """What the service said, and when."""
        self._asked: dict[BlockName, float] = {}
        """Until when an answer is awaited."""
        self._unsent: list[BlockName] = []
        self._is_silent = False
        """It did not answer in time: it is asked for nothing until it says something."""
        self._pinged_s = 0.0
        self._is_closed = False
        self._peer: AgentRef | None = None
        """The service's incarnation that has said that it knows this engine."""
        self._pool: Pool | None = None
        self._why = "the tier's service was not heard of yet"
        self._numbers = 0
        self._finds: dict[int, tuple[BlockName, ...]] = {}
        self._hellos: dict[int, asyncio.Future[None]] = {}
        self._ends: dict[TransferId, asyncio.Future[MoveEnded]] = {}
        self._lost_since_s: float | None = None
        self._slots: asyncio.Semaphore | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._runtime = Runtime(agent, self._serve)
        self._runtime.start()

    # --- the engine's thread ---

    def find(self, name: BlockName) -> Presence:
        now_s = time.monotonic()
        with self._lock:
            if self._peer is None or self._is_silent or self._is_closed:
                return Presence.ABSENT
            known = self._answers.get(name)
            if known is not None and now_s - known[1] <= ANSWER_KEPT_S:
                return Presence.HERE if known[0] else Presence.ABSENT
            until_s = self._asked.get(name)
            if until_s is None:
                self._asked[name] = now_s + self._lookup_wait_s
                self._unsent.append(name)
            elif now_s > until_s:
                self._doubt()
                return Presence.ABSENT
        return Presence.ASKED

    def flush(self) -> None:
        with self._lock:
            names, self._unsent = self._unsent, []
        if names:
            self._call(self._send_finds, names)

    @property
    def is_asking(self) -> bool:
        return bool(self._asked) and self._peer is not None and not self._is_silent

    def save(self, moves: Sequence[BlockMove], done: Done) -> None:
        self._each(self._save, moves, done)

    def load(self, moves: Sequence[BlockMove], done: Done) -> None:
        self._each(self._load, moves, done)

    def use(self, names: Sequence[BlockName]) -> None:
        self._call(self._send_used, list(names))

    def figures(self) -> StoreFigures:
        """The service has them, not its engines."""
        return StoreFigures()

    def wait_known(self, timeout_s: float) -> bool:
        """Wait until the service knows this engine; for tests and tools."""
        end_s = time.monotonic() + timeout_s
        while self._peer is None and time.monotonic() < end_s:
            time.sleep(0.01)
        return self._peer is not None

    def close(self) -> None:
        self._is_closed = True
        self._runtime.stop()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._is_closed:
            self._runtime.call(function, *arguments)

    def _each(self, act: Callable[[BlockMove], Awaitable[None]], moves: Sequence[BlockMove], done: Done) -> None:
        """All moves on the loop, as many at a time as the window says; ``done`` after the last."""

        async def one(move: BlockMove) -> KvxferError | None:
            assert self._slots is not None
            async with self._slots:
                try:
                    await act(move)
                except KvxferError as error:
                    return error
                except Exception as error:  # a bug must not leave the engine waiting
                    log.exception("a block could not be moved")
                    return StoreBrokenError(repr(error))
            return None

        async def all_of_them() -> None:
            outcomes: list[KvxferError | None] = [PeerGoneError("the tier was closed")] * len(moves)
            try:
                outcomes = await asyncio.gather(*map(one, moves))
            finally:
                done(outcomes)

        def begin() -> None:
            task = asyncio.ensure_future(all_of_them())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        if self._is_closed or self._peer is None:
            done([PeerGoneError(self._why)] * len(moves))
        else:
            self._runtime.call(begin)

    def _answer(self, name: BlockName, is_here: bool) -> None:
        """Under the lock."""
        self._answers[name] = (is_here, time.monotonic())
        self._answers.move_to_end(name)
        while len(self._answers) > ANSWERS_MAX:
            self._answers.popitem(last=False)

    # --- the agent's loop: one block ---

    async def _save(self, move: BlockMove) -> None:
        peer, pool = self._open()
        transfer_id = TransferId(secrets.token_bytes(16))
        blocks = self._blocks_of(pool, move)
        grant = self._agent.grant(
            pool,
            blocks,
            transfer_id=transfer_id,
            reader=peer.agent_id,
            content_digest=move.name.content_digest(self._row_bytes),
        )
        try:
            grant.ready(len(blocks), complete=True)
            ended = self._ends[transfer_id] = asyncio.get_running_loop().create_future()
            self._say(Put(transfer_id, move.name, self._row_bytes))
            end = await self._within(ended, "the tier's service did not take the block")
            if end.code:
                raise from_code(end.code, end.words)
            with self._lock:
                self._answers.pop(move.name, None)
        finally:
            self._ends.pop(transfer_id, None)
            grant.revoke()

    async def _load(self, move: BlockMove) -> None:
        peer, pool = self._open()
        transfer_id = TransferId(secrets.token_bytes(16))
        ended = self._ends[transfer_id] = asyncio.get_running_loop().create_future()
        try:
            transfer = self._agent.pull(
                pool,
                self._blocks_of(pool, move),
                transfer_id=transfer_id,
                source=peer.agent_id,
                timeout_s=self._deadline_s,
                deadline_s=self._deadline_s,
                content_digest=move.name.content_digest(self._row_bytes),
            )
            ended.add_done_callback(lambda _: transfer.cancel())  # it will never be granted
            try:
                self._say(Get(transfer_id, move.name, self._row_bytes))
                await self._within(transfer, "the tier's service did not give the block")
            except (TransferCancelledError, GrantGoneError):
                with contextlib.suppress(TimeoutError):  # the service says why, at about the same time
                    async with asyncio.timeout(WORDS_S):
                        end = await asyncio.shield(ended)
                        raise from_code(end.code, end.words) from None
                raise
            finally:
                transfer.cancel()
                await transfer.wait_drained()
        except KvxferError:
            with self._lock:
                self._answer(move.name, False)
            raise
        finally:
            self._ends.pop(transfer_id, None)
            if ended.done() and not ended.cancelled():
                ended.exception()

    async def _within(self, what: Awaitable[AnyT], why: str) -> AnyT:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await what
        except TimeoutError:
            with self._lock:
                self._doubt()
            raise DeadlineExceededError(f"{why} within {self._deadline_s:g} s") from None

    def _open(self) -> tuple[AgentRef, Pool]:
        if self._peer is None or self._pool is None:
            raise PeerGoneError(self._why)
        if self._is_silent:
            raise DeadlineExceededError("the tier's service does not answer")
        return self._peer, self._pool

    def _blocks_of(self, pool: Pool, move: BlockMove) -> range:
        count = self._row_bytes // pool.block_bytes
        return range(move.row * count, (move.row + 1) * count)

    # --- the agent's loop: messages ---

    def _say(self, message: Message) -> None:
        """Raises PeerGoneError, LimitExceededError."""
        self._agent.notify(self._service, encode(message))

    def _send_finds(self, names: list[BlockName]) -> None:
        by_record: dict[bytes, list[BlockName]] = collections.defaultdict(list)
        for name in names:
            by_record[name.record].append(name)
        for record, group in by_record.items():
            for first in range(0, len(group), KEYS_MAX):
                part = tuple(group[first : first + KEYS_MAX])
                self._numbers += 1
                self._finds[self._numbers] = part
                try:
                    self._say(Find(self._numbers, record, tuple(name.key for name in part)))
                except KvxferError as error:
                    del self._finds[self._numbers]
                    self._all_absent(part)
                    self._lose(str(error))

    def _send_used(self, names: list[BlockName]) -> None:
        for first in range(0, len(names) if self._peer is not None else 0, KEYS_MAX):
            part = names[first : first + KEYS_MAX]
            with contextlib.suppress(KvxferError):
                self._say(Used(part[0].record, tuple(name.key for name in part)))

    def _hear(self, message: Message) -> None:
        match message:
            case TierWelcome(number) if number in self._hellos:
                if not self._hellos[number].done():
                    self._hellos[number].set_result(None)
            case Found(number, is_here) if number in self._finds:
                names = self._finds.pop(number)
                with self._lock:
                    for name, here in zip(names, is_here, strict=False):
                        self._asked.pop(name, None)
                        self._answer(name, here)
            case MoveEnded(transfer_id) if transfer_id in self._ends:
                if not self._ends[transfer_id].done():
                    self._ends[transfer_id].set_result(message)

    def _all_absent(self, names: Sequence[BlockName]) -> None:
        with self._lock:
            for name in names:
                self._asked.pop(name, None)
                self._answer(name, False)

    def _doubt(self) -> None:
        """Under the lock: the service did not answer in time. Nobody waits for it again before it does."""
        if not self._is_silent:
            log.warning("the tier's service %s does not answer: no block is there until it does", self._service)
        self._is_silent = True
        self._asked.clear()
        self._unsent.clear()

    def _lose(self, why: str) -> None:
        """The service is gone, or does not know this engine any more: no block is here until it is found again."""
        error = self._agent.explain(PeerGoneError(why))
        why = why if isinstance(error, PeerGoneError) else str(error)
        with self._lock:
            if self._peer is None:
                return
            log.warning("the tier's service %s is lost: %s", self._peer, why)
            self._peer, self._why = None, why
            self._asked.clear()
            self._answers.clear()
            self._unsent.clear()
        self._finds.clear()
        for ended in self._ends.values():
            if not ended.done():
                ended.set_exception(error)

    # --- the agent's loop: the service ---

    async def _serve(self) -> None:
        self._slots = asyncio.Semaphore(self._window)
        listening = asyncio.ensure_future(self._listen())
        try:
            while not listening.done():
                if self._peer is None:
                    try:
                        await self._attach()
                    except (KvxferError, OSError, ValueError) as error:
                        self._why = f"the tier's service {self._service} cannot be used: {error}"
                        log.info("%s", self._why)
                        await asyncio.sleep(RETRY_S)
                else:
                    self._watch()
                    await asyncio.sleep(TICK_S)
        finally:
            listening.cancel()
            self._lose("the tier was closed")
            await asyncio.gather(listening, *self._tasks, return_exceptions=True)

    async def _listen(self) -> None:
        async for notification in self._agent.notifications():
            if notification.sender.agent_id == self._service:
                if self._is_silent and notification.sender == self._peer:
                    log.info("the tier's service %s answers again", self._service)
                    self._is_silent = False
                with contextlib.suppress(KvxferError):
                    self._hear(decode(notification.payload))

    async def _attach(self) -> None:
        """Find the service, offer it this engine's memory, and hear that it knows the engine. Raises KvxferError,
        OSError, ValueError."""
        if self._service_url:
            text = await asyncio.to_thread(_fetch, self._service_url.rstrip("/") + "/metadata")
            member = self._agent.add_remote_agent(text, self._service)
        else:
            member = await self._agent.wait_member(self._service, timeout_s=2.0)
        if not member.pools:
            raise IncompatibleError("that agent has no pool")
        self._offer(member.pools[0].block_bytes)
        self._numbers += 1
        number, heard = self._numbers, asyncio.get_running_loop().create_future()
        self._hellos[number] = heard
        try:
            self._greet(number)
            await self._within(heard, "it did not answer")
        finally:
            del self._hellos[number]
        self._lost_since_s = None
        with self._lock:
            self._peer, self._is_silent = member.ref, False
        log.info("blocks go to the tier's service %s", member.ref)

    def _greet(self, number: int) -> None:
        """Raises PeerGoneError, LimitExceededError."""
        self._say(TierHello(number, self._agent.export_metadata() if self._service_url else ""))

    def _offer(self, unit_bytes: int) -> None:
        """This engine's rows as a pool of the service's units."""
        if self._pool is not None and self._pool.block_bytes == unit_bytes:
            return
        if self._row_bytes % unit_bytes:
            raise IncompatibleError(
                f"a block has {self._row_bytes} bytes, which is no multiple of the service's unit_bytes {unit_bytes}"
            )
        if self._pool is not None:
            self._agent.remove_pool(self._pool)
        self._pool = self._agent.register_pool(
            unit_record(unit_bytes),
            (self._address, self._row_count * self._row_bytes),
            block_count=self._row_count * (self._row_bytes // unit_bytes),
        )

    def _watch(self) -> None:
        """Whether the incarnation that knows this engine is still there."""
        member = self._agent.find_member(self._service)
        if member is None or member.ref != self._peer:
            self._lose("it ended")
            return
        now_s = time.monotonic()
        with self._lock:
            if next(iter(self._asked.values()), now_s) < now_s:  # the oldest is the first
                self._doubt()
        if self._is_silent and now_s - self._pinged_s > PING_S:
            self._pinged_s = now_s
            with contextlib.suppress(KvxferError):
                self._greet(0)
        if self._agent.is_connected(self._service):
            self._lost_since_s = None
        elif self._lost_since_s is None:
            self._lost_since_s = now_s
        elif now_s - self._lost_since_s > LOST_S:
            self._lose("there is no session with it")


def _fetch(url: str) -> str:
    """What is there, a text of at most TEXT_BYTES_MAX bytes. Raises OSError, ValueError."""
    with urllib.request.urlopen(url, timeout=2.0) as answer:
        data: bytes = answer.read(TEXT_BYTES_MAX + 1)
    if len(data) > TEXT_BYTES_MAX:
        raise ValueError(f"{url} answers with more than {TEXT_BYTES_MAX} bytes")
    return data.decode()
