"""Requests for paths that the router does not know, passed to one worker of a pool."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvxfer.policy.keylimits import KeyLimits
from kvxfer.router.auth import ApiKeys
from kvxfer.router.keyfile import KeyEntry, digest_of
from kvxfer.types import Role
from tests.support.fake_workers import Cut, FakeWorker, Received, eventually, free_port, router_over
from tests.support.raw_http import ask, request

AUDIO = "/v1/audio/=decode"


class Echo(FakeWorker):
    """Answers each request with its own bytes, or as it is scripted."""

    def __init__(self, name: str, role: Role = Role.DECODE, **more: Any) -> None:
        super().__init__(name, role, **more)
        self.asked: list[dict[str, Any]] = []
        self.status = 200
        self.extra: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] | None = None
        self.stall: asyncio.Event | None = None
        """Waited for before the answer's head."""
        self.cut_amid: bool = False
        self.sent = 0
        self.was_left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {key.decode(): value.decode("latin-1") for key, value in scope["headers"]}
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        self.asked.append({"method": scope["method"], "target": target, "headers": headers, "body": body})
        self.received.append(Received(scope["path"], headers, {}))
        self.arrived.set()
        work = asyncio.create_task(self._reply(body, send))
        leaving = asyncio.create_task(receive())
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            self.was_left.set()
            work.cancel()
        leaving.cancel()
        await asyncio.wait({work, leaving})
        if not work.cancelled():
            work.result()

    async def _reply(self, body: bytes, send: Any) -> None:
        if self.stall is not None:
            await self.stall.wait()
        kind = (b"content-type", b"application/octet-stream")
        await send({"type": "http.response.start", "status": self.status, "headers": [kind, *self.extra]})
        for piece in self.pieces if self.pieces is not None else [body]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self.sent += len(piece)
        if self.cut_amid:
            raise Cut
        await send({"type": "http.response.body", "body": b""})


class HangsUp(FakeWorker):
    """Reads a request, and closes the connection."""

    asked = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeWorker]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                self.asked += 1
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self


@contextlib.asynccontextmanager
async def connected(url: str, **more: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), **more)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_bytes_query_and_method_go_through_as_they_are() -> None:
    d = Echo("d0")
    async with router_over(d, pass_through=(AUDIO,)) as router:
        sent = os.urandom(300_000)
        answer = await router.client.put(
            "/v1/audio/speech%20x?a=1&b=%2F", content=sent, headers={"content-type": "audio/wav; x=1", "accept": "a/b"}
        )
        assert answer.status_code == 200
        assert answer.content == sent
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["x-kvxfer-attempt"] == "1"
        [asked] = d.asked
        assert asked["method"] == "PUT"
        assert asked["target"] == b"/v1/audio/speech%20x?a=1&b=%2F"
        assert asked["headers"]["content-type"] == "audio/wav; x=1"
        assert asked["headers"]["accept"] == "a/b"


async def test_only_listed_headers_cross_in_both_directions() -> None:
    d = Echo("d0")
    d.extra = [(b"set-cookie", b"a=b"), (b"location", b"http://10.0.0.1/"), (b"etag", b'"1"'), (b"server", b"x")]
    async with router_over(d, pass_through=(AUDIO,), forward_header=("x-mine",)) as router:
        sent = {"x-mine": "1", "x-other": "2", "cookie": "c", "authorization": "Bearer s", "x-request-id": "r1"}
        sent |= {"x-data-parallel-rank": "3", "x-kvxfer-attempt": "9"}
        answer = await router.client.get("/v1/audio/x", headers=sent)
        assert answer.headers["x-request-id"] == "r1"
        assert answer.headers["etag"] == '"1"'
        assert not {"set-cookie", "location"} & set(answer.headers)
        asked = d.asked[0]["headers"]
        assert asked["x-mine"] == "1"
        assert asked["x-request-id"] == "r1"
        assert "traceparent" in asked
        assert "content-type" not in asked
        names = ("x-other", "cookie", "authorization", "x-data-parallel-rank", "x-kvxfer-attempt")
        assert not set(names) & set(asked)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_every_method_passes(method: str) -> None:
    d = Echo("d0")
    async with router_over(d, pass_through=(AUDIO,)) as router:
        answer = await router.client.request(method, "/v1/audio/x")
        assert answer.status_code == 200
        assert d.asked[0]["method"] == method


