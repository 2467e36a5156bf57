"""What a process of a router of several answers itself, and what it asks the leader."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvxfer.router.group import asking
from kvxfer.router.group.asking import PassingOn
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.head_as_get import HeadAsGet
from kvxfer.serving.limits import ServingLimits


class Asked:
    """The leader, which answers 404 to all."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def ask(self, method: str, target: tuple[str, str], headers: Any, body: bytes) -> Any:
        self.paths.append(f"{method} {target[0]}")
        return 404, [], b"{}"


async def own(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["method"].encode()})


async def status_of(app: Any, method: str, path: str) -> tuple[int, bytes]:
    said: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        said.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return said[0]["status"], b"".join(message.get("body", b"") for message in said[1:])


async def test_what_all_processes_know_is_answered_where_it_is_asked() -> None:
    leader = Asked()
    app = HeadAsGet(PassingOn(own, leader, Bodies(ServingLimits())))  # type: ignore[arg-type]
    for path in ("/live", "/health", "/v1/responses/resp_1", "/v1/responses/resp_1/input_items"):
        assert await status_of(app, "HEAD", path) == (200, b""), path
        assert await status_of(app, "GET", path) == (200, b"GET"), path
    assert leader.paths == []
    for path in ("/v1/models", "/workers", "/v1/responses/a/b", "/v1/responses"):
        assert (await status_of(app, "GET", path))[0] == 404
    assert leader.paths == ["GET /v1/models", "GET /workers", "GET /v1/responses/a/b", "GET /v1/responses"]


async def test_the_leader_ends_what_no_one_waits_for_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER_S", 0.05)
    ended = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(asking.answer(endless, "GET", "/v1/models", "", [], ""))
    await asyncio.wait({task}, timeout=5)
    assert isinstance(task.exception(), TimeoutError)
    assert ended.is_set()
