"""A service that is told to stop before it is ready ends at once, and does not say that it is ready."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch", reason="the built-in engine needs torch")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_loads_stops_at_once(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    model = tmp_path / "model"
    model.mkdir()
    os.mkfifo(model / "config.json")  # whoever opens it waits for the other end
    worker = subprocess.Popen(
        [sys.executable, "-m", "kvxfer.cli", "worker", "--port=0", f"--model={model}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    try:
        other_end = opened(model / "config.json", worker)
        worker.send_signal(number)
        out, said = worker.communicate(timeout=30)
        os.close(other_end)
    finally:
        worker.kill()
        worker.wait()
    assert (worker.returncode, out) == (0, ""), said
    assert "stopped before the model was loaded" in said


def opened(fifo: pathlib.Path, reader: subprocess.Popen[str]) -> int:
    """The end to write to, once the other one is open."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and reader.poll() is None:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            time.sleep(0.05)
    raise AssertionError(f"nobody opened {fifo}")
