"""One prompt that is kept for others: its blocks, what is promised of them, and who has said what about it. Decides
nothing; `source` does.
"""

from __future__ import annotations

import dataclasses

from kvxfer.agent import Grant
from kvxfer.connectors.vllm.ids import is_rank_of
from kvxfer.connectors.vllm.wire import Ask
from kvxfer.observe import OpenSpan
from kvxfer.types import TransferId


@dataclasses.dataclass
class Reader:
    """One rank of the reading engine: it has been promised the blocks before ``sent``."""

    agent_id: str
    ask: Ask
    sent: int
    parts: int


@dataclasses.dataclass
class Hold:
    """One prompt: the blocks known so far, of which the first ``final`` are written and stay."""

    request_id: str
    transfer_id: TransferId
    reader: str | None
    content: bytes
    blocks: list[int]
    final: int
    total: int
    life_end_s: float
    """When it is over whatever anybody wants."""
    traceparent: str | None
    span: OpenSpan
    until_s: float | None = None
    """Set once vLLM has finished it: when it is over if nobody ever came for it."""
    readers: dict[int, Reader] = dataclasses.field(default_factory=dict)
    released: set[int] = dataclasses.field(default_factory=set)
    readers_expected: int = 0
    grants: dict[TransferId, Grant] = dataclasses.field(default_factory=dict)
    direct: set[TransferId] = dataclasses.field(default_factory=set)
    """Grants of the whole prompt that were not pulled yet."""
    was_reader_seen: bool = False
    heard_s: float | None = None
    """When a reader last said that it wants this."""

    @property
    def is_released(self) -> bool:
        """Whether every rank that would read it has said that it needs nothing more."""
        return 0 < self.readers_expected <= len(self.released)

    def may_be_read_by(self, agent_id: str) -> bool:
        """Whether that agent may have this prompt: any may where the request named none."""
        return self.reader is None or is_rank_of(agent_id, self.reader)
