"""Certificates between real processes: who gets in, who does not, and what happens when files change."""

from __future__ import annotations

import asyncio
import os
import pathlib
import shutil

import grpc
import grpc.aio
import pytest
from grpc.experimental.session_cache import ssl_session_cache_lru

from kvxfer._pb import control_pb2 as pb
from kvxfer._pb import control_pb2_grpc
from kvxfer.coordinator import CoordinatorOptions
from kvxfer.errors import AuthenticationError, ConfigError, CoordinatorUnavailableError, ForbiddenError
from kvxfer.rpc import MembershipWatch, coordinator_tls, load_token
from kvxfer.rpc.link import error_from_exception, open_channel
from kvxfer.trust import authority
from kvxfer.trust.identity import CertRole
from tests.support.coordinator import until
from tests.support.trust import CertifiedAgent, ClusterAuthority, coordinator_process, register, watch

pytest.importorskip("cryptography")

REVOKED_WITHIN_S = 10.0


@pytest.fixture
def ca(tmp_path: pathlib.Path) -> ClusterAuthority:
    return ClusterAuthority(tmp_path / "ca")


async def test_a_certificate_is_enough_and_is_needed(tmp_path: pathlib.Path, ca: ClusterAuthority) -> None:
    async with coordinator_process(tmp_path, ca.coordinator_options()) as coordinator:
        address = coordinator.address
        one, two = (CertifiedAgent(address, name, ca.followed(CertRole.WORKER, name)) for name in ("w0", "w1"))
        await one.session.start()
        await two.session.start()
        await until(lambda: "w1" in one.keys and "w0" in two.keys, "both to hear of each other")
        assert one.keys["w1"] == two.keys["w0"] != b""
        assert sorted(await watch(address, ca.followed(CertRole.ROUTER, "r0"))) == ["w0", "w1"]

        token = load_token(tmp_path / "coordinator-token")
        with pytest.raises((CoordinatorUnavailableError, AuthenticationError)):
            await register(address, "w9", None, token=token, timeout_s=0.5)
        with pytest.raises((CoordinatorUnavailableError, AuthenticationError)):
            await watch(address, None, 0.5, token)

        foreign = ClusterAuthority(tmp_path / "foreign")
        with pytest.raises(AuthenticationError, match="no coordinator of this cluster"):
            await watch(address, foreign.followed(CertRole.ROUTER, "r0"))
        believing = foreign.followed(CertRole.ROUTER, "r0", ca_file=ca.ca_file)
        with pytest.raises(CoordinatorUnavailableError, match="without a certificate that it believes"):
            await watch(address, believing, 0.5)
        await one.session.close()
        await two.session.close()
    line = coordinator.audited(caller="kvxfer://default/worker/w0", call="register")[0]
    assert line["subject"] == "w0"
    assert line["outcome"] == "ok"
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert not any(token.decode() in str(line) or one.keys["w1"].hex() in str(line) for line in coordinator.lines)


async def test_a_worker_cannot_pass_for_the_coordinator(tmp_path: pathlib.Path, ca: ClusterAuthority) -> None:
    issued = ca.issue(CertRole.WORKER, "w0")
    options = ca.coordinator_options() | {"tls_cert_file": str(issued.cert_file), "tls_key_file": str(issued.key_file)}
    with pytest.raises(RuntimeError, match="is of kvxfer://default/worker/w0, and not of a coordinator"):
        async with coordinator_process(tmp_path, options):
            pass
    blue = ClusterAuthority(tmp_path / "blue", "blue")
    async with coordinator_process(tmp_path, blue.coordinator_options()) as coordinator:
        with pytest.raises(AuthenticationError, match="no coordinator of this cluster"):
            await watch(coordinator.address, ca.followed(CertRole.ROUTER, "r0", ca_file=blue.ca_file))


async def test_new_certificates_are_used_without_a_restart(tmp_path: pathlib.Path, ca: ClusterAuthority) -> None:
    """The coordinator's own, and an agent's, which comes back by itself as the same incarnation."""
    options = ca.coordinator_options()
    async with coordinator_process(tmp_path, options) as coordinator:
        agent = CertifiedAgent(coordinator.address, "w0", ca.followed(CertRole.WORKER, "w0"))
        ref = await agent.session.start()
        ca.issue(CertRole.COORDINATOR, "c0")
        ca.issue(CertRole.WORKER, "w0")
        shown = {"caller": "kvxfer://default/worker/w0", "outcome": "ok"}
        await until(lambda: len(coordinator.audited(**shown)) == 2, "the agent to show its new certificate")
        await until(lambda: agent.session.is_connected, "the agent to be back")
        assert agent.session.ref == ref
        assert await watch(coordinator.address, ca.followed(CertRole.ROUTER, "r0")) == ["w0"]
        await until(
            lambda: any("were read again" in str(line.get("message")) for line in coordinator.lines), "the new files"
        )
        await agent.session.close()


