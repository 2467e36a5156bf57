"""The graph of waits between requests, over all engines of a world: which requests can end without another one giving
up up, which cannot, and since when; must never ask a scheduler what it will do.

A request that computes ends. One that lacks blocks can go on once requests that hold them and end by themselves have
given enough back, and it is its turn; one half of a pair can go on once the other can. What remains when nothing more
can be crossed out so waits in a circle. A request that waits for an engine that is hung, stopped or dead is crossed out
too: a timer ends that, which has a bound of its own.
"""

from __future__ import annotations

import dataclasses

from kvxfer.engine.request import Leg, Phase, Sequence, blocks_for
from kvxfer.engine.scheduler import YIELD_S
from kvxfer.testing.sim.checkers import Invariant, Violation
from kvxfer.testing.sim.engines.engine_view import EngineOwnerView, EngineWorldView
from kvxfer.testing.sim.virtual_clock import S


@dataclasses.dataclass
class _Engine:
    """One engine in one moment."""

    owner: EngineOwnerView
    is_up: bool
    sequences: list[Sequence]
    line: list[Sequence]
    """Those that want blocks, in the order in which it is their turn."""

    @property
    def name(self) -> str:
        return self.owner.process.name


@dataclasses.dataclass
class _Stuck:
    """What is in a circle since ``since``."""

    since: int
    before: dict[Sequence, int] = dataclasses.field(default_factory=dict)
    """What ended, or will, in the meantime, with the time that its engine may take for it. Only after that do those in
    the circle lack what they wait for: a pull behind a request that runs slowly wants no blocks yet."""


