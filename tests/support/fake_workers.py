"""Fake workers for the router's tests: real HTTP servers with scripted answers, here or in a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import uvicorn

from kvxfer.router.auth import ApiKeys
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.options import RouterOptions
from kvxfer.router.server import serve_workers
from kvxfer.router.upstream import WorkerPools
from kvxfer.serving.server import listening
from kvxfer.types import (
    AgentRef,
    CompatibilityRecord,
    DataAddress,
    Exposure,
    Incarnation,
    Member,
    Membership,
    PoolRecord,
    Role,
    WorkerInfo,
)
from tests.support.certificates import Identity

MODEL = "tiny"
_numbers = itertools.count(1)


class Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclasses.dataclass
class Received:
    """One request as a worker saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    left: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """The router dropped the connection before the answer was complete."""
    answered: bool = False

    @property
    def params(self) -> dict[str, Any] | None:
        return self.body.get("kv_transfer_params")


def failing(status: int, code: str, *, retryable: bool, kind: str = "server_error") -> tuple[int, dict[str, Any]]:
    error = {"message": f"scripted {code}", "type": kind, "param": None, "code": code, "retryable": retryable}
    return status, {"error": error}


class Cut(Exception):
    """Raised inside the fake so that its server drops the connection mid-answer, as a killed process would."""


