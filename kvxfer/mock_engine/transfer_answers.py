"""What a prefill leg answers beside, or in place of, text: vLLM's transfer parameters, and kvxfer's usage and timings.

Decides field names only.
"""

from __future__ import annotations

import time
from typing import Any

from kvxfer.mock_engine.generation import MockGeneration
from kvxfer.mock_engine.holds import KvHold
from kvxfer.mock_engine.legs import EngineLeg


def nixl_params(hold: KvHold, engine_id: str, host: str, port: int) -> dict[str, Any]:
    """``kv_transfer_params`` of an answer, as vLLM's NixlConnector 0.32 gives them."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(hold.block_ids)],
        "remote_engine_id": engine_id,
        "remote_request_id": hold.key.removeprefix("nixl:"),
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": hold.tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": hold.generations[0].sequence.cached_tokens,
    }


def prefilled_body(
    generation: MockGeneration, model: str, request_id: str, leg: EngineLeg, took_s: float
) -> dict[str, Any]:
    """The body with which kvxfer's own engine answers a prefill leg."""
    sequence = generation.sequence
    return {
        "object": "kvxfer.prefill",
        "id": request_id,
        "model": model,
        "usage": {"prompt_tokens": sequence.prompt_tokens, "cached_tokens": sequence.cached_tokens},
        "timings": {"queue_s": 0.0, "prefill_s": round(took_s, 6), "ended_unix_s": time.time()},
        "transfer_id": leg.keys[0].partition(":")[2],
    }
