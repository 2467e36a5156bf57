"""The owner of a source's blocks: computes prompts in chunks, grants, announces, preempts, and overwrites blocks in
the very moment in which their last grant ended; must never ask a reader whether it is done.
"""

from __future__ import annotations

import collections
import dataclasses

from kvxfer.errors import KvxferError
from kvxfer.testing.sim.tagged_memory import POOL, checksum
from kvxfer.testing.sim.view import ProcessView

_QUEUE_MAX = 6


def meaning(prompt: int) -> bytes:
    """The content digest of a prompt: 32 bytes that both sides must agree on."""
    return prompt.to_bytes(32, "big")


@dataclasses.dataclass(frozen=True)
class PrefillOrder:
    """What the router asks of a source: compute a prompt and grant it under an id."""

    id: bytes
    prompt: int
    blocks: int
    reader: str
    ttl_ns: int
    chunk: int
    chunk_ns: int
    shares: bytes = b""
    """An earlier id for the same prompt: its blocks are granted once more where it still has them."""


@dataclasses.dataclass
class _HeldPrefill:
    leg: PrefillOrder
    blocks: list[int]
    computed: list[bytes] = dataclasses.field(default_factory=list)
    granted: list[bytes] = dataclasses.field(default_factory=list)
    alive: list[bytes] = dataclasses.field(default_factory=list)


class SourceOwner:
    def __init__(self, process: ProcessView) -> None:
        self._process, self._world = process, process.world
        self._free = list(range(self._world.options.pool_blocks))
        self._queue: collections.deque[PrefillOrder] = collections.deque()
        self._by_id: dict[bytes, _HeldPrefill] = {}
        self._told: dict[bytes, int] = {}
        """How many blocks of each grant are announced."""

    @property
    def free_count(self) -> int:
        return len(self._free)

    def stop_queue(self) -> None:
        for leg in self._queue:
            self._abort(leg)
        self._queue.clear()

    def start(self, leg: PrefillOrder) -> None:
        """Begin, or wait for blocks. An id that this incarnation granted before is refused by its table; so it is
        here."""
        if self._share(leg):
            return
        if leg.blocks > len(self._free):
            if len(self._queue) < _QUEUE_MAX:
                self._queue.append(leg)
            else:
                self._abort(leg)
            return
        prefill = _HeldPrefill(leg, [self._free.pop() for _ in range(leg.blocks)])
        if self._grant(prefill, leg.id, leg.reader, leg.ttl_ns):
            self._process.later(self._chunk_ns(leg), self._compute, prefill)
        else:
            self._free += prefill.blocks

    def end(self, id_: bytes, event: str) -> bool:
        """Revoke or release; false where there is nothing to end."""
        prefill = self._by_id.get(id_)
        if prefill is None or id_ not in prefill.alive:
            return False
        process = self._process
        state, effects = process.endpoint.end_grant(id_, getattr(process.machines.GrantEvent, event), process.clock.now)
        process.perform(effects)
        if state == process.machines.GrantState.ALIVE or id_ in prefill.alive:
            raise AssertionError(f"{process!r} ended {id_.hex()}, and it is {state}")
        return True

    def live(self, *, is_ready: bool) -> list[bytes]:
        """Live grants; with ``is_ready`` those of which something was announced."""
        return [id_ for id_, p in self._by_id.items() if id_ in p.alive and (p.computed or not is_ready)]

    def grant_ended(self, id_: bytes, state: str) -> None:
        """The effect of the table: from this moment on the blocks are the owner's."""
        prefill = self._by_id[id_]
        prefill.alive.remove(id_)
        self._world.grant_over(self._process, id_, state)
        if prefill.alive:
            return
        for granted in prefill.granted:
            self._world.checkers.freed(self._process.incarnation, granted)
        for block in prefill.blocks:
            self._process.memory.scrub(block)
        self._free += prefill.blocks
        self._process.afterwards(self._next)

    def _abort(self, leg: PrefillOrder) -> None:
        """It will never be granted: readers that wait for it are told."""
        try:
            effects = self._process.endpoint.abort_grant(leg.id)
        except KvxferError:  # its reader gave it up first, or it was granted before
            return
        self._world.log(f"{self._process!r} aborts {leg.id.hex()[:6]}")
        self._process.perform(effects)

    def _share(self, leg: PrefillOrder) -> bool:
        """Grant the blocks of a prefill that is held to one more reader; false where they are gone."""
        prefill = self._by_id.get(leg.shares)
        return prefill is not None and bool(prefill.alive) and self._grant(prefill, leg.id, leg.reader, leg.ttl_ns)

    def _checksums(self, id_: bytes, prefill: _HeldPrefill) -> list[int]:
        """Of the blocks that become ready now; where the pool goes without, none."""
        told = self._told.get(id_, 0)
        self._told[id_] = len(prefill.computed)
        if not self._process.has_checksums:
            return []
        return [checksum(block) for block in prefill.computed[told:]]

    def _next(self) -> None:
        while self._queue and self._queue[0].blocks <= len(self._free):
            self.start(self._queue.popleft())

    def _grant(self, prefill: _HeldPrefill, id_: bytes, reader: str, ttl_ns: int) -> bool:
        process, options = self._process, self._world.options
        now, ready = process.clock.now, len(prefill.computed)
        try:
            effects = process.endpoint.grant(
                id_, POOL, prefill.blocks, reader, ttl_ns, ready, now, meaning(prefill.leg.prompt)
            )
        except KvxferError as error:
            self._world.log(f"{process!r} cannot grant {id_.hex()[:6]}: {error.code}")
            return False
        self._world.log(f"{process!r} grants {id_.hex()[:6]} {len(prefill.blocks)} blocks, {ready} ready")
        self._world.checkers.granted(
            process.incarnation, id_, prefill.blocks, now,
            ttl=ttl_ns, ttl_max=options.grant_ttl_ns, lifetime_max=self._world.grant_lifetime_max_ns,
        )  # fmt: skip
        self._world.checkers.announced(process.incarnation, id_, list(prefill.computed))
        self._by_id[id_] = prefill
        self._told[id_] = ready
        prefill.granted.append(id_)
        prefill.alive.append(id_)
        self._world.granted(process, id_)
        process.perform(effects)
        return True

    def _chunk_ns(self, leg: PrefillOrder) -> int:
        return self._process.rng.randrange(leg.chunk_ns // 2, leg.chunk_ns)

    def _compute(self, prefill: _HeldPrefill) -> None:
        """One chunk: write its blocks, then say so."""
        if not prefill.alive:
            return
        process, leg = self._process, prefill.leg
        done = len(prefill.computed)
        for position in range(done, min(done + leg.chunk, leg.blocks)):
            prefill.computed.append(process.memory.compute(prefill.blocks[position], leg.prompt, position))
        is_complete = len(prefill.computed) == leg.blocks
        for id_ in list(prefill.alive):
            self._world.checkers.announced(process.incarnation, id_, list(prefill.computed))
            try:
                effects = process.endpoint.ready(
                    id_, len(prefill.computed), 0, is_complete, process.clock.now, self._checksums(id_, prefill)
                )
            except KvxferError as error:
                self._world.log(f"{process!r} cannot announce {id_.hex()[:6]}: {error.code}")
                continue
            process.perform(effects)
        if not is_complete:
            process.later(self._chunk_ns(leg), self._compute, prefill)
