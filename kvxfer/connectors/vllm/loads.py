"""Loads: prompts that another engine computed, fetched from every rank that has a part, and committed as a whole or not
at all.

A load has one task for each source. The task pulls the whole prompt if the source has granted it already. Otherwise it
asks, and pulls each part that the source grants, while the source may still be computing. A load ends once: committed,
or failed with a named error, which is reported only when no byte can land in its blocks any more. The tasks run on the
agent's loop. Most loads need no task: the forward thread pulls a prompt that a known source with equal pages granted
as a whole (:meth:`Loads.begin`), and waits. The loop adopts such a load if the pull fails or takes long.
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
from kvxfer.connectors.vllm.fetch import (
    DIRECT_WAIT_S,
    NO_DIRECT,
    Fetch,
    LoadEnded,
    batches,
    ended_early,
    report_of,
    taken,
)
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.readership import Readership
from kvxfer.connectors.vllm.staging import Landing, Staging
from kvxfer.connectors.vllm.steps import LoadOrder, RemotePrompt, Report
from kvxfer.connectors.vllm.wire import (
    PARTS_MAX,
    Ask,
    Claimed,
    Keep,
    Message,
    PartReady,
    Refuse,
    Release,
    encode,
)
from kvxfer.errors import (
    DeadlineExceededError,
    GrantRevokedError,
    IncompatibleError,
    KvxferError,
    PeerGoneError,
    ProtocolError,
    TransferCancelledError,
    from_code,
)
from kvxfer.patience import timeout_while_running
from kvxfer.types import AgentRef, Member, TransferId

log = logging.getLogger("kvxfer.vllm")

WATCH_S = 0.5
"""How often a source that owes something is asked for a heartbeat."""
ASKS_MAX = 4
"""How often a load begins again because its source revoked its grants."""
SILENT_S = 1.5
"""A source whose agent does not take a message for this time, while this process runs, is gone."""


class Loads:
    """The loads of one rank."""

    def __init__(
        self,
        agent: Agent,
        pools: tuple[Pool, ...],
        pages: Pages,
        options: ConnectorOptions,
        readership: Readership,
        on_done: Callable[[LoadEnded], None],
        call_soon: Callable[..., None],
    ) -> None:
        """``readership``: this rank's. ``call_soon(function, *arguments)`` calls on the agent's loop. ``on_done`` may
        come from any thread."""
        self._agent = agent
        self._staging = Staging(agent, pools, pages.stores, options.staging_bytes)
        self._options = options
        self._readership = readership
        self._rank = readership.rank
        self._on_done = on_done
        self._call_soon = call_soon
        self._claims = Claims(readership.rank, options.load_deadline_s)
        self._fetches: dict[str, list[Fetch]] = {}
        self._by_transfer: dict[tuple[TransferId, str], Fetch] = {}
        self._kept: dict[str, RemotePrompt] = {}
        self._watched: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, remotes: Iterable[RemotePrompt]) -> None:
        """These prompts will be loaded later: their sources keep them."""
        for remote in remotes:
            self._kept[remote.request_id] = remote
            self._meet_all(remote)
            for source in self._sources_of(remote):
                self._watch(source)

    def start(self, order: LoadOrder) -> None:
        self._kept.pop(order.request_id, None)
        try:
            fetches = [Fetch(order, share, readers) for share, readers in self._readership.of(order)]
            if any((order.transfer_id, fetch.source) in self._by_transfer for fetch in fetches):
                raise taken()
        except KvxferError as error:
            fetch, over = ended_early(order, error)
            self._report(over, fetch)
        else:
            self._launch(fetches)

    def _launch(self, fetches: list[Fetch]) -> None:
        order = fetches[0].order
        self._kept.pop(order.request_id, None)
        self._fetches[order.request_id] = fetches
        for fetch in fetches:
            self._by_transfer.setdefault((order.transfer_id, fetch.source), fetch)
        self._spawn(self._run(order, fetches))

    def begin(self, order: LoadOrder) -> Fetch | None:
        """Pull what the source granted as a whole now, on the forward thread; ``None``: :meth:`start` has to. The
        forward thread waits for it with :meth:`Agent.progress`, and calls :meth:`adopt` before it cancels it, or if it
        takes long."""
        share = self._readership.counterpart(order)
        name = "" if share is None else order.sources[self._rank]
        has_to_claim = order.is_open and self._rank != 0
        if (
            share is None
            or not order.has_direct
            or has_to_claim
            or order.first != 0
            or (order.transfer_id, name) in self._by_transfer
        ):
            return None
        try:
            source = self._agent.find_member(name)
        except KvxferError:  # start() comes to the same error, and reports it
            return None
        incarnation = order.incarnations[self._rank] if order.incarnations else None
        if source is None or incarnation not in (None, source.ref.incarnation) or not self._staging.is_alike(source):
            return None
        fetch = Fetch(order, share, 1)
        fetch.is_begun, fetch.source_ref = True, source.ref
        landing = self._staging.in_place(order.first, order.blocks, self._readership.local(share))
        fetch.left = len(landing.pools) + 1
        ended = functools.partial(self._on_one_ended, fetch)
        try:
            self._begin_pull(fetch, landing, DIRECT, 0, len(order.blocks), ended)
        except KvxferError as error:
            fetch.is_ended, fetch.why = True, error
            self._call_soon(self.adopt, fetch)
        else:
            self._on_one_ended(fetch)
        return fetch

    def adopt(self, fetch: Fetch) -> None:
        """Take over a load that the forward thread began. A second call does nothing."""
        if fetch.is_adopted or fetch.is_told:
            return
        fetch.is_adopted = True
        if (fetch.order.transfer_id, fetch.source) in self._by_transfer:
            fetch.why = fetch.why or taken()
        self._launch([fetch])

    def _on_one_ended(self, fetch: Fetch, _: Transfer | None = None) -> None:
        """One of its transfers has drained, or all have been started. On any thread."""
        with fetch.lock:
            fetch.left -= 1
            if fetch.left:
                return
        try:
            fetch.take([transfer.result() for transfer in fetch.transfers])
        except KvxferError:
            self._call_soon(self.adopt, fetch)  # before is_ended: the forward thread may then call cancel()
            fetch.is_ended = True
            return
        fetch.is_told = fetch.is_ended = True
        report = report_of(fetch.order, [fetch], None)
        self._on_done(LoadEnded(fetch.order, None, report))
        self._call_soon(self._settle, fetch, report)

    def _settle(self, fetch: Fetch, report: Report) -> None:
        """Finish, on the loop, a load whose end was reported. Its source needs no message: the grant has ended."""
        if not fetch.is_adopted:
            self._kept.pop(fetch.order.request_id, None)
            fetch.end_span(report)
            with contextlib.suppress(PeerGoneError):
                self._add_source(fetch.order, fetch.source_rank)

    def cancel(self, request_id: str) -> None:
        """No request waits for that load any more; it still ends with a call of ``on_done``."""
        for fetch in self._fetches.get(request_id, ()):
            fetch.end(TransferCancelledError("the request was aborted"))

    def release(self, remote: RemotePrompt) -> None:
        """The prompt will not be loaded."""
        self._kept.pop(remote.request_id, None)
        self._meet_all(remote)
        self._let_go(remote)

    def on_message(self, agent_id: str, message: PartReady | Refuse | Claimed) -> None:
        """A message of a source."""
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

    async def _run(self, order: LoadOrder, fetches: list[Fetch]) -> None:
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
        self._report(LoadEnded(order, error, report_of(order, fetches, error)), fetches[0])
        if not fetches[0].is_told:
            self._let_go(order)

    def _report(self, done: LoadEnded, first: Fetch) -> None:
        report, error = done.report, done.error
        first.end_span(report)
        if first.is_told:
            return
        if error is not None:
            about = {"request_id": report.request_id, "transfer_id": report.transfer_id, "code": error.code}
            log.warning("a load failed: %s", error, extra=about)
        self._on_done(done)

    async def _run_one(self, fetch: Fetch, fetches: list[Fetch]) -> Landing | KvxferError | None:
        """Fetch from one source, and drain. Returns its landing, its error, or ``None`` if nothing has to be unpacked:
        the first source has the same (replicas), or the blocks are in place."""
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
            log.exception("a load failed unexpectedly")
            outcome = KvxferError(f"the load broke: {failure!r}")
        if isinstance(outcome, KvxferError):
            for other in fetches:
                other.end(outcome)
        await fetch.drain()
        return outcome

    async def _fetch(self, fetch: Fetch) -> Landing | None:
        order = fetch.order
        is_early = True  # the source's worker may not know the prompt yet: its scheduler reports it in the next step
        if fetch.is_begun:
            try:
                for transfer in fetch.transfers:
                    await transfer
                return None
            except NO_DIRECT as error:
                is_early = await self._direct_failed(fetch, error)
        if not fetch.share.is_read:
            return None
        source = await self._find(order, fetch.source_rank)
        fetch.source_ref = source.ref
        await self._claim(order, fetch.source_rank)
        landing = await fetch.landings.enter_async_context(
            self._staging.land(
                source,
                self._readership.cut(order, fetch.share),
                order.first,
                order.blocks,
                order.tokens,
                layers=self._readership.local(fetch.share),
                is_one_of_several=len(self._readership.read_by(order)) > 1,
            )
        )
        has_direct = order.has_direct and not fetch.is_begun
        if has_direct and landing.first == 0 and self._readership.counterpart(order) is not None:
            try:
                await self._pull(fetch, landing, DIRECT, 0, len(landing.blocks))
                return landing
            except NO_DIRECT as error:
                is_early = await self._direct_failed(fetch, error)
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

    async def _direct_failed(self, fetch: Fetch, error: KvxferError) -> bool:
        """Drain, so that parts can be asked for instead: another engine may have got some of several grants. Returns
        whether the grant may only be late."""
        log.debug("the direct grant is gone, or another's; asking: %s", error)
        await fetch.drain()
        fetch.transfers.clear()
        return isinstance(error, DeadlineExceededError)

    async def _ask(self, fetch: Fetch, landing: Landing, *, is_early: bool) -> None:
        """Ask for the prompt and pull its parts. Raises GrantRevokedError if the source revoked them: it may compute
        them again."""
        order = fetch.order
        wanted, attempt = fetch.share.layer_range, (fetch.attempt, fetch.readers)
        ask = Ask(order.transfer_id, self._rank, *attempt, landing.first, wanted.start, len(wanted), is_early)
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
                if message.total != end:
                    raise IncompatibleError(f"the source's prompt has {message.total} blocks, and this one has {end}")
                if message.first != covered or not 0 < message.count <= end - covered:
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
        content_digest = self._readership.stage.content(order.content_digest, fetch.share.layer_range)
        transfers = []
        for index, (pool, store) in enumerate(zip(landing.pools, landing.stores, strict=True)):
            transfer = self._agent.pull(
                pool,
                store.ids(landing.blocks[at : at + count]),
                transfer_id=part_id(order.transfer_id, fetch.source_rank, self._rank, part, index),
                source=fetch.source,
                content_digest=content_digest,
                timeout_s=DIRECT_WAIT_S if part == DIRECT else None,
                deadline_s=self._options.load_deadline_s,
                on_ended=on_ended,
            )
            transfers.append(transfer)
            fetch.transfers.append(transfer)
        return transfers

    # --- sources ---

    async def _find(self, order: LoadOrder, source_rank: int) -> Member:
        """The incarnation of that source which has the prompt, if known. Raises PeerGoneError."""
        incarnation = order.incarnations[source_rank] if order.incarnations else None
        self._add_source(order, source_rank)
        return await self._agent.wait_member(order.sources[source_rank], timeout_s=SILENT_S, incarnation=incarnation)

    def _add_source(self, order: LoadOrder | RemotePrompt, source_rank: int) -> None:
        """Know that source by its signed metadata, with option ``discovery`` and if the request has some. Raises
        PeerGoneError."""
        if self._options.discovery and order.agent_metadata:
            incarnation = order.incarnations[source_rank] if order.incarnations else None
            self._agent.add_remote_agent(
                order.agent_metadata[source_rank], order.sources[source_rank], incarnation=incarnation
            )

    def _meet_all(self, remote: RemotePrompt) -> None:
        for share, _ in self._readership.told_by(remote):
            with contextlib.suppress(PeerGoneError):  # such a source gets no message
                self._add_source(remote, share.source_rank)

    async def _claim(self, order: LoadOrder | RemotePrompt, source_rank: int) -> None:
        """Return once no other engine can become the reader at that rank. Raises the error of the refusal."""
        if order.is_open and source_rank != 0:
            self._add_source(order, 0)
            first = order.sources[0]
            await self._claims.win(order.transfer_id, first, functools.partial(self.notify, first))

    def _let_go(self, order: LoadOrder | RemotePrompt) -> None:
        """This rank needs nothing more of its sources."""
        for share, readers in self._readership.told_by(order):
            release = Release(order.transfer_id, self._rank, readers)
            send = functools.partial(self._send, order.sources[share.source_rank], release)
            if order.is_open and share.source_rank != 0:
                self._claims.when_won(self._claim(order, share.source_rank), send)
            else:
                send()

    def _sources_of(self, remote: RemotePrompt) -> list[str]:
        return [remote.sources[share.source_rank] for share, _ in self._readership.told_by(remote)]

    def _watch(self, source: str) -> None:
        if source not in self._watched:
            self._watched[source] = asyncio.create_task(self._keep_in_touch(source))

    async def _keep_in_touch(self, source: str) -> None:
        """Repeat to the source which prompts are wanted; end their fetches when the source is silent."""
        try:
            while True:
                fetches = [fetch for fetch in itertools.chain(*self._fetches.values()) if fetch.source == source]
                kept = [kept for kept in self._kept.values() if source in self._sources_of(kept)]
                if not fetches and not kept:
                    return
                wanted = [fetch.order.transfer_id for fetch in fetches] + [remote.transfer_id for remote in kept]
                try:
                    told = await self.notify(source, *(Keep(tuple(some)) for some in batches(wanted)))
                    for fetch in fetches:
                        if fetch.source_ref not in (None, told):
                            fetch.end(
                                PeerGoneError(
                                    f"agent {source!r} was restarted: it is {told} now, not {fetch.source_ref}"
                                )
                            )
                except KvxferError as error:
                    for fetch in fetches:
                        fetch.end(error)
                await asyncio.sleep(WATCH_S)
        finally:
            del self._watched[source]

    async def notify(self, agent_id: str, *messages: Message) -> AgentRef:
        """Send messages to an agent, and return the incarnation that took them. Raises PeerGoneError if none did in
        time, MembershipEndedError, CoordinatorUnavailableError."""
        member = await self._agent.wait_member(agent_id, timeout_s=SILENT_S)
        deliveries = [self._agent.notify(agent_id, encode(message)) for message in messages]
        try:
            async with timeout_while_running(SILENT_S):
                for delivery in deliveries:
                    await delivery
        except TimeoutError:
            raise self._agent.explain(PeerGoneError(f"{agent_id!r} took no message for {SILENT_S:g} s")) from None
        return member.ref

    def _send(self, agent_id: str, message: Message) -> None:
        with contextlib.suppress(KvxferError):  # a source that is gone need not be told
            self._agent.notify(agent_id, encode(message))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
