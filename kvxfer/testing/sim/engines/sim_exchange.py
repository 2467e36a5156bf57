"""The engine's side of the agent in the simulated world: BlockExchange's methods over a simulated process, with its
delays (a pull begins on another thread than the one that asked for it, and every result comes back through the engine's
inbox); must never decide what the machines decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvxfer.engine.remote import EnginePull
from kvxfer.engine.request import OtherLeg
from kvxfer.errors import KvxferError, PeerGoneError, TransferCancelledError, from_code
from kvxfer.testing.sim.engines.bug import fixed_wait_ns
from kvxfer.testing.sim.engines.engine_view import EngineWorldView
from kvxfer.testing.sim.tagged_memory import POOL, checksum
from kvxfer.testing.sim.view import ProcessView
from kvxfer.testing.sim.virtual_clock import MS, S
from kvxfer.types import GrantState, Lane, Load

_SEARCH_NS = 2 * S
"""How long a pull looks for an agent that is not known yet."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a committed pull says of itself."""

    lane: Lane
    blocks: int
    lane_reason: str = ""
    bytes: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bytes_before_complete: int = 0


class SimGrant:
    """One promise, as the executor sees it."""

    def __init__(
        self, world: EngineWorldView, process: ProcessView, id_: bytes, blocks: list[int], ready_blocks: int
    ) -> None:
        self._world, self._process, self._id, self._blocks = world, process, id_, list(blocks)
        self._told = ready_blocks

    @property
    def state(self) -> GrantState:
        state = self._process.endpoint.grant_state(self._id, self._process.clock.now)
        return GrantState.REVOKED if state is None else GrantState(int(state))

    @property
    def has_begun(self) -> bool:
        return bool(self._process.endpoint.has_begun(self._id))

    def ready(self, blocks: int, *, layers: int = 0, complete: bool = False) -> None:
        process, now = self._process, self._process.clock.now
        contents = [process.memory.blocks[block] for block in self._blocks[:blocks]]
        checksums = [checksum(block) for block in contents[self._told :]] if process.has_checksums else []
        self._told = max(self._told, blocks)
        process.world.checkers.announced(process.incarnation, self._id, contents)
        process.perform(process.endpoint.ready(self._id, blocks, layers, complete, now, checksums))

    def revoke(self, reason: str = "") -> GrantState:
        process = self._process
        self._world.revoking(process, reason)
        try:
            state, effects = process.endpoint.end_grant(
                self._id, process.machines.GrantEvent.REVOKE, process.clock.now, reason
            )
        except KvxferError:
            return GrantState.REVOKED
        process.perform(effects)
        return GrantState(int(state))

    def on_ended(self, callback: Callable[[GrantState], None]) -> None:
        raise NotImplementedError("the exchange tells")


