"""Stock vLLM with a connector that pulls, such as NixlConnector: P first, and D gets the parameters of P's answer.

Decides whether P handed anything over. What its parameters must have differs between connectors and between versions
of one (``remote_request_id`` came late), and the router uses none of it: they are opaque, and go to D as they are. P
holds its blocks under a lease until a D has read them, or has begun and ended the request; therefore D is always
reached (``forgo_leg``), and a D that failed leaves the prefill to the next one.
"""

from __future__ import annotations

from kvxfer.openai import scanner
from kvxfer.openai.scanner import Kind, Scan
from kvxfer.openai.transfer_params import PARAM
from kvxfer.router.dialects import vllm_prefill
from kvxfer.router.dialects.base import (
    HANDOVER_BYTES_MAX,
    DialectBase,
    Handover,
    HandoverError,
    LegRequest,
    Order,
    Pair,
    leg,
    rank_header,
)
from kvxfer.router.inbound import Inbound

ASKS_TO_KEEP = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_ANSWER = scanner.Fields([PARAM])
_PARAMS = scanner.Fields(["do_remote_prefill"])


class VllmDialect(DialectBase):
    name = "vllm"
    order = Order.PREFILL_FIRST
    keeps_prefill = True
    clips_answers = True

    def refuses_split(self, inbound: Inbound) -> str | None:
        return vllm_prefill.refuses_split(inbound)

    def prefill_leg(self, inbound: Inbound, pair: Pair) -> LegRequest:
        changes = {**vllm_prefill.one_token(inbound), **vllm_prefill.goes_on_at_the_end(inbound)}
        return leg(inbound, {**changes, PARAM: ASKS_TO_KEEP}, rank_header(pair.source))

    def handover(self, answer: bytes) -> Handover:
        try:
            scan = _ANSWER.scan(answer)
        except ValueError:
            raise HandoverError("the prefill worker's answer is no JSON object") from None
        if scan.kind(PARAM) is not Kind.OBJECT:
            raise HandoverError(f"the prefill worker's answer has no {PARAM}: it kept no KV (is its connector set up?)")
        params = bytes(scanner.raw(scan, PARAM) or b"")
        if len(params) > HANDOVER_BYTES_MAX:
            raise HandoverError(f"the prefill worker's {PARAM} are longer than {HANDOVER_BYTES_MAX} bytes")
        try:
            _check(_PARAMS.scan(params))
        except ValueError:
            raise HandoverError(f"the prefill worker's {PARAM} have too many members") from None
        return Handover(params)

    def decode_leg(self, inbound: Inbound, pair: Pair, handover: Handover | None) -> LegRequest:
        if handover is None:
            raise HandoverError("a decode leg needs what the prefill worker answered")
        return leg(inbound, {PARAM: handover.params}, rank_header(pair.decode))

    def forgo_leg(self, inbound: Inbound, pair: Pair, handover: Handover | None) -> LegRequest | None:
        """D's leg for one token: vLLM gives P's blocks back when it ends, wherever that is (``request_finished``)."""
        if handover is None:
            return None
        changes = {**vllm_prefill.one_token(inbound), PARAM: handover.params}
        return leg(inbound, changes, rank_header(pair.decode))


def _check(params: Scan) -> None:
    """Raises HandoverError where P says by itself that there is nothing to load."""
    if not len(params):
        raise HandoverError(f"the prefill worker's {PARAM} are empty")
    if params.kind("do_remote_prefill") not in (None, Kind.TRUE):
        raise HandoverError(f"the prefill worker's {PARAM} do not ask for a remote prefill")
