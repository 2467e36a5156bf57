"""Each fault that a certificate can have, at each call of the control plane and on both sides of it: the answer is the
documented one, it comes in time, and no member with a sound certificate is disturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import pathlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from kvxfer._pb import health_pb2
from kvxfer.errors import KvxferError
from kvxfer.rpc import drain
from kvxfer.rpc.link import error_from_exception, open_channel
from kvxfer.rpc.watch import acquaint
from kvxfer.trust import authority
from kvxfer.trust.identity import CertIdentity, CertRole
from tests.support.coordinator import running, until
from tests.support.trust import CertifiedAgent, ClusterAuthority, ForcedFiles, register, watch

pytest.importorskip("cryptography")
pytestmark = pytest.mark.deep

ANSWER_S = 3.0
YEAR_S = 365 * 86400


@dataclasses.dataclass(frozen=True)
class Made:
    """A CA of the cluster, one that is not, and a certificate for each fault."""

    ours: ClusterAuthority
    foreign: ClusterAuthority
    directory: pathlib.Path

    def pem(self, fault: str, role: CertRole, name: str) -> tuple[bytes, bytes]:
        """The certificate and the key of one holder, with that fault."""
        shift_s = {"expired": -YEAR_S, "not yet valid": YEAR_S}.get(fault, 0)
        now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=shift_s)
        cluster = "other" if fault == "of another cluster" else "default"
        signer = self.foreign if fault == "of another CA" else self.ours
        identity = CertIdentity(cluster, role, name)
        directory = pathlib.Path(tempfile.mkdtemp(dir=self.directory))
        issued = authority.issue(signer.directory, identity, hosts=["127.0.0.1"], days=5, now=now, out=directory)
        if fault == "self-signed":
            return signed_by_itself(issued)
        return issued.cert_file.read_bytes(), issued.key_file.read_bytes()

    def files(self, fault: str, role: CertRole, name: str) -> ForcedFiles:
        """What a client shows that believes our CA, and expects our coordinator."""
        cert, key = self.pem(fault, role, name)
        return ForcedFiles(self.ours.followed(CertRole.METRICS, "sound").files, cert=cert, key=key)


def signed_by_itself(issued: authority.Issued) -> tuple[bytes, bytes]:
    """The same names and the same key; the signature is the holder's own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    key = serialization.load_pem_private_key(issued.key_file.read_bytes(), None)
    old = x509.load_pem_x509_certificate(issued.cert_file.read_bytes())
    builder = x509.CertificateBuilder(old.subject, old.subject, key.public_key(), old.serial_number)
    builder = builder.not_valid_before(old.not_valid_before_utc).not_valid_after(old.not_valid_after_utc)
    for extension in old.extensions:
        if not isinstance(extension.value, x509.AuthorityKeyIdentifier):
            builder = builder.add_extension(extension.value, critical=extension.critical)
    made = builder.sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM), issued.key_file.read_bytes()


@pytest.fixture
def made(tmp_path: pathlib.Path) -> Made:
    (tmp_path / "made").mkdir()
    return Made(ClusterAuthority(tmp_path / "ca"), ClusterAuthority(tmp_path / "foreign"), tmp_path / "made")


