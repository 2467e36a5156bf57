"""Where an agent listens: port, socket file, and what of it is left behind."""

from __future__ import annotations

import os
import pathlib
import socket
import stat

import pytest

from kvxfer.config import AgentConfig
from kvxfer.errors import ConfigError
from kvxfer.transport.native import NativeBinding, host_id
from kvxfer.types import AgentRef, Incarnation

REF = AgentRef("a", Incarnation(1, bytes(16)))


def test_the_address_holds_from_binding_to_close(tmp_path: pathlib.Path) -> None:
    config = AgentConfig(runtime_dir=str(tmp_path / "run"))
    binding = NativeBinding(config)
    address = binding.address
    assert address.tcp_host == "127.0.0.1"
    assert address.host_id == host_id()
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", address.tcp_port))
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", address.tcp_port), timeout=5):
        pass
    transport = binding.open(REF, config)
    assert transport.address == address
    with socket.create_connection(("127.0.0.1", address.tcp_port), timeout=5):
        pass
    with socket.socket(socket.AF_UNIX) as unix:
        unix.connect(address.unix_path)
    transport.close()
    transport.close()
    assert list((tmp_path / "run").iterdir()) == []


def test_nothing_is_left_where_nothing_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    binding = NativeBinding(AgentConfig())
    directory = pathlib.Path(binding.address.unix_path).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    binding.open(REF, AgentConfig()).close()
    assert not directory.exists()
    unopened = NativeBinding(AgentConfig())
    unopened.close()
    unopened.close()
    assert not pathlib.Path(unopened.address.unix_path).parent.exists()


def test_a_socket_of_a_killed_process_is_swept(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o700)
    stale, fresh, live = (tmp_path / f"{name}.sock" for name in ("stale", "fresh", "live"))
    with socket.socket(socket.AF_UNIX) as listening:
        for path in (stale, fresh):
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path))
        listening.bind(str(live))
        listening.listen()
        for path in (stale, live):
            os.utime(path, (1, 1))
        NativeBinding(AgentConfig(runtime_dir=str(tmp_path))).close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh.sock", "live.sock"]


def test_what_is_refused(tmp_path: pathlib.Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    file = tmp_path / "file"
    file.touch()
    for config, why in (
        (AgentConfig(runtime_dir=str(open_to_all)), "0700"),
        (AgentConfig(runtime_dir=str(file)), "runtime directory"),
        (AgentConfig(runtime_dir=str(tmp_path / ("x" * 100))), "too long"),
        (AgentConfig(bind_host="192.0.2.1", insecure=True), "cannot listen on 192.0.2.1"),
        (AgentConfig(bind_host="::"), "not loopback"),
    ):
        with pytest.raises(ConfigError, match=why):
            NativeBinding(config)


def test_a_name_is_published_as_a_number() -> None:
    binding = NativeBinding(AgentConfig(bind_host="localhost"))
    assert binding.address.tcp_host in ("127.0.0.1", "::1")
    binding.close()
