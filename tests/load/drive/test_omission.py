"""Coordinated omission: a stall of the server or of the driver is in the latency of each request that was due in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kvxfer.load.record import MeasuredRequest
from tests.support.child import command, environment

pytestmark = pytest.mark.deep
REQUESTS, GAP_S, STALL_S = 500, 0.01, 1.0


def stalled(which: str) -> list[MeasuredRequest]:
    """The records of a run in which the server, or the sending process, stood still for STALL_S."""
    engine = subprocess.Popen(
        [sys.executable, "-m", "kvxfer.cli", "mock-engine", "--ttft-ms=5", "--itl-ms=1", "--log-level=warning"],
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert engine.stdout is not None
    try:
        url = json.loads(engine.stdout.readline())["engines"][0]["http_url"]
        words = command("load_child", url, str(REQUESTS), str(GAP_S))
        driver = subprocess.Popen(words, bufsize=0, stdout=subprocess.PIPE, env=environment())
        assert driver.stdout is not None
        (sender,) = json.loads(driver.stdout.readline())["began"]
        pid = engine.pid if which == "server" else sender
        time.sleep(1.5)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STALL_S)
        os.kill(pid, signal.SIGCONT)
        out, _ = driver.communicate(timeout=60)
    finally:
        engine.kill()
        engine.communicate()
    return [MeasuredRequest.from_json(line) for line in out.decode().splitlines()[:-1]]


@pytest.mark.parametrize("which", ["server", "driver"])
def test_a_stall_is_seen_by_all_that_were_due_in_it(which: str) -> None:
    records = stalled(which)
    assert len(records) == REQUESTS
    assert all(record.is_good for record in records)
    waits = np.array([record.ttft_s for record in records])
    assert np.percentile(waits, 99) >= 0.9
    # The stall ends when the first of the late ones is answered: all that were due before are answered then.
    late = [record for record in records if record.ttft_s > 0.2]
    assert 70 <= len(late) <= 100
    ends = np.array([record.due_s + record.ttft_s for record in late])
    end_s = float(np.median(ends))
    assert max(abs(record.ttft_s - (end_s - record.due_s)) for record in late) <= 0.15
    lateness = np.array([record.lateness_s or 0.0 for record in records])
    assert (np.percentile(lateness, 99) >= 0.9) == (which == "driver")
