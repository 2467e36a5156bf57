"""The UCX library: which one is loaded, when, and what it leaves alone of the process that loads it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from kvxfer.config import AgentConfig
from kvxfer.transport import ucx
from kvxfer.types import Lane
from tests.support.native.nodes import UCX_LIBRARY, needs_ucx

pytestmark = needs_ucx


def run_alone(code: str) -> str:
    """What a process of its own prints: a library that is loaded stays."""
    done = subprocess.run(
        [sys.executable, "-c", "from kvxfer._native import _core as native\n" + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_library_there_is_a_reason(nodes: Any) -> None:
    assert nodes("none").core.ucx_obstacle
    assert "cannot" in run_alone("print(native.probe_ucx('/nowhere/libucp.so.0').obstacle)")


def test_a_library_that_is_no_ucx(nodes: Any) -> None:
    text = run_alone("import _ctypes; print(native.probe_ucx(_ctypes.__file__).obstacle)")
    assert "ucp_get_version" in text


def test_a_transport_that_is_not_there() -> None:
    text = run_alone(f"print(native.probe_ucx({UCX_LIBRARY.path!r}, tls='nothing_like_it').obstacle)")
    assert "no transport" in text
    assert "nothing_like_it" in text


OF_THE_C_LIBRARY = 1 << 31 | 1 << 32
"""Signals 32 and 33, by which threads are cancelled and change their user: CUDA's driver has threads that do."""


def test_the_process_keeps_its_signals_and_its_output() -> None:
    told = run_alone(
        f"""
        import json, signal
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        before = open("/proc/self/status").read()
        native.probe_ucx({UCX_LIBRARY.path!r}, tls="nothing_like_it")
        after = open("/proc/self/status").read()
        caught = [next(l for l in text.splitlines() if l.startswith("SigCgt")) for text in (before, after)]
        print(json.dumps(caught))
        """
    )
    before, after = (int(line.split()[1], 16) & ~OF_THE_C_LIBRARY for line in json.loads(told))  # and no other output
    assert before == after


@pytest.mark.parametrize("wish", ["", pytest.param("y", marks=pytest.mark.no_sanitizer)])
def test_the_process_keeps_its_memory_functions(monkeypatch: pytest.MonkeyPatch, wish: str) -> None:
    """UCX would patch them; an operator may have it do so, and the environment is what it was."""
    for name in ("UCX_MEM_EVENTS", "UCX_MEM_MMAP_HOOK_MODE"):
        monkeypatch.delenv(name, raising=False)
    if wish:
        monkeypatch.setenv("UCX_MEM_EVENTS", wish)
    told = run_alone(
        f"""
        import ctypes
        libc = ctypes.CDLL(None)
        def look():
            names = "mmap", "munmap", "mremap", "madvise", "brk", "shmat"
            return [ctypes.string_at(ctypes.cast(getattr(libc, name), ctypes.c_void_p).value, 16) for name in names]
        before = look()
        assert native.probe_ucx({UCX_LIBRARY.path!r}).obstacle == ""
        libc.getenv.restype = ctypes.c_char_p
        print(look() == before, libc.getenv(b"UCX_MEM_EVENTS"))
        """
    )
    assert told.split() == (["False", "b'y'"] if wish else ["True", "None"])


def test_a_forked_child_ends_nothing_of_its_parent(private_directories: pathlib.Path) -> None:
    run_alone(
        f"""
        import os, signal
        import numpy as np
        core = native.Core(
            native.AgentRef("forks", 1, bytes(16)), native.EndpointLimits(), bind_host="127.0.0.1", bind_port=0,
            unix_path="", ucx_library={UCX_LIBRARY.path!r},
        )
        core.start()
        memory = np.zeros(1 << 20, np.uint8)
        core.add_foreign_region(native.RegionInfo(1, memory.nbytes), memory.ctypes.data, memory.nbytes, memory)
        if (child := os.fork()) == 0:
            signal.alarm(20)
            core.close()
            del core
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        core.remove_region(1)
        core.close()
        """
    )


# --- finding it ---


