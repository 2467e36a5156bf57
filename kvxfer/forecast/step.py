"""What an engine computes in one step: the scheduler of vLLM's V1 engine, reduced to counts.

Each step has a budget of tokens. Running sequences come first, in the order in which they began: a sequence whose
prompt is not yet computed gets a chunk of it, any other gets one token. If no block is free for a running sequence, the
sequence that began last is preempted: it gives its blocks back and computes everything again later. Only if none was
preempted, waiting sequences are admitted in their order, as long as tokens, blocks and places in the batch are left; a
cached prefix counts as computed, except for the last token of a prompt, which gives the first token of the answer.

::

    add ──> WAITING ──admitted──> RUNNING ──last token──> ENDED   (or HELD, if ``holds``, until release)
               ▲  │                 │ ▲
               │  │ remote_tokens   │ │ chosen again, in its turn
               │  ▼                 │ │
               │ LOADING ──loaded───┼─┘   its blocks are reserved while another engine's KV comes
               └──── preempted ─────┘
    abort: from any state to ENDED, also before add

Decides which sequences a step computes and how many tokens of each. It must never know time (``cost`` says how long
a step takes), what a token is, or where a sequence came from. A step has two halves, because time passes between them:
:meth:`StepModel.begin` chooses, :meth:`StepModel.end` makes tokens. Between them sequences may be added and aborted.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from kvxfer.config import check_positive
from kvxfer.errors import DoesNotFitError, InvalidArgumentError
from kvxfer.forecast.cost import attended_tokens
from kvxfer.forecast.paged_cache import PagedCache

OwnerT = TypeVar("OwnerT")


class StepPhase(enum.Enum):
    """Where a sequence is in the model."""

    NEW = enum.auto()
    """Not added yet."""
    WAITING = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    HELD = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(frozen=True)
class StepLimits:
    """How much an engine computes in one step, and how many blocks it has. Raises ConfigError for a bad value."""

    token_budget: int = 8192
    """Tokens of one step."""
    batch_max: int = 256
    """Running sequences."""
    chunk_max: int = 8192
    """Most prompt tokens of one sequence in one step."""
    block_tokens: int = 16
    blocks: int = 8192
    has_prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("token_budget", "batch_max", "chunk_max", "block_tokens", "blocks"):
            check_positive(name, getattr(self, name), maximum=1 << 30)


@dataclasses.dataclass(eq=False, slots=True)
class StepSequence(Generic[OwnerT]):
    """One prompt and its answer. The caller makes it; after :meth:`StepModel.add` only the model changes it."""

    owner: OwnerT
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int] = ()
    """A key for each full block of the prompt and, after it, of the answer. Without keys nothing is cached."""
    remote_tokens: int = 0
    """Prompt tokens that another engine computes: the sequence is admitted with room for the whole prompt, and waits
    for :meth:`StepModel.loaded`."""
    holds: bool = False
    """Its blocks stay in use after its last token, until :meth:`StepModel.release`."""

    phase: StepPhase = StepPhase.NEW
    blocks: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is in ``blocks``."""
    emitted: int = 0
    """Tokens of the answer so far."""
    cached_tokens: int = 0
    """Of the first admission: prompt tokens that the cache had."""
    loaded_tokens: int = 0
    """Prompt tokens that came from another engine."""
    prompt_computed: int = 0
    """Prompt tokens that this engine computed, those that it computed again included."""
    preemptions: int = 0

    @property
    def total(self) -> int:
        """Tokens known so far: the prompt and the answer's."""
        return self.prompt_tokens + self.emitted


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep(Generic[OwnerT]):
    """What one step computes. ``work`` has each sequence with its number of tokens."""

    work: list[tuple[StepSequence[OwnerT], int]]
    prefill_tokens: int
    decode_sequences: int
    context_tokens: int
    """Tokens to which the decoding sequences attend."""
    to_load: list[StepSequence[OwnerT]]
    """Sequences that have room for KV from another engine since this step."""
    preempted: list[StepSequence[OwnerT]]
    admitted: int = 0
    """So many of ``work``, its last ones, begin to compute, or begin again."""
    prefill_context_tokens: int = 0
    """Tokens to which the prompt tokens of the step attend, each to all before it. A sequence with one token left to
    compute counts as a decoding one, also where that is its prompt's last token."""

    @property
    def is_empty(self) -> bool:
        return not self.work


@dataclasses.dataclass(slots=True)
class StepCounts:
    """Totals since the model was made."""

    steps: int = 0
    prompt_computed: int = 0
    cache_queried: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    cache_hit: int = 0
    loaded: int = 0
    output: int = 0
    preemptions: int = 0


