"""A pool on a CUDA device, and what the device can do at best with it.

It decides how such a pool is filled, poisoned and checked (by torch, on the device itself: every byte, and nothing of
it is timed), and how the driver is asked for copies that no library takes part in. It must never know a library. On
the device ``cpu`` the pool is the host's memory: that tries the benchmark, and measures nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import time
from typing import Any

import numpy as np
import torch

from peers.memory import Ids, address_of
from peers.worker import DESTINATION, SOURCE, Job

STEP_BYTES = 64 << 20
IN_STREAM_ORDER, LAZY_PEER_ACCESS, NON_BLOCKING = 1, 1, 1


class DevicePool:
    """As :class:`peers.memory.Pool`, in one allocation of a device; its reference is there too."""

    def __init__(self, nbytes: int, reference_fd: int, device: str) -> None:
        view = mmap.mmap(reference_fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(reference_fd)
        self.reference = torch.from_numpy(np.frombuffer(view, np.uint8).copy()).to(device)
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.settle()

    @property
    def address(self) -> int:
        return int(self.memory.data_ptr())

    @property
    def nbytes(self) -> int:
        return int(self.memory.nbytes)

    def settle(self) -> None:
        """Nothing that was asked of the device is under way any more."""
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)

    def fill(self) -> None:
        """Make it a source."""
        self.memory.copy_(self.reference)
        self.settle()

    def poison(self, block_bytes: int, source: Ids, destination: Ids) -> None:
        """Set every byte that must arrive to its complement."""
        own, want = self.memory.view(-1, block_bytes), self.reference.view(-1, block_bytes)
        for there, here in self._steps(block_bytes, source, destination):
            own[here] = ~want[there]
        self.settle()

    def is_right(self, block_bytes: int, source: Ids, destination: Ids) -> bool:
        """Whether every byte of these blocks is what the source held."""
        own, want = self.memory.view(-1, block_bytes), self.reference.view(-1, block_bytes)
        return all(torch.equal(own[here], want[there]) for there, here in self._steps(block_bytes, source, destination))

    def _steps(self, block_bytes: int, *lists: Ids) -> list[tuple[torch.Tensor, ...]]:
        step = max(1, STEP_BYTES // block_bytes)
        indices = [torch.from_numpy(ids.astype(np.int64)).to(self.memory.device) for ids in lists]
        return list(zip(*(one.split(step) for one in indices), strict=True))


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class DeviceLimits:
    """One end's limits. ``{"limit": "ipc"}``: the source's pool is mapped by the driver's own means, and the blocks are
    copied out of it by one batch of the driver's copies."""

    def __init__(self, role: str, pool: DevicePool) -> None:
        self.role = role
        self.pool = pool
        self.is_cuda = pool.memory.is_cuda
        if self.is_cuda:
            self.driver = ctypes.CDLL("libcuda.so.1")
            torch.cuda.current_stream(pool.memory.device)  # the device's context is this thread's
            self.stream = ctypes.c_void_p()
            self.call("cuStreamCreate", ctypes.byref(self.stream), NON_BLOCKING)

    def call(self, name: str, *arguments: Any) -> None:
        if result := getattr(self.driver, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {result}")

    def describe(self) -> dict[str, Any]:
        if not self.is_cuda or self.role != SOURCE:
            return {}
        handle, base, size = Handle(), ctypes.c_uint64(), ctypes.c_size_t()
        address = ctypes.c_uint64(self.pool.address)
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return {"handle": bytes(handle).hex(), "offset": self.pool.address - base.value}

    def connect(self, other: dict[str, Any], nbytes: int) -> None:
        if self.role != DESTINATION or not self.is_cuda:
            return
        handle = Handle.from_buffer_copy(bytes.fromhex(other["limits"]["handle"]))
        mapped = ctypes.c_uint64()
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(mapped), handle, LAZY_PEER_ACCESS)
        self.far = mapped.value + int(other["limits"]["offset"])

    def make(self, job: Job) -> None:
        """The lists of the driver's call, before any clock."""
        if self.role == DESTINATION:
            (source, destination), size = job.pairs[0], np.uint64(job.block_bytes)
            to = destination.astype(np.uint64) * size + np.uint64(self.pool.address)
            job.handles = [to, source.astype(np.uint64) * size + np.uint64(self.far), np.full(len(to), size, np.uint64)]

    def serve(self, job: Job) -> None:
        """The driver needs no other end."""

    def move(self, job: Job) -> None:
        to, origin, sizes = (ctypes.c_void_p(address_of(one)) for one in job.handles)
        attributes, first, failed = CopyAttributes(order=IN_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t()
        count, ones = ctypes.c_size_t(len(job.handles[0])), ctypes.c_size_t(1)
        how = ctypes.byref(attributes), ctypes.byref(first), ones, ctypes.byref(failed)
        self.call("cuMemcpyBatchAsync", to, origin, sizes, count, *how, self.stream)
        self.call("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        """Nothing: the process ends."""

    def copies(self, nbytes: int, rounds: int) -> dict[str, list[float]]:
        """GB/s of one copy of so many bytes that lie together, each way; what was copied is compared, untimed."""
        device, own = self.pool.memory.device, self.pool.reference[:nbytes]
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_cuda)
        other = torch.empty(nbytes, dtype=torch.uint8, device=device)
        speeds: dict[str, list[float]] = {}
        for _ in range(rounds + 1):
            for name, to, origin in (("D2D", other, own), ("D2H", pinned, own), ("H2D", other, pinned)):
                to.fill_(0)
                self.pool.settle()
                start = time.perf_counter()
                to.copy_(origin, non_blocking=True)
                self.pool.settle()
                speeds.setdefault(name, []).append(nbytes / 1e9 / (time.perf_counter() - start))
                if not torch.equal(to.to(device), own):
                    raise RuntimeError(f"{name}: wrong bytes")
        return {name: values[1:] for name, values in speeds.items()}

    def gpu(self) -> dict[str, Any]:
        if not self.is_cuda:
            return {"gpu": "none: the host's memory"}
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return {
            "gpu": torch.cuda.get_device_name(self.pool.memory.device),
            "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0],
            "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
            "torch": torch.__version__,
        }
