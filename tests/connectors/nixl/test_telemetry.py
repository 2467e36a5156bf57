"""What an agent writes for NIXL's telemetry readers, NIXL's file of settings, and where the log goes."""

from __future__ import annotations

import collections
import pathlib
import struct
import subprocess
import sys

import pytest
from nixl_support import MakeAgent, finish, memory, register, row

from kvxfer.connectors.nixl import nixl_agent, nixl_agent_config, settings
from kvxfer.connectors.nixl.bindings import (
    nixlBackendError,
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotFoundError,
)
from kvxfer.connectors.nixl.telemetry import Event, Ring

ALL = frozenset(Event)


def read(path: pathlib.Path) -> list[tuple[Event, int]]:
    """All that a reader finds in the file, as NIXL's ``telemetry_reader.py`` looks for it."""
    data = bytearray(path.read_bytes())
    writer, reader, version, expected, capacity, mask = struct.unpack_from("=QQiiQQ", data)
    assert (version, expected, mask, len(data)) == (4, 4, capacity - 1, 40 + 16 * capacity)
    events = []
    while reader != writer:
        kind, value = struct.unpack_from("=I4xQ", data, 40 + 16 * reader)
        events.append((Event(kind), value))
        reader = (reader + 1) & mask
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("=Q", reader))
    return events


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "y")
    monkeypatch.setenv("NIXL_TELEMETRY_DIR", str(tmp_path))
    return tmp_path


def work(one: nixl_agent, other: nixl_agent) -> None:
    """A READ and a WRITE of 4096 bytes, a transfer of ours to ourselves, and one that is refused."""
    mine, theirs = memory(4096), memory(4096, seed=1)
    descs = register(one, mine)
    register(other, theirs)
    one.add_remote_agent(other.get_agent_metadata())
    local, remote = one.get_xfer_descs([row(mine)], "DRAM"), one.get_xfer_descs([row(theirs)], "DRAM")
    for operation in ("READ", "WRITE"):
        handle = one.initialize_xfer(operation, local, remote, "other")
        finish(one, handle)
        assert one.check_xfer_state(handle) == "DONE"
    finish(one, one.initialize_xfer("WRITE", local, local, "one"))
    with pytest.raises(nixlNotFoundError):
        one.initialize_xfer("READ", local, remote, "nobody")
    one.deregister_memory(descs)


def test_events(directory: pathlib.Path, make_agent: MakeAgent) -> None:
    work(make_agent("one"), make_agent("other"))
    found = collections.Counter(kind for kind, _ in read(directory / "one"))
    assert found == {
        Event.AGENT_MEMORY_REGISTERED: 1,
        Event.AGENT_MEMORY_DEREGISTERED: 1,
        Event.AGENT_XFER_TIME: 3,
        Event.AGENT_XFER_POST_TIME: 3,
        Event.AGENT_RX_BYTES: 1,
        Event.AGENT_TX_BYTES: 2,
        Event.AGENT_RX_REQUESTS_NUM: 1,
        Event.AGENT_TX_REQUESTS_NUM: 2,
        Event.AGENT_ERR_NOT_FOUND: 1,
    }
    assert read(directory / "other") == [(Event.AGENT_MEMORY_REGISTERED, 4096)]
    assert read(directory / "one") == []


def test_a_transfer_that_failed_is_counted_once(directory: pathlib.Path, make_agent: MakeAgent) -> None:
    one, other = make_agent("one"), make_agent("other")
    mine, theirs = memory(4096), memory(4096)
    register(one, mine)
    descs = register(other, theirs)
    one.add_remote_agent(other.get_agent_metadata())
    local, remote = one.get_xfer_descs([row(mine)], "DRAM"), one.get_xfer_descs([row(theirs)], "DRAM")
    handle = one.initialize_xfer("READ", local, remote, "other")
    other.deregister_memory(descs)
    for ask in (lambda: finish(one, handle), lambda: one.check_xfer_state(handle)):
        with pytest.raises(Exception, match=r"."):
            ask()
    kinds = [kind for kind, _ in read(directory / "one")]
    assert len([kind for kind in kinds if "ERR" in kind.name]) == 1


