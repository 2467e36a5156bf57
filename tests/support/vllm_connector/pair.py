"""The source and the loads of two ranks over real agents, without vLLM, for tests of what they do together."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from kvxfer.agent import Agent
from kvxfer.connectors.common.ids import rank_agent
from kvxfer.connectors.vllm.fetch import Fetch, LoadEnded
from kvxfer.connectors.vllm.loads import Loads
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.pages import LayerStorage, Pages
from kvxfer.connectors.vllm.readership import Readership
from kvxfer.connectors.vllm.shares import shape_of, stages_of
from kvxfer.connectors.vllm.source import PromptSource
from kvxfer.connectors.vllm.steps import Close, Finish, LoadOrder, Open, Standing, StepOrders
from kvxfer.connectors.vllm.stream_callbacks import StreamCallbacks, at_once
from kvxfer.connectors.vllm.waits import Waits
from kvxfer.connectors.vllm.wire import Await, Begun, Claimed, PartReady, Queued, Refuse, decode
from kvxfer.errors import ClosedError
from kvxfer.transport.base import Region
from kvxfer.types import CompatibilityRecord, Role, TransferId, WorkerInfo
from tests.support.vllm_connector.late_device import Device

LAYERS, BLOCKS, PAGE = 3, 16, 256
RECORD = CompatibilityRecord("m", "", "", "f32", LAYERS, 1, 16, 4, "page:HNC", "", "", "none")
CONTENT = b"c" * 32
TOKEN = b"a token that all of them hold, and no other process"
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
OPTIONS = ConnectorOptions.from_config("kv_both", "x", {"coordinator": "127.0.0.1:1", "kv_lease_duration": 0.8})


@dataclasses.dataclass
class Rank:
    """One rank of an engine: its memory, and what its halves said."""

    agent: Agent
    memory: npt.NDArray[np.uint8]
    source: PromptSource
    loads: Loads
    waits: Waits
    stood: list[Standing]
    """What the waits told."""
    freed: list[str]
    done: dict[str, asyncio.Future[LoadEnded]]
    device: Device | None
    begins: bool
    """Loads are begun and waited for by a thread that is not the loop's, as vLLM's forward thread does."""
    first_layer: int = 0
    """Of its pipeline stage."""

    def write(self, layer: int, blocks: list[int], seed: int) -> None:
        """What a forward does to one layer, or asks the device to do."""
        draw = np.random.default_rng((seed, self.first_layer + layer))
        content = draw.integers(0, 256, (len(blocks), PAGE), np.uint8)
        write = functools.partial(self.memory.__setitem__, (layer, blocks), content)
        if self.device is None:
            write()
        else:
            self.device.asked.append(write)

    def load(self, order: LoadOrder) -> asyncio.Future[LoadEnded]:
        loop = asyncio.get_running_loop()
        self.done[order.request_id] = loop.create_future()
        fetch = None
        if self.begins:
            with concurrent.futures.ThreadPoolExecutor() as thread:
                fetch = thread.submit(self.loads.begin, order).result()
        if fetch is None:
            self.loads.start(order)
        else:
            loop.run_in_executor(None, wait_ended, self.agent, fetch)
            loop.call_later(0.05, self.loads.adopt, fetch)
        return self.done[order.request_id]

    def forward(self, orders: StepOrders, blocks: list[int], seed: int = 0) -> None:
        """A step that writes ``blocks``, layer after layer."""
        self.source.begin_step(orders)
        for layer in range(len(self.memory)):
            self.write(layer, blocks, seed)
            self.source.layer_saved(layer)
        self.source.step_saved()


async def serve(rank: Rank) -> None:
    async for notification in rank.agent.notifications():
        message = decode(notification.payload)
        half: Loads | Waits | PromptSource = (
            rank.loads if isinstance(message, (PartReady, Refuse, Claimed)) else rank.source
        )
        half = rank.waits if isinstance(message, (Queued, Begun)) else half
        half.on_message(notification.sender.agent_id, message)  # type: ignore[arg-type]


async def sweep(rank: Rank) -> None:
    while True:
        rank.source.sweep()
        await asyncio.sleep(0.02)


def wait_ended(agent: Agent, fetch: Fetch) -> None:
    with contextlib.suppress(ClosedError):
        while not fetch.is_ended:
            agent.progress(0.01)


async def tell_each(loads: Loads, agent_id: str, messages: Sequence[Await]) -> None:
    await loads.notify(agent_id, *messages)


def tell(loop: asyncio.AbstractEventLoop, done: dict[str, asyncio.Future[LoadEnded]], over: LoadEnded) -> None:
    """A load ended, on whatever thread."""
    loop.call_soon_threadsafe(done[over.order.request_id].set_result, over)


def readership_of(rank: int, ranks: int, stages: str = "", *, storages: int = 1) -> Readership:
    """Of a rank that keeps the one head of all layers, or of its stage's."""
    return Readership(rank, shape_of(ranks, stages_of(stages, LAYERS)), RECORD.kv_heads, storages=storages)


def stores_of(memory: npt.NDArray[np.uint8], count: int) -> tuple[LayerStorage, ...]:
    """The layers in ``count`` storages, in order."""
    stores = []
    for layers in np.array_split(np.arange(len(memory)), count):
        part = memory[layers[0] : layers[-1] + 1]
        region = Region(part.ctypes.data, part.nbytes, part)
        first = np.arange(len(layers)) * BLOCKS
        stores.append(LayerStorage(region, len(layers) * BLOCKS, int(layers[0]), first, np.ones(len(layers), np.int64)))
    return tuple(stores)


