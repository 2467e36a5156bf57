"""One attempt at a request: one pair of workers, one transfer id, both legs at once.

Decides when the attempt is over:

- a 4xx of either leg is the client's own and ends it, and one that only says that the worker is too small lets the
  dispatcher try a larger one;
- D failing before anything was sent to the client ends it; the dispatcher may try again;
- P failing is recorded and left to D, which notices through its agent and recomputes; only a P that was never reached,
  or *refused* the work (overloaded, or shutting down), ends it, because it granted nothing and D would wait in vain;
- D failing mid-stream ends the stream with one well-formed error event.

It must never choose workers. When ``run`` returns or is cancelled, both legs are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

import httpx

from kvxfer.openai.transfer_params import Part as LegPart
from kvxfer.openai.transfer_params import TransferEnd, TransferParams
from kvxfer.policy.place import Placement
from kvxfer.router import failure, headers
from kvxfer.router.answer import Answer
from kvxfer.router.failure import Failure, FailureKind
from kvxfer.router.inbound import Inbound
from kvxfer.router.legs import Answered, DecodeLeg, Leg, Prefilled, prefill
from kvxfer.router.merge import Merger
from kvxfer.router.metrics import Outcome, RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.router.tasks import cancel_all, finish
from kvxfer.router.workers import Part, Workers
from kvxfer.types import AgentRef, Member, TransferId

log = logging.getLogger("kvxfer.router")

PREFILL_ANSWER_WAIT_S = 0.5
"""How long the end of an answer waits for P's own words, once: they were sent before D could have the last block."""
OUTLIVES_S = 4.0
"""A dead worker is noticed within 3 s; one that is there after this has only hung up."""


@dataclasses.dataclass(frozen=True)
class Room:
    """What every attempt works with."""

    options: RouterOptions
    workers: Workers
    client: httpx.AsyncClient
    metrics: RouterMetrics
    now: Callable[[], float] = time.monotonic


