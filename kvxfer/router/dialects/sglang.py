"""SGLang: both legs at once, with the same body, joined by rooms; D asks P's bootstrap server for its room.

Decides the rooms, and which requests SGLang cannot split. Read from the sources of SGLang 0.5.23. ``stream`` is the
same on both legs, so that P answers a stream with a stream of its own; an error in it must end D's leg, which would
wait for its room until a timeout.

A list of k prompts takes k rooms, in lists (managers/io_struct.py, ``_normalize_bootstrap_params``). Where such lists
would be longer than a leg may grow, the one first room stands for them: SGLang itself counts on from there.

A D computes no prompt by itself: without a room it refuses the request (managers/scheduler.py, "Disaggregated request
received without bootstrap room id"). What is not split is therefore refused, unless an engine that is neither P nor D
serves the model (dialect ``plain``):

- ``n`` above 1 and beams: one prompt is sent n + 1 times under the same room (managers/tokenizer_manager.py,
  ``_handle_batch_request``).
- Log probabilities, hidden states, experts or indices of the prompt: D has not computed it, and only D's answer reaches
  the client. So ``echo`` with ``logprobs`` in completions (serving_completions.py sets ``logprob_start_len`` 0), and in
  ``/generate`` ``return_logprob`` with a ``logprob_start_len`` other than -1.
- ``session_params``: what came before is in one engine.
- In Responses: ``background``, and ``previous_response_id`` with others that name what one engine remembers. Tools that
  the engine runs are refused by SGLang itself.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from kvxfer.errors import ProtocolError
from kvxfer.openai.sse import EventDecoder
from kvxfer.openai.transfer_params import LEG_BYTES_MAX
from kvxfer.router.apis.routes import COMPLETIONS, GENERATE_API, RESPONSES_API
from kvxfer.router.dialects.base import (
    Changes,
    DialectBase,
    Handover,
    LegRequest,
    LegWorker,
    Pair,
    Prefilled,
    encoded,
    leg,
    read_prefilled,
)
from kvxfer.router.inbound import Inbound, number_in

BOOTSTRAP_PORT = 8998
"""``--disaggregation-bootstrap-port``, where it is not set."""
ROOM_MAX = (1 << 63) - 1
FIELDS_BYTES_MAX = LEG_BYTES_MAX - 512
"""What the three lists may take; the rest is for ranks and names."""
OF_THE_PROMPT = ("return_hidden_states", "return_routed_experts", "return_indexer_topk")
REMEMBERED = ("previous_response_id", "previous_input_messages", "conversation")


class SglangDialect(DialectBase):
    name = "sglang"
    computes_alone = False

    def refuses_split(self, inbound: Inbound) -> str | None:
        if inbound.many_field is not None:
            return inbound.many_field
        if inbound.has("session_params"):
            return "session_params"
        named = next((name for name in OF_THE_PROMPT if inbound.is_on(name)), None)
        if named is not None:
            return named
        if inbound.api is RESPONSES_API:
            if inbound.is_on("background"):
                return "background"
            return next((name for name in REMEMBERED if inbound.has(name)), None)
        if inbound.api is GENERATE_API:
            return "logprob_start_len" if _asks_for_prompt_logprobs(inbound) else None
        if inbound.api is COMPLETIONS and inbound.is_on("echo") and inbound.has("logprobs"):
            return None if number_in(inbound.scan, "logprobs") == 0 else "echo"
        return None

    def prefill_leg(self, inbound: Inbound, pair: Pair) -> LegRequest:
        return leg(inbound, {**rooms(inbound, pair), **_ranks(pair, pair.source)})

    def decode_leg(self, inbound: Inbound, pair: Pair, handover: Handover | None) -> LegRequest:
        return leg(inbound, {**rooms(inbound, pair), **_ranks(pair, pair.decode)})

    def alone_leg(self, inbound: Inbound, worker: LegWorker) -> LegRequest:
        """For routes that generate nothing, such as ``/tokenize``; a request for text is refused by D."""
        return leg(inbound, {} if worker.dp_rank is None else {"routed_dp_rank": encoded(worker.dp_rank)})

    def prefilled(self, answer: bytes) -> Prefilled:
        """Of an answer, or of the last event of a stream."""
        if not answer.startswith(b"data:"):
            return read_prefilled(answer)
        try:
            events = EventDecoder().feed(answer)
        except ProtocolError:
            return Prefilled()
        said = (read_prefilled(event.data) for event in reversed(events) if event.data not in (b"", b"[DONE]"))
        return next((prefilled for prefilled in said if prefilled.cached_tokens is not None), Prefilled())


def rooms(inbound: Inbound, pair: Pair) -> Changes:
    """P's bootstrap server, and one room for each prompt."""
    host = urlsplit(pair.source.url).hostname or ""
    port = pair.source.bootstrap_port or BOOTSTRAP_PORT
    count = inbound.size.prompts
    first = min(max(pair.room, 1), ROOM_MAX - (count or 1) + 1)
    if count is not None and count * (len(encoded(host)) + len(encoded(port)) + 22) <= FIELDS_BYTES_MAX:
        return {
            "bootstrap_host": encoded([host] * count),
            "bootstrap_port": encoded([port] * count),
            "bootstrap_room": encoded(list(range(first, first + count))),
        }
    return {"bootstrap_host": encoded(host), "bootstrap_port": encoded(port), "bootstrap_room": encoded(first)}


def _ranks(pair: Pair, worker: LegWorker) -> Changes:
    """Which engine behind each address works on it: the body says it on every route, a header on some only."""
    changes: Changes = {}
    if worker.dp_rank is not None:
        changes["routed_dp_rank"] = encoded(worker.dp_rank)
    if pair.source.dp_rank is not None:
        changes["disagg_prefill_dp_rank"] = encoded(pair.source.dp_rank)
    return changes


def _asks_for_prompt_logprobs(inbound: Inbound) -> bool:
    if not inbound.is_on("return_logprob") or not inbound.has("logprob_start_len"):
        return False
    return number_in(inbound.scan, "logprob_start_len") != -1
