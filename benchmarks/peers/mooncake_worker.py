"""Mooncake's transfer engine over TCP at one end: batches of (own address, far address, length), one batch a transfer.

It has no prepared lists; its Python API takes lists of integers. They are made before the clock starts.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from peers.memory import Ids
from peers.worker import SOURCE, Job, Worker, run


class MooncakeWorker(Worker):
    def on_open(self) -> dict[str, Any]:
        self.engine = importlib.import_module("mooncake.engine").TransferEngine()
        if self.engine.initialize(self.host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("initialize failed")
        if self.engine.register_memory(self.pool.address, self.pool.nbytes) != 0:
            raise RuntimeError("register_memory failed")
        return {"session": f"{self.host}:{self.engine.get_rpc_port()}"}

    def on_connect(self, other: dict[str, Any]) -> None:
        self.session: str = other["session"]
        self.remote_address: int = other["address"]

    @staticmethod
    def addresses(base: int, ids: Ids, block_bytes: int) -> list[int]:
        return [base + i * block_bytes for i in ids.tolist()]

    def on_make(self, job: Job) -> None:
        for source, destination in job.pairs:
            own, far = (source, destination) if self.role == SOURCE else (destination, source)
            rows = (
                self.addresses(self.pool.address, own, job.block_bytes),
                self.addresses(self.remote_address, far, job.block_bytes),
                [job.block_bytes] * len(own),
            )
            job.handles.append(rows)

    def on_move(self, job: Job, finished: Callable[[int], None]) -> None:
        read = job.op == "read"
        if len(job.handles) == 1:
            call = self.engine.batch_transfer_sync_read if read else self.engine.batch_transfer_sync_write
            if call(self.session, *job.handles[0]) != 0:
                raise RuntimeError("batch_transfer_sync failed")
            finished(0)
            return
        post = self.engine.batch_transfer_async_read if read else self.engine.batch_transfer_async_write
        live = []
        for rows in job.handles:
            batch = post(self.session, *rows)
            if batch == 0:
                raise RuntimeError("batch_transfer_async failed")
            live.append(batch)
        # One call waits for a list of batches; each transfer's own end is not told.
        if self.engine.get_batch_transfer_status(live) != 0:
            raise RuntimeError("get_batch_transfer_status failed")
        for i in range(len(live)):
            finished(i)

    def on_release(self, job: Job) -> None:
        job.handles = []

    def do_latency(self, rounds: int, block_bytes: int) -> dict[str, list[float]]:
        """Seconds of one block by the call that waits."""
        took = []
        for _ in range(rounds):
            start = time.perf_counter()
            failed = self.engine.transfer_sync_read(self.session, self.pool.address, self.remote_address, block_bytes)
            took.append(time.perf_counter() - start)
            if failed:
                raise RuntimeError("transfer_sync_read failed")
        return {"poll": took}

    def do_post_cost(self, block_bytes: int, scattered: int, prepared: int, rounds: int) -> dict[str, list[float]]:
        """Seconds that the calling thread spends in the call that does not wait: of scattered blocks, and of fewer
        whose lists it was given once before."""
        self.time_posts(0, 1, block_bytes)  # it connects
        turns = range(rounds)
        return {
            "plan_post": [self.time_posts(turn, scattered, block_bytes)[0] for turn in turns],
            "again": [self.time_posts(turn, prepared, block_bytes)[1] for turn in turns],
        }

    def time_posts(self, turn: int, count: int, block_bytes: int) -> list[float]:
        """Of the same lists, two times."""
        job = Job("read", {}, [self.scatter(turn, count, block_bytes)], block_bytes)
        self.on_make(job)
        took = []
        for _ in range(2):
            start = time.perf_counter()
            batch = self.engine.batch_transfer_async_read(self.session, *job.handles[0])
            took.append(time.perf_counter() - start)
            if batch == 0 or self.engine.get_batch_transfer_status([batch]) != 0:
                raise RuntimeError("batch_transfer_async failed")
        return took


if __name__ == "__main__":
    run(MooncakeWorker)
