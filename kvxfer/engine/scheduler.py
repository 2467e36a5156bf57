"""What is computed in the next step: the pure half of the engine.

It decides admission, chunk sizes, which requests share a forward pass and which are preempted when the pool is full,
over a BlockPool that it alone drives. It must never know the time, a thread, a tensor or an agent: what must happen
outside before blocks change hands (revoking a grant, taking blocks back from a pull) is an injected call.

A sequence waits, is admitted (the scheduler allocates its prompt's blocks), and then computes. A decode leg *asks* for
its grant first. It takes no slot while it asks. It may get blocks *early*, so that the transfer begins as soon as the
grant exists; the scheduler takes early blocks back when another request needs them. Once the grant exists, the decode
leg is admitted like any other request, the oldest first, and is *pulling* until its blocks have arrived. In every step
the decoding sequences come first, with one token each. Prompts share the rest of the token budget in the order of their
admission, one chunk each.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from kvxfer.config import check_positive
from kvxfer.engine.pool import BlockPool
from kvxfer.engine.request import Leg, Phase, Sequence, blocks_for
from kvxfer.errors import ConfigError, OverloadedError

YIELD_S = 10.0
"""A prefill leg counts as so much younger than it is. So requests that this engine answers go before prefill legs
that came up to YIELD_S earlier."""


@dataclasses.dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of one engine; counts and tokens."""

    max_batch_tokens: int = 256
    chunk_tokens: int = 128
    max_running: int = 16
    """Sequences in one step. As many again may be pulling. A sequence whose pull has ended keeps its blocks until it
    has a place in a step."""
    max_waiting: int = 256
    """Sequences that wait for blocks of this engine. As many decode legs may wait for a grant, or with a grant for
    blocks."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "chunk_tokens", "max_running", "max_waiting"):
            check_positive(name, getattr(self, name), maximum=1 << 20)
        if self.max_batch_tokens < self.max_running:
            raise ConfigError(
                f"max_batch_tokens {self.max_batch_tokens} must be at least max_running {self.max_running}"
            )


@dataclasses.dataclass(frozen=True)
class Work:
    """``count`` tokens of ``sequence`` from position ``start``, in one forward pass."""

    sequence: Sequence
    start: int
    count: int
    need_logits: bool

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.count]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step. ``preempted`` lost their blocks; the prefill legs among them are over."""

    work: tuple[Work, ...]
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]


@dataclasses.dataclass(frozen=True)
class SchedulerStatistics:
    """Sequences by phase, and prompt tokens whose computing has not begun."""

    waiting: int
    asking: int
    granted: int
    pulling: int
    computing: int
    holding: int
    waiting_tokens: int
    preemptions: int
    taken_back: int
    """Times that early blocks went to another request."""


