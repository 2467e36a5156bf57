"""Executors of the simulated world: production's, and production's with one of :class:`EngineBug` put back; must never
differ from production's where no bug is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from typing import Any, cast

from kvxfer.engine.executor import Executor
from kvxfer.engine.model import LoadedModel
from kvxfer.engine.remote import BlockExchange, EnginePull
from kvxfer.engine.request import FailurePolicy, Leg, Sequence, blocks_for
from kvxfer.engine.runner import Runner
from kvxfer.engine.scheduler import SchedulerLimits
from kvxfer.policy.room import Held, Room
from kvxfer.testing.sim.engines.bug import EngineBug
from kvxfer.testing.sim.engines.sim_exchange import SimExchange
from kvxfer.testing.sim.engines.toy_model import ToyModel, ToyRunner
from kvxfer.testing.sim.view import ProcessView


def make_executor(
    process: ProcessView,
    exchange: SimExchange,
    runner: ToyRunner,
    limits: SchedulerLimits,
    policy: FailurePolicy,
    room_wait_s: float,
    bug: EngineBug,
) -> Executor:
    """The engine of a process, over its exchange."""
    kind = FixedWaitExecutor if bug is EngineBug.FIXED_WAIT else Executor
    executor = kind(
        cast(LoadedModel, ToyModel()), cast(Runner, runner), limits,
        on_transfer_failure=policy, room_wait_s=room_wait_s, clock=process.clock,
    )  # fmt: skip
    if bug in (EngineBug.NEVER_REVOKE, EngineBug.FIXED_WAIT):
        executor._room = NoRoom()
    if bug is EngineBug.EARLY_BLOCKS_STAY:
        executor.scheduler._take_back = lambda _: False
    executor.join(cast(BlockExchange, exchange))
    return executor


class NoRoom(Room[Any]):
    """Gives nothing up."""

    def victim(self, held: Iterable[Held[Any]], *, is_wanted: bool, will_free: bool, now_ns: int) -> Hashable | None:
        return None


class FixedWaitExecutor(Executor):
    """A decode leg takes slot and blocks as soon as there are some, and waits in them for its grant."""

    def _ask(self, sequence: Sequence) -> None:
        self._pulls[sequence] = EnginePull(
            on_granted=lambda: None,
            on_committed=functools.partial(self._pulled, sequence),
            on_failed=functools.partial(self._pull_failed, sequence),
            on_drained=lambda: None,
        )
        self.scheduler.granted(sequence)

    def _begin(self, sequence: Sequence) -> None:
        if sequence.leg is not Leg.DECODE:
            return super()._begin(sequence)
        exchange, remote = self._partners(sequence)
        count = blocks_for(sequence.prompt_tokens - 1, self.pool.block_tokens)
        exchange.start(
            self._pulls[sequence], self._remote_blocks(sequence), remote,
            content_digest=sequence.content, first=sequence.matched, count=count,
        )  # fmt: skip
