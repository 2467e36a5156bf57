"""Who computes what in the next step: the pure half of the engine.

It decides admission, chunk sizes, who shares a forward pass and who is preempted when the pool is out, over a
BlockPool that it alone drives. It must never know the time, a thread, a tensor or an agent: what must happen outside
before blocks change hands (revoking a grant) is one injected call.

A sequence waits, is admitted (its prompt's blocks allocated), and then either computes or, on a decode leg, waits for
the blocks to be pulled. Decoding sequences go first in every step, one token each; what is left of the token budget
goes to prompts, in the order of their admission, a chunk each.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from kvxfer.config import check_positive
from kvxfer.engine.pool import BlockPool
from kvxfer.engine.request import Leg, Phase, Sequence, blocks_for
from kvxfer.errors import ConfigError, Overloaded


@dataclasses.dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of one engine; counts and tokens."""

    max_batch_tokens: int = 256
    chunk_tokens: int = 128
    max_running: int = 16
    """Sequences in one step. As many again may wait for their pulls; those that were pulled meanwhile hold their blocks
    until it is their turn."""
    max_waiting: int = 256

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
    """Sequences by phase, and prompt tokens that nobody has begun to compute."""

    waiting: int
    pulling: int
    computing: int
    holding: int
    waiting_tokens: int
    preemptions: int


class Scheduler:
    """Decides over one pool. ``before_preemption`` is called with a sequence before its blocks are given back."""

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        *,
        before_preemption: Callable[[Sequence], None] = lambda _: None,
    ) -> None:
        self.pool = pool
        self.limits = limits
        self._before_preemption = before_preemption
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._pulling: dict[Sequence, None] = {}
        self._computing: list[Sequence] = []
        self._holding: dict[Sequence, None] = {}
        self._draining: dict[int, list[int]] = {}
        self._drains = 0
        self._preemptions = 0

    def __repr__(self) -> str:
        now = self.statistics()
        counts = f"{now.waiting} waiting, {now.pulling} pulling, {now.computing} computing, {now.holding} holding"
        return f"<Scheduler {counts}>"

    def statistics(self) -> SchedulerStatistics:
        """Counts as of now; may be read from any thread."""
        waiting = tuple(self._waiting.copy())
        return SchedulerStatistics(
            waiting=len(waiting),
            pulling=len(self._pulling),
            computing=len(self._computing),
            holding=len(self._holding),
            waiting_tokens=sum(sequence.target for sequence in waiting),
            preemptions=self._preemptions,
        )

    @property
    def is_empty(self) -> bool:
        """Whether everything has ended, and every block that :meth:`detach` set aside has drained; from any thread."""
        return not (self._waiting or self._pulling or self._computing or self._holding or self._draining)

    def sequences(self) -> list[Sequence]:
        """Everything that has not ended."""
        return [*self._waiting, *self._pulling, *self._computing, *self._holding]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises Overloaded when ``max_waiting`` wait already."""
        if len(self._waiting) >= self.limits.max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests wait already, max_waiting is {self.limits.max_waiting}")
        self._waiting.append(sequence)

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
        del self._pulling[sequence]
        sequence.phase = Phase.COMPUTING
        sequence.computed = sequence.prompt_tokens - 1
        self._computing.append(sequence)
        self._publish(sequence, self._digests(sequence))

    def detach(self, sequence: Sequence) -> int:
        """The transfer ended without a commit: part from the blocks it had, which stay used until :meth:`drained`.

        The other blocks are given back at once. Returns the key for :meth:`drained`. The sequence waits, first in
        line, to be computed here.
        """
        del self._pulling[sequence]
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
        """The blocks that :meth:`detach` set aside may be reused."""
        self.pool.release(self._draining.pop(key))

    def hold(self, sequence: Sequence) -> None:
        """A prefill leg is computed: it leaves the running set, its blocks stay until :meth:`end`."""
        self._computing.remove(sequence)
        sequence.phase = Phase.HOLDING
        self._holding[sequence] = None

    def end(self, sequence: Sequence) -> None:
        """It is over, whatever it was doing but pulling: take it out and give its blocks back. Repeats are harmless.

        Whatever vouches for the blocks elsewhere (a grant) must have ended before.
        """
        if sequence.phase is Phase.ENDED:
            return
        if sequence.phase is Phase.PULLING:
            raise AssertionError(f"{sequence} must be detached before it ends")
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        elif sequence.phase is Phase.COMPUTING:
            self._computing.remove(sequence)
            self._publish(sequence, self.pool.digests(sequence.tokens[: sequence.computed]))
        else:
            del self._holding[sequence]
        self.pool.release(sequence.blocks)
        self._reset(sequence)
        sequence.phase = Phase.ENDED

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        while self._waiting:
            sequence = self._waiting[0]
            is_pull = sequence.leg is Leg.DECODE
            if (len(self._pulling) if is_pull else len(self._computing)) >= self.limits.max_running:
                break
            if not self._allocate(sequence):
                break
            self._waiting.popleft()
            if is_pull:
                sequence.phase = Phase.PULLING
                self._pulling[sequence] = None
            else:
                sequence.phase = Phase.COMPUTING
                self._computing.append(sequence)
            admitted.append(sequence)
        return admitted

    def _allocate(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the blocks of all its tokens, shared ones first.

        False, and nothing changed, when the pool is out.
        """
        shared = self.pool.match_digests(self._digests(sequence)[: self._shareable(sequence)])
        count = blocks_for(sequence.target, self.pool.block_tokens) - len(shared)
        growing = sum(1 for other in self._computing if other.leg is not Leg.PREFILL)
        headroom = 0 if sequence.leg is Leg.PREFILL else growing
        if self.pool.available < count + headroom:
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
            if self.pool.available:
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
