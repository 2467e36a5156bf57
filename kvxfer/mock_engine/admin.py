"""The mock engine's own routes, under ``/mock/``: faults, counts, recorded requests, and the KV between processes.

Decides what an operator of tests may do; only clients on this machine may do it.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs

from kvxfer.config import is_loopback
from kvxfer.errors import GrantUnknownError, KvxferError, RefusedError
from kvxfer.mock_engine.engine import MockEngine
from kvxfer.mock_engine.faults import FaultKind, read_fault
from kvxfer.mock_engine.http_protocol import MockRequest
from kvxfer.mock_engine.responder import Responder
from kvxfer.mock_engine.shape import to_json
from kvxfer.openai.errors import RequestError, error_body, status_for

CLAIM_WAIT_MAX_S = 3600.0


def check_allowed(request: MockRequest) -> None:
    """Raises RequestError unless the client is on this machine."""
    if not is_loopback(request.peer):
        raise RequestError("only clients on this machine may use /mock/", status=403)


def target(engines: dict[int, MockEngine], engine: MockEngine, request: MockRequest) -> list[MockEngine]:
    """The engines that ``?port=`` names, of this process: one, ``all`` of them, or the one that was asked."""
    [port] = parse_qs(request.query).get("port", [""])[:1]
    if not port:
        return [engine]
    if port == "all":
        return list(engines.values())
    if not port.isdigit() or int(port) not in engines:
        raise RequestError(f"port {port!r:.20} is none of this process", param="port", status=404)
    return [engines[int(port)]]


def faults(engines: dict[int, MockEngine], engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``/mock/faults``: POST adds one or a list, GET lists, DELETE removes all, or ``?number=``."""
    chosen = target(engines, engine, request)
    if request.method == "POST":
        made = [read_fault(one) for one in _listed(request)]
        numbers = []
        for one in chosen:
            for fault in made:
                if fault.kind is FaultKind.DOWN and not fault.after_tokens and not fault.path:
                    asyncio.get_running_loop().call_soon(one.down, fault)
                else:
                    numbers.append(one.faults.add(read_fault(fault.as_dict())))
        responder.answer(200, to_json({"added": numbers}))
    elif request.method == "DELETE":
        number = parse_qs(request.query).get("number", [""])[0]
        removed = sum(one.faults.remove(int(number) if number.isdigit() else None) for one in chosen)
        responder.answer(200, to_json({"removed": removed}))
    else:
        listed = [{"port": one.port, "faults": [fault.as_dict() for fault in one.faults]} for one in chosen]
        responder.answer(200, to_json(listed if "port" in parse_qs(request.query) else listed[0]["faults"]))


def _listed(request: MockRequest) -> list[Any]:
    value = request.json_value()
    return value if isinstance(value, list) else [value]


def statistics(engines: dict[int, MockEngine], engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``GET /mock/statistics``."""
    shown = [one.statistics() for one in target(engines, engine, request)]
    responder.answer(200, to_json(shown if "port" in parse_qs(request.query) else shown[0]))


def requests(engines: dict[int, MockEngine], engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``GET /mock/requests``: the last requests as they came; DELETE forgets them."""
    shown = []
    for one in target(engines, engine, request):
        shown += [_readable(entry) for entry in one.recorded]
        if request.method == "DELETE":
            one.recorded.clear()
    responder.answer(200, to_json(shown))


def _readable(entry: dict[str, Any]) -> dict[str, Any]:
    raw: MockRequest = entry["request"]
    try:
        body: Any = raw.json()
    except RequestError:
        body = raw.body.decode("utf-8", "replace")
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in raw.headers]
    return {"port": entry["port"], "method": raw.method, "path": raw.path, "headers": headers, "body": body}


def claim(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``POST /mock/kv/claim``: a decode engine of another process wants KV, and waits until it is there."""
    body = request.json()
    key, wait_s, ids = body.get("key"), body.get("wait_s"), body.get("block_ids")
    if not isinstance(key, str) or not isinstance(wait_s, (int, float)) or not 0 <= wait_s <= CLAIM_WAIT_MAX_S:
        raise RequestError("key must be a string, and wait_s a number of seconds")
    if key.startswith("nixl:") and body.get("engine_id") != engine.engine_id:
        raise RefusedError(f"engine {body.get('engine_id')!r:.60} is no longer here")
    blocks = tuple(ids) if isinstance(ids, list) else None
    task = asyncio.get_running_loop().create_task(_claim(engine, key, float(wait_s), blocks, responder))
    engine.readers.add(task)
    task.add_done_callback(engine.readers.discard)
    request.on_gone = lambda: _cancel(task)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


async def _claim(
    engine: MockEngine, key: str, wait_s: float, blocks: tuple[int, ...] | None, responder: Responder
) -> None:
    try:
        hold = await engine.holds.claim(key, wait_s, blocks)
        responder.answer(200, to_json({"tokens": hold.tokens}))
    except KvxferError as error:
        responder.answer(status_for(error), to_json(error_body(error)))


def release(engine: MockEngine, request: MockRequest, responder: Responder) -> None:
    """``POST /mock/kv/release``: the decode engine has the KV."""
    key = request.json().get("key")
    if not isinstance(key, str) or not engine.holds.release(key):
        raise GrantUnknownError(f"nothing is held under {key!r:.200}")
    responder.answer(200, b"{}")
