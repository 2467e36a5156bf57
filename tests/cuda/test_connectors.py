"""The connectors' halves without their engines, over memory of a CUDA device and behind its events."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.agent import Agent
from kvxfer.connectors.nixl import nixl_agent, nixlBackendError
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.steps import ComputedBlocks, Finish, LoadOrder, Open, StepOrders
from kvxfer.connectors.vllm.worker import WorkerHalf
from kvxfer.types import CompatibilityRecord, Lane, Role, TransferId, WorkerInfo
from tests.support.cuda.ends import DEVICE, needs_device
from tests.support.sglang_core import cores

pytestmark = needs_device
SLEEP_CYCLES = 2_000_000_000
"""A kernel that only waits: about a second."""
LAYERS, BLOCKS, PAGE = 3, 64, 16384
RECORD = CompatibilityRecord("m", "", "", "f16", LAYERS, 1, 16, 4, "page:HNC", "", "", "FLASH_ATTN")
CONTENT = b"c" * 32


@pytest.fixture(scope="module", autouse=True)
def loaded_kernels() -> None:
    """The first use of a kernel waits for the device."""
    tensor = torch.zeros((2, PAGE), dtype=torch.uint8, device=DEVICE)
    torch.cuda._sleep(1)
    tensor[0] = tensor[1]
    read(tensor)
    torch.cuda.synchronize()


def until(holds: Callable[[], Any], within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, "it did not become so in time"
        time.sleep(0.005)


def read(tensor: Any) -> Any:
    """What is there now, whatever other streams have yet to do."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return tensor.cpu().numpy()


class VllmEngine:
    """A worker half with a KV cache on the device. Its forwards are asked of a stream of its own."""

    def __init__(self, name: str) -> None:
        self.cache = torch.zeros((LAYERS, BLOCKS, PAGE), dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        self.stream = torch.cuda.Stream()
        options = ConnectorOptions.from_config("kv_both", name, {"coordinator": "127.0.0.1:1"})

        def new_agent(info: WorkerInfo) -> Agent:
            self.agent = Agent(info, config=options.agent_config(0))
            return self.agent

        self.half = WorkerHalf(options, lambda pages: RECORD, model="m", rank=0, ranks=1, new_agent=new_agent)
        self.half.register({f"layer {layer}": self.cache[layer] for layer in range(LAYERS)})

    def meet(self, other: VllmEngine) -> None:
        pools = [pool.published for pool in other.agent.pools]
        assert self.half._runtime is not None
        self.half._runtime.call(self.agent.connect_peer, other.agent.ref, other.agent.address, bytes(32), pools)

    def begin_step(self, orders: StepOrders, *, is_behind_sleep: bool = False) -> None:
        with torch.cuda.stream(self.stream):
            if is_behind_sleep:
                torch.cuda._sleep(SLEEP_CYCLES)
            self.half.begin_step(orders)

    def forward(self, blocks: tuple[int, ...], content: Any) -> None:
        with torch.cuda.stream(self.stream):
            for layer in range(LAYERS):
                for place, block in enumerate(blocks):
                    self.cache[layer, block] = content[layer, place]  # by a list, it would wait for the stream
                self.half.layer_saved(f"layer {layer}")
            self.half.step_saved()


@pytest.mark.parametrize("late", ["source", "reader"])
def test_vllm_waits_for_the_devices_work(late: str) -> None:
    """Nothing is read before a forward has written it, nor written before a forward has read what was there."""
    p, d = VllmEngine("p"), VllmEngine("d")
    p.meet(d)
    d.meet(p)
    held, into, transfer = (3, 4, 9), (7, 1, 2), TransferId(b"i" * 16)
    content = torch.randint(1, 256, (LAYERS, len(held), PAGE), dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    load = LoadOrder("l", transfer, ("p",), 0, into, 48, CONTENT, False)
    d.begin_step(StepOrders(loads=(load,)), is_behind_sleep=late == "reader")
    orders = StepOrders(
        True, opens=(Open("r", transfer, "d", len(held), CONTENT),), chunks=(ComputedBlocks("r", held),)
    )
    p.begin_step(orders, is_behind_sleep=late == "source")
    p.forward(held, content)
    p.begin_step(StepOrders(finishes=(Finish("r", transfer, "d", held, CONTENT),)))
    busy, looks = (p if late == "source" else d).stream, 0
    while True:
        found = read(d.cache)
        if busy.query():
            break
        assert not found.any()
        looks += 1
        time.sleep(0.02)
    assert looks > 5
    until(lambda: d.half.results().received)
    (report,) = d.half.reports()
    assert (report.code, report.lane) == ("", "unix")
    expected = np.zeros((LAYERS, BLOCKS, PAGE), np.uint8)
    expected[:, list(into)] = content.cpu().numpy()
    assert (read(d.cache) == expected).all()
    for engine in (p, d):
        engine.half.shutdown()


class Rows:
    """Rows of bytes on the device, as an array in the host's memory looks to a rank."""

    def __init__(self, host: Any) -> None:
        self.shape, self.nbytes = host.shape, host.nbytes
        self.tensor = torch.from_numpy(host).to(DEVICE)
        torch.cuda.synchronize()
        self.ctypes = SimpleNamespace(data=self.tensor.data_ptr())

    def __setitem__(self, rows: list[int], content: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            held = torch.from_numpy(content).to(DEVICE)
        held.record_stream(torch.cuda.current_stream())
        for place, row in enumerate(rows):
            self.tensor[row] = held[place]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return read(self.tensor)


class DeviceRank(cores.Rank):
    CUDA_DEVICE = 0

    def place(self, arrays: cores.Arrays) -> Any:
        return [Rows(array) for array in arrays]


@pytest.mark.parametrize("lane", [Lane.UNIX, Lane.STREAM])
def test_sglang_sends_what_the_device_has_written(tmp_path: pathlib.Path, lane: Lane) -> None:
    """Pages, states and the host's auxiliary row, behind the event that SGLang gives with a chunk."""
    chosen = cores.options(tmp_path, lanes=(lane,))
    p, d = DeviceRank("p", Role.PREFILL, chosen), DeviceRank("d", Role.DECODE, chosen, pages=cores.PAGES - 8)
    with cores.running(p, d):
        cores.open_room(p, d, 7, (1, 30, 2), 4, states=[(6,), (2, 3)])
        p.write(p.aux, (2,), 2)
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            p.write(p.kv, (5, 6, 9), 1)
            p.write(p.states[0], (3,), 3)
            p.write(p.states[1], (1, 0), 4)
            event.record()
        p.sources.send(7, 0, (5, 6, 9), is_last=True, aux_row=2, states=[(3,), (1, 0)], fence=event.synchronize)
        assert not event.query()
        cores.check(p, d, cores.Copy(aux=((), ())))
        d.wait("done", 7)
        assert event.query()
        cores.check(p, d, cores.Copy(((5, 6, 9), (1, 30, 2)), ((2,), (4,)), [((3,), (6,)), ((1, 0), (2, 3))]))
        p.wait("sent", 7)
        cores.idle(p, d)


def test_nixl_refuses_device_memory() -> None:
    agent = nixl_agent("one")
    try:
        with pytest.raises(nixlBackendError, match="not VRAM"):
            agent.register_memory(torch.zeros(2 << 20, dtype=torch.uint8, device=DEVICE))
    finally:
        agent.close()
