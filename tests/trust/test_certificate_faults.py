"""Each fault of a certificate at each HTTP port that asks for one, and at the router, which asks workers for theirs:
the answer is the documented one, and nothing is told or sent before."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
import ssl
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("cryptography")

from cryptography.x509.oid import ExtendedKeyUsageOID

from kvxfer.router.upstream import UpstreamConnectError, WorkerPools
from kvxfer.trust.identity import CertRole
from kvxfer.types import Role
from tests.support.certificates import Identity
from tests.support.fake_workers import FakeWorker, router_over
from tests.support.faulty_certificates import Files, client, made, not_believed, read_ca, written
from tests.support.raw_http import request
from tests.support.serving.servers import logged
from tests.support.trust import ClusterAuthority
from tests.support.worker_http import running_worker

ROUTER = "kvxfer://default/router/r0"
WORKER = "kvxfer://default/decode/d0"
NO_TLS = "no TLS"
OLD = (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2)


@pytest.fixture
def ca(tmp_path: pathlib.Path) -> ClusterAuthority:
    return ClusterAuthority(tmp_path / "ca")


async def ask(port: int, context: ssl.SSLContext | None, path: str = "/v1/models") -> str:
    """``no TLS`` where not one byte of HTTP came back, else the status and the code of the answer."""
    data = b""
    try:
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            try:
                writer.write(request("GET", path))
                while part := await reader.read(1 << 16):
                    data += part
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except OSError:  # with TLS 1.3 the server's refusal comes behind the client's end of the handshake
        pass
    if not data:
        return NO_TLS
    assert data.startswith(b"HTTP/1.1 ")
    code = data.partition(b'"code":"')[2].partition(b'"')[0].decode() if b'"code":"' in data else ""
    return f"{data.split()[1].decode()} {code}".strip()


def old(context: ssl.SSLContext, version: ssl.TLSVersion) -> ssl.SSLContext:
    """Of a client that speaks that version alone, however weak."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = version
    return context


def shown_to_servers(ca: ClusterAuthority, at: pathlib.Path) -> dict[str, Files]:
    """Certificates of callers that no server lets speak, by what is wrong with them."""
    signer = read_ca(ca.directory)
    found = {name: written(at, name.replace(" ", "-"), *make()) for name, make in not_believed(signer, ROUTER).items()}
    for name, usages in (
        ("for servers alone", (ExtendedKeyUsageOID.SERVER_AUTH,)),
        ("for code", (ExtendedKeyUsageOID.CODE_SIGNING,)),
    ):
        found[name] = written(at, name.replace(" ", "-"), made(signer, ROUTER, usages=usages))
    return found


async def test_each_fault_at_a_worker(tmp_path: pathlib.Path, ca: ClusterAuthority, tiny_path: pathlib.Path) -> None:
    signer = read_ca(ca.directory)
    own = ca.issue(CertRole.DECODE, "d0")
    expected = dict.fromkeys(shown_to_servers(ca, tmp_path), NO_TLS)
    files = shown_to_servers(ca, tmp_path)
    revoked = tmp_path / "revoked"
    named = {
        "right": ((ROUTER,), "200"),
        "of another role": (("kvxfer://default/prefill/p0",), "403 forbidden"),
        "of another cluster": (("kvxfer://blue/router/r0",), "401 unauthenticated"),
        "without a name": ((), "401 unauthenticated"),
        "of two names": ((ROUTER, WORKER), "401 unauthenticated"),
        "of a role that is none": (("kvxfer://default/admin/r0",), "401 unauthenticated"),
        "of a name that is none": (("kvxfer://default/router/r0/../p0",), "401 unauthenticated"),
        "of a name in other letters": (("KVXFER://default/router/r0",), "401 unauthenticated"),
        "revoked by name": (("kvxfer://default/router/r9",), "401 unauthenticated"),
        "revoked by fingerprint": (("kvxfer://default/router/r8",), "401 unauthenticated"),
    }
    for name, (uris, outcome) in named.items():
        files[name], expected[name] = written(tmp_path, name.replace(" ", "-"), made(signer, *uris)), outcome
    revoked.write_text(f"kvxfer://default/router/r9\n{files['revoked by fingerprint'].fingerprint}\n")
    options: dict[str, Any] = {
        "role": Role.DECODE,
        "agent_id": "d0",
        "tls_cert_file": str(own.cert_file),
        "tls_key_file": str(own.key_file),
        "tls_client_ca_file": ca.ca_file,
        "revoked_file": str(revoked),
    }
    with logged(logging.ERROR) as records:
        async with running_worker(tiny_path, **options) as worker:
            port = int(worker.url.rpartition(":")[2])
            found = {name: await ask(port, client(ca.ca_file, shown)) for name, shown in files.items()}
            assert found == expected
            assert await ask(port, None) == NO_TLS
            assert await ask(port, client(ca.ca_file)) == NO_TLS
            for version in OLD:
                assert await ask(port, old(client(ca.ca_file, files["right"]), version)) == NO_TLS, version
    assert not records


