"""benchmarks/cuda.py, with the host's memory in the device's place: that it notices a wrong byte, and runs."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.checkout

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's module of pools on a device."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("peers.device")
    for name in [name for name in sys.modules if name.split(".")[0] in ("measure", "peers")]:
        del sys.modules[name]


def test_a_pool_that_missed_one_byte_is_not_right(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "STEP_BYTES", 64 << 10)  # several steps, and a last one that is shorter
    held = os.memfd_create("reference")
    os.write(held, np.random.default_rng(3).bytes(1 << 20))
    pool = device.DevicePool(1 << 20, held, "cpu")
    source, destination = (np.random.default_rng(seed).permutation(256)[:100].astype(np.uint32) for seed in (1, 2))
    pool.poison(4096, source, destination)
    assert not pool.is_right(4096, source, destination)
    for there, here in zip(source.tolist(), destination.tolist(), strict=True):
        sent = pool.reference[there * 4096 : (there + 1) * 4096]
        assert (pool.memory[here * 4096 : (here + 1) * 4096] == ~sent).all()
        pool.memory[here * 4096 : (here + 1) * 4096] = sent
    assert pool.is_right(4096, source, destination)
    pool.memory[int(destination[63]) * 4096 + 4095] ^= 1
    assert not pool.is_right(4096, source, destination)


def test_it_runs(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch", reason="it copies tensors")
    file = tmp_path / "cuda.json"
    words = ["--device=cpu", "--lanes=unix", "--sizes=16k", "--bytes=1m", "--pool=4m", "--pairs=1", "--against="]
    command = [sys.executable, str(BENCHMARKS / "cuda.py"), *words, f"--json={file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    report = json.loads(file.read_text())
    (row,) = report["rows"]
    assert (row["lane"], row["block_bytes"], row["error"], report["left_out"]) == ("unix", 16384, "", [])
    assert row["gb_s"]["median"] > 0
    assert set(report["copies_gb_s"]["unix"]) == {"D2D", "D2H", "H2D"}
    assert "| 16K |" in done.stdout
