"""One seed, one world of engines: two to four, each for prefill, for decode or for both, small pools, a router, and the
checkers of the first six invariants and of waiting; must never give the same seed two histories.
"""

from __future__ import annotations

import random
from typing import Any, cast

from kvxfer.engine.executor import NO_ROOM
from kvxfer.engine.request import FailurePolicy, Leg, Phase, Sequence
from kvxfer.engine.scheduler import SchedulerLimits
from kvxfer.testing.sim.checkers import Invariant, Violation
from kvxfer.testing.sim.engines.bug import EngineBug
from kvxfer.testing.sim.engines.engine_chaos import EngineChaos
from kvxfer.testing.sim.engines.engine_options import EngineOptions
from kvxfer.testing.sim.engines.engine_owner import EngineOwner
from kvxfer.testing.sim.engines.engine_report import EngineReport
from kvxfer.testing.sim.engines.engine_router import EngineRouter
from kvxfer.testing.sim.engines.engine_view import Profile
from kvxfer.testing.sim.engines.wait_graph import WaitGraph
from kvxfer.testing.sim.faults import FaultWeights, Kind
from kvxfer.testing.sim.view import ProcessView, Slot
from kvxfer.testing.sim.virtual_clock import MS, NEVER, S
from kvxfer.testing.sim.world import World

_LOOK_NS = 100 * MS
_FRAME_KINDS = (Kind.DROP, Kind.DUPLICATE, Kind.DELAY, Kind.REORDER, Kind.LOST_VERDICT, Kind.LOST_RENEWAL)


def engine_world(
    seed: int,
    *,
    machines: Any,
    options: EngineOptions = EngineOptions(),  # noqa: B008
    bug: EngineBug = EngineBug.NONE,
) -> EngineWorld:
    """The world of one seed; ``bug`` is put back into it."""
    return EngineWorld(seed, machines, options, bug)


