"""What the scheduler half knows of one request, and its report when the transfer is over. Decides nothing; `scheduler`
does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvxfer.connectors.common.ids import content_of
from kvxfer.connectors.vllm.groups import KvGroups, Sequenced
from kvxfer.connectors.vllm.params import Declined, DecodeLeg
from kvxfer.connectors.vllm.steps import LoadOrder, Open, RemotePrompt, Report, Standing, WaitOrder
from kvxfer.errors import InvalidArgumentError
from kvxfer.types import TransferId

NOT_RUNNING = ("WAITING", "PREEMPTED", "WAITING_FOR_REMOTE_KVS")
"""vLLM's states of requests that its next step may give blocks to."""


@dataclasses.dataclass
class Prefill:
    """A request whose prompt another engine will fetch: the first ``tokens`` tokens of it, which are the blocks of
    ``sequence``; no blocks: it is not kept."""

    request: Any
    transfer_id: TransferId
    reader: str | None
    tokens: int
    sequence: Sequenced
    content_digest: bytes
    traceparent: str | None
    tables: list[list[int]] = dataclasses.field(default_factory=list)
    """The block ids that vLLM gave it, by group."""
    blocks: int = 0
    """How many blocks of ``sequence`` were announced to the worker half as computed."""
    is_open: bool = False
    """Whether the worker half grants its blocks while they are computed."""
    adapter: str = ""
    """The fingerprint of its LoRA adapter when it came."""
    is_read: bool = False
    """Its reader has begun, at some rank."""
    is_accepted: bool = False
    """The worker half knows that it waits: other engines may know its transfer id."""
    why_unknown: str | None = None
    """Why it is unknown which weights or adapter it is computed with; such a prompt is not kept."""
    refusal: Declined | None = None
    """Why the request is one whose prompt is not kept."""

    @property
    def total(self) -> int:
        """How many blocks the prompt has."""
        return len(self.sequence)


@dataclasses.dataclass
class Decode:
    """A request whose prompt another engine computes."""

    request: Any
    leg: DecodeLeg
    request_id: str
    tokens: int
    content_digest: bytes
    traceparent: str | None
    computed: int = 0
    """Tokens that vLLM had when it last asked; the load begins after them."""
    is_offered: bool = False
    """Whether vLLM was told then that there are more to load."""
    is_waiting: bool = False
    """Whether its source has not begun it; it gets no blocks."""
    is_known: bool = False
    """Whether its source's engine has it in its queue."""
    is_loading: bool = False
    cached: int | None = None
    """How many of its tokens were in this engine's own cache, if the rest is loaded."""
    is_settled: bool = False
    """Whether it is loaded, released, or will never be loaded."""
    adapter: str = ""
    """The fingerprint of its LoRA adapter when it came."""
    failure: Standing | None = None
    """How the wait for it ended, if vLLM has to decide what becomes of the request."""
    first: Decode | None = None
    """Another request that loads the same prompt: this one is computed here after that load, with what is cached by
    then."""
    reports: list[Report] = dataclasses.field(default_factory=list)

    @property
    def lacks_blocks(self) -> bool:
        """Whether it waits only for vLLM: for blocks or, if vLLM did not look at it in the last step, perhaps for a
        place among the running requests."""
        if self.is_waiting or self.is_loading or (self.first is not None and not self.first.is_settled):
            return False
        return self.request.status.name in NOT_RUNNING

    @property
    def lacks_more(self) -> bool:
        """As :attr:`lacks_blocks`, of a request whose prompt was loaded. It needs blocks for its own tokens, and vLLM
        does not report that it has none."""
        return self.cached is not None and self.lacks_blocks


class Gauges(NamedTuple):
    """Requests that wait for prompts of other engines, by what their sources report: ``unknown``, ``queued`` or, if
    they lack only blocks here, ``granted``. ``blocks_unread``: blocks kept for readers that have not begun to read."""

    unknown: int
    queued: int
    granted: int
    blocks_unread: int


def gauges_of(decodes: Iterable[Decode], blocks_unread: int) -> Gauges:
    """The gauges of one engine."""
    unknown = queued = granted = 0
    for decode in decodes:
        if decode.is_waiting:
            unknown += not decode.is_known
            queued += decode.is_known
        elif not decode.is_settled and decode.lacks_blocks:
            granted += 1
    return Gauges(unknown, queued, granted, blocks_unread)


def wait_of(decode: Decode, grant_wait_s: float) -> WaitOrder:
    """The order to wait until its source begins the prompt: as long as its leg says, else ``grant_wait_s``."""
    leg = decode.leg
    timeout_s = grant_wait_s if leg.timeout_s is None else leg.timeout_s
    return WaitOrder(decode.request_id, leg.transfer_id, leg.sources[0], timeout_s)