class StepModel(Generic[OwnerT]):
    """One engine's scheduler and blocks."""

    def __init__(self, limits: StepLimits, *, records_changes: bool = False) -> None:
        self.limits = limits
        self.cache = PagedCache(limits.blocks, records_changes=records_changes)
        self.counts = StepCounts()
        self._waiting: deque[StepSequence[OwnerT]] = deque()
        self._ready: deque[StepSequence[OwnerT]] = deque()
        """Waiting sequences whose prompt has its blocks. They go before all others, which may be waiting for just these
        blocks."""
        self._running: list[StepSequence[OwnerT]] = []
        self._loading = 0
        self._held = 0
        self._held_blocks = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place, or for KV from another engine."""
        return len(self._waiting) + len(self._ready) + self._loading

    @property
    def held(self) -> int:
        """Sequences that ended and keep their blocks."""
        return self._held

    @property
    def held_blocks(self) -> int:
        return self._held_blocks

    def add(self, sequence: StepSequence[OwnerT]) -> None:
        """Put ``sequence`` at the end of the queue.

        Raises InvalidArgumentError for a sequence without tokens, DoesNotFitError for one that has more than all blocks
        hold.
        """
        if sequence.prompt_tokens < 1 or sequence.output_tokens < 1:
            raise InvalidArgumentError("a sequence must have a token in its prompt and in its answer")
        needed = self._blocks_for(sequence.prompt_tokens + sequence.output_tokens - 1)
        if needed > self.limits.blocks:
            raise DoesNotFitError(
                f"{sequence.prompt_tokens} prompt tokens and {sequence.output_tokens} of the answer need {needed} "
                f"blocks, and the engine has {self.limits.blocks}",
                prompt_tokens=sequence.prompt_tokens,
            )
        sequence.phase = StepPhase.WAITING
        self._waiting.append(sequence)

    def abort(self, sequence: StepSequence[OwnerT]) -> None:
        """End ``sequence`` and free its blocks, whatever its phase. Repeats are harmless."""
        if sequence.phase is StepPhase.WAITING:
            (self._ready if sequence.blocks else self._waiting).remove(sequence)
        elif sequence.phase is StepPhase.LOADING:
            self._loading -= 1
        elif sequence.phase is StepPhase.RUNNING:
            self._running.remove(sequence)
        elif sequence.phase is StepPhase.HELD:
            self.release(sequence)
            return
        elif sequence.phase is StepPhase.ENDED:
            return
        self._finish(sequence)

    def release(self, sequence: StepSequence[OwnerT]) -> None:
        """Free the blocks of a held sequence. Repeats are harmless."""
        if sequence.phase is StepPhase.HELD:
            self._held -= 1
            self._held_blocks -= len(sequence.blocks)
            self._finish(sequence)

    def loaded(self, sequence: StepSequence[OwnerT], tokens: int) -> None:
        """KV of the first ``tokens`` prompt tokens has come from another engine; fewer than were computed here count
        as none, and the engine computes the prompt. A sequence that does not wait for KV is left alone.
        """
        if sequence.phase is not StepPhase.LOADING:
            return
        self._loading -= 1
        known = min(tokens, sequence.prompt_tokens - 1)
        if known > sequence.computed:
            sequence.loaded_tokens = known - sequence.computed
            self.counts.loaded += sequence.loaded_tokens
            self._grow(sequence, known)
        sequence.phase = StepPhase.WAITING
        self._ready.append(sequence)

    def begin(self) -> PlannedStep[OwnerT]:
        """Choose what the next step computes. If nothing can be computed now, ``work`` is empty: a later :meth:`add`,
        :meth:`loaded`, :meth:`release` or :meth:`abort` may change that.
        """
        work: list[tuple[StepSequence[OwnerT], int]] = []
        preempted: list[StepSequence[OwnerT]] = []
        to_load: list[StepSequence[OwnerT]] = []
        budget = self.limits.token_budget
        prefill = decodes = context = prefill_context = 0
        block_tokens, chunk_max, running = self.limits.block_tokens, self.limits.chunk_max, self._running
        index = 0
        while index < len(running) and budget:
            sequence = running[index]
            computed = sequence.computed
            left = sequence.prompt_tokens + sequence.emitted - computed
            chunk = left if left == 1 else min(left, budget, chunk_max)
            if computed + chunk > len(sequence.blocks) * block_tokens and not self._extend(
                sequence, computed + chunk, preempted
            ):
                break
            work.append((sequence, chunk))
            budget -= chunk
            if left == 1:
                decodes += 1
                context += computed
            else:
                prefill += chunk
                prefill_context += attended_tokens(chunk, computed)
            index += 1
        already = len(work)
        if not preempted:
            batch_max = self.limits.batch_max
            while (waiting := self._ready or self._waiting) and budget and len(running) < batch_max:
                admitted = self._admit(waiting[0], budget)
                if admitted is None:
                    break
                sequence = waiting.popleft()
                if sequence.phase is StepPhase.LOADING:
                    to_load.append(sequence)
                    continue
                running.append(sequence)
                work.append((sequence, admitted))
                budget -= admitted
                if sequence.computed + admitted == sequence.total and admitted == 1:
                    decodes += 1
                    context += sequence.computed
                else:
                    prefill += admitted
                    prefill_context += attended_tokens(admitted, sequence.computed)
        return PlannedStep(work, prefill, decodes, context, to_load, preempted, len(work) - already, prefill_context)

    def end(self, step: PlannedStep[OwnerT]) -> list[StepSequence[OwnerT]]:
        """What ``step`` computed is there: returns the sequences that got one more token of their answer. One that has
        all its tokens is ENDED, or HELD. Sequences that were aborted meanwhile are left out.
        """
        if step.work:
            self.counts.steps += 1
        block_tokens, counts = self.limits.block_tokens, self.counts
        emitted: list[StepSequence[OwnerT]] = []
        ended = False
        for sequence, chunk in step.work:
            if sequence.phase is not StepPhase.RUNNING:
                continue
            before = sequence.computed
            after = before + chunk
            if before < sequence.prompt_tokens:
                new = min(after, sequence.prompt_tokens) - before
                sequence.prompt_computed += new
                counts.prompt_computed += new
            if after // block_tokens != before // block_tokens:
                self._grow(sequence, after)
            else:
                sequence.computed = after
            if after < sequence.prompt_tokens + sequence.emitted:
                continue
            sequence.emitted += 1
            counts.output += 1
            emitted.append(sequence)
            if sequence.emitted >= sequence.output_tokens:
                ended = True
                if sequence.holds:
                    sequence.phase = StepPhase.HELD
                    self._held += 1
                    self._held_blocks += len(sequence.blocks)
                else:
                    self._finish(sequence)
        if ended:
            self._running = [sequence for sequence in self._running if sequence.phase is StepPhase.RUNNING]
        return emitted

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)

    def _finish(self, sequence: StepSequence[OwnerT]) -> None:
        sequence.phase = StepPhase.ENDED
        self._drop_blocks(sequence)

    def _drop_blocks(self, sequence: StepSequence[OwnerT]) -> None:
        self.cache.give_back(sequence.blocks)
        sequence.blocks = []

    def _grow(self, sequence: StepSequence[OwnerT], computed: int) -> None:
        """So many tokens of ``sequence`` are computed now: its blocks that became full can be found by others."""
        first, last = sequence.computed // self.limits.block_tokens, computed // self.limits.block_tokens
        sequence.computed = computed
        if self.limits.has_prefix_cache:
            keys = sequence.keys
            for index in range(first, min(last, len(keys))):
                self.cache.store(sequence.blocks[index], keys[index], keys[index - 1] if index else None)

    def _extend(self, sequence: StepSequence[OwnerT], tokens: int, preempted: list[StepSequence[OwnerT]]) -> bool:
        """Give a running sequence blocks for ``tokens`` tokens; False if it had to preempt itself."""
        wanted = self._blocks_for(tokens) - len(sequence.blocks)
        while (taken := self.cache.take(wanted)) is None:
            victim = self._running.pop()
            victim.phase = StepPhase.WAITING
            victim.computed = 0
            victim.preemptions += 1
            self.counts.preemptions += 1
            self._drop_blocks(victim)
            self._waiting.appendleft(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        sequence.blocks += taken
        return True

    def _admit(self, sequence: StepSequence[OwnerT], budget: int) -> int | None:
        """Give a waiting sequence its first blocks. Returns the tokens that it computes in this step (0 if it waits
        for KV from another engine), or None if there is no room yet.
        """
        shared: list[int] = []
        computed = sequence.computed
        is_new = not sequence.blocks
        if is_new and self.limits.has_prefix_cache:
            # The last token is computed in any case: it gives the next token.
            shared = self.cache.match(sequence.keys[: (sequence.total - 1) // self.limits.block_tokens])
            computed = len(shared) * self.limits.block_tokens
        is_remote = is_new and not sequence.preemptions and sequence.remote_tokens > computed
        chunk = 0 if is_remote else min(sequence.total - computed, budget, self.limits.chunk_max)
        target = sequence.prompt_tokens if is_remote else computed + chunk
        wanted = max(0, self._blocks_for(target) - len(shared) - len(sequence.blocks))
        if wanted > self.cache.free - self.cache.unused_of(shared):
            return None
        self.cache.share(shared)
        taken = self.cache.take(wanted)
        assert taken is not None
        if is_new:
            sequence.blocks = shared + taken
            if not sequence.preemptions:
                sequence.cached_tokens = min(computed, sequence.prompt_tokens)
                if self.limits.has_prefix_cache:
                    self.counts.cache_queried += sequence.prompt_tokens
                    self.counts.cache_hit += sequence.cached_tokens
        else:
            sequence.blocks += taken
        sequence.computed = computed
        if is_remote:
            sequence.phase = StepPhase.LOADING
            self._loading += 1
        else:
            sequence.phase = StepPhase.RUNNING
        return chunk

    def __repr__(self) -> str:
        return f"StepModel(running={self.running}, waiting={self.waiting}, held={self.held}, {self.cache!r})"
