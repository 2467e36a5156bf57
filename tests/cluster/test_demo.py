"""`make demo-cluster` as a process: none failed, Ctrl-C ends all of it, and without etcd a sentence says so."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.support import child
from tests.support.etcd import needs_etcd

WHOLE_RUN_S = 900.0
START_S = 300.0
END_S = 60.0


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tests.cluster.demo", *words]


def environment(folder: pathlib.Path, **more: str) -> dict[str, str]:
    """Its working directory is made in ``folder``, so that its processes can be told from all others."""
    return child.environment(TMPDIR=str(folder), **more)


def left(folder: pathlib.Path) -> list[str]:
    """The processes that were given a file in ``folder``."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words:
            found.append(words)
    return found


@needs_etcd
@pytest.mark.nightly
@pytest.mark.timeout(WHOLE_RUN_S + END_S)
def test_none_failed(tmp_path: pathlib.Path) -> None:
    ended = subprocess.run(
        command("--down-s=1", "--lines=2", "--verbose"),
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=WHOLE_RUN_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-20_000:]
    assert ended.stdout.splitlines()[-1] == "none failed"
    assert left(tmp_path) == []
    assert list(tmp_path.glob("kvxfer-*")) == []


@needs_etcd
@pytest.mark.nightly
@pytest.mark.timeout(START_S + 2 * END_S)
def test_ctrl_c_ends_all_of_it(tmp_path: pathlib.Path) -> None:
    process = subprocess.Popen(
        command("--down-s=600"), env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Requests run"):
                break
        assert len(left(tmp_path)) >= 12
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=END_S)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, said.splitlines()[-1:]) == (
        130,
        ["demo-cluster: interrupted; all processes are ended"],
    )
    assert left(tmp_path) == []


@needs_etcd
@pytest.mark.nightly
def test_nothing_outlives_it(tmp_path: pathlib.Path) -> None:
    """kill -9 of the demo, as soon as etcd's nodes and coordinators are up."""
    process = subprocess.Popen(command(), env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().startswith("c0"):
                break
    finally:
        process.kill()
        process.communicate()
    deadline_s = time.monotonic() + END_S
    while left(tmp_path):
        assert time.monotonic() < deadline_s, left(tmp_path)
        time.sleep(0.1)


@pytest.mark.deep
def test_without_etcd_a_sentence_says_so(tmp_path: pathlib.Path) -> None:
    ended = subprocess.run(
        command(), env=environment(tmp_path, PATH=os.path.dirname(sys.executable)), capture_output=True, text=True
    )
    words = "demo-cluster: the program etcd is not on PATH: sudo apt-get install -y etcd-server"
    assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (2, "", words)
