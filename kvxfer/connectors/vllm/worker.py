"""The connector's half in a worker process: passes the scheduler half's orders to the source and the loads of this
rank, and collects the results. Decides in which order one step's acts are done; never waits in a step that computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvxfer.agent import Agent, Pool
from kvxfer.connectors.common.ids import rank_agent
from kvxfer.connectors.common.runtime import STOP_S, Runtime, every
from kvxfer.connectors.common.weights import Weights
from kvxfer.connectors.vllm.arrivals import ArrivalSocket
from kvxfer.connectors.vllm.digests import Digests
from kvxfer.connectors.vllm.fetch import Fetch, LoadEnded, ended_early
from kvxfer.connectors.vllm.loaded import LOADED, Loaded
from kvxfer.connectors.vllm.loads import Loads
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.parallel import engine_shape
from kvxfer.connectors.vllm.readership import Readership
from kvxfer.connectors.vllm.source import SWEEP_S, PromptSource
from kvxfer.connectors.vllm.steps import Close, LoadOrder, News, RemotePrompt, Report, Standing, StepOrders
from kvxfer.connectors.vllm.stream_callbacks import Callback, Fence, StreamCallbacks, at_once, cuda_events
from kvxfer.connectors.vllm.waits import Waits
from kvxfer.connectors.vllm.wire import Begun, Claimed, PartReady, Queued, Refuse, decode
from kvxfer.errors import ConfigError, KvxferError, ProtocolError, WeightsUnknownError, from_code
from kvxfer.transport.huge_pages import Collapsing
from kvxfer.types import CompatibilityRecord, Dialect, Incarnation, TransferId, WorkerInfo

log = logging.getLogger("kvxfer.vllm")

HOLDING_WAIT_S = 0.002
"""How long a step without a forward waits while only kept prompts are left."""


@dataclasses.dataclass
class Results:
    """Requests whose blocks returned to vLLM (``sent``), and loads that are over (``received``; ``failed`` ones are not
    committed, and their destination blocks are in ``bad_blocks``)."""

    sent: set[str] = dataclasses.field(default_factory=set)
    received: set[str] = dataclasses.field(default_factory=set)
    failed: set[str] = dataclasses.field(default_factory=set)
    bad_blocks: set[int] = dataclasses.field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.sent or self.received)


class WorkerHalf:
    """One rank. Called by vLLM's forward thread."""

    def __init__(
        self,
        options: ConnectorOptions,
        make_record: Callable[[Pages], CompatibilityRecord],
        *,
        model: str,
        rank: int,
        ranks: int,
        stages: str = "",
        heads: int = 0,
        new_agent: Callable[[WorkerInfo], Agent],
        max_context_tokens: int = 0,
        groups: Sequence[Sequence[str]] = (),
        blocks: int = 0,
        weights: Weights | None = None,
        loaded: Loaded = LOADED,
        events: Callable[[int], Callable[[], Fence]] = cuda_events,
    ) -> None:
        """``ranks`` of the engine, whose pipeline ``stages`` end there (:func:`.shares.stages_of`), and the KV
        ``heads`` of its whole model; 0: as many as its tensor ranks keep together. ``max_context_tokens`` of the engine
        tells routers which requests it can hold; 0: unknown. ``groups``: the layers of each KV group of an engine with
        ``blocks`` blocks; empty: all are of one group that keeps every token. ``weights``: the watcher of its weights;
        ``None``: what ``make_record`` says is final. ``events(device)`` is called if the KV cache is on a CUDA
        device."""
        self._options = options
        self._make_record = make_record
        self._model = model
        self._rank = rank
        self._ranks, self._stages, self._heads = ranks, stages, heads
        self._new_agent = new_agent
        self._max_context_tokens = max_context_tokens
        self._groups, self._blocks = groups, blocks
        self._weights = weights
        self._loaded = loaded
        self._pools: tuple[Pool, ...] = ()
        self._told: tuple[str | None, tuple[str, ...]] | None = None
        """The weights' state that the scheduler half knows: why they are unknown, and the fingerprints of its pools."""
        self._adapters_told = 0
        self._open: dict[str, TransferId] = {}
        """Prompts that are computed and fetched at once."""
        self._events = events
        self._after: Callable[[Callback], None] = at_once
        self._runtime: Runtime | None = None
        self._collapsing: Collapsing | None = None
        self._source: PromptSource | None = None
        self._loads: Loads | None = None
        self._waits: Waits | None = None
        self._standings: list[Standing] = []
        """Of requests that wait, since the scheduler half was told last."""
        self._layers: dict[str, int] = {}
        self._orders: StepOrders | None = None
        self._lock = threading.Lock()
        self._progress = threading.Event()
        self._results = Results()
        self._reports: list[Report] = []
        self._loading = 0
        self._begun: list[Fetch] = []
        """Loads that this thread began, until their pulls have drained or the loop has taken them over."""
        self.digests: Digests | None = None

    def register(self, caches: Mapping[str, Any]) -> None:
        """Take vLLM's KV cache, one tensor a layer, and join the cluster.

        Raises ConfigError for a cache that cannot be moved, and what entering an agent raises.
        """
        pages = Pages.of(caches, self._groups, self._blocks)
        if pages.cuda_device is not None and self._options.record_digests:
            raise ConfigError("record_digests reads the host's memory: this KV cache is a CUDA device's")
        record = self._make_record(pages)
        shape = engine_shape(self._ranks, self._stages, self._rank, pages)
        if self._weights is not None:
            record = dataclasses.replace(record, weights_fingerprint=self._weights.fingerprint)
        is_first = self._rank == 0
        info = WorkerInfo(
            agent_id=self.agent_id,
            role=self._options.role,
            model=self._model,
            http_url=self._options.http_url if is_first else "",
            max_context_tokens=self._max_context_tokens,
            block_tokens=record.block_tokens,
            dialect=Dialect.VLLM,
            stages=self._stages,
        )
        agent = self._new_agent(info)
        pools = tuple(
            agent.register_pool(record, store.region, block_count=store.page_count, checksum=self._options.checksum)
            for store in pages.stores
        )
        self._pools = pools
        self._layers = {name: index for index, name in enumerate(pages.layers)}
        runtime = Runtime(agent, self._serve)
        if pages.cuda_device is not None:
            self._after = StreamCallbacks(self._events(pages.cuda_device), runtime.call).after
        heads = self._heads or record.kv_heads * shape.tensor_ranks
        readership = Readership(self._rank, shape, heads, storages=len(pools))
        self._source = PromptSource(
            agent, pools, pages, self._options, self._rank, readership.stage, runtime.call, self._freed, self._after
        )
        self._loads = Loads(agent, pools, pages, self._options, readership, self._ended, runtime.call)
        notify = self._loads.notify
        self._waits = Waits(self._options, lambda agent_id, some: notify(agent_id, *some), self._stands)
        if self._options.record_digests:
            self.digests = Digests(pages)
        self._runtime = runtime
        runtime.start()
        if self._weights is not None:
            self._weights.listen(lambda: runtime.call(self._describe_pools))
            runtime.call(self._describe_pools)
        if self._options.huge_pages and pages.cuda_device is None:
            collapsing = Collapsing([store.region for store in pages.stores])
            collapsing.start()
            self._collapsing = collapsing
        log.info("%r serves pages of %d bytes in %d pools", agent, pages.page_bytes, len(pools))

    @property
    def incarnation(self) -> Incarnation:
        """This incarnation of the agent, once :meth:`register` was called."""
        _, _, runtime = self._parts()
        return runtime.agent.ref.incarnation

    @property
    def agent_metadata(self) -> str:
        """Signed metadata of this incarnation of the agent with its pools; empty without option ``discovery``."""
        _, _, runtime = self._parts()
        return runtime.agent.export_metadata() if self._options.discovery else ""

    @property
    def agent_id(self) -> str:
        """The name of this rank's agent."""
        return rank_agent(self._options.agent_id, self._rank)

    @property
    def weights_why(self) -> str | None:
        """Why this rank's weights are unknown; ``None``: they are known."""
        return None if self._weights is None else self._weights.why

    def news(self) -> News | None:
        """News of this rank for the scheduler half; ``None``: there are none."""
        why = self.weights_why
        said = tuple(pool.record.weights_fingerprint for pool in self._pools)  # the loop describes them, and later
        adapters = self._loaded.adapters_since(self._adapters_told)
        with self._lock:
            standings, self._standings = tuple(self._standings), []
        read = () if self._source is None else self._source.take_read()
        if self._told == (why, said) and not adapters and not standings and not read:
            return None
        if adapters:
            self._adapters_told = adapters[-1].number
        self._told = why, said
        return News(self.agent_id, why, self.agent_metadata, adapters, standings, read)

    def begin_step(self, orders: StepOrders) -> None:
        """Called before the forward writes anything. A repetition of the same orders changes nothing. Raises
        ClosedError once the agent has failed."""
        if orders is self._orders:
            return
        source, _, runtime = self._parts()
        runtime.check()
        self._orders = orders
        orders = self._only_what_is_known(orders)
        source.begin_step(orders)
        if self.digests is not None:
            for finish in orders.finishes:
                self.digests.record(finish.transfer_id, "source", 0, finish.blocks)
        if orders.keeps or orders.releases or orders.waits:
            runtime.call(self._tell_sources, orders)
        self._begin_loads(orders)

    def layer_saved(self, layer: str) -> None:
        """The forward wrote its part of ``layer``."""
        index = self._layers.get(layer)
        if index is not None and self._source is not None:
            self._source.layer_saved(index)

    def step_saved(self) -> None:
        """The forward wrote everything."""
        if self._source is not None:
            self._source.step_saved()

    def step_failed(self) -> None:
        """The forward raised."""
        if self._source is not None:
            self._source.step_failed()

    def results(self) -> Results:
        """Sends and loads that ended since the last call. A step without a forward waits a little for one to end."""
        if self._orders is not None and not self._orders.has_forward:
            if self._loading > 0:
                self._wait_loads(self._options.idle_wait_s)
            elif self._waits:
                self._progress.wait(self._options.idle_wait_s)
            elif self._source is not None and len(self._source) > 0:
                self._progress.wait(min(HOLDING_WAIT_S, self._options.idle_wait_s))
        elif self._begun:
            self._wait_loads(0.0)
        with self._lock:
            self._progress.clear()
            results, self._results = self._results, Results()
        self._loading -= len(results.received)
        if self._source is not None:
            self._source.step_over()
        return results

    def _only_what_is_known(self, orders: StepOrders) -> StepOrders:
        """The orders without those that need known weights, if this rank's weights are unknown. The scheduler half
        leaves them out too, for another process's weights one step later."""
        why = self.weights_why
        if why is None:
            for name in [close.request_id for close in orders.closes] + [end.request_id for end in orders.finishes]:
                self._open.pop(name, None)
            self._open.update({begun.request_id: begun.transfer_id for begun in orders.opens})
            return orders
        error = WeightsUnknownError(why)
        ends, self._open = self._open, {}
        ends |= {accept.request_id: accept.transfer_id for accept in orders.accepts}
        ends |= {begun.request_id: begun.transfer_id for begun in orders.opens}
        ends |= {finish.request_id: finish.transfer_id for finish in orders.finishes}
        closes = [Close(name, transfer_id, why, False, error.code) for name, transfer_id in ends.items()]
        for finish in orders.finishes:
            self._freed(finish.request_id)
        for order in orders.loads:
            self._fail(order, error)
        for wait in orders.waits:
            self._stands(Standing(wait.request_id, False, True, error.code, str(error)))
        left = {load.request_id for load in orders.loads}
        remotes = tuple(
            RemotePrompt(
                *(load.request_id, load.transfer_id, load.sources, load.incarnations, load.agent_metadata),
                *(load.is_open, load.stages),
            )
            for load in orders.loads
        )
        return dataclasses.replace(
            orders,
            closes=(*orders.closes, *closes),
            opens=(),
            chunks=(),
            finishes=(),
            loads=(),
            cancels=tuple(name for name in orders.cancels if name not in left),
            releases=(*orders.releases, *remotes),
            accepts=(),
            waits=(),
        )

    def _fail(self, order: LoadOrder, error: KvxferError) -> None:
        """The load is over before it began."""
        self._loading += 1
        fetch, ended = ended_early(order, error)
        fetch.end_span(ended.report)
        self._ended(ended)

    def _begin_loads(self, orders: StepOrders) -> None:
        """Begin the loads that this thread can begin. The loop gets the others, and those that take long."""
        _, loads, runtime = self._parts()
        for order in orders.loads:
            if order.code:
                about = {"request_id": order.request_id, "transfer_id": str(order.transfer_id), "code": order.code}
                log.warning("a load failed: %s", order.text, extra=about)
                self._fail(order, from_code(order.code, order.text))
        orders = dataclasses.replace(orders, loads=tuple(order for order in orders.loads if not order.code))
        self._loading += len(orders.loads)
        if self._after is not at_once:  # a device may still be at what the blocks were used for
            if orders.loads or orders.cancels:
                self._after(functools.partial(runtime.call, self._start_loads, orders.loads, orders.cancels))
            return
        self._begun = [fetch for fetch in self._begun if not fetch.is_ended]
        for late in self._begun:
            runtime.call(loads.adopt, late)
        rest = []
        for order in orders.loads:
            fetch = None if order.request_id in orders.cancels else loads.begin(order)
            if fetch is None:
                rest.append(order)
            else:
                self._begun.append(fetch)
        if rest or orders.cancels:
            runtime.call(self._start_loads, rest, orders.cancels)

    def _wait_loads(self, timeout_s: float) -> None:
        """Wait until a load ends, for at most that time. Loads that this thread began end on it."""
        _, _, runtime = self._parts()
        end_s = time.monotonic() + timeout_s
        left_s = timeout_s
        with contextlib.suppress(KvxferError):  # an agent that ended tells its loads so
            while self._begun and not self._progress.is_set():
                runtime.agent.progress(left_s)
                self._begun = [fetch for fetch in self._begun if not fetch.is_ended]
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return
        if left_s > 0:
            self._progress.wait(left_s)

    def reports(self) -> tuple[Report, ...]:
        """Loads that ended since the last call."""
        with self._lock:
            reports, self._reports = self._reports, []
        return tuple(reports)

    def take_expired(self) -> int:
        """Prompts that no engine fetched in time, since the last call. Each rank has a part of every one; the first
        rank counts them."""
        return 0 if self._source is None or self._rank > 0 else self._source.take_expired()

    def shutdown(self) -> None:
        """End transfers and leave the cluster. Callable twice."""
        if self._weights is not None:
            self._weights.stop()
        if self._collapsing is not None:
            self._collapsing.stop()
        if self._runtime is not None:
            self._runtime.stop()
        if self._collapsing is not None:
            self._collapsing.join(STOP_S)

    def _parts(self) -> tuple[PromptSource, Loads, Runtime]:
        if self._source is None or self._loads is None or self._runtime is None:
            raise AssertionError("vLLM steps before it registered its KV cache")
        return self._source, self._loads, self._runtime

    # --- the agent's loop ---

    def _describe_pools(self) -> None:
        assert self._weights is not None
        fingerprint = self._weights.fingerprint
        for pool in self._pools:
            if pool.record.weights_fingerprint != fingerprint:
                pool.describe(dataclasses.replace(pool.record, weights_fingerprint=fingerprint))

    def _tell_sources(self, orders: StepOrders) -> None:
        """Requests that are given up come first: a request that was aborted may be back in the same step, under its
        name."""
        _, loads, _ = self._parts()
        waits = self._waits if self._rank == 0 else None
        for remote in orders.releases:
            if waits is not None:
                waits.leave(remote.request_id)
            loads.release(remote)
        loads.keep(orders.keeps)
        if waits is not None:
            for wait in orders.waits:
                waits.start(wait)

    def _start_loads(self, orders: Sequence[LoadOrder], cancels: Sequence[str]) -> None:
        _, loads, _ = self._parts()
        for load in orders:
            loads.start(load)
        for request_id in cancels:
            loads.cancel(request_id)

    async def _serve(self) -> None:
        source, loads, runtime = self._parts()
        arrivals = ArrivalSocket(self.agent_id, source.arrival) if self._rank == 0 else None
        try:
            async with asyncio.TaskGroup() as group:
                sweeping = group.create_task(self._sweep(source))
                await self._listen(runtime.agent, source, loads)
                sweeping.cancel()
        finally:
            if arrivals is not None:
                arrivals.close()
            if self._waits is not None:
                await self._waits.close()
            await loads.close()

    async def _listen(self, agent: Agent, source: PromptSource, loads: Loads) -> None:
        async for notification in agent.notifications():
            try:
                message = decode(notification.payload)
            except ProtocolError as error:
                log.warning("%s: %s", notification.sender, error)
                continue
            if isinstance(message, (PartReady, Refuse, Claimed)):
                loads.on_message(notification.sender.agent_id, message)
            elif isinstance(message, (Queued, Begun)):
                if self._waits is not None:
                    self._waits.on_message(notification.sender.agent_id, message)
            else:
                source.on_message(notification.sender.agent_id, message)

    async def _sweep(self, source: PromptSource) -> None:
        async for _ in every(SWEEP_S):
            source.sweep()

    def _stands(self, standing: Standing) -> None:
        with self._lock:
            self._standings.append(standing)
            self._progress.set()

    def _freed(self, request_id: str) -> None:
        with self._lock:
            self._results.sent.add(request_id)
            self._progress.set()

    def _ended(self, done: LoadEnded) -> None:
        if self.digests is not None and done.error is None:
            order = done.order
            self.digests.record(order.transfer_id, "destination", order.first, order.blocks)
        with self._lock:
            request_id = done.order.request_id
            self._results.received.add(request_id)
            if done.error is not None:
                self._results.failed.add(request_id)
                self._results.bad_blocks.update(done.order.blocks)
            self._reports.append(done.report)
            self._progress.set()