def test_only_the_metrics_that_are_wanted(
    directory: pathlib.Path, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLED_METRICS", "agent_?x_bytes, agent_err_*, nonsense")
    work(make_agent("one"), make_agent("other"))
    events = read(directory / "one")
    assert sorted(events) == [
        (Event.AGENT_TX_BYTES, 4096), (Event.AGENT_TX_BYTES, 4096),
        (Event.AGENT_RX_BYTES, 4096), (Event.AGENT_ERR_NOT_FOUND, 1),
    ]  # fmt: skip


def test_a_full_ring_counts_what_it_drops(tmp_path: pathlib.Path) -> None:
    ring = Ring(tmp_path / "ring", 4, ALL)
    ring.add((Event.AGENT_TX_BYTES, 1), (Event.AGENT_TX_BYTES, 2))
    ring.add((Event.AGENT_TX_BYTES, 3), (Event.AGENT_TX_BYTES, 4))
    assert [value for _, value in read(tmp_path / "ring")] == [1, 2]
    for _ in range(2):
        ring.add((Event.AGENT_RX_BYTES, 1 << 62))
    assert (
        read(tmp_path / "ring") == [(Event.AGENT_TELEMETRY_EVENTS_DROPPED, 2)] + [(Event.AGENT_RX_BYTES, 1 << 62)] * 2
    )


def test_nothing_is_written_unless_it_is_wanted(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("NIXL_TELEMETRY_DIR", str(tmp_path))
    make_agent("quiet")
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "y")
    for exporter in ("NOP", "PROMETHEUS"):
        monkeypatch.setenv("NIXL_TELEMETRY_EXPORTER", exporter)
        make_agent(exporter)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("NIXL_TELEMETRY_EXPORTER", "BUFFER")
    make_agent("told")
    assert [path.name for path in tmp_path.iterdir()] == ["told"]


@pytest.mark.parametrize(
    ("variable", "value", "kind"),
    [
        ("NIXL_TELEMETRY_DIR", "/nowhere/at/all", nixlBackendError),
        ("NIXL_TELEMETRY_BUFFER_SIZE", "0", nixlInvalidParamError),
        ("NIXL_TELEMETRY_BUFFER_SIZE", "1000", nixlInvalidParamError),
        ("NIXL_TELEMETRY_BUFFER_SIZE", "many", nixlInvalidParamError),
    ],
)
def test_what_cannot_be_is_said(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, kind: type[Exception]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(kind):
        nixl_agent("one", nixl_agent_config())


def test_a_file_that_is_not_ours_to_write(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "precious").write_text("text")
    (directory / "link").symlink_to(directory / "precious")
    for name in ("link", "../up"):
        with pytest.raises(nixlBackendError):
            nixl_agent(name, nixl_agent_config())
    assert (directory / "precious").read_text() == "text"
    monkeypatch.delenv("NIXL_TELEMETRY_DIR")
    monkeypatch.setenv("NIXL_TELEMETRY_EXPORTER", "BUFFER")
    with pytest.raises(nixlInvalidParamError, match="NIXL_TELEMETRY_DIR"):
        nixl_agent("one", nixl_agent_config())


# --- NIXL's file of settings ---


def test_the_file_of_settings(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".nixl.cfg").write_text('NIXL_TELEMETRY_ENABLE = true\nNIXL_TCPSTORE_ENDPOINT = "nonsense"\n')
    with pytest.raises(nixlInvalidParamError, match="host:port"):
        make_agent("one")
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", "127.0.0.1:1")
    array = memory(64)
    agent = make_agent("one")
    register(agent, array)
    descs = agent.get_xfer_descs([row(array)], "DRAM")
    handle = agent.initialize_xfer("READ", descs, descs, "one")
    finish(agent, handle)
    assert agent.get_xfer_telemetry(handle).totalBytes == 64
    (tmp_path / "other.cfg").write_text("NIXL_TELEMETRY_ENABLE = false\n[table]\nNIXL_TELEMETRY_DIR = '/nowhere'\n")
    monkeypatch.setenv("NIXL_CONFIG_FILE", str(tmp_path / "other.cfg"))
    agent = make_agent("two", capture_telemetry=True)
    register(agent, array)
    handle = agent.initialize_xfer("READ", descs, descs, "two")
    with pytest.raises(nixlNoTelemetryError):
        agent.get_xfer_telemetry(handle)


@pytest.mark.parametrize("text", [None, "no toml at all", "NIXL_TELEMETRY_ENABLE = 'perhaps'"])
def test_a_file_of_settings_that_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, text: str | None
) -> None:
    path = tmp_path / "nixl.cfg"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("NIXL_CONFIG_FILE", str(path))
    with pytest.raises(nixlInvalidParamError):
        nixl_agent("one", nixl_agent_config())


def test_no_file_of_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(settings, "FILE", str(tmp_path / "none"))
    environ = {"HOME": str(tmp_path)}
    assert settings.with_file(environ) is environ
    assert settings.with_file({}) == {}


# --- the log ---


@pytest.mark.parametrize(("level", "said"), [("INFO", True), ("", False)])
def test_the_port_that_was_found_is_logged_to_stderr(level: str, said: bool) -> None:
    """As by NIXL's core: its own scripts wait for the words there."""
    source = (
        "from kvxfer.connectors.nixl.api import *; from kvxfer.connectors.nixl.logging import get_logger;"
        "get_logger('app').info('of the app'); agent = nixl_agent('a', nixl_agent_config(True, True, 0));"
        "print(agent.agent.listenPort)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], env={"NIXL_LOG_LEVEL": level}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    port = done.stdout.split()[-1]
    assert (f"MD listener is listening on port {port}" in done.stderr) == said
    assert "of the app" in done.stdout
    assert "MD listener" not in done.stdout