async def test_each_fault_at_a_router_that_asks_its_clients(tmp_path: pathlib.Path, ca: ClusterAuthority) -> None:
    """It takes every certificate that its CA signed: names say nothing there, keys do."""
    own = ca.issue(CertRole.ROUTER, "r0")
    files = shown_to_servers(ca, tmp_path)
    right = written(tmp_path, "right", made(read_ca(ca.directory), hosts=()))
    fake = FakeWorker("d0", Role.BOTH)
    listens = {"tls_cert_file": str(own.cert_file), "tls_key_file": str(own.key_file)}
    verify = client(ca.ca_file, right)
    with logged(logging.ERROR) as records:
        async with router_over(fake, verify=verify, tls_client_ca_file=ca.ca_file, **listens) as router:
            port = int(router.url.rpartition(":")[2])
            for name, shown in files.items():
                assert await ask(port, client(ca.ca_file, shown)) == NO_TLS, name
            assert await ask(port, None) == NO_TLS
            assert await ask(port, client(ca.ca_file)) == NO_TLS
            assert await ask(port, client(ca.ca_file, right)) == "200"
            for version in OLD:
                assert await ask(port, old(client(ca.ca_file, right), version)) == NO_TLS, version
        async with router_over(fake, verify=client(ca.ca_file), **listens) as router:
            port = int(router.url.rpartition(":")[2])
            assert await ask(port, None) == NO_TLS
            for version, outcome in zip(OLD, (NO_TLS, NO_TLS, "200"), strict=True):
                assert await ask(port, old(client(ca.ca_file), version)) == outcome, version
    assert not records


# What a router believes of a worker.


class Listener:
    """What a worker's port might be: all that comes through TLS is kept, and answered as a model would be named."""

    def __init__(self) -> None:
        self.data = b""
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self, context: ssl.SSLContext | None) -> AsyncIterator[Listener]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while part := await reader.read(1 << 16):
                    self.data += part
                    if context is None or b"\r\n\r\n" in self.data:
                        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
                        break
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self


def server_context(shown: Files, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.cert, shown.key)
    return context if version is None else old(context, version)


WORKERS: dict[str, bool] = {"hosts": False, "identities": True}


@pytest.mark.parametrize("names", WORKERS)
async def test_each_fault_of_a_worker_is_found_before_anything_is_sent(
    names: str, tmp_path: pathlib.Path, ca: ClusterAuthority
) -> None:
    signer = read_ca(ca.directory)
    shown = ca.issue(CertRole.ROUTER, "r0")
    pools = WorkerPools(ca.ca_file, str(shown.cert_file), str(shown.key_file), knows_identities=WORKERS[names])
    pools.agents_at = lambda url: ("d0",)
    files = {
        name: written(tmp_path, name.replace(" ", "-"), *make()) for name, make in not_believed(signer, WORKER).items()
    }
    files["for clients alone"] = written(
        tmp_path, "clients", made(signer, WORKER, usages=(ExtendedKeyUsageOID.CLIENT_AUTH,))
    )
    contexts: dict[str, ssl.SSLContext | None] = {name: server_context(one) for name, one in files.items()}
    right = written(tmp_path, "right", made(signer, WORKER))
    contexts |= {f"speaks {version.name}": server_context(right, version) for version in OLD[:2]}
    contexts["speaks no TLS"] = None
    wrong = (
        {
            "of another host": made(signer, WORKER, hosts=("localhost", "127.0.0.2")),
            "of a host in its subject": made(signer, WORKER, subject="127.0.0.1", hosts=()),
            "of a host as a name": made(signer, WORKER, hosts=("other.example",)),
        }
        if names == "hosts"
        else {
            "of another agent": made(signer, "kvxfer://default/decode/d1"),
            "of a longer name": made(signer, "kvxfer://default/decode/d01"),
            "of another cluster": made(signer, "kvxfer://blue/decode/d0"),
            "of a role that serves nothing": made(signer, "kvxfer://default/router/d0"),
            "of no name": made(signer),
            "of two names": made(signer, WORKER, "kvxfer://default/decode/d1"),
        }
    )
    contexts |= {name: server_context(written(tmp_path, name.replace(" ", "-"), one)) for name, one in wrong.items()}

    async def sent_to(context: ssl.SSLContext | None) -> tuple[bytes, bool]:
        """What a listener got of a request with a secret, and whether it was answered."""
        async with Listener().running(context) as listener:
            pool = pools(f"https://127.0.0.1:{listener.port}")
            try:
                async with await pool.request("POST", "/v1/x", ((b"authorization", b"secret"),), [b"secret"]) as answer:
                    await answer.read(100)
                return listener.data, True
            except UpstreamConnectError:
                return listener.data, False
            finally:
                await pool.close()

    for name, context in contexts.items():
        data, is_answered = await sent_to(context)
        assert not is_answered, name
        assert b"secret" not in data, name
        assert b"HTTP/1.1" not in data, name
    for version in (None, ssl.TLSVersion.TLSv1_2):
        data, is_answered = await sent_to(server_context(right, version))
        assert is_answered
        assert b"secret" in data


async def test_a_client_learns_nothing_of_a_worker_that_is_not_believed(
    tmp_path: pathlib.Path, ca: ClusterAuthority
) -> None:
    signer = read_ca(ca.directory)
    fakes = []
    for name, make in not_believed(signer, WORKER, subject="a-telling-name").items():
        fakes.append(FakeWorker(name.replace(" ", "-"), Role.BOTH))
        files = written(tmp_path, fakes[-1].name, *make())
        fakes[-1].identity = Identity(files.cert, files.key)
    async with router_over(*fakes, worker_ca_file=ca.ca_file, attempts_max=1) as router:
        for fake in fakes:
            router.publish(fake)
            answer = await router.complete()
            assert answer.status_code in (502, 503), fake.name
            for word in ("a-telling-name", str(fake.port), "certificate", str(tmp_path)):
                assert word not in answer.text, (fake.name, answer.text)
            assert not fake.received, fake.name
