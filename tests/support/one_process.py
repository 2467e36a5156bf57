"""A router and mock engines on one event loop, in a thread of this process, and plain HTTP to them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from typing import Any

from kvxfer.mock_engine.options import EngineKind, EngineRole, MockEngineOptions
from kvxfer.mock_engine.server import serve as serve_engines
from kvxfer.router.options import RouterOptions
from kvxfer.router.server import serve as serve_router
from tests.support.mock_engine.mocks import Engine, read_all

START_S = 30.0
MODEL = "mock"


@dataclasses.dataclass
class PlainAnswer:
    """``body`` is as it was framed: the tests of the server look at that."""

    status: int
    headers: dict[str, str]
    body: bytes


class OneProcess:
    """``engines`` are in the order of their roles."""

    def __init__(self, url: str, engines: list[Engine]) -> None:
        self.url = url
        self.engines = engines
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)

    def send(self, data: bytes, *, timeout_s: float = 30.0) -> PlainAnswer:
        """One request's bytes, on a connection of its own that ends with the answer; raises AssertionError where none
        comes, or none that is whole."""
        return ask(self._host, self._port, data, timeout_s=timeout_s)


def ask(host: str, port: int, data: bytes, *, timeout_s: float = 30.0) -> PlainAnswer:
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # an answer may come before the body's end
            connection.sendall(data)
        said = read_all(connection, timeout_s=timeout_s)
    head, mark, body = said.partition(b"\r\n\r\n")
    assert mark, (data[:200], said[:200])
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        assert body.endswith(b"0\r\n\r\n"), (data[:200], said[-200:])
    elif "content-length" in headers and not data.startswith(b"HEAD "):
        assert len(body) == int(headers["content-length"]), (data[:200], said[:200])
    return PlainAnswer(int(first.split()[1]), headers, body)


def request(method: str, target: bytes, body: bytes = b"", *headers: bytes) -> bytes:
    """The bytes of a request, after whose answer the connection closes."""
    lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: localhost", b"connection: close", *headers]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", b""]) + body


async def _serve(
    roles: tuple[str, ...], kind: str, dialect: str, options: dict[str, Any], ready: list[Any], stop: asyncio.Event
) -> None:
    mocks = MockEngineOptions(
        count=len(roles),
        roles=tuple(EngineRole(role) for role in roles),
        kind=EngineKind(kind),
        model=(MODEL,),
        max_model_len=512,
        ttft_ms=0.0,
        itl_ms=0.0,
    )
    engines_ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    engines_stop = asyncio.Event()
    engines = asyncio.create_task(serve_engines(mocks, on_ready=engines_ready.set_result, stop=engines_stop))
    try:
        shown = [Engine(one) for one in (await engines_ready)["engines"]]
        ending = "?bootstrap_port={}" if dialect in ("sglang", "vllm-mooncake") else ""
        urls = {
            role: tuple(one.url + ending.format(one.port) for one in shown if one.shown["role"] == role)
            for role in EngineRole
        }
        settings = RouterOptions(
            prefill=urls[EngineRole.PREFILL],
            decode=urls[EngineRole.DECODE],
            engine=urls[EngineRole.BOTH],
            dialect=dialect,
            **{"shutdown_grace_s": 0.5, **options},
        )

        def on_ready(line: dict[str, Any]) -> None:
            ready[0] = OneProcess(line["http_url"], shown)
            ready[1].set()

        await serve_router(settings, on_ready=on_ready, stop=stop)
    finally:
        engines_stop.set()
        await engines


@contextlib.contextmanager
def one_process(*roles: str, kind: str = "any", dialect: str = "vllm", **options: Any) -> Iterator[OneProcess]:
    """Mock engines of ``roles`` behind a router with ``options``, ready."""
    ready: list[Any] = [None, threading.Event()]
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    failures: list[BaseException] = []

    async def main() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        await _serve(roles, kind, dialect, options, ready, stop)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
            ready[1].set()

    thread = threading.Thread(target=run, name="router and engines")
    thread.start()
    try:
        assert ready[1].wait(START_S)
        there = ready[0]
        assert there is not None, failures
        _wait_ready(there)
        yield there
    finally:
        if loops:
            loop, stop = loops[0]
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)
    assert not failures, failures


def _wait_ready(there: OneProcess) -> None:
    for _ in range(500):
        if there.send(request("GET", b"/ready")).status == 200:
            return
        threading.Event().wait(0.02)
    raise AssertionError("the router never became ready")
