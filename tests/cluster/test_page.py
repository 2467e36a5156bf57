"""docs/cluster.md, run with programs that only write down how they were called: it calls what the demo calls."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from collections import Counter

import pytest

from tests.support import child
from tests.support.cluster import plan

pytestmark = pytest.mark.checkout

PORTS = plan.Ports((23790, 23791, 23792), (23800, 23801, 23802), (7000, 7001, 7002), (8000, 8001))
WRITES = """#!/bin/sh
echo "${0##*/} $*" >>"$CALLS"
"""
SILENT = ("curl", "sleep", "sort")
UNREAL = """
kill() { :; }
seq() { echo 1; }
"""


def called(folder: pathlib.Path) -> Counter[tuple[str, ...]]:
    """How often each program was called with which words, sorted, if a reader does all that the page says."""
    page = (child.ROOT / "docs" / "cluster.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    programs = folder / "programs"
    programs.mkdir()
    for name in ("kvxfer", "etcd", *SILENT):
        (programs / name).write_text("#!/bin/sh\n" if name in SILENT else WRITES)
        (programs / name).chmod(0o755)
    calls = folder / "calls"
    script = "\n".join([UNREAL, *blocks, "wait"]).replace("PATH=$PWD/../../.venv/bin:$PATH", "")
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls)}
    ended = subprocess.run(["bash", "-euc", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return Counter(tuple(sorted(line.split())) for line in calls.read_text().splitlines())


def test_it_calls_what_the_demo_calls(tmp_path: pathlib.Path) -> None:
    made = plan.ClusterPlan(PORTS)
    commands = [["kvxfer", *words] for words in made.certs()]
    commands += [["etcd", *made.etcd(name)] for name in plan.ETCD]
    commands += [["kvxfer", *made.service(name)] for name in plan.SERVICES]
    found = called(tmp_path)
    assert set(found) == {tuple(sorted(words)) for words in commands}
    again = {words for words, count in found.items() if count > 1}
    killed = [["etcd", *made.etcd("n0")], *(["kvxfer", *made.service(name)] for name in ("c0", "p0", "d0", "r0"))]
    assert again == {tuple(sorted(words)) for words in killed}