async def test_a_revoked_name_loses_its_session_and_its_incarnation(
    tmp_path: pathlib.Path, ca: ClusterAuthority
) -> None:
    revoked = tmp_path / "revoked"
    revoked.write_text("# none yet\n")
    options = ca.coordinator_options() | {"revoked_file": str(revoked)}
    async with coordinator_process(tmp_path, options) as coordinator:
        address = coordinator.address
        good, bad = (CertifiedAgent(address, name, ca.followed(CertRole.WORKER, name)) for name in ("w0", "w1"))
        await good.session.start()
        await bad.session.start()
        router = ca.followed(CertRole.ROUTER, "r0")
        await until(lambda: "w1" in good.keys, "the other one")
        revoked.write_text("kvxfer://default/worker/w1  # stolen\n")
        async with asyncio.timeout(REVOKED_WITHIN_S):
            await until(lambda: not bad.session.is_connected and "w1" in good.gone, "the revoked one to be out")
        assert await watch(address, router) == ["w0"]
        await until(lambda: "is revoked" in str(bad.session.last_error), "the reason")
        assert isinstance(bad.session.last_error, AuthenticationError)
        with pytest.raises(AuthenticationError, match="the certificate of kvxfer://default/worker/w1 is revoked"):
            await register(address, "w1", ca.followed(CertRole.WORKER, "w1"))
        assert good.states == [True]

        revoked.write_text("kvxfer://default/worker/w1\nnonsense\n")  # a mistake lets none back in
        with pytest.raises(AuthenticationError, match="is revoked"):
            await register(address, "w1", ca.followed(CertRole.WORKER, "w1"))
        await good.session.close()
        await bad.session.close()
    assert coordinator.audited(call="register", subject="w1", outcome="unauthenticated")


async def test_a_revoked_name_that_has_cut_its_stream_ends_too(tmp_path: pathlib.Path, ca: ClusterAuthority) -> None:
    """It would be waited for else for as long as an honest agent is that comes back: here for a minute."""
    revoked = tmp_path / "revoked"
    revoked.write_text("")
    options = ca.coordinator_options() | {"revoked_file": str(revoked), "dead_after_s": "60"}
    async with coordinator_process(tmp_path, options) as coordinator:
        good, bad = (
            CertifiedAgent(coordinator.address, name, ca.followed(CertRole.WORKER, name)) for name in ("w0", "w1")
        )
        await good.session.start()
        await bad.session.start()
        await until(lambda: "w1" in good.keys, "the other one")
        bad.cut()
        async with MembershipWatch(coordinator.address, b"", tls=ca.followed(CertRole.ROUTER, "r0")) as router:
            await until(lambda: any(m.is_suspect for m in router.membership.members), "the cut to be noticed")
            revoked.write_text("kvxfer://default/worker/w1")
            async with asyncio.timeout(REVOKED_WITHIN_S):
                await until(lambda: good.gone == ["w1"], "the revoked one to be out")
        await good.session.close()
    assert coordinator.audited(call="register", subject="w1", outcome="unauthenticated")


async def test_a_revoked_router_loses_its_watch(tmp_path: pathlib.Path, ca: ClusterAuthority) -> None:
    revoked = tmp_path / "revoked"
    revoked.write_text("")
    options = ca.coordinator_options() | {"revoked_file": str(revoked)}
    async with coordinator_process(tmp_path, options) as coordinator:
        routers = [ca.followed(CertRole.ROUTER, name) for name in ("r0", "r1")]
        async with (
            MembershipWatch(coordinator.address, b"", tls=routers[0]) as bad,
            MembershipWatch(coordinator.address, b"", tls=routers[1]) as good,
        ):
            await bad.wait_connected()
            await good.wait_connected()
            revoked.write_text("kvxfer://default/router/r0")
            async with asyncio.timeout(REVOKED_WITHIN_S):
                await until(lambda: "is revoked" in str(bad.last_error), "the watch to end")
            assert not bad.is_connected
            assert good.is_connected
        ended = {"caller": "kvxfer://default/router/r0", "call": "watch", "outcome": "unauthenticated"}
        await until(lambda: coordinator.audited(**ended), "the line of the audit log")


async def test_one_certificate_is_revoked_by_its_fingerprint(tmp_path: pathlib.Path, ca: ClusterAuthority) -> None:
    issued = ca.issue(CertRole.ROUTER, "r0")
    revoked = tmp_path / "revoked"
    revoked.write_text(authority.show(issued.cert_file).fingerprint)
    stolen = shutil.copytree(ca.directory, tmp_path / "stolen")
    old = coordinator_tls(ca.ca_file, str(stolen / "router-r0.pem"), str(stolen / "router-r0.key"))
    async with coordinator_process(tmp_path, ca.coordinator_options() | {"revoked_file": str(revoked)}) as coordinator:
        with pytest.raises(AuthenticationError, match="is revoked"):
            await watch(coordinator.address, old)
        assert await watch(coordinator.address, ca.followed(CertRole.ROUTER, "r0")) == []


