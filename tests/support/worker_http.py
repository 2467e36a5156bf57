"""A worker of the built-in engine in this loop, on a real socket, and callers with certificates and keys."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx

from kvxfer.engine.options import WorkerOptions
from kvxfer.engine.worker import serve
from kvxfer.trust.authority import Issued

BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1}
PATHS: dict[str, tuple[tuple[str, str], ...]] = {
    "leg": (
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/held"),
        ("DELETE", f"/held/{'0' * 32}"),
        ("GET", "/absent"),
        ("GET", "/statistics/"),
        ("OPTIONS", "/v1/completions"),
        ("HEAD", "/v1/models"),
    ),
    "look": (
        ("GET", "/statistics"),
        ("GET", "/debug/block-digests"),
        ("HEAD", "/statistics"),
        ("GET", "/debug/absent"),
    ),
    "metrics": (("GET", "/metrics"),),
    "probe": (("GET", "/live"), ("GET", "/ready"), ("GET", "/health")),
}
"""Every path of a worker and some that it does not have, by what a caller must be allowed to ask for there."""
LET_IN, HUNG_UP = "let in", "no TLS"


@dataclasses.dataclass
class RunningWorker:
    url: str
    ready: dict[str, Any]

    async def ask(
        self, method: str, path: str, *, context: ssl.SSLContext | None = None, keys: tuple[str, ...] = ()
    ) -> str:
        """``let in``, ``no TLS``, or the code of the refusal."""
        headers = [("x-kvxfer-leg-key", key) for key in keys]
        async with httpx.AsyncClient(verify=context or False, trust_env=False, timeout=30.0) as client:
            try:
                answer = await client.request(
                    method, self.url + path, headers=headers, json=BODY if method == "POST" else None
                )
            except httpx.TransportError:
                return HUNG_UP
        if answer.status_code not in (401, 403):
            return LET_IN
        if method == "HEAD":
            return {401: "unauthenticated", 403: "forbidden"}[answer.status_code]
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) in ((401, "unauthenticated"), (403, "forbidden"))
        assert set(error) == {"message", "type", "param", "code", "retryable"}
        return str(error["code"])

    async def ask_all(self, **caller: Any) -> dict[str, set[str]]:
        """The outcomes at all paths of each part."""
        return {
            part: {await self.ask(method, path, **caller) for method, path in paths} for part, paths in PATHS.items()
        }


@contextlib.asynccontextmanager
async def running_worker(model: pathlib.Path, **options: Any) -> AsyncIterator[RunningWorker]:
    """Raises what ``serve`` raises at the start."""
    values: dict[str, Any] = {
        "model": str(model),
        "pool_blocks": 96,
        "threads": 1,
        "shutdown_grace_s": 0.2,
        "record_block_digests": True,
    }
    ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(WorkerOptions(**(values | options)), on_ready=ready.set_result, stop=stop))
    await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        ready.cancel()
        task.result()
    line = ready.result()
    try:
        yield RunningWorker(line["http_url"], line)
    finally:
        stop.set()
        await task


def caller_context(ca_file: str, issued: Issued | None = None) -> ssl.SSLContext:
    """Of a caller that believes ``ca_file`` and shows ``issued``."""
    context = ssl.create_default_context(cafile=ca_file)
    if issued is not None:
        context.load_cert_chain(issued.cert_file, issued.key_file)
    return context
