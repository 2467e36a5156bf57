"""The owner of a destination's blocks: reserves them by pulling, and the moment they are its own again uses them for
something else, so that a byte which comes late would be seen; must never look at how a transfer is going.
"""

from __future__ import annotations

import collections
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.testing.sim.tagged_memory import POOL
from kvxfer.testing.sim.view import DecodeOrder, ProcessView
from kvxfer.testing.sim.virtual_clock import MS


class DestinationOwner:
    def __init__(self, process: ProcessView) -> None:
        self._process, self._world = process, process.world
        self._free = list(range(self._world.options.pool_blocks))
        self._queue: collections.deque[DecodeOrder] = collections.deque()
        self._pulls: dict[bytes, tuple[DecodeOrder, list[int]]] = {}
        self._committed: set[bytes] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    def stop_queue(self) -> None:
        process = self._process
        for order in self._queue:
            process.perform(process.endpoint.abort_pull(order.id, order.source_ref, self._world.clock.now))
            self._world.not_pulled(order.id)
        self._queue.clear()

    def pull(self, order: DecodeOrder) -> None:
        """Begin, or wait for blocks."""
        count = order.count - order.first
        if count > len(self._free):
            self._queue.append(order)
            return
        process, now = self._process, self._process.clock.now
        blocks = [self._free.pop() for _ in range(count)]
        try:
            effects = process.endpoint.pull(
                order.id, order.source_ref, POOL, blocks, order.first, self._lanes(order),
                now + order.deadline_ns, process.rng.getrandbits(64), now, order.content_digest,
            )  # fmt: skip
        except KvxferError as error:
            self._world.log(f"{process!r} cannot pull {order.id.hex()[:6]}: {error.code}")
            self._free += blocks
            self._world.not_pulled(order.id)
            return
        self._world.log(f"{process!r} pulls {order.id.hex()[:6]} from {order.source!r}")
        self._world.checkers.pulled(
            process.incarnation,
            order.id,
            order.source.incarnation,
            blocks,
            order.first,
            process.memory,
            now,
            must_check=process.has_checksums,
        )
        self._pulls[order.id] = (order, blocks)
        self._world.pulled(process, order)
        process.perform(effects)

    def _lanes(self, order: DecodeOrder) -> list[Any]:
        """Into a pool with checksums also one on which any source sends checksums."""
        stream = self._process.machines.Lane.STREAM
        is_added = self._process.has_checksums and stream not in order.lanes
        return [*order.lanes, stream] if is_added else list(order.lanes)

    def final(self, effect: Any) -> None:
        if effect.state == self._process.machines.TransferState.COMMITTED:
            self._committed.add(effect.id)
        self._process.afterwards(self._world.finished, self._process, self._pulls[effect.id][0], effect)

    def drained(self, id_: bytes) -> None:
        """The blocks are the owner's again: a commit is used for generating, anything else is overwritten at once."""
        process = self._process
        order, blocks = self._pulls.pop(id_)
        is_kept = id_ in self._committed
        self._world.pull_over(id_)
        if not is_kept and process.rng.random() < 0.5:
            self._free += blocks
            return process.afterwards(self._next)
        if not is_kept:
            for index, block in enumerate(blocks):
                process.memory.compute(block, 0xFFFF, order.first + index)
        expected = [process.memory.blocks[block] for block in blocks]
        process.later(process.rng.randrange(5 * MS, 300 * MS), self._give_back, blocks, expected)

    def _give_back(self, blocks: list[int], expected: list[bytes]) -> None:
        process = self._process
        for block, what in zip(blocks, expected, strict=True):
            self._world.checkers.reused(process.incarnation, block, what, process.memory.blocks[block])
        self._free += blocks
        self._next()

    def _next(self) -> None:
        while self._queue and self._queue[0].count - self._queue[0].first <= len(self._free):
            self.pull(self._queue.popleft())