class WaitGraph:
    """Looks at the whole world now and then."""

    def __init__(self, world: EngineWorldView) -> None:
        self._world = world
        self._stuck: dict[Sequence, _Stuck] = {}
        self._hung_since: dict[Sequence, int] = {}
        self._engines: dict[str, _Engine] = {}
        self._prefills: dict[bytes, tuple[_Engine, Sequence]] = {}
        self._decodes: dict[bytes, tuple[_Engine, Sequence]] = {}
        self._ends: set[Sequence] = set()

    def look(self) -> None:
        """Raises Violation where a circle of waits, or the wait for a hung engine, is older than its bound."""
        self._read()
        self._reduce()
        self._judge_circles()
        self._judge_hung()

    # --- reading ---

    def _read(self) -> None:
        self._engines, self._prefills, self._decodes, self._ends = {}, {}, {}, set()
        for owner in self._world.owners():
            process, scheduler = owner.process, owner.executor.scheduler
            is_up = not (process.is_paused or owner.is_hung)
            line = _line(list(scheduler._granted), list(scheduler._waiting), list(scheduler._for_others))
            self._engines[process.name] = engine = _Engine(owner, is_up, scheduler.sequences(), line)
            for sequence in engine.sequences:
                remote = sequence.request.remote
                if remote is not None and sequence.leg is Leg.PREFILL:
                    self._prefills[remote.transfer_id.raw] = engine, sequence
                elif remote is not None and sequence.leg is Leg.DECODE:
                    self._decodes[remote.transfer_id.raw] = engine, sequence

    # --- crossing out ---

    def _reduce(self) -> None:
        if all(s.blocks for engine in self._engines.values() for s in engine.sequences):
            self._ends = {s for engine in self._engines.values() for s in engine.sequences}
            return
        for engine in self._engines.values():
            if engine.is_up:
                self._ends |= {s for s in engine.sequences if s.phase is Phase.COMPUTING and s.leg is not Leg.PREFILL}
        count = -1
        while count != len(self._ends):
            count = len(self._ends)
            for engine in self._engines.values():
                if engine.is_up:
                    for sequence in engine.sequences:
                        if sequence not in self._ends and self._can_end(engine, sequence):
                            self._ends.add(sequence)

    def _can_end(self, engine: _Engine, sequence: Sequence) -> bool:
        if sequence.leg is Leg.LOCAL:
            return self._has_or_gets(engine, sequence)
        remote = sequence.request.remote
        assert remote is not None
        others = self._decodes if sequence.leg is Leg.PREFILL else self._prefills
        other = others.get(remote.transfer_id.raw)
        if not self._has_or_gets(engine, sequence):
            return False
        # Without its other half, or with one that does not move, a timer ends it: expiry, deadline, silence.
        return other is None or not other[0].is_up or self._has_or_gets(*other)

    def _has_or_gets(self, engine: _Engine, sequence: Sequence) -> bool:
        """Whether it has its blocks, or gets them once all that end have ended."""
        if sequence.blocks or sequence in self._ends:
            return True
        ahead = next((one for one in engine.line if one not in self._ends), None)
        if sequence.phase is not Phase.ASKING and ahead is not sequence:
            return False
        if sequence.phase is Phase.GRANTED and self._slots_taken(engine) >= engine.owner.profile.limits.max_running:
            return False
        return self._lacks(engine, sequence) <= 0

    def _slots_taken(self, engine: _Engine) -> int:
        return sum(1 for one in engine.sequences if one.phase is Phase.PULLING and one not in self._ends)

    def _lacks(self, engine: _Engine, sequence: Sequence) -> int:
        """Blocks that it would still lack then."""
        pool = engine.owner.executor.pool
        stuck = [one for one in engine.sequences if one not in self._ends]
        if sequence.phase is Phase.ASKING:  # once it wants blocks it may take early ones, and it wants none yet
            stuck = [one for one in stuck if one.phase is not Phase.ASKING]
        kept = {block for one in stuck for block in one.blocks}
        shared = 0
        for digest in pool.digests(sequence.tokens):
            if pool._by_digest.get(digest) not in kept:
                break
            shared += 1
        return blocks_for(sequence.target, pool.block_tokens) - shared - (pool.block_count - len(kept))

    # --- judging ---

    def _judge_circles(self) -> None:
        world = self._world
        now, options = world.clock.now, world.options
        stuck = {s: e for e in self._engines.values() if e.is_up for s in e.sequences if s not in self._ends}
        for gone in [s for s in self._stuck if s not in stuck]:
            since = self._stuck.pop(gone).since
            world.report.circle_max_ns = max(world.report.circle_max_ns, now - since)
            if not self._stuck:
                world.report.circles += 1
        held = sum(1 for e in self._engines.values() for s in e.sequences if s.phase is Phase.HOLDING)
        before = self._time_of_those_that_end() if stuck else {}
        for sequence, engine in stuck.items():
            entry = self._stuck.setdefault(sequence, _Stuck(now))
            entry.before = before | entry.before
            bound_ns = options.circle_ns(world.step_max_ns, held) + sum(entry.before.values())
            if now - entry.since > bound_ns:
                raise Violation(
                    Invariant.WAITING,
                    f"{sequence} of {engine.name} is in a circle of waits since {entry.since / S:.1f} s, longer than "
                    f"{bound_ns / S:.1f} s:\n" + "\n".join(self._circle(sequence)),
                )

    def _time_of_those_that_end(self) -> dict[Sequence, int]:
        times = {}
        for engine in self._engines.values():
            if engine.is_up:
                step_ns, chunk = engine.owner.profile.step_max_ns, self._world.chunk_tokens
                for sequence in self._ends.intersection(engine.sequences):
                    left = -(-(sequence.target - sequence.computed) // chunk) + self._world.options.output_tokens_max
                    times[sequence] = left * step_ns
        return times

    def _judge_hung(self) -> None:
        """The requests that wait for a grant of an engine that makes no step."""
        world = self._world
        now, bound_ns = world.clock.now, world.options.hung_ns()
        waiting = {}
        for engine, sequence in self._decodes.values():
            remote = sequence.request.remote
            assert remote is not None
            source = self._engines.get(remote.agent_id)
            if (
                not engine.is_up
                or sequence.phase is not Phase.ASKING
                or source is None
                or source.owner.process.is_paused
            ):
                continue
            if source.owner.is_hung and not world.is_granted(source.owner.process, remote.transfer_id.raw):
                waiting[sequence] = source
        for gone in [s for s in self._hung_since if s not in waiting]:
            world.report.hung_max_ns = max(world.report.hung_max_ns, now - self._hung_since.pop(gone))
        for sequence, source in waiting.items():
            since = self._hung_since.setdefault(sequence, now)
            if now - since > bound_ns:
                raise Violation(
                    Invariant.WAITING,
                    f"{sequence} waits since {since / S:.1f} s for a grant of {source.name}, whose engine hangs since "
                    f"{source.owner.hung_since / S:.1f} s",
                )

    def _circle(self, sequence: Sequence) -> list[str]:
        """One way from ``sequence`` on, until it comes back to where it was."""
        way: list[Sequence] = []
        lines: list[str] = []
        at: Sequence | None = sequence
        while at is not None and at not in way:
            way.append(at)
            engine = next(e for e in self._engines.values() if at in e.sequences)
            after, why = self._waits_for(engine, at)
            lines.append(f"  {engine.name} {at} with {len(at.blocks)} blocks {why}")
            at = after
        return lines

    def _waits_for(self, engine: _Engine, sequence: Sequence) -> tuple[Sequence | None, str]:
        remote = sequence.request.remote
        if not sequence.blocks and sequence.phase is not Phase.ASKING:
            ahead = next((one for one in engine.line if one not in self._ends), None)
            if ahead is not sequence:
                return ahead, "waits for its turn"
            holders = [one for one in engine.sequences if one.blocks and one not in self._ends]
            lacks = self._lacks(engine, sequence)
            return next(iter(holders), None), f"lacks {lacks} blocks, which {len(holders)} others hold"
        assert remote is not None
        others = self._decodes if sequence.leg is Leg.PREFILL else self._prefills
        other = others.get(remote.transfer_id.raw)
        return (None if other is None else other[1]), "waits for its other half"


def _line(granted: list[Sequence], waiting: list[Sequence], for_others: list[Sequence]) -> list[Sequence]:
    """The three queues in the order of their turns: the oldest of those that are first, where what is computed for
    others counts as younger."""
    queues = [(0.0, granted), (0.0, waiting), (YIELD_S, for_others)]
    line = []
    while any(queue for _, queue in queues):
        _, first = min(((queue[0].submitted_s + later_s, n) for n, (later_s, queue) in enumerate(queues) if queue))
        line.append(queues[first][1].pop(0))
    return line
