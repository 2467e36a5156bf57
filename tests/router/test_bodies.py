"""Bodies of requests that do not come, that are longer than may be, and what of them a worker gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvxfer.engine.options import WorkerOptions
from kvxfer.openai.transfer_params import LEG_BYTES_MAX
from kvxfer.policy.admit import Admission, admit
from kvxfer.router.options import RouterOptions
from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, eventually, router_over


async def test_router_body_that_never_ends_is_408_and_keeps_no_other_out() -> None:
    d = FakeWorker("d0")
    async with router_over(d, max_inflight=1, body_timeout_s=1.0) as router:
        host, _, port = router.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert (await router.complete()).status_code == 200  # an unfinished body is no request yet
        answer = await asyncio.wait_for(reader.read(), 5.0)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout_s 1" in answer
        assert (await router.complete()).status_code == 200
        writer.close()
        await writer.wait_closed()


async def test_the_door_counts_a_request_once_and_before_its_body_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counting(inflight: int, **others: Any) -> Admission:
        asked.append(inflight)
        return admit(inflight, **others)

    monkeypatch.setattr("kvxfer.router.front.admit", counting)
    d = FakeWorker("d0")
    d.hold = asyncio.Event()
    async with router_over(d, max_inflight=1) as router:
        for _ in range(2):  # one that is refused for its body gives its place back
            assert (await router.client.post("/v1/completions", content=b"{")).status_code == 400
        inside = asyncio.create_task(router.complete())
        await eventually(lambda: len(d.received) == 1)
        assert (await router.client.post("/v1/completions", content=b"{")).status_code == 503
        d.hold.set()
        assert (await inside).status_code == 200
    assert asked == [0, 0, 0, 1]


@pytest.mark.parametrize("digits", [7, 30, 5000])
async def test_router_body_that_says_it_is_too_long_is_refused(digits: int) -> None:
    d = FakeWorker("d0")
    async with router_over(d, max_body_bytes=100_000) as router:
        host, _, port = router.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {'9' * digits}\r\n\r\n{{".encode())
        answer = await asyncio.wait_for(reader.read(65536), 5.0)
        assert answer.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 ")), answer
        assert b"Traceback" not in answer
        assert (await router.complete()).status_code == 200
        writer.close()
        await writer.wait_closed()


class Raw(FakeWorker):
    """Keeps the bodies as they came."""

    def __init__(self, *names: Any, **more: Any) -> None:
        super().__init__(*names, **more)
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        content = bytearray()

        async def recorded() -> Any:
            message = await receive()
            content.extend(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                self.bodies.append(bytes(content))
            return message

        await super().__call__(scope, recorded, send)


ODD = (
    '{ "model" :"tiny",\t"prompt":"\u9de1 \\u00e9","x":["\\ud800",1.0,1e2,-0,1e999,{"a":1,"a":2}],'
    '"x\\u0079":"}",  "max_tokens": 3 }\n'
).encode()


@pytest.mark.parametrize("dialect", ["kvxfer", "vllm"])
async def test_router_legs_get_the_clients_bytes_as_they_came(dialect: str) -> None:
    p, d = Raw("p", Role.PREFILL, dialect=dialect), Raw("d", dialect=dialect)
    async with router_over(p, d) as router:
        answer = await router.client.post("/v1/completions", content=ODD)
        assert answer.headers["x-kvxfer-prefill"] == "remote"
        router.publish(d)
        assert (await router.client.post("/v1/completions", content=ODD)).status_code == 200
    rest = b"," + ODD.lstrip()[1:]
    assert d.bodies[0].startswith(b'{"kv_transfer_params":{')
    assert d.bodies[0].endswith(rest)
    assert d.bodies[1] == ODD  # nothing to add, nothing to change
    if dialect == "kvxfer":
        assert p.bodies[0].endswith(rest)
    else:
        assert b'"max_tokens":1,' in p.bodies[0]
        assert p.bodies[0].endswith(rest.replace(b',  "max_tokens": 3', b""))


async def test_router_clients_own_transfer_params_never_reach_a_worker() -> None:
    p, d = FakeWorker("p", Role.PREFILL), FakeWorker("d")
    async with router_over(p, d) as router:
        body = b'{"kv_transfer_\\u0070arams":{"mine":1},"model":"tiny","kv_transfer_params":{"mine":2},"prompt":"hi"}'
        for fakes in ((p, d), (d,)):
            router.publish(*fakes)
            assert (await router.client.post("/v1/completions", content=body)).status_code == 200
    assert [leg.body.get("kv_transfer_params", {}).get("mine") for leg in p.received + d.received] == [None] * 3


def test_router_body_bound_lies_below_the_workers_by_what_the_router_adds() -> None:
    assert RouterOptions().max_body_bytes + LEG_BYTES_MAX <= WorkerOptions().max_body_bytes
