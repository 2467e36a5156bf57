"""The coordinator as a server: options, ports, health, metrics, bad messages, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import urllib.request
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer._pb import control_pb2 as pb
from kvxfer._pb import control_pb2_grpc
from kvxfer.coordinator import CoordinatorOptions, serve
from kvxfer.coordinator.health import WATCHES_MAX
from kvxfer.coordinator.store import AHEAD_MAX, MemoryStore
from kvxfer.errors import ConfigError, OverloadedError, ProtocolError, RefusedError
from kvxfer.protocol.directory import Hello
from kvxfer.rpc import MembershipWatch, convert
from kvxfer.rpc.link import credentials, error_from_exception
from kvxfer.types import DataAddress, Role, WorkerInfo
from tests.support.coordinator import Cluster, running, until


def hello(agent_id: str = "p0", number: int = 0) -> pb.Register:
    info = WorkerInfo(agent_id, Role.BOTH, "m", "http://127.0.0.1:1")
    return convert.write_hello(Hello(info, DataAddress("127.0.0.1", 1, "", "h"), bytes(16), number))


async def converse(cluster: Cluster, *messages: bytes) -> Any:
    """Send raw messages in one session; return the first answer or raise what it ended with."""
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        session = channel.stream_stream(
            "/kvxfer.v1.Coordinator/Session", response_deserializer=pb.CoordinatorMessage.FromString
        )
        call = session(metadata=credentials(cluster.token))
        try:
            for message in messages:
                await call.write(message)
            answers = []
            while (answer := await call.read()) is not grpc.aio.EOF:
                answers.append(answer)
                if len(messages) == 1:
                    return answer
            return answers
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await _status(call, cluster.address) from None
        finally:
            call.cancel()


async def _status(call: Any, address: str) -> Exception:
    error = grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )
    return error_from_exception(address, error)


def as_bytes(**kind: Any) -> bytes:
    return pb.AgentMessage(**kind).SerializeToString()


def changed(message: pb.Register, **changes: Any) -> pb.Register:
    copy = pb.Register()
    copy.CopyFrom(message)
    for path, value in changes.items():
        *parents, name = path.split("__")
        target = copy
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    return copy


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "must register"),
        (as_bytes(heartbeat=pb.Heartbeat()), "must register"),
        (as_bytes(register=pb.Register()), "protocol_version 0 is not 1"),
        (as_bytes(register=pb.Register(protocol_version=1)), "register lacks info"),
        (as_bytes(register=changed(hello(), info__agent_id="../etc")), "agent id '../etc'"),
        (as_bytes(register=changed(hello(), info__role=9)), "info.role 9 is unknown"),
        (as_bytes(register=changed(hello(), incarnation__boot_nonce=b"short")), "boot_nonce must be 16 bytes"),
        (as_bytes(register=changed(hello(), address__tcp_port=70000)), "address.tcp_port must be 0 to 65535"),
        (as_bytes(register=changed(hello(), info__model="m" * 2000)), "info.model exceeds TEXT_BYTES_MAX=1024"),
        (as_bytes(register=changed(hello(), info__http_url="http://x\nHost: y")), "info.http_url has control"),
        (as_bytes(register=changed(hello(), info__http_url="file:///etc/passwd")), "info.http_url must be http"),
        (as_bytes(register=changed(hello(), info__http_url="http://127.0.0.1:1/x?y")), "info.http_url must be http"),
        (as_bytes(register=changed(hello(), info__http_url="http://a@127.0.0.1:1")), "info.http_url must be http"),
        (as_bytes(register=changed(hello(), info__model="m\u2028fake")), "info.model has control"),
        (as_bytes(register=changed(hello(), info__model="m\x9b2J")), "info.model has control"),
        (as_bytes(register=changed(hello(), address__tcp_host="evil.example")), "address.tcp_host must be an IP"),
        (as_bytes(register=changed(hello(), address__tcp_host="0.0.0.0")), "address.tcp_host must be an IP"),
        (as_bytes(register=changed(hello(), address__unix_path="../x")), "address.unix_path must be absolute"),
        (as_bytes(register=changed(hello(), load__free_blocks=1 << 60)), "load.free_blocks must be"),
        (as_bytes(register=changed(hello(), incarnation__number=1 << 63)), "incarnation.number must be"),
    ],
)
async def test_a_bad_registration_is_a_violation_that_says_what(cluster: Cluster, message: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        await converse(cluster, message)


async def test_number_that_no_coordinator_gave_is_refused(cluster: Cluster) -> None:
    with pytest.raises(RefusedError, match="far above every number"):
        await converse(cluster, as_bytes(register=hello(number=(1 << 63) - 1)))


@pytest.mark.parametrize(
    "second", [b"", as_bytes(register=hello()), as_bytes(update_pools=pb.UpdatePools(pools=[pb.PoolRecord()]))]
)
async def test_a_bad_message_inside_a_session_ends_it_and_nothing_else(cluster: Cluster, second: bytes) -> None:
    agent = cluster.agent("d0", nonce=2)
    await agent.session.start()
    with pytest.raises(ProtocolError):
        await converse(cluster, as_bytes(register=hello()), second)
    await until(lambda: "p0" in agent.members and agent.members["p0"].is_suspect, "the bad one to be adrift")
    assert agent.session.is_connected


async def test_garbage_bytes_do_no_harm(cluster: Cluster) -> None:
    for garbage in (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", bytes(range(256))):
        with pytest.raises(ProtocolError, match=r"no AgentMessage|must register"):
            await converse(cluster, garbage)
    agent = cluster.agent("d0", nonce=2)
    await agent.session.start()


@given(
    st.binary(max_size=200), st.sampled_from([pb.Register, pb.Member, pb.MembershipUpdate, pb.Heartbeat, pb.PoolRecord])
)
@settings(max_examples=300, deadline=None)
def test_reading_is_total(raw: bytes, kind: Any) -> None:
    message = kind()
    try:
        message.ParseFromString(raw)
    except Exception:
        return
    read: dict[Any, Any] = {
        pb.Register: convert.read_hello,
        pb.Member: convert.read_member,
        pb.MembershipUpdate: convert.read_change,
        pb.Heartbeat: lambda beat: convert.read_load(beat.load),
        pb.PoolRecord: convert.read_pool,
    }
    try:
        read[kind](message)
    except ProtocolError as error:
        assert str(error)  # noqa: PT017


async def test_a_message_over_the_bound_is_refused_by_size(cluster: Cluster) -> None:
    with pytest.raises(OverloadedError, match="larger than max"):
        await converse(cluster, as_bytes(register=changed(hello(), info__model="m" * (3 << 20))))


async def test_members_and_watchers_are_bounded(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, members_max=1, watchers_max=1) as cluster:
        await cluster.agent("p0").session.start()
        with pytest.raises(OverloadedError, match="members_max=1"):
            await converse(cluster, as_bytes(register=hello("p1")))
        async with MembershipWatch(cluster.address, cluster.token) as watch:
            await watch.wait_connected()
            second = MembershipWatch(cluster.address, cluster.token)
            async with second:
                await until(lambda: isinstance(second.last_error, OverloadedError), "the bound")
                assert "watchers_max=1" in str(second.last_error)


SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""HealthCheckResponse of grpc.health.v1 as bytes, so that the standard and not our twin of it is tested."""


