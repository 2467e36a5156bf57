"""kvxfer at one end with its pool on a CUDA device, and the device's limits beside it on the same two pools.

``how`` of a job is as :mod:`peers.kvxfer_worker` has it, posts alone; ``{"limit": "ipc"}`` is the driver's own copies.
Settings: ``device``, as torch names it.
"""

from __future__ import annotations

from typing import Any

from peers.device import DeviceLimits, DevicePool
from peers.kvxfer_worker import KvxferWorker
from peers.worker import run


class CudaWorker(KvxferWorker):
    def on_pool(self, nbytes: int, reference_fd: int) -> DevicePool:
        pool = DevicePool(nbytes, reference_fd, self.settings["device"])
        self.transport, self.poster = self.open_transport(self.role)
        self.registration = self.poster.register(pool.memory)
        return pool

    def on_open(self) -> dict[str, Any]:
        self.events: list[Any] = []
        self.limits = DeviceLimits(self.role, self.pool)
        return {**self.contact(self.transport, self.poster), "limits": self.limits.describe()}

    def do_copies(self, nbytes: int, rounds: int) -> dict[str, list[float]]:
        return self.limits.copies(nbytes, rounds)

    def do_gpu(self) -> dict[str, Any]:
        return self.limits.gpu() | {"ucx": self.transport.core.ucx_obstacle or "loaded"}


if __name__ == "__main__":
    run(CudaWorker)
