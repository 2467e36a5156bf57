"""Stock vLLM with MooncakeConnector: both legs at once, joined by a transfer id that the router makes.

Decides what each end is told. D finds P by the address of P's bootstrap server and by the name of P's engine, which
that server says (``GET /query``); D waits for P's blocks inside the engines. P keeps the KV of a request only if it
reached its bound (mooncake_connector.py, ``request_finished``), so P's one token is never the end of the text. When the
client leaves, D's end tells P.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from kvxfer.openai.transfer_params import PARAM
from kvxfer.router.dialects import vllm_prefill
from kvxfer.router.dialects.base import (
    DialectBase,
    Handover,
    HandoverError,
    LegRequest,
    LegWorker,
    Pair,
    encoded,
    leg,
    rank_header,
)
from kvxfer.router.inbound import Inbound

BOOTSTRAP_PORT = 8998
"""VLLM_MOONCAKE_BOOTSTRAP_PORT, where it is not set."""
ENGINE_ID_CHARS_MAX = 256


class VllmMooncakeDialect(DialectBase):
    name = "vllm-mooncake"
    clips_answers = True

    def refuses_split(self, inbound: Inbound) -> str | None:
        return vllm_prefill.refuses_split(inbound)

    def prefill_leg(self, inbound: Inbound, pair: Pair) -> LegRequest:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": str(pair.transfer_id)}
        changes = {**vllm_prefill.one_token(inbound), **vllm_prefill.goes_on_at_the_end(inbound)}
        return leg(inbound, {**changes, PARAM: encoded(params)}, rank_header(pair.source))

    def decode_leg(self, inbound: Inbound, pair: Pair, handover: Handover | None) -> LegRequest:
        if not pair.prefill_engine_id:
            raise HandoverError(f"{pair.source.agent_id} has not said the name of its engine yet")
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": bootstrap_url(pair.source),
            "remote_engine_id": pair.prefill_engine_id,
            "transfer_id": str(pair.transfer_id),
        }
        return leg(inbound, {PARAM: encoded(params)}, rank_header(pair.decode))

    def discovery_url(self, worker: LegWorker) -> str | None:
        return f"{bootstrap_url(worker)}/query"

    def engine_id(self, worker: LegWorker, answer: bytes) -> str:
        """vLLM 0.32 answers ``{dp_rank: {"engine_id": ..., ...}}`` (mooncake_utils.py), others ``{engine_id: {dp_rank:
        ...}}``."""
        rank = str(worker.dp_rank or 0)
        try:
            found = _engine_id(json.loads(answer), rank)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, str) or not 0 < len(found) <= ENGINE_ID_CHARS_MAX or not found.isprintable():
            raise HandoverError(f"the bootstrap server of {worker.agent_id} names no engine of rank {rank}")
        return found


def _engine_id(engines: Any, rank: str) -> Any:
    if not isinstance(engines, dict):
        return None
    entry = engines.get(rank)
    if isinstance(entry, dict) and "engine_id" in entry:
        return entry["engine_id"]
    return next((name for name, ranks in engines.items() if isinstance(ranks, dict) and rank in ranks), None)


def bootstrap_url(worker: LegWorker) -> str:
    """Where P's bootstrap server listens: on P's host."""
    host = urlsplit(worker.url).hostname or ""
    port = worker.bootstrap_port or BOOTSTRAP_PORT
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