async def test_health_is_the_standard_service_and_turns_when_stopping(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        for service in (b"", b"\x0a\x15kvxfer.v1.Coordinator"):
            assert await check(service) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(b"\x0a\x05other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await watch.read() == SERVING
        stop = asyncio.create_task(cluster.stop())
        assert await watch.read() == NOT_SERVING
        watch.cancel()
        await stop


async def test_health_watches_take_no_agents_place(cluster: Cluster) -> None:
    """They need no token, and one connection can open thousands."""
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        watches = [channel.unary_stream("/grpc.health.v1.Health/Watch")(b"") for _ in range(WATCHES_MAX)]
        for watch in watches:
            assert await watch.read() == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_stream("/grpc.health.v1.Health/Watch")(b"").read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == SERVING
        watches.pop().cancel()
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert await channel.unary_stream("/grpc.health.v1.Health/Watch")(b"").read() == SERVING
                    break
                await asyncio.sleep(0.05)


async def test_stopping_tells_the_sessions(cluster: Cluster) -> None:
    agent = cluster.agent("p0")
    await agent.session.start()
    await cluster.stop()
    await until(lambda: not agent.session.is_connected, "the end")
    assert agent.states[:2] == [True, False]


async def test_stopping_coordinator_suspects_no_member(cluster: Cluster) -> None:
    """A stream that the coordinator ends itself says nothing of the agent: a restart must cost no placement."""
    await cluster.agent("p0").session.start()
    async with MembershipWatch(cluster.address, cluster.token) as watch:
        await watch.wait_connected()
        await cluster.stop()
        await until(lambda: not watch.is_connected, "the end")
        assert [member.is_suspect for member in watch.membership.members] == [False]


async def test_a_taken_port_is_one_sentence(cluster: Cluster) -> None:
    second = dataclasses.replace(cluster.options, metrics_port=None)
    with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+: the port is taken"):
        await serve(second, on_ready=lambda _: None, stop=asyncio.Event())
    taken = dataclasses.replace(cluster.options, port=0, metrics_port=cluster.options.port)
    with pytest.raises(ConfigError, match=r"metrics cannot listen on 127.0.0.1:\d+"):
        await serve(taken, on_ready=lambda _: None, stop=asyncio.Event())


async def test_metrics_count_members_and_registrations(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, metrics_port=0) as cluster:
        agent = cluster.agent("p0")
        await agent.session.start()
        await agent.session.close()
        await cluster.agent("p1", nonce=2).session.start()
        await asyncio.sleep(2 * cluster.options.heartbeat_s)

        def scrape() -> str:
            with urllib.request.urlopen(f"{cluster.ready['http_url']}/metrics", timeout=10) as answer:
                return str(answer.read().decode())

        text = await asyncio.to_thread(scrape)
    assert 'kvxfer_coordinator_members{state="live"} 1.0' in text
    assert 'kvxfer_coordinator_registrations_total{outcome="new"} 2.0' in text
    assert 'kvxfer_coordinator_incarnations_ended_total{cause="left"} 1.0' in text


async def test_the_ready_line_has_what_every_server_says(cluster: Cluster) -> None:
    assert set(cluster.ready) == {"event", "role", "address", "http_url", "pid"}
    assert (cluster.ready["event"], cluster.ready["role"]) == ("ready", "coordinator")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "coordinator", "localhost.example"])