@pytest_asyncio.fixture(
    params=[(1, "loop"), (2, "loop"), (1, "thread"), (2, "thread"), (1, "device"), (2, "device")],
    ids=["one storage", "two storages", "one, begun", "two, begun", "one of a device", "two of a device"],
)
async def ranks(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Rank, Rank]]:
    stores, how = request.param
    async with two_ranks(OPTIONS, stores=stores, how=how) as made:
        yield made


@contextlib.asynccontextmanager
async def two_ranks(
    options: ConnectorOptions, *, stores: int = 1, how: str = "thread"
) -> AsyncIterator[tuple[Rank, Rank]]:
    """Ranks ``p`` and ``d``, which know each other but where ``options`` want discovery. ``how``: loads are begun
    by a "thread" or by the "loop", or the memory is a "device"'s."""
    async with engines_of(options, ("p", "d"), stores=stores, how=how) as made:
        yield made["p"], made["d"]


@contextlib.asynccontextmanager
async def engines_of(
    options: ConnectorOptions,
    names: Sequence[str],
    *,
    stores: int = 1,
    how: str = "thread",
    ranks: int = 1,
    stages: Mapping[str, str] | None = None,
) -> AsyncIterator[dict[str, Rank]]:
    """The ranks of the engines ``names``, by the names of their agents; else as :func:`two_ranks`. ``ranks``: of each
    stage; ``stages``: at which layers those of each engine end."""
    made: dict[str, Rank] = {}
    async with contextlib.AsyncExitStack() as stack:
        loop = asyncio.get_running_loop()
        ends = {name: (stages or {}).get(name, "") for name in names}
        counts = {name: ranks * (ends[name].count(",") + 1) for name in names}
        for engine, rank in [(name, rank) for name in names for rank in range(counts[name])]:
            name = rank_agent(engine, rank)
            readership = readership_of(rank, counts[engine], ends[engine], storages=stores)
            stage = readership.stage
            memory = np.zeros((stage.count, BLOCKS, PAGE), np.uint8)
            layers = tuple(f"layer {i}" for i in stage.layers)
            pages = Pages(layers, PAGE, stores_of(memory, stores))
            agent = Agent(WorkerInfo(name, Role.BOTH, "m", ""), token=TOKEN, config=options.agent_config(0))
            pools = tuple(
                agent.register_pool(RECORD, store.region, block_count=store.page_count) for store in pages.stores
            )
            await stack.enter_async_context(agent)
            freed: list[str] = []
            done: dict[str, asyncio.Future[LoadEnded]] = {}
            device = Device() if how == "device" else None
            after = at_once if device is None else StreamCallbacks(device.record, loop.call_soon_threadsafe).after
            call_soon = loop.call_soon_threadsafe
            source = PromptSource(agent, pools, pages, options, rank, stage, call_soon, freed.append, after)
            loads = Loads(agent, pools, pages, options, readership, functools.partial(tell, loop, done), call_soon)
            stood: list[Standing] = []
            waits = Waits(options, functools.partial(tell_each, loads), stood.append)
            made[name] = Rank(
                agent, memory, source, loads, waits, stood, freed, done, device, how == "thread", stage.first
            )
        agents = [rank.agent for rank in made.values()]
        for one, other in () if options.discovery else itertools.permutations(agents, 2):
            one.connect_peer(other.ref, other.address, bytes(32), [pool.published for pool in other.pools])
        tasks = [asyncio.create_task(run(rank)) for rank in made.values() for run in (serve, sweep)]
        tasks += [asyncio.create_task(rank.device.run()) for rank in made.values() if rank.device is not None]
        yield made
        for rank in made.values():
            await rank.waits.close()
            await rank.loads.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def new_id(seed: int = 1) -> TransferId:
    return TransferId(seed.to_bytes(16, "big"))


def open_order(total: int, *, reader: str = "d") -> StepOrders:
    return StepOrders(True, opens=(Open("r", new_id(), reader, total, CONTENT),))


def close_order(*, will_resume: bool) -> Close:
    return Close("r", new_id(), "preempted", will_resume)


def finish_order(blocks: tuple[int, ...], reader: str | None = None) -> StepOrders:
    return StepOrders(finishes=(Finish("r", new_id(), reader, blocks, CONTENT),))


def load_order(first: int, blocks: tuple[int, ...], *, has_direct: bool, content_digest: bytes = CONTENT) -> LoadOrder:
    tokens = (first + len(blocks)) * RECORD.block_tokens
    return LoadOrder("l", new_id(), ("p",), first, blocks, tokens, content_digest, has_direct)


async def code_of(loading: Awaitable[LoadEnded]) -> str:
    """Of the error with which that load ends."""
    over = await loading
    assert over.error is not None
    return over.error.code


async def arrives(loading: Awaitable[LoadEnded], p: Rank, held: list[int], d: Rank, into: list[int]) -> LoadEnded:
    """The end of a load that brought the bytes of p's blocks ``held`` into d's blocks ``into``."""
    over = await loading
    assert over.error is None
    assert (d.memory[:, into] == p.memory[:, held]).all()
    return over


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    for _ in iter(condition, True):
        assert time.monotonic() < end_s, "it did not come to that in time"
        await asyncio.sleep(0.005)


async def is_idle(rank: Rank) -> None:
    await until(lambda: rank.agent.statistics().is_idle)
