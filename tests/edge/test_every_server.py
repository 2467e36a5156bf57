"""What holds of every HTTP server of ours: no answer is built from ``Host``, a bad one is refused, HEAD is GET without
a body."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable

import prometheus_client
import pytest

from kvxfer.connectors.tier.service import TierHttp
from kvxfer.coordinator.metrics import CoordinatorMetrics, MetricsServer
from kvxfer.mock_engine.options import MockEngineOptions
from kvxfer.mock_engine.server import serve as serve_mock
from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, router_over
from tests.support.raw_http import ask, request
from tests.support.worker_http import running_worker

Ports = dict[str, int]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@contextlib.asynccontextmanager
async def router_ports(tiny_path: pathlib.Path) -> AsyncIterator[Ports]:
    fake = FakeWorker("e0", Role.BOTH, dialect="plain")
    async with router_over(fake, probe_port=0, metrics_port=0) as router:
        yield {
            "/v1/models": port_of(router.url),
            "/live": port_of(router.ready["probe_url"]),
            "/metrics": port_of(router.ready["metrics_url"]),
        }


@contextlib.asynccontextmanager
async def worker_ports(tiny_path: pathlib.Path) -> AsyncIterator[Ports]:
    async with running_worker(tiny_path, probe_port=0, metrics_port=0) as worker:
        yield {
            "/v1/models": port_of(worker.url),
            "/live": port_of(worker.ready["probe_url"]),
            "/metrics": port_of(worker.ready["metrics_url"]),
        }


@contextlib.asynccontextmanager
async def mock_ports(tiny_path: pathlib.Path) -> AsyncIterator[Ports]:
    stop = asyncio.Event()
    ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve_mock(MockEngineOptions(), on_ready=ready.set_result, stop=stop))
    try:
        yield {"/metrics": port_of((await ready)["http_url"])}
    finally:
        stop.set()
        await task


@contextlib.asynccontextmanager
async def coordinator_ports(tiny_path: pathlib.Path) -> AsyncIterator[Ports]:
    server = MetricsServer(CoordinatorMetrics(), "127.0.0.1", 0)
    try:
        yield {"/live": server.port}
    finally:
        await asyncio.to_thread(server.close)


@contextlib.asynccontextmanager
async def tier_ports(tiny_path: pathlib.Path) -> AsyncIterator[Ports]:
    server = TierHttp("127.0.0.1", 0, prometheus_client.CollectorRegistry(), "")
    try:
        yield {"/health": port_of(server.url)}
    finally:
        await asyncio.to_thread(server.close)


Server = Callable[[pathlib.Path], contextlib.AbstractAsyncContextManager[Ports]]
SERVERS: dict[str, Server] = {
    "router": router_ports,
    "worker": worker_ports,
    "mock engine": mock_ports,
    "coordinator": coordinator_ports,
    "tier": tier_ports,
}
"""What each serves: a path, and the port that has it."""
BAD_HOSTS = (
    *("a b", "a/b", "a@b", "a,b", "a?b", "a#b", "http://a", "[::1", "::1", "a:b", "a:1:2", "a:123456", "a%00", "a%2fb"),
    *("a\\b", "a\tb", '"a"', "<a>", "a;b", "é", "a" * 600),
)
GOOD_HOSTS = ("", "x", "x:1", "x:", "127.0.0.1:80", "[::1]", "[::1]:80", "a_b.c-d", "X.Y")


@pytest.mark.parametrize("name", SERVERS)
async def test_a_request_that_does_not_name_one_host_is_refused(name: str, tiny_path: pathlib.Path) -> None:
    async with SERVERS[name](tiny_path) as ports:
        for path, port in ports.items():
            for host in BAD_HOSTS:
                answer = await ask(port, request("GET", path, host=host))
                assert answer.status == 400, (path, host, answer)
            for sent in (
                request("GET", path, host=None),
                request("GET", path, "host: y"),
                request("GET", path, "host: x"),
                request("GET", path, "host: y", version="1.0"),
                request("GET", path, host="a b", version="1.0"),
            ):
                assert (await ask(port, sent)).status == 400, sent
            for host in GOOD_HOSTS:
                assert (await ask(port, request("GET", path, host=host))).status == 200, (path, host)
            assert (await ask(port, request("GET", path, host=None, version="1.0"))).status == 200, path


@pytest.mark.parametrize("name", SERVERS)
async def test_no_answer_is_built_from_the_host_and_none_leads_elsewhere(name: str, tiny_path: pathlib.Path) -> None:
    async with SERVERS[name](tiny_path) as ports:
        for path, port in ports.items():
            for method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT"):
                for target in (path, path + "/", path + "//", "/" + path, "/", "/v1/completions/", "/workers/", "/ui/"):
                    answer = await ask(port, request(method, target, host="evil.example"))
                    assert b"evil.example" not in answer.data, (method, target, answer)
                    assert not 300 <= answer.status < 400, (method, target, answer)
                    assert "location" not in answer.headers, (method, target, answer)


@pytest.mark.parametrize("name", SERVERS)
async def test_a_target_with_a_host_is_of_that_host(name: str, tiny_path: pathlib.Path) -> None:
    async with SERVERS[name](tiny_path) as ports:
        for path, port in ports.items():
            for target in (f"http://x{path}", f"http://X{path}", f"https://x{path}"):
                assert (await ask(port, request("GET", target))).status == 200, target
            for target in (
                *(f"http://evil{path}", f"http://x@evil{path}", f"http://evil@x{path}", f"http://x:1{path}"),
                *(f"http://{path}", f"ftp://x{path}", f"x{path}", f"http:x{path}", f"http://x\\{path}"),
            ):
                answer = await ask(port, request("GET", target))
                assert answer.status == 400, (target, answer)


@pytest.mark.parametrize("name", SERVERS)
async def test_a_path_with_a_control_character_is_no_route(name: str, tiny_path: pathlib.Path) -> None:
    """A regular expression's ``$`` also matches before a line feed at the end."""
    async with SERVERS[name](tiny_path) as ports:
        for path, port in ports.items():
            for end in ("%0a", "%0A", "%0d", "%0d%0a", "%00", "%09", "%7f", "%c2%85", "/%0a", "%0a?a=b"):
                for method in ("GET", "HEAD", "POST"):
                    answer = await ask(port, request(method, path + end))
                    assert answer.status == 404, (method, path + end, answer)
            by_query = [(await ask(port, request("GET", path + query))).status for query in ("?a=%0a", "?a=b")]
            assert by_query[0] == by_query[1], path


@pytest.mark.parametrize("name", SERVERS)
async def test_head_is_get_without_a_body(name: str, tiny_path: pathlib.Path) -> None:
    async with SERVERS[name](tiny_path) as ports:
        for path, port in ports.items():
            for target in (path, "/absent", "/v1/completions"):
                by_get = await ask(port, request("GET", target))
                by_head = await ask(port, request("HEAD", target))
                assert by_head.status == by_get.status, target
                assert by_head.body == b"", target
                assert by_head.headers.get("content-type") == by_get.headers.get("content-type"), target
            answer = await ask(port, request("HEAD", path))
            assert answer.status == 200
            assert int(answer.headers.get("content-length", 1)) > 0
