"""How soon the processes of one router agree on the load: `kvxfer router --workers N` in front of mock engines.

Streams begin and end at one process after another. After each beginning and each end every process is asked, over a
connection of its own, what it takes to be in flight, until all say what is so. The time from the stream's first byte,
or from the client's leaving, is the lag, the asking included. Exit code 1 where one lag is over the bar.

    benchmarks/router_processes.py [--workers 4] [--changes 100] [--bar-ms 100]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

FOUND_MAX = 256


def started(*words: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """A process of kvxfer, and its ready line."""
    command = [sys.executable, "-m", "kvxfer.cli", *words, "--log-level=warning", f"--exit-with-parent={os.getpid()}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


class Ear:
    """One connection, at one process of the router."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.pid = int(self.health()["pid"])

    def health(self) -> dict[str, Any]:
        self._connection.request("GET", "/health")
        return dict(json.loads(self._connection.getresponse().read()))

    def begin(self) -> http.client.HTTPResponse:
        body = json.dumps({"model": "mock", "prompt": "x", "stream": True, "max_tokens": 100000})
        self._connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        answer.readline()
        return answer

    def close(self) -> None:
        self._connection.close()


def at_each(port: int, processes: int, count: int) -> dict[int, list[Ear]]:
    """At least ``count`` connections at each process."""
    found: dict[int, list[Ear]] = {}
    for _ in range(FOUND_MAX):
        ear = Ear(port)
        found.setdefault(ear.pid, []).append(ear)
        if len(found) == processes and min(map(len, found.values())) >= count:
            return found
    raise SystemExit(f"connections reach {len(found)} of {processes} processes")


def lag_s(ears: list[Ear], expected: int, begun_s: float) -> float:
    """Until every process says ``expected``."""
    waiting = list(ears)
    while waiting:
        waiting = [ear for ear in waiting if ear.health()["workers_inflight"] != expected]
        if time.monotonic() - begun_s > 10:
            raise SystemExit(f"the processes do not agree on {expected}")
    return time.monotonic() - begun_s


def measure(port: int, processes: int, changes: int) -> list[float]:
    lags = []
    found = at_each(port, processes, 2)
    ears = [those[0] for those in found.values()]
    pids = list(found)
    for number in range(changes // 2):
        pid = pids[number % processes]
        speaker = found[pid].pop()
        speaker.begin()
        lags.append(lag_s(ears, 1, time.monotonic()))
        speaker.close()
        lags.append(lag_s(ears, 0, time.monotonic()))
        while len(found[pid]) < 2:
            ear = Ear(port)
            found[ear.pid].append(ear)
    return lags


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--bar-ms", type=float, default=100.0)
    options = parser.parse_args()
    engines, said = started("mock-engine", "--count=1", "--roles=both", "--itl-ms=20", "--record=0")
    router, ready = started("router", f"--engine={said['engines'][0]['http_url']}", f"--workers={options.workers}")
    try:
        port = int(ready["http_url"].rpartition(":")[2])
        time.sleep(2.0)  # until the engine has said its model
        lags = sorted(measure(port, options.workers, options.changes))
    finally:
        for process in (router, engines):
            process.terminate()
            process.wait(60)
    result = {
        "workers": options.workers,
        "changes": len(lags),
        "lag_ms": {
            "median": round(1e3 * statistics.median(lags), 2),
            "p99": round(1e3 * lags[int(0.99 * (len(lags) - 1))], 2),
            "max": round(1e3 * lags[-1], 2),
        },
        "bar_ms": options.bar_ms,
    }
    print(json.dumps(result))
    return int(lags[-1] * 1e3 > options.bar_ms)


if __name__ == "__main__":
    sys.exit(main())
