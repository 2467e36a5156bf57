"""One prompt that is kept for a reader: its blocks, the grants over them, and what each reader has said. Decides
nothing; `source` does."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from kvxfer.agent import Grant
from kvxfer.connectors.common.ids import engine_of, is_rank_of, rank_agent
from kvxfer.connectors.vllm.steps import Finish, Open
from kvxfer.connectors.vllm.wire import Ask
from kvxfer.errors import KvxferError
from kvxfer.observe import OpenSpan
from kvxfer.types import TransferId

ENDED_MAX = 4096
"""Prompts that are over and still known by how they ended."""


@dataclasses.dataclass
class SendReader:
    """One rank of the reading engine. The blocks before ``sent`` have been granted to it."""

    agent_id: str
    ask: Ask
    sent: int
    parts: int


@dataclasses.dataclass
class PendingSend:
    """One prompt: the blocks known so far, of which the first ``final`` are written and stay."""

    request_id: str
    transfer_id: TransferId
    reader: str | None
    """The first agent of the engine that may read it: named by the request, or the first that came."""
    content_digest: bytes
    blocks: list[int]
    final: int
    total: int
    lease_end_s: float
    """When it is over in any case."""
    traceparent: str | None
    span: OpenSpan
    until_s: float | None = None
    """Set once vLLM has finished it: when it is over if no reader ever came for it."""
    readers: dict[int, SendReader] = dataclasses.field(default_factory=dict)
    released: set[int] = dataclasses.field(default_factory=set)
    readers_expected: int = 0
    grants: dict[TransferId, Grant] = dataclasses.field(default_factory=dict)
    decisive: Grant | None = None
    """The grant of the whole prompt in the first storage: the first engine that comes for it is the reader."""
    direct: set[TransferId] = dataclasses.field(default_factory=set)
    """Grants of the whole prompt that were not pulled yet."""
    takers: set[str] = dataclasses.field(default_factory=set)
    """Engines that pulled one of those."""
    was_named: bool = False
    """Whether the request named its reader. Then its grants are bound from the beginning, which says nothing about the
    reader."""
    was_reader_seen: bool = False
    has_told_read: bool = False
    """The scheduler half will hear that its reader has begun."""
    heard_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """When an engine last said that it wants this prompt: the reader or, while there is none, any agent."""

    @classmethod
    def of(cls, order: Open | Finish, total: int, lease_end_s: float, blocks: Sequence[int] = ()) -> PendingSend:
        """A new one; ``blocks`` of it are known."""
        return cls(
            request_id=order.request_id,
            transfer_id=order.transfer_id,
            reader=order.reader,
            was_named=order.reader is not None,
            content_digest=order.content_digest,
            blocks=list(blocks),
            final=0,
            total=total,
            lease_end_s=lease_end_s,
            traceparent=order.traceparent,
            span=OpenSpan(
                "kvxfer.send",
                order.traceparent,
                request_id=order.request_id,
                transfer_id=str(order.transfer_id),
                blocks=total,
            ),
        )

    @property
    def is_read(self) -> bool:
        """Whether its reader has begun: it requested blocks, or pulled the whole prompt."""
        if self.readers or self.released or self.takers:
            return True
        return not self.was_named and self.decisive is not None and self.decisive.bound is not None

    @property
    def is_released(self) -> bool:
        """Whether every rank of the reader has said that it needs nothing more."""
        return 0 < self.readers_expected <= len(self.released)

    def find_reader(self, rank: int) -> str | None:
        """The engine that may read it; ``None`` while any may. ``rank`` of this engine is read by the same rank
        there."""
        if self.reader is None and self.decisive is not None and (bound := self.decisive.bound) is not None:
            self._settle_on(engine_of(bound, rank))
        return self.reader

    def is_reader(self, engine: str, rank: int) -> bool:
        """Whether ``engine``, which asks for it, may read it. If the request named no reader, the first engine that
        asks is the reader, and from then on no other."""
        if self.reader is None:
            bound = None if self.decisive is None else self.decisive.bind(rank_agent(engine, rank))
            self._settle_on(engine if bound is None else engine_of(bound, rank))
        return self.reader == engine

    def _settle_on(self, engine: str) -> None:
        self.reader = engine
        heard = [at_s for agent_id, at_s in self.heard_s.items() if is_rank_of(agent_id, engine)]
        self.heard_s = {engine: max(heard)} if heard else {}

    def hear(self, agent_id: str, now_s: float) -> None:
        """An agent wants this prompt. It may have to wait for its turn, so it is no reader yet."""
        if self.reader is None:
            self.heard_s[agent_id] = now_s
        elif is_rank_of(agent_id, self.reader):
            self.heard_s[self.reader] = now_s

    def put_off(self, by_s: float) -> None:
        """This process did not run for this time, so it could not hear what agents said meanwhile."""
        if by_s:
            self.heard_s = {agent_id: at_s + by_s for agent_id, at_s in self.heard_s.items()}

    def is_wanted_beside(self, engine: str) -> bool:
        """Whether another engine has lately said that it wants this prompt, while there is no reader."""
        return self.reader is None and any(not is_rank_of(agent_id, engine) for agent_id in self.heard_s)

    def forget(self, agent_id: str) -> None:
        """That agent no longer wants this prompt; for a prompt without a reader."""
        if self.reader is None:
            self.heard_s.pop(agent_id, None)


class Ended:
    """How prompts ended lately, and which engine was the reader of each."""

    def __init__(self) -> None:
        self._how: collections.OrderedDict[TransferId, tuple[KvxferError, str | None]] = collections.OrderedDict()

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._how

    def remember(self, transfer_id: TransferId, how: KvxferError, reader: str | None) -> None:
        """It ended so."""
        self._how[transfer_id] = (how, reader)
        while len(self._how) > ENDED_MAX:
            self._how.popitem(last=False)

    def forget(self, transfer_id: TransferId) -> None:
        """It is here again."""
        self._how.pop(transfer_id, None)

    def find(self, transfer_id: TransferId) -> tuple[KvxferError | None, str | None]:
        """How it ended, and its reader; neither where that is not known."""
        return self._how.get(transfer_id, (None, None))