async def test_a_resumed_session_is_refused(tmp_path: pathlib.Path, ca: ClusterAuthority) -> None:
    """TLS does not look at a certificate again where a session is resumed, and it may have ended since."""
    keyed = ca.followed(CertRole.OPERATOR, "o0").newest
    proof = grpc.ssl_channel_credentials(keyed.ca, keyed.key, keyed.cert)
    options = (
        ("grpc.ssl_target_name_override", keyed.identity.coordinator_host),
        ("grpc.ssl_session_cache", ssl_session_cache_lru(8)),
        ("grpc.use_local_subchannel_pool", 1),
    )

    def ask(address: str) -> tuple[grpc.StatusCode, str]:
        with grpc.secure_channel(address, proof, options) as channel, pytest.raises(grpc.RpcError) as caught:
            control_pb2_grpc.CoordinatorStub(channel).Drain(pb.DrainRequest(agent_id="w0"), timeout=10)
        return caught.value.code(), caught.value.details()

    async with coordinator_process(tmp_path, ca.coordinator_options()) as coordinator:
        code, text = await asyncio.to_thread(ask, coordinator.address)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "no member 'w0'" in text
        code, text = await asyncio.to_thread(ask, coordinator.address)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "session was resumed" in text


@pytest.mark.deep
async def test_whose_ca_was_replaced_is_out_and_the_others_come_back(
    tmp_path: pathlib.Path, ca: ClusterAuthority
) -> None:
    """First both CAs are believed, then all honest ones change, then the old CA is taken away."""
    fresh = ClusterAuthority(tmp_path / "fresh")
    options = ca.coordinator_options()
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(ca.ca_bytes)
    both = tmp_path / "both.pem"
    both.write_bytes(ca.ca_bytes + fresh.ca_bytes)
    async with coordinator_process(tmp_path, options | {"tls_client_ca_file": str(bundle)}) as coordinator:
        address = coordinator.address
        old = CertifiedAgent(address, "w0", ca.followed(CertRole.WORKER, "w0", ca_file=str(both)))
        await old.session.start()
        kept = open_channel(address, ca.followed(CertRole.OPERATOR, "o0", ca_file=str(both)))
        await _drain(kept, address)
        _replace(bundle, both.read_bytes())
        new = CertifiedAgent(address, "w1", fresh.followed(CertRole.WORKER, "w1", ca_file=str(both)))
        await until(lambda: any("were read again" in str(line.get("message")) for line in coordinator.lines), "both")
        ref = await new.session.start()
        assert old.states == [True], "a CA that is added disturbs no session"

        served = fresh.issue(CertRole.COORDINATOR, "c0")
        _replace(pathlib.Path(options["tls_cert_file"]), served.cert_file.read_bytes())
        _replace(pathlib.Path(options["tls_key_file"]), served.key_file.read_bytes())
        _replace(bundle, fresh.ca_bytes)
        async with asyncio.timeout(REVOKED_WITHIN_S):
            await until(lambda: "w0" in new.gone and new.session.is_connected, "the old one to be out")
        assert new.session.ref == ref
        assert not old.session.is_connected
        assert new.states == [True, False, True], "one reconnection, and no more"
        assert await watch(address, fresh.followed(CertRole.ROUTER, "r0")) == ["w1"]
        with pytest.raises(CoordinatorUnavailableError):  # the old certificate, on the connection that it began
            await _drain(kept, address)
        await kept.close()
        await old.session.close()
        await new.session.close()


async def _drain(channel: grpc.aio.Channel, address: str) -> None:
    """Raises what the call becomes: a lost connection is not made again."""
    stub = control_pb2_grpc.CoordinatorStub(channel)
    try:
        await stub.Drain(pb.DrainRequest(agent_id="w0"), timeout=10)
    except grpc.aio.AioRpcError as error:
        raise error_from_exception(address, error) from None


def _replace(path: pathlib.Path, content: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    os.replace(draft, path)


def test_beyond_loopback_something_must_guard(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no TLS: .* give tls_cert_file and tls_client_ca_file"):
        CoordinatorOptions(host="0.0.0.0")
    CoordinatorOptions(host="0.0.0.0", insecure=True)
    CoordinatorOptions(host="0.0.0.0", tls_cert_file="c", tls_client_ca_file="a")
    for wrong in ({"tls_cert_file": "c"}, {"tls_client_ca_file": "c"}, {"tls_key_file": "k"}, {"revoked_file": "r"}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} needs"):
            CoordinatorOptions(**wrong)


async def test_a_worker_registers_under_its_own_name_only(tmp_path: pathlib.Path, ca: ClusterAuthority) -> None:
    async with coordinator_process(tmp_path, ca.coordinator_options()) as coordinator:
        p0 = ca.followed(CertRole.PREFILL, "p0")
        for name in ("p1", "p00", "P0"):
            with pytest.raises(ForbiddenError, match=f"may not register as {name}"):
                await register(coordinator.address, name, p0)
        await register(coordinator.address, "p0.1", p0)
