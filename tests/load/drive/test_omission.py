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


def stalled(which: str) -> tuple[list[MeasuredRequest], float, float]:
    """The records of a run in which the server, or the sending process, stood still, from when on and until when."""
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
        begin_s = time.time()
        time.sleep(STALL_S)
        end_s = time.time()
        os.kill(pid, signal.SIGCONT)
        out, _ = driver.communicate(timeout=60)
    finally:
        engine.kill()
        engine.communicate()
    *lines, result = out.decode().splitlines()
    began_s = json.loads(result)["began_unix_s"]
    return [MeasuredRequest.from_json(line) for line in lines], begin_s - began_s, end_s - began_s


@pytest.mark.parametrize("which", ["server", "driver"])
def test_a_stall_is_seen_by_all_that_were_due_in_it(which: str) -> None:
    records, begin_s, end_s = stalled(which)
    assert len(records) == REQUESTS
    assert all(record.is_good for record in records)
    within = [record for record in records if begin_s + 0.02 <= record.due_s < end_s]
    assert len(within) >= (STALL_S - 0.05) / GAP_S
    noise_s = max(record.ttft_s for record in records if record.due_s < begin_s - 0.1)  # of a busy machine
    for record in within:
        assert -0.01 <= record.ttft_s - (end_s - record.due_s) <= 0.15 + noise_s
    assert np.percentile([record.ttft_s for record in records], 99) >= 0.9
    late = [record.lateness_s is not None and record.lateness_s >= end_s - record.due_s - 0.01 for record in within]
    assert all(late) if which == "driver" else sum(late) < len(late) / 2  # whose fault it was
