"""A client of streamed completions that notes what a load test notes: one connection a request, no library's buffers.

Decides nothing; ``kvxfer.load.record`` has the definitions.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import urlsplit

from kvxfer.load.record import MeasuredRequest

COMMENT = b": kvxfer-account "


async def measured(url: str, body: dict[str, Any], request_id: str, began_s: float, due_s: float) -> MeasuredRequest:
    """One streamed completion, sent now. Times are those of ``time.monotonic`` after ``began_s``; the engine writes
    whole events, one a chunk."""
    where = urlsplit(url)
    record = MeasuredRequest("test", 0, request_id, due_s, 0, body["max_tokens"])
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
    content = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\nx-request-id: {request_id}\r\n"
        f"x-kvxfer-account: 1\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + content)
        await writer.drain()
        record.sent_s = time.monotonic() - began_s
        record.status = int((await reader.readline()).split()[1])
        is_whole = False
        while line := await reader.readline():
            now_s = time.monotonic() - began_s
            if line.startswith(COMMENT):
                record.account = json.loads(line[len(COMMENT) :])
            elif line.startswith(b"x-kvxfer-account:"):
                record.account = json.loads(line.partition(b":")[2])
            elif line.startswith(b"data: [DONE]"):
                is_whole = True
            elif line.startswith(b"data: "):
                _note(record, json.loads(line[6:]), now_s)
        record.end_s = time.monotonic() - began_s
        if record.status != 200 or not is_whole:
            record.error = "broken"
    finally:
        writer.close()
    return record


def _note(record: MeasuredRequest, event: dict[str, Any], now_s: float) -> None:
    if "error" in event:
        record.error, record.message = "error", str(event["error"])[:200]
    if any(choice.get("text") for choice in event.get("choices", ())):
        record.first_s = now_s if record.first_s is None else record.first_s
        record.last_s = now_s
        record.chunks += 1
