"""NIXL at one end: UCX over whatever the environment allows, prepared lists or one-shot.

Prepared: the lists of the whole pool are prepared once, the transfer's handle is made before the clock starts, and what
is timed is ``transfer`` until ``check_xfer_state`` says DONE. One-shot: ``get_xfer_descs`` and ``initialize_xfer`` are
timed too.

Settings: ``module`` (the wheel's), ``device`` (as torch names it; none: host memory), ``num_threads`` (NIXL's own
threads for large batches), ``progress`` (the only end with a progress thread; at the other, looking at the state is
what makes progress). ``how``: ``lists``, and ``pause_us``, a sleep between two looks at the state.
"""

from __future__ import annotations

import base64
import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from peers.memory import Ids
from peers.worker import SOURCE, Job, Worker, run

PREPARED, ONE_SHOT = "prepared", "one-shot"


class NixlWorker(Worker):
    def on_open(self) -> dict[str, Any]:
        nixl = importlib.import_module(f"{self.settings.get('module', 'nixl_cu12')}._api")
        self.kind = "VRAM" if self.settings.get("device", "cpu") != "cpu" else "DRAM"
        config = nixl.nixl_agent_config(
            backends=["UCX"],
            num_threads=self.settings.get("num_threads", 0),
            enable_prog_thread=self.settings.get("progress", self.role) == self.role,
        )
        self.agent = nixl.nixl_agent(self.role, config)
        regions = [(self.pool.address, self.pool.nbytes, 0, "")]
        self.registered = self.agent.register_memory(self.agent.get_reg_descs(regions, self.kind), backends=["UCX"])
        self.lists: list[Any] = []
        return {"metadata": base64.b64encode(self.agent.get_agent_metadata()).decode()}

    def on_connect(self, other: dict[str, Any]) -> None:
        name = self.agent.add_remote_agent(base64.b64decode(other["metadata"]))
        self.remote = name.decode() if isinstance(name, bytes) else name
        self.remote_address: int = other["address"]
        self.agent.make_connection(self.remote)

    def on_use(self, block_bytes: int) -> None:
        for handle in self.lists:
            self.agent.release_dlist_handle(handle)
        every = np.arange(self.pool.nbytes // block_bytes, dtype=np.uint32)
        self.lists = [
            self.agent.prep_xfer_dlist(name, self.descriptors(address, every, block_bytes), self.kind)
            for name, address in (("NIXL_INIT_AGENT", self.pool.address), (self.remote, self.remote_address))
        ]

    @staticmethod
    def descriptors(address: int, ids: Ids, block_bytes: int) -> npt.NDArray[np.uint64]:
        rows = np.zeros((len(ids), 3), np.uint64)
        rows[:, 0] = ids.astype(np.uint64) * np.uint64(block_bytes) + np.uint64(address)
        rows[:, 1] = block_bytes
        return rows

    def own_first(self, pair: tuple[Ids, Ids]) -> tuple[Ids, Ids]:
        source, destination = pair
        return (source, destination) if self.role == SOURCE else (destination, source)

    def on_make(self, job: Job) -> None:
        job.handles = []
        for pair in job.pairs:
            own, far = self.own_first(pair)
            if job.how["lists"] == PREPARED:
                ids = own.astype(np.int32), far.astype(np.int32)
                handle = self.agent.make_prepped_xfer(job.op.upper(), self.lists[0], ids[0], self.lists[1], ids[1])
                job.handles.append(handle)
            else:
                size = job.block_bytes
                rows = self.descriptors(self.pool.address, own, size), self.descriptors(self.remote_address, far, size)
                job.handles.append(rows)

    def on_move(self, job: Job, finished: Callable[[int], None]) -> None:
        pause_s = job.how["pause_us"] / 1e6
        agent = self.agent
        if job.how["lists"] == ONE_SHOT:
            for i, (own, far) in enumerate(job.handles):
                near, away = agent.get_xfer_descs(own, self.kind), agent.get_xfer_descs(far, self.kind)
                job.handles[i] = agent.initialize_xfer(job.op.upper(), near, away, self.remote)
        live = {}
        for i, handle in enumerate(job.handles):
            state = agent.transfer(handle)
            if state == "PROC":
                live[i] = handle
            elif state == "DONE":
                finished(i)
            else:
                raise RuntimeError(f"transfer: {state}")
        while live:
            for i in list(live):
                state = agent.check_xfer_state(live[i])
                if state == "DONE":
                    del live[i]
                    finished(i)
                elif state != "PROC":
                    raise RuntimeError(f"check_xfer_state: {state}")
            if pause_s:
                time.sleep(pause_s)

    def on_release(self, job: Job) -> None:
        for handle in job.handles:
            self.agent.release_xfer_handle(handle)
        job.handles = []

    def do_latency(self, rounds: int, block_bytes: int) -> dict[str, list[float]]:
        """Seconds of one prepared block, post to DONE by polling, again and again; the other end is not asked."""
        self.do_use(block_bytes)
        block = np.zeros(1, np.int32)
        handle = self.agent.make_prepped_xfer("READ", self.lists[0], block, self.lists[1], block)
        took = []
        for _ in range(rounds):
            start = time.perf_counter()
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            took.append(time.perf_counter() - start)
            if state != "DONE":
                raise RuntimeError(f"transfer: {state}")
        self.agent.release_xfer_handle(handle)
        return {"poll": took}

    def do_post_cost(self, block_bytes: int, scattered: int, prepared: int, rounds: int) -> dict[str, list[float]]:
        """Seconds that the calling thread spends: lists of scattered blocks given and posted; prepared ones again."""
        self.do_use(block_bytes)
        size = block_bytes
        plan_post, again = [], []
        for turn in range(rounds):
            own, far = self.own_first(self.scatter(turn, scattered, size))
            rows = self.descriptors(self.pool.address, own, size), self.descriptors(self.remote_address, far, size)
            start = time.perf_counter()
            near, away = (self.agent.get_xfer_descs(side, self.kind) for side in rows)
            handle = self.agent.initialize_xfer("READ", near, away, self.remote)
            state = self.agent.transfer(handle)
            plan_post.append(time.perf_counter() - start)
            self.finish(handle, state)
        for turn in range(rounds):
            own, far = self.own_first(self.scatter(turn, prepared, size))
            ids = own.astype(np.int32), far.astype(np.int32)
            handle = self.agent.make_prepped_xfer("READ", self.lists[0], ids[0], self.lists[1], ids[1])
            self.finish(handle, self.agent.transfer(handle), release=False)
            start = time.perf_counter()
            state = self.agent.transfer(handle)
            again.append(time.perf_counter() - start)
            self.finish(handle, state)
        return {"plan_post": plan_post, "again": again}

    def finish(self, handle: Any, state: str, *, release: bool = True) -> None:
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"transfer: {state}")
        if release:
            self.agent.release_xfer_handle(handle)


if __name__ == "__main__":
    run(NixlWorker)
