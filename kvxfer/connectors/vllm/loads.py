"""Prompts that were computed elsewhere and are wanted here: fetched from every rank that has a part of them,
committed as a whole or not at all.

One task a source of a load: it pulls the whole prompt where the source granted that already; otherwise it asks, and
pulls each part that the source grants, while the source may still be computing it. A load ends once: committed, or
failed with a named error; it is told of only after no byte can land in its blocks any more. Everything here lives on
the agent's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from kvxfer.agent import Agent, Pool, Transfer, TransferResult
from kvxfer.connectors.vllm.ids import DIRECT, part_id
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.staging import Cut, Landing, Staging, ranks_read
from kvxfer.connectors.vllm.steps import Load, Remote, Report
from kvxfer.connectors.vllm.wire import KEEPS_MAX, PARTS_MAX, Ask, Keep, Message, Part, Refuse, Release, encode
from kvxfer.errors import (
    DeadlineExceeded,
    GrantExpired,
    GrantRevoked,
    GrantUnknown,
    InvalidArgument,
    KvxferError,
    PeerGone,
    ProtocolViolation,
    TransferCancelled,
    from_code,
)
from kvxfer.observe import OpenSpan
from kvxfer.types import AgentRef, Member, TransferId

log = logging.getLogger("kvxfer.vllm")

WATCH_S = 0.5
"""How often a source that something is expected of is asked for a sign of life."""
ASKS_MAX = 4
"""So often a load begins anew because its source took back what it had promised."""
SILENT_S = 1.5
"""A source whose agent did not take a message for so long is given up."""


@dataclasses.dataclass
class Done:
    """A load that is over and drained. ``error`` is ``None`` where it was committed."""

    order: Load
    error: KvxferError | None
    report: Report


class Fetch:
    """What one load takes from one source."""

    def __init__(self, order: Load, source: str, source_rank: int, readers: int) -> None:
        self.order = order
        self.readers = readers
        self.source = source
        self.source_rank = source_rank
        self.started_s = time.monotonic()
        self.transfers: list[Transfer] = []
        self.results: list[TransferResult] = []
        self.attempt = 0
        self.parts = 0
        self.early_bytes = 0
        self.is_all_announced = order.has_direct
        self.inbox: asyncio.Queue[Part | Refuse | KvxferError] = asyncio.Queue()
        self.task: asyncio.Task[Landing | None] | None = None
        self.why: KvxferError | None = None
        self.life: AgentRef | None = None
        """Of the source, once it was found."""
        self.landings = contextlib.AsyncExitStack()
        """Left when no byte can land any more."""

    def end(self, error: KvxferError) -> None:
        """Give it up, unless it has ended."""
        if self.why is not None or (self.task is not None and self.task.done()):
            return
        self.why = error
        if self.task is not None:
            self.task.cancel()

    def begin_again(self) -> None:
        """Nothing that was fetched counts. Its transfers are drained."""
        self.attempt += 1
        self.parts = self.early_bytes = 0
        self.is_all_announced = self.order.has_direct
        self.inbox = asyncio.Queue()
        self.transfers.clear()
        self.results.clear()

    def pull_ended(self, pull: asyncio.Task[None]) -> None:
        error = None if pull.cancelled() else pull.exception()
        if isinstance(error, KvxferError):
            self.inbox.put_nowait(error)


class Loads:
    """The loads of one rank."""

    def __init__(
        self,
        agent: Agent,
        pools: tuple[Pool, ...],
        pages: Pages,
        options: ConnectorOptions,
        rank: int,
        ranks: int,
        on_done: Callable[[Done], None],
    ) -> None:
        self._agent = agent
        self._staging = Staging(agent, pools, pages.stores, options.staging_bytes)
        self._options = options
        self._rank = rank
        self._ranks = ranks
        self._on_done = on_done
        self._fetches: dict[str, list[Fetch]] = {}
        self._by_transfer: dict[tuple[TransferId, str], Fetch] = {}
        self._kept: dict[str, Remote] = {}
        self._watched: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, remotes: Iterable[Remote]) -> None:
        """These will be fetched later: their sources shall not forget them."""
        for remote in remotes:
            self._kept[remote.request_id] = remote
            self._meet_all(remote)
            for source in self._sources_of(remote.sources):
                self._watch(source)

    def start(self, order: Load) -> None:
        self._kept.pop(order.request_id, None)
        count = len(order.sources)
        ranks = self._ranks_read(self._rank, count)
        fetches = [Fetch(order, order.sources[rank], rank, self._readers(rank, count)) for rank in ranks]
        span = OpenSpan("kvxfer.load", order.traceparent)
        if any((order.transfer_id, fetch.source) in self._by_transfer for fetch in fetches):
            error = InvalidArgument("another request under this transfer id is being fetched, or cancelled")
            self._over(Done(order, error, _report(order, fetches, error)), span)
            return
        self._fetches[order.request_id] = fetches
        self._by_transfer.update({(order.transfer_id, fetch.source): fetch for fetch in fetches})
        self._spawn(self._run(order, fetches, span))

    def cancel(self, request_id: str) -> None:
        """Nobody waits for it any more; it still ends with a call of ``on_done``."""
        for fetch in self._fetches.get(request_id, ()):
            fetch.end(TransferCancelled("the request was aborted"))

    def release(self, remote: Remote) -> None:
        """It will not be fetched."""
        self._kept.pop(remote.request_id, None)
        self._meet_all(remote)
        self._let_go(remote.transfer_id, remote.sources)

    def on_message(self, agent_id: str, message: Part | Refuse) -> None:
        """What a source says."""
        fetch = self._by_transfer.get((message.transfer_id, agent_id))
        if fetch is None:
            return
        attempt = message.attempt if isinstance(message, Refuse) else message.part // PARTS_MAX
        if attempt == fetch.attempt:
            fetch.inbox.put_nowait(message)

    async def close(self) -> None:
        """End everything."""
        for fetch in itertools.chain(*self._fetches.values()):
            fetch.end(TransferCancelled("the engine stops"))
        for watch in self._watched.values():
            watch.cancel()
        await asyncio.gather(*self._tasks, *self._watched.values(), return_exceptions=True)

    # --- one load ---

    async def _run(self, order: Load, fetches: list[Fetch], span: OpenSpan) -> None:
        outcomes = await asyncio.gather(*(self._run_one(fetch, fetches) for fetch in fetches))
        error = next((outcome for outcome in outcomes if isinstance(outcome, KvxferError)), None)
        staged = [landing for landing in outcomes if isinstance(landing, Landing) and landing.is_staged]
        if error is None:
            try:
                for landing in staged:
                    unpack = self._staging.unpack
                    await asyncio.to_thread(unpack, landing, order.first, order.blocks, order.tokens)
            except Exception as failure:
                log.exception("staged blocks could not be unpacked")
                error = KvxferError(f"staged blocks could not be unpacked: {failure!r}")
        for fetch in fetches:
            try:
                await fetch.landings.aclose()
            except KvxferError as failure:
                log.warning("a staging pool stays: %s", failure)
            del self._by_transfer[order.transfer_id, fetch.source]
        del self._fetches[order.request_id]
        self._over(Done(order, error, _report(order, fetches, error)), span)
        self._let_go(order.transfer_id, order.sources)

    def _over(self, done: Done, span: OpenSpan) -> None:
        report, error = done.report, done.error
        if error is not None:
            about = {"request_id": report.request_id, "transfer_id": report.transfer_id, "code": error.code}
            log.warning("a load failed: %s", error, extra=about)
        told = ("request_id", "transfer_id", "lane", "blocks", "bytes", "early_bytes", "parts", "attempts")
        span.end(report.code or None, **{name: getattr(report, name) for name in told})
        self._on_done(done)

    async def _run_one(self, fetch: Fetch, fetches: list[Fetch]) -> Landing | KvxferError | None:
        """Its landing, drained; ``None`` where another source has all that is needed."""
        outcome: Landing | KvxferError | None
        try:
            if fetch.why is not None:  # it was given up before it began
                raise fetch.why
            fetch.task = asyncio.create_task(self._fetch(fetch))
            self._watch(fetch.source)
            await asyncio.wait({fetch.task}, timeout=self._options.load_deadline_s)
            fetch.end(DeadlineExceeded(f"load_deadline_s {self._options.load_deadline_s:g} passed"))
            outcome = await fetch.task
        except asyncio.CancelledError:
            outcome = fetch.why or TransferCancelled("the engine stops")
        except KvxferError as failure:
            outcome = failure
        except Exception as failure:
            log.exception("a load broke")
            outcome = KvxferError(f"the load broke: {failure!r}")
        if isinstance(outcome, KvxferError):
            for other in fetches:
                other.end(outcome)
        await _drain(fetch)
        return outcome

    async def _fetch(self, fetch: Fetch) -> Landing | None:
        order = fetch.order
        first = self._ranks_read(self._rank, len(order.sources)).start
        source = await self._find(order, first)
        if fetch.source_rank != first:
            if self._staging.is_replica(source):
                return None
            source = await self._find(order, fetch.source_rank)
        fetch.life = source.ref
        cut = Cut(fetch.source_rank, len(order.sources), self._rank, self._ranks)
        landing = await fetch.landings.enter_async_context(
            self._staging.land(source, cut, order.first, order.blocks, order.tokens)
        )
        is_early = True  # even where the source has answered: it tells its worker in its next step
        if order.has_direct and landing.first == 0 and len(order.sources) == self._ranks:
            try:
                await self._pull(fetch, landing, DIRECT, 0, len(landing.blocks))
                return landing
            except (GrantExpired, GrantUnknown) as error:
                log.debug("the direct grant is gone, asking: %s", error)
                is_early = False
        while True:
            try:
                await self._ask(fetch, landing, is_early=is_early)
                return landing
            except GrantRevoked as error:
                if fetch.attempt + 1 == ASKS_MAX:
                    raise
                log.debug("what was promised was taken back, asking again: %s", error)
            await _drain(fetch)
            fetch.begin_again()

    async def _ask(self, fetch: Fetch, landing: Landing, *, is_early: bool) -> None:
        """Ask for the prompt and pull its parts. Raises GrantRevoked where the source took them back: it may compute
        them again."""
        order = fetch.order
        ask = Ask(order.transfer_id, self._rank, fetch.attempt, fetch.readers, landing.first, is_early)
        await self._notify(fetch.source, ask)
        covered, end = landing.first, landing.end
        pulls: list[asyncio.Task[None]] = []
        try:
            while covered < end:
                message = await fetch.inbox.get()
                if isinstance(message, KvxferError):
                    raise message
                if isinstance(message, Refuse):
                    raise from_code(message.code, f"the source will not send it: {message.text}")
                if message.first != covered or not 0 < message.count <= end - covered or message.total != end:
                    raise ProtocolViolation(f"the source sends {message}, and blocks {covered} to {end} are wanted")
                covered += message.count
                fetch.is_all_announced = covered == end
                pull = self._pull(fetch, landing, message.part, message.first - landing.first, message.count)
                pulls.append(asyncio.create_task(pull))
                pulls[-1].add_done_callback(fetch.pull_ended)
            for task in pulls:
                await task
        finally:
            for task in pulls:
                task.cancel()
            await asyncio.gather(*pulls, return_exceptions=True)

    async def _pull(self, fetch: Fetch, landing: Landing, part: int, at: int, count: int) -> None:
        """Pull one part: its pages in every storage."""
        order = fetch.order
        transfers = []
        for index, (pool, store) in enumerate(zip(landing.pools, landing.stores, strict=True)):
            transfer = self._agent.pull(
                pool,
                store.ids(landing.blocks[at : at + count]),
                transfer_id=part_id(order.transfer_id, fetch.source_rank, self._rank, part, index),
                source=fetch.source,
                content=order.content,
                deadline_s=self._options.load_deadline_s,
            )
            transfers.append(transfer)
            fetch.transfers.append(transfer)
        results = [await transfer for transfer in transfers]
        fetch.results += results
        fetch.parts += 1
        fetch.early_bytes += sum(
            result.bytes_before_complete if fetch.is_all_announced else result.bytes for result in results
        )

    # --- sources ---

    async def _find(self, order: Load, source_rank: int) -> Member:
        """The life of that source which has the prompt, as far as it is known which. Raises PeerGone."""
        life = order.lives[source_rank] if order.lives else None
        self._meet(order, source_rank)
        return await self._agent.wait_member(order.sources[source_rank], timeout_s=SILENT_S, incarnation=life)

    def _meet(self, order: Load | Remote, source_rank: int) -> None:
        """Know that source by its card, where this engine goes by cards and the request has one. Raises PeerGone."""
        if self._options.introductions and order.cards:
            life = order.lives[source_rank] if order.lives else None
            self._agent.meet(order.cards[source_rank], order.sources[source_rank], incarnation=life)

    def _meet_all(self, remote: Remote) -> None:
        for source_rank in self._ranks_read(self._rank, len(remote.sources)):
            with contextlib.suppress(PeerGone):  # then it is not told
                self._meet(remote, source_rank)

    def _ranks_read(self, rank: int, count: int) -> range:
        """Which of ``count`` source ranks hold what rank ``rank`` of this engine holds."""
        return ranks_read(rank, self._ranks, count)

    def _readers(self, source_rank: int, count: int) -> int:
        """How many ranks of this engine take that source's blocks."""
        return sum(source_rank in self._ranks_read(rank, count) for rank in range(self._ranks))

    def _let_go(self, transfer_id: TransferId, sources: tuple[str, ...]) -> None:
        """This rank needs nothing more of its sources."""
        for source in self._ranks_read(self._rank, len(sources)):
            self._send(sources[source], Release(transfer_id, self._rank, self._readers(source, len(sources))))

    def _sources_of(self, sources: tuple[str, ...]) -> tuple[str, ...]:
        ranks = self._ranks_read(self._rank, len(sources))
        return sources[ranks.start : ranks.stop]

    def _watch(self, source: str) -> None:
        if source not in self._watched:
            self._watched[source] = asyncio.create_task(self._keep_in_touch(source))

    async def _keep_in_touch(self, source: str) -> None:
        """Tell the source what is wanted of it, as long as something is; end all of it when the source is silent."""
        try:
            while True:
                fetches = [fetch for fetch in itertools.chain(*self._fetches.values()) if fetch.source == source]
                kept = [kept for kept in self._kept.values() if source in self._sources_of(kept.sources)]
                if not fetches and not kept:
                    return
                wanted = [fetch.order.transfer_id for fetch in fetches] + [remote.transfer_id for remote in kept]
                try:
                    told = await self._notify(source, *(Keep(tuple(some)) for some in _batches(wanted)))
                    for fetch in fetches:
                        if fetch.life not in (None, told):
                            fetch.end(PeerGone(f"agent {source!r} was restarted: it is {told} now, not {fetch.life}"))
                except KvxferError as error:
                    for fetch in fetches:
                        fetch.end(error)
                await asyncio.sleep(WATCH_S)
        finally:
            del self._watched[source]

    async def _notify(self, agent_id: str, *messages: Message) -> AgentRef:
        """The life that took them. Raises PeerGone where none did in time, CoordinatorUnavailable."""
        member = await self._agent.wait_member(agent_id, timeout_s=SILENT_S)
        deliveries = [self._agent.notify(agent_id, encode(message)) for message in messages]
        try:
            async with asyncio.timeout(SILENT_S):
                for delivery in deliveries:
                    await delivery
        except TimeoutError:
            raise PeerGone(f"agent {agent_id!r} took no message for {SILENT_S:g} s") from None
        return member.ref

    def _send(self, agent_id: str, message: Message) -> None:
        with contextlib.suppress(KvxferError):  # a source that is gone need not be told
            self._agent.notify(agent_id, encode(message))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _drain(fetch: Fetch) -> None:
    """Returns when no byte can land in its blocks any more."""
    for transfer in fetch.transfers:
        transfer.cancel()
    for transfer in fetch.transfers:
        await transfer.wait_drained()


def _batches(wanted: list[TransferId]) -> Iterable[list[TransferId]]:
    for begin in range(0, len(wanted), KEEPS_MAX):
        yield wanted[begin : begin + KEEPS_MAX]


def _report(order: Load, fetches: list[Fetch], error: KvxferError | None) -> Report:
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
        early_bytes=sum(fetch.early_bytes for fetch in fetches),
        attempts=1 + max(fetch.attempt for fetch in fetches),
    )
