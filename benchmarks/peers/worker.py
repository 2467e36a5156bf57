"""What every contender's process does alike: answer JSON lines, keep a pool, time a transfer.

It decides the conversation with benchmarks/transfer.py and the clock around a transfer: process CPU time and wall time
are read here, in one place, for everybody. It must never know a library: a contender overrides the ``on_`` methods.

A request is ``{"do": name, ...}`` and calls the method ``do_name``; answers are ``{"ok": ...}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from peers.memory import Bytes, Ids, Pool, anonymous, choose_pair

SOURCE = "source"
DESTINATION = "destination"


class Job:
    """Transfers that are posted together: their lists, cut into ``at_once`` equal parts."""

    def __init__(self, op: str, how: dict[str, Any], pairs: list[tuple[Ids, Ids]], block_bytes: int) -> None:
        self.op = op
        self.how = how
        self.pairs = pairs
        """(blocks of the source, blocks of the destination) of each transfer."""
        self.block_bytes = block_bytes
        self.handles: list[Any] = []
        """A contender's own, made before the clock starts."""


class Worker:
    """One end of a contender. ``role``: the bytes come from it or go to it. The job says which end starts the
    transfer."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.role: str = options.role
        self.host: str = options.host
        self.peer_host: str = options.peer_host
        self.settings: dict[str, Any] = json.loads(options.settings)
        self.pages: str = options.pages
        self.pool = self.on_pool(options.pool_bytes, options.reference_fd)
        if self.role == SOURCE:
            self.pool.fill()
        self.block_bytes = 0
        self.job: Job | None = None

    # What a contender says for itself.

    def on_pool(self, nbytes: int, reference_fd: int) -> Any:
        """The pool: of host memory, or (settings: ``device``) of a device's."""
        if device := self.settings.get("device"):
            from peers.device import DevicePool

            return DevicePool(nbytes, reference_fd, device)
        return Pool(self.on_memory(nbytes), reference_fd)

    def on_memory(self, nbytes: int) -> Bytes:
        return anonymous(nbytes, self.pages)

    def on_open(self) -> dict[str, Any]:
        """Start the library and register the pool; what the other end must know, as JSON."""
        raise NotImplementedError

    def on_connect(self, other: dict[str, Any]) -> None:
        raise NotImplementedError

    def on_use(self, block_bytes: int) -> None:
        """Make ready what is made once for a pool and a block size: prepared lists."""

    def on_make(self, job: Job) -> None:
        """Make ready what is made before the clock starts."""

    def on_serve(self, job: Job) -> None:
        """Do the passive end's part before the other end starts, where it has one."""

    def on_move(self, job: Job, finished: Callable[[int], None]) -> None:
        """Post all transfers of the job and wait; call ``finished`` as each one is known to be complete."""
        raise NotImplementedError

    def on_release(self, job: Job) -> None:
        """Give back what :meth:`on_make` made."""

    def on_close(self) -> None:
        """Hang up."""

    # Requests.

    def do_open(self) -> dict[str, Any]:
        return {"address": self.pool.address, "pid": os.getpid(), **self.on_open()}

    def do_connect(self, other: dict[str, Any]) -> None:
        self.on_connect(other)

    def do_use(self, block_bytes: int) -> None:
        if block_bytes != self.block_bytes:
            self.block_bytes = block_bytes
            self.on_use(block_bytes)

    def do_job(self, op: str, how: dict[str, Any], seed: int, count: int, at_once: int) -> None:
        """Take the lists of the next transfer: every end makes the same ones from the seed."""
        source, destination = choose_pair(seed, self.pool.nbytes // self.block_bytes, count)
        parts = zip(np.array_split(source, at_once), np.array_split(destination, at_once), strict=True)
        self.job = Job(op, how, list(parts), self.block_bytes)
        if self.role == DESTINATION:
            self.pool.poison(self.block_bytes, source, destination)
        if self.is_initiator:
            self.on_make(self.job)

    @property
    def is_initiator(self) -> bool:
        return self._job.op == ("read" if self.role == DESTINATION else "write")

    @property
    def _job(self) -> Job:
        assert self.job is not None
        return self.job

    def do_serve(self) -> None:
        self.on_serve(self._job)

    def do_move(self) -> dict[str, Any]:
        """Seconds from the first post to the last completion, each transfer's own, and this process's CPU seconds."""
        job = self._job
        each = [0.0] * len(job.pairs)

        def finished(index: int) -> None:
            each[index] = time.perf_counter() - start

        cpu = time.process_time()
        start = time.perf_counter()
        self.on_move(job, finished)
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
        self.on_release(job)
        return {"seconds": seconds, "each": each, "cpu": cpu}

    def do_check(self) -> bool:
        job = self._job
        source, destination = (np.concatenate(side) for side in zip(*job.pairs, strict=True))
        return self.pool.is_right(job.block_bytes, source, destination)

    def do_cpu(self) -> float:
        return time.process_time()

    def do_hold_gil(self, seconds: float) -> None:
        """Hold this process's GIL, asleep, from now on for so long; the answer comes before it begins."""
        # PyDLL calls keep the GIL, as a library does that computes without releasing it.
        sleep = ctypes.PyDLL(None).usleep
        timer = threading.Timer(0.02, sleep, [ctypes.c_uint(round(seconds * 1e6))])
        timer.daemon = True
        timer.start()

    def scatter(self, turn: int, count: int, block_bytes: int) -> tuple[Ids, Ids]:
        """Lists of ``count`` scattered blocks; where the pool has fewer, some come again."""
        blocks = self.pool.nbytes // block_bytes
        source, destination = choose_pair(turn + 1000, blocks, min(blocks, count))
        return np.resize(source, count), np.resize(destination, count)

    def do_close(self) -> None:
        self.on_close()


def run(worker: type[Worker]) -> None:
    """Answer requests until the pipe ends or ``close`` was answered."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", required=True)
    parser.add_argument("--pages", required=True)
    parser.add_argument("--pool-bytes", type=int, required=True)
    parser.add_argument("--reference-fd", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--peer-host", required=True)
    parser.add_argument("--settings", required=True)
    options = parser.parse_args()
    # Libraries print on standard output; only answers may go where the driver reads.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    made: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            if made is None:
                made = worker(options)
            answer = {"ok": getattr(made, f"do_{name}")(**request)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
        if name == "close":
            break
    else:
        if made is not None:  # the driver is gone without a word
            made.on_close()
    # Peers' libraries may crash or hang while Python takes them down; there is nothing left to lose.
    os._exit(0)


__all__ = ["DESTINATION", "SOURCE", "Job", "Worker", "run"]
