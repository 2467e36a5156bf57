"""Posts reads and writes of registered memory between any two agents, by descriptors that may be stale, with and
without checksums and notifications; must never fill a cell that another write is to fill.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.testing.sim.faults import Kind, TransferPhase
from kvxfer.testing.sim.region_owner import IN, OUT, REGION_CELLS
from kvxfer.testing.sim.region_reference import PostRecord
from kvxfer.testing.sim.tagged_memory import BLOCK_BYTES, Cell
from kvxfer.testing.sim.view import ProcessView, WorldView
from kvxfer.testing.sim.virtual_clock import MS

_CELLS_MAX = 6


@dataclasses.dataclass(frozen=True)
class _PostPlan:
    """What one incarnation means to post, with the ids that it knows of the other's regions."""

    id: bytes
    is_push: bool
    peer: ProcessView
    peer_ref: Any
    remote: int
    count: int
    lanes: tuple[Any, ...]
    deadline_ns: int
    has_checksums: bool
    has_notification: bool


class RegionPoster:
    def __init__(self, world: WorldView) -> None:
        self._world, self._rng, self._clock = world, world.rng, world.clock
        self._posts: dict[tuple[int, bytes], PostRecord] = {}
        self._regions: dict[bytes, tuple[int, int]] = {}

    def begin(self) -> None:
        options, rng = self._world.options, self._rng
        until = options.chaos_ns - 1000 * MS
        for _ in range(rng.randint(options.posts, options.posts * 3 // 2)):
            self._clock.call_at(200 * MS + rng.randrange(0, until - 200 * MS), self._plan)

    # --- what happens elsewhere ---

    def final(self, process: ProcessView, effect: Any) -> None:
        world, state, code = self._world, effect.state.name, effect.code.name
        post = self._posts[process.incarnation, effect.id]
        world.report.posts["push" if post.is_push else "fetch", state, code] += 1
        if state == "COMMITTED":
            world.report.post_lanes[effect.lane.name.lower()] += 1
            if not post.is_push and post.notification is not None:  # the endpoint posts it itself, as its next message
                world.checkers.notified_next(process.incarnation, post.source, post.notification)

    def drained(self, process: ProcessView, id_: bytes) -> None:
        post = self._posts[process.incarnation, id_]
        if not post.is_push:
            self._world.pull_over(id_)
            process.later(self._rng.randrange(0, 100 * MS), self._give_back, process, post)

    def offer_ended(self, process: ProcessView, effect: Any) -> None:
        """The target of a push may give its cells to another one."""
        for post in self._posts.values():
            if post.is_push and (post.target, post.id) == (process.incarnation, effect.id):
                process.later(self._rng.randrange(0, 100 * MS), self._give_back, process, post)
                return

    def _give_back(self, process: ProcessView, post: PostRecord) -> None:
        if process.registered.ids[IN] == post.cells[0].region:
            process.registered.free |= {cell.slot for cell in post.cells}

    # --- posting ---

    def _plan(self) -> None:
        world, rng = self._world, self._rng
        living = [process for process in world.living() if process.endpoint is not None]
        if len(living) < 2:
            return
        process, peer = rng.sample(living, 2)
        peer.run(peer.registered.overwrite)
        is_push = rng.random() < 0.5
        remote = peer.registered.ids[IN if is_push else OUT]
        if remote is None:
            return
        is_hurried = rng.random() < world.weights[Kind.DEADLINE]
        plan = _PostPlan(
            rng.randbytes(16),
            is_push,
            peer,
            peer.ref,
            remote,
            rng.randint(1, _CELLS_MAX),
            self._lanes(),
            rng.randrange(2 * MS, 500 * MS) if is_hurried else 30_000 * MS,
            rng.random() < 0.5,
            rng.random() < 0.6,
        )
        if rng.random() < world.weights[Kind.SLOW_READ]:
            world.slow_down(plan.id, rng.choice((20, 100, 400, 1000)))
        process.later(rng.randrange(0, 60 * MS), self._post, process, plan)

    def _lanes(self) -> tuple[Any, ...]:
        lane = self._world.machines.Lane
        choices = (
            (lane.MEMORY,),
            (lane.STREAM,),
            (lane.UNIX, lane.STREAM),
            (lane.MAPPED, lane.CMA, lane.STREAM),
            (lane.CMA, lane.UCX, lane.MEMORY),
            (lane.UCX, lane.STREAM),
        )
        return self._rng.choices(choices, (3, 3, 2, 2, 1, 2))[0]

    def _post(self, process: ProcessView, plan: _PostPlan) -> None:
        world, rng, now = self._world, self._rng, self._clock.now
        if world.is_calm:
            return
        target = plan.peer if plan.is_push else process
        source_area = process.registered.ids[OUT] if plan.is_push else plan.remote
        target_area = plan.remote if plan.is_push else process.registered.ids[IN]
        if source_area is None or target_area is None or len(target.registered.free) < plan.count:
            return
        to = rng.sample(sorted(target.registered.free), plan.count)
        from_ = [rng.randrange(REGION_CELLS) for _ in range(plan.count)]
        local, remote = (from_, to) if plan.is_push else (to, from_)
        local_region, remote_region = (source_area, target_area) if plan.is_push else (target_area, source_area)
        notification = plan.id + rng.randbytes(4) if plan.has_notification else None
        post = PostRecord(
            plan.id,
            plan.is_push,
            process.incarnation,
            process.incarnation if plan.is_push else plan.peer.incarnation,
            target.incarnation,
            [Cell(source_area, index) for index in from_],
            [Cell(target_area, index) for index in to],
            target.memory,
            notification,
            now,
        )
        start = process.endpoint.push if plan.is_push else process.endpoint.fetch
        try:
            effects = start(
                plan.id, plan.peer_ref, *self._list(local_region, local), *self._list(remote_region, remote),
                list(plan.lanes), now + plan.deadline_ns, rng.getrandbits(64), now, notification, plan.has_checksums,
            )  # fmt: skip
        except KvxferError as error:
            world.log(f"{process!r} cannot post {plan.id.hex()[:6]}: {error.code}")
            return
        verb = "pushes" if plan.is_push else "fetches"
        world.log(f"{process!r} {verb} {plan.id.hex()[:6]}, {plan.count} elements, {plan.peer!r}")
        target.registered.free -= set(to)
        world.reference.posted(post)
        self._posts[process.incarnation, plan.id] = post
        world.report.posted += 1
        if plan.is_push:
            if rng.random() < world.weights[Kind.CANCEL] / 4:
                process.later(rng.randrange(0, 300 * MS), self._cancel, process, plan.id)
        else:
            world.fetched(process, plan.id, plan.peer)
            self._regions[plan.id] = (plan.peer.incarnation, plan.remote)
            self._clock.call_after(plan.deadline_ns - 1, self._deadline, plan.id)
        process.perform(effects)

    def _list(self, region: int, indices: list[int]) -> tuple[Any, list[int]]:
        """The same elements in one of the two ways to say them: a table of ranges, or indices out of one row."""
        machines, size = self._world.machines, BLOCK_BYTES
        if self._rng.random() < 0.5:
            rows = [(region, index * size, 0, size, 1) for index in indices]
            return machines.Ranges(np.array(rows, dtype=np.uint64)), list(range(len(indices)))
        return machines.Ranges(np.array([(region, 0, size, size, REGION_CELLS)], dtype=np.uint64)), indices

    def _cancel(self, process: ProcessView, id_: bytes) -> None:
        self._world.log(f"{process!r} cancels push {id_.hex()[:6]}")
        process.perform(process.endpoint.cancel(id_, self._clock.now))

    def _deadline(self, id_: bytes) -> None:
        track = self._world.open.get(id_)
        if track is not None and self._world.phase(track) is not TransferPhase.FINAL:
            self._world.strike(Kind.DEADLINE, [track])

    def fetching_from(self, incarnation: int, region: int) -> list[bytes]:
        """The fetches that were ever posted of that region."""
        return [id_ for id_, place in self._regions.items() if place == (incarnation, region)]
