"""Two worker halves over memory that only a stand-in for the CUDA driver can reach; run by test_device.py, because a
process loads one driver. Prints what happened as JSON.

usage: KVXFER_CUDA_LIBRARY=LIBRARY python -m tests.support.vllm_connector.two_devices
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from typing import Any

import numpy as np

from kvxfer.agent import Agent
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.steps import ComputedBlocks, Finish, LoadOrder, Open, StepOrders
from kvxfer.connectors.vllm.worker import WorkerHalf
from kvxfer.types import CompatibilityRecord, TransferId, WorkerInfo
from tests.support.native.cuda_driver import DeviceMemory, Driver
from tests.support.vllm_connector.late_device import Device

LAYERS, BLOCKS, PAGE = 3, 16, 8192
RECORD = CompatibilityRecord("m", "", "", "f16", LAYERS, 1, 16, 4, "page:HNC", "", "", "FLASH_ATTN")
ID, CONTENT = TransferId(b"i" * 16), b"c" * 32
PROMPT, PLACES = (3, 4, 9), (7, 1, 2)


class Storage:
    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory

    def data_ptr(self) -> int:
        return self.memory.address

    def nbytes(self) -> int:
        return LAYERS * BLOCKS * PAGE


class Tensor:
    """One layer of the KV cache, as vLLM registers it."""

    device = "cuda:0"
    shape = (BLOCKS, PAGE)

    def __init__(self, memory: DeviceMemory, layer: int) -> None:
        self.memory = memory
        self.layer = layer

    def data_ptr(self) -> int:
        return self.memory.address + self.layer * BLOCKS * PAGE

    def stride(self, axis: int | None = None) -> Any:
        return (PAGE, 1) if axis is None else (PAGE, 1)[axis]

    def element_size(self) -> int:
        return 1

    def untyped_storage(self) -> Storage:
        return Storage(self.memory)


class Engine:
    def __init__(self, name: str, memory: DeviceMemory) -> None:
        self.memory = memory
        self.stream = Device()
        options = ConnectorOptions.from_config("kv_both", name, {"coordinator": "127.0.0.1:1"})

        def new_agent(info: WorkerInfo) -> Agent:
            self.agent = Agent(info, config=options.agent_config(0))
            return self.agent

        self.half = WorkerHalf(
            options,
            lambda pages: RECORD,
            model="m",
            rank=0,
            ranks=1,
            new_agent=new_agent,
            events=lambda device: self.stream.record,
        )
        self.names = [f"layer {layer}" for layer in range(LAYERS)]
        self.half.register({name: Tensor(memory, layer) for layer, name in enumerate(self.names)})

    def meet(self, other: Engine) -> None:
        pools = [pool.published for pool in other.agent.pools]
        runtime = self.half._runtime
        assert runtime is not None
        runtime.call(self.agent.connect_peer, other.agent.ref, other.agent.address, bytes(32), pools)

    def pages(self, blocks: tuple[int, ...]) -> np.ndarray[Any, Any]:
        whole: np.ndarray[Any, Any] = self.memory.bytes.reshape(LAYERS, BLOCKS, PAGE)
        return whole[:, list(blocks)]

    def forward(self, blocks: tuple[int, ...]) -> None:
        """Asks the device for each layer's bytes, and returns at once."""
        whole = self.memory.bytes.reshape(LAYERS, BLOCKS, PAGE)
        content = np.random.default_rng(5).integers(0, 256, (LAYERS, len(blocks), PAGE), np.uint8)
        for layer, name in enumerate(self.names):
            self.stream.asked.append(
                lambda layer=layer: whole.__setitem__((layer, list(blocks)), content[layer])  # type: ignore[misc]
            )
            self.half.layer_saved(name)
        self.half.step_saved()

    def wait_received(self) -> bool:
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            if self.half.results().received:
                return True
            time.sleep(0.005)
        return False


def main() -> None:
    driver = Driver(pathlib.Path(os.environ["KVXFER_CUDA_LIBRARY"]))
    driver.set(delay_us=100)
    p, d = (Engine(name, driver.alloc(LAYERS * BLOCKS * PAGE)) for name in "pd")
    p.meet(d)
    d.meet(p)
    said = {}
    before = d.pages(PLACES).copy()

    def is_untouched() -> bool:
        time.sleep(0.3)
        return bool((d.pages(PLACES) == before).all())

    d.stream.asked.append(lambda: None)  # the blocks' last user is still at work
    d.half.begin_step(StepOrders(loads=(LoadOrder("l", ID, ("p",), 0, PLACES, 48, CONTENT, False),)))
    opened = Open("r", ID, "d", len(PROMPT), CONTENT)
    p.half.begin_step(StepOrders(True, opens=(opened,), chunks=(ComputedBlocks("r", PROMPT),)))
    p.forward(PROMPT)
    p.stream.synchronize()
    said["untouched while its own device works"] = is_untouched()
    p.half.begin_step(StepOrders(finishes=(Finish("r", ID, "d", PROMPT, CONTENT),)))
    d.stream.synchronize()
    said["received"] = d.wait_received()
    said["equal"] = bool((d.pages(PLACES) == p.pages(PROMPT)).all())
    said["reports"] = [(report.code, report.lane) for report in d.half.reports()]

    before = d.pages(PLACES).copy()
    again = TransferId(b"j" * 16)
    d.half.begin_step(StepOrders(loads=(LoadOrder("m", again, ("p",), 0, PLACES, 48, CONTENT, False),)))
    opened = Open("s", again, "d", len(PROMPT), CONTENT)
    p.half.begin_step(StepOrders(True, opens=(opened,), chunks=(ComputedBlocks("s", (5, 6, 8)),)))
    p.forward((5, 6, 8))
    p.half.begin_step(StepOrders(finishes=(Finish("s", again, "d", (5, 6, 8), CONTENT),)))
    said["untouched while the source's device works"] = is_untouched()
    p.stream.synchronize()
    said["received again"] = d.wait_received()
    said["equal again"] = bool((d.pages(PLACES) == p.pages((5, 6, 8))).all())
    for engine in (p, d):
        engine.half.shutdown()
    said["violations"] = driver.count("violations")
    print(json.dumps(said))


if __name__ == "__main__":
    main()
