"""TLS at a running router: towards clients, with and without their certificates, and towards workers."""

from __future__ import annotations

import asyncio
import json
import pathlib
import ssl
from typing import Any

import httpx
import openai
import pytest

from kvxfer.errors import ConfigError
from kvxfer.router.options import RouterOptions
from kvxfer.router.server import serve
from kvxfer.router.upstream import UpstreamConnectError, WorkerPools
from kvxfer.types import Role
from tests.support.certificates import Authority, Identity
from tests.support.fake_workers import MODEL, FakeWorker, events, free_port, router_over, texts
from tests.support.routers import RouterProcess


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def identity(authority: Authority) -> Identity:
    return authority.issue("router")


def listens(identity: Identity, **more: Any) -> dict[str, Any]:
    return {"tls_cert_file": identity.cert, "tls_key_file": identity.key, **more}


def pair() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("p0", Role.PREFILL), FakeWorker("d0", Role.DECODE)


async def test_clients_are_served_over_tls(authority: Authority, identity: Identity) -> None:
    p, d = pair()
    context = authority.client_context()
    async with router_over(p, d, verify=context, **listens(identity)) as router:
        assert router.url.startswith("https://")
        assert (await router.complete()).status_code == 200
        assert texts(events((await router.complete(stream=True)).text)) == "one two three"
        assert (await router.client.get("/ready")).status_code == 200
        http = httpx.AsyncClient(trust_env=False, verify=context)
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="x", http_client=http) as client:
            stream = await client.completions.create(model=MODEL, prompt="hi", max_tokens=3, stream=True)
            assert "".join([part.choices[0].text async for part in stream]) == "one two three"


async def test_a_client_that_leaves_over_tls_ends_its_legs(authority: Authority, identity: Identity) -> None:
    p, d = pair()
    d.tokens = ["x"] * 1000
    d.delay_s = 0.01
    async with router_over(p, d, verify=authority.client_context(), **listens(identity)) as router:
        body = {"model": MODEL, "prompt": "hello", "stream": True}
        async with router.client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                break
        await asyncio.wait_for(d.received[0].left.wait(), 5.0)


async def test_clients_must_show_a_certificate_where_that_is_asked(authority: Authority, identity: Identity) -> None:
    p, d = pair()
    own = authority.client_context(authority.issue("client"))
    async with router_over(p, d, verify=own, **listens(identity, tls_client_ca_file=authority.cert)) as router:
        assert (await router.complete()).status_code == 200
        async with httpx.AsyncClient(verify=authority.client_context(), trust_env=False) as other:
            with pytest.raises(httpx.HTTPError):
                await other.get(f"{router.url}/health")
        assert (await router.complete()).status_code == 200


async def test_workers_are_reached_over_tls(authority: Authority) -> None:
    p, d = pair()
    for worker in (p, d):
        worker.identity = authority.issue(worker.name)
        worker.client_ca = authority.cert
    shown = authority.issue("router-client")
    options = {"worker_ca_file": authority.cert, "worker_cert_file": shown.cert, "worker_key_file": shown.key}
    async with router_over(p, d, **options) as router:
        for stream in (False, True):
            assert (await router.complete(stream=stream)).status_code == 200
        assert len(d.received) == 2
        assert all(worker["http_url"].startswith("https://") for worker in (await listed(router.client)))


async def listed(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    return list((await client.get("/v1/workers")).json()["data"])


async def test_a_worker_whose_certificate_is_not_believed_gets_no_request(
    authority: Authority, tmp_path: pathlib.Path
) -> None:
    d = FakeWorker("d0", Role.BOTH)
    d.identity = Authority(tmp_path, "other").issue("worker")
    async with router_over(d, worker_ca_file=authority.cert, attempts_max=1) as router:
        answer = await router.complete()
        assert answer.status_code in (502, 503)
        assert not d.received


async def test_an_http_worker_is_reached_without_tls_whatever_certificates_there_are(authority: Authority) -> None:
    p, d = pair()
    async with router_over(p, d, worker_ca_file=authority.cert) as router:
        assert (await router.complete()).status_code == 200


async def test_names_of_workers_are_checked(authority: Authority) -> None:
    d = FakeWorker("d0", Role.BOTH)
    d.identity = authority.issue("worker")
    async with d.running():
        for host, is_right in (("127.0.0.1", True), ("localhost", True), ("127.1", False)):
            pool = WorkerPools(authority.cert)(f"https://{host}:{d.port}")
            try:
                if is_right:
                    body = json.dumps({"prompt": "x"}).encode()
                    async with await pool.request("POST", "/v1/completions", (), [body]) as response:
                        assert response.status == 200
                else:
                    with pytest.raises(UpstreamConnectError):
                        await pool.request("GET", "/")
            finally:
                await pool.close()


def test_settings_that_need_each_other(identity: Identity, authority: Authority) -> None:
    assert not RouterOptions(host="0.0.0.0", tls_cert_file=identity.cert).insecure
    with pytest.raises(ConfigError, match="tls_cert_file"):
        RouterOptions(host="0.0.0.0")
    for name in ("tls_key_file", "tls_client_ca_file", "worker_key_file"):
        with pytest.raises(ConfigError, match=name):
            RouterOptions(**{name: identity.key})  # type: ignore[arg-type]
    for wrong in ({"ca_file": identity.key}, {"cert_file": identity.key}, {"ca_file": "/nowhere"}):
        with pytest.raises(ConfigError, match=f"worker_{next(iter(wrong))}"):
            WorkerPools(**wrong)
    assert WorkerPools(authority.cert, identity.cert, identity.key) is not None


@pytest.mark.parametrize("name", ["tls_cert_file", "worker_ca_file", "api_key_file", "admin_key_file"])
async def test_a_missing_file_ends_the_start(name: str, tmp_path: pathlib.Path) -> None:
    options = RouterOptions(engine=(f"http://127.0.0.1:{free_port()}",), **{name: str(tmp_path / "missing")})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="missing"):
        await serve(options, on_ready=print, stop=asyncio.Event())


async def test_a_started_router_with_all_of_it(
    authority: Authority, identity: Identity, tmp_path: pathlib.Path
) -> None:
    """By its command line, on uvloop."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n- {name: team, key: a-secret-of-the-team, requests_per_minute: 2}\n")
    context = authority.client_context()
    d = FakeWorker("d0", Role.BOTH, dialect="plain")
    async with d.running():
        flags = [f"--engine={d.url}", f"--tls-cert-file={identity.cert}", f"--tls-key-file={identity.key}"]
        flags += [f"--api-key-file={keys}", "--cors-origin=https://app.example.com"]
        router = await asyncio.to_thread(RouterProcess, *flags)
        try:
            assert router.url.startswith("https://")
            headers = {"authorization": "Bearer a-secret-of-the-team", "origin": "https://app.example.com"}
            async with httpx.AsyncClient(
                base_url=router.url, verify=context, trust_env=False, headers=headers
            ) as client:
                for status in (200, 200, 429):
                    answer = await client.get("/v1/models")
                    assert answer.status_code == status
                    assert answer.headers["access-control-allow-origin"] == "https://app.example.com"
        finally:
            code, said = await asyncio.to_thread(router.stop)
    assert code == 0, said
    assert "a-secret-of-the-team" not in said
    assert "Traceback" not in said


def test_a_context_is_made_once_for_all_workers() -> None:
    pools = WorkerPools()
    assert isinstance(pools.context(), ssl.SSLContext)
    assert pools.context() is pools.context()
