"""What may be a pool: tensors, arrays, buffers and pointers by their shape."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import types
import weakref

import numpy as np
import pytest

from kvxfer import Agent, Segment
from kvxfer.errors import ClosedError, InvalidArgumentError, LaneUnavailableError
from kvxfer.transport.host_memory import region_of
from tests.support.agents import RECORD, info


def tensor(memory: np.ndarray, **changes: object) -> types.SimpleNamespace:
    values = {
        "data_ptr": lambda: memory.ctypes.data,
        "numel": lambda: memory.size,
        "element_size": lambda: memory.itemsize,
        "is_contiguous": lambda: True,
        "device": types.SimpleNamespace(type="cpu"),
    }
    return types.SimpleNamespace(**{**values, **changes})


def test_register_pool_accepts_supported_memory() -> None:
    memory = np.zeros((4, 8), np.float32)
    address = memory.ctypes.data
    for given in (memory, tensor(memory), tensor(memory, nbytes=128), memoryview(memory), (address, 128)):
        region = region_of(given)
        assert (region.address, region.length_bytes) == (address, 128)
    for given in (bytearray(64), array.array("d", range(8)), (ctypes.c_uint8 * 64)(), mmap.mmap(-1, 64)):
        assert region_of(given).length_bytes == 64


def test_a_torch_tensor() -> None:
    import torch

    whole = torch.zeros(4, 8, dtype=torch.bfloat16)
    region = region_of(whole)
    assert (region.address, region.length_bytes, region.owner) == (whole.data_ptr(), 64, whole)
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        region_of(whole.t())
    with pytest.raises(LaneUnavailableError, match="meta"):
        region_of(torch.zeros(4, device="meta"))


def test_register_pool_refuses_unsupported_memory() -> None:
    memory = np.zeros((4, 8), np.float32)
    frozen = memory.copy()
    frozen.flags.writeable = False
    for given, why in (
        (memory[:, ::2], "contiguous"),
        (memory.T, "contiguous"),
        (tensor(memory, is_contiguous=lambda: False), "contiguous"),
        (frozen, "read-only"),
        (b"bytes", "read-only"),
        (np.zeros(0), "empty"),
        (bytearray(), "empty"),
        ((1, 2, 3), "tuple"),
        ((0, 10), "empty"),
        (object(), "object is no memory"),
    ):
        with pytest.raises(InvalidArgumentError, match=why):
            region_of(given)
    with pytest.raises(LaneUnavailableError, match="host and of CUDA devices"):
        region_of(tensor(memory, device=types.SimpleNamespace(type="xpu")))
    with pytest.raises(LaneUnavailableError, match="GPU"):
        region_of(types.SimpleNamespace(__cuda_array_interface__={}))


async def test_shapes_are_checked() -> None:
    agent = Agent(info("a"))
    with pytest.raises(InvalidArgumentError, match="do not divide"):
        agent.register_pool(RECORD, bytearray(10), block_count=3)
    with pytest.raises(InvalidArgumentError, match="outside memory"):
        agent.register_pool(RECORD, bytearray(10), block_count=3, segments=[Segment(0, 4, 4)])
    with pytest.raises(InvalidArgumentError, match="at least one block"):
        agent.register_pool(RECORD, bytearray(10), block_count=0)
    with pytest.raises(InvalidArgumentError):
        agent.allocate_pool(RECORD, block_count=0, block_bytes=1)
    pool = agent.register_pool(RECORD, bytearray(40), block_count=4, segments=[Segment(0, 10, 4), Segment(4, 10, 6)])
    assert (pool.block_bytes, pool.block_count) == (10, 4)
    assert agent.allocate_pool(RECORD, block_count=2, block_bytes=100).array.shape == (2, 100)
    await agent.close()
    with pytest.raises(ClosedError):
        agent.register_pool(RECORD, bytearray(10), block_count=1)


async def test_memory_is_kept_as_long_as_its_pool() -> None:
    class Memory(np.ndarray):
        pass

    memory = np.zeros(64, np.uint8).view(Memory)
    alive = weakref.ref(memory)
    async with Agent(info("a")) as agent:
        pool = agent.register_pool(RECORD, memory, block_count=4)
        del memory
        gc.collect()
        assert alive() is not None
        agent.remove_pool(pool)
        del pool
        gc.collect()
        assert alive() is None
