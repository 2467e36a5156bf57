"""Where an agent listens: port, socket file, and what of it is left behind."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer._native import _core
from kvxfer.config import AgentConfig
from kvxfer.errors import ConfigError, LaneUnavailableError, LimitExceededError
from kvxfer.transport import native
from kvxfer.transport.base import allocate_region, limits_from
from kvxfer.transport.native import NativeBinding, host_id
from kvxfer.transport.socket_place import OwnDirectory
from kvxfer.types import AgentRef, EncryptMode, Incarnation, Lane

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


def test_the_core_has_as_many_threads_to_copy_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(*_: object, copy_threads: int, **__: object) -> None:
        asked.append(copy_threads)
        raise ConfigError("no core")

    monkeypatch.setattr(native._core, "Core", refuse)
    binding = NativeBinding(AgentConfig(copy_threads=3))
    with pytest.raises(ConfigError, match="no core"):
        binding.open(REF, AgentConfig(copy_threads=3))
    binding.close()
    assert asked == [3]
    for wrong in (-1, 65):
        with pytest.raises(ConfigError, match="copy_threads must be 1 to 64"):
            AgentConfig(copy_threads=wrong)


def test_how_many_refusals_a_session_survives_is_configured() -> None:
    assert limits_from(AgentConfig(), ()).refusals_max == native._core.EndpointLimits().refusals_max == 64
    assert limits_from(AgentConfig(refusals_max=1), ()).refusals_max == 1
    for wrong in (-1, 0, (1 << 24) + 1):
        with pytest.raises(ConfigError, match="refusals_max must be 1 to 16777216, not"):
            AgentConfig(refusals_max=wrong)


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


HOLDING = """
import sys
from kvxfer.config import AgentConfig
from kvxfer.transport.native import NativeBinding
from kvxfer.types import AgentRef, Incarnation, Lane

binding = NativeBinding(AgentConfig())
if "open" in sys.argv:
    transport = binding.open(AgentRef("a", Incarnation(1, bytes(16))), AgentConfig())
print(binding.address.unix_path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, private_directories: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty directory for temporary files, and no other place for sockets."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with tempfile.TemporaryDirectory(dir=private_directories) as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield pathlib.Path(directory)


def test_a_directory_of_a_killed_process_is_removed_by_the_next_start(temporary: pathlib.Path) -> None:
    others = temporary / "kvxfer-socket-link", temporary / "kvxfer-else"
    (temporary / "elsewhere").mkdir()
    others[0].symlink_to(temporary / "elsewhere")
    others[1].mkdir()
    processes, paths = [], []
    for words in (["open"], ["open"], []):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDING, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        paths.append(pathlib.Path(process.stdout.readline().strip()))
    killed, running, starting = paths
    processes[0].kill()
    processes[0].wait()
    assert killed.is_socket()
    binding = NativeBinding(AgentConfig())
    assert not killed.parent.exists()
    assert running.is_socket()
    assert starting.parent.is_dir()
    binding.close()
    for process in processes:
        process.kill()
        process.communicate()
    NativeBinding(AgentConfig()).close()
    assert set(temporary.iterdir()) == {*others, temporary / "elsewhere"}


def test_many_that_start_at_once_leave_each_other_alone(temporary: pathlib.Path) -> None:
    def start_often() -> None:
        for _ in range(150):
            own = OwnDirectory(str(temporary))
            (own.path / "a.sock").touch()
            (own.path / "a.sock").unlink()
            own.remove()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(start_often) for _ in range(6)]:
            done.result()
    assert list(temporary.iterdir()) == []


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
        (AgentConfig(bind_host="::", encrypt=EncryptMode.NEVER), "not loopback"),
        (AgentConfig(bind_host="::"), "advertise_host"),
    ):
        with pytest.raises(ConfigError, match=why):
            NativeBinding(config)


def no_temporary_directory() -> str:
    raise FileNotFoundError(2, "No usable temporary directory found in [...]")


def test_without_a_place_for_its_socket_a_binding_goes_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "gettempdir", no_temporary_directory)
    binding = NativeBinding(AgentConfig(lanes=(Lane.MAPPED, Lane.STREAM)))
    assert binding.address.unix_path == ""
    assert caplog.messages[-1].endswith("; set XDG_RUNTIME_DIR or TMPDIR: without it there are no lanes mapped")
    binding.close()
    with pytest.raises(ConfigError, match=r"^there is no place for a Unix socket: .*; set XDG_RUNTIME_DIR or TMPDIR$"):
        NativeBinding(AgentConfig(lanes=(Lane.MAPPED, Lane.UNIX)))


def test_a_temporary_directory_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=rf"{tmp_path}/gone/.*: No such file or directory; set XDG_RUNTIME_DIR"):
        NativeBinding(AgentConfig(lanes=(Lane.UNIX,)))


def test_a_host_without_a_boot_id_is_met_over_the_network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def masked(path: pathlib.Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(pathlib.Path, "read_text", masked)
    assert host_id() == ""


def test_cma_is_not_offered_where_its_system_calls_are_forbidden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_core, "cma_missing_calls", lambda: "forbidden here")
    caplog.set_level("INFO", "kvxfer.transport")
    binding = NativeBinding(AgentConfig(lanes=(Lane.CMA, Lane.STREAM)))
    assert binding.address.lanes == (Lane.STREAM,)
    assert "lane cma is not offered: forbidden here" in caplog.messages
    binding.close()


def test_memory_is_private_where_shared_memory_is_forbidden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(length_bytes: int) -> None:
        raise LaneUnavailableError("memfd_create: Operation not permitted")

    monkeypatch.setattr(_core, "Region", forbidden)
    region = allocate_region(12345)
    assert (region.shared, region.is_allocated, region.length_bytes) == (None, True, 12345)
    assert isinstance(region.owner, np.ndarray)
    assert region.owner.shape == (12345,)
    assert not region.owner.any()
    assert "memfd_create: Operation not permitted" in caplog.messages[-1]
    for length in (1 << 62, 1 << 80):
        with pytest.raises(LimitExceededError, match=f"cannot map {length} bytes"):
            allocate_region(length)


def test_a_name_is_published_as_a_number() -> None:
    binding = NativeBinding(AgentConfig(bind_host="localhost"))
    assert binding.address.tcp_host in ("127.0.0.1", "::1")
    binding.close()