class Attempt:
    """``avoided`` and ``excluded`` name the agents that the next attempt should take last, or not at all; ``too_small``
    those that cannot hold their part of the request. ``failed_part`` is whose failure :meth:`run` returned."""

    def __init__(self, room: Room, inbound: Inbound, answer: Answer, placement: Placement, number: int) -> None:
        self._room = room
        self._inbound = inbound
        self._answer = answer
        self._placement = placement
        self._number = number
        self._transfer_id = TransferId(secrets.token_bytes(16))
        self._prefill_task: asyncio.Task[Prefilled | Failure] | None = None
        self._is_prefill_heard = False
        self._merger = Merger(placement.decode.info.dialect, has_source=placement.prefill is not None)
        self.avoided: set[str] = set()
        self.excluded: set[str] = set()
        self.too_small: set[tuple[Part, str]] = set()
        self.failed_part = Part.DECODE

    async def run(self) -> Outcome | Failure:
        """To the client's last byte, or to a Failure before its first."""
        decoder = self._placement.decode
        leg = DecodeLeg(
            self._room.client,
            self._leg(decoder, LegPart.DECODE),
            streams=self._inbound.parsed.stream,
            answer_bytes_max=self._room.options.max_answer_bytes,
        )
        tasks: set[asyncio.Task[Any]] = set()
        try:
            with self._room.workers.working(decoder.ref, Part.DECODE), self._room.workers.watching(decoder.ref) as gone:
                gone_task = asyncio.create_task(gone.wait())
                begin_task = asyncio.create_task(leg.begin())
                tasks |= {gone_task, begin_task}
                if self._placement.prefill is not None:
                    self._prefill_task = self._start_prefill(self._placement.prefill)
                    tasks.add(self._prefill_task)
                begun = await self._wait_begun(begin_task, gone_task, tasks)
                if isinstance(begun, Failure):
                    return begun
                if isinstance(begun, Answered):
                    return await self._answer_whole(begun)
                relay_task = asyncio.create_task(self._relay(leg))
                tasks.add(relay_task)
                await asyncio.wait({relay_task, gone_task}, return_when=asyncio.FIRST_COMPLETED)
                if relay_task.done():
                    return relay_task.result()
                await finish(cancel_all({relay_task}))
                return await self._break_stream(failure.gone(LegPart.DECODE))
        finally:
            await finish(_close(leg, tasks))

    async def _wait_begun(
        self,
        begin_task: asyncio.Task[Answered | Failure | None],
        gone_task: asyncio.Task[Any],
        tasks: set[asyncio.Task[Any]],
    ) -> Answered | Failure | None:
        waiting: set[asyncio.Task[Any]] = {begin_task, gone_task}
        if self._prefill_task is not None:
            waiting.add(self._prefill_task)
        lives_task: asyncio.Task[bool] | None = None
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if begin_task in done:
                begun = begin_task.result()
                if isinstance(begun, Failure):
                    self._note(Part.DECODE, self._placement.decode.ref, begun)
                else:
                    self._room.workers.reached(self._placement.decode.ref)
                return begun
            if gone_task in done:
                lost = failure.gone(LegPart.DECODE)
                self._note(Part.DECODE, self._placement.decode.ref, lost)
                return lost
            assert self._prefill_task is not None
            ended = self._prefill_task.result()
            if not isinstance(ended, Failure):
                continue
            if self._ends_attempt(ended) or (lives_task is not None and lives_task.result()):
                self.failed_part = Part.PREFILL
                return ended
            if ended.kind is FailureKind.UNREAD and lives_task is None:
                lives_task = asyncio.create_task(self._outlives_its_lease())
                tasks.add(lives_task)
                waiting.add(lives_task)

    async def _outlives_its_lease(self) -> bool:
        """Whether P still lives when a dead one would be known to be: then it hung up without the request, and D, which
        sees P's agent alive, would wait for a grant that never comes.
        """
        assert self._placement.prefill is not None
        with self._room.workers.watching(self._placement.prefill.ref) as gone:
            try:
                async with asyncio.timeout(OUTLIVES_S):
                    await gone.wait()
            except TimeoutError:
                return True
        return False

    def _ends_attempt(self, ended: Failure) -> bool:
        """Whether P's failure ends the attempt although D still waits."""
        if ended.is_final or ended.is_of_size or ended.status == failure.UNAVAILABLE:
            return True
        if ended.kind in (FailureKind.UNREACHABLE, FailureKind.EXHAUSTED):
            return True  # P has not got the request, and its agent, which lives, would have D wait for a grant
        return self._room.options.on_prefill_failure == "redispatch"

    def _start_prefill(self, member: Member) -> asyncio.Task[Prefilled | Failure]:
        """Counted from this moment, not from when the task first runs: the next placement may come before that."""
        counted = contextlib.ExitStack()
        counted.enter_context(self._room.workers.working(member.ref, Part.PREFILL))
        task = asyncio.create_task(self._run_prefill(member))
        task.add_done_callback(lambda _: counted.close())
        return task

    async def _run_prefill(self, member: Member) -> Prefilled | Failure:
        ended = await prefill(self._room.client, self._leg(member, LegPart.PREFILL))
        if isinstance(ended, Failure):
            self._note(Part.PREFILL, member.ref, ended)
        else:
            self._room.workers.reached(member.ref)
        return ended

    def _note(self, part: Part, ref: AgentRef, ended: Failure) -> None:
        self._room.metrics.leg_failures.labels(part.value, ended.kind.value).inc()
        log.log(
            logging.INFO if ended.is_final or ended.is_of_size else logging.WARNING,
            "leg failed",
            extra={
                "request_id": self._inbound.request_id,
                "transfer_id": str(self._transfer_id),
                "attempt": self._number,
                "part": part.value,
                "agent_id": ref.agent_id,
                "kind": ended.kind.value,
                "code": ended.code,
            },
        )
        if ended.is_final:
            return
        if ended.is_of_size:  # it answered, and well: what cannot be computed there cannot be decoded there either
            self._room.workers.reached(ref)
            self.too_small |= {(part, ref.agent_id), (Part.DECODE, ref.agent_id)}
            return
        if ended.is_worker_out_of_reach:
            self._room.workers.put_aside(ref)
        source = self._placement.prefill
        if part is Part.DECODE and source is not None and ended.is_unexplained:  # perhaps it was P who let D down
            self.avoided |= {ref.agent_id, source.ref.agent_id}
            return
        (self.avoided if ended.is_retryable else self.excluded).add(ref.agent_id)

    async def _answer_whole(self, begun: Answered) -> Outcome:
        content = begun.content
        if self._merger.is_concerned(content):
            await self._hear_prefill()
            content = self._merger.body(content, self._account(), self._prefilled())
        await self._answer.json(200, content, self._head())
        return Outcome.OK

    async def _relay(self, leg: DecodeLeg) -> Outcome:
        self._room.metrics.ttft.labels(self._prefill_at()).observe(self._room.now() - self._inbound.arrived_s)
        await self._answer.start_stream(self._head())
        async for events in leg.events():
            if isinstance(events, Failure):
                return await self._break_stream(events)
            parts: list[bytes] = []
            for event in events:
                if self._merger.is_concerned(event.data):
                    await self._hear_prefill()
                    parts.append(self._merger.event(event, self._account(), self._prefilled()))
                else:
                    parts.append(event.raw)
            await self._answer.write(b"".join(parts))
        await self._answer.end()
        return Outcome.OK if leg.error_event is None else Outcome.BROKEN_STREAM

    async def _break_stream(self, ended: Failure) -> Outcome:
        self._note(Part.DECODE, self._placement.decode.ref, ended)
        await self._answer.fail(ended.status, ended.body)
        return Outcome.BROKEN_STREAM

    async def _hear_prefill(self) -> None:
        """Give P's answer, if it is still under way, its time; once."""
        if self._prefill_task is not None and not self._is_prefill_heard:
            self._is_prefill_heard = True
            await asyncio.wait({self._prefill_task}, timeout=PREFILL_ANSWER_WAIT_S)

    def _prefill_end(self) -> Prefilled | Failure | None:
        task = self._prefill_task
        return None if task is None or not task.done() or task.cancelled() else task.result()

    def _prefilled(self) -> Prefilled | None:
        ended = self._prefill_end()
        return ended if isinstance(ended, Prefilled) else None

    def _account(self) -> dict[str, Any]:
        """What the router adds to D's account: the pair, the attempt, and P's own words if it has spoken."""
        source = self._placement.prefill
        account: dict[str, Any] = {
            "attempt": self._number,
            "prefill_agent": None if source is None else source.ref.agent_id,
            "decode_agent": self._placement.decode.ref.agent_id,
        }
        ended = self._prefill_end()
        if isinstance(ended, Failure):
            account["prefill_failure"] = ended.code
        elif ended is not None:
            account |= ended.account()
        return account

    def _prefill_at(self) -> str:
        return "local" if self._placement.prefill is None else "remote"

    def _head(self) -> dict[str, str]:
        return {
            headers.PREFILL: self._prefill_at(),
            headers.PREFILL_REASON: self._placement.reason.value,
            headers.ATTEMPT: str(self._number),
        }

    def _leg(self, member: Member, part: LegPart) -> Leg:
        source, destination = self._placement.prefill, self._placement.decode
        params = None
        if source is not None:
            params = TransferParams(
                transfer_id=self._transfer_id,
                attempt=self._number,
                role=part,
                source=self._end(source),
                destination=self._end(destination),
            )
        leg_headers = dict(self._inbound.leg_headers)
        rank = self._room.workers.data_parallel_rank(member)
        if rank is not None:
            leg_headers[headers.DATA_PARALLEL_RANK] = str(rank)
        return Leg(
            what=part.value,
            url=member.info.http_url.rstrip("/") + self._inbound.path,
            headers=leg_headers,
            content=self._inbound.content(member.info.dialect, params),
        )

    def _end(self, member: Member) -> TransferEnd:
        return TransferEnd(member.ref.agent_id, self._room.workers.ranks(member), member.info.http_url)


async def _close(leg: DecodeLeg, tasks: Iterable[asyncio.Task[Any]]) -> None:
    await cancel_all(tasks)
    await leg.aclose()
