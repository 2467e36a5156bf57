"""What the engine thread does in a step, and between steps.

It decides the order of acts (grant before the first chunk, announce after each, revoke before blocks change hands, free
after a grant ended), and leaves to the scheduler what is computed. It must never know of threads or HTTP: everything
here runs on one thread, and what comes out goes into a list that the engine carries away.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from kvxfer.clock import NS_PER_S, Clock, SystemClock
from kvxfer.engine.block_digests import BlockDigests
from kvxfer.engine.generation import Generation, Output
from kvxfer.engine.model import LoadedModel
from kvxfer.engine.pool import BlockPool
from kvxfer.engine.remote import BlockExchange, EnginePull, ResultLike, ended_error
from kvxfer.engine.request import (
    Event,
    FailurePolicy,
    Leg,
    OtherLeg,
    Outcome,
    Phase,
    PrefillOutcome,
    Sequence,
    blocks_for,
)
from kvxfer.engine.runner import Chunk, Runner
from kvxfer.engine.scheduler import Scheduler, SchedulerLimits, Work
from kvxfer.errors import KvxferError, OverloadedError
from kvxfer.policy.room import Held, Room
from kvxfer.types import GrantState, Load, TransferId

_log = logging.getLogger(__name__)

NO_ROOM = "no_room: the source needed the blocks, and nothing else would have given any back"


@dataclasses.dataclass
class Counters:
    """What the engine did since it started. Written by the engine thread."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    requests: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """(leg, outcome code) -> count; the code of a finished request is ``ok``."""
    remote_failures: dict[str, int] = dataclasses.field(default_factory=dict)
    revoked_prompts: int = 0
    """Prompts that were computed for others and given up because this engine needed their blocks."""


class Executor:
    """Runs requests of one model over one pool. Every method belongs to the engine thread, but for :meth:`load`.

    Without an ``exchange`` only LOCAL requests are taken. ``take_events`` gives what came out since the last call.
    """

    def __init__(
        self,
        model: LoadedModel,
        runner: Runner,
        limits: SchedulerLimits,
        *,
        on_transfer_failure: FailurePolicy = FailurePolicy.RECOMPUTE,
        room_wait_s: float = 2.0,
        digests: BlockDigests | None = None,
        on_ttft: Callable[[float], None] = lambda _: None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self.model = model
        self.runner = runner
        salt = (model.config_fingerprint + model.weights_fingerprint).encode()
        self.pool = BlockPool(runner.block_count, runner.block_tokens, salt=salt)
        self.scheduler = Scheduler(self.pool, limits, before_preemption=self._revoke, take_back=self._take_back)
        self._room: Room[Sequence] = Room(room_wait_s)
        self._compared_free_blocks = self.pool.available
        """The pool's free blocks when they were last compared."""
        self.counters = Counters()
        self.digests = digests
        self._policy = on_transfer_failure
        self._on_ttft = on_ttft
        self._exchange: BlockExchange | None = None
        self._events: list[tuple[Generation, Event]] = []
        self._pulls: dict[Sequence, EnginePull] = {}
        self._aborted: set[Sequence] = set()
        self._owners: dict[Sequence, Generation] = {}

    def join(self, exchange: BlockExchange) -> None:
        """Move blocks through ``exchange``, so that PREFILL and DECODE legs are taken too. Call it before the engine
        thread starts."""
        self._exchange = exchange

    @property
    def is_busy(self) -> bool:
        """Whether a request without its last event, or a pull, is left; from any thread."""
        return bool(self._owners or self._pulls or self._aborted)

    def take_events(self) -> list[tuple[Generation, Event]]:
        events, self._events = self._events, []
        return events

    def load(self) -> Load:
        """What this worker reports to routers."""
        now = self.scheduler.statistics()
        return Load(
            queued_requests=now.waiting + now.asking + now.granted,
            running_requests=now.computing + now.pulling,
            queued_prefill_tokens=now.waiting_tokens,
            free_blocks=self.pool.available,
            total_blocks=self.pool.block_count,
        )

    def step(self) -> bool:
        """Plan one step and run it; False when another would find nothing new to do."""
        self._note_freed()  # first, because the plan may allocate the blocks that came back since the last one
        plan = self.scheduler.plan()
        for sequence in plan.preempted:
            if sequence.phase is Phase.ENDED:
                self._emit_error(sequence, OverloadedError("this prompt lost its blocks to older requests"))
        for sequence in plan.admitted:
            self._begin(sequence)
        # Before the forward pass: the scheduler's ``is_short`` tells of the pool as the plan left it.
        has_made_room = self._make_room(has_admitted=bool(plan.admitted))
        work = [item for item in plan.work if item.sequence.phase is Phase.COMPUTING]
        if work:
            self._forward(work)
        if self._exchange is not None:
            self._exchange.report_load(self.load())
        # What was admitted may have ended at once (all of it cached, or its grant refused), and left room for others.
        return bool(work or plan.preempted or plan.admitted or has_made_room)

    def wait_s(self) -> float | None:
        """How long there is nothing to do if nothing comes in; ``None``: for ever."""
        look_at_ns = self._room.look_at_ns()
        return None if look_at_ns is None else max(0.0, (look_at_ns - self._clock.now_ns()) / NS_PER_S)

    def _now_s(self) -> float:
        return self._clock.now_ns() / NS_PER_S

    def _note_freed(self) -> None:
        """Tell the room policy when blocks came back to the pool."""
        if self.pool.available > self._compared_free_blocks:
            self._room.freed(self._clock.now_ns())
        self._compared_free_blocks = self.pool.available

    def _make_room(self, *, has_admitted: bool) -> bool:
        """Revoke one prompt that is held for another engine, where this engine cannot go on otherwise. Whether it
        did."""
        now_ns = self._clock.now_ns()
        if has_admitted:
            self._room.freed(now_ns)
        self._note_freed()
        is_wanted = self.scheduler.is_short
        held = [Held(one, one.held_ns, one.grant.has_begun) for one in self.scheduler.held] if is_wanted else []
        will_free = self.scheduler.will_free or any(one.has_begun for one in held)
        victim = self._room.victim(held, is_wanted=is_wanted, will_free=will_free, now_ns=now_ns)
        if victim is None:
            return False
        self.counters.revoked_prompts += 1
        _log.warning("a kept prompt is revoked: its blocks are needed", extra={"request_id": victim.request.request_id})
        victim.grant.revoke(NO_ROOM)
        self.scheduler.end(victim)
        return True

    def waited_s(self) -> float:
        """How long the decode leg that has waited longest for its grant, or for room, has done so; from any thread."""
        since_s = min(self.scheduler.waiting_since_s(), default=None)
        return 0.0 if since_s is None else max(0.0, time.monotonic() - since_s)

    def held(self) -> list[dict[str, Any]]:
        """Prompts that are kept for other workers, as operators read them. On the engine thread."""
        now_ns = time.monotonic_ns()
        return [
            {
                "transfer_id": str(remote.transfer_id),
                "reader": remote.agent_id,
                "blocks": len(sequence.blocks),
                "seconds": round((now_ns - sequence.held_ns) / NS_PER_S, 3),
                "is_read": sequence.grant.has_begun,
            }
            for sequence in self.scheduler.held
            if (remote := sequence.request.remote) is not None
        ]

    def release(self, transfer_id: TransferId) -> bool:
        """Give up a prompt that is kept for another worker; False where there is none of that id. On the engine
        thread."""
        for sequence in self.scheduler.held:
            if self._partners(sequence)[1].transfer_id == transfer_id:
                sequence.grant.revoke("an operator released it")
                self.scheduler.end(sequence)
                return True
        return False

    def _take_back(self, sequence: Sequence) -> bool:
        """Withdraw early blocks from their pull; False where a transfer fills them already."""
        exchange, _ = self._partners(sequence)
        return exchange.unreserve(self._pulls[sequence])

    def _forward(self, work: list[Work]) -> None:
        chunks = [Chunk(item.token_ids, item.start, item.sequence.blocks, item.need_logits) for item in work]
        try:
            logits = self.runner.forward(chunks)
            self.runner.wait_written()
        except Exception as error:
            _log.exception("a forward pass failed")
            for item in work:
                self._end(item.sequence, KvxferError(f"the forward pass failed: {error!r}"))
            return
        self.counters.steps += 1
        rows = iter(logits)
        for item in work:
            sequence = item.sequence
            self.scheduler.advance(sequence, item.count)
            if item.need_logits and item.count == 1:
                self.counters.decode_tokens += 1
            else:
                self.counters.prefill_tokens += item.count
            if sequence.leg is Leg.PREFILL:
                self._announce(sequence)
            elif item.need_logits:
                self._sample(sequence, next(rows))

    def _sample(self, sequence: Sequence, logits: torch.Tensor) -> None:
        try:
            delta = sequence.output.push(sequence, logits)
        except Exception as error:
            _log.exception("sampling failed")
            self._end(sequence, error if isinstance(error, KvxferError) else KvxferError(f"sampling failed: {error!r}"))
            return
        now_s = self._now_s()
        if not sequence.first_token_s:
            sequence.first_token_s = now_s
            self._on_ttft(now_s - sequence.submitted_s)
        self._emit(sequence, delta)
        if delta.finish_reason is not None:
            outcome = Outcome(
                prompt_tokens=sequence.prompt_tokens,
                completion_tokens=len(sequence.generated),
                cached_tokens=max(0, sequence.cached_tokens),
                queue_s=sequence.started_s - sequence.submitted_s,
                ttft_s=sequence.first_token_s - sequence.submitted_s,
                total_s=now_s - sequence.submitted_s,
                ended_unix_s=time.time(),
                report=sequence.report,
            )
            self._finish(sequence)
            self._emit_last(sequence, outcome, "ok")

    def add(self, sequence: Sequence, generation: Generation) -> None:
        """Take a new sequence in; what becomes of it, refusal included, goes to ``generation``."""
        request = sequence.request
        self._owners[sequence] = generation
        if request.leg is Leg.PREFILL:
            if sequence.target == 0:
                sequence.started_s = sequence.submitted_s
                sequence.phase = Phase.ENDED
                self._revoke(sequence)
                self._emit_prefilled(sequence)
                return
        else:
            sequence.output = Output(request.params, self.model.detokenizer(request.token_ids), self.model.eos_ids)
            if request.leg is Leg.DECODE and sequence.target == 1:
                sequence.leg = Leg.LOCAL
                sequence.report.reason = "a prompt of one token has no blocks to move"
        if sequence.leg is not Leg.LOCAL and self._exchange is None:
            sequence.phase = Phase.ENDED
            self._emit_error(sequence, KvxferError("this worker has no agent to move blocks with"))
            return
        try:
            self.scheduler.add(sequence)
        except OverloadedError as error:
            self.refuse(sequence, error)
        else:
            if sequence.leg is Leg.DECODE:
                self._ask(sequence)

    def refuse(self, sequence: Sequence, error: KvxferError, generation: Generation | None = None) -> None:
        """End a sequence that was never queued; ``generation`` where it is not known yet."""
        if generation is not None:
            self._owners[sequence] = generation
        sequence.phase = Phase.ENDED
        self._revoke(sequence)
        if sequence.leg is Leg.DECODE:
            exchange, remote = self._partners(sequence)
            exchange.abort_pull(remote)
        self._emit_error(sequence, error)

    def _ask(self, sequence: Sequence) -> None:
        """A decode leg asks for its grant: with blocks where there are some that no other request wants."""
        exchange, remote = self._partners(sequence)
        pull = EnginePull(
            on_granted=functools.partial(self.scheduler.granted, sequence),
            on_committed=functools.partial(self._pulled, sequence),
            on_failed=functools.partial(self._pull_failed, sequence),
            on_drained=lambda: None,
        )
        self._pulls[sequence] = pull
        blocks = self._remote_blocks(sequence) if self.scheduler.allocate_early(sequence) else []
        count = blocks_for(sequence.prompt_tokens - 1, self.pool.block_tokens)
        exchange.start(
            pull, blocks, remote, content_digest=sequence.content_digest, first=sequence.matched, count=count
        )

    def _begin(self, sequence: Sequence) -> None:
        """A sequence got its blocks: grant those of a prefill leg, reserve those of a decode leg for its pull."""
        if not sequence.started_s:
            sequence.started_s = self._now_s()
        if sequence.leg is Leg.LOCAL:
            return
        exchange, remote = self._partners(sequence)
        if sequence.leg is Leg.PREFILL:
            try:
                sequence.grant = exchange.grant(
                    sequence.blocks,
                    remote,
                    content_digest=sequence.content_digest,
                    ready_blocks=sequence.matched,
                    on_ended=functools.partial(self._grant_ended, sequence),
                )
            except KvxferError as error:
                self._end(sequence, error)
                return
            if sequence.remaining == 0:
                self._announce(sequence)
            return
        exchange.reserve(self._pulls[sequence], self._remote_blocks(sequence), first=sequence.matched)

    def _announce(self, sequence: Sequence) -> None:
        """Tell the reader which blocks are final; after the last one, the prefill leg is answered."""
        is_complete = sequence.remaining == 0
        blocks = len(sequence.blocks) if is_complete else sequence.computed // self.pool.block_tokens
        if is_complete and self.digests is not None:
            self.digests.record(self._partners(sequence)[1].transfer_id, "source", sequence.blocks, first=0)
        try:
            sequence.grant.ready(blocks, complete=is_complete)
        except KvxferError as error:
            self._end(sequence, error)
            return
        if is_complete:
            sequence.held_ns = self._clock.now_ns()
            self.scheduler.hold(sequence)
            self._emit_prefilled(sequence)

    def _grant_ended(self, sequence: Sequence, state: GrantState) -> None:
        if sequence.phase is Phase.COMPUTING:
            self._end(sequence, ended_error(state))
        elif sequence.phase is Phase.HOLDING:
            self.scheduler.end(sequence)

    def _pulled(self, sequence: Sequence, result: ResultLike) -> None:
        """A pull committed: report its transfer, and let the sequence compute."""
        del self._pulls[sequence]
        if not sequence.started_s:  # it had its blocks early
            sequence.started_s = self._now_s()
        remote = self._partners(sequence)[1]
        if self.digests is not None:
            blocks = self._remote_blocks(sequence)
            self.digests.record(remote.transfer_id, "destination", blocks, first=sequence.matched)
        report = sequence.report
        report.prefill, report.reason = "remote", f"computed by {remote.agent_id}"
        report.blocks_moved, report.bytes_moved = result.blocks, result.bytes
        report.bytes_before_prefill_end = result.bytes_before_complete
        report.lane, report.lane_reason = str(result.lane), result.lane_reason
        report.seconds = {name: round(seconds, 6) for name, seconds in result.seconds.items()}
        report.transfer_s = round(sum(result.seconds.values()), 6)
        self.scheduler.pulled(sequence)
        if sequence in self._aborted:
            self._finish(sequence)

    def _pull_failed(self, sequence: Sequence, error: KvxferError) -> None:
        """A pull ended without a commit: this engine computes the prompt itself, or reports the error (``_policy``)."""
        pull = self._pulls.pop(sequence)
        key = self.scheduler.detach(sequence)
        pull.on_drained = functools.partial(self.scheduler.drained, key)
        self.counters.remote_failures[error.code] = self.counters.remote_failures.get(error.code, 0) + 1
        sequence.report.failure = error.code
        sequence.report.reason = f"the transfer failed: {error}"
        if sequence in self._aborted or self._policy is FailurePolicy.FAIL:
            self._end(sequence, error)

    def abort(self, sequence: Sequence, error: KvxferError) -> None:
        """No client waits for the answer any more, or none may."""
        self._emit_error(sequence, error)
        if not sequence.phase.is_remote:
            self._finish(sequence)
        elif sequence not in self._aborted:
            self._aborted.add(sequence)
            self._partners(sequence)[0].cancel(self._pulls[sequence])

    def abort_all(self, error: KvxferError) -> None:
        """End everything that runs or waits."""
        for sequence in self.scheduler.sequences():
            self.abort(sequence, error)

    def fail_owners(self, error: KvxferError) -> None:
        """Tell every request that waits for an answer that the engine is gone; blocks are left as they are."""
        for sequence in list(self._owners):
            self._emit_error(sequence, error)

    def _end(self, sequence: Sequence, error: KvxferError) -> None:
        self._finish(sequence)
        self._emit_error(sequence, error)

    def _finish(self, sequence: Sequence) -> None:
        """End a sequence: revoke its grant first, then give its blocks back."""
        if sequence.phase is Phase.ENDED:
            return
        self._revoke(sequence)
        self.scheduler.end(sequence)
        self._aborted.discard(sequence)

    def _revoke(self, sequence: Sequence) -> None:
        """Revoke the grant of a prefill leg. Where it has none yet, tell the reader not to wait for one."""
        if sequence.leg is Leg.PREFILL and sequence.grant is not None:
            sequence.grant.revoke("the request ended at the source")
        elif sequence.leg is Leg.PREFILL:
            exchange, remote = self._partners(sequence)
            exchange.abort_grant(remote)

    def _remote_blocks(self, sequence: Sequence) -> list[int]:
        return sequence.blocks[sequence.matched : blocks_for(sequence.prompt_tokens - 1, self.pool.block_tokens)]

    def _partners(self, sequence: Sequence) -> tuple[BlockExchange, OtherLeg]:
        """The exchange, and the other leg of a remote sequence."""
        exchange, remote = self._exchange, sequence.request.remote
        if exchange is None or remote is None:
            raise AssertionError(f"{sequence} has no remote half")
        return exchange, remote

    def _emit_prefilled(self, sequence: Sequence) -> None:
        outcome = PrefillOutcome(
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=max(0, sequence.cached_tokens),
            queue_s=sequence.started_s - sequence.submitted_s,
            prefill_s=self._now_s() - sequence.started_s,
            ended_unix_s=time.time(),
        )
        self._emit_last(sequence, outcome, "ok")

    def _emit_error(self, sequence: Sequence, error: KvxferError) -> None:
        self._emit_last(sequence, error, error.code)

    def _emit_last(self, sequence: Sequence, event: Event, code: str) -> None:
        """Send a request's last event, and count it; without effect after the first."""
        if sequence in self._owners:
            key = (str(sequence.request.leg), code)
            self.counters.requests[key] = self.counters.requests.get(key, 0) + 1
            self._emit(sequence, event)
            del self._owners[sequence]

    def _emit(self, sequence: Sequence, event: Event) -> None:
        generation = self._owners.get(sequence)
        if generation is not None:
            self._events.append((generation, event))
