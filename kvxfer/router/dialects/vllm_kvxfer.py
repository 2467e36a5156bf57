"""vLLM with kvxfer's connector: kvxfer's parameters and vLLM's words for which half a leg is, both legs at once.

Decides nothing beyond ``kvxfer`` and ``vllm_prefill``. vLLM hands a request's headers on only where it traces by
itself, so the trace stands in the parameters too. The connector compares the prompt's tokens on both ends, so that it
needs fewer refusals than ``vllm``: D computes by itself what it cannot load, and says so.
"""

from __future__ import annotations

from kvxfer.openai.transfer_params import PARAM, Part
from kvxfer.router.apis.routes import RESPONSES_API
from kvxfer.router.dialects import vllm_prefill
from kvxfer.router.dialects.base import DialectBase, Handover, LegRequest, Pair, encoded, leg, rank_header
from kvxfer.router.dialects.kvxfer import transfer_params
from kvxfer.router.inbound import Inbound


class VllmKvxferDialect(DialectBase):
    name = "vllm-kvxfer"
    recovers = True
    clips_answers = True

    def refuses_split(self, inbound: Inbound) -> str | None:
        return vllm_prefill.refuses_split(inbound) if inbound.api is RESPONSES_API else inbound.several

    def prefill_leg(self, inbound: Inbound, pair: Pair) -> LegRequest:
        changes = {**vllm_prefill.one_token(inbound), "stream": None, PARAM: _params(inbound, pair, Part.PREFILL)}
        changes.pop("logprobs")  # of one token; an engine without them says so
        return leg(inbound, changes, rank_header(pair.source))

    def decode_leg(self, inbound: Inbound, pair: Pair, handover: Handover | None) -> LegRequest:
        return leg(inbound, {PARAM: _params(inbound, pair, Part.DECODE)}, rank_header(pair.decode))


def _params(inbound: Inbound, pair: Pair, part: Part) -> bytes:
    is_prefill = part is Part.PREFILL
    values = transfer_params(pair, part).to_json()
    values |= {"do_remote_decode": is_prefill, "do_remote_prefill": not is_prefill}
    trace = inbound.traceparent
    return encoded(values if trace is None else {**values, "traceparent": trace})
