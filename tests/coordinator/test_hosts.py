"""Where an agent may say that it serves HTTP: the host that it registers from, or one that was allowed."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import socket

import pytest

from kvxfer.coordinator.hosts import is_own, peer_host
from kvxfer.errors import ConfigError, RefusedError
from kvxfer.rpc import CoordinatorSession
from kvxfer.types import DataAddress, Role, WorkerInfo
from tests.support.coordinator import Cluster, running


def session(cluster: Cluster, url: str) -> CoordinatorSession:
    return CoordinatorSession(
        cluster.address,
        cluster.token,
        bytes(16),
        WorkerInfo("p0", Role.BOTH, "m", url),
        DataAddress("127.0.0.1", 1, "", "h"),
        on_membership=lambda membership: None,
    )


@pytest.mark.parametrize("url", ["http://203.0.113.9:80", "http://metadata.internal", "https://[2001:db8::1]:8000"])
async def test_registration_with_another_hosts_http_url_is_refused_by_name(cluster: Cluster, url: str) -> None:
    worker = session(cluster, url)
    try:
        with pytest.raises(
            RefusedError, match=r"info.http_url names the host .* registers from 127.*--allow-http-host"
        ):
            await worker.start()
    finally:
        await worker.close()


async def test_registration_with_an_allowed_or_its_own_host_is_taken(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, allow_http_host=("decode", "203.0.113.0/24")) as cluster:
        for url in ("http://decode:8000", "http://203.0.113.9:80", "http://localhost:1", "http://[::1]:1", ""):
            worker = session(cluster, url)
            await worker.start()
            await worker.close()
        with pytest.raises(ConfigError, match="allow_http_host"):
            dataclasses.replace(cluster.options, allow_http_host=("http://decode",))


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:5555", "10.0.0.1"),
        ("ipv6:%5B::1%5D:5555", "::1"),
        ("ipv6:[2001:db8::7]:1", "2001:db8::7"),
        ("unix:/run/x", ""),
        ("unix:", ""),
    ],
)
def test_peer_host_is_the_address_of_the_connection(peer: str, host: str) -> None:
    assert peer_host(peer) == host


@pytest.mark.parametrize("peer", ["", "ipv4", "ipv4:", "vsock:3:5", "10.0.0.1:5"])
def test_peer_host_of_a_peer_without_an_address_is_refused(peer: str) -> None:
    with pytest.raises(RefusedError, match="no address"):
        peer_host(peer)


def test_own_addresses_are_told_from_others() -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("203.0.113.9", 9))  # a machine without a network has loopback alone
        assert is_own(probe.getsockname()[0])
    assert is_own("127.0.0.1")
    assert not is_own("203.0.113.9")  # reserved for documentation
    assert not is_own("2001:db8::1")
