"""What an agent writes for NIXL's telemetry readers, NIXL's file of settings, and where the log goes."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import pathlib
import struct
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.nixl import nixl_agent, nixl_agent_config, settings
from kvxfer.connectors.nixl.bindings import (
    nixlBackendError,
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotFoundError,
)
from kvxfer.connectors.nixl.requests import RemoteRequest
from kvxfer.connectors.nixl.telemetry import Ring, TelemetryEvent
from kvxfer.errors import ConfigError
from tests.support.nixl.agents import MakeAgent, finish, memory, register, row

ALL = frozenset(TelemetryEvent)


def read(path: pathlib.Path) -> list[tuple[TelemetryEvent, int]]:
    """All that a reader finds in the file, as NIXL's ``telemetry_reader.py`` looks for it."""
    data = path.read_bytes()
    writer, reader, version, expected, capacity, mask = struct.unpack_from("=QQiiQQ", data)
    assert (version, expected, mask, len(data)) == (4, 4, capacity - 1, 40 + 16 * capacity)
    events = []
    while reader != writer:
        kind, value = struct.unpack_from("=I4xQ", data, 40 + 16 * reader)
        events.append((TelemetryEvent(kind), value))
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
        one.initialize_xfer("READ", local, remote, "absent")
    one.deregister_memory(descs)


def test_events(directory: pathlib.Path, make_agent: MakeAgent) -> None:
    work(make_agent("one"), make_agent("other"))
    found = collections.Counter(kind for kind, _ in read(directory / "one"))
    assert found == {
        TelemetryEvent.AGENT_MEMORY_REGISTERED: 1,
        TelemetryEvent.AGENT_MEMORY_DEREGISTERED: 1,
        TelemetryEvent.AGENT_XFER_TIME: 3,
        TelemetryEvent.AGENT_XFER_POST_TIME: 3,
        TelemetryEvent.AGENT_RX_BYTES: 1,
        TelemetryEvent.AGENT_TX_BYTES: 2,
        TelemetryEvent.AGENT_RX_REQUESTS_NUM: 1,
        TelemetryEvent.AGENT_TX_REQUESTS_NUM: 2,
        TelemetryEvent.AGENT_ERR_NOT_FOUND: 1,
    }
    assert read(directory / "other") == [(TelemetryEvent.AGENT_MEMORY_REGISTERED, 4096)]
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
        (TelemetryEvent.AGENT_TX_BYTES, 4096), (TelemetryEvent.AGENT_TX_BYTES, 4096),
        (TelemetryEvent.AGENT_RX_BYTES, 4096), (TelemetryEvent.AGENT_ERR_NOT_FOUND, 1),
    ]  # fmt: skip