class EngineWorld(World):
    """As :class:`World`, with engines for owners."""

    options: EngineOptions

    def __init__(self, seed: int, machines: Any, options: EngineOptions, bug: EngineBug) -> None:
        super().__init__(seed, machines, options)
        self.bug = bug
        rng = self.rng
        self.prompt_blocks = rng.randint(*options.prompt_blocks)
        """Of the longest prompt."""
        self.chunk_tokens = options.block_tokens * rng.randint(1, 4)
        self.weights = _weights(rng) if options.has_faults else FaultWeights.none()
        self.granted_ns = options.transfer_deadline_ns
        self.slots.clear()
        self.profiles = self._profiles()
        self.prefillers = [name for name, profile in self.profiles.items() if profile.can_prefill]
        self.decoders = [name for name, profile in self.profiles.items() if profile.can_decode]
        self.step_max_ns = max(profile.step_max_ns for profile in self.profiles.values())
        self.report: Any = EngineReport(seed)
        self.requests = EngineRouter(self)
        self.engine_chaos = EngineChaos(self)
        self.waits = WaitGraph(self)

    # --- running ---

    def run(self) -> Any:
        """Play the whole seed. Raises :class:`Violation` with the invariant that broke."""
        for slot in self.slots.values():
            self.start(slot)
        self.clock.run_until(100 * MS)
        self.requests.begin()
        if self.options.has_faults:
            self.engine_chaos.begin()
        self._look()
        self._look_at_waits()
        self.clock.run_until(self.options.chaos_ns)
        self._calm_down()
        while not (self.requests.is_done and self._is_quiet()):
            last = self.clock.now
            self.clock.run_until(last + 500 * MS)
            if self.requests.is_done:
                self._end_hangs()
                self._check_end(last)
        self._check_rest(self.clock.now)
        for owner in self.owners():
            owner.executor.pool.check_integrity()
            self.report.preempted += owner.executor.scheduler.statistics().preemptions
        self.report.events = self.clock.fired
        self.report.digest = self._hash.hexdigest()
        return self.report

    def _calm_down(self) -> None:
        self.is_calm = True
        self.links.heal()
        for slot in self.slots.values():
            if slot.process is not None:
                slot.process.resume()

    def _end_hangs(self) -> None:
        """Whatever was asked is over: engines that hang for ever are restarted, as an operator would."""
        for owner in self.owners():
            if owner.hung_until == NEVER:
                self.kill(owner.process.slot)

    _done_at = NEVER

    def _check_end(self, now: int) -> None:
        """No more requests come. The rest (prompts without a reader, legs without a client) ends too."""
        self._done_at = min(self._done_at, now)
        steps = sum(self.requests._steps.values())
        bound_ns = self.options.end_ns(self.options.timeout_ns[1], steps, self.step_max_ns)
        if now - self._done_at > bound_ns:
            left = [owner for owner in self.owners() if not owner.is_idle or owner.executor.pool.statistics().used]
            raise Violation(
                Invariant.FINAL,
                f"{bound_ns / S:.1f} s after the last answer there is still {left}, "
                f"{[self._leftover(owner.process) for owner in self.owners()]}: "
                f"{[one for owner in left for one in owner.executor.scheduler.sequences()]}",
            )

    def _is_quiet(self) -> bool:
        owners = self.owners()
        if any(not owner.is_idle or owner.executor.pool.statistics().used for owner in owners):
            return False
        return self._is_at_rest()

    def _look_at_waits(self) -> None:
        self.waits.look()
        self.requests.look()
        self.clock.call_after(_LOOK_NS, self._look_at_waits)

    # --- incarnations ---

    def booted(self, process: ProcessView) -> None:
        process.owner = EngineOwner(self, process, self.profiles[process.name])

    def kill(self, slot: Slot) -> None:
        process = slot.process
        super().kill(slot)
        if process is not None:
            self.requests.died(process)

    def restart(self, slot: Slot) -> None:
        if slot.process is not None and not slot.process.is_alive:
            self.start(slot)

    def owner(self, process: ProcessView) -> EngineOwner | None:
        """The engine of a process that runs; ``None`` before it has its number, and once it was killed."""
        return cast(EngineOwner, process.owner) if process.is_alive and process.owner is not None else None

    def owners(self) -> list[EngineOwner]:
        return [owner for process in self.living() if (owner := self.owner(process)) is not None]

    # --- what happens in a process ---

    def is_granted(self, process: ProcessView, id_: bytes) -> bool:
        return self.checkers.has_live_grant(process.incarnation, id_)

    def revoking(self, process: ProcessView, reason: str) -> None:
        """An engine ends a grant. For want of room it may only where waiting would bring nothing."""
        if reason != NO_ROOM:
            return
        owner = self.owner(process)
        assert owner is not None
        self.report.revoked += 1
        self.log(f"{process!r} gives a prompt up for want of room: {owner!r}")
        if not (owner.profile.can_prefill and owner.profile.can_decode):
            raise Violation(Invariant.WAITING, f"{process!r} serves one role, and gave a prompt up for want of room")
        sequences = owner.executor.scheduler.sequences()
        runs = any(one.phase is Phase.PULLING or self._decodes(one) for one in sequences)
        since = self.clock.now - owner.freed_at
        if runs and since < self.options.room_wait_ns:
            raise Violation(
                Invariant.WAITING,
                f"{process!r} gave a prompt up for want of room {since / S:.3f} s after blocks came back, while "
                f"something runs that will give more back: {owner!r}",
            )

    @staticmethod
    def _decodes(sequence: Sequence) -> bool:
        return sequence.phase is Phase.COMPUTING and sequence.leg is not Leg.PREFILL

    def lanes(self, process: ProcessView) -> list[Any]:
        """Of one pull; into a pool with checksums also one on which any source sends checksums."""
        lane = self.machines.Lane
        choice = self.rng.choice(((lane.MEMORY,), (lane.STREAM,), (lane.MAPPED, lane.STREAM), (lane.UNIX, lane.STREAM)))
        is_added = process.has_checksums and lane.STREAM not in choice
        return [*choice, lane.STREAM] if is_added else list(choice)

    def _profiles(self) -> dict[str, Profile]:
        rng, options = self.rng, self.options
        count = rng.randint(*options.engines)
        is_both = [rng.random() < 0.8 for _ in range(count)]
        profiles = {}
        for index in range(count):
            can_prefill = is_both[index] or index % 2 == 0
            can_decode = is_both[index] or index % 2 == 1
            is_slow = rng.random() < 0.2
            step_ns = rng.randrange(200 * MS, options.step_max_ns * 2 // 3) if is_slow else rng.randrange(MS, 30 * MS)
            running = rng.choice((2, 4, 16))
            limits = SchedulerLimits(
                max_batch_tokens=max(self.chunk_tokens, running) * rng.randint(1, 3),
                chunk_tokens=self.chunk_tokens,
                max_running=running,
                max_waiting=rng.choice((6, 64)),
            )
            policy = FailurePolicy.FAIL if rng.random() < 0.2 else FailurePolicy.RECOMPUTE
            name = f"e{index}"
            profiles[name] = Profile(can_prefill, can_decode, step_ns, limits, policy)
            self.slots[name] = Slot(name, index % 2, self._pool_blocks())
        return profiles

    def _pool_blocks(self) -> int:
        """At least what the longest prompt and its answer take; often less than two of those."""
        options = self.options
        least = self.prompt_blocks + -(-options.output_tokens_max // options.block_tokens)
        return least + self.rng.randint(
            0, self.prompt_blocks // 2 if self.rng.random() < 0.7 else 3 * self.prompt_blocks
        )

    def _limits(self) -> Any:
        limits, options = super()._limits(), self.options
        assert isinstance(options, EngineOptions)
        grants, transfers = limits.grants, limits.transfers
        grants.unknown_wait_ns = options.unknown_wait_ns
        transfers.engine_silent_ns = options.engine_silent_ns
        limits.grants, limits.transfers = grants, transfers
        return limits


def _weights(rng: random.Random) -> FaultWeights:
    """Of what happens to single frames: less than in a world of agents, because it is waits that are asked about."""
    return FaultWeights({kind: 0.003 * 10 ** rng.random() for kind in _FRAME_KINDS if rng.random() < 0.25})
