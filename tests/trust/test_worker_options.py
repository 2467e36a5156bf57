"""What a worker is told of its HTTP port: what is refused by name, and the ports beside it."""

from __future__ import annotations

import pathlib
from typing import Any

import httpx
import pytest

from kvxfer.engine.options import WorkerOptions
from kvxfer.errors import ConfigError
from kvxfer.trust.identity import CertRole
from kvxfer.types import Role
from tests.support.trust import ClusterAuthority
from tests.support.worker_http import HUNG_UP, caller_context, running_worker

ANYWHERE = {"host": "0.0.0.0"}
TLS = {"tls_cert_file": "c.pem"}
CERTIFIED = {**TLS, "tls_client_ca_file": "ca.pem"}
COORDINATED = {"coordinator": "10.0.0.1:7000"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tls_key_file": "k"}, "tls_key_file needs tls_cert_file"),
        ({"tls_client_ca_file": "ca"}, "tls_client_ca_file needs tls_cert_file"),
        ({"revoked_file": "r"}, "revoked_file needs tls_client_ca_file"),
        ({**TLS, "revoked_file": "r"}, "revoked_file needs tls_client_ca_file"),
        ({**CERTIFIED, "leg_key_file": "k"}, "leg_key_file counts nothing beside tls_client_ca_file"),
        (ANYWHERE, "not loopback and there is no TLS"),
        ({**ANYWHERE, **COORDINATED}, "not loopback and there is no TLS"),
        ({**ANYWHERE, "leg_key_file": "k"}, "not loopback and there is no TLS"),
        ({**ANYWHERE, **TLS}, "everybody there could send requests"),
        ({**ANYWHERE, **TLS, **COORDINATED, "leg_keys": False}, "everybody there could send requests"),
        ({"probe_port": 65536}, "probe_port must be 0 to 65535"),
        ({"metrics_port": -1}, "metrics_port must be 0 to 65535"),
    ],
)
def test_what_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        WorkerOptions(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"leg_key_file": "k"},
        {**ANYWHERE, "insecure": True},
        {**ANYWHERE, **CERTIFIED},
        {**ANYWHERE, **CERTIFIED, **COORDINATED, "revoked_file": "r"},
        {**ANYWHERE, **TLS, "leg_key_file": "k"},
        {**ANYWHERE, **TLS, **COORDINATED},
    ],
)
def test_what_is_taken(options: dict[str, Any]) -> None:
    WorkerOptions(**options)


@pytest.mark.parametrize(
    ("option", "value"),
    [("tls_cert_file", "/absent"), ("tls_client_ca_file", "/absent"), ("revoked_file", "/absent")],
)
async def test_a_file_that_cannot_be_read_is_named(
    tmp_path: pathlib.Path, tiny_path: pathlib.Path, option: str, value: str
) -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(ConfigError, match=f"{option}.*/absent"):
        async with running_worker(tiny_path, **server(tmp_path) | {option: value}):
            raise AssertionError("it started")


def server(tmp_path: pathlib.Path) -> dict[str, Any]:
    ca = ClusterAuthority(tmp_path / "ca")
    issued = ca.issue(CertRole.PREFILL, "p0")
    return {
        "agent_id": "p0",
        "role": Role.PREFILL,
        "tls_cert_file": str(issued.cert_file),
        "tls_key_file": str(issued.key_file),
        "tls_client_ca_file": ca.ca_file,
    }


async def test_probes_and_metrics_need_no_certificate_on_ports_of_their_own(
    tmp_path: pathlib.Path, tiny_path: pathlib.Path
) -> None:
    pytest.importorskip("cryptography")
    options = server(tmp_path)
    async with (
        running_worker(tiny_path, **options, probe_port=0, metrics_port=0) as worker,
        httpx.AsyncClient(trust_env=False, timeout=30.0) as client,
    ):
        probe, metrics = worker.ready["probe_url"], worker.ready["metrics_url"]
        assert worker.url.startswith("https://")
        assert len({worker.url.rpartition(":")[2], probe.rpartition(":")[2], metrics.rpartition(":")[2]}) == 3
        for path in ("/live", "/ready"):
            assert (await client.get(f"{probe}{path}")).status_code == 200
        assert await worker.ask("GET", "/live", context=caller_context(options["tls_client_ca_file"])) == HUNG_UP
        shown = await client.get(f"{metrics}/metrics")
        assert "kvxfer_engine_ready 1.0" in shown.text
        for url, path in ((probe, "/metrics"), (probe, "/health"), (probe, "/held"), (metrics, "/live")):
            assert (await client.get(f"{url}{path}")).status_code == 404
        for path in ("/v1/completions", "/held", "/statistics"):
            assert (await client.post(f"{probe}{path}", json={})).status_code == 404


async def test_what_is_refused_is_counted(tmp_path: pathlib.Path, tiny_path: pathlib.Path) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("a-key-of-sixteen-letters")
    async with running_worker(tiny_path, leg_key_file=str(key)) as worker:
        for _ in range(3):
            assert await worker.ask("GET", "/held") == "unauthenticated"
        async with httpx.AsyncClient(trust_env=False) as client:
            shown = (await client.get(f"{worker.url}/metrics")).text
        assert 'kvxfer_engine_http_refused_total{code="unauthenticated"} 3.0' in shown
