"""A stand-in for the CUDA driver (fake_cuda.cpp), built and told what to do. No GPU needed."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import pathlib
import subprocess
import time
from typing import Any

import numpy as np

from kvxfer._native import _core as native

SOURCE = pathlib.Path(__file__).parent / "fake_cuda.cpp"


def build(path: pathlib.Path, source: pathlib.Path = SOURCE) -> None:
    compiler = os.environ.get("CXX", "g++").split()
    command = [*compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", str(source), "-o", str(path)]
    subprocess.run(command, check=True, timeout=120)


@dataclasses.dataclass
class DeviceMemory:
    address: int
    bytes: Any
    """What is in it, as the device sees it."""

    def element(self, offset: int, length: int) -> bytes:
        return bytes(self.bytes[offset : offset + length].tobytes())


class Driver:
    """The stand-in, told what to do."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        for name in ("fake_alloc", "fake_shadow", "fake_count"):
            getattr(self.library, name).restype = ctypes.c_uint64
        self.library.fake_alloc.argtypes = [ctypes.c_size_t]
        self.library.fake_shadow.argtypes = [ctypes.c_uint64]

    def set(
        self,
        *,
        delay_us: int = 0,
        has_batch: bool = True,
        held: bool = False,
        failing_copies: int = 0,
        failing_allocs: int = 0,
        lost: bool = False,
    ) -> None:
        self.library.fake_set(delay_us, has_batch, held, failing_copies, failing_allocs, lost)

    def capture(self, is_capturing: bool = True, *, query: int = 0, record: int = 0) -> None:
        """The engine captures a graph in CUDA's global mode, or does not. ``query`` and ``record`` are what every
        question about an event, and every record of one, is answered; 0: the truth."""
        self.library.fake_capture(is_capturing, query, record)

    def count(self, what: str) -> int:
        names = ("copies", "batches", "early", "violations", "pinned", "contexts", "waiting", "broken")
        return int(self.library.fake_count(names.index(what)))

    def alloc(self, nbytes: int, seed: int | None = None) -> DeviceMemory:
        address = int(self.library.fake_alloc(nbytes))
        shadow = (ctypes.c_uint8 * nbytes).from_address(int(self.library.fake_shadow(address)))
        memory = np.frombuffer(shadow, np.uint8)
        if seed is None:
            memory[:] = 0xEE
        else:
            memory[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        return DeviceMemory(address, memory)

    def wait_for_copies(self) -> None:
        end = time.monotonic() + 20
        while self.count("waiting") == 0:
            assert time.monotonic() < end, "nothing was asked of the device"
            time.sleep(0.001)


# --- its memory, as the cores of a test have it ---

POOL = 9
SECOND = 1_000_000_000
STREAM = native.Lane.STREAM
_regions = itertools.count(10_000)


def register(node: Any, memory: DeviceMemory, device: int = 0) -> int:
    region = next(_regions)
    info = native.RegionInfo(region, memory.bytes.size)
    node.core.add_foreign_region(info, memory.address, memory.bytes.size, memory, device=device)
    return region


def add_pool(node: Any, memory: DeviceMemory, segments: list[tuple[int, int, int]], blocks: int, **info: Any) -> None:
    block_bytes = sum(length for _, _, length in segments)
    record = native.PoolInfo(POOL, blocks, block_bytes, b"p" * 32, False, **info)
    node.core.add_foreign_pool(record, memory.address, memory.bytes.size, memory, segments, device=0)


def pull(node: Any, transfer: bytes, source: Any, blocks: Any, **options: Any) -> None:
    options.setdefault("lanes", [STREAM])
    deadline = time.monotonic_ns() + int(options.pop("deadline_s", 60.0) * SECOND)
    node.core.pull(transfer, source.ref, POOL, np.asarray(blocks, np.uint32), deadline_ns=deadline, **options)


def grant(node: Any, transfer: bytes, blocks: Any) -> None:
    array = np.asarray(blocks, np.uint32)
    node.core.grant(transfer, POOL, array, reader="", ttl_ns=60 * SECOND)
    node.core.ready(transfer, len(array), complete=True)
