"""Posts requests to engines: chooses the prefill and the decode engine, sends both legs, or one of them late or never,
goes away, and tries again under a new id; must never know what an engine does with a leg.
"""

from __future__ import annotations

import dataclasses

from kvxfer.engine.request import Delta, Event, Leg, OtherLeg, Outcome, Request, Sequence
from kvxfer.engine.sampling import SamplingParams
from kvxfer.errors import KvxferError
from kvxfer.testing.sim.checkers import Invariant, Violation
from kvxfer.testing.sim.engines.engine_view import EngineWorldView
from kvxfer.testing.sim.view import ProcessView
from kvxfer.testing.sim.virtual_clock import MS, S
from kvxfer.types import TransferId

_TRIES_MAX = 3


@dataclasses.dataclass
class ClientRequest:
    """One client's request, over all its attempts."""

    name: str
    tokens: tuple[int, ...]
    output_tokens: int
    tries: int = 0
    is_over: bool = False


@dataclasses.dataclass
class EngineAttempt:
    ask: ClientRequest
    id: TransferId
    decode: ProcessView
    timeout_ns: int
    sent_at: int
    is_over: bool = False
    ticket: Ticket | None = None


class Ticket:
    """Stands for the answer in the making; an executor's events come here."""

    def __init__(self, router: EngineRouter, attempt: EngineAttempt | None) -> None:
        self._router, self._attempt = router, attempt
        self.sequence: Sequence | None = None

    def put(self, event: Event) -> None:
        """``attempt`` is ``None`` for a prefill leg, whose answer tells the router nothing."""
        if self._attempt is not None and not isinstance(event, Delta):
            self._router.ended(self._attempt, event)


