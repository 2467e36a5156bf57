"""An engine of pages alone: it answers GETs as it is told, in this process, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 4096, "parent": None}]}
VLLM_LOAD = b"""vllm:num_requests_running{engine="0"} 3
vllm:num_requests_waiting{engine="0"} 2
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1
"""


class TinyEngine:
    """``pages`` are answered with 200; ``status`` to all where it is set; ``mode`` is ``answer``, ``hang``, ``reset``
    or ``babble``."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {
            "/health": b"",
            "/v1/models": json.dumps(MODELS).encode(),
            "/metrics": VLLM_LOAD,
        }
        self.statuses: dict[str, int] = {}
        self.gates: dict[str, asyncio.Event] = {}
        """Pages that are answered only once their event is set."""
        self.mode = "answer"
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serves(self, model: str) -> None:
        self.pages["/v1/models"] = json.dumps({"data": [{"id": model}]}).encode()

    async def up(self) -> None:
        """Listen, on the port that it had before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def down(self) -> None:
        """As a process that was killed: connections are reset, new ones refused."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for writer in tuple(self._writers):
                writer.transport.abort()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                path = head[0].split(" ")[1]
                self.asked.append(path)
                self.headers.append(dict(line.lower().split(": ", 1) for line in head[1:] if line))
                if self.mode == "hang":
                    await reader.read()
                    return
                if self.mode == "reset":
                    writer.transport.abort()
                    return
                if self.mode == "babble":
                    writer.write(b"no HTTP\r\n\r\n")
                    return
                if path in self.gates:
                    await self.gates[path].wait()
                self._answer(writer, path)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, path: str) -> None:
        status: Any = self.statuses.get(path, 200 if path in self.pages else 404)
        body = self.pages.get(path, b"") if status == 200 else b"{}"
        writer.write(b"HTTP/1.1 %d Said\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))


@contextlib.asynccontextmanager
async def tiny_engines(count: int) -> AsyncIterator[list[TinyEngine]]:
    engines = [TinyEngine() for _ in range(count)]
    try:
        for engine in engines:
            await engine.up()
        yield engines
    finally:
        for engine in engines:
            await engine.down()
