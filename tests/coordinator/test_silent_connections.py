"""Connections that say nothing: they hold a descriptor of the coordinator's for a while, and keep no member out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
import socket
import urllib.request

import pytest

from kvxfer.coordinator import listening, metrics
from tests.support.coordinator import running


async def test_coordinator_connection_that_speaks_no_http2_is_closed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorter = {"grpc.server_handshake_timeout_ms": 200}
    options = tuple((name, shorter.get(name, value)) for name, value in listening.SERVER_OPTIONS)
    monkeypatch.setattr(listening, "SERVER_OPTIONS", options)
    async with running(tmp_path) as cluster:
        host, _, port = cluster.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await asyncio.wait_for(reader.read(), 20)
        writer.close()
        await writer.wait_closed()


async def trickle(connection: socket.socket) -> None:
    """Another byte of a header before each read could time out, as long as anybody listens."""
    with contextlib.suppress(OSError):
        connection.sendall(b"GET /metrics HTTP/1.1\r\nx: ")
        while True:
            connection.sendall(b"x")
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("says", ["nothing", "little by little"])
async def test_metrics_port_full_of_connections_that_ask_nothing_serves_again_when_their_time_is_over(
    says: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "SCRAPE_S", 0.3)
    async with running(tmp_path, metrics_port=0) as cluster:
        url = str(cluster.ready["http_url"])
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        silent = [socket.create_connection(address) for _ in range(metrics.SCRAPES_MAX + 4)]
        trickles = [asyncio.create_task(trickle(each)) for each in silent if says != "nothing"]
        try:
            for connection in silent:
                connection.settimeout(20)
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.to_thread(connection.recv, 1) == b""

            def scrape() -> int:
                with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
                    return int(answer.status)

            assert await asyncio.to_thread(scrape) == 200
        finally:
            for task in trickles:
                task.cancel()
            await asyncio.gather(*trickles, return_exceptions=True)
            for connection in silent:
                connection.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