class SimExchange:
    """See :class:`kvxfer.engine.remote.BlockExchange`; ``post`` is the engine's inbox."""

    def __init__(
        self, world: EngineWorldView, process: ProcessView, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self._world, self._process, self._post = world, process, post
        self._pulls: dict[bytes, EnginePull] = {}
        self._begun: set[bytes] = set()
        self._on_ended: dict[bytes, Callable[[GrantState], None]] = {}

    @property
    def pulls_in_flight(self) -> int:
        return len(self._pulls)

    # --- what the executor calls ---

    def report_load(self, load: Load) -> None:
        """The coordinator of this world places nothing."""

    def expect(self, remote: OtherLeg) -> None:
        self._process.endpoint.expect(remote.transfer_id.raw, remote.agent_id)

    def pulse(self, *, has_work: bool, took_in: bool) -> None:
        self._process.endpoint.pulse(has_work, took_in, self._process.clock.now)

    def grant(
        self,
        blocks: list[int],
        remote: OtherLeg,
        *,
        content_digest: bytes,
        ready_blocks: int,
        on_ended: Callable[[GrantState], None],
    ) -> SimGrant:
        process, world, id_ = self._process, self._world, remote.transfer_id.raw
        now, ttl_ns = process.clock.now, world.options.grant_ttl_ns
        effects = process.endpoint.grant(id_, POOL, blocks, remote.agent_id, ttl_ns, ready_blocks, now, content_digest)
        world.log(f"{process!r} grants {id_.hex()[:6]} {len(blocks)} blocks, {ready_blocks} ready")
        world.checkers.granted(
            process.incarnation,
            id_,
            list(blocks),
            now,
            ttl=ttl_ns,
            ttl_max=ttl_ns,
            lifetime_max=world.grant_lifetime_max_ns,
        )
        world.checkers.announced(
            process.incarnation, id_, [process.memory.blocks[block] for block in blocks[:ready_blocks]]
        )
        self._on_ended[id_] = on_ended
        process.perform(effects)
        return SimGrant(world, process, id_, blocks, ready_blocks)

    def abort_grant(self, remote: OtherLeg) -> None:
        try:
            effects = self._process.endpoint.abort_grant(remote.transfer_id.raw)
        except KvxferError:
            return
        self._world.log(f"{self._process!r} declines {remote.transfer_id.raw.hex()[:6]}")
        self._process.perform(effects)

    def abort_pull(self, remote: OtherLeg) -> None:
        self._soon(self._give_up, remote)

    def start(
        self,
        pull: EnginePull,
        blocks: list[int],
        remote: OtherLeg,
        *,
        content_digest: bytes,
        first: int = 0,
        count: int = 0,
    ) -> None:
        self._pulls[remote.transfer_id.raw] = pull
        self._poison(blocks)
        self._soon(self._begin, pull, list(blocks), remote, content_digest, first, count, self._process.clock.now)

    def reserve(self, pull: EnginePull, blocks: list[int], *, first: int) -> None:
        process, id_ = self._process, self._id(pull)
        self._poison(blocks)
        try:
            effects = process.endpoint.reserve(id_, blocks, first, process.clock.now)
        except KvxferError as error:
            self._world.log(f"{process!r} cannot reserve for {id_.hex()[:6]}: {error.code}")
            return
        self._world.log(f"{process!r} reserves {len(blocks)} blocks for {id_.hex()[:6]}")
        self._world.checkers.reserved(process.incarnation, id_, list(blocks), first)
        process.perform(effects)

    def unreserve(self, pull: EnginePull) -> bool:
        process, id_ = self._process, self._id(pull)
        if id_ not in self._pulls:  # it is over, and its engine will hear so
            return False
        if id_ not in self._begun:  # nor has its agent found the source, where it looks for it
            pull.is_unreserved = True
            self._world.report.taken_back += 1
            return True
        is_done, effects = process.endpoint.unreserve(id_, process.clock.now)
        if is_done:
            self._world.log(f"{process!r} takes the early blocks of {id_.hex()[:6]} back")
            self._world.report.taken_back += 1
            self._world.checkers.unreserved(process.incarnation, id_)
        process.perform(effects)
        return bool(is_done)

    def cancel(self, pull: EnginePull) -> None:
        self._soon(self._cancel, pull)

    # --- what the process tells ---

    def granted(self, id_: bytes) -> None:
        pull = self._pulls[id_]
        self._soon(self._post, lambda: pull.on_granted())

    def final(self, effect: Any) -> None:
        pull = self._pulls[effect.id]
        if effect.state == self._process.machines.TransferState.COMMITTED:
            lane = Lane(effect.lane.name.lower())
            result = Result(lane, effect.blocks_done)
            pull.on_drained = lambda: pull.on_committed(result)
            self._world.report.lanes[lane.value] += 1
        else:
            error = from_code(effect.code.name, effect.text)
            self._soon(self._post, lambda: pull.on_failed(error))
        self._world.report.finals[effect.state.name, effect.code.name] += 1

    def drained(self, id_: bytes) -> None:
        pull = self._pulls.pop(id_)
        self._soon(self._post, lambda: pull.on_drained())

    def grant_ended(self, id_: bytes, state: str) -> None:
        on_ended = self._on_ended.pop(id_)
        self._soon(self._post, lambda: on_ended(GrantState[state]))

    # --- on the agent's loop ---

    def _soon(self, callback: Callable[..., None], *args: Any) -> None:
        """On another thread, which takes what it is given in order."""
        self._process.later(MS, callback, *args)

    def _id(self, pull: EnginePull) -> bytes:
        return next((id_ for id_, one in self._pulls.items() if one is pull), bytes(16))

    def _poison(self, blocks: list[int]) -> None:
        for block in blocks:
            self._world.checkers.written(self._process.incarnation, block)
            self._process.memory.scrub(block)

    def _begin(
        self,
        pull: EnginePull,
        blocks: list[int],
        remote: OtherLeg,
        content_digest: bytes,
        first: int,
        count: int,
        asked_ns: int,
    ) -> None:
        process, world, id_ = self._process, self._world, remote.transfer_id.raw
        if pull.is_cancelled:
            self._give_up(remote)
            return self._fail(pull, id_, TransferCancelledError("cancelled before the pull began"))
        if pull.is_unreserved:
            blocks, first = [], 0
        source, now = world.slots[remote.agent_id].process, process.clock.now
        if remote.timeout_s is None:
            raise AssertionError("every decode leg of this world names its timeout")
        timeout_ns = (fixed_wait_ns(world.bug) or round(remote.timeout_s * S)) - (now - asked_ns)
        try:
            if source is None or source.ref is None:
                raise PeerGoneError("no such agent")
            effects = process.endpoint.pull(
                id_, source.ref, POOL, blocks, first, world.lanes(process), now + timeout_ns,
                process.rng.getrandbits(64), now, content_digest, count=0 if blocks else count,
                granted_ns=world.granted_ns, tells_granted=True,
            )  # fmt: skip
        except PeerGoneError as error:
            if now - asked_ns < _SEARCH_NS:
                return process.later(
                    100 * MS, self._begin, pull, blocks, remote, content_digest, first, count, asked_ns
                )
            return self._fail(pull, id_, error)
        except KvxferError as error:
            return self._fail(pull, id_, error)
        self._begun.add(id_)
        world.log(f"{process!r} pulls {id_.hex()[:6]} from {source!r} into {len(blocks)} blocks")
        world.checkers.pulled(
            process.incarnation,
            id_,
            source.incarnation,
            blocks,
            first,
            process.memory,
            now,
            must_check=process.has_checksums,
        )
        process.perform(effects)

    def _fail(self, pull: EnginePull, id_: bytes, error: KvxferError) -> None:
        del self._pulls[id_]
        self._post(lambda: pull.on_failed(error))
        self._post(lambda: pull.on_drained())

    def _give_up(self, remote: OtherLeg) -> None:
        process, source = self._process, self._world.slots[remote.agent_id].process
        if source is None or source.ref is None:
            return
        try:
            process.perform(process.endpoint.abort_pull(remote.transfer_id.raw, source.ref, process.clock.now))
        except KvxferError as error:
            self._world.log(f"{process!r} cannot give {remote.transfer_id.raw.hex()[:6]} up: {error.code}")

    def _cancel(self, pull: EnginePull) -> None:
        pull.is_cancelled = True
        id_ = self._id(pull)
        if id_ in self._begun:
            self._process.perform(self._process.endpoint.cancel(id_, self._process.clock.now))