class EngineRouter:
    def __init__(self, world: EngineWorldView) -> None:
        self._world, self._rng, self._clock = world, world.rng, world.clock
        self.asks: list[ClientRequest] = []
        self._open: list[EngineAttempt] = []
        self._steps: dict[str, int] = {}
        """Steps that each slot may need for everything that it was asked for, by itself."""
        self._prefixes = [tuple(self._tokens(self._longest())) for _ in range(2)]

    @property
    def is_done(self) -> bool:
        return all(ask.is_over for ask in self.asks)

    def begin(self) -> None:
        world, rng, options = self._world, self._rng, self._world.options
        count = rng.randint(*options.requests)
        is_burst = rng.random() < 0.6
        for index in range(count):
            ask = ClientRequest(f"r{index}", self._prompt(), rng.randint(1, options.output_tokens_max))
            self.asks.append(ask)
            at = rng.randrange(0, 150 * MS if is_burst else options.arrivals_ns)
            self._clock.call_after(at, self._attempt, ask)
        world.report.requests += count

    def died(self, process: ProcessView) -> None:
        """The connections to a process broke."""
        for attempt in [one for one in self._open if one.decode is process]:
            self._fail(attempt, "peer_gone")

    def ended(self, attempt: EngineAttempt, event: Event) -> None:
        """The decode leg's last event."""
        if attempt.is_over:
            return
        report = self._world.report
        report.attempt_max_ns = max(report.attempt_max_ns, self._clock.now - attempt.sent_at)
        if isinstance(event, KvxferError):
            return self._fail(attempt, event.code)
        assert isinstance(event, Outcome)
        report.served += 1
        report.remote += event.report.prefill == "remote"
        if event.report.failure is not None:
            report.failures[event.report.failure] += 1
        if event.completion_tokens != attempt.ask.output_tokens:
            raise Violation(
                Invariant.FINAL,
                f"{attempt.ask.name} has {event.completion_tokens} tokens, not {attempt.ask.output_tokens}",
            )
        self._world.log(f"{attempt.ask.name} answered at {attempt.decode!r}: {event.report.reason}")
        self._close(attempt)
        attempt.ask.is_over = True

    def look(self) -> None:
        """Raises Violation for an attempt that is older than its bound at an engine that nothing disturbed."""
        for attempt in list(self._open):
            process = attempt.decode
            owner = self._world.owner(process)
            steps = self._steps.get(process.name, 0)
            bound_ns = self._world.options.end_ns(attempt.timeout_ns, steps, self._world.step_max_ns)
            if self._clock.now - attempt.sent_at <= bound_ns:
                continue
            if owner is None or not owner.was_disturbed:
                raise Violation(
                    Invariant.WAITING,
                    f"{attempt.ask.name}, sent to {process!r} at {attempt.sent_at / S:.1f} s, has not ended after "
                    f"{bound_ns / S:.1f} s: {attempt.ticket and attempt.ticket.sequence}",
                )
            self._leave(attempt)

    # --- posting ---

    def _longest(self) -> int:
        return self._world.prompt_blocks * self._world.options.block_tokens

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1000) for _ in range(count)]

    def _prompt(self) -> tuple[int, ...]:
        """Often long; sometimes with the beginning of another one."""
        rng, longest = self._rng, self._longest()
        count = rng.randint(1, longest) if rng.random() < 0.3 else rng.randint(longest * 2 // 3, longest)
        if rng.random() < 0.25:
            shared = rng.choice(self._prefixes)[: rng.randint(1, count)]
            return shared + tuple(self._tokens(count - len(shared)))
        return tuple(self._tokens(count))

    def _attempt(self, ask: ClientRequest) -> None:
        world, rng = self._world, self._rng
        ask.tries += 1
        decode = world.slots[rng.choice(world.decoders)].process
        assert decode is not None
        sources = [name for name in world.prefillers if name != decode.name]
        prefill = rng.choice(sources) if sources and rng.random() < 0.95 else None
        timeout_ns = rng.randrange(*world.options.timeout_ns)
        attempt = EngineAttempt(ask, TransferId(rng.randbytes(16)), decode, timeout_ns, self._clock.now)
        self._open.append(attempt)
        params = SamplingParams(temperature=0.0, max_tokens=ask.output_tokens, ignore_eos=True)
        world.log(f"{ask.name}: {len(ask.tokens)} tokens, {attempt.id.raw.hex()[:6]} from {prefill} to {decode!r}")
        if prefill is None:
            request = Request(ask.name, ask.tokens, params)
            return self._clock.call_after(rng.randrange(MS, 5 * MS), self._send_decode, attempt, request)
        remote = OtherLeg(attempt.id, prefill, ask.tries, timeout_ns / S)
        request = Request(ask.name, ask.tokens, params, Leg.DECODE, remote)
        chance = rng.random()
        prefill_wait, decode_wait = rng.randrange(MS, 10 * MS), rng.randrange(MS, 10 * MS)
        if chance < 0.1:
            world.report.struck["prefill leg late"] += 1
            prefill_wait += rng.randrange(50 * MS, 6 * S)
        elif chance < 0.2:
            world.report.struck["decode leg late"] += 1
            decode_wait += rng.randrange(50 * MS, 6 * S)
        self._clock.call_after(decode_wait, self._send_decode, attempt, request)
        if 0.2 <= chance < 0.27:
            world.report.struck["prefill leg never"] += 1
        else:
            other = Request(ask.name, ask.tokens, params, Leg.PREFILL, OtherLeg(attempt.id, decode.name, ask.tries))
            self._clock.call_after(prefill_wait, self._send_prefill, prefill, other)
        if rng.random() < 0.05:
            self._clock.call_after(rng.randrange(MS, 8 * S), self._go_away, attempt)

    def _send_prefill(self, name: str, request: Request) -> None:
        process = self._world.slots[name].process
        owner = self._world.owner(process) if process is not None else None
        if owner is not None:
            self._count(name, request)
            owner.process.run(owner.arrive, request, Ticket(self, None))

    def _send_decode(self, attempt: EngineAttempt, request: Request) -> None:
        owner = self._world.owner(attempt.decode)
        if attempt.is_over:
            return
        if owner is None:
            return self._fail(attempt, "unreachable")
        self._count(attempt.decode.name, request)
        attempt.ticket = Ticket(self, attempt)
        owner.process.run(owner.arrive, request, attempt.ticket)

    def _count(self, name: str, request: Request) -> None:
        """A prompt may be computed twice, where its blocks are taken by an older one, and each time in chunks."""
        options = self._world.options
        steps = -(-len(request.token_ids) // self._world.chunk_tokens) + options.output_tokens_max
        self._steps[name] = self._steps.get(name, 0) + 4 * steps

    def _go_away(self, attempt: EngineAttempt) -> None:
        if not attempt.is_over:
            self._world.report.struck["client goes away"] += 1
            self._leave(attempt)

    def _leave(self, attempt: EngineAttempt) -> None:
        """The client goes away; no attempt follows."""
        owner = self._world.owner(attempt.decode)
        attempt.ask.tries = _TRIES_MAX
        if owner is not None and attempt.ticket is not None and attempt.ticket.sequence is not None:
            owner.process.run(owner.abort, attempt.ticket.sequence)
        self._fail(attempt, "client_left")

    def _fail(self, attempt: EngineAttempt, code: str) -> None:
        ask = attempt.ask
        self._world.log(f"{ask.name} failed at {attempt.decode!r}: {code}")
        self._world.report.errors[code] += 1
        self._close(attempt)
        if ask.tries < _TRIES_MAX:
            self._world.report.retries += 1
            self._clock.call_after(self._rng.randrange(MS, 1 * S), self._attempt, ask)
        else:
            ask.is_over = True

    def _close(self, attempt: EngineAttempt) -> None:
        attempt.is_over = True
        self._open.remove(attempt)
