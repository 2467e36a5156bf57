"""What a worker says of itself is not believed: where it serves HTTP, where it sends on to, what it would keep."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
from typing import Any

import pytest

from kvxfer.protocol.http_url import HostList
from kvxfer.router.fleet.workers import Workers
from kvxfer.types import Member, Membership, Role
from tests.support.fake_workers import FakeWorker, router_over


def elsewhere(member: Member, url: str) -> Member:
    return dataclasses.replace(member, info=dataclasses.replace(member.info, http_url=url))


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://127.0.0.1:{port}/x", "http://a@127.0.0.1:{port}"])
async def test_router_worker_with_a_wrong_address_gets_no_request(url: str, caplog: pytest.LogCaptureFixture) -> None:
    d = FakeWorker("d0")
    async with router_over(d) as router:
        wrong = elsewhere(d.member, url.format(port=d.port))
        with caplog.at_level(logging.WARNING, "kvxfer.router"):
            for revision in range(3):
                router.workers.update(Membership(revision, (wrong,)))
        assert [record.message for record in caplog.records] == ["a worker gets no requests"]  # once an incarnation
        assert (await router.complete()).status_code == 503
        assert (await router.client.get("/v1/models")).json()["data"] == []
        assert d.received == []
        router.publish(d)
        assert (await router.complete()).status_code == 200


def test_workers_beside_the_allowed_hosts_are_no_candidates() -> None:
    workers = Workers(allowed=HostList("allow_http_host", ["127.0.0.0/8"]))
    inside, outside = FakeWorker("d0").member, FakeWorker("d1").member
    members = (elsewhere(inside, "http://127.0.0.1:1"), elsewhere(outside, "http://10.0.0.1:1"))
    workers.update(Membership(1, members))
    assert [candidate.member.ref.agent_id for candidate in workers.candidates()] == ["d0"]


class Headed(FakeWorker):
    """Answers with headers of its own."""

    extra: tuple[tuple[bytes, bytes], ...] = ()
    status: int | None = None

    async def _json(self, send: Any, status: int, body: Any) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "status": self.status or status, "headers": [*message["headers"], *self.extra]}
            await send(message)

        await super()._json(with_headers, status, body)


async def test_router_keeps_no_cookie_of_a_worker_and_passes_none_on() -> None:
    d = Headed("d0")
    d.extra = ((b"set-cookie", b"session=of-one-client; Path=/"), (b"x-secret", b"1"))
    async with router_over(d) as router:
        for _ in range(2):
            answer = await router.complete()
            assert not {"set-cookie", "x-secret"} & answer.headers.keys()
        assert all("cookie" not in leg.headers for leg in d.received)


async def test_router_follows_no_redirect_of_a_worker() -> None:
    d, other = Headed("d0"), FakeWorker("p0", Role.PREFILL)
    async with router_over(d, other) as router:
        d.extra = ((b"location", f"http://127.0.0.1:{other.port}/v1/completions".encode()),)
        for status in (301, 307):
            d.status = status
            answer = await router.complete(kv_transfer_params=None)
            assert answer.status_code == 502
        assert all(leg.params is not None for leg in other.received)  # its own prefill legs alone


@pytest.mark.parametrize("length", [0, 100_000, 8 << 20])
async def test_router_leg_whose_worker_hangs_up_before_its_answer_ejects_no_worker(length: int) -> None:
    """As a server does that refuses a size, or one connection too many: the reset can overtake its answer, and all of a
    small body is in the sockets' buffers by then.
    """

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.transport.abort()

    d = FakeWorker("d0")
    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server, router_over(d, attempts_max=1) as router:
        d.quit()
        port = server.sockets[0].getsockname()[1]
        router.workers.update(Membership(2, (elsewhere(d.member, f"http://127.0.0.1:{port}"),)))
        answer = await router.complete(extra="x" * length)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "peer_gone")
        assert await router.metric('kvxfer_router_leg_failures_total{kind="unread",part="decode"}') == 1
        assert router.workers.statistics().ejected == 0


async def test_router_leg_whose_worker_answers_what_is_not_http_ejects_it_after_three() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")  # all of the request: what is left unread would reset the connection
        writer.write(b"\x00 no HTTP\r\n\r\n")
        writer.close()

    d = FakeWorker("d0")
    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with server, router_over(d, attempts_max=1) as router:
        d.quit()
        port = server.sockets[0].getsockname()[1]
        router.workers.update(Membership(2, (elsewhere(d.member, f"http://127.0.0.1:{port}"),)))
        for _ in range(3):
            assert router.workers.statistics().ejected == 0
            assert (await router.complete()).status_code == 502
        assert await router.metric('kvxfer_router_leg_failures_total{kind="malformed",part="decode"}') == 3
        assert router.workers.statistics().ejected == 1


async def test_router_that_can_open_no_connection_blames_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    d = FakeWorker("d0")
    async with router_over(d, attempts_max=1) as router:
        host, port = router.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))

        async def out_of_descriptors(*arguments: Any, **more: Any) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as broken:
            broken.setattr(asyncio.get_running_loop(), "create_connection", out_of_descriptors)
            body = b'{"model":"tiny","prompt":"hi"}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        await writer.wait_closed()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"overloaded"' in answer
        assert router.workers.statistics().ejected == 0
        assert (await router.complete()).status_code == 200


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429])
async def test_router_workers_4xx_ejects_no_worker(status: int) -> None:
    d, p = FakeWorker("d0"), FakeWorker("p0", Role.PREFILL)
    async with router_over(d, p) as router:
        for fake in (d, p):
            fake.always_fails = (status, {"error": {"message": "no", "type": "invalid_request_error", "code": "x"}})
            answer = await router.complete()
            expected = 503 if status == 429 else status
            assert answer.status_code in ((expected,) if fake is d else (expected, 200))  # d may be done before p
            fake.always_fails = None
        assert router.workers.statistics().ejected == 0
        assert (await router.complete()).headers["x-kvxfer-prefill"] == "remote"
