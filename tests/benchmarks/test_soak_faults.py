"""What benchmarks/soak.py breaks is broken, and afterwards whole: links, disks and clocks; and what whole means."""

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
import types
from typing import Any

import httpx
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


class PretendedCluster:
    """Of one part, which has ended; ``begun``: that it was started again."""

    def __init__(self, role: str, ends_at_s: list[float]) -> None:
        self.parts = {"etcd-1": types.SimpleNamespace(role=role, pid=None)}
        self.endings = [{"at_s": at_s, "part": "etcd-1", "what": "ended by itself with code 2"} for at_s in ends_at_s]
        self.endings.append({"at_s": 21.0, "part": "p1", "what": "ended by itself with code -11"})
        self.begun: list[str] = []

    async def begin(self, name: str) -> None:
        self.begun.append(name)


async def test_a_full_disk_excuses_the_ending_of_its_etcd_node_within_it_alone(box: Any) -> None:
    faults = importlib.import_module("soaking.faults").Faults
    cluster = PretendedCluster("etcd", [5.0, 21.5])
    made = faults.__new__(faults)
    made._cluster = cluster
    await made._after_full_disk("etcd-1", 20.0)
    assert [(each["part"], each["at_s"]) for each in cluster.endings] == [("etcd-1", 5.0), ("p1", 21.0)]
    assert cluster.begun == ["etcd-1"]
    other = made._cluster = PretendedCluster("prefill", [21.5])
    await made._after_full_disk("etcd-1", 20.0)
    assert (len(other.endings), other.begun) == (2, [])


class WellClient:
    """Answers as a cluster that is whole; tests change ``says``."""

    def __init__(self, cluster: Any) -> None:
        entries = [{"agent_id": name, "is_ready": True, "is_suspect": False} for name in cluster.WORKERS]
        self.says: dict[str, Any] = {
            "/v1/workers": {"data": entries},
            "/metrics": "# TYPE x gauge\nkvxfer_router_coordinator_connected 1.0\n",
            "/ready": {},
            "/health": {"health": "true"},
            "/statistics": {"agent": {"is_coordinator_connected": True}},
        }

    async def get(self, url: str) -> httpx.Response:
        said = self.says["/" + url.split("/", 3)[3]]
        return httpx.Response(200, text=said) if isinstance(said, str) else httpx.Response(200, json=said)


@pytest.mark.parametrize(
    ("path", "said", "is_whole"),
    [
        ("/ready", {}, True),
        ("/v1/workers", {"data": []}, False),
        ("/metrics", "kvxfer_router_coordinator_connected 0.0\n", False),
        ("/statistics", {"agent": {"is_coordinator_connected": False}}, False),
        ("/statistics", {"agent": None}, False),
        ("/health", {"health": "false"}, False),
    ],
)
async def test_a_cluster_is_whole_when_all_hear_each_other(box: Any, path: str, said: Any, is_whole: bool) -> None:
    module = importlib.import_module("soaking.cluster")
    cluster = module.SoakedCluster.__new__(module.SoakedCluster)
    host = types.SimpleNamespace(address="192.0.2.1")
    process = types.SimpleNamespace(pid=7, returncode=None)
    cluster.parts = {name: module.Part(name, role, host, process) for name, role in module.ROLES.items()}
    cluster._client = WellClient(module)
    cluster._client.says[path] = said
    assert await cluster._is_whole() is is_whole


async def test_a_router_without_the_metric_is_a_wrong_name(box: Any) -> None:
    metric = importlib.import_module("soaking.cluster").metric
    with pytest.raises(KeyError):
        metric("kvxfer_router_coordinator_connected_total 1.0\n", "kvxfer_router_coordinator_connected")


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
