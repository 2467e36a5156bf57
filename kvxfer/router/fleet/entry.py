"""One worker's place in the fleet: what its source says, what it says itself, its health, and the requests in flight.

Makes the candidate that placement looks at, and keeps it until something in it changes. It must never know another
worker, nor a socket.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self

from kvxfer.errors import InvalidArgumentError, UsageError
from kvxfer.openai.transfer_params import Part
from kvxfer.policy.candidates import Candidate, is_placeable
from kvxfer.policy.capacity import Capacity, capacity_of
from kvxfer.policy.health import HealthState, WorkerHealth
from kvxfer.policy.silence import WorkerSigns
from kvxfer.protocol.http_url import HostList, HttpUrl
from kvxfer.router.fleet.board import InFlight
from kvxfer.router.fleet.facts import EngineIdentity, EngineLoad, load_of
from kvxfer.router.fleet.worker import CLIPPING_DIALECTS, ENGINE_DIALECTS, PAIRED_DIALECTS, EngineDialect, Worker
from kvxfer.types import AgentRef

log = logging.getLogger("kvxfer.router")


class WorkerEntry:
    """``given`` is what the source says; ``worker`` has what the engine says of itself added."""

    __slots__ = (
        *("_skeleton", "capacity", "decode_inflight", "elsewhere", "generated", "given", "health", "held", "identity"),
        *("is_barred", "is_drained", "is_suspicion_doubted", "kept", "prefill_inflight", "said"),
        *("suspect_is_closed", "trouble", "watchers", "worked_s", "worker"),
    )

    def __init__(self, given: Worker, health: WorkerHealth) -> None:
        self.given = given
        self.health = health
        self.prefill_inflight = 0
        self.decode_inflight = 0
        self.held = 0
        """Prompts that it has computed and that the other worker may still be reading: no load, and not idle."""
        self.elsewhere = InFlight()
        """In other processes of this router."""
        self.watchers: set[Callable[[], None]] = set()
        self.identity: EngineIdentity | None = None
        self.said: EngineLoad | None = None
        self.generated: float | None = None
        """Tokens that it has computed for answers, by its own count; None where it has none."""
        self.worked_s: float | None = None
        """When that count was last seen to grow, or for the first time."""
        self.trouble = ""
        """Why it does not say what it serves."""
        self.is_barred = False
        """Whether its address is none that a request is sent to."""
        self.is_drained = False
        """By an admin."""
        self.is_suspicion_doubted = False
        """Whether the suspicion says nothing of the worker: see :func:`weigh_suspicions`."""
        self.suspect_is_closed = False
        """Whether it is then tried last."""
        self.kept: Candidate | None = None
        """The last candidate, while nothing in it has changed. Time changes that of a worker that is not IN, so that
        its is not kept."""
        self.refresh()

    @property
    def inflight(self) -> int:
        """In this process."""
        return self.prefill_inflight + self.decode_inflight + self.held

    @property
    def inflight_by_part(self) -> dict[str, int]:
        """In all processes."""
        return {
            Part.PREFILL.value: self.prefill_inflight + self.elsewhere.prefill,
            Part.DECODE.value: self.decode_inflight + self.elsewhere.decode,
        }

    @property
    def shown(self) -> InFlight:
        """What other processes are shown."""
        return InFlight(self.prefill_inflight, self.decode_inflight, self.held)

    @property
    def parts(self) -> frozenset[tuple[Part, str]]:
        """What it does, and for which model."""
        info = self.given.member.info
        can = {Part.PREFILL: info.role.can_prefill, Part.DECODE: info.role.can_decode}
        return frozenset((part, info.model) for part in can if can[part])

    @property
    def has_model(self) -> bool:
        return bool(self.worker.member.info.model)

    @property
    def is_offered(self) -> bool:
        """Whether placement gets to see it at all."""
        return not self.is_barred and self.worker.dialect in ENGINE_DIALECTS and self.has_model

    def refresh(self) -> None:
        """After a change of what is known of it: puts ``worker`` together anew."""
        member, aliases = self.given.member, self.given.aliases
        info, load = member.info, member.load
        identity = self.identity
        if identity is not None:
            model = info.model or (identity.models[0] if identity.models else "")
            aliases = aliases | frozenset(identity.models) - {model}
            info = dataclasses.replace(
                info, model=model, max_context_tokens=info.max_context_tokens or identity.max_context_tokens
            )
        if self.said is not None:
            load, block_tokens = load_of(self.said, identity or EngineIdentity())
            info = dataclasses.replace(info, block_tokens=block_tokens)
        member = dataclasses.replace(
            member,
            info=info,
            load=load,
            is_suspect=member.is_suspect and not self.is_suspicion_doubted,
            is_draining=member.is_draining or self.is_drained,
        )
        self.worker = dataclasses.replace(self.given, member=member, aliases=aliases)
        self.capacity: Capacity = capacity_of(member)
        skeleton = Candidate(
            member,
            ranks=self.worker.tensor_ranks,
            clips_answers=self.worker.dialect in CLIPPING_DIALECTS,
            known_capacity=self.capacity,
            is_alone=self.worker.dialect == EngineDialect.PLAIN,
            computes_alone=self.worker.dialect not in PAIRED_DIALECTS or info.role.can_prefill,
            aliases=aliases,
        )
        self._skeleton: dict[str, Any] = dict(skeleton.__dict__)
        self.kept = None

    def changed(self) -> None:
        """After a change of its health."""
        self.kept = None

    def claim(self, part: Part, count: int) -> None:
        """Count ``count`` more (or less) requests in flight."""
        if part is Part.PREFILL:
            self.prefill_inflight += count
        else:
            self.decode_inflight += count
        self.kept = None

    def hear(self, counts: InFlight) -> None:
        """So many requests are in flight in other processes."""
        self.elsewhere = counts
        self.kept = None

    def is_closed(self, now_s: float) -> bool:
        """Whether it is tried last."""
        return self.suspect_is_closed or (not self.health.is_steady and self.health.is_closed(now_s))

    def is_ready(self, now_s: float) -> bool:
        """Whether it gets as many requests as any other: none where placement passes it by, few where it is tried or
        starts slowly."""
        if not self.is_offered or self.health.state(now_s) is not HealthState.IN:
            return False
        made = self.kept or self.candidate(now_s)
        return is_placeable(made) and not made.is_last_choice

    def count(self, generated: float, now_s: float) -> None:
        """Its own count of tokens is so much now."""
        if self.generated is None or generated > self.generated:
            self.worked_s = now_s
        self.generated = generated

    def signs(self, now_s: float, *, heard_s: float, others: int) -> WorkerSigns:
        """What is known of it, for the silence of one of its streams."""
        return WorkerSigns(
            heard_s=heard_s,
            worked_s=-math.inf if self.worked_s is None else self.worked_s,
            counts_tokens=self.worked_s is not None,
            is_out=self.health.state(now_s) is HealthState.OUT,
            others=others + self.health.failures_in_a_row,
        )

    def candidate(self, now_s: float) -> Candidate:
        """Made anew; ``kept`` is the one to ask for first."""
        health = self.health
        # As the class's own initializer would, field by field, at a fifth of its time: this is done for each request.
        made = object.__new__(Candidate)
        fields = made.__dict__
        fields.update(self._skeleton)
        fields["prefill_inflight"] = self.prefill_inflight + self.elsewhere.prefill
        fields["decode_inflight"] = self.decode_inflight + self.elsewhere.decode
        if self.suspect_is_closed:
            fields["is_last_choice"] = True
        if not health.is_steady:
            fields["is_last_choice"] = self.is_closed(now_s)
            fields["share"] = health.share(now_s)
        if health.is_steady:
            self.kept = made
        return made

    def describe(self, now_s: float) -> dict[str, Any]:
        """JSON-able account, for the list of workers."""
        worker, member = self.worker, self.worker.member
        state = self.health.state(now_s)
        return {
            "agent_id": worker.agent_id,
            "incarnation": str(member.ref.incarnation),
            "source": str(worker.source),
            "role": member.info.role.value,
            "model": member.info.model,
            "aliases": sorted(worker.aliases),
            "http_url": worker.url,
            "dialect": str(worker.dialect),
            "bootstrap_port": worker.bootstrap_port,
            "dp_rank": worker.dp_rank,
            "max_context_tokens": member.info.max_context_tokens,
            "pool_tokens": self.capacity.pool_tokens,
            "is_ready": self.is_ready(now_s),
            "is_suspect": self.given.member.is_suspect,
            "is_draining": member.is_draining,
            "is_drained_here": self.is_drained,
            "is_last_choice": self.is_closed(now_s),
            "state": state.value,
            "health": {
                "ejected_for": self.health.ejected_for,
                "ejections": self.health.ejections,
                "failures_in_a_row": self.health.failures_in_a_row,
                "share": round(self.health.share(now_s), 3),
            },
            "trouble": self.trouble,
            "load": dataclasses.asdict(member.load),
            "inflight": {**self.inflight_by_part, "held": self.held + self.elsewhere.held},
        }


class ClaimOwner(Protocol):
    """What a claim tells: the fleet."""

    def succeeded(self, ref: AgentRef, request_id: str = "") -> None: ...
    def failed(self, ref: AgentRef, kind: str, request_id: str = "") -> None: ...
    def released(self, entry: WorkerEntry) -> None: ...


class WorkerClaim:
    """One request in flight at a worker, until ``release``; more calls of it do nothing.

    What became of the request is told by the claim while it is held: a released one is no trial any more, so that what
    was told of it would not bring its worker back.
    """

    __slots__ = ("_entry", "_owner", "_part", "is_trial", "ref", "request_id")

    def __init__(self, entry: WorkerEntry, part: Part, request_id: str, now_s: float, owner: ClaimOwner) -> None:
        self._entry: WorkerEntry | None = entry
        self.ref = entry.worker.ref
        self._part = part
        self._owner = owner
        self.request_id = request_id
        self.is_trial = not entry.health.is_steady and entry.health.begin(request_id, now_s)
        """Whether its verdict decides if the worker comes back."""
        entry.claim(part, 1)

    def succeeded(self) -> None:
        """As `Workers.succeeded`. Raises UsageError after ``release``."""
        self._check_held()
        self._owner.succeeded(self.ref, self.request_id)

    def failed(self, kind: str) -> None:
        """As `Workers.failed`. Raises UsageError after ``release``."""
        self._check_held()
        self._owner.failed(self.ref, kind, self.request_id)

    def release(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            if self.is_trial:
                entry.health.end(self.request_id)
            entry.claim(self._part, -1)
            self._owner.released(entry)

    def _check_held(self) -> None:
        if self._entry is None:
            raise UsageError(f"the claim on {self.ref} was released before it was told what became of the request")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class WorkerHold:
    """What a worker computed and another one reads, until ``release``; more calls of it do nothing."""

    __slots__ = ("_entry", "_on_change")

    def __init__(self, entry: WorkerEntry, on_change: Callable[[WorkerEntry], None]) -> None:
        self._entry: WorkerEntry | None = entry
        self._on_change = on_change
        entry.held += 1
        on_change(entry)

    def release(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.held -= 1
            self._on_change(entry)


def is_barred(worker: Worker, allowed: HostList) -> bool:
    """Whether its address is none that a request is sent to. Its source looked at it; no request follows one that is
    wrong all the same."""
    if not worker.url:
        return False
    try:
        host = HttpUrl.parse("http_url", worker.url).host
        if allowed and not allowed.allows(host):
            raise InvalidArgumentError(f"http_url names the host {host}, which allow_http_host does not")
    except InvalidArgumentError as error:
        log.warning("a worker gets no requests", extra={"agent_id": worker.agent_id, "reason": str(error)})
        return True
    return False


def weigh_suspicions(entries: Iterable[WorkerEntry], *, is_connected: bool) -> None:
    """Say of each worker whether a coordinator's suspicion keeps requests away from it.

    A coordinator that suspects all workers of a part says something of itself (it was cut off, or stood still) and
    nothing of them: they are tried as before. One that is not heard cannot take a suspicion back: until it is heard
    again its suspects are tried last.
    """
    leased = [entry for entry in entries if entry.given.has_lease]
    told_apart = {part for entry in leased if not entry.given.member.is_suspect for part in entry.parts}
    for entry in leased:
        tells_apart = entry.parts <= told_apart
        is_doubted = entry.given.member.is_suspect and not (is_connected and tells_apart)
        is_closed = is_doubted and tells_apart
        if (entry.is_suspicion_doubted, entry.suspect_is_closed) != (is_doubted, is_closed):
            entry.is_suspicion_doubted, entry.suspect_is_closed = is_doubted, is_closed
            entry.refresh()