def open_of(prefill: Prefill) -> Open:
    """The order that opens it."""
    return Open(
        prefill.request.request_id,
        prefill.transfer_id,
        prefill.reader,
        prefill.total,
        prefill.content_digest,
        prefill.traceparent,
    )


def why_not_kept(groups: KvGroups, request: Any) -> Declined | None:
    """Why a prompt cannot be kept, though it is computed here: with each token after the prompt, vLLM gives away what a
    window has left behind, and overwrites states."""
    if not groups.forgets:
        return None
    if getattr(request, "max_tokens", 1) != 1:
        text = "a prefill leg of a model with sliding windows, chunks or states must have max_tokens 1"
        return Declined(InvalidArgumentError.code, text)
    if getattr(request, "skip_reading_prefix_cache", False):
        text = "what a prompt's last token depends on is not kept where prompt_logprobs need that token too"
        return Declined(InvalidArgumentError.code, text)
    return None


def drop_last_token(request: Any) -> None:
    """Make a prefill leg compute all but the last token of its prompt, where vLLM forgets. The reader computes that
    token: from the state before it, and with the first block of its window, which vLLM may give away once the token is
    computed. vLLM samples another token then; a prefill leg's answer has no reader."""
    request.prompt_token_ids = request.prompt_token_ids[:-1]  # the front end may have the same list
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1


def contents_of(request: Any, tokens: int, ranks: int, adapter: str) -> bytes:
    """What the blocks of a prompt's first ``tokens`` tokens depend on: these tokens, the LoRA adapter, and images and
    the like, which have equal placeholders. Embeddings instead of tokens are not compared: such prompts are neither
    kept nor fetched."""
    ids = (request.prompt_token_ids or ())[:tokens]
    beside = [adapter]
    for feature in getattr(request, "mm_features", None) or ():
        beside += [feature.modality, feature.identifier, str(feature.mm_position.offset)]
    return content_of(ids, ranks, beside)


def about(decode: Decode, code: str) -> dict[str, str]:
    """The extra fields of a log line."""
    return {"request_id": decode.request_id, "transfer_id": str(decode.leg.transfer_id), "code": code}


def remote(decode: Decode) -> RemotePrompt:
    leg = decode.leg
    return RemotePrompt(
        decode.request_id, leg.transfer_id, leg.sources, leg.incarnations, leg.agent_metadata, leg.is_open, leg.stages
    )


def load_of(decode: Decode, first: int, blocks: tuple[int, ...], *, has_direct: bool) -> LoadOrder:
    """Order its blocks from the ``first`` on, into ``blocks``."""
    leg = decode.leg
    return LoadOrder(
        decode.request_id,
        leg.transfer_id,
        leg.sources,
        first,
        blocks,
        decode.tokens,
        decode.content_digest,
        has_direct,
        decode.traceparent,
        leg.incarnations,
        leg.agent_metadata,
        leg.is_open,
        leg.stages,
        "" if decode.failure is None else decode.failure.code,
        "" if decode.failure is None else decode.failure.text,
    )


def account(decode: Decode) -> dict[str, Any] | None:
    """The report of its transfer for the client: of the slowest rank, or of the first that failed."""
    if not decode.reports:
        return None
    values = dataclasses.asdict(worst(decode.reports))
    del values["request_id"]
    if decode.cached is not None:
        values["cached_tokens"] = decode.cached
    return {"kvxfer": values}


def not_tried(decode: Decode, code: str, text: str, seconds: float) -> Report:
    """The report of a load that was never ordered."""
    return Report(
        request_id=decode.request_id,
        transfer_id=str(decode.leg.transfer_id),
        code=code,
        text=text,
        lane="",
        blocks=0,
        bytes=0,
        parts=0,
        seconds=seconds,
        wire_seconds=0.0,
        early_bytes=0,
        attempts=0,
    )


def passed_over(decode: Decode) -> Report:
    """The report of a load that vLLM did not want. It is no failure: beside another connector (MultiConnector), the
    first one with a part of the prompt loads that part, and the engine computes what that part lacks."""
    text = "vLLM took nothing: another connector before this one, or its own cache, had a part of the prompt"
    return not_tried(decode, "", text, 0.0)


def worst(reports: list[Report]) -> Report:
    return max(reports, key=lambda report: (report.code != "", report.seconds))


def whole(reports: list[Report]) -> Report:
    """One report for a load: the worst rank's, with the bytes of all ranks."""
    moved = {name: sum(getattr(report, name) for report in reports) for name in ("bytes", "early_bytes")}
    return dataclasses.replace(worst(reports), **moved)
