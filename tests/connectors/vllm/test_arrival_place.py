"""Where an API server finds the listener for its arrivals: in no other user's hands."""

from __future__ import annotations

import logging
import os
import pathlib
import socket
import stat
from collections.abc import Iterator

import pytest

from kvxfer import places
from kvxfer.connectors.vllm.arrival_place import find_socket, make_socket
from kvxfer.connectors.vllm.arrivals import ArrivalSocket
from kvxfer.errors import ConfigError


@pytest.fixture
def heard() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        yield made


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(places, "temporary_dir", lambda: str(directory))
    return directory


def test_both_sides_come_to_one_path_in_a_private_directory(
    heard: socket.socket, own_runtime_dir: pathlib.Path
) -> None:
    assert find_socket("p") is None
    path = make_socket(heard, "p")
    assert (find_socket("p"), path.parent) == (str(path), own_runtime_dir)
    assert stat.S_IMODE(own_runtime_dir.stat().st_mode) == 0o700
    assert find_socket("q") != str(path)


def test_without_a_runtime_directory_it_is_where_temporary_files_lie(
    heard: socket.socket, temporary: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    path = make_socket(heard, "p")
    assert path.parent == temporary / f"kvxfer-{os.geteuid()}"
    assert (stat.S_IMODE(path.parent.stat().st_mode), find_socket("p")) == (0o700, str(path))


@pytest.mark.parametrize("what", ["open to others", "another user's", "a link", "a file"])
async def test_a_directory_that_may_be_anothers_is_neither_bound_nor_told(
    heard: socket.socket,
    temporary: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    caplog.set_level(logging.INFO, "kvxfer.vllm")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    user = os.geteuid() + (what == "another user's")
    directory = temporary / f"kvxfer-{user}"
    if what == "a link":
        (temporary / "target").mkdir(mode=0o700)
        directory.symlink_to(temporary / "target")
    elif what == "a file":
        directory.touch()
    else:
        directory.mkdir(mode=0o700)
        directory.chmod(0o755 if what == "open to others" else 0o700)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(ConfigError, match=r"must be ours alone.*set XDG_RUNTIME_DIR or TMPDIR"):
        make_socket(heard, "p")
    assert find_socket("p") is None
    ArrivalSocket("p", lambda *_: None).close()
    assert [record.getMessage().count("cannot be received") for record in caplog.records] == [1]


def test_a_runtime_directory_that_is_no_good_is_passed_over(
    heard: socket.socket, own_runtime_dir: pathlib.Path, temporary: pathlib.Path
) -> None:
    own_runtime_dir.mkdir()
    own_runtime_dir.chmod(0o777)
    assert str(make_socket(heard, "p")) == find_socket("p")
    assert (find_socket("p") or "").startswith(str(temporary))


def test_socket_file_of_a_killed_engine_is_replaced(heard: socket.socket, own_runtime_dir: pathlib.Path) -> None:
    for name in ("p", "q"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as killed:
            make_socket(killed, name)
    path = make_socket(heard, "p")
    assert list(own_runtime_dir.iterdir()) == [path]


def test_an_engine_that_listens_keeps_its_name(heard: socket.socket, own_runtime_dir: pathlib.Path) -> None:
    make_socket(heard, "p")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as second:
        with pytest.raises(ConfigError, match="another engine of the name 'p' listens"):
            make_socket(second, "p")
        make_socket(second, "q")
    assert len(list(own_runtime_dir.iterdir())) == 2


def test_paths_that_the_kernel_does_not_take_are_no_place(
    heard: socket.socket, monkeypatch: pytest.MonkeyPatch, temporary: pathlib.Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "x" * 107)
    assert make_socket(heard, "p").parent.parent == temporary
    monkeypatch.setattr(places, "temporary_dir", lambda: "/" + "y" * 107)
    assert find_socket("p") is None
    with pytest.raises(ConfigError, match="too long"):
        make_socket(heard, "p")


async def test_a_socket_goes_with_its_engine(own_runtime_dir: pathlib.Path) -> None:
    listening = ArrivalSocket("p", lambda *_: None)
    assert len(os.listdir(own_runtime_dir)) == 1
    listening.close()
    assert os.listdir(own_runtime_dir) == []