def test_named_ucx_library_has_no_fallback(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "lib"
    directory.mkdir()
    file = directory / ucx.SONAME
    file.touch()
    for named in (file, directory, tmp_path):
        assert ucx.find_library(str(named), {}).path == str(file)
        found = ucx.find_library("/elsewhere", {ucx.LIBRARY_VARIABLE: str(named)})
        assert (found.path, found.origin) == (str(file), "environment")
    absent = ucx.find_library(str(tmp_path / "absent"), {})
    assert absent.path == ""
    assert str(tmp_path / "absent") in ucx.missing(absent)


def test_the_systems_goes_before_the_wheels(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / ucx.SONAME
    cache = tmp_path / "ld.so.cache"
    cache.write_bytes(b"glibc-ld.so.cache1.1\0libucp.so.0\0" + os.fsencode(file) + b"\0/lib/libucp.so.01\0")
    monkeypatch.setattr(ucx, "LOADER_CACHE", cache)
    monkeypatch.setattr(ucx, "SYSTEM_DIRECTORIES", ())
    monkeypatch.setattr(ucx, "NVIDIA_DRIVER", tmp_path / "no driver")
    monkeypatch.setattr(ucx, "INFINIBAND", tmp_path / "no devices")
    assert ucx.find_library("", {}).origin in ("wheel", "")
    file.touch()
    assert ucx.find_library("", {}) == ucx.UcxLibrary(str(file), "system", (str(file),))
    other = tmp_path / "other"
    other.mkdir()
    (other / ucx.SONAME).touch()
    assert ucx.find_library("", {"LD_LIBRARY_PATH": f":{other}"}).path == str(other / ucx.SONAME)


def test_one_that_can_use_this_hosts_hardware_goes_before_one_that_cannot(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's is built without CUDA, and is there wherever MPI is; the wheel beside it has CUDA and no RDMA."""
    debians, wheel, devices = tmp_path / "debian", tmp_path / "wheel", tmp_path / "infiniband"
    for directory, module in ((debians, "libuct_ib.so.0"), (wheel, "libuct_cuda.so.0")):
        (directory / "ucx").mkdir(parents=True)
        (directory / ucx.SONAME).touch()
        (directory / "ucx" / module).touch()
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(ucx, "LOADER_CACHE", tmp_path / "none")
    monkeypatch.setattr(ucx, "SYSTEM_DIRECTORIES", ())
    monkeypatch.setattr(ucx, "NVIDIA_DRIVER", driver)
    monkeypatch.setattr(ucx, "INFINIBAND", devices)
    monkeypatch.setattr(ucx, "_wheel_path", lambda: wheel / ucx.SONAME)
    system = {"LD_LIBRARY_PATH": str(debians)}

    def chosen() -> str:
        return pathlib.Path(ucx.find_library("", system).path).parent.name

    assert chosen() == "debian"
    driver.touch()
    assert chosen() == "wheel"
    (devices / "mlx5_0").mkdir(parents=True)
    assert chosen() == "debian"  # each can use one kind
    driver.unlink()
    assert chosen() == "debian"
    assert ucx.find_library(str(debians), {}).origin == "configuration"


def test_it_is_loaded_only_where_it_is_allowed_and_asked_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / ucx.SONAME
    file.touch()
    monkeypatch.setattr(ucx, "LOADER_CACHE", tmp_path / "none")
    monkeypatch.setattr(ucx, "NVIDIA_DRIVER", tmp_path / "no driver")
    system = {"LD_LIBRARY_PATH": str(tmp_path)}
    every = AgentConfig().lanes
    found, none = (str(file), ""), ("", "")
    assert (
        ucx.core_options(AgentConfig(), every, system) == none
    )  # it has neither RDMA nor a GPU, and it was not asked for
    assert ucx.core_options(AgentConfig(ucx_tls="tcp"), every, system | {"KVXFER_LANES": "stream"}) == none
    assert ucx.core_options(AgentConfig(), every, system | {"KVXFER_LANES": "ucx,stream"}) == found
    assert ucx.core_options(AgentConfig(lanes=(Lane.UCX,)), every, system) == found
    assert ucx.core_options(AgentConfig(ucx_library=str(file)), every, {}) == found
    assert ucx.core_options(AgentConfig(), every, {ucx.LIBRARY_VARIABLE: str(file), ucx.TLS_VARIABLE: "rc"}) == (
        str(file),
        "rc",
    )
    assert ucx.core_options(AgentConfig(ucx_library=str(file)), [Lane.STREAM, Lane.CMA], {}) == none
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx" / "libuct_ib.so.0").touch()
    assert ucx.core_options(AgentConfig(), every, system) == found


def test_the_report_says_what_is_missing() -> None:
    report = ucx.inspect(AgentConfig(ucx_library=UCX_LIBRARY.path), {})
    assert report.obstacle == ""
    assert report.version.startswith("1.")
    assert "tcp" not in report.transports
    assert report.version in str(report)
    assert UCX_LIBRARY.path in str(report)
    assert "was not found" in str(ucx.inspect(AgentConfig(ucx_library="/nowhere"), {}))