class FakeWorker:
    """Scripted by its attributes; each may be changed at any time."""

    def __init__(
        self,
        name: str,
        role: Role = Role.DECODE,
        *,
        model: str = MODEL,
        host_id: str = "here",
        dialect: str = "kvxfer",
    ) -> None:
        self.name = name
        self.dialect = dialect
        self.role = role
        self.model = model
        self.host_id = host_id
        self.context_tokens = 1024
        self.pools: tuple[PoolRecord, ...] = ()
        self.received: list[Received] = []
        self.failures: list[tuple[int, Any]] = []
        self.always_fails: tuple[int, Any] | None = None
        self.hold: asyncio.Event | None = None
        self.needs_prefill = False
        """Of decode legs: answered once one of ``peers`` did the prefill leg of the same transfer, as real ones are."""
        self.peers: tuple[FakeWorker, ...] = ()
        self.cached_tokens: int | None = None
        """What its usage says, if anything."""
        self.prompt_tokens = 4
        self.account: dict[str, Any] = {"bytes_moved": 7}
        self.tokens = ["one", " two", " three"]
        self.delay_s = 0.0
        self.cut_after: int | None = None
        self.first_event: dict[str, Any] | None = None
        self.sends_done = True
        self.signs: list[bytes] = []
        """Keep-alives that a stream begins with."""
        self.after_signs: asyncio.Event | None = None
        self.cuts_after_signs = 0
        """So many streams end behind them."""
        self.arrived = asyncio.Event()
        self.port = 1  # without a listener until it runs
        self.quit: Callable[[], None] = lambda: None
        self.identity: Identity | None = None
        """It speaks TLS with this certificate."""
        self.client_ca: str = ""
        """A file; the router must show a certificate that it signed."""
        self.incarnation = Incarnation(next(_numbers), bytes(16))

    @property
    def url(self) -> str:
        return f"{'http' if self.identity is None else 'https'}://127.0.0.1:{self.port}"

    def has_prefilled(self, transfer_id: str) -> bool:
        legs = (leg for leg in self.received if leg.params and leg.params["transfer_id"] == transfer_id)
        return any(leg.answered and leg.params and leg.params["role"] == "prefill" for leg in legs)

    def has_blocks(self, count: int) -> FakeWorker:
        """With a pool of ``count`` blocks of 16 tokens."""
        record = CompatibilityRecord("m", "c", "w", "f32", 2, 1, 8, 16, "bhd", "none", "rope", "sdpa")
        self.pools = (PoolRecord(1, record, count, 64, Exposure.POOL, is_shareable=True),)
        return self

    @property
    def member(self) -> Member:
        info = WorkerInfo(self.name, self.role, self.model, self.url, self.context_tokens, 16, self.dialect)
        address = DataAddress("127.0.0.1", 1, "", self.host_id)
        return Member(AgentRef(self.name, self.incarnation), info, address, self.pools)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeWorker]:
        with listening("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
            config = uvicorn.Config(
                self, lifespan="off", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=1
            )
            if self.identity is not None:
                config.ssl_certfile, config.ssl_keyfile = self.identity.cert, self.identity.key
            if self.client_ca:
                config.ssl_ca_certs, config.ssl_cert_reqs = self.client_ca, ssl.CERT_REQUIRED
            server = Quiet(config)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            self.quit = lambda: vars(server).update(should_exit=True, force_exit=True)
            try:
                yield self
            finally:
                self.quit()
                await asyncio.wait({task})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        content = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            content += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        request = Received(scope["path"], headers, json.loads(content))
        self.received.append(request)
        self.arrived.set()
        work = asyncio.create_task(self._answer(request, send))
        leaving = asyncio.create_task(receive())
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            request.left.set()
            work.cancel()
        leaving.cancel()
        await asyncio.wait({work, leaving})
        if not work.cancelled():
            work.result()

    async def _answer(self, request: Received, send: Any) -> None:
        params = request.params or {}
        if self.hold is not None:
            await self.hold.wait()
        if self.needs_prefill and params.get("role") == "decode":
            await eventually(lambda: any(peer.has_prefilled(params["transfer_id"]) for peer in self.peers))
        failure = self.failures.pop(0) if self.failures else self.always_fails
        if failure is not None:
            status, body = failure
            await self._json(send, status, body)
            return
        if params.get("role") == "prefill" and self.dialect == "kvxfer":
            timings = {"queue_s": 0.0, "prefill_s": 0.25, "ended_unix_s": 1.0}
            usage = {"prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens or 0}
            body = {"object": "kvxfer.prefill", "usage": usage, "timings": timings}
            await self._json(send, 200, body)
        elif request.body.get("stream") and request.path != "/v1/embeddings":
            await self._stream(request, send)
        else:
            if self.cut_after is not None:
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"999")]})
                await send({"type": "http.response.body", "body": b'{"id', "more_body": True})
                raise Cut
            await asyncio.sleep(self.delay_s)
            await self._json(send, 200, self._whole(request))
        request.answered = True

    def _whole(self, request: Received) -> dict[str, Any]:
        text = "".join(self.tokens)
        is_chat = request.path.endswith("chat/completions")
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        return {
            "id": "x",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 1,
            "model": self.model,
            "choices": [choice],
            "usage": self._usage(),
            **self._said(request),
        }

    def _account(self, request: Received) -> dict[str, Any]:
        return {"transfer_id": (request.params or {}).get("transfer_id"), **self.account}

    def _said(self, request: Received) -> dict[str, Any]:
        account = self._account(request)
        return {"kv_transfer_params": {"kvxfer": account}} if self.dialect == "vllm" else {"kvxfer": account}

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 3}
        usage["total_tokens"] = self.prompt_tokens + 3
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens, "audio_tokens": 0}
        return usage

    async def _json(self, send: Any, status: int, body: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _stream(self, request: Received, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for sign in self.signs:
            await send({"type": "http.response.body", "body": sign, "more_body": True})
        if self.after_signs is not None:
            await self.after_signs.wait()
        if self.cuts_after_signs:
            self.cuts_after_signs -= 1
            raise Cut
        for event in self._events(request):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(self.delay_s)
        if self.cut_after is not None:
            raise Cut
        await send({"type": "http.response.body", "body": b""})

    def _events(self, request: Received) -> Iterator[bytes]:
        is_chat = request.path.endswith("chat/completions")

        def chunk(text: str | None, finish: str | None = None, **more: Any) -> bytes:
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
            if is_chat:
                choice["delta"] = {} if text is None else {"content": text}
            else:
                choice["text"] = text or ""
            base = {"id": "x", "object": "chunk", "created": 1, "model": self.model}
            return b"data: " + json.dumps({**base, "choices": [choice], **more}).encode() + b"\n\n"

        if self.first_event is not None:
            yield b"data: " + json.dumps(self.first_event).encode() + b"\n\n"
            return
        if is_chat:
            yield (
                b'data: {"id":"x","object":"chunk","created":1,"model":"tiny","choices":[{"index":0,"delta":'
                b'{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
            )
        for number, token in enumerate(self.tokens):
            if number == self.cut_after:
                yield b'data: {"id":"x","choi'
                return
            yield chunk(token)
        yield chunk(None, "stop", **({} if self.dialect == "vllm" else {"kvxfer": self._account(request)}))
        if (request.body.get("stream_options") or {}).get("include_usage"):
            usage = self._usage()
            yield (
                b"data: "
                + json.dumps(
                    {"id": "x", "object": "chunk", "created": 1, "model": self.model, "choices": [], "usage": usage}
                ).encode()
                + b"\n\n"
            )
        if self.sends_done:
            yield b"data: [DONE]\n\n"


@dataclasses.dataclass
class Running:
    """A router over fake workers, and a client of it."""

    url: str
    client: httpx.AsyncClient
    workers: Workers
    fakes: list[FakeWorker]
    stop: asyncio.Event
    task: asyncio.Task[None]
    ready: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The ready line."""

    def publish(self, *fakes: FakeWorker, **changes: Any) -> None:
        members = tuple(dataclasses.replace(fake.member, **changes) for fake in fakes)
        self.workers.update(Membership(1, members))

    async def complete(self, **more: Any) -> httpx.Response:
        headers = more.pop("headers", {})
        body = {"model": MODEL, "prompt": "hello there", **more}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def chat(self, **more: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], **more}
        return await self.client.post("/v1/chat/completions", json=body)

    async def metric(self, sample: str) -> float:
        """The value of one line of ``/metrics``; 0 where it is not there."""
        text = (await self.client.get("/metrics")).text
        return next((float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(sample + " ")), 0.0)

    async def wait_metric(self, sample: str, value: float) -> None:
        """Wait until a line of ``/metrics`` says ``value``: requests are counted after their last byte was sent."""

        async def is_there() -> bool:
            return await self.metric(sample) == value

        await eventually(is_there)


@contextlib.asynccontextmanager
async def router_over(
    *fakes: FakeWorker, keys: ApiKeys | None = None, verify: ssl.SSLContext | bool = True, **options: Any
) -> AsyncIterator[Running]:
    """Start the fakes and a router that knows them; everything is stopped at the end. ``verify`` is the client's."""
    # A machine that stops this process for a while is no worker out of reach.
    settings = RouterOptions(**{"shutdown_grace_s": 0.2, "connect_timeout_s": 30.0, **options})
    workers = Workers(
        make_pool=WorkerPools(settings.worker_ca_file, settings.worker_cert_file, settings.worker_key_file)
    )
    workers.is_connected = True
    stop = asyncio.Event()
    ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            fake.peers = fakes
            await stack.enter_async_context(fake.running())
        listener = stack.enter_context(listening("127.0.0.1", 0))
        task = asyncio.create_task(
            serve_workers(settings, workers, keys or ApiKeys(), listener, on_ready=ready.set_result, stop=stop)
        )
        line = await ready
        url = line["http_url"]
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=30.0, verify=verify)
        )
        running = Running(url, client, workers, list(fakes), stop, task, line)
        running.publish(*fakes)
        try:
            yield running
        finally:
            await client.aclose()
            stop.set()
            for fake in fakes:
                fake.quit()
            await task
            assert workers.statistics().inflight == 0


def events(text: str) -> list[Any]:
    """The data of every event of a stream's text; each must be whole."""
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts), parts
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def broken(chunks: list[Any]) -> dict[str, Any]:
    """The error that ended a stream, which ended well formed."""
    assert chunks[-1] == "[DONE]", chunks
    return dict(chunks[-2]["error"])


def texts(chunks: list[Any]) -> str:
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for chunk in chunks
        if isinstance(chunk, dict)
        for choice in chunk.get("choices", ())
    )


async def eventually(condition: Callable[[], bool | Awaitable[bool]], *, within_s: float = 10.0) -> None:
    """Wait until ``condition`` holds; raise TimeoutError if it does not in time."""
    async with asyncio.timeout(within_s):
        for pause_s in itertools.repeat(0.01):
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(pause_s)


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _main() -> None:
    fake = FakeWorker(sys.argv[1])
    fake.tokens = [f" {number}" for number in range(10_000)]
    fake.delay_s = 0.02
    async with fake.running():
        print(fake.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
