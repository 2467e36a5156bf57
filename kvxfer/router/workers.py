"""What this router knows of the workers: the last membership, its own requests in flight, and who could not be reached.

Fails static: while the coordinator is away the last membership stands. It must never choose a worker: it makes the
frozen snapshot over which `policy.place` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import itertools
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from kvxfer.errors import InvalidArgumentError
from kvxfer.policy.backoff import Backoff
from kvxfer.policy.capacity import Capacity, capacity_of
from kvxfer.policy.place import Candidate, is_placeable
from kvxfer.protocol.http_url import HostList, HttpUrl
from kvxfer.router.dialects import CLIPPING, DIALECTS, VLLM
from kvxfer.types import AgentRef, Member, Membership

log = logging.getLogger("kvxfer.router")

_DATA_PARALLEL = re.compile(r"_dp([0-9]{1,9})$")


class Part(enum.StrEnum):
    """What a worker does for one request."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclasses.dataclass
class _Aside:
    failures: int
    until_s: float


@dataclasses.dataclass(frozen=True)
class WorkersStatistics:
    """Counts of what the router knows; the ready are those that placement may give new work."""

    is_connected: bool
    revision: int
    members: int
    prefill_ready: int
    decode_ready: int
    aside: int
    inflight: int


class Workers:
    """The router's view of the workers. Lives on one event loop; ``now`` is a monotonic clock in seconds."""

    def __init__(
        self,
        *,
        aside: Backoff | None = None,
        allowed: HostList | None = None,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._allowed = allowed or HostList("allow_http_host", ())
        self._barred: frozenset[AgentRef] = frozenset()
        """Those whose HTTP address is none that a request is sent to."""
        self._backoff = aside or Backoff(base_s=1.0, cap_s=15.0)
        self._now = now
        self._draw = draw
        self._members: dict[AgentRef, Member] = {}
        self._capacities: dict[AgentRef, Capacity] = {}
        self._followers: frozenset[str] = frozenset()
        """Names of vLLM's agents without HTTP of their own."""
        self._front_ends: Counter[str] = Counter()
        """How many of vLLM's engines each HTTP address has."""
        self._revision = 0
        self._inflight: Counter[tuple[AgentRef, Part]] = Counter()
        self._aside: dict[AgentRef, _Aside] = {}
        self._gone: dict[AgentRef, set[asyncio.Event]] = {}
        self.is_connected = False
        """Whether the coordinator is being heard."""

    def update(self, membership: Membership) -> None:
        """Take a whole new view; a life that it does not list has ended."""
        ended = set(self._members) - {member.ref for member in membership.members}
        self._members = {member.ref: member for member in membership.members}
        self._capacities = {ref: capacity_of(member) for ref, member in self._members.items()}
        self._followers = frozenset(
            member.ref.agent_id
            for member in membership.members
            if member.info.dialect == VLLM and not member.info.http_url
        )
        self._bar({member.ref: member.info.http_url for member in membership.members if member.info.http_url})
        self._front_ends = Counter(m.info.http_url for m in membership.members if m.info.dialect == VLLM)
        self._revision = membership.revision
        for ref in ended:
            self._aside.pop(ref, None)
            for event in self._gone.pop(ref, ()):
                event.set()

    def _bar(self, urls: dict[AgentRef, str]) -> None:
        """The coordinator looked at these addresses when they were registered; no request follows one that is wrong."""
        barred: set[AgentRef] = set()
        for ref, text in urls.items():
            try:
                host = HttpUrl.parse("http_url", text).host
                if self._allowed and not self._allowed.allows(host):
                    raise InvalidArgumentError(f"http_url names the host {host}, which allow_http_host does not")
            except InvalidArgumentError as error:
                barred.add(ref)
                if ref not in self._barred:
                    log.warning("a worker gets no requests", extra={"agent_id": ref.agent_id, "reason": str(error)})
        self._barred = frozenset(barred)

    def candidates(self) -> tuple[Candidate, ...]:
        """The frozen snapshot for one placement.

        A coordinator that is not heard cannot take a suspicion back: until it is heard again its suspects are only
        tried last, and where it left with everybody under suspicion, that says something of it and nothing of them.
        """
        doubts = not self.is_connected
        tells_apart = not all(member.is_suspect for member in self._members.values())
        return tuple(
            Candidate(
                member=dataclasses.replace(member, is_suspect=False) if doubts and member.is_suspect else member,
                prefill_inflight=self._inflight[ref, Part.PREFILL],
                decode_inflight=self._inflight[ref, Part.DECODE],
                is_aside=self.is_aside(ref) or (doubts and member.is_suspect and tells_apart),
                ranks=self.ranks(member),
                clips_answers=member.info.dialect in CLIPPING,
                known_capacity=self._capacities[ref],
            )
            for ref, member in self._members.items()
            if member.info.dialect in DIALECTS and ref not in self._barred
        )

    def ranks(self, member: Member) -> int:
        """How many agents its engine has: its own, and with vLLM those that follow it by number without HTTP of their
        own."""
        if member.info.dialect != VLLM:
            return 1
        return next(rank for rank in itertools.count(1) if f"{member.ref.agent_id}.{rank}" not in self._followers)

    def data_parallel_rank(self, member: Member) -> int | None:
        """Which engine it is behind an HTTP address that several share, by the rank at the end of the name that vLLM
        gave it; None where it is alone there."""
        named = _DATA_PARALLEL.search(member.ref.agent_id)
        if named is None or member.info.dialect != VLLM or self._front_ends[member.info.http_url] < 2:
            return None
        return int(named[1])

    def members(self) -> tuple[Member, ...]:
        """All known members, by agent id."""
        return tuple(sorted(self._members.values(), key=lambda member: member.ref))

    def models(self) -> tuple[str, ...]:
        """Names of the models that some worker with an HTTP address serves."""
        return tuple(sorted({m.info.model for m in self.members() if m.info.http_url and m.ref not in self._barred}))

    @contextlib.contextmanager
    def working(self, ref: AgentRef, part: Part) -> Iterator[None]:
        """Count one request in flight at ``ref`` for as long as the block runs."""
        self._inflight[ref, part] += 1
        try:
            yield
        finally:
            self._inflight[ref, part] -= 1
            if not self._inflight[ref, part]:
                del self._inflight[ref, part]

    def put_aside(self, ref: AgentRef) -> None:
        """``ref`` could not be reached: try it last for a while, longer each time in a row."""
        if ref not in self._members or self.is_aside(ref):
            return
        failures = self._aside[ref].failures + 1 if ref in self._aside else 1
        delay_s = self._backoff.delay_s(failures, random=self._draw())
        self._aside[ref] = _Aside(failures, self._now() + delay_s)

    def reached(self, ref: AgentRef) -> None:
        """``ref`` answered: forget that it could not be reached."""
        self._aside.pop(ref, None)

    def is_aside(self, ref: AgentRef) -> bool:
        aside = self._aside.get(ref)
        return aside is not None and self._now() < aside.until_s

    @contextlib.contextmanager
    def watching(self, ref: AgentRef) -> Iterator[asyncio.Event]:
        """An event that is set when the coordinator says that this very life has ended."""
        event = asyncio.Event()
        watchers = self._gone.setdefault(ref, set())
        watchers.add(event)
        if ref not in self._members:
            event.set()
        try:
            yield event
        finally:
            watchers.discard(event)
            if not watchers and self._gone.get(ref) is watchers:
                del self._gone[ref]

    def inflight(self) -> dict[tuple[str, str], int]:
        """Requests in flight by (agent id, part); known workers are listed with 0 as well."""
        counts = {(ref.agent_id, part.value): 0 for ref in self._members for part in Part}
        for (ref, part), count in self._inflight.items():
            counts[ref.agent_id, part.value] = counts.get((ref.agent_id, part.value), 0) + count
        return counts

    def describe(self) -> list[dict[str, Any]]:
        """JSON-able account of every known worker, for ``GET /v1/workers``."""
        ready = {candidate.member.ref for candidate in self.candidates() if is_placeable(candidate)}
        return [
            {
                "agent_id": member.ref.agent_id,
                "incarnation": str(member.ref.incarnation),
                "role": member.info.role.value,
                "model": member.info.model,
                "http_url": member.info.http_url,
                "dialect": member.info.dialect,
                "max_context_tokens": member.info.max_context_tokens,
                "pool_tokens": self._capacities[member.ref].pool_tokens,
                "is_ready": member.ref in ready,
                "is_suspect": member.is_suspect,
                "is_draining": member.is_draining,
                "is_aside": self.is_aside(member.ref),
                "load": dataclasses.asdict(member.load),
                "inflight": {part.value: self._inflight[member.ref, part] for part in Part},
            }
            for member in self.members()
        ]

    def statistics(self) -> WorkersStatistics:
        placeable = [candidate.member for candidate in self.candidates() if is_placeable(candidate)]
        return WorkersStatistics(
            is_connected=self.is_connected,
            revision=self._revision,
            members=len(self._members),
            prefill_ready=sum(m.info.role.can_prefill for m in placeable),
            decode_ready=sum(m.info.role.can_decode for m in placeable),
            aside=sum(self.is_aside(ref) for ref in self._members),
            inflight=self._inflight.total(),
        )

    def __repr__(self) -> str:
        return f"Workers(revision={self._revision}, members={len(self._members)}, is_connected={self.is_connected})"