class Scheduler:
    """Decides over one pool.

    The scheduler calls ``before_preemption(sequence)`` before it gives back the blocks of a preempted sequence. It
    calls ``take_back(sequence)`` to withdraw early blocks from the pull of a sequence that asks. ``take_back`` returns
    False where the pull uses the blocks already: then the grant exists, and a call of :meth:`granted` follows.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        *,
        before_preemption: Callable[[Sequence], None] = lambda _: None,
        take_back: Callable[[Sequence], bool] = lambda _: True,
    ) -> None:
        self.pool = pool
        self.limits = limits
        self._before_preemption = before_preemption
        self._take_back = take_back
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._for_others: collections.deque[Sequence] = collections.deque()
        """Prefill legs that wait: prompts that this engine computes for other engines."""
        self._asking: dict[Sequence, None] = {}
        self._granted: dict[Sequence, None] = {}
        self._pulling: dict[Sequence, None] = {}
        self._computing: list[Sequence] = []
        self._holding: dict[Sequence, None] = {}
        self._draining: dict[int, list[int]] = {}
        self._drains = 0
        self._preemptions = 0
        self._taken_back = 0
        self.is_short = False
        """Whether the last plan had no blocks for a request that this engine answers: one that waits to be computed
        here, or one whose grant exists."""

    def __repr__(self) -> str:
        now = self.statistics()
        names = ("waiting", "asking", "granted", "pulling", "computing", "holding")
        counts = ", ".join(f"{getattr(now, name)} {name}" for name in names)
        return f"<Scheduler {counts}>"

    def statistics(self) -> SchedulerStatistics:
        """Counts as of now; may be read from any thread."""
        waiting = (*self._waiting.copy(), *self._for_others.copy())
        return SchedulerStatistics(
            waiting=len(waiting),
            asking=len(self._asking),
            granted=len(self._granted),
            pulling=len(self._pulling),
            computing=len(self._computing),
            holding=len(self._holding),
            waiting_tokens=sum(sequence.target for sequence in waiting),
            preemptions=self._preemptions,
            taken_back=self._taken_back,
        )

    @property
    def is_empty(self) -> bool:
        """Whether everything has ended, and every block that :meth:`detach` kept has drained; from any thread."""
        return not (
            self._waiting
            or self._for_others
            or self._asking
            or self._granted
            or self._pulling
            or self._computing
            or self._holding
            or self._draining
        )

    @property
    def has_waiting(self) -> bool:
        """Whether something that is computed here has not begun."""
        return bool(self._waiting or self._for_others)

    def sequences(self) -> list[Sequence]:
        """Everything that has not ended."""
        waiting = (*self._waiting, *self._for_others, *self._asking, *self._granted)
        return [*waiting, *self._pulling, *self._computing, *self._holding]

    @property
    def held(self) -> list[Sequence]:
        """Prompts that were computed for others, the oldest first."""
        return list(self._holding)

    def waiting_since_s(self) -> list[float]:
        """When each decode leg came that waits for its grant, or for room; from any thread."""
        return [one.submitted_s for one in [*self._asking.copy(), *self._granted.copy()]]

    @property
    def will_free(self) -> bool:
        """Whether a request that this engine answers holds blocks, which come back when it ends. Early blocks count:
        a plan that was short of blocks left in place only those that a transfer fills already."""
        is_pulling = self._pulling or self._draining or any(one.blocks for one in self._asking)
        return bool(is_pulling) or any(one.leg is not Leg.PREFILL for one in self._computing)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; a decode leg asks from now on. Raises OverloadedError when ``max_waiting`` wait
        already."""
        is_decode = sequence.leg is Leg.DECODE
        beside = (self._asking, self._granted) if is_decode else (self._waiting, self._for_others)
        if (waiting := sum(map(len, beside))) >= self.limits.max_waiting:
            raise OverloadedError(f"{waiting} requests wait already, max_waiting is {self.limits.max_waiting}")
        if is_decode:
            sequence.phase = Phase.ASKING
            self._asking[sequence] = None
        else:
            (self._for_others if sequence.leg is Leg.PREFILL else self._waiting).append(sequence)

    def allocate_early(self, sequence: Sequence) -> bool:
        """Give a sequence that asks its blocks before its grant exists, where no other request wants them now."""
        early = sum(1 for one in self._asking if one.blocks)
        is_wanted = bool(self._waiting or self._for_others or self._granted) or early >= self.limits.max_running
        return not is_wanted and self._allocate(sequence, may_take_back=False)

    def granted(self, sequence: Sequence) -> None:
        """The grant of an asking sequence exists. The sequence is pulling where it has early blocks; else it is
        admitted when there is room."""
        if sequence.phase is Phase.ASKING:
            del self._asking[sequence]
            if sequence.blocks:
                sequence.phase = Phase.PULLING
                self._pulling[sequence] = None
            else:
                sequence.phase = Phase.GRANTED
                self._granted[sequence] = None

    def plan(self) -> Plan:
        """Decide the next step: allocate, preempt, admit, and share out the token budget."""
        preempted: list[Sequence] = []
        budget = self.limits.max_batch_tokens
        decoding: list[Work] = []
        for sequence in self._computing[: self.limits.max_running]:
            if sequence.phase is not Phase.COMPUTING or sequence.remaining != 1:
                continue
            if budget == 0:
                break
            if self._grow(sequence, preempted):
                decoding.append(Work(sequence, sequence.computed, 1, sequence.leg is not Leg.PREFILL))
                budget -= 1
        work = [item for item in decoding if item.sequence.phase is Phase.COMPUTING]
        admitted = [] if preempted else self._admit()
        taken = {item.sequence for item in work}
        for sequence in self._computing[: self.limits.max_running]:
            if budget == 0:
                break
            if sequence in taken or sequence.remaining < 1:
                continue
            count = min(self.limits.chunk_tokens, sequence.remaining, budget)
            is_last = count == sequence.remaining
            work.append(Work(sequence, sequence.computed, count, is_last and sequence.leg is not Leg.PREFILL))
            budget -= count
        return Plan(tuple(work), tuple(admitted), tuple(preempted))

    def advance(self, sequence: Sequence, count: int) -> None:
        """``count`` more tokens of ``sequence`` stand in its blocks: publish the prompt's blocks that became full."""
        sequence.computed += count
        self._publish(sequence, self._digests(sequence))

    def pulled(self, sequence: Sequence) -> None:
        """The transfer committed and drained: the prompt but its last token stands in the blocks; now it computes."""
        self._leave_remote_phases(sequence)
        sequence.phase = Phase.COMPUTING
        sequence.computed = sequence.prompt_tokens - 1
        self._computing.append(sequence)
        self._publish(sequence, self._digests(sequence))

    def detach(self, sequence: Sequence) -> int:
        """The transfer ended without a commit: part from the blocks it had, which stay used until :meth:`drained`.

        The other blocks are given back at once. Returns the key for :meth:`drained`. The sequence waits, first in
        line, to be computed here.
        """
        self._leave_remote_phases(sequence)
        last = blocks_for(sequence.prompt_tokens - 1, self.pool.block_tokens)
        pulled = sequence.blocks[sequence.matched : last]
        self.pool.release(sequence.blocks[: sequence.matched] + sequence.blocks[last:])
        self._drains += 1
        self._draining[self._drains] = pulled
        self._reset(sequence)
        sequence.leg = Leg.LOCAL
        self._waiting.appendleft(sequence)
        return self._drains

    def drained(self, key: int) -> None:
        """The blocks that :meth:`detach` kept may be reused."""
        self.pool.release(self._draining.pop(key))

    def hold(self, sequence: Sequence) -> None:
        """A prefill leg is computed: it leaves the running set, its blocks stay until :meth:`end`."""
        self._computing.remove(sequence)
        sequence.phase = Phase.HOLDING
        self._holding[sequence] = None

    def end(self, sequence: Sequence) -> None:
        """Remove a sequence in any phase but the remote ones, and give its blocks back. A second call does nothing.

        A grant of these blocks must have ended before.
        """
        if sequence.phase is Phase.ENDED:
            return
        if sequence.phase.is_remote:
            raise AssertionError(f"{sequence} must be detached before it ends")
        if sequence.phase is Phase.WAITING:
            (self._for_others if sequence.leg is Leg.PREFILL else self._waiting).remove(sequence)
        elif sequence.phase is Phase.COMPUTING:
            self._computing.remove(sequence)
            self._publish(sequence, self.pool.digests(sequence.tokens[: sequence.computed]))
        else:
            del self._holding[sequence]
        self.pool.release(sequence.blocks)
        self._reset(sequence)
        sequence.phase = Phase.ENDED

    def _leave_remote_phases(self, sequence: Sequence) -> None:
        """Remove a sequence from the sets of the remote phases."""
        for members in (self._asking, self._granted, self._pulling):
            members.pop(sequence, None)

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        self.is_short = False
        while (sequence := self._next()) is not None:
            if not self._allocate(sequence):
                self.is_short = bool(self._waiting or self._granted)
                break
            if sequence.leg is Leg.DECODE:
                del self._granted[sequence]
                sequence.phase = Phase.PULLING
                self._pulling[sequence] = None
            else:
                (self._for_others if sequence.leg is Leg.PREFILL else self._waiting).popleft()
                sequence.phase = Phase.COMPUTING
                self._computing.append(sequence)
            admitted.append(sequence)
        return admitted

    def _next(self) -> Sequence | None:
        """The sequence to admit next: the oldest of those that are first in their queue and find a free slot. A prefill
        leg counts as YIELD_S younger: it would keep blocks for another engine, where the others free theirs soon."""
        first: list[tuple[float, int, Sequence]] = []
        if self._granted and len(self._pulling) < self.limits.max_running:
            one = next(iter(self._granted))
            first.append((one.submitted_s, 0, one))
        if len(self._computing) < self.limits.max_running:
            first += [(line[0].submitted_s, 1, line[0]) for line in (self._waiting,) if line]
            first += [(line[0].submitted_s + YIELD_S, 2, line[0]) for line in (self._for_others,) if line]
        return min(first)[2] if first else None

    def _make_room(self, count: int) -> bool:
        """Take early blocks back, those of the youngest sequence first, until ``count`` blocks are available. Whether
        they are."""
        for sequence in [one for one in reversed(self._asking) if one.blocks]:
            if self.pool.available >= count:
                break
            if self._take_back(sequence):
                self._taken_back += 1
                self.pool.release(sequence.blocks)
                self._reset(sequence)
                sequence.phase = Phase.ASKING
        return self.pool.available >= count

    def _allocate(self, sequence: Sequence, *, may_take_back: bool = True) -> bool:
        """Give a sequence the blocks of all its tokens, shared ones first.

        False, and nothing changed for it, when the pool is out.
        """
        shared = self.pool.match_digests(self._digests(sequence)[: self._shareable(sequence)])
        count = blocks_for(sequence.target, self.pool.block_tokens) - len(shared)
        growing = sum(1 for other in self._computing if other.leg is not Leg.PREFILL)
        headroom = 0 if sequence.leg is Leg.PREFILL else growing
        if self.pool.available < count + headroom and not (may_take_back and self._make_room(count + headroom)):
            self.pool.release(shared)
            return False
        sequence.blocks = shared + self.pool.allocate(count)
        sequence.matched = sequence.published = len(shared)
        sequence.computed = len(shared) * self.pool.block_tokens
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = sequence.computed
        return True

    def _shareable(self, sequence: Sequence) -> int:
        """How many blocks a sequence may take from the prefix cache.

        A sequence that samples computes at least its last token itself; a decode leg pulls at least one block,
        because that pull is what releases the source's grant.
        """
        kept_back = {Leg.PREFILL: 0, Leg.DECODE: 2, Leg.LOCAL: 1}[sequence.leg]
        return (sequence.target - kept_back) // self.pool.block_tokens

    def _grow(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Make room for the KV of one more token, preempting the youngest while the pool is out.

        False when that was ``sequence`` itself.
        """
        while len(sequence.blocks) * self.pool.block_tokens <= sequence.computed:
            if self.pool.available or self._make_room(1):
                sequence.blocks += self.pool.allocate(1)
                continue
            victim = self._computing[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._before_preemption(victim)
        self._preemptions += 1
        victim.preemptions += 1
        if victim.leg is Leg.PREFILL:
            self.end(victim)
            return
        self._computing.remove(victim)
        self._publish(victim, self.pool.digests(victim.tokens[: victim.computed]))
        self.pool.release(victim.blocks)
        self._reset(victim)
        victim.leg = Leg.LOCAL
        self._waiting.appendleft(victim)

    def _digests(self, sequence: Sequence) -> list[bytes]:
        if sequence.digests is None:
            sequence.digests = self.pool.digests(sequence.tokens)
        return sequence.digests

    def _publish(self, sequence: Sequence, digests: list[bytes]) -> None:
        full = min(sequence.computed // self.pool.block_tokens, len(digests))
        for index in range(sequence.published, full):
            self.pool.publish(sequence.blocks[index], digests[index])
        sequence.published = max(sequence.published, full)

    @staticmethod
    def _reset(sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        sequence.blocks = []
        sequence.computed = sequence.matched = sequence.published = 0
        sequence.digests = None
