"""Legs of a pair of mock engines, as routers send them."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

from kvxfer.openai.transfer_params import Part, TransferEnd, TransferParams
from kvxfer.types import TransferId
from tests.support.mock_engine.mocks import Answer, Engine

LEG_P: dict[str, Any] = {
    "max_tokens": 1,
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
}
"""What vLLM's NixlConnector wants in a prefill leg."""


def together(*calls: Callable[[], Answer]) -> list[Answer]:
    """The answers of calls that run at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def kvxfer_params(part: Part, number: int, prefill: Engine, decode: Engine, *, vllm: bool = False) -> dict[str, Any]:
    """``kv_transfer_params`` of kvxfer's dialect; with ``vllm`` as kvxfer's connector in vLLM gets them."""
    ends = (TransferEnd("p", 1, prefill.url), TransferEnd("d", 1, decode.url))
    params = TransferParams(TransferId.from_hex(f"{number:032x}"), 1, part, *ends, timeout_s=5.0).to_json()
    if vllm:
        params |= {"do_remote_decode": part is Part.PREFILL, "do_remote_prefill": part is Part.DECODE}
    return params


def sglang_body(prefill: Engine, rooms: Any, **more: Any) -> dict[str, Any]:
    """What SGLang's engines both get; ``rooms`` is one room, or a list of them."""
    listed = isinstance(rooms, list)
    host, port = "127.0.0.1", prefill.port
    count = len(rooms) if listed else 1
    boot = {"bootstrap_host": [host] * count, "bootstrap_port": [port] * count} if listed else {}
    return {"bootstrap_host": host, "bootstrap_port": port, **boot, "bootstrap_room": rooms, **more}
