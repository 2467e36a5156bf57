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
    engine.

    ``has_direct``: the source said that the whole prompt is granted already. ``traceparent``: of the request.
    ``incarnations``: those of the sources that have the prompt, and their signed ``agent_metadata``; empty where not
    said. ``is_open``: the source may have promised it to no engine, so that of several engines the first one has it.
    ``code`` and ``text``: the wait for it ended with that error, and so does this, at once."""

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
    code: str = ""
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RemotePrompt:
    """A request whose KV lies with the ranks ``sources`` of another engine, in those ``incarnations``, which
    ``agent_metadata`` describes. ``is_open`` as in :class:`LoadOrder`."""

    request_id: str
    transfer_id: TransferId
    sources: tuple[str, ...]
    incarnations: tuple[Incarnation, ...] = ()
    agent_metadata: tuple[str, ...] = ()
    is_open: bool = False


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
    """The next blocks of an open prompt that are final once the coming forward has run: it completes them, or they
    are of a prompt that began alike."""

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
    """A prompt's blocks, if it has any, go to others with this very step. ``will_resume``: it will be back."""

    request_id: str
    transfer_id: TransferId
    reason: str
    will_resume: bool
    code: str = GrantRevokedError.code
    """Of the error that its reader is told."""


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
    """A prompt waits to be computed here, and others may know its transfer id."""

    request_id: str
    transfer_id: TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class Revoke:
    """A prompt that is kept for others is taken back: its blocks are vLLM's, as soon as no grant over them is alive."""

    request_id: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class StepOrders:
    """Everything that the scheduler half wants of the worker half in one step."""

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
    """What became of one load at one rank; ``code`` is empty where it was committed."""

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
    """In which blocks were read, and from the last byte to the verdict: added up over its parts, which may overlap; of
    the slowest source. On stream and unix a read begins when the first bytes of a frame are there."""
    early_bytes: int
    """Landed before the source had computed everything."""
    attempts: int
    """More than one where the source took back what it had promised."""


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """How it stands with a request that waits: ``is_known`` to its source's engine; ``is_over``, where there is a grant
    or, with the ``code`` of an error, will be none. It waited ``seconds`` so far."""

    request_id: str
    is_known: bool
    is_over: bool = False
    code: str = ""
    text: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class News:
    """What the scheduler half should know of the worker with the agent ``agent_id``, and has not heard yet."""

    agent_id: str
    weights_why: str | None
    """Why it is not known which weights it has; ``None``: it is."""
    agent_metadata: str
    """Signed, as of now; empty without option ``discovery``."""
    adapters: tuple[AdapterLoad, ...]
    """It loaded."""
    standings: tuple[Standing, ...] = ()
    """Of requests that wait."""
    read: tuple[str, ...] = ()
    """Prompts of this engine whose reader began to read."""
