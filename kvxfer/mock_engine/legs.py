"""What a request asks of a prefill or decode engine: reads the fields that routers add, in every dialect.

Decides from the body alone which half of a request this is, under which key its KV is held, and where a decode engine
finds it. It must never know sockets or time.

- ``kvxfer``, and ``vllm`` with kvxfer's connector: ``kv_transfer_params`` with a transfer id, both legs at once.
- vLLM's NixlConnector: prefill first (``do_remote_decode``); its answer's parameters go to decode unchanged.
- vLLM's MooncakeConnector: both at once, a transfer id that both know, and the prefill engine's bootstrap address.
- SGLang: the same body to both, with ``bootstrap_host``, ``bootstrap_port`` and ``bootstrap_room``; lists for batches.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from kvxfer.mock_engine.options import EngineKind, EngineRole
from kvxfer.openai.errors import RequestError
from kvxfer.openai.transfer_params import parse_transfer_params

ROOM_MAX = (1 << 63) - 1
_NIXL_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class LegDialect(enum.StrEnum):
    PLAIN = "plain"
    KVXFER = "kvxfer"
    NIXL = "nixl"
    MOONCAKE = "mooncake"
    SGLANG = "sglang"


class LegPart(enum.StrEnum):
    """The half of a request that a leg asks for, or all of it."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclasses.dataclass(frozen=True)
class KvSource:
    """Where a decode engine finds a prompt's KV. Empty: not said."""

    address: str = ""
    """``host:port`` of the prefill engine."""
    engine_id: str = ""
    block_ids: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class EngineLeg:
    """One leg as the engine understands it. ``keys`` has one name for all sequences, or one for each."""

    part: LegPart = LegPart.WHOLE
    dialect: LegDialect = LegDialect.PLAIN
    keys: tuple[str, ...] = ()
    source: KvSource = KvSource()
    timeout_s: float | None = None
    is_incomplete: bool = False
    """Decode parameters that name no blocks: vLLM computes the prompt itself and says nothing."""
    answers_without_text: bool = False
    """The prefill leg of kvxfer's own engine answers with its usage only."""


WHOLE_LEG = EngineLeg()


def read_leg(body: dict[str, Any], role: EngineRole, kind: EngineKind, request_id: str) -> EngineLeg:
    """The leg that ``body`` is. Raises RequestError for fields that the engine would refuse."""
    params = body.get("kv_transfer_params")
    if params is not None:
        if not isinstance(params, dict):
            raise RequestError("kv_transfer_params must be an object", param="kv_transfer_params")
        return _read_params(params, kind, request_id)
    if body.get("bootstrap_room") is not None:
        return _read_rooms(body, role)
    if kind is EngineKind.SGLANG and role is not EngineRole.BOTH:
        raise RequestError("Disaggregated request received without bootstrap room id", param="bootstrap_room")
    return WHOLE_LEG


def _read_params(params: dict[str, Any], kind: EngineKind, request_id: str) -> EngineLeg:
    if "role" in params:
        parsed = parse_transfer_params(params)
        part = LegPart(parsed.role.value)
        key = f"kvxfer:{parsed.transfer_id}"
        source = KvSource(parsed.source.address.removeprefix("http://").rstrip("/"), parsed.source.agent_id)
        silent = part is LegPart.PREFILL and "do_remote_decode" not in params
        return EngineLeg(part, LegDialect.KVXFER, (key,), source, parsed.timeout_s, answers_without_text=silent)
    transfer_id = params.get("transfer_id")
    if params.get("do_remote_decode"):
        if isinstance(transfer_id, str) and transfer_id:
            return EngineLeg(LegPart.PREFILL, LegDialect.MOONCAKE, (f"mooncake:{transfer_id}",))
        return EngineLeg(LegPart.PREFILL, LegDialect.NIXL, (f"nixl:{request_id}",))
    if not params.get("do_remote_prefill"):
        return WHOLE_LEG
    bootstrap = params.get("remote_bootstrap_addr")
    if isinstance(transfer_id, str) and transfer_id and isinstance(bootstrap, str):
        address = bootstrap.removeprefix("http://").rstrip("/")
        source = KvSource(address, str(params.get("remote_engine_id") or ""))
        return EngineLeg(LegPart.DECODE, LegDialect.MOONCAKE, (f"mooncake:{transfer_id}",), source)
    blocks = _flat(params.get("remote_block_ids"))
    if not blocks or any(params.get(name) in (None, "") for name in _NIXL_FIELDS):
        return EngineLeg(LegPart.DECODE, LegDialect.NIXL, is_incomplete=True)
    source = KvSource(f"{params['remote_host']}:{params['remote_port']}", str(params["remote_engine_id"]), blocks)
    return EngineLeg(LegPart.DECODE, LegDialect.NIXL, (f"nixl:{params['remote_request_id']}",), source)


def _flat(block_ids: object) -> tuple[int, ...]:
    """The blocks of all KV groups: a list, or a list of lists."""
    if not isinstance(block_ids, list):
        return ()
    groups = block_ids if block_ids and isinstance(block_ids[0], list) else [block_ids]
    return tuple(block for group in groups for block in group if type(block) is int)


def _read_rooms(body: dict[str, Any], role: EngineRole) -> EngineLeg:
    if role is EngineRole.BOTH:
        raise RequestError("bootstrap_room: this engine is neither for prefill nor for decode", param="bootstrap_room")
    rooms, host, port = body["bootstrap_room"], body.get("bootstrap_host"), body.get("bootstrap_port")
    listed = rooms if isinstance(rooms, list) else [rooms]
    if not listed or not all(type(room) is int and 0 < room <= ROOM_MAX for room in listed):
        raise RequestError("bootstrap_room must be numbers of 63 bits above 0", param="bootstrap_room")
    for name, value in (("bootstrap_host", host), ("bootstrap_port", port)):
        if isinstance(value, list) and len(value) != len(listed):
            raise RequestError(f"{name} must be as long as bootstrap_room", param=name)
    host, port = (value[0] if isinstance(value, list) and value else value for value in (host, port))
    if not isinstance(host, str) or not host:
        raise RequestError("bootstrap_host must be a host", param="bootstrap_host")
    part = LegPart.PREFILL if role is EngineRole.PREFILL else LegPart.DECODE
    source = KvSource(f"{host}:{port}" if type(port) is int else "")
    return EngineLeg(part, LegDialect.SGLANG, tuple(f"sglang:{room}" for room in listed), source)