def test_a_full_ring_counts_what_it_drops(tmp_path: pathlib.Path) -> None:
    ring = Ring(tmp_path / "ring", 8, ALL)
    ring.add(*((TelemetryEvent.AGENT_TX_BYTES, value) for value in range(6)))
    ring.add((TelemetryEvent.AGENT_TX_BYTES, 6), (TelemetryEvent.AGENT_TX_BYTES, 7))
    assert [value for _, value in read(tmp_path / "ring")] == [0, 1, 2, 3, 4, 5]
    for _ in range(2):
        ring.add((TelemetryEvent.AGENT_RX_BYTES, 1 << 62))
    assert (
        read(tmp_path / "ring")
        == [(TelemetryEvent.AGENT_TELEMETRY_EVENTS_DROPPED, 2)] + [(TelemetryEvent.AGENT_RX_BYTES, 1 << 62)] * 2
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
        ("NIXL_TELEMETRY_BUFFER_SIZE", "4", nixlInvalidParamError),
        ("NIXL_TELEMETRY_BUFFER_SIZE", "1000", nixlInvalidParamError),
        ("NIXL_TELEMETRY_BUFFER_SIZE", "many", nixlInvalidParamError),
    ],
)
def test_wrong_telemetry_settings_are_named(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, kind: type[Exception]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(kind):
        nixl_agent("one", nixl_agent_config())


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_file_that_is_not_ours_to_write(directory: pathlib.Path, make_agent: MakeAgent, link: Any) -> None:
    (directory / "precious").write_text("text")
    link(directory / "precious", directory / "one")
    register(make_agent("one"), memory(64))
    assert (directory / "precious").read_text() == "text"
    assert (directory / "precious").stat().st_nlink == 1
    assert read(directory / "one") == [(TelemetryEvent.AGENT_MEMORY_REGISTERED, 64)]


def test_a_place_that_no_file_can_have(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "taken").mkdir()
    for name in ("taken", "../up", ".", "n" * 300):
        with pytest.raises(nixlBackendError, match="no telemetry"):
            nixl_agent(name, nixl_agent_config())
    assert [path.name for path in directory.iterdir()] == ["taken"]
    monkeypatch.delenv("NIXL_TELEMETRY_DIR")
    monkeypatch.setenv("NIXL_TELEMETRY_EXPORTER", "BUFFER")
    with pytest.raises(nixlInvalidParamError, match="NIXL_TELEMETRY_DIR"):
        nixl_agent("one", nixl_agent_config())


def test_a_full_filesystem(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said when the agent is made: a page that is missing later would end the process."""

    def full(file: int, begin: int, size: int) -> None:
        assert (begin, size) == (0, 40 + 16 * 4096)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(nixlBackendError, match="No space left"):
        nixl_agent("one", nixl_agent_config())
    assert not list(directory.iterdir())


@pytest.mark.parametrize("capacity", [8, 4096])
def test_two_of_one_name(tmp_path: pathlib.Path, capacity: int) -> None:
    """The later one has the name; the earlier one's file keeps its size, for a shorter one would end the process."""
    path = tmp_path / "one"
    earlier = Ring(path, 4096, ALL)
    with path.open("rb") as file:
        later = Ring(path, capacity, ALL)
        assert os.fstat(file.fileno()).st_size == 40 + 16 * 4096
        for value in range(4000):
            earlier.add((TelemetryEvent.AGENT_TX_BYTES, value))
        later.add((TelemetryEvent.AGENT_RX_BYTES, 7))
        assert struct.unpack("=Q", file.read(8)) == (4000,)
    assert read(path) == [(TelemetryEvent.AGENT_RX_BYTES, 7)]
    assert [each.name for each in tmp_path.iterdir()] == ["one"]


def test_an_agent_that_cannot_be_made_takes_no_name(directory: pathlib.Path, make_agent: MakeAgent) -> None:
    one = make_agent("one", enable_listen_thread=True, listen_port=0)
    with pytest.raises(nixlBackendError, match="cannot listen"):
        make_agent("one", enable_listen_thread=True, listen_port=one.agent.listenPort)
    register(one, memory(64))
    assert read(directory / "one") == [(TelemetryEvent.AGENT_MEMORY_REGISTERED, 64)]


def test_a_fork_writes_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(tmp_path / "ring", 8, ALL)
    ours = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: ours + 1)
    ring.add((TelemetryEvent.AGENT_TX_BYTES, 1))
    monkeypatch.undo()
    ring.add((TelemetryEvent.AGENT_TX_BYTES, 2))
    assert read(tmp_path / "ring") == [(TelemetryEvent.AGENT_TX_BYTES, 2)]


def test_a_closed_agent_lets_its_file_go(directory: pathlib.Path, make_agent: MakeAgent) -> None:
    def held() -> bool:
        links = [os.path.realpath(link) for link in pathlib.Path("/proc/self/fd").iterdir()]
        return str(directory / "one") in links or str(directory / "one") in pathlib.Path("/proc/self/maps").read_text()

    agent = make_agent("one")
    register(agent, memory(64))
    assert held()
    agent.close()
    assert not held()
    with pytest.raises(nixlBackendError):
        agent.initialize_xfer("READ", *[agent.get_xfer_descs([(4096, 64, 0)], "DRAM")] * 2, "other")
    agent.agent._events.add((TelemetryEvent.AGENT_TX_BYTES, 1))
    assert read(directory / "one") == [(TelemetryEvent.AGENT_MEMORY_REGISTERED, 64)]


def test_two_threads_that_see_one_end_count_it_once() -> None:
    """Each thread that looks whether the end was seen waits there for the other, where it can."""
    both = threading.Barrier(2)

    class Patient(RemoteRequest):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in ("_unseen", "_is_measured"):
                with contextlib.suppress(threading.BrokenBarrierError):
                    both.wait(0.5)
            return value

    seen = SimpleNamespace(lane=None, post_us=1.0, transfer_us=2.0, bytes=3, elements=4)
    post = SimpleNamespace(is_final=True, error=None, statistics=lambda: seen, poll=lambda: post)
    poster = SimpleNamespace(start=lambda plan, notification: post)
    ends: list[Any] = []
    stubs: list[Any] = [SimpleNamespace(link=SimpleNamespace(poster=poster)), SimpleNamespace(is_gone=False), None]
    request = Patient(*stubs, b"", 1, ends.append)
    for count in (1, 2):
        request.post(b"")
        threads = [threading.Thread(target=request.status) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(ends) == count


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


@pytest.mark.parametrize(
    "text",
    [
        None,
        "no toml at all",
        "NIXL_TELEMETRY_ENABLE = 'perhaps'",
        pytest.param("NIXL_X = " + "[" * 100_000, id="deep"),
    ],
)
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
    (tmp_path / ".nixl.cfg").write_text("NIXL_LOG_LEVEL = 'INFO'")
    monkeypatch.chdir(tmp_path)
    assert settings.with_file({"HOME": ""}) == {"HOME": ""}


def test_empty_variable_counts_as_unset(tmp_path: pathlib.Path) -> None:
    (tmp_path / ".nixl.cfg").write_text("NIXL_TELEMETRY_BUFFER_SIZE = 64\nNIXL_ETCD_NAMESPACE = ''\n")
    environ = {"HOME": str(tmp_path), "NIXL_CONFIG_FILE": "", "NIXL_TELEMETRY_BUFFER_SIZE": ""}
    found = settings.Settings.from_environment(settings.with_file(environ))
    assert (found.telemetry_events, found.etcd_namespace) == (64, "/nixl/agents/")


def test_homes_that_are_none(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="too long"):
        settings.with_file({"HOME": str(tmp_path / ("n" * 300))})

    def refused(path: pathlib.Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(pathlib.Path, "exists", refused)  # the user that runs the tests may be allowed everything
    with pytest.raises(ConfigError, match="Permission denied"):
        settings.with_file({"HOME": str(tmp_path)})


@pytest.mark.parametrize("value", ["['a']", "{a = 1}", "1.5", "2026-01-01", '"a\\u0000b"', "0x1" + "0" * 5000])
def test_values_that_no_variable_has(tmp_path: pathlib.Path, value: str) -> None:
    (tmp_path / "nixl.cfg").write_text(f"OTHER = {value}\n")
    environ = {"NIXL_CONFIG_FILE": str(tmp_path / "nixl.cfg")}
    assert settings.with_file(environ) == environ
    (tmp_path / "nixl.cfg").write_text(f"NIXL_TELEMETRY_DIR = {value}\n")
    with pytest.raises(ConfigError, match="NIXL_TELEMETRY_DIR"):
        settings.with_file(environ)


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


@pytest.mark.parametrize(
    ("text", "environ", "level"),
    [
        ("NIXL_LOG_LEVEL = 'ERROR'", {}, "ERROR"),
        ("NIXL_LOG_LEVEL = 'ERROR'", {"NIXL_LOG_LEVEL": ""}, "ERROR"),
        ("NIXL_LOG_LEVEL = 'ERROR'", {"NIXL_LOG_LEVEL": "warn"}, "WARNING"),
        ("no toml at all", {"NIXL_LOG_LEVEL": "WARN"}, "WARNING"),
        ("no toml at all", {}, "INFO"),
    ],
)
def test_the_level_that_the_file_of_settings_says(
    tmp_path: pathlib.Path, text: str, environ: dict[str, str], level: str
) -> None:
    """A file that is none is no reason that the package cannot be imported: making an agent says so."""
    (tmp_path / ".nixl.cfg").write_text(text)
    source = (
        "import logging, kvxfer.connectors.nixl as nixl\n"
        "print(logging.getLevelName(logging.getLogger('nixl').level))\n"
        "try: nixl.nixl_agent('a')\n"
        "except ValueError as error: print(type(error).__name__)"
    )
    environ = {"HOME": str(tmp_path), **environ}
    done = subprocess.run([sys.executable, "-c", source], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [level] + ["nixlInvalidParamError"] * (text == "no toml at all")
