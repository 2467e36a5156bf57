"""What benchmarks/soak.py breaks is broken, and afterwards whole: links, disks and clocks."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import time
from typing import Any

import pytest

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).parents[2]
SHIM = ROOT / "benchmarks" / "soaking" / "wall_clock.cpp"
TIMES = """
import threading, time
lock = threading.Lock()
lock.acquire()
began_s = time.monotonic()
lock.acquire(timeout=0.1)
print(time.time(), time.clock_gettime(time.CLOCK_REALTIME), time.monotonic(), time.monotonic() - began_s)
"""


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("soaking.box")
    for name in [name for name in sys.modules if name.split(".")[0] == "soaking"]:
        del sys.modules[name]


@pytest.mark.deep
def test_links_and_disks(box: Any) -> None:
    if why := box.obstacle():
        pytest.skip(why)
    script = ROOT / "tests" / "support" / "soaked_box.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])}
    command = [sys.executable, script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["unplugged"] == ["silent", "silent"]
    assert found["parted"][0] == "silent"
    assert found["loss"] == "silent"
    for name in ("well", "plugged", "joined", "unlimited", "unrelayed"):
        assert found[name] > 0, name
    assert found["parted"][1] > 0
    assert found["limited"] >= 2 * (200_000 - 65_536) * 8 / 2e6 / 2, "half of the way there and back at 2 Mbit/s"
    assert found["delay"] >= 2 * 2 * 0.06, "a connection and an answer"
    assert (found["full"], found["emptied"]) == ("No space left on device", 1)


def test_a_wall_clock(tmp_path: pathlib.Path) -> None:
    """It jumps, and neither another clock nor a wait does."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    library, clock = tmp_path / "wall_clock.so", tmp_path / "clock"
    words = ["g++", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o", library, SHIM, "-ldl", "-pthread"]
    subprocess.run(words, check=True)
    for shift_s in (3600, -86400):
        clock.write_bytes(struct.pack("=q", shift_s * 10**9))
        environment = {"LD_PRELOAD": str(library), "KVXFER_SOAK_CLOCK": str(clock)}
        command = [sys.executable, "-I", "-S", "-c", TIMES]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        wall, read, monotonic, waited = map(float, done.stdout.split())
        assert abs(wall - time.time() - shift_s) < 60
        assert abs(read - time.time() - shift_s) < 60
        assert abs(monotonic - time.monotonic()) < 60
        assert 0.09 < waited < 60
