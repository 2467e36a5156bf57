"""Metadata from listener to listener, and through a small etcd."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from aetcd import rpc
from aetcd.rpc import rpc_pb2_grpc

from kvxfer.connectors.nixl import etcd as etcd_module
from kvxfer.connectors.nixl import nixl_agent, p2p
from kvxfer.connectors.nixl.bindings import nixlBackendError, nixlInvalidParamError
from kvxfer.connectors.nixl.etcd import EtcdClient
from kvxfer.connectors.nixl.metadata import decode_metadata
from kvxfer.connectors.nixl.tcpstore import TcpStoreClient
from tests.support.nixl.agents import MakeAgent, finish, held_port, logged, memory, notifications, register, row, until

HOST = "127.0.0.1"


def port_of(agent: nixl_agent) -> int:
    port = agent.agent.listenPort
    assert port is not None
    return port


# --- from listener to listener ---


def test_send_fetch_and_invalidate(make_agent: MakeAgent) -> None:
    one = make_agent("one", enable_listen_thread=True, listen_port=0)
    other = make_agent("other", enable_listen_thread=True, listen_port=0)
    mine, theirs = memory(4096), memory(4096, seed=1)
    register(one, mine)
    register(other, theirs)
    one.fetch_remote_metadata("other", HOST, port_of(other))
    one.send_local_metadata(HOST, port_of(other))
    until(lambda: one.check_remote_metadata("other") and other.check_remote_metadata("one"))
    local, remote = one.get_xfer_descs([row(mine)], "DRAM"), one.get_xfer_descs([row(theirs)], "DRAM")
    finish(one, one.initialize_xfer("READ", local, remote, "other", b"done"))
    assert (mine == theirs).all()
    assert notifications(other) == {"one": [b"done"]}
    one.invalidate_local_metadata(HOST, port_of(other))
    until(lambda: not other.check_remote_metadata("one"))


def test_an_agent_that_does_not_listen_can_fetch(make_agent: MakeAgent) -> None:
    one = make_agent("one")
    other = make_agent("other", enable_listen_thread=True, listen_port=0)
    one.fetch_remote_metadata("other", HOST, port_of(other))
    until(lambda: one.check_remote_metadata("other"))


def test_partial(make_agent: MakeAgent) -> None:
    one = make_agent("one", enable_listen_thread=True, listen_port=0)
    other = make_agent("other")
    arrays = [memory(4096), memory(4096)]
    descs = [register(other, array) for array in arrays]
    lists = [one.get_xfer_descs([row(array)], "DRAM") for array in arrays]
    other.send_partial_agent_metadata(descs[0], True, ["UCX"], HOST, port_of(one))
    until(lambda: one.check_remote_metadata("other", lists[0]))
    assert not one.check_remote_metadata("other", lists[1])
    other.send_partial_agent_metadata(descs[1], False, [], HOST, port_of(one))
    until(lambda: one.check_remote_metadata("other", lists[1]))


def test_closing_agent_sends_its_queued_metadata_first(make_agent: MakeAgent) -> None:
    one = make_agent("one", enable_listen_thread=True, listen_port=0)
    other = make_agent("other")
    one.add_remote_agent(other.get_agent_metadata())
    other.invalidate_local_metadata(HOST, port_of(one))
    other.close()
    until(lambda: not one.check_remote_metadata("other"))


def test_invalidation_by_another_agent_is_refused(make_agent: MakeAgent, caplog: pytest.LogCaptureFixture) -> None:
    one = make_agent("one", enable_listen_thread=True, listen_port=0)
    other = make_agent("other")
    one.add_remote_agent(other.get_agent_metadata())
    with logged(caplog):
        p2p.tell(HOST, port_of(one), p2p.FORGET, bytes(32) + b"other")
        until(lambda: "asks to be forgotten" in caplog.text)
    assert one.check_remote_metadata("other")


@pytest.mark.parametrize(
    "noise",
    [
        b"NIXLCOMM:SEND",
        b"\x0d\0\0\0\0\0\0\0NIXLCOMM:SEND",
        p2p.HEAD.pack(p2p.MAGIC, 1, p2p.LOAD, 1 << 30),
        p2p.HEAD.pack(p2p.MAGIC, 1, p2p.LOAD, 4) + b"junk",
        p2p.HEAD.pack(p2p.MAGIC, 1, 9, 0),
        p2p.HEAD.pack(p2p.MAGIC, 1, p2p.FORGET, 40) + bytes(32) + b"\xff" * 8,
        b"\0",
    ],
)
def test_noise_ends_its_own_connection_only(make_agent: MakeAgent, noise: bytes) -> None:
    agent = make_agent("one", enable_listen_thread=True, listen_port=0)
    with socket.create_connection((HOST, port_of(agent)), 10) as connection:
        connection.settimeout(20)
        connection.sendall(noise)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    assert p2p.tell(HOST, port_of(agent), p2p.SEND)


def drip(connection: socket.socket, over: threading.Event) -> None:
    """The begin of a frame, then a byte every 50 ms; until it is over, or the other side hangs up."""
    with contextlib.suppress(OSError):
        connection.sendall(p2p.HEAD.pack(p2p.MAGIC, p2p.VERSION, p2p.LOAD, 1 << 20))
        while not over.wait(0.05):
            connection.sendall(b"x")


def test_a_frame_in_drops_has_one_deadline(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sending thread gives back its place, and the asking one goes on with the next request."""
    monkeypatch.setattr(p2p, "FRAME_S", 2.0)
    agent, other = (make_agent(name, enable_listen_thread=True, listen_port=0) for name in ("one", "other"))
    over = threading.Event()
    threads = []
    with socket.create_server((HOST, 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                drip(connection, over)

        threads.append(threading.Thread(target=answer, daemon=True))
        try:
            threads[0].start()
            agent.fetch_remote_metadata("absent", HOST, server.getsockname()[1])
            agent.fetch_remote_metadata("other", HOST, port_of(other))
            until(lambda: agent.check_remote_metadata("other"))
            with socket.create_connection((HOST, port_of(agent)), 10) as connection:
                threads.append(threading.Thread(target=drip, args=(connection, over), daemon=True))
                threads[1].start()
                connection.settimeout(20)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        finally:
            over.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def test_fetch_from_a_closed_port_fails(make_agent: MakeAgent) -> None:
    agent = make_agent("one")
    with held_port() as port:
        agent.send_local_metadata(HOST, port)
        agent.fetch_remote_metadata("other", HOST, port)
    for call in (agent.send_local_metadata, agent.invalidate_local_metadata, lambda: agent.fetch_remote_metadata("x")):
        with pytest.raises(nixlInvalidParamError, match="NIXL_ETCD_ENDPOINTS"):
            call()
    for port in (0, -1, 65536, 1 << 64):
        with pytest.raises(nixlInvalidParamError, match="between 1 and 65535"):
            agent.send_local_metadata(HOST, port)


def test_another_host_is_the_operators_choice(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_NIXL_HOST", "0.0.0.0")
    monkeypatch.setenv("KVXFER_NIXL_ADVERTISE", HOST)
    with pytest.raises(nixlInvalidParamError, match="insecure"):
        make_agent("refused")
    monkeypatch.setenv("KVXFER_NIXL_INSECURE", "yes")
    one = make_agent("one", enable_listen_thread=True, listen_port=0)
    address = decode_metadata(one.get_agent_metadata()).address
    assert address is not None
    assert address.tcp_host == HOST
    other = make_agent("other")
    other.fetch_remote_metadata("one", HOST, port_of(one))
    until(lambda: other.check_remote_metadata("one"))


def test_a_port_that_is_taken(make_agent: MakeAgent) -> None:
    with socket.create_server((HOST, 0)) as server, pytest.raises(nixlBackendError, match="cannot listen"):
        make_agent("one", enable_listen_thread=True, listen_port=int(server.getsockname()[1]))


@pytest.mark.parametrize("host", ["a..b", pytest.param("\ud800", id="half-a-surrogate")])
def test_an_address_that_is_none_ends_its_own_exchange_only(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    one = make_agent("one", enable_listen_thread=True, listen_port=0)
    other = make_agent("other")
    with logged(caplog):
        other.send_local_metadata(host, 7000)
        until(lambda: ": Unicode" in caplog.text)
    caplog.text.encode("utf-8")
    other.send_local_metadata(HOST, port_of(one))
    until(lambda: one.check_remote_metadata("other"))


def test_names_and_labels_that_have_no_utf8(make_agent: MakeAgent) -> None:
    agent = make_agent("one")
    array = memory(64)
    descs = register(agent, array)
    half = "\ud800"
    for call in (
        lambda: make_agent(half),
        lambda: agent.fetch_remote_metadata(half, HOST, 1),
        lambda: agent.fetch_remote_metadata("other", HOST, 1, half),
        lambda: agent.send_partial_agent_metadata(descs, True, [], HOST, 1, half),
        lambda: agent.remove_remote_agent(half),
        lambda: agent.send_notif("one", half),  # type: ignore[arg-type]
        lambda: agent.get_reg_descs([(*row(array), half)], "DRAM"),
    ):
        with pytest.raises(nixlInvalidParamError, match="no UTF-8"):
            call()


def test_tasks_go_between_the_tries_of_fetches(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes its time over each answer holds up what is asked for meanwhile by one answer, not by all."""
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", f"{HOST}:1")
    exchange = make_agent("one").agent._exchange
    asked: list[str] = []
    answers = threading.Semaphore(0)

    class SlowStore(TcpStoreClient):
        def get(self, agent: str, label: str) -> bytes | None:
            asked.append(agent)
            answers.acquire(timeout=30)
            return None

    exchange._store = SlowStore(f"{HOST}:1", 1, 1)
    for name in ("a", "b"):
        exchange.fetch(name, "", 0, "")
    answers.release(3)
    until(lambda: len(asked) == 4)
    exchange._submit("task", lambda: asked.append("task"))
    answers.release(1)
    until(lambda: len(asked) >= 5)
    answers.release(1000)
    assert asked[4] == "task"


# --- through etcd ---


class SmallEtcd(rpc_pb2_grpc.KVServicer, rpc_pb2_grpc.WatchServicer):
    """The four calls of etcd that are used, on a dictionary."""

    def __init__(self) -> None:
        self.keys: dict[bytes, bytes] = {}
        self.watchers: list[queue.Queue[bytes | None]] = []
        self.lock = threading.Lock()
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
        rpc_pb2_grpc.add_KVServicer_to_server(self, self.server)
        rpc_pb2_grpc.add_WatchServicer_to_server(self, self.server)
        self.url = f"http://{HOST}:{self.server.add_insecure_port(f'{HOST}:0')}"
        self.server.start()

    def Put(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self.lock:
            self.keys[request.key] = request.value
        return rpc.PutResponse()

    def Range(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self.lock:
            found = self.named(request)
            return rpc.RangeResponse(kvs=[rpc.KeyValue(key=key, value=self.keys[key]) for key in found])

    def DeleteRange(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self.lock:
            for key in self.named(request):
                del self.keys[key]
                for watcher in self.watchers:
                    watcher.put(key)
        return rpc.DeleteRangeResponse()

    def Watch(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        assert list(next(requests).create_request.filters) == [rpc.WatchCreateRequest.NOPUT]
        deleted: queue.Queue[bytes | None] = queue.Queue()
        context.add_callback(lambda: deleted.put(None))
        yield rpc.WatchResponse(created=True)
        with self.lock:
            self.watchers.append(deleted)
        while (key := deleted.get()) is not None:
            yield rpc.WatchResponse(events=[rpc.Event(type=rpc.Event.DELETE, kv=rpc.KeyValue(key=key))])

    def named(self, request: Any) -> list[bytes]:
        end = request.range_end or request.key + b"\0"
        return [key for key in self.keys if request.key <= key < end]

    def hang_up(self) -> None:
        """Every stream of a watch ends, without an error."""
        with self.lock:
            for watcher in self.watchers:
                watcher.put(None)
            self.watchers.clear()

    def close(self) -> None:
        self.hang_up()
        self.server.stop(0).wait(10)


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallEtcd]:
    server = SmallEtcd()
    monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", f"http://{HOST}:1;{server.url}")
    monkeypatch.setenv("NIXL_ETCD_NAMESPACE", "/test/agents")
    yield server
    server.close()


def test_etcd(etcd: SmallEtcd, make_agent: MakeAgent) -> None:
    one, other = make_agent("one"), make_agent("other")
    one.fetch_remote_metadata("other")
    other.send_local_metadata()
    until(lambda: one.check_remote_metadata("other"))
    assert list(etcd.keys) == [b"/test/agents/other/metadata"]
    until(lambda: etcd.watchers)
    other.invalidate_local_metadata()
    until(lambda: not one.check_remote_metadata("other"))
    assert not etcd.keys
    other.send_local_metadata()
    until(lambda: etcd.keys)
    one.fetch_remote_metadata("other")
    until(lambda: one.check_remote_metadata("other"))


def test_a_watch_that_broke_off_is_opened_again(
    etcd: SmallEtcd, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "RETRY_S", 0.01)
    one, other = make_agent("one"), make_agent("other")
    other.send_local_metadata()
    one.fetch_remote_metadata("other")
    for _ in range(2):
        until(lambda: etcd.watchers)
        etcd.hang_up()
    until(lambda: etcd.watchers)
    assert one.check_remote_metadata("other")
    other.invalidate_local_metadata()
    until(lambda: not one.check_remote_metadata("other"))


def test_etcd_without_aetcd_raises_what_installs_it(
    etcd: SmallEtcd, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aetcd.rpc", None)
    agent = make_agent("one")
    for call in (agent.send_local_metadata, lambda: agent.fetch_remote_metadata("other")):
        with pytest.raises(nixlBackendError, match="needs aetcd: install it, or kvxfer with its extra etcd"):
            call()


def test_labels(etcd: SmallEtcd, make_agent: MakeAgent) -> None:
    one, other = make_agent("one"), make_agent("other")
    array = memory(4096)
    descs = register(other, array)
    with pytest.raises(nixlInvalidParamError, match="label"):
        other.send_partial_agent_metadata(descs, True)
    other.send_partial_agent_metadata(descs, True, ["UCX"], label="first")
    one.fetch_remote_metadata("other", label="first")
    until(lambda: one.check_remote_metadata("other", one.get_xfer_descs([row(array)], "DRAM")))


def test_metadata_under_a_foreign_name_is_not_looked_at(
    etcd: SmallEtcd, make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = make_agent("one"), make_agent("other")
    EtcdClient(etcd.url, "/test/agents").put("third", "metadata", other.get_agent_metadata())
    with logged(caplog):
        one.fetch_remote_metadata("third")
        until(lambda: "metadata of agent 'other', not of 'third'" in caplog.text)
        assert not one.check_remote_metadata("other")
        one.add_remote_agent(other.get_agent_metadata())
        one.fetch_remote_metadata("third")
        until(lambda: caplog.text.count("metadata of agent 'other', not of 'third'") == 2)
    assert not one.check_remote_metadata("third")
    assert one.check_remote_metadata("other")


def test_the_client_names_what_is_wrong(etcd: SmallEtcd) -> None:
    client = EtcdClient(etcd.url, "/test/agents")
    assert client.get("a", "b") is None
    client.put("a", "b", b"blob")
    assert client.get("a", "b") == b"blob"
    with pytest.raises(nixlBackendError, match=f"Put: {HOST}:1: UNAVAILABLE"):
        EtcdClient(f"{HOST}:1", "/x").put("a", "b", b"")
    with pytest.raises(nixlBackendError, match=r"a\.\.b:1: "):
        EtcdClient("http://a..b:1", "/x").put("a", "b", b"")
    for endpoints in ("", "ftp://host", "http://host:port", "http://", "http://[::1", "http://host:" + "1" * 5000):
        with pytest.raises(nixlInvalidParamError):
            EtcdClient(endpoints, "/x")
    assert client.agent_of(b"/test/agents/a/b/metadata") == "a/b"
    assert client.agent_of(b"/other/a/metadata") is None
