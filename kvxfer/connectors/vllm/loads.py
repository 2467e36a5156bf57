"""Prompts that were computed elsewhere and are wanted here: fetched from every rank that has a part of them,
committed as a whole or not at all.

One task a source of a load: it pulls the whole prompt where the source granted that already; otherwise it asks, and
pulls each part that the source grants, while the source may still be computing it. A load ends once: committed, or
failed with a named error; it is told of only after no byte can land in its blocks any more. Everything here lives on
the agent's loop, but for the way of most loads: a prompt granted as a whole by a source of our kind that is known is
pulled by the forward thread, which waits for it, and the loop is needed only where that does not end well or soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from kvxfer.agent import Agent, Pool, Transfer
from kvxfer.connectors.common.ids import DIRECT, part_id
from kvxfer.connectors.vllm.claims import Claims
from kvxfer.connectors.vllm.fetch import Done, Fetch, report_of
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.staging import Cut, Landing, Staging, ranks_read
from kvxfer.connectors.vllm.steps import Load, Remote, Report
from kvxfer.connectors.vllm.wire import (
    KEEPS_MAX,
    PARTS_MAX,
    Ask,
    Claimed,
    Keep,
    Message,
    Part,
    Refuse,
    Release,
    encode,
)
from kvxfer.errors import (
    DeadlineExceededError,
    GrantGoneError,
    GrantRevokedError,
    InvalidArgumentError,
    KvxferError,
    PeerGoneError,
    ProtocolError,
    RefusedError,
    TransferCancelledError,
    from_code,
)
from kvxfer.types import AgentRef, Member, TransferId

log = logging.getLogger("kvxfer.vllm")

WATCH_S = 0.5
"""How often a source that something is expected of is asked for a sign of life."""
ASKS_MAX = 4
"""So often a load begins anew because its source took back what it had promised."""
SILENT_S = 1.5
"""A source whose agent did not take a message for so long is given up."""


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
        post: Callable[..., None],
    ) -> None:
        """``post(function, *arguments)`` calls on the agent's loop. ``on_done`` may come from any thread."""
        self._agent = agent
        self._staging = Staging(agent, pools, pages.stores, options.staging_bytes)
        self._options = options
        self._rank = rank
        self._ranks = ranks
        self._on_done = on_done
        self._post = post
        self._claims = Claims(rank, options.load_deadline_s)
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
        if any((order.transfer_id, fetch.source) in self._by_transfer for fetch in fetches):
            error = _taken()
            self._over(Done(order, error, report_of(order, fetches, error)), fetches[0])
            return
        self._launch(fetches)

    def _launch(self, fetches: list[Fetch]) -> None:
        order = fetches[0].order
        self._kept.pop(order.request_id, None)
        self._fetches[order.request_id] = fetches
        for fetch in fetches:
            self._by_transfer.setdefault((order.transfer_id, fetch.source), fetch)
        self._spawn(self._run(order, fetches))

    def begin(self, order: Load) -> Fetch | None:
        """Pull now what the source granted as a whole, on the forward thread; ``None``: that is for :meth:`start`. It
        is to be waited for with :meth:`Agent.wait`, and to be adopted before it is cancelled or where that takes long.
        """
        name = order.sources[self._rank] if len(order.sources) == self._ranks else ""
        has_to_claim = order.is_open and self._rank != 0
        if (
            not name
            or not order.has_direct
            or has_to_claim
            or order.first != 0
            or (order.transfer_id, name) in self._by_transfer
        ):
            return None
        try:
            source = self._agent.find_member(name)
        except KvxferError:  # the loop's way tells it
            return None
        life = order.lives[self._rank] if order.lives else None
        if source is None or life not in (None, source.ref.incarnation) or not self._staging.is_alike(source):
            return None
        fetch = Fetch(order, name, self._rank, 1)
        fetch.is_begun, fetch.life = True, source.ref
        landing = self._staging.in_place(order.first, order.blocks)
        fetch.left = len(landing.pools) + 1
        ended = functools.partial(self._one_ended, fetch)
        try:
            self._begin_pull(fetch, landing, DIRECT, 0, len(order.blocks), ended)
        except KvxferError as error:
            fetch.is_ended, fetch.why = True, error
            self._post(self.adopt, fetch)
        else:
            self._one_ended(fetch)
        return fetch

    def adopt(self, fetch: Fetch) -> None:
        """See to one that was begun. Again: nothing."""
        if fetch.is_adopted or fetch.is_told:
            return
        fetch.is_adopted = True
        if (fetch.order.transfer_id, fetch.source) in self._by_transfer:
            fetch.why = fetch.why or _taken()
        self._launch([fetch])

    def _one_ended(self, fetch: Fetch, _: Transfer | None = None) -> None:
        """One of its transfers drained, or it has all of them now. On any thread."""
        with fetch.lock:
            fetch.left -= 1
            if fetch.left:
                return
        try:
            fetch.take([transfer.result() for transfer in fetch.transfers])
        except KvxferError:
            self._post(self.adopt, fetch)  # first: once it has ended, the forward thread may post its cancel
            fetch.is_ended = True
            return
        fetch.is_told = fetch.is_ended = True
        report = report_of(fetch.order, [fetch], None)
        self._on_done(Done(fetch.order, None, report))
        self._post(self._settle, fetch, report)

    def _settle(self, fetch: Fetch, report: Report) -> None:
        """Of one that was told of: the rest. Its source knows by the end of the grant that nothing more is needed."""
        if not fetch.is_adopted:
            self._kept.pop(fetch.order.request_id, None)
            fetch.end_span(report)
            with contextlib.suppress(PeerGoneError):
                self._meet(fetch.order, fetch.source_rank)

    def cancel(self, request_id: str) -> None:
        """Nobody waits for it any more; it still ends with a call of ``on_done``."""
        for fetch in self._fetches.get(request_id, ()):
            fetch.end(TransferCancelledError("the request was aborted"))

    def release(self, remote: Remote) -> None:
        """It will not be fetched."""
        self._kept.pop(remote.request_id, None)
        self._meet_all(remote)
        self._let_go(remote)

    def on_message(self, agent_id: str, message: Part | Refuse | Claimed) -> None:
        """What a source says."""
        if isinstance(message, Claimed):
            self._claims.on_message(agent_id, message)
            return
        fetch = self._by_transfer.get((message.transfer_id, agent_id))
        if fetch is None:
            return
        attempt = message.attempt if isinstance(message, Refuse) else message.part // PARTS_MAX
        if attempt == fetch.attempt:
            fetch.inbox.put_nowait(message)

    async def close(self) -> None:
        """End everything."""
        for fetch in itertools.chain(*self._fetches.values()):
            fetch.end(TransferCancelledError("the engine stops"))
        for watch in self._watched.values():
            watch.cancel()
        await self._claims.close()
        await asyncio.gather(*self._tasks, *self._watched.values(), return_exceptions=True)

    # --- one load ---

    async def _run(self, order: Load, fetches: list[Fetch]) -> None:
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
            if self._by_transfer.get((order.transfer_id, fetch.source)) is fetch:
                del self._by_transfer[order.transfer_id, fetch.source]
        del self._fetches[order.request_id]
        self._over(Done(order, error, report_of(order, fetches, error)), fetches[0])
        if not fetches[0].is_told:
            self._let_go(order)

    def _over(self, done: Done, first: Fetch) -> None:
        report, error = done.report, done.error
        first.end_span(report)
        if first.is_told:
            return
        if error is not None:
            about = {"request_id": report.request_id, "transfer_id": report.transfer_id, "code": error.code}
            log.warning("a load failed: %s", error, extra=about)
        self._on_done(done)

    async def _run_one(self, fetch: Fetch, fetches: list[Fetch]) -> Landing | KvxferError | None:
        """Its landing, drained; ``None`` where there is nothing to unpack: another source has it, or it is there."""
        outcome: Landing | KvxferError | None
        try:
            if fetch.why is not None:  # it was given up before it began
                raise fetch.why
            fetch.task = asyncio.create_task(self._fetch(fetch))
            self._watch(fetch.source)
            await asyncio.wait({fetch.task}, timeout=self._options.load_deadline_s)
            fetch.end(DeadlineExceededError(f"load_deadline_s {self._options.load_deadline_s:g} passed"))
            outcome = await fetch.task
        except asyncio.CancelledError:
            outcome = fetch.why or TransferCancelledError("the engine stops")
        except KvxferError as failure:
            outcome = failure
        except Exception as failure:
            log.exception("a load broke")
            outcome = KvxferError(f"the load broke: {failure!r}")
        if isinstance(outcome, KvxferError):
            for other in fetches:
                other.end(outcome)
        await fetch.drain()
        return outcome

    async def _fetch(self, fetch: Fetch) -> Landing | None:
        order = fetch.order
        is_early = True  # even where the source has answered: it tells its worker in its next step
        if fetch.is_begun:
            try:
                for transfer in fetch.transfers:
                    await transfer
                return None
            except (GrantGoneError, RefusedError) as error:
                await self._direct_failed(fetch, error)
                is_early = False
        first = self._ranks_read(self._rank, len(order.sources)).start
        source = await self._find(order, first)
        if fetch.source_rank != first:
            if self._staging.is_replica(source):
                return None
            source = await self._find(order, fetch.source_rank)
        fetch.life = source.ref
        await self._claim(order, fetch.source_rank)
        cut = Cut(fetch.source_rank, len(order.sources), self._rank, self._ranks)
        landing = await fetch.landings.enter_async_context(
            self._staging.land(source, cut, order.first, order.blocks, order.tokens)
        )
        has_direct = order.has_direct and not fetch.is_begun
        if has_direct and landing.first == 0 and len(order.sources) == self._ranks:
            try:
                await self._pull(fetch, landing, DIRECT, 0, len(landing.blocks))
                return landing
            except (GrantGoneError, RefusedError) as error:
                await self._direct_failed(fetch, error)
                is_early = False
        while True:
            try:
                await self._ask(fetch, landing, is_early=is_early)
                return landing
            except GrantRevokedError as error:
                if fetch.attempt + 1 == ASKS_MAX:
                    raise
                log.debug("what was promised was taken back, asking again: %s", error)
            await fetch.drain()
            fetch.begin_again()

    async def _direct_failed(self, fetch: Fetch, error: KvxferError) -> None:
        """The source is asked instead: it says whose the prompt is. Another may have got some of several grants."""
        log.debug("the direct grant is gone, or another's; asking: %s", error)
        await fetch.drain()
        fetch.transfers.clear()

    async def _ask(self, fetch: Fetch, landing: Landing, *, is_early: bool) -> None:
        """Ask for the prompt and pull its parts. Raises GrantRevokedError where the source took them back: it may
        compute them again."""
        order = fetch.order
        ask = Ask(order.transfer_id, self._rank, fetch.attempt, fetch.readers, landing.first, is_early)
        await self.notify(fetch.source, ask)
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
                    raise ProtocolError(f"the source sends {message}, and blocks {covered} to {end} are wanted")
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
        transfers = self._begin_pull(fetch, landing, part, at, count)
        fetch.take([await transfer for transfer in transfers])

    def _begin_pull(
        self,
        fetch: Fetch,
        landing: Landing,
        part: int,
        at: int,
        count: int,
        on_ended: Callable[[Transfer], None] | None = None,
    ) -> list[Transfer]:
        order = fetch.order
        transfers = []
        for index, (pool, store) in enumerate(zip(landing.pools, landing.stores, strict=True)):
            transfer = self._agent.pull(
                pool,
                store.ids(landing.blocks[at : at + count]),
                transfer_id=part_id(order.transfer_id, fetch.source_rank, self._rank, part, index),
                source=fetch.source,
                content_digest=order.content,
                deadline_s=self._options.load_deadline_s,
                on_ended=on_ended,
            )
            transfers.append(transfer)
            fetch.transfers.append(transfer)
        return transfers

    # --- sources ---

    async def _find(self, order: Load, source_rank: int) -> Member:
        """The life of that source which has the prompt, as far as it is known which. Raises PeerGoneError."""
        life = order.lives[source_rank] if order.lives else None
        self._meet(order, source_rank)
        return await self._agent.wait_member(order.sources[source_rank], timeout_s=SILENT_S, incarnation=life)

    def _meet(self, order: Load | Remote, source_rank: int) -> None:
        """Know that source by its card, where this engine goes by cards and the request has one. Raises
        PeerGoneError."""
        if self._options.introductions and order.cards:
            life = order.lives[source_rank] if order.lives else None
            self._agent.meet(order.cards[source_rank], order.sources[source_rank], incarnation=life)

    def _meet_all(self, remote: Remote) -> None:
        for source_rank in self._ranks_read(self._rank, len(remote.sources)):
            with contextlib.suppress(PeerGoneError):  # then it is not told
                self._meet(remote, source_rank)

    def _ranks_read(self, rank: int, count: int) -> range:
        """Which of ``count`` source ranks hold what rank ``rank`` of this engine holds."""
        return ranks_read(rank, self._ranks, count)

    def _readers(self, source_rank: int, count: int) -> int:
        """How many ranks of this engine take that source's blocks."""
        return sum(source_rank in self._ranks_read(rank, count) for rank in range(self._ranks))

    async def _claim(self, order: Load | Remote, source_rank: int) -> None:
        """Return once no other engine will have that prompt of that rank. Raises what it was refused with."""
        if order.is_open and source_rank != 0:
            self._meet(order, 0)
            first = order.sources[0]
            await self._claims.win(order.transfer_id, first, functools.partial(self.notify, first))

    def _let_go(self, order: Load | Remote) -> None:
        """This rank needs nothing more of its sources."""
        for source_rank in self._ranks_read(self._rank, len(order.sources)):
            readers = self._readers(source_rank, len(order.sources))
            release = Release(order.transfer_id, self._rank, readers)
            send = functools.partial(self._send, order.sources[source_rank], release)
            if order.is_open and source_rank != 0:
                self._claims.when_won(self._claim(order, source_rank), send)
            else:
                send()

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
                    told = await self.notify(source, *(Keep(tuple(some)) for some in _batches(wanted)))
                    for fetch in fetches:
                        if fetch.life not in (None, told):
                            fetch.end(
                                PeerGoneError(f"agent {source!r} was restarted: it is {told} now, not {fetch.life}")
                            )
                except KvxferError as error:
                    for fetch in fetches:
                        fetch.end(error)
                await asyncio.sleep(WATCH_S)
        finally:
            del self._watched[source]

    async def notify(self, agent_id: str, *messages: Message) -> AgentRef:
        """Say that to an agent, and return the life that took it. Raises PeerGoneError where none did in time,
        CoordinatorUnavailableError."""
        member = await self._agent.wait_member(agent_id, timeout_s=SILENT_S)
        deliveries = [self._agent.notify(agent_id, encode(message)) for message in messages]
        try:
            async with asyncio.timeout(SILENT_S):
                for delivery in deliveries:
                    await delivery
        except TimeoutError:
            raise PeerGoneError(f"agent {agent_id!r} took no message for {SILENT_S:g} s") from None
        return member.ref

    def _send(self, agent_id: str, message: Message) -> None:
        with contextlib.suppress(KvxferError):  # a source that is gone need not be told
            self._agent.notify(agent_id, encode(message))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _taken() -> InvalidArgumentError:
    return InvalidArgumentError("another request under this transfer id is being fetched, or cancelled")


def _batches(wanted: list[TransferId]) -> Iterable[list[TransferId]]:
    for begin in range(0, len(wanted), KEEPS_MAX):
        yield wanted[begin : begin + KEEPS_MAX]
