"""The engine of a simulated process: what production's engine thread does around its executor, on the virtual clock,
with steps that take time, and hangs; must never plan a step itself.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, cast

from kvxfer.engine.generation import Generation
from kvxfer.engine.request import Leg, Request, Sequence
from kvxfer.errors import KvxferError, TransferCancelledError
from kvxfer.testing.sim.engines.bug import EngineBug
from kvxfer.testing.sim.engines.engine_view import EngineWorldView, Profile, TicketView
from kvxfer.testing.sim.engines.seeded_executor import make_executor
from kvxfer.testing.sim.engines.sim_exchange import SimExchange
from kvxfer.testing.sim.engines.toy_model import ToyRunner
from kvxfer.testing.sim.view import ProcessView
from kvxfer.testing.sim.virtual_clock import MS, NEVER, US, S

PULSE_NS = 1 * S
"""As the engine's PULSE_S."""


class EngineOwner:
    """Made by the world for each incarnation. ``executor`` is production's."""

    def __init__(self, world: EngineWorldView, process: ProcessView, profile: Profile) -> None:
        self.world, self.process, self.profile = world, process, profile
        self.exchange = SimExchange(world, process, self.put)
        self.runner = ToyRunner(process, world.options.block_tokens, self._tokens_of)
        self.executor = make_executor(
            process, self.exchange, self.runner, profile.limits, profile.policy,
            world.options.room_wait_ns / S, world.bug,
        )  # fmt: skip
        self.hung_since = self.hung_until = 0
        self.was_disturbed = False
        """Whether it ever hung, or its process was stopped: no bound holds for what it was asked for."""
        self.freed_at = 0
        """When blocks came back last."""
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._arrived = self._read = self._round_began = 0
        self._is_due = False
        self._wake = 0
        self._available = self.executor.pool.available
        self._sleep()

    def __repr__(self) -> str:
        return f"<engine of {self.process!r} {self.executor.scheduler!r} {self.executor.pool!r}>"

    @property
    def free_count(self) -> int:
        return self.executor.pool.available

    @property
    def is_hung(self) -> bool:
        return self.hung_until > self.world.clock.now

    @property
    def is_idle(self) -> bool:
        """Nothing was asked of it that has not ended."""
        executor = self.executor
        return not self._inbox and self._arrived == self._read and executor.scheduler.is_empty and not executor.is_busy

    def hang(self, until_ns: int) -> None:
        """Make no step until then; its agent goes on."""
        self.was_disturbed = True
        self.hung_since, self.hung_until = self.world.clock.now, until_ns
        if until_ns != NEVER:
            self.world.clock.call_at(until_ns, self.process.run, self._due_soon)
        if self.world.bug is EngineBug.HUNG_ENGINE_UNNOTICED:
            self._pretend()

    # --- requests ---

    def arrive(self, request: Request, ticket: TicketView) -> None:
        """A body reached this worker: it is read, and submitted."""
        self._arrived += 1
        rng = self.process.rng
        is_long = rng.random() < 0.1
        reading_ns = rng.randrange(100 * MS, 4 * S) if is_long else rng.randrange(MS, 20 * MS)
        self.process.later(reading_ns, self._submit, request, ticket)

    def _submit(self, request: Request, ticket: TicketView) -> None:
        self._read += 1
        sequence = Sequence(request, submitted_s=self.process.clock.now / S)
        ticket.sequence = sequence
        owner = cast(Generation, ticket)
        if request.leg is Leg.PREFILL and request.remote is not None:
            try:
                self.exchange.expect(request.remote)
            except KvxferError as error:
                return self.put(functools.partial(self.executor.refuse, sequence, error, owner))
        self.put(functools.partial(self.executor.add, sequence, owner))

    def abort(self, sequence: Sequence) -> None:
        """The client went away."""
        self.put(functools.partial(self.executor.abort, sequence, TransferCancelledError("the client went away")))

    def put(self, command: Callable[[], None]) -> None:
        """Run ``command`` between two steps."""
        self._inbox.append(command)
        self._due_soon()

    # --- the thread ---

    def _due_soon(self) -> None:
        if not self._is_due:
            self._due(self.process.rng.randrange(10 * US, 200 * US))

    def _due(self, delay_ns: int) -> None:
        self._is_due = True
        self.process.later(delay_ns, self._round)

    def _round(self) -> None:
        self._is_due = False
        if self.is_hung:  # the fault that ends the hang wakes it
            return
        self._wake += 1
        while self._inbox:
            self._inbox.popleft()()
        self._pulse(has_work=True)
        has_work = self.executor.step()
        for ticket, event in self.executor.take_events():
            cast("TicketView", ticket).put(event)
        self._look()
        if has_work:
            step_ns = self.profile.step_ns
            self._due(self.process.rng.randrange(step_ns // 2, self.profile.step_max_ns))
        elif self._inbox:
            self._due_soon()
        else:
            self._sleep()

    def _sleep(self) -> None:
        has_waiting = self.executor.scheduler.has_waiting
        self._pulse(has_work=has_waiting)
        wait_s = self.executor.wait_s()
        wait_ns = NEVER if wait_s is None else max(round(wait_s * S), 1)
        if self._arrived != self._read or has_waiting:
            wait_ns = min(wait_ns, PULSE_NS)
        if wait_ns != NEVER:
            self.process.later(wait_ns, self._wake_up, self._wake)

    def _wake_up(self, wake: int) -> None:
        if wake == self._wake and not self._is_due:
            self._due(0)

    def _pulse(self, *, has_work: bool) -> None:
        took_in = self._read >= self._round_began
        if took_in:
            self._round_began = self._arrived
        self.exchange.pulse(has_work=has_work or self._arrived != self._read, took_in=took_in)

    def _pretend(self) -> None:
        """What the bug does: the agent speaks for an engine that says nothing."""
        if self.is_hung:
            self.exchange.pulse(has_work=True, took_in=True)
            self.process.later(100 * MS, self._pretend)

    def _look(self) -> None:
        available = self.executor.pool.available
        if available > self._available:
            self.freed_at = self.world.clock.now
        self._available = available

    def _tokens_of(self, table: Any) -> list[int]:
        return next(one.tokens for one in self.executor.scheduler.sequences() if one.blocks is table)

    # --- what the process tells ---

    def granted(self, id_: bytes) -> None:
        self.exchange.granted(id_)

    def final(self, effect: Any) -> None:
        self.exchange.final(effect)

    def drained(self, id_: bytes) -> None:
        self.exchange.drained(id_)

    def grant_ended(self, id_: bytes, state: str) -> None:
        self.exchange.grant_ended(id_, state)
