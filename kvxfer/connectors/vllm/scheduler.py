"""The connector's half in vLLM's scheduler: which requests are computed here for another engine, which are fetched from
one, and what the worker half must do about them in the coming step.

It sees vLLM's requests and scheduler outputs by attribute, keeps one entry a request, and has no IO, clock or thread.
It never raises over a request's parameters: a request with invalid parameters is computed here.
If vLLM gives granted blocks to another request, the same step's orders revoke the grant before the forward writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvxfer.connectors.vllm.groups import NULL_BLOCK, KvGroups
from kvxfer.connectors.vllm.kept_prompts import KeptPrompts
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.params import Declined, DecodeLeg, PrefillLeg, declined, handed_over, parse, trace_of
from kvxfer.connectors.vllm.requests import (
    Decode,
    Gauges,
    Prefill,
    about,
    account,
    contents_of,
    drop_last_token,
    gauges_of,
    load_of,
    not_tried,
    open_of,
    passed_over,
    remote,
    wait_of,
    whole,
    why_not_kept,
)
from kvxfer.connectors.vllm.steps import (
    Accept,
    Close,
    ComputedBlocks,
    Finish,
    LoadOrder,
    Open,
    RemotePrompt,
    Report,
    Revoke,
    Standing,
    StepOrders,
    WaitOrder,
)
from kvxfer.connectors.vllm.turns import Turns
from kvxfer.errors import GrantRevokedError, InvalidArgumentError, WeightsUnknownError
from kvxfer.types import Incarnation, TransferId, why_unknown

log = logging.getLogger("kvxfer.vllm")

COMPUTED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


class SchedulerHalf:
    """Of one engine. ``agents`` are its ranks' agents; ``stages`` say where its stages end. ``mint`` makes transfer ids
    for routers that give none. ``adapter_fingerprint`` says what was loaded for a LoRA request, ``weights_why`` why
    this engine's weights are unknown (``None``: they are known). The decode engine computes a prompt itself if these
    are unknown, or if vLLM's prefix cache has a part of it under a LoRA name that ``adapter_was_another`` before."""

    def __init__(
        self,
        options: ConnectorOptions,
        *,
        groups: KvGroups,
        agents: tuple[str, ...],
        stages: str = "",
        mint: Callable[[], TransferId],
        adapter_fingerprint: Callable[[Any], str],
        weights_why: Callable[[], str | None] = lambda: None,
        adapter_was_another: Callable[[Any], bool] = lambda _: False,
        will_fail: bool = False,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``will_fail``: vLLM fails requests whose prompts could not be fetched, and does not compute them."""
        self._will_fail = will_fail
        self._options = options
        self._groups = groups
        self._agents, self._stages = agents, stages
        self._incarnations: tuple[Incarnation, ...] = ()
        self._agent_metadata: tuple[str, ...] = ()
        self._mint = mint
        self._adapter_fingerprint = adapter_fingerprint
        self._weights_why = weights_why
        self._adapter_was_another = adapter_was_another
        self._prefills: dict[str, Prefill] = {}
        self._decodes: dict[str, Decode] = {}
        self._invalid: set[str] = set()
        self._declined: dict[str, Declined] = {}
        self._reports: dict[str, list[Report]] = {}
        self._ended: list[Report] = []
        self._closes: list[Close] = []
        self._finishes: list[Finish] = []
        self._keeps: list[RemotePrompt] = []
        self._loads: list[LoadOrder] = []
        self._cancels: list[str] = []
        self._releases: list[RemotePrompt] = []
        self._waits: list[WaitOrder] = []
        self._accepts: list[Accept] = []
        self._held = KeptPrompts(options, now_ns)
        self._turns = Turns()
        self._is_stuck = False
        """Whether in the last step nothing ran, and a computed prompt got no blocks."""
        self._waited: list[float] = []
        """Seconds of waits that ended."""
        self._gauges: Gauges | None = None

    def set_incarnations(self, incarnations: tuple[Incarnation, ...], agent_metadata: tuple[str, ...] = ()) -> None:
        """The incarnations of this engine's agents, by rank. ``agent_metadata``: the agents' signed metadata."""
        self._incarnations, self._agent_metadata = incarnations, agent_metadata

    def set_agent_metadata(self, agent_id: str, agent_metadata: str) -> None:
        """The signed metadata of that rank's agent from now on."""
        if self._agent_metadata and agent_id in self._agents:
            at = self._agents.index(agent_id)
            self._agent_metadata = (*self._agent_metadata[:at], agent_metadata, *self._agent_metadata[at + 1 :])

    # --- what vLLM says of one request ---

    def on_new_request(self, request: Any) -> None:
        """The request waits from now on."""
        self._register(request)
        decode = self._decodes.get(request.request_id)
        if decode is not None and not decode.is_settled:
            self._keeps.append(remote(decode))

    def matched(self, request: Any, computed: int) -> int | None:
        """How many tokens beyond the first ``computed`` (whole blocks) can be loaded; ``None``: ask again later. The
        last token of a prompt is always computed here, because the next one is sampled from it."""
        self._register(request)
        decode = self._decodes.get(request.request_id)
        if decode is not None and decode.first is not None and not decode.first.is_settled:
            return None
        if self._is_stuck and request.request_id in self._prefills:
            return None  # freed blocks are for requests that decode here, not for one more prompt that would be kept
        self._turns.asked(request.request_id)
        count = None if self._turns.is_for_loads else self._matched(request, decode, computed)
        if count is not None:
            self._turns.offered(request.request_id)
        return count

    def _matched(self, request: Any, decode: Decode | None, computed: int) -> int | None:
        if decode is None or decode.is_settled or decode.is_loading:
            return 0
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0  # this engine must compute the whole prompt, for prompt_logprobs for example
        why = self._why_changed(request, decode.adapter) or self._why_stale(request, computed)
        if why is not None:
            self._decline(decode, why)
            return 0
        decode.computed, decode.is_offered = computed, decode.tokens > computed
        if not decode.is_offered:
            return 0
        return None if decode.is_waiting else decode.tokens - computed

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external: int) -> None:
        """vLLM gave it blocks, for ``external`` tokens from elsewhere too. ``tables``: one a group."""
        self._turns.given(request.request_id)
        decode = self._decodes.get(request.request_id)
        if decode is None or decode.is_settled or decode.is_loading:
            return
        if external == 0:
            decode.reports += [passed_over(decode)] if decode.is_offered else []
            self._release(decode)
            return
        decode.cached = decode.computed
        end = decode.computed + external
        sequence = self._groups.sequence(end)
        first = sequence.full_after(decode.computed)
        blocks = sequence.numbers(tables, first)
        if blocks is None:
            raise AssertionError(f"vLLM gave request {request.request_id} no blocks for tokens that it is to load")
        decode.is_loading = True
        has_direct = decode.leg.tokens is not None and end == decode.tokens
        self._loads.append(load_of(decode, first, blocks, has_direct=has_direct))

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over, and has the blocks of ``tables``, one table a group. Returns whether its blocks must
        stay, and the answer for the client."""
        self._turns.gone(request.request_id)
        stays, answer = self._finished(request, tables)
        if any(tables) and not stays:
            self._held.freed()
        return stays, answer

    def _finished(self, request: Any, tables: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        self._register(request)
        self._invalid.discard(request.request_id)
        refusal = self._declined.pop(request.request_id, None)
        if refusal is not None:
            return False, {"kvxfer": {"code": refusal.code, "text": refusal.text}}
        decode = self._decodes.pop(request.request_id, None)
        if decode is not None:
            if decode.is_loading:
                decode.is_loading, decode.is_settled = False, True
                self._cancels.append(decode.request_id)
            elif not decode.is_settled:
                self._release(decode)
            return False, account(decode)
        prefill = self._prefills.pop(request.request_id, None)
        if prefill is None:
            return False, None
        self._recheck(prefill)
        if prefill.why_unknown is not None:
            self._close(prefill, prefill.why_unknown, will_resume=False, code=WeightsUnknownError.code)
            return False, declined(prefill.transfer_id, WeightsUnknownError.code, prefill.why_unknown)
        if prefill.refusal is not None:
            return False, declined(prefill.transfer_id, prefill.refusal.code, prefill.refusal.text)
        blocks = prefill.sequence.numbers(tables) if request.status.name in COMPUTED else None
        if not blocks:
            self._close(prefill, "the request ended before its prompt was computed", will_resume=False)
            return False, None
        name, transfer_id, traceparent = request.request_id, prefill.transfer_id, prefill.traceparent
        self._finishes.append(Finish(name, transfer_id, prefill.reader, blocks, prefill.content_digest, traceparent))
        self._held.keep(name, sum(len(table) - table.count(NULL_BLOCK) for table in tables), is_read=prefill.is_read)
        known = (self._incarnations, self._agent_metadata, self._stages)
        return True, handed_over(transfer_id, self._agents, name, prefill.tokens, traceparent, *known)

    # --- what a step is ---

    def build(self, output: Any) -> StepOrders:
        """The orders of the step that vLLM scheduled as ``output``."""
        opens: list[Open] = []
        chunks: list[ComputedBlocks] = []
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", ())
        for request_id, prefill in self._prefills.items():
            if prefill.is_open:
                self._recheck(prefill)
            if prefill.is_open and prefill.why_unknown is not None:
                self._close(prefill, prefill.why_unknown, will_resume=False, code=WeightsUnknownError.code)
            elif prefill.is_open and (request_id in resumed or prefill.request.status.name == "PREEMPTED"):
                self._close(prefill, "the source needed the blocks for older requests", will_resume=True)
        for new in output.scheduled_new_reqs:
            self._step(new.req_id, new.block_ids, new.num_computed_tokens, output, opens, chunks, is_new=True)
        for index, request_id in enumerate(cached.req_ids):
            if request_id not in self._prefills:
                continue
            added = cached.new_block_ids[index]
            computed = cached.num_computed_tokens[index]
            self._step(request_id, added or (), computed, output, opens, chunks, is_new=request_id in resumed)
        ahead = {name for name, one in self._decodes.items() if not (one.is_settled or one.is_loading)}
        revoke = self._take_back(output)
        waiting = {decode.request_id for decode in self._decodes.values() if decode.is_waiting}
        orders = StepOrders(
            has_forward=output.total_num_scheduled_tokens > 0,
            closes=tuple(self._closes),
            opens=tuple(opens),
            chunks=tuple(chunks),
            finishes=tuple(self._finishes),
            keeps=tuple(keep for keep in self._keeps if keep.request_id in ahead),
            loads=tuple(self._loads),
            cancels=tuple(self._cancels),
            releases=tuple(self._releases),
            waits=tuple(wait for wait in self._waits if wait.request_id in waiting),
            accepts=tuple(self._accepts),
            revokes=() if revoke is None else (revoke,),
        )
        self._waits, self._accepts, self._closes, self._finishes = [], [], [], []
        self._keeps, self._loads, self._cancels, self._releases = [], [], [], []
        return orders

    def received(self, request_ids: Iterable[str]) -> None:
        """These loads are over at all ranks."""
        for request_id in request_ids:
            reports = self._reports.pop(request_id, None)
            if reports is not None:
                self._ended.append(whole(reports))
            decode = self._decodes.get(request_id)
            if decode is not None:
                decode.is_loading, decode.is_settled = False, True
            else:
                self._held.freed()

    def sent(self, request_ids: Iterable[str]) -> None:
        """The blocks of these prompts are vLLM's again."""
        for request_id in request_ids:
            self._held.gone(request_id)

    def read(self, request_ids: Iterable[str]) -> None:
        """A reader of these prompts has begun."""
        for request_id in request_ids:
            self._held.read(request_id)
            prefill = self._prefills.get(request_id)
            if prefill is not None:
                prefill.is_read = True

    def stands(self, standings: Iterable[Standing]) -> None:
        """The worker half reports how requests that wait stand."""
        for standing in standings:
            if standing.is_over:
                self._waited.append(standing.seconds)
            decode = self._decodes.get(standing.request_id)
            if decode is None or not decode.is_waiting:
                continue
            decode.is_known = standing.is_known
            if standing.is_over and standing.code and self._will_fail and standing.code != WeightsUnknownError.code:
                decode.failure, decode.is_waiting = standing, False
                self._releases.append(remote(decode))
            elif standing.is_over and standing.code:
                log.warning("a wait ended: %s", standing.text, extra=about(decode, standing.code))
                self._give_up(decode, standing.code, standing.text, standing.seconds)
            elif standing.is_over:
                decode.is_waiting = False

    def reported(self, reports: Iterable[Report]) -> None:
        """Ranks report ended loads."""
        for report in reports:
            self._reports.setdefault(report.request_id, []).append(report)
            decode = self._decodes.get(report.request_id)
            if decode is not None:
                decode.reports.append(report)

    def take_gauges(self) -> Gauges | None:
        """Counts of what waits, if they have changed since the last call."""
        before, self._gauges = self._gauges, gauges_of(self._decodes.values(), self._held.blocks_unread)
        return None if self._gauges == before else self._gauges

    def take_waited(self) -> list[float]:
        """Seconds of waits that ended since the last call."""
        waited, self._waited = self._waited, []
        return waited

    def take_revoked(self) -> int:
        """Prompts that were taken back for their blocks, since the last call."""
        return self._held.take_revoked()

    def take_ended(self) -> list[Report]:
        """Loads that ended since the last call, of all ranks together."""
        ended, self._ended = self._ended, []
        return ended

    # --- inside ---

    def _register(self, request: Any) -> None:
        request_id = request.request_id
        if any(request_id in known for known in (self._prefills, self._decodes, self._invalid, self._declined)):
            return
        try:
            leg = parse(request.kv_transfer_params)
        except InvalidArgumentError as error:
            log.warning("kv_transfer_params: %s; the prompt is computed here", error, extra={"request_id": request_id})
            self._invalid.add(request_id)
            return
        if leg is None:
            return
        traceparent = trace_of(getattr(request, "trace_headers", None), request.kv_transfer_params)
        tokens = request.num_prompt_tokens - 1
        if isinstance(leg, Declined):
            self._declined[request_id] = leg
            return
        is_known = getattr(request, "prompt_embeds", None) is None
        adapter = self._adapter(request)
        why = self._weights_why() or why_unknown(adapter)
        if isinstance(leg, DecodeLeg):
            content_digest = contents_of(request, tokens, len(leg.sources), adapter)
            decode = Decode(request, leg, request_id, tokens, content_digest, traceparent, adapter=adapter)
            same = (other for other in self._decodes.values() if other.leg.transfer_id == leg.transfer_id)
            decode.first = next(same, None)
            self._decodes[request_id] = decode
            if decode.first is not None:
                decode.is_settled = True
            elif not is_known:
                self._release(decode)
            elif why is not None:
                self._decline(decode, why)
            elif leg.tokens is not None and leg.tokens != tokens:
                log.warning(
                    "the prefill computed %d tokens, not %d", leg.tokens, tokens, extra={"request_id": request_id}
                )
                self._release(decode)
            elif leg.tokens is None and tokens > 0:
                decode.is_waiting = True  # until its source begins the prompt
                self._waits.append(wait_of(decode, self._options.grant_wait_s))
        elif isinstance(leg, PrefillLeg):
            refusal = why_not_kept(self._groups, request)
            transfer_id = leg.transfer_id or self._mint()
            is_first = all(other.transfer_id != transfer_id for other in self._prefills.values())
            is_kept = is_known and is_first and refusal is None  # of several answers to one prompt, the first keeps it
            if is_kept and tokens > 0 and self._groups.forgets:
                drop_last_token(request)
            reader = leg.reader if is_first else None
            content_digest = contents_of(request, tokens, len(self._agents), adapter)
            sequence = self._groups.sequence(tokens if is_kept else 0)
            prefill = self._prefills[request_id] = Prefill(
                request, transfer_id, reader, tokens, sequence, content_digest, traceparent, adapter=adapter
            )
            prefill.why_unknown, prefill.refusal = why, refusal
            if leg.transfer_id is not None and (prefill.total > 0 or refusal is not None):
                self._accept(prefill)

    def _accept(self, prefill: Prefill) -> None:
        """Let other engines ask for the prompt. If it will not be kept, tell them, so that they do not wait for it."""
        prefill.is_accepted = True
        if prefill.refusal is not None:
            self._close(prefill, prefill.refusal.text, will_resume=False, code=prefill.refusal.code)
        elif prefill.why_unknown is not None:
            self._close(prefill, prefill.why_unknown, will_resume=False, code=WeightsUnknownError.code)
        else:
            self._accepts.append(Accept(prefill.request.request_id, prefill.transfer_id))

    def _take_back(self, output: Any) -> Revoke | None:
        """The order to revoke a kept prompt, if a request here has no room in the step ``output``."""
        ran = (*(new.req_id for new in output.scheduled_new_reqs), *output.scheduled_cached_reqs.req_ids)
        is_offered = self._turns.end_step(ran)
        decodes = self._decodes.values() if self._held else ()
        will_free = output.total_num_scheduled_tokens > 0 or any(decode.is_loading for decode in decodes)
        lacks_blocks = any(decode.lacks_blocks for decode in decodes)
        more = any(decode.lacks_more for decode in decodes)
        self._is_stuck = lacks_blocks and not will_free
        return self._held.take_back(is_stuck=lacks_blocks, is_offered=is_offered, lacks_more=more, will_free=will_free)

    def _step(
        self,
        request_id: str,
        added: Sequence[Sequence[int]],
        computed: int,
        output: Any,
        opens: list[Open],
        chunks: list[ComputedBlocks],
        *,
        is_new: bool,
    ) -> None:
        """Blocks of one prompt that are final after this step, including those that vLLM found in its prefix cache:
        another prompt of this step may be writing them. ``added``: the blocks that each group got."""
        prefill = self._prefills.get(request_id)
        if prefill is not None and is_new and prefill.why_unknown is None:
            prefill.why_unknown = self._why_stale(prefill.request, computed)
        if prefill is None or prefill.total == 0 or prefill.reader is None or not self._options.overlap:
            return
        if prefill.why_unknown is not None:
            return
        if is_new:
            prefill.tables = [list(blocks) for blocks in added]
        else:
            for table, blocks in zip(prefill.tables, added, strict=False):
                table += blocks
        if not prefill.is_open:
            prefill.is_open = True
            prefill.blocks = 0
            opens.append(open_of(prefill))
        after = computed + output.num_scheduled_tokens[request_id]
        if after >= prefill.request.num_prompt_tokens:
            done = prefill.sequence.kept
        else:  # its last token, which the reader computes itself, may be written to the last block by another step
            done = prefill.sequence.full_after(after)
        final = prefill.sequence.numbers(prefill.tables, prefill.blocks, done) if done > prefill.blocks else None
        if final is not None:
            chunks.append(ComputedBlocks(request_id, final))
            prefill.blocks = done

    def _close(self, prefill: Prefill, reason: str, *, will_resume: bool, code: str = GrantRevokedError.code) -> None:
        prefill.is_open = False
        if prefill.reader is not None or prefill.is_accepted:  # it may be asking already
            self._closes.append(Close(prefill.request.request_id, prefill.transfer_id, reason, will_resume, code))

    def _adapter(self, request: Any) -> str:
        adapter = getattr(request, "lora_request", None)
        return "" if adapter is None else self._adapter_fingerprint(adapter)

    def _why_changed(self, request: Any, adapter: str) -> str | None:
        """Why it is unknown, or no longer known, that a request is computed with the weights and adapter that it came
        with; ``None``: it is known."""
        why = self._weights_why()
        if why is None and adapter:
            now = self._adapter(request)
            why = why_unknown(now) or (None if now == adapter else "its LoRA adapter was loaded again meanwhile")
        return why

    def _why_stale(self, request: Any, cached: int) -> str | None:
        """Why the first ``cached`` tokens, which vLLM found in its prefix cache, may be another adapter's."""
        adapter = getattr(request, "lora_request", None)
        if cached == 0 or adapter is None or not self._adapter_was_another(adapter):
            return None
        return "another LoRA adapter had this name, and the prefix cache may have blocks of it"

    def _recheck(self, prefill: Prefill) -> None:
        if prefill.why_unknown is None and prefill.total > 0:
            prefill.why_unknown = self._why_changed(prefill.request, prefill.adapter)

    def _decline(self, decode: Decode, why: str) -> None:
        """Compute its prompt here, and say why."""
        self._give_up(decode, WeightsUnknownError.code, why)

    def _give_up(self, decode: Decode, code: str, text: str, seconds: float = 0.0) -> None:
        self._release(decode)
        report = not_tried(decode, code, text, seconds)
        decode.reports.append(report)
        self._ended.append(report)

    def _release(self, decode: Decode) -> None:
        decode.is_settled = True
        decode.is_waiting = False
        self._releases.append(remote(decode))