@pytest.mark.parametrize("status", [201, 204, 302, 304, 404, 418, 429, 500, 503])
async def test_a_workers_own_status_is_passed_on_and_never_retried(status: int) -> None:
    fakes = [Echo("d0"), Echo("d1")]
    for fake in fakes:
        fake.status, fake.pieces = status, [] if status in (204, 304) else [b"said"]
    async with router_over(*fakes, pass_through=(AUDIO,)) as router:
        answer = await router.client.get("/v1/audio/x")
        assert answer.status_code == status
        assert answer.content == (b"" if status in (204, 304) else b"said")
        assert sum(len(fake.asked) for fake in fakes) == 1


@pytest.mark.parametrize(
    ("pool", "expected"), [("prefill", {"p0"}), ("decode", {"d0"}), ("engine", {"e0"}), ("other", {"d1"})]
)
async def test_the_pool_says_which_workers_are_asked(pool: str, expected: set[str]) -> None:
    p, d, e = Echo("p0", Role.PREFILL), Echo("d0"), Echo("e0", Role.BOTH, dialect="plain")
    fakes = (p, d, e, Echo("d1", Role.BOTH, model="other", dialect="plain"))
    if pool in ("decode", "engine"):
        fakes = (p, d, e, Echo("p1", Role.PREFILL, model="other"))
    async with router_over(*fakes, pass_through=(f"/x/={pool}",)) as router:
        for _ in range(4):
            assert (await router.client.get("/x/y")).status_code == 200
        assert {fake.name for fake in fakes if fake.asked} == expected


async def test_the_worker_with_the_least_to_do_is_asked() -> None:
    fakes = [Echo("d0"), Echo("d1")]
    hold = asyncio.Event()
    for fake in fakes:
        fake.stall = hold
    async with router_over(*fakes, pass_through=(AUDIO,)) as router:
        asking = [asyncio.create_task(router.client.get("/v1/audio/x")) for _ in range(8)]
        await eventually(lambda: sum(len(fake.asked) for fake in fakes) == 8)
        assert [len(fake.asked) for fake in fakes] == [4, 4]
        hold.set()
        await asyncio.gather(*asking)


@pytest.mark.parametrize(("method", "is_tried_again"), [("GET", True), ("DELETE", True), ("POST", False)])
async def test_a_worker_that_hangs_up_is_replaced_only_where_the_method_may_be_repeated(
    method: str, is_tried_again: bool
) -> None:
    fakes = [HangsUp("d0"), HangsUp("d1")]
    async with router_over(*fakes, pass_through=(AUDIO,)) as router:
        answer = await router.client.request(method, "/v1/audio/x", content=b"x" if method == "POST" else None)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "peer_gone"
        assert sum(fake.asked for fake in fakes) == (2 if is_tried_again else 1)


async def test_a_worker_that_refuses_the_connection_is_replaced_for_any_method() -> None:
    gone, d = Echo("d0"), Echo("d1")
    async with router_over(d, pass_through=(AUDIO,)) as router:
        gone.port = free_port()
        router.publish(gone, d)
        for _ in range(4):
            answer = await router.client.post("/v1/audio/x", content=b"body")
            assert answer.status_code == 200
            assert answer.content == b"body"
        router.publish(gone)
        answer = await router.client.post("/v1/audio/x", content=b"body")
        assert answer.status_code == 502
        router.publish()
        answer = await router.client.post("/v1/audio/x", content=b"body")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]


async def test_an_answer_that_breaks_amid_is_cut_and_not_repeated() -> None:
    fakes = [Echo("d0"), Echo("d1")]
    for fake in fakes:
        fake.pieces, fake.cut_amid = [b"x" * 1000], True
    async with router_over(*fakes, pass_through=(AUDIO,)) as router:
        with pytest.raises(httpx.HTTPError):
            await router.client.get("/v1/audio/x")
        assert sum(len(fake.asked) for fake in fakes) == 1
        await router.wait_metric('kvxfer_router_requests_total{outcome="broken_stream",route="/v1/audio/"}', 1)


async def test_a_client_that_leaves_frees_the_worker() -> None:
    d = Echo("d0")
    d.stall = asyncio.Event()
    async with router_over(d, pass_through=(AUDIO,)) as router:
        task = asyncio.create_task(router.client.get("/v1/audio/x"))
        await asyncio.wait_for(d.arrived.wait(), 10)
        task.cancel()
        await asyncio.wait({task})
        await asyncio.wait_for(d.was_left.wait(), 10)
        await router.wait_metric('kvxfer_router_requests_total{outcome="disconnected",route="/v1/audio/"}', 1)


