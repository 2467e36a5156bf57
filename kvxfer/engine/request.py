"""What a request is while the engine works on it: the frozen ask, the mutable sequence, and what comes out.

It decides nothing but the arithmetic of one request (how many blocks its prompt fills, what is still to be computed).
It must never know of other requests, of threads or of HTTP.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.errors import InvalidArgumentError, KvxferError
from kvxfer.types import TransferId, check_agent_id

if TYPE_CHECKING:
    from kvxfer.engine.sampling import SamplingParams


class Leg(enum.StrEnum):
    """Which part of a request this worker does."""

    LOCAL = "local"
    PREFILL = "prefill"
    DECODE = "decode"


class Phase(enum.StrEnum):
    """Where a sequence stands. ASKING: a decode leg whose grant is not known to exist. GRANTED: it exists, and the
    sequence has no blocks yet. HOLDING: a prefill leg whose answer is out and whose blocks a grant still keeps."""

    WAITING = "waiting"
    ASKING = "asking"
    GRANTED = "granted"
    PULLING = "pulling"
    COMPUTING = "computing"
    HOLDING = "holding"
    ENDED = "ended"

    @property
    def is_remote(self) -> bool:
        """Whether a pull is under way for it."""
        return self in (Phase.ASKING, Phase.GRANTED, Phase.PULLING)


class FailurePolicy(enum.StrEnum):
    """What a decode leg does when its transfer fails."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


def blocks_for(tokens: int, block_tokens: int) -> int:
    """How many blocks hold ``tokens`` tokens."""
    return -(-tokens // block_tokens)


@dataclasses.dataclass(frozen=True)
class OtherLeg:
    """The other leg of a request: with which agent, under which transfer."""

    transfer_id: TransferId
    agent_id: str
    attempt: int = 1
    timeout_s: float | None = None
    """How long a decode leg waits for its grant; ``None``: as long as the worker's option says."""

    def __post_init__(self) -> None:
        check_agent_id(self.agent_id)


@dataclasses.dataclass(frozen=True)
class Request:
    """One ask of the engine. A PREFILL leg ignores ``params``; PREFILL and DECODE legs need ``remote``."""

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    leg: Leg = Leg.LOCAL
    remote: OtherLeg | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InvalidArgumentError("a request needs at least one prompt token")
        if (self.leg is Leg.LOCAL) != (self.remote is None):
            raise InvalidArgumentError(f"a {self.leg} leg {'takes no' if self.remote else 'needs a'} remote half")


@dataclasses.dataclass
class TransferReport:
    """What became of the remote half, as the client reads it under ``kvxfer``."""

    transfer_id: str | None = None
    prefill: str = "local"
    reason: str = "no remote prefill was asked for"
    blocks_moved: int = 0
    bytes_moved: int = 0
    bytes_before_prefill_end: int = 0
    lane: str | None = None
    lane_reason: str | None = None
    transfer_s: float = 0.0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    failure: str | None = None


class Sequence:
    """One request in the engine, until it ends. Used by the engine thread alone.

    ``tokens`` is the prompt and what was generated; the KV of the first ``computed`` of them stands in ``blocks``, of
    which the first ``matched`` are shared. ``cached_tokens`` is what the prefix cache gave at the first admission; -1
    before that.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "computed",
        "digests",
        "first_token_s",
        "grant",
        "held_ns",
        "leg",
        "matched",
        "output",
        "phase",
        "preemptions",
        "prompt_tokens",
        "published",
        "report",
        "request",
        "started_s",
        "submitted_s",
        "tokens",
    )

    def __init__(self, request: Request, *, submitted_s: float = 0.0) -> None:
        self.request = request
        self.leg = request.leg
        self.phase = Phase.WAITING
        self.tokens = list(request.token_ids)
        self.prompt_tokens = len(self.tokens)
        self.computed = 0
        self.blocks: list[int] = []
        self.matched = 0
        self.published = 0
        self.digests: list[bytes] | None = None
        self.cached_tokens = -1
        self.preemptions = 0
        self.grant: Any = None
        self.held_ns = 0
        """Since when it is held; of the monotonic clock."""
        self.output: Any = None
        self.report = TransferReport()
        self.submitted_s = submitted_s
        self.started_s = 0.0
        self.first_token_s = 0.0
        if request.remote is not None:
            self.report.transfer_id = str(request.remote.transfer_id)

    def __repr__(self) -> str:
        return f"<Sequence {self.request.request_id} {self.leg} {self.phase}: {self.computed} of {self.target} tokens>"

    @property
    def target(self) -> int:
        """How many tokens' KV the next sampling, or the end of a prefill leg, needs."""
        return self.prompt_tokens - 1 if self.leg is Leg.PREFILL else len(self.tokens)

    @property
    def content_digest(self) -> bytes:
        """SHA-256 of the token ids (uint32, little-endian) whose KV moves: both sides must mean the same prompt."""
        return hashlib.sha256(np.asarray(self.tokens[: self.prompt_tokens - 1], dtype="<u4").tobytes()).digest()

    @property
    def remaining(self) -> int:
        """Tokens still to be computed before the next sampling, or before a prefill leg is done."""
        return self.target - self.computed

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]


@dataclasses.dataclass(frozen=True)
class Delta:
    """A piece of an answer: newly certain text, the tokens it took, and why it ended if it did."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished request says of itself."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float
    ttft_s: float
    total_s: float
    ended_unix_s: float
    report: TransferReport

    def as_dict(self) -> dict[str, Any]:
        """The ``kvxfer`` object of a decode answer."""
        return {
            **dataclasses.asdict(self.report),
            "ttft_s": round(self.ttft_s, 6),
            "queue_s": round(self.queue_s, 6),
            "total_s": round(self.total_s, 6),
            "ended_unix_s": self.ended_unix_s,
            "cached_tokens": self.cached_tokens,
        }


@dataclasses.dataclass(frozen=True)
class PrefillOutcome:
    """What a finished prefill leg says of itself."""

    prompt_tokens: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    ended_unix_s: float


Event = Delta | Outcome | PrefillOutcome | KvxferError
"""What the engine thread sends to a request's owner. An Outcome, a PrefillOutcome or an error is the last one."""
