"""Metadata through a TCPStore of torch.distributed: the real one, and some that are none."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from nixl_support import MakeAgent, finish, memory, notifications, register, row, until

from kvxfer.connectors.nixl.bindings import nixlBackendError, nixlInvalidParamError
from kvxfer.connectors.nixl.exchange import Exchange
from kvxfer.connectors.nixl.tcpstore import TcpStoreClient

HOST = "127.0.0.1"


def serve_store(port: int = 0) -> Any:
    distributed = pytest.importorskip("torch.distributed", reason="torch, whose TCPStore this is, is not installed")
    return distributed.TCPStore(HOST, port, is_master=True, wait_for_workers=False)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    store = serve_store()
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", f"{HOST}:{store.port}")
    return store


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("nixl")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


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
    assert "lies the metadata of agent 'other'" in log.text
    assert not one.check_remote_metadata("third")
    assert not one.check_remote_metadata("other")


def test_what_never_comes_is_given_up(
    store: Any, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NIXL_TCPSTORE_TIMEOUT_MS", "300")
    make_agent("one").fetch_remote_metadata("other")
    until(lambda: "none came in 0.3 s: there is no 'nixl/agents/metadata/other/NULL_AGENT'" in log.text)


def test_a_store_that_comes_late(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HOST, 0)) as server:
        port = int(server.getsockname()[1])
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", f"{HOST}:{port}")
    one, other = make_agent("one"), make_agent("other")
    one.fetch_remote_metadata("other")
    until(lambda: "1 waits" in repr(one.agent._exchange))
    store = serve_store(port)
    other.send_local_metadata()
    until(lambda: one.check_remote_metadata("other"))
    assert store.num_keys() == 1


def test_a_line_that_broke_is_dialled_again() -> None:
    store = serve_store()
    client = TcpStoreClient(f"{HOST}:{store.port}", 5, 5)
    client.put("one", "metadata", b"blob")
    assert client._line is not None
    client._line.shutdown(socket.SHUT_RDWR)
    assert client.get("one", "metadata") == b"blob"
    assert client.get("one", "other") is None
    client.delete("one")
    assert client.get("one", "metadata") is None
    client.close()
    client.close()


@pytest.mark.parametrize("endpoint", ["host", "host:", ":1", "host:0", "host:65536", "host:12x", "host:-1"])
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
def test_what_answers_is_no_store(answers: list[bytes | None], said: str) -> None:
    """Each answer follows one piece of the client's; None echoes the nonce of the dialling."""

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(ConnectionResetError):
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
        assert client._line is None
        thread.join(10)


def test_nobody_there(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", f"{HOST}:1")
    agent = make_agent("one")
    assert isinstance(agent.agent._exchange, Exchange)
    agent.send_local_metadata()
    until(lambda: f"send to the TCPStore: the TCPStore at {HOST}:1" in log.text)
