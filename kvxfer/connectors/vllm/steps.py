"""The messages between the two halves of the connector in each engine step. Plain frozen values: vLLM carries them from
process to process.

Blocks are vLLM's block ids in the order of the prompt; ``first`` counts blocks of the prompt.
"""

from __future__ import annotations

import dataclasses

from kvxfer.connectors.vllm.loaded import AdapterLoad
from kvxfer.errors import GrantRevokedError
from kvxfer.types import Incarnation, TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class LoadOrder:
    """Fetch blocks ``first..`` of a prompt of ``tokens`` tokens into ``blocks`` from the ranks ``sources`` of another
    engine. ``has_direct``: the source has granted the whole prompt. ``traceparent``: the request's. ``incarnations``:
    those of the sources that have the prompt, and their signed ``agent_metadata``; empty if unknown. ``stages``: where
    each pipeline stage of theirs ends (:func:`.shares.stages_of`). ``is_open``: the request names no reader at the
    source, so of several engines the first that asks gets the prompt. ``code`` and ``text``: the wait for the prompt
    ended with that error, and so does this load, at once."""

    request_id: str
    transfer_id: TransferId
    sources: tuple[str, ...]
    first: int
    blocks: tuple[int, ...]
    tokens: int
    content_digest: bytes
    has_direct: bool
    traceparent: str | None = None
    incarnations: tuple[Incarnation, ...] = ()
    agent_metadata: tuple[str, ...] = ()
    is_open: bool = False
    stages: str = ""
    code: str = ""
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RemotePrompt:
    """A request whose KV lies with the ranks ``sources`` of another engine, in those ``incarnations``, which
    ``agent_metadata`` describes. ``is_open`` and ``stages`` as in :class:`LoadOrder`."""

    request_id: str
    transfer_id: TransferId
    sources: tuple[str, ...]
    incarnations: tuple[Incarnation, ...] = ()
    agent_metadata: tuple[str, ...] = ()
    is_open: bool = False
    stages: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Open:
    """A prompt of ``total`` blocks that is computed here for another engine."""

    request_id: str
    transfer_id: TransferId
    reader: str | None
    total: int
    content_digest: bytes
    traceparent: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """The next blocks of an open prompt that are final after the coming forward: it computes them, or they belong to an
    earlier prompt with the same beginning."""

    request_id: str
    blocks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """A prompt is computed and stays in ``blocks`` until the worker half says that no engine needs it any more."""

    request_id: str
    transfer_id: TransferId
    reader: str | None
    blocks: tuple[int, ...]
    content_digest: bytes
    traceparent: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Close:
    """A prompt loses its blocks, if it has any, in this step. ``will_resume``: it will be computed again."""

    request_id: str
    transfer_id: TransferId
    reason: str
    will_resume: bool
    code: str = GrantRevokedError.code
    """The code of the error that its reader gets."""


@dataclasses.dataclass(frozen=True, slots=True)
class WaitOrder:
    """A request waits here, without blocks, until the engine with the first agent ``source`` begins its prompt; for at
    most ``timeout_s``."""

    request_id: str
    transfer_id: TransferId
    source: str
    timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Accept:
    """A prompt waits to be computed here, and other engines may know its transfer id."""

    request_id: str
    transfer_id: TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class Revoke:
    """A prompt that is kept for another engine is revoked: its blocks return once no grant over them is alive."""

    request_id: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class StepOrders:
    """All orders of the scheduler half to the worker half in one step."""

    has_forward: bool = False
    closes: tuple[Close, ...] = ()
    opens: tuple[Open, ...] = ()
    chunks: tuple[ComputedBlocks, ...] = ()
    finishes: tuple[Finish, ...] = ()
    keeps: tuple[RemotePrompt, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    cancels: tuple[str, ...] = ()
    releases: tuple[RemotePrompt, ...] = ()
    waits: tuple[WaitOrder, ...] = ()
    accepts: tuple[Accept, ...] = ()
    revokes: tuple[Revoke, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one load at one rank; ``code`` is empty if it was committed."""

    request_id: str
    transfer_id: str
    code: str
    text: str
    lane: str
    blocks: int
    bytes: int
    parts: int
    seconds: float
    """From the order to the last byte's commit, or to the failure."""
    wire_seconds: float
    """Time in which blocks were read, and from the last byte to the verdict, added up over its parts, which may
    overlap; of the slowest source. On stream and unix a read begins when the first bytes of a frame are there."""
    early_bytes: int
    """Bytes that landed before the source had computed everything."""
    attempts: int
    """More than one if the source revoked its grants meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """The state of a request that waits. ``is_known``: its source's engine knows the prompt. ``is_over``: there is a
    grant or, with the ``code`` of an error, there will be none. It has waited for ``seconds``."""

    request_id: str
    is_known: bool
    is_over: bool = False
    code: str = ""
    text: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class News:
    """News of the worker with the agent ``agent_id`` for the scheduler half."""

    agent_id: str
    weights_why: str | None
    """Why its weights are unknown; ``None``: they are known."""
    agent_metadata: str
    """Signed, as of now; empty without option ``discovery``."""
    adapters: tuple[AdapterLoad, ...]
    """It loaded."""
    standings: tuple[Standing, ...] = ()
    """States of waiting requests."""
    read: tuple[str, ...] = ()
    """Prompts of this engine whose reader began to read."""
