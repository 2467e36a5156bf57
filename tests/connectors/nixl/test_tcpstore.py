"""Metadata through a TCPStore: torch.distributed's own, a small one in its protocol, and some that are none."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvxfer.connectors.nixl import metadata_exchange, tcpstore
from kvxfer.connectors.nixl.bindings import nixlBackendError, nixlInvalidParamError, nixlNotAllowedError
from kvxfer.connectors.nixl.metadata_exchange import MetadataExchange
from kvxfer.connectors.nixl.tcpstore import TcpStoreClient
from tests.support.nixl.agents import MakeAgent, finish, held_port, logged, memory, notifications, register, row, until
from tests.support.nixl.small_store import SET, SmallStore

HOST = "127.0.0.1"


@pytest.fixture
def small_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallStore]:
    store = SmallStore()
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", f"{HOST}:{store.port}")
    yield store
    store.close()


@pytest.fixture(params=["small", "torch"])
def serve_store(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Any]]:
    """``serve_store(port)``."""
    stores: list[SmallStore] = []

    def serve(port: int) -> Any:
        if request.param == "small":
            stores.append(SmallStore(port))
            return stores[-1]
        distributed = pytest.importorskip("torch.distributed", reason="torch, whose TCPStore this is, is not installed")
        return distributed.TCPStore(HOST, port, is_master=True, wait_for_workers=False)

    yield serve
    for store in stores:
        store.close()


@pytest.fixture
def store(serve_store: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    store = serve_store(0)
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", f"{HOST}:{store.port}")
    return store


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with logged(caplog):
        yield caplog


def test_send_fetch_and_invalidate(store: Any, make_agent: MakeAgent) -> None:
    one, other = make_agent("one"), make_agent("other")
    mine, theirs = memory(4096), memory(4096, seed=1)
    register(one, mine)
    register(other, theirs)
    other.send_local_metadata()
    one.fetch_remote_metadata("other")
    until(lambda: one.check_remote_metadata("other"))
    assert store.get("nixl/agents/metadata/other/NULL_AGENT") == other.get_agent_metadata()
    local, remote = one.get_xfer_descs([row(mine)], "DRAM"), one.get_xfer_descs([row(theirs)], "DRAM")
    finish(one, one.initialize_xfer("READ", local, remote, "other", b"done"))
    assert (mine == theirs).all()
    assert notifications(other) == {"one": [b"done"]}
    other.invalidate_local_metadata()
    until(lambda: not store.check(["nixl/agents/metadata/other/NULL_AGENT"]))
    assert one.check_remote_metadata("other")


def test_two_that_fetch_before_either_sends(store: Any, make_agent: MakeAgent) -> None:
    one, other = make_agent("one"), make_agent("other")
    one.fetch_remote_metadata("other")
    other.fetch_remote_metadata("one")
    one.send_local_metadata()
    other.send_local_metadata()
    until(lambda: one.check_remote_metadata("other") and other.check_remote_metadata("one"), patience_s=5)


def test_labels(store: Any, make_agent: MakeAgent) -> None:
    one, other = make_agent("one"), make_agent("other")
    array = memory(4096)
    descs = register(other, array)
    with pytest.raises(nixlInvalidParamError, match="label"):
        other.send_partial_agent_metadata(descs, True)
    other.send_partial_agent_metadata(descs, True, ["UCX"], label="first")
    one.fetch_remote_metadata("other", label="first")
    until(lambda: one.check_remote_metadata("other", one.get_xfer_descs([row(array)], "DRAM")))
    assert store.check(["nixl/agents/first/other/NULL_AGENT"])


def test_an_address_goes_before_the_store(store: Any, make_agent: MakeAgent) -> None:
    one, other = make_agent("one", enable_listen_thread=True, listen_port=0), make_agent("other")
    other.send_local_metadata(HOST, one.agent.listenPort)
    until(lambda: one.check_remote_metadata("other"))
    assert not store.check(["nixl/agents/metadata/other/NULL_AGENT"])


def test_metadata_under_a_foreign_name_is_not_kept(
    store: Any, make_agent: MakeAgent, log: pytest.LogCaptureFixture
) -> None:
    one, other = make_agent("one"), make_agent("other")
    store.set("nixl/agents/metadata/third/NULL_AGENT", other.get_agent_metadata())
    store.set("nixl/agents/metadata/fourth/NULL_AGENT", b"\x00NIXL's own")
    one.fetch_remote_metadata("third")
    one.fetch_remote_metadata("fourth")
    until(lambda: log.text.count("metadata exchange") == 2)
    assert "metadata of agent 'other', not of 'third'" in log.text
    assert not one.check_remote_metadata("third")
    assert not one.check_remote_metadata("other")


def test_metadata_under_a_foreign_name_ends_nothing(
    small_store: SmallStore, make_agent: MakeAgent, log: pytest.LogCaptureFixture
) -> None:
    one, other = make_agent("one"), make_agent("other")
    mine, theirs = memory(4096), memory(4096, seed=1)
    register(one, mine)
    register(other, theirs)
    one.add_remote_agent(other.get_agent_metadata())
    local, remote = one.get_xfer_descs([row(mine)], "DRAM"), one.get_xfer_descs([row(theirs)], "DRAM")
    handle = one.initialize_xfer("READ", local, remote, "other")
    small_store.set("nixl/agents/metadata/third/NULL_AGENT", other.get_agent_metadata())
    one.fetch_remote_metadata("third")
    until(lambda: "metadata exchange" in log.text)
    finish(one, handle)
    assert (mine == theirs).all()


def test_key_that_never_comes_is_given_up(
    store: Any, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NIXL_TCPSTORE_TIMEOUT_MS", "300")
    make_agent("one").fetch_remote_metadata("other")
    until(lambda: "none came in 0.3 s: there is no 'nixl/agents/metadata/other/NULL_AGENT'" in log.text)


def test_a_store_that_comes_late(
    serve_store: Callable[[int], Any], make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_port() as port:
        monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", f"{HOST}:{port}")
        one, other = make_agent("one"), make_agent("other")
        one.fetch_remote_metadata("other")
        until(lambda: "1 waits" in repr(one.agent._exchange))
        store = serve_store(port)
        other.send_local_metadata()
        until(lambda: one.check_remote_metadata("other"))
        assert store.num_keys() == 1


def test_a_line_that_broke_is_dialled_again(store: Any) -> None:
    client = TcpStoreClient(f"{HOST}:{store.port}", 5, 5)
    client.put("one", "metadata", b"blob")
    assert client._socket is not None
    client._socket.shut()
    assert client.get("one", "metadata") == b"blob"
    assert client.get("one", "other") is None
    client.delete("one")
    assert client.get("one", "metadata") is None
    client.close()
    client.close()
    with pytest.raises(nixlBackendError, match="closed"):
        client.get("one", "metadata")


WRONG = ["host", "host:", ":1", "host:0", "host:65536", "host:12x", "host:-1", "host:" + "1" * 5000]


@pytest.mark.parametrize("endpoint", WRONG, ids=[endpoint[:10] for endpoint in WRONG])
def test_endpoints_that_are_none(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", endpoint)
    with pytest.raises(nixlInvalidParamError, match="host:port"):
        make_agent("one")


def test_one_store_not_two(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", f"{HOST}:1")
    monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", f"http://{HOST}:1")
    with pytest.raises(nixlInvalidParamError, match="both set"):
        make_agent("one")


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([b"SSH-2.0-x\r\n"], "no TCPStore"),
        ([None, b"\0", b"\xff" * 8], "no metadata"),
        ([None, b"\0", b"\x10" + b"\0" * 7 + b"half"], "hung up"),
        ([None], "hung up"),
        ([], "hung up"),
    ],
)
def test_answer_of_another_server_is_reported(answers: list[bytes | None], said: str) -> None:
    """Each answer follows one piece of the client's; None echoes the nonce of the dialling."""

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):  # it may be gone by then
            for answer in answers:
                asked = connection.recv(4096)
                connection.sendall(asked[-4:] if answer is None else answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass

    with socket.create_server((HOST, 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        client = TcpStoreClient(f"{HOST}:{server.getsockname()[1]}", 5, 5)
        with pytest.raises(nixlBackendError, match=said):
            client.get("one", "metadata")
        assert client._socket is None
        thread.join(10)


def test_store_that_does_not_listen_is_reported(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", f"{HOST}:1")
    agent = make_agent("one")
    assert isinstance(agent.agent._exchange, MetadataExchange)
    agent.send_local_metadata()
    until(lambda: f"send to the TCPStore: nixlBackendError: the TCPStore at {HOST}:1" in log.text)


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".b"])
def test_a_host_that_is_none(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, host: str
) -> None:
    with pytest.raises(nixlBackendError, match=host):
        TcpStoreClient(f"{host}:1234", 5, 5).put("one", "metadata", b"blob")
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", f"{host}:1234")
    one, other = make_agent("one"), make_agent("other", enable_listen_thread=True, listen_port=0)
    one.send_local_metadata()
    until(lambda: f"the TCPStore at {host}" in log.text)
    one.send_local_metadata(HOST, other.agent.listenPort)
    until(lambda: other.check_remote_metadata("one"))


# --- one that is slow, or wants to be ---


def test_an_answer_in_drops_has_one_deadline() -> None:
    """Each drop comes in time; all of them would take 30 s, and then the line is hung up."""
    over = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(connection.recv(4096)[-4:])
            connection.recv(4096)
            connection.sendall(b"\0")
            connection.recv(4096)
            connection.sendall((1 << 20).to_bytes(8, "little"))
            for _ in range(600):
                connection.sendall(b"x")
                if over.wait(0.05):
                    return

    with socket.create_server((HOST, 0)) as server:
        thread = threading.Thread(target=drip, args=(server,), daemon=True)
        thread.start()
        with pytest.raises(nixlBackendError, match="timed out"):
            TcpStoreClient(f"{HOST}:{server.getsockname()[1]}", 30, 0.5).get("one", "metadata")
        over.set()
        thread.join(10)


def test_a_fetch_does_not_wait_long_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcpstore, "GET_CONNECT_S", 0.1)
    with socket.socket() as server, contextlib.ExitStack() as lines:
        server.bind((HOST, 0))
        server.listen(0)
        address = server.getsockname()
        while True:  # until the queue of connections that wait to be accepted is full
            line = lines.enter_context(socket.socket())
            line.settimeout(0.3)
            try:
                line.connect(address)
            except TimeoutError:
                break
        client = TcpStoreClient(f"{HOST}:{address[1]}", 20, 20)
        begun_s = time.monotonic()
        with pytest.raises(nixlBackendError, match="timed out"):
            client.get("one", "metadata")
        assert time.monotonic() - begun_s < 10


@pytest.mark.parametrize("tasks", [0, 4])
def test_an_agent_that_is_closed_sends_nothing_more(
    small_store: SmallStore, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tasks: int
) -> None:
    """Its store takes what it is told and answers nothing; more is to be sent, up to all that there is room for."""
    monkeypatch.setattr(metadata_exchange, "FLUSH_S", 0.2)
    monkeypatch.setattr(metadata_exchange, "TASKS_MAX", 4)
    agent = make_agent("one")
    background = agent.agent._exchange
    store = background._store
    assert isinstance(store, TcpStoreClient)
    agent.send_local_metadata()
    until(lambda: store._published)
    small_store.silent.set()
    agent.send_local_metadata()
    until(lambda: small_store.queries.count(SET) == 2)
    for _ in range(tasks):
        agent.send_local_metadata()
    if tasks == 4:
        with pytest.raises(nixlNotAllowedError, match="TASKS_MAX"):
            agent.send_local_metadata()
    worker = background._worker
    assert worker is not None
    agent.close()
    worker.join(30)
    assert not worker.is_alive()
    assert store._socket is None
    assert (small_store.lines, small_store.queries.count(SET)) == (1, 2)
