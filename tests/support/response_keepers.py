"""Engines of tests that keep what they answered in `/v1/responses`."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from kvxfer.router.responses import id_said
from kvxfer.types import Role
from tests.support.fake_workers import MODEL, FakeWorker

PAGES: dict[str, Any] = {"/health": {}, "/metrics": {}, "/v1/models": {"object": "list", "data": [{"id": MODEL}]}}
_ids = itertools.count(1)


class Keeper(FakeWorker):
    """An engine that keeps its Responses, as vLLM and SGLang do: under the id that the body asks for, if it does."""

    def __init__(self, name: str, role: Role = Role.BOTH, dialect: str = "plain", **more: Any) -> None:
        super().__init__(name, role, dialect=dialect, **more)
        self.kept: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.ends: asyncio.Event | None = None
        """Waited for before the answer, or before the last event of a stream."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = json.loads(message.get("body") or b"{}")
        path, method = scope["raw_path"].decode(), scope["method"]
        if method == "GET" and path in PAGES:
            return await self._json(send, 200, PAGES[path])
        self.asked.append((method, path))
        self.bodies.append(body)
        if path != "/v1/responses":
            found = self.kept.get(path.split("/")[3])
            if method == "DELETE" and found is not None:
                del self.kept[found["id"]]
            return await self._json(send, 404 if found is None else 200, found or {"error": {"message": "not here"}})
        before = body.get("previous_response_id")
        if before is not None and before not in self.kept:
            return await self._json(send, 404, {"error": {"message": "not here", "type": "x", "code": "y"}})
        made = {"id": body.get("request_id") or f"resp_{next(_ids)}", "object": "response", "status": "completed"}
        made["by"] = self.name
        if body.get("store") is not False:
            self.kept[made["id"]] = made
        if not body.get("stream"):
            if self.ends is not None:
                await self.ends.wait()
            return await self._json(send, 200, made)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for kind, more in (
            ("response.created", {"response": {**made, "status": "in_progress"}}),
            ("response.output_text.delta", {"delta": "hi"}),
            ("response.completed", {"response": made}),
        ):
            if kind == "response.completed" and self.ends is not None:
                await self.ends.wait()
            event = f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def first_id(answer: Any) -> str:
    text = answer.text
    if text.startswith("event:"):
        text = text.split("data: ")[1].split("\n")[0]
    return id_said(text.encode())
