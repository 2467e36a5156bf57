"""The source and the loads of two ranks over real agents, without vLLM: which bytes arrive, and how everything ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from kvxfer.agent import Agent
from kvxfer.connectors.vllm import source as source_module
from kvxfer.connectors.vllm.loads import ASKS_MAX, Done, Loads
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.pages import Pages, Store
from kvxfer.connectors.vllm.source import Source
from kvxfer.connectors.vllm.steps import Chunk, Close, Finish, Load, Open, Remote, StepOrders
from kvxfer.connectors.vllm.wire import Part, Refuse, Release, decode
from kvxfer.observe import Span, spans_to
from kvxfer.transport.base import Region
from kvxfer.types import CompatibilityRecord, Role, TransferId, WorkerInfo

LAYERS, BLOCKS, PAGE = 3, 16, 256
RECORD = CompatibilityRecord("m", "", "", "f32", LAYERS, 1, 16, 4, "page:HNC", "", "", "none")
CONTENT = b"c" * 32
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
OPTIONS = ConnectorOptions.from_config("kv_both", "x", {"coordinator": "127.0.0.1:1", "hold_ttl_s": 0.4})


@dataclasses.dataclass
class Rank:
    """One rank of an engine: its memory, and what its halves said."""

    agent: Agent
    memory: npt.NDArray[np.uint8]
    source: Source
    loads: Loads
    freed: list[str]
    done: dict[str, asyncio.Future[Done]]

    def write(self, layer: int, blocks: list[int], seed: int) -> None:
        """What a forward does to one layer."""
        draw = np.random.default_rng((seed, layer))
        self.memory[layer, blocks] = draw.integers(0, 256, (len(blocks), PAGE), np.uint8)

    def load(self, order: Load) -> asyncio.Future[Done]:
        self.done[order.request_id] = asyncio.get_running_loop().create_future()
        self.loads.start(order)
        return self.done[order.request_id]

    def forward(self, orders: StepOrders, blocks: list[int], seed: int = 0) -> None:
        """A step that writes ``blocks``, layer after layer."""
        self.source.begin_step(orders)
        for layer in range(LAYERS):
            self.write(layer, blocks, seed)
            self.source.layer_saved(layer)
        self.source.step_saved()


async def serve(rank: Rank) -> None:
    async for notification in rank.agent.notifications():
        message = decode(notification.payload)
        half = rank.loads if isinstance(message, (Part, Refuse)) else rank.source
        half.on_message(notification.sender.agent_id, message)  # type: ignore[arg-type]


async def sweep(rank: Rank) -> None:
    while True:
        rank.source.sweep()
        await asyncio.sleep(0.02)


def stores_of(memory: npt.NDArray[np.uint8], count: int) -> tuple[Store, ...]:
    """The layers in ``count`` storages, in order."""
    stores = []
    for layers in np.array_split(np.arange(LAYERS), count):
        part = memory[layers[0] : layers[-1] + 1]
        region = Region(part.ctypes.data, part.nbytes, part)
        first = np.arange(len(layers)) * BLOCKS
        stores.append(Store(region, len(layers) * BLOCKS, int(layers[0]), first, np.ones(len(layers), np.int64)))
    return tuple(stores)


@pytest_asyncio.fixture(params=[1, 2], ids=["one storage", "two storages"])
async def ranks(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Rank, Rank]]:
    made: list[Rank] = []
    async with contextlib.AsyncExitStack() as stack:
        loop = asyncio.get_running_loop()
        for name in ("p", "d"):
            memory = np.zeros((LAYERS, BLOCKS, PAGE), np.uint8)
            layers = tuple(f"layer {i}" for i in range(LAYERS))
            pages = Pages(layers, PAGE, stores_of(memory, request.param))
            agent = Agent(WorkerInfo(name, Role.BOTH, "m", ""), config=OPTIONS.agent_config(0))
            pools = tuple(
                agent.register_pool(RECORD, store.region, block_count=store.page_count) for store in pages.stores
            )
            await stack.enter_async_context(agent)
            freed: list[str] = []
            done: dict[str, asyncio.Future[Done]] = {}
            source = Source(agent, pools, pages, OPTIONS, 0, loop.call_soon_threadsafe, freed.append)
            loads = Loads(
                agent, pools, pages, OPTIONS, 0, 1, lambda over, done=done: done[over.order.request_id].set_result(over)
            )
            made.append(Rank(agent, memory, source, loads, freed, done))
        p, d = made
        p.agent.connect_peer(d.agent.ref, d.agent.address, bytes(32), [pool.published for pool in d.agent.pools])
        d.agent.connect_peer(p.agent.ref, p.agent.address, bytes(32), [pool.published for pool in p.agent.pools])
        tasks = [asyncio.create_task(run(rank)) for rank in made for run in (serve, sweep)]
        yield p, d
        await d.loads.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def new_id(seed: int = 1) -> TransferId:
    return TransferId(seed.to_bytes(16, "big"))


def open_order(total: int, blocks: tuple[int, ...] = (), *, reader: str = "d") -> StepOrders:
    return StepOrders(True, opens=(Open("r", new_id(), reader, blocks, total, CONTENT),))


def close_order(*, will_resume: bool) -> Close:
    return Close("r", new_id(), "preempted", will_resume)


def finish_order(blocks: tuple[int, ...], reader: str | None = None) -> StepOrders:
    return StepOrders(finishes=(Finish("r", new_id(), reader, blocks, CONTENT),))


def load_order(first: int, blocks: tuple[int, ...], *, has_direct: bool, content: bytes = CONTENT) -> Load:
    tokens = (first + len(blocks)) * RECORD.block_tokens
    return Load("l", new_id(), ("p",), first, blocks, tokens, content, has_direct)


async def until(condition: Callable[[], object], within_s: float = 2.0) -> None:
    end_s = time.monotonic() + within_s
    for _ in iter(condition, True):
        assert time.monotonic() < end_s, "it did not come to that in time"
        await asyncio.sleep(0.005)


async def is_idle(rank: Rank) -> None:
    await until(lambda: rank.agent.statistics().is_idle)


async def test_a_finished_prompt_is_pulled_without_a_word(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    for layer in range(LAYERS):
        p.write(layer, [3, 4, 9], 1)
    p.source.begin_step(finish_order((3, 4, 9)))
    over = await d.load(load_order(0, (7, 1, 2), has_direct=True))
    assert over.error is None
    assert (d.memory[:, [7, 1, 2]] == p.memory[:, [3, 4, 9]]).all()
    assert (over.report.parts, over.report.bytes) == (1, LAYERS * 3 * PAGE)
    await until(lambda: p.freed == ["r"])
    await is_idle(p)
    await is_idle(d)


async def test_hold_grants_and_load_are_spans_of_the_requests_trace(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    seen: list[Span] = []
    with spans_to(seen.append):
        (finish,) = finish_order((3, 4, 9)).finishes
        p.source.begin_step(StepOrders(finishes=(dataclasses.replace(finish, traceparent=TRACE),)))
        await d.load(dataclasses.replace(load_order(0, (7, 1, 2), has_direct=True), traceparent=TRACE))
        await until(lambda: p.freed == ["r"])
    names = [*["kvxfer.grant"] * len(p.agent.pools), "kvxfer.hold", "kvxfer.load"]
    assert sorted(span.name for span in seen) == names
    assert {(span.parent, span.error) for span in seen} == {(TRACE, None)}
    (load,) = (span for span in seen if span.name == "kvxfer.load")
    assert load.attributes["bytes"] == LAYERS * 3 * PAGE


async def test_spans_name_the_error_that_ended_them(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    seen: list[Span] = []
    with spans_to(seen.append):
        p.source.begin_step(finish_order((3, 4, 9)))
        await until(lambda: p.freed == ["r"])
        await d.load(load_order(0, (7, 1, 2), has_direct=True))
    assert {span.name for span in seen} == {"kvxfer.hold", "kvxfer.grant", "kvxfer.load"}
    assert {(span.parent, span.error) for span in seen} == {(None, "grant_expired")}


async def test_only_what_is_missing_is_pulled(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    for layer in range(LAYERS):
        p.write(layer, [3, 4, 9], 1)
    p.source.begin_step(finish_order((3, 4, 9)))
    over = await d.load(load_order(1, (5, 6), has_direct=True))
    assert over.error is None
    assert (d.memory[:, [5, 6]] == p.memory[:, [4, 9]]).all()
    assert not d.memory[:, [0, 7]].any()
    await until(lambda: p.freed == ["r"])
    await is_idle(p)


async def test_a_reader_may_come_before_the_step_that_keeps_the_prompt(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    loading = d.load(load_order(1, (5, 6), has_direct=True))
    await asyncio.sleep(0.05)
    p.forward(finish_order((3, 4, 9)), [3, 4, 9])
    over = await loading
    assert over.error is None
    assert (d.memory[:, [5, 6]] == p.memory[:, [4, 9]]).all()


@pytest.mark.parametrize("asks_at", ["before", "in the first step", "after the first step", "after all"])
async def test_chunks_arrive_whenever_they_are_asked_for(ranks: tuple[Rank, Rank], asks_at: str) -> None:
    p, d = ranks
    loading: asyncio.Future[Done] | None = None

    async def maybe_ask(when: str) -> None:
        nonlocal loading
        if when == asks_at:
            loading = d.load(load_order(1, (5, 6, 7, 8), has_direct=False))
            await asyncio.sleep(0.05)

    await maybe_ask("before")
    for layer in range(LAYERS):
        p.write(layer, [0], 7)
    p.source.begin_step(open_order(5, (0,)))
    p.source.begin_step(StepOrders(True, chunks=(Chunk("r", (1, 2)),)))
    p.write(0, [1, 2], 8)
    p.source.layer_saved(0)
    await maybe_ask("in the first step")
    for layer in (1, 2):
        p.write(layer, [1, 2], 8)
        p.source.layer_saved(layer)
    p.source.step_saved()
    await maybe_ask("after the first step")
    p.forward(StepOrders(True, chunks=(Chunk("r", (3, 4)),)), [3, 4], 9)
    p.source.begin_step(finish_order((0, 1, 2, 3, 4), "d"))
    await maybe_ask("after all")
    assert loading is not None
    over = await loading
    assert over.error is None
    assert (d.memory[:, [5, 6, 7, 8]] == p.memory[:, [1, 2, 3, 4]]).all()
    await until(lambda: p.freed == ["r"])
    await is_idle(p)
    await is_idle(d)


async def test_layers_are_announced_as_they_are_written(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    loading = d.load(load_order(0, (5, 6), has_direct=False))
    await asyncio.sleep(0.05)
    p.source.begin_step(open_order(2))
    p.source.begin_step(StepOrders(True, chunks=(Chunk("r", (1, 2)),)))
    p.write(1, [1, 2], 1)
    p.source.layer_saved(1)  # not the first: nothing may be read yet
    await asyncio.sleep(0.05)
    assert not d.memory.any()
    p.write(0, [1, 2], 1)
    p.source.layer_saved(0)
    await until(lambda: bool(d.memory[1, 6].any()))
    assert (d.memory[:2, [5, 6]] == p.memory[:2, [1, 2]]).all()
    assert not d.memory[2].any()
    p.write(2, [1, 2], 1)
    p.source.step_saved()
    over = await loading
    assert over.error is None
    assert (d.memory[2, [5, 6]] == p.memory[2, [1, 2]]).all()
    assert over.report.early_bytes > 0 or len(p.agent.pools) > 1


async def test_what_is_closed_is_not_taken(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    loading = d.load(load_order(0, (5, 6, 7), has_direct=False))
    await asyncio.sleep(0.05)
    p.source.begin_step(open_order(3))
    p.forward(StepOrders(True, chunks=(Chunk("r", (1, 2)),)), [1, 2])
    p.source.begin_step(StepOrders(True, closes=(close_order(will_resume=False),)))
    assert not [pool for pool in p.agent.statistics().pools if pool.granted]
    over = await loading
    assert over.error is not None
    assert over.error.code == "grant_revoked"
    assert p.freed == []
    await is_idle(d)


async def test_what_is_taken_back_and_computed_again_is_asked_for_again(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    loading = d.load(load_order(1, (5, 6), has_direct=False))
    await asyncio.sleep(0.05)
    p.source.begin_step(open_order(3))
    p.forward(StepOrders(True, chunks=(Chunk("r", (1, 2)),)), [1, 2], 1)
    await until(lambda: bool(d.memory[:, 5].any(axis=1).all()))
    p.forward(StepOrders(True, closes=(close_order(will_resume=True),)), [1, 2], 2)  # another request's bytes
    await is_idle(p)
    await asyncio.sleep(0.05)
    assert not loading.done()
    p.source.begin_step(open_order(3))
    p.forward(StepOrders(True, chunks=(Chunk("r", (7, 8, 9)),)), [7, 8, 9], 3)
    p.source.begin_step(finish_order((7, 8, 9), "d"))
    over = await loading
    assert over.error is None
    assert (d.memory[:, [5, 6]] == p.memory[:, [8, 9]]).all()
    assert (over.report.bytes, over.report.attempts) == (LAYERS * 2 * PAGE, 2)
    await until(lambda: p.freed == ["r"])
    await is_idle(p)


async def test_it_is_asked_for_again_in_the_step_that_took_it_back(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    loading = d.load(load_order(0, (5, 6), has_direct=False))
    await asyncio.sleep(0.05)
    p.source.begin_step(open_order(2))
    p.source.begin_step(StepOrders(True, chunks=(Chunk("r", (1, 2)),)))
    closes = (close_order(will_resume=True),)
    chunks = (Chunk("r", (3, 4)),)
    p.forward(dataclasses.replace(open_order(2), closes=closes, chunks=chunks), [3, 4], 3)
    p.source.begin_step(finish_order((3, 4), "d"))
    assert (await loading).error is None
    assert (d.memory[:, [5, 6]] == p.memory[:, [3, 4]]).all()
    await until(lambda: p.freed == ["r"])


async def test_a_source_that_takes_back_again_and_again_is_given_up(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    loading = d.load(load_order(0, (5, 6), has_direct=False))
    for attempt in range(ASKS_MAX):
        await until(lambda attempt=attempt: any(ask.attempt == attempt for ask, *_ in p.source._early.values()))
        p.source.begin_step(open_order(2))
        p.forward(StepOrders(True, chunks=(Chunk("r", (1,)),)), [1])
        p.source.begin_step(StepOrders(True, closes=(close_order(will_resume=True),)))
    over = await loading
    assert over.error is not None
    assert over.error.code == "grant_revoked"
    await is_idle(d)


async def test_a_prompt_that_was_never_begun_is_refused_when_it_ends(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    loading = d.load(load_order(0, (5, 6), has_direct=False))
    await asyncio.sleep(0.05)
    p.source.begin_step(StepOrders(closes=(close_order(will_resume=False),)))
    over = await asyncio.wait_for(loading, 1.0)
    assert over.error is not None
    assert over.error.code == "grant_revoked"


async def test_a_prompt_of_two_readers_is_kept_for_both(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
    pages = Pages((), PAGE, d.loads._staging._stores)
    second = Loads(d.agent, d.loads._staging._pools, pages, OPTIONS, 1, 2, done.set_result)
    d.loads._ranks = 2
    p.forward(finish_order((1, 2)), [1, 2])
    over = await d.load(load_order(0, (5, 6), has_direct=True))
    assert over.error is None
    await asyncio.sleep(0.05)
    assert p.freed == []
    second.release(Remote("l", new_id(), ("p",)))
    await until(lambda: p.freed == ["r"])
    assert (d.memory[:, [5, 6]] == p.memory[:, [1, 2]]).all()
    await second.close()


async def test_of_replicas_one_is_read_and_all_are_let_go(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    p.forward(finish_order((1, 2)), [1, 2])
    over = await d.load(dataclasses.replace(load_order(0, (5, 6), has_direct=True), sources=("p", "ghost")))
    assert over.error is None
    assert (d.memory[:, [5, 6]] == p.memory[:, [1, 2]]).all()
    await until(lambda: p.freed == ["r"])


async def test_a_replica_that_is_not_read_is_let_go(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    p.forward(finish_order((1, 2)), [1, 2])
    d.loads.release(Remote("l", new_id(), ("ghost", "p")))
    await until(lambda: p.freed == ["r"])
    assert p.source.expired == 0


async def test_nobody_comes_and_somebody_comes_too_late(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    p.source.begin_step(finish_order((1, 2)))
    await until(lambda: p.freed == ["r"])
    await is_idle(p)
    over = await d.load(load_order(0, (5, 6), has_direct=True))
    assert over.error is not None
    assert over.error.code == "grant_expired"
    assert not d.memory.any()


async def test_a_waiting_reader_keeps_a_prompt(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    p.forward(finish_order((1, 2)), [1, 2])
    d.loads.keep([Remote("l", new_id(), ("p",))])
    await asyncio.sleep(3 * OPTIONS.hold_ttl_s)
    assert p.freed == []
    over = await d.load(load_order(0, (5, 6), has_direct=True))
    assert over.error is None
    await until(lambda: p.freed == ["r"])


async def test_a_reader_that_falls_silent_loses_it(ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = ranks
    monkeypatch.setattr(source_module, "SILENT_S", 0.3)
    p.source.begin_step(finish_order((1, 2)))
    d.loads.keep([Remote("l", new_id(), ("p",))])
    await until(lambda: bool(p.source._holds["r"].heard_s))
    await d.loads.close()
    await until(lambda: p.freed == ["r"], within_s=1.0)


@pytest.mark.parametrize("is_finished", [True, False])
async def test_a_release_frees_it_now_or_when_it_is_finished(ranks: tuple[Rank, Rank], is_finished: bool) -> None:
    p, d = ranks
    if is_finished:
        p.source.begin_step(finish_order((1, 2)))
    d.loads.release(Remote("l", new_id(), ("p",)))
    await asyncio.sleep(0.05)
    if not is_finished:
        p.source.begin_step(finish_order((1, 2)))
    assert p.freed == ["r"]
    await is_idle(p)


async def test_a_cancel_ends_it_at_both_sides(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    loading = d.load(load_order(0, (5, 6, 7), has_direct=False))
    await asyncio.sleep(0.05)
    p.source.begin_step(open_order(3))
    p.forward(StepOrders(True, chunks=(Chunk("r", (1, 2)),)), [1, 2])
    d.loads.cancel("l")
    over = await loading
    assert over.error is not None
    assert over.error.code == "cancelled"
    await is_idle(d)
    await until(lambda: not p.agent.statistics().grants.alive)
    p.source.begin_step(finish_order((1, 2, 3), "d"))
    assert p.freed == ["r"]


async def test_a_request_that_comes_again_while_the_first_is_being_cancelled_ends_too(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    order = load_order(0, (5, 6), has_direct=False)
    first = d.load(order)
    p.source.begin_step(open_order(2))
    await until(lambda: bool(p.source._holds["r"].readers))
    d.loads.cancel("l")
    second = d.load(dataclasses.replace(order, request_id="again", blocks=(7, 8)))
    errors = [(await asyncio.wait_for(loading, 1.0)).error for loading in (first, second)]
    assert [error.code if error else "" for error in errors] == ["cancelled", "invalid_argument"]
    p.source.begin_step(finish_order((1, 2), "d"))
    await until(lambda: p.freed == ["r"])
    await is_idle(d)


async def test_an_engine_that_is_not_the_reader_cannot_let_go(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    p.source.begin_step(finish_order((1, 2), "other"))
    p.source.on_message("d", Release(new_id(), 0, 1))
    assert p.freed == []
    p.source.on_message("other", Release(new_id(), 0, 1))
    assert p.freed == ["r"]
    await is_idle(d)


async def test_another_prompt_is_refused(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    p.forward(finish_order((1, 2)), [1, 2])
    over = await d.load(load_order(0, (5, 6), has_direct=True, content=b"x" * 32))
    assert over.error is not None
    assert over.error.code == "incompatible"
    assert not d.memory.any()


async def test_a_prompt_for_another_reader_is_refused(ranks: tuple[Rank, Rank]) -> None:
    p, d = ranks
    p.source.begin_step(open_order(2, reader="other"))
    p.forward(StepOrders(True, chunks=(Chunk("r", (1, 2)),)), [1, 2])
    over = await d.load(load_order(0, (5, 6), has_direct=False))
    assert over.error is not None
    assert over.error.code == "grant_unknown"
    assert not d.memory.any()


async def test_a_source_that_nobody_knows_is_gone(ranks: tuple[Rank, Rank]) -> None:
    _, d = ranks
    order = dataclasses.replace(load_order(0, (5, 6), has_direct=False), sources=("ghost",))
    over = await d.load(order)
    assert over.error is not None
    assert over.error.code == "peer_gone"