async def test_a_client_that_reads_slowly_holds_the_worker_up() -> None:
    d = Echo("d0")
    d.pieces = [bytes(64 << 10)] * 1024
    async with (
        router_over(d, pass_through=(AUDIO,), request_timeout_s=2.0) as router,
        connected(router.url, limit=1024) as (_, writer),
    ):
        writer.write(b"GET /v1/audio/x HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(1.0)
        assert 0 < d.sent < 32 << 20
        await router.wait_metric('kvxfer_router_requests_total{outcome="timed_out",route="/v1/audio/"}', 1)


async def test_a_worker_that_sends_no_first_byte_ends_by_its_deadline() -> None:
    d = Echo("d0")
    d.stall = asyncio.Event()
    async with router_over(d, pass_through=(AUDIO,), first_byte_timeout_s=0.2) as router:
        answer = await router.client.post("/v1/audio/x", content=b"x")
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline"


async def test_the_whole_has_a_deadline() -> None:
    d = Echo("d0")
    d.stall = asyncio.Event()
    async with router_over(d, pass_through=(AUDIO,), request_timeout_s=0.3) as router:
        answer = await router.client.post("/v1/audio/x", content=b"x")
        assert answer.status_code == 504


async def test_keys_bounds_and_drains_are_those_of_every_request() -> None:
    d = Echo("d0")
    async with router_over(d, keys=ApiKeys(("secret",)), pass_through=(AUDIO,), max_body_bytes=1000) as router:
        assert (await router.client.get("/v1/audio/x")).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert (await router.client.get("/v1/audio/x", headers=key)).status_code == 200
        answer = await router.client.post("/v1/audio/x", content=bytes(1001), headers=key)
        assert answer.status_code == 413
        router.workers.drain("d0")
        assert (await router.client.get("/v1/audio/x", headers=key)).status_code == 503


@pytest.mark.parametrize("rule", [AUDIO, "/v1/audio/x=decode", "/v1/audio/x/=decode"])
async def test_a_path_that_may_be_read_otherwise_reaches_no_worker(rule: str) -> None:
    """``tests/router/test_pass_rules.py`` has the paths; some reach no rule once they are decoded, which is 404."""
    d = Echo("d0")
    async with router_over(d, pass_through=(rule,)) as router:
        for rest in (
            "../x",
            "%2e%2e/x",
            "..%5cx",
            "..;/x",
            "%252e%252e/x",
            "%c0%ae%c0%ae/x",
            "%00",
            "x%00",
            "..%2fx",
            "/x",
        ):
            for prefix in ("/v1/audio/", "/v1/audio/x/", "http://x/v1/audio/", "/v1%2faudio/"):
                answer = await ask(int(router.url.rpartition(":")[2]), request("GET", prefix + rest))
                assert answer.status in (400, 404), (prefix, rest, answer)
        assert d.asked == []


async def test_other_paths_stay_unknown_and_own_routes_stay_the_routers() -> None:
    d = Echo("d0")
    async with router_over(d, pass_through=("/v1/audio/=decode", "/v1/chat/completions/=decode")) as router:
        assert (await router.client.get("/v1/audio")).status_code == 404
        assert (await router.client.get("/v1/other")).status_code == 404
        assert (await router.client.get("/v1/models")).json()["data"][0]["id"] == d.model
        assert (await router.client.get("/v1/chat/completions/x")).content == b""
        assert len(d.asked) == 1
        bad = await router.client.post("/v1/chat/completions", content=b"{}")
        assert json.loads(bad.content)["error"]["param"] == "messages"


async def test_a_key_for_some_models_passes_through_to_those_only() -> None:
    keys = ApiKeys()
    keys.replace([KeyEntry("team", (digest_of(b"secret"),), KeyLimits(), frozenset({"tiny"}))])
    key = {"authorization": "Bearer secret"}
    async with router_over(Echo("d0"), keys=keys, pass_through=(AUDIO, "/v1/tiny/=tiny")) as router:
        assert (await router.client.get("/v1/tiny/x", headers=key)).status_code == 200
        refused = await router.client.get("/v1/audio/x", headers=key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")


async def test_a_body_that_passes_through_costs_its_key_about_its_tokens() -> None:
    keys = ApiKeys()
    keys.replace([KeyEntry("team", (digest_of(b"secret"),), KeyLimits(tokens_per_minute=1000.0), None)])
    key = {"authorization": "Bearer secret"}
    async with router_over(Echo("d0"), keys=keys, pass_through=(AUDIO,)) as router:
        statuses = [
            (await router.client.post("/v1/audio/x", content=bytes(2000), headers=key)).status_code for _ in range(3)
        ]
        assert statuses == [200, 200, 429]
        assert await router.metric('kvxfer_router_key_tokens_total{key="team"}') == 1000
