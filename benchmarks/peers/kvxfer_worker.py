"""kvxfer at one end, with the limits beside it on the same two pools.

``how`` of a job: ``{"lane", "lists": "prepared" | "one-shot", "via": "post" | "pull"}``. ``post`` takes descriptors (a
READ fetches, a WRITE pushes); prepared: both lists are prepared once a block size, the plan of this transfer is made
before the clock starts. One-shot: lists of addresses in, prepared, planned and posted while the clock runs. ``pull`` is
a pull under a grant. ``{"checks": ...}``: when a post's bytes are checksummed, where that is not left to the default.
``{"limit": ...}`` runs a limit instead.

Settings: ``limits`` (the compiled limits.cpp), ``shared`` (pool memory that kvxfer allocates, for the mapped lane).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer._native import _core
from kvxfer.clock import NS_PER_S
from kvxfer.config import AgentConfig
from kvxfer.transport.base import write_ref
from kvxfer.transport.descriptors import RemotePeer
from kvxfer.transport.engine import Op, TransferBatch, TransferEngine, TransferPlan
from kvxfer.transport.native import NativeBinding, NativeTransport
from kvxfer.types import AgentRef, DataAddress, Incarnation, Lane, ProgressMode, RegionRecord, TransferState
from peers.limits import Limits
from peers.memory import Bytes, Ids, Pages, huge_share
from peers.worker import SOURCE, Job, Worker, run

PROGRESS = "KVXFER_BENCH_PROGRESS"
"""What ``benchmarks/transfer.py --progress`` hands down."""
KEY = b"k" * 32
NONCE = b"n" * 16
DIGEST = b"d" * 32
POOL = 1
ALL_LANES = (Lane.MAPPED, Lane.CMA, Lane.UCX, Lane.UNIX, Lane.STREAM)
"""By name: a UCX without RDMA is not loaded unless the run asks for it."""
GRANT_TTL_NS = 10 * NS_PER_S
WAKE_PAUSE_US = 1000
"""Between two wakes: the loop is asleep again long before the next."""
FINAL = (TransferState.COMMITTED, TransferState.FAILED, TransferState.CANCELLED)


def ref_of(name: str) -> AgentRef:
    return AgentRef(name, Incarnation(1, NONCE))


class KvxferWorker(Worker):
    def on_memory(self, nbytes: int) -> Bytes:
        self.transport, self.poster = self.open_transport(self.role)
        if not self.settings.get("shared"):
            memory = super().on_memory(nbytes)
            self.registration = self.poster.register(memory)
            return memory
        self.registration = self.poster.allocate(nbytes)
        owner = self.registration.region.owner
        assert isinstance(owner, np.ndarray)
        if self.pages == Pages.HUGE and huge_share(self.registration.region.address, nbytes) < 0.9:
            raise RuntimeError("no huge pages for shared memory: see transparent_hugepage/shmem_enabled")
        return owner

    def open_transport(self, name: str) -> tuple[NativeTransport, TransferEngine]:
        config = AgentConfig(
            bind_host=self.host,
            insecure=self.host != "127.0.0.1",
            lanes=ALL_LANES,
            stripes=self.settings.get("stripes", 1),
            copy_threads=self.settings.get("copy_threads", 0),
            progress=ProgressMode(os.environ.get(PROGRESS, ProgressMode.THREAD)),
        )
        transport = NativeBinding(config).open(ref_of(name), config)
        return transport, TransferEngine(transport, config=config, on_event=self.on_event)

    def on_event(self, event: Any) -> None:
        self.events.append(event)

    def on_open(self) -> dict[str, Any]:
        self.events: list[Any] = []
        shared = self.registration.region.shared
        self.limits = Limits(self.role, self.host, self.settings["limits"], self.pool.address)
        return {
            **self.contact(self.transport, self.poster),
            "limits": self.limits.describe(None if shared is None else shared.fileno()),
        }

    @staticmethod
    def contact(transport: NativeTransport, poster: TransferEngine) -> dict[str, Any]:
        address = transport.address
        return {
            "name": transport.ref.agent_id,
            "tcp": [address.tcp_host, address.tcp_port],
            "unix": [address.unix_path, address.host_id],
            "lanes": list(address.lanes),
            "records": [record.to_json() for record in poster.records()],
        }

    @staticmethod
    def meet(transport: NativeTransport, other: dict[str, Any]) -> RemotePeer:
        lanes = tuple(Lane(name) for name in other["lanes"])
        (host, port), (path, host_id) = other["tcp"], other["unix"]
        address = DataAddress(host, port, path, host_id, lanes)
        transport.set_peer(ref_of(other["name"]), address, KEY)
        records = tuple(RegionRecord.from_json(record) for record in other["records"])
        return RemotePeer(ref_of(other["name"]), address, records)

    def on_connect(self, other: dict[str, Any]) -> None:
        self.remote_address: int = other["address"]
        self.peer = self.meet(self.transport, other)
        self.limits.connect(other, self.pool.nbytes)

    def on_use(self, block_bytes: int) -> None:
        every = np.arange(self.pool.nbytes // block_bytes, dtype=np.uint32)
        own, far = self.rows(every, every, block_bytes)
        self.prepared = self.poster.prepare(own), self.poster.prepare(far, peer=self.peer)
        self.has_pool = False

    def rows(self, own: Ids, far: Ids, block_bytes: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Addresses of blocks: [n, 3] of this pool, [n, 3] of the other."""
        made = np.zeros((2, len(own), 3), np.uint64)
        for rows, base, ids in ((made[0], self.pool.address, own), (made[1], self.remote_address, far)):
            rows[:, 0] = ids.astype(np.uint64) * np.uint64(block_bytes) + np.uint64(base)
            rows[:, 1] = block_bytes
        return made[0], made[1]

    def own_first(self, pair: tuple[Ids, Ids]) -> tuple[Ids, Ids]:
        source, destination = pair
        return (source, destination) if self.role == SOURCE else (destination, source)

    def plan(self, op: str, own: Ids, far: Ids) -> TransferPlan:
        return self.poster.plan(Op(op.upper()), self.prepared[0], own, self.prepared[1], far)

    def do_job(self, op: str, how: dict[str, Any], seed: int, count: int, at_once: int) -> None:
        super().do_job(op, how, seed, count, at_once)
        if how.get("limit"):
            self.limits.make(self._job)
        elif how["via"] == "pull":
            self.use_pool()
            job = self._job
            job.handles = [(seed * 1000 + i).to_bytes(16, "big") for i in range(at_once)]

    def on_make(self, job: Job) -> None:
        if job.how.get("limit") or job.how["via"] == "pull":
            return
        self.lanes = [Lane(job.how["lane"])]
        checks = job.how.get("checks", AgentConfig().post_checksum)
        self.poster.config = dataclasses.replace(self.poster.config, post_checksum=checks)
        for pair in job.pairs:
            own, far = self.own_first(pair)
            if job.how["lists"] == "prepared":
                job.handles.append(self.plan(job.op, own, far))
            else:
                job.handles.append(self.rows(own, far, job.block_bytes))

    def on_serve(self, job: Job) -> None:
        if job.how.get("limit"):
            self.limits.serve(job)
        elif job.how["via"] == "pull":
            core, reader = self.transport.core, self.peer.ref.agent_id
            for transfer, (source, _) in zip(job.handles, job.pairs, strict=True):
                core.grant(transfer, POOL, source, reader=reader, ttl_ns=GRANT_TTL_NS)
                core.ready(transfer, len(source), complete=True)

    def on_move(self, job: Job, finished: Callable[[int], None]) -> None:
        if job.how.get("limit"):
            self.limits.move(job)
            finished(0)
        elif job.how["via"] == "pull":
            self.pull(job, finished)
        else:
            self.post(job, finished)

    def post(self, job: Job, finished: Callable[[int], None]) -> None:
        lanes = self.lanes
        live: dict[int, TransferBatch] = {}
        if job.how["lists"] == "prepared":
            for i, plan in enumerate(job.handles):
                live[i] = self.poster.start(plan, lanes=lanes)
        else:
            for i, (own, far) in enumerate(job.handles):
                local, remote = self.poster.prepare(own), self.poster.prepare(far, peer=self.peer)
                live[i] = self.poster.post(Op(job.op.upper()), local, None, remote, None, lanes=lanes)
        if len(live) == 1 and live[0].wait(60.0) is TransferState.COMMITTED:
            finished(0)
            return
        while live:
            over = [i for i, post in live.items() if post.is_final]
            for i in over:
                live.pop(i).result()
                finished(i)
            if not over:
                self.transport.wait(1.0)
                self.poster.poll()

    def use_pool(self) -> None:
        """Make the pool known as blocks of this size, for pulls under grants."""
        if self.has_pool:
            return
        core = self.transport.core
        with contextlib.suppress(Exception):
            core.remove_pool(POOL)
        region = self.registration.region
        blocks, is_shared = region.length_bytes // self.block_bytes, region.shared is not None
        info = _core.PoolInfo(POOL, blocks, self.block_bytes, DIGEST, is_shared)
        segments = [(0, self.block_bytes, self.block_bytes)]
        if region.shared is not None:
            core.add_pool(info, region.shared, segments)
        else:
            core.add_foreign_pool(info, region.address, region.length_bytes, region.owner, segments)
        self.has_pool = True

    def pull(self, job: Job, finished: Callable[[int], None]) -> None:
        core = self.transport.core
        lane = getattr(_core.Lane, job.how["lane"].upper())
        for transfer, (_, destination) in zip(job.handles, job.pairs, strict=True):
            core.pull(transfer, write_ref(self.peer.ref), POOL, destination, lanes=[lane])
        live = {transfer: i for i, transfer in enumerate(job.handles)}
        while live:
            self.transport.wait(1.0)
            for event in core.drain():
                if isinstance(event, _core.TransferFinal):
                    if event.state != _core.TransferState.COMMITTED:
                        raise RuntimeError(f"pull: {event.code} {event.text} {event.lane_notes}")
                    finished(live.pop(event.id))

    # The small measurements.

    def do_latency(
        self, rounds: int, block_bytes: int, lane: str, kind: str, answer_bytes: int
    ) -> dict[str, list[float]]:
        """Seconds of one block, post to completion: by polling, by waiting, by an event loop; of a bare socket's round
        trip in turns with them, by polling and by sleeping; of a notification; and of an event loop's being woken by
        a thread that only writes an eventfd. The other end echoes 2 * ``rounds`` times."""
        self.do_use(block_bytes)
        one = np.zeros(1, np.uint32)
        plan = self.plan("read", one, one)
        lanes = [Lane(lane)]
        names = ("socket, poll", "poll", "socket, sleep", "wait", "notification")
        took: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            took["socket, poll"].append(self.limits.round_trip(kind, answer_bytes, is_polling=True))
            took["poll"].append(self.time_post(plan, lanes, is_waiting=False))
            took["socket, sleep"].append(self.limits.round_trip(kind, answer_bytes, is_polling=False))
            took["wait"].append(self.time_post(plan, lanes, is_waiting=True))
            took["notification"].append(self.time_notification())
        took["await"] = asyncio.run(self.await_posts(plan, lanes, rounds))
        took["wake"] = asyncio.run(self.await_wakes(rounds))
        return took

    def time_post(self, plan: TransferPlan, lanes: list[Lane], *, is_waiting: bool) -> float:
        start = time.perf_counter()
        post = self.poster.start(plan, lanes=lanes)
        if is_waiting:
            post.wait(10.0)
        while post.poll() not in FINAL:
            pass
        seconds = time.perf_counter() - start
        post.result()
        self.settle(post)
        return seconds

    @staticmethod
    def settle(post: TransferBatch) -> None:
        """Let go of everything before the next clock starts."""
        while not post.is_drained:
            post.poll()

    def time_notification(self) -> float:
        self.events.clear()
        start = time.perf_counter()
        self.transport.notify(self.peer.ref, b"n" * 16)
        while not any(isinstance(event, _core.NotifDelivered) for event in self.events):
            self.poster.poll()
        return time.perf_counter() - start

    async def await_posts(self, plan: TransferPlan, lanes: list[Lane], rounds: int) -> list[float]:
        """As ``Agent.post`` is awaited."""
        loop, took = asyncio.get_running_loop(), []
        loop.add_reader(self.transport.fileno(), self.poster.poll)
        for _ in range(rounds):
            final: asyncio.Future[TransferBatch] = loop.create_future()
            start = time.perf_counter()
            post = self.poster.start(plan, lanes=lanes, on_final=final.set_result)
            if post.wait_briefly():
                await asyncio.sleep(0)
            await asyncio.shield(final)
            took.append(time.perf_counter() - start)
            post.result()
            self.settle(post)
        loop.remove_reader(self.transport.fileno())
        return took

    async def await_wakes(self, rounds: int) -> list[float]:
        """What an event loop takes to see an eventfd that another thread writes, and to go on."""
        loop, seen = asyncio.get_running_loop(), {}
        eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        woken = asyncio.Event()
        count = 0

        def on_readable() -> None:
            nonlocal count
            count += os.eventfd_read(eventfd)  # more than one, where the loop came late
            woken.set()

        loop.add_reader(eventfd, on_readable)
        writing = loop.run_in_executor(None, self.limits.library.wake, eventfd, rounds, WAKE_PAUSE_US)
        while count != rounds:
            await woken.wait()
            seen[count - 1] = time.monotonic_ns()
            woken.clear()
        written = await writing
        loop.remove_reader(eventfd)
        os.close(eventfd)
        return [(now_ns - written[number]) / NS_PER_S for number, now_ns in seen.items()]

    def do_plain(self, kind: str) -> None:
        """Connect a plain socket to the other end, which is asked at the same time."""
        self.limits.plain.get(kind, 0)

    def do_echo(self, kind: str, rounds: int, nbytes: int) -> None:
        self.limits.echo(kind, rounds, nbytes)

    def do_post_cost(
        self, block_bytes: int, scattered: int, prepared: int, rounds: int, lane: str
    ) -> dict[str, list[float]]:
        """Seconds that the calling thread spends: lists of scattered blocks given and posted; prepared ones again."""
        self.do_use(block_bytes)
        lanes, plan_post, again = [Lane(lane)], [], []
        for turn in range(rounds):
            rows = self.rows(*self.own_first(self.scatter(turn, scattered, block_bytes)), block_bytes)
            start = time.perf_counter()
            local, remote = self.poster.prepare(rows[0]), self.poster.prepare(rows[1], peer=self.peer)
            post = self.poster.post(Op.READ, local, None, remote, None, lanes=lanes)
            plan_post.append(time.perf_counter() - start)
            post.wait(60.0)
            post.result()
        for turn in range(rounds):
            plan = self.plan("read", *self.own_first(self.scatter(turn, prepared, block_bytes)))
            for i in range(2):
                start = time.perf_counter()
                post = self.poster.start(plan, lanes=lanes)
                if i:
                    again.append(time.perf_counter() - start)
                post.wait(60.0)
                post.result()
        return {"plan_post": plan_post, "again": again}

    def do_many(self, count: int, other: dict[str, Any]) -> list[dict[str, Any]]:
        """Open ``count`` more agents in this process, each knowing ``other``; returns how they are reached."""
        self.many = [self.open_transport(f"idle-{i}") for i in range(count)]
        for transport, _ in self.many:
            self.meet(transport, other)
        return [self.contact(*one) for one in self.many]

    def do_admit(self, others: list[dict[str, Any]]) -> None:
        for other in others:
            self.meet(self.transport, other)

    def do_greet(self, name: str) -> None:
        """Let every one of the many connect to ``name``."""
        for transport, _ in self.many:
            transport.notify(ref_of(name), b"hello")

    def do_sessions(self) -> int:
        self.poster.poll()
        return self.transport.counts().sessions_up

    def do_contact(self) -> dict[str, Any]:
        return self.contact(self.transport, self.poster)

    def on_close(self) -> None:
        for transport, _ in getattr(self, "many", []):
            transport.close()
        self.transport.close()
        self.limits.close()


if __name__ == "__main__":
    run(KvxferWorker)
