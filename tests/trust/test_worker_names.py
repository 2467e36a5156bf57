"""A router that knows workers by the names in their certificates, and not by their hosts."""

from __future__ import annotations

import asyncio
import datetime
import pathlib
from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.router.options import RouterOptions
from kvxfer.router.upstream import UpstreamConnectError, WorkerPools
from kvxfer.serving.tls import TlsFiles
from kvxfer.trust import authority
from kvxfer.trust.identity import CertIdentity, CertRole
from kvxfer.types import Role
from tests.support.certificates import Authority
from tests.support.trust import ClusterAuthority
from tests.support.worker_http import running_worker

pytest.importorskip("cryptography")


@pytest.fixture
def ca(tmp_path: pathlib.Path) -> ClusterAuthority:
    return ClusterAuthority(tmp_path / "ca")


def elsewhere(ca: ClusterAuthority) -> dict[str, Any]:
    """A worker's options; no certificate names the host that it is reached by."""
    now = datetime.datetime.now(datetime.UTC)
    identity = CertIdentity("default", CertRole.DECODE, "d0")
    issued = authority.issue(ca.directory, identity, hosts=["elsewhere.example"], days=1, now=now)
    return {
        "role": Role.DECODE,
        "agent_id": "d0",
        "tls_cert_file": str(issued.cert_file),
        "tls_key_file": str(issued.key_file),
        "tls_client_ca_file": ca.ca_file,
    }


def pools_of(ca: ClusterAuthority, *agents: str, knows_identities: bool = True) -> WorkerPools:
    shown = ca.issue(CertRole.ROUTER, "r0")
    pools = WorkerPools(ca.ca_file, str(shown.cert_file), str(shown.key_file), knows_identities=knows_identities)
    pools.agents_at = lambda url: agents
    return pools


async def status(pools: WorkerPools, url: str) -> int:
    pool = pools(url)
    try:
        async with await pool.request("GET", "/held") as response:
            await response.read(1 << 20)
            return response.status
    finally:
        await pool.close()


async def test_a_worker_is_the_agent_that_its_certificate_names(
    tmp_path: pathlib.Path, ca: ClusterAuthority, tiny_path: pathlib.Path
) -> None:
    blue = ClusterAuthority(tmp_path / "blue", "blue")
    for name in ("ca.pem", "ca.key"):
        (blue.directory / name).write_bytes((ca.directory / name).read_bytes())
    async with running_worker(tiny_path, **elsewhere(ca)) as worker:
        for agents in (("d0",), ("d0.1",), ("d9", "d0"), ()):
            assert await status(pools_of(ca, *agents), worker.url) == 200
        for pools, says in (
            (pools_of(ca, "d1"), "kvxfer://default/decode/d0 answers in place of d1"),
            (pools_of(ca, "d01", "d"), "answers in place of d, d01"),
            (pools_of(blue), "is no worker of cluster blue"),
            (pools_of(ca, knows_identities=False), "not valid for '127.0.0.1'"),
        ):
            with pytest.raises(UpstreamConnectError, match=says):
                await status(pools, worker.url)


async def test_a_router_passes_for_no_worker(ca: ClusterAuthority) -> None:
    """Whatever listens there has a certificate of the cluster, and is none."""
    shown = ca.issue(CertRole.ROUTER, "r1")
    context = TlsFiles(str(shown.cert_file), str(shown.key_file)).context()
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UpstreamConnectError, match="kvxfer://default/router/r1 is no worker"):
            await status(pools_of(ca), f"https://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"worker_names": "both"}, "worker_names must be one of hosts, identities"),
        ({"worker_names": "identities"}, "needs worker_ca_file and worker_cert_file"),
        ({"worker_names": "identities", "worker_ca_file": "c"}, "needs worker_ca_file and worker_cert_file"),
    ],
)
def test_what_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RouterOptions(engine=("http://127.0.0.1:1",), **options)


def test_a_certificate_without_a_name_is_refused_at_the_start(tmp_path: pathlib.Path) -> None:
    nameless = Authority(tmp_path)
    shown = nameless.issue("router")
    with pytest.raises(ConfigError, match=r"worker_cert_file: .* is no certificate of a cluster"):
        WorkerPools(nameless.cert, shown.cert, shown.key, knows_identities=True)