def test_only_loopback_without_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match=r"not loopback and there is no TLS: .*give tls_cert_file"):
        CoordinatorOptions(host=host)
    assert CoordinatorOptions(host=host, insecure=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_consent(host: str) -> None:
    assert CoordinatorOptions(host=host).host == host


@pytest.mark.parametrize(
    "wrong", [{"port": -1}, {"metrics_port": 65536}, {"members_max": 0}, {"watchers_max": 0}, {"dead_after_s": 1.0}]
)
def test_bad_options_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CoordinatorOptions(**wrong)


def test_every_option_has_a_help_text() -> None:
    assert all(field.metadata["help"] for field in dataclasses.fields(CoordinatorOptions))


async def test_the_counter_never_goes_back() -> None:
    store = MemoryStore(1000)
    assert [await store.next_number(), await store.next_number()] == [1001, 1002]
    await store.admit_number(5000)
    await store.admit_number(3000)
    assert await store.next_number() == 5001
    with pytest.raises(RefusedError):
        await store.admit_number(5001 + AHEAD_MAX + 1)
    assert await store.next_number() == 5002


async def test_the_generated_servicer_has_every_method_implemented() -> None:
    from kvxfer.coordinator.service import CoordinatorService

    for name in pb.DESCRIPTOR.services_by_name["Coordinator"].methods_by_name:
        assert getattr(CoordinatorService, name) is not getattr(control_pb2_grpc.CoordinatorServicer, name)