async def ask_health(address: str, tls: Any) -> None:
    """Raises what the call becomes."""
    async with open_channel(address, tls) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthRequest.SerializeToString,
            response_deserializer=health_pb2.HealthResponse.FromString,
        )
        try:
            await check(health_pb2.HealthRequest(), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_exception(address, error) from None


Call = Callable[[str, Any], Awaitable[Any]]
CALLS: dict[str, tuple[CertRole, Call]] = {
    "register": (CertRole.WORKER, lambda address, tls: register(address, "me", tls, timeout_s=0.6)),
    "watch": (CertRole.ROUTER, lambda address, tls: watch(address, tls, 0.6)),
    "drain": (CertRole.OPERATOR, lambda address, tls: drain(address, b"", "absent", tls=tls)),
    "acquaint": (CertRole.COORDINATOR, lambda address, tls: acquaint(address, b"", {"absent": ["x"]}, tls=tls)),
    "health": (CertRole.METRICS, ask_health),
}
"""Each call, with a role that may make it."""
NO_TLS = "coordinator_unavailable"
CALLERS = {
    "of another CA": NO_TLS,
    "expired": NO_TLS,
    "not yet valid": NO_TLS,
    "self-signed": NO_TLS,
    "none": NO_TLS,
    "of another cluster": "unauthenticated",
    "revoked": "unauthenticated",
    "of another role": "forbidden",
    "sound": "ok",
}
"""What a caller with that fault is told. The health service answers every holder whose certificate TLS accepts."""


async def outcome(call: Awaitable[Any]) -> str:
    begun_s = time.monotonic()
    try:
        await call
    except KvxferError as error:
        assert time.monotonic() - begun_s < ANSWER_S
        said = str(error)
        assert "127.0.0.1" in said
        if error.code == "refused":  # it was let in, and there is no such agent
            return "ok"
        if error.code == NO_TLS:
            assert "certificate that it believes" in said or "did not answer" in said, said
        return error.code
    return "ok"


@pytest.mark.parametrize("fault", CALLERS)
async def test_a_caller_with_a_faulty_certificate(tmp_path: pathlib.Path, made: Made, fault: str) -> None:
    revoked = tmp_path / "revoked"
    lines = [f"kvxfer://default/{role}/me" for role, _ in CALLS.values()] if fault == "revoked" else []
    revoked.write_text("\n".join(lines))
    found = {}
    async with running(tmp_path, revoked_file=str(revoked), **made.ours.coordinator_options()) as cluster:
        other = CertifiedAgent(cluster.address, "other", made.ours.followed(CertRole.WORKER, "other"))
        await other.session.start()
        for name, (role, call) in CALLS.items():
            shown = CertRole.TIER if fault == "of another role" and name == "health" else role
            if fault == "of another role" and name != "health":
                shown = CertRole.METRICS
            tls = None if fault == "none" else made.files(fault, shown, "me")
            found[name] = await outcome(call(cluster.address, tls))
        assert other.states == [True], "a caller with a faulty certificate disturbed a member"
        assert await watch(cluster.address, made.ours.followed(CertRole.ROUTER, "r0")) == ["other"]
        await other.session.close()
    wanted = dict.fromkeys(CALLS, CALLERS[fault])
    if CALLERS[fault] != NO_TLS:
        wanted["health"] = "ok"
    assert found == wanted


COORDINATORS = ("of another CA", "expired", "not yet valid", "self-signed", "of another cluster", "of another role")


@contextlib.asynccontextmanager
async def false_coordinator(cert: bytes, key: bytes, ca: bytes) -> AsyncIterator[tuple[str, list[str]]]:
    """A gRPC server with that certificate, and the calls that reached it."""
    calls: list[str] = []

    class Noted(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            calls.append(details.method)
            return await continuation(details)

    server = grpc.aio.server(interceptors=[Noted()])
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)], ca, True))
    await server.start()
    try:
        yield f"127.0.0.1:{port}", calls
    finally:
        await server.stop(None)


@pytest.mark.parametrize("fault", COORDINATORS)
async def test_a_coordinator_with_a_faulty_certificate_gets_no_call(made: Made, fault: str) -> None:
    """It may be on the coordinator's own address. No caller says to it what it wants, or shows it a token."""
    role = CertRole.WORKER if fault == "of another role" else CertRole.COORDINATOR
    cert, key = made.pem(fault, role, "c0")
    async with false_coordinator(cert, key, made.ours.ca_bytes) as (address, calls):
        for name, (caller, call) in CALLS.items():
            with pytest.raises(KvxferError) as caught:
                await call(address, made.ours.followed(caller, "me"))
            assert caught.value.code == "unauthenticated", (name, str(caught.value))
            assert "is no coordinator of this cluster that our CAs vouch for" in str(caught.value)
        assert calls == []


async def test_an_agent_whose_coordinator_is_replaced_by_a_false_one_keeps_what_it_has(
    tmp_path: pathlib.Path, made: Made
) -> None:
    async with running(tmp_path, **made.ours.coordinator_options()) as cluster:
        one, two = (CertifiedAgent(cluster.address, name, made.ours.followed(CertRole.WORKER, name)) for name in "ab")
        await asyncio.gather(one.session.start(), two.session.start())
        await until(lambda: "b" in one.keys, "the other one")
        ref = one.session.ref
        await cluster.stop()
        cert, key = made.pem("of another CA", CertRole.COORDINATOR, "c0")
        server = grpc.aio.server()
        server.add_secure_port(cluster.address, grpc.ssl_server_credentials([(key, cert)], made.ours.ca_bytes, True))
        await server.start()
        await until(lambda: "no coordinator of this cluster" in str(one.session.last_error), "the false one")
        assert "b" in one.keys
        assert one.gone == []
        await server.stop(None)
        await cluster.start()
        await until(lambda: one.session.is_connected and two.session.is_connected, "the return")
        assert one.session.ref == ref
        await one.session.close()
        await two.session.close()
