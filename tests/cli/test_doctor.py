"""``kvxfer doctor --pid``: whether that process can be read from here, and what is said where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer import cli
from kvxfer._native import _core as native
from kvxfer.cli import doctor

needs_cma = pytest.mark.skipif(native.cma_obstacle() != "", reason=f"here: {native.cma_obstacle()}")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user or give capabilities up")

WITHOUT_CAPABILITIES = textwrap.dedent(
    """
    import ctypes, sys
    from kvxfer import cli

    none = (ctypes.c_uint32 * 6)()
    version = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert ctypes.CDLL(None).capset(version, none) == 0
    sys.exit(cli.main(["doctor", "--json", "--pid", sys.argv[1]]))
    """
)


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate()


@pytest.fixture
def child_of_another_user() -> Iterator[int]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=65534, group=65534, extra_groups=[]) as process:
        yield process.pid
        process.communicate()


def said(report: str) -> dict[str, Any]:
    """The one finding of the report about a process."""
    (finding,) = (f for f in json.loads(report)["findings"] if f["section"] == "process")
    return dict(finding)


def run_without_capabilities(pid: int) -> tuple[int, dict[str, Any]]:
    """How the command ended, and what it said of that process."""
    command = [sys.executable, "-c", WITHOUT_CAPABILITIES, str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, said(done.stdout)


@needs_cma
def test_a_process_that_can_be_read(child: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", f"--pid={child}"]) == 0
    finding = said(capsys.readouterr().out)
    assert (finding["name"], finding["is_ok"]) == (f"cma from {child}", True)
    assert finding["detail"] == "this process can read its memory"
    assert cli.main(["doctor", f"--pid={child}"]) == 0
    assert f"process\n  cma from {child}  yes  this process can read its memory\n" in capsys.readouterr().out


@needs_root
def test_a_process_of_another_user(child_of_another_user: int) -> None:
    """Without CAP_SYS_PTRACE the kernel refuses it, and the core knows why."""
    code, finding = run_without_capabilities(child_of_another_user)
    assert (code, finding["is_ok"]) == (1, False)
    assert finding["detail"].startswith("ptrace is not allowed: the source is another user's process (run both as one ")


@needs_root
@needs_cma
def test_without_capabilities_a_process_alike_can_be_read() -> None:
    drops = WITHOUT_CAPABILITIES.replace("sys.exit", "print(flush=True); sys.stdin.read(); 0 and ")
    with subprocess.Popen([sys.executable, "-c", drops], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        assert run_without_capabilities(process.pid)[1]["is_ok"]
        process.communicate()


@needs_root
@needs_cma
def test_doctor_with_another_users_pid_names_the_users(
    child_of_another_user: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--json", f"--pid={child_of_another_user}"]) == 1
    finding = said(capsys.readouterr().out)
    assert finding["is_ok"] is False
    assert finding["detail"] == "it is user 65534's, and cma joins agents of one user: this is 0's process"


def test_doctor_with_a_refused_pid_prints_the_cores_reason(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cma_obstacle", lambda pid=0: f"ptrace\nis not allowed of {pid}" if pid else "")
    finding = doctor.process(child)
    assert (finding.is_ok, finding.detail) == (False, f"ptrace is not allowed of {child}")


def test_a_process_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert cli.main(["doctor", f"--pid={process.pid}"]) == 2
        sentence = f"kvxfer: process {process.pid} has ended, and its parent has not noticed yet\n"
        assert capsys.readouterr() == ("", sentence)
    assert cli.main(["doctor", f"--pid={process.pid}"]) == 2
    assert capsys.readouterr() == ("", f"kvxfer: there is no process {process.pid}\n")


@pytest.mark.parametrize("pid", ["0", "-1", str((1 << 22) + 1), "9" * 30])
def test_doctor_with_an_impossible_pid_is_refused(pid: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", f"--pid={pid}"]) == 2
    assert capsys.readouterr() == ("", f"kvxfer: pid must be above 0 and at most 4194304, not {pid}\n")


def test_doctor_with_a_pid_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "--pid=me"])
    assert caught.value.code == 2
    assert "argument --pid: invalid int value: 'me'" in capsys.readouterr().err
