"""What the native load driver costs and how late it sends, against a server in C++ that does next to nothing.

Builds benchmarks/driver/echo.cpp, and sends streamed requests of 32 tokens to it, paced (10 ms between tokens) and at
once: CPU seconds of the sending process for 1,000 requests, its lateness, and sent/due in each 10 s window, for
Poisson, gamma (0.25) and a trace. ``--aiperf`` and ``--guidellm`` (paths of the commands) are run beside it on the same
server: their CPU seconds for 1,000 more requests. Exit code 1 where a bar is missed.

    benchmarks/load_driver.py [--seconds 30] [--trace FILE] [--aiperf PATH] [--guidellm PATH] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from driver import others

from kvxfer.load.drive.start import drive
from kvxfer.load.options import DriveOptions, TargetOptions
from kvxfer.load.record import MeasuredRequest
from kvxfer.workload.request import Workload, WorkloadRequest

TOKENS, PROMPT, FIRST_MS, WINDOW_S = 32, 16, 20, 10.0
PACES = {"paced": 10, "at once": 0}
"""Milliseconds between tokens."""
PER_CORE_S, LATE_S, LATE_SHARE, RATE_SHARE = 1000.0, 0.002, 0.02, 0.005
"""The bars: requests/s a core; lateness p99, in seconds or as a share of the median TTFT; sent/due."""


@dataclasses.dataclass(frozen=True)
class EchoBody:
    """The same prompt each time: what bodies cost is not measured here."""

    def __call__(self, request: WorkloadRequest) -> bytes:
        body = {"model": "echo", "prompt": list(range(PROMPT)), "max_tokens": TOKENS, "stream": True}
        return json.dumps(body | {"stream_options": {"include_usage": True}}).encode()


@contextlib.contextmanager
def echo(gap_ms: float) -> Iterator[str]:
    """The server's URL."""
    source = pathlib.Path(__file__).parent / "driver" / "echo.cpp"
    with tempfile.TemporaryDirectory() as folder:
        built = pathlib.Path(folder) / "echo"
        subprocess.run(["g++", "-O2", "-std=c++17", "-o", built, source], check=True)
        words = [built, "--tokens", str(TOKENS), "--first-ms", str(FIRST_MS), "--gap-ms", str(gap_ms)]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            try:
                yield f"http://127.0.0.1:{int(server.stdout.readline())}"
            finally:
                server.kill()


def due_times(arrival: str, rate: float, seconds: float, trace: str) -> np.ndarray:
    count = int(rate * seconds * 1.2) + 100
    rng = np.random.default_rng(28)
    if arrival == "trace":
        lines = pathlib.Path(trace).read_text().splitlines()
        stamps = np.sort([json.loads(line)["timestamp"] / 1e3 for line in lines])
        due_s = (stamps - stamps[0]) / (rate / (len(stamps) / (stamps[-1] - stamps[0])))
        due_s = np.concatenate([due_s + turn * due_s[-1] for turn in range(int(seconds / due_s[-1]) + 1)])
    elif arrival == "gamma":
        due_s = np.cumsum(rng.gamma(0.25, 1 / (0.25 * rate), count))
    else:
        due_s = np.cumsum(rng.exponential(1 / rate, count))
    return np.asarray(due_s[due_s < seconds])


def measure(url: str, due_s: np.ndarray, processes: int) -> dict[str, Any]:
    workload = Workload("echo", [WorkloadRequest(number, PROMPT, TOKENS, float(s)) for number, s in enumerate(due_s)])
    records: list[MeasuredRequest] = []
    options = DriveOptions(processes=processes, drain_s=30)
    result = drive(workload, EchoBody(), TargetOptions(url=url), options, run="echo", on_record=records.append)
    failed = [record for record in records if record.error]
    sent_s = np.array([record.sent_s for record in records if record.sent_s is not None])
    lateness = np.array([record.lateness_s for record in records if record.sent_s is not None])
    ttft_s = float(np.median([record.ttft_s for record in records]))
    windows = np.arange(0, due_s[-1] - WINDOW_S + 0.5, WINDOW_S)
    shares = [
        float(
            ((sent_s >= begin) & (sent_s < begin + WINDOW_S)).sum()
            / ((due_s >= begin) & (due_s < begin + WINDOW_S)).sum()
        )
        for begin in windows
    ]
    cpu_s = result.cpu_s / len(records)
    return {
        "requests": len(records),
        "failed": len(failed),
        "rate": len(records) / float(due_s[-1]),
        "cpu_s_per_1000": cpu_s * 1000,
        "per_core_s": 1 / cpu_s,
        "late_p50_ms": float(np.percentile(lateness, 50)) * 1e3,
        "late_p99_ms": float(np.percentile(lateness, 99)) * 1e3,
        "late_max_ms": float(lateness.max()) * 1e3,
        "ttft_p50_ms": ttft_s * 1e3,
        "sent_due": shares,
        "wakeups_late": sum(use.wakeups_late for use in result.processes),
    }


def misses(row: dict[str, Any]) -> list[str]:
    """Of the bars."""
    found = ["failed"] if row["failed"] else []
    if row["per_core_s"] < PER_CORE_S:
        found.append("requests/s a core")
    if row["late_p99_ms"] > max(LATE_S * 1e3, LATE_SHARE * row["ttft_p50_ms"]):
        found.append("lateness")
    if any(abs(share - 1) > RATE_SHARE for share in row["sent_due"]):
        found.append("sent/due")
    return found


def shown(name: str, row: dict[str, Any]) -> str:
    shares = ", ".join(f"{share:.4f}" for share in row["sent_due"])
    return (
        f"| {name} | {row['rate']:.0f} | {row['cpu_s_per_1000']:.3f} | {row['per_core_s']:.0f}"
        f" | {row['late_p50_ms']:.2f} | {row['late_p99_ms']:.2f} | {row['late_max_ms']:.1f} | {shares}"
        f" | {', '.join(row['misses']) or '-'} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run (default: 30)")
    parser.add_argument("--rate", type=float, default=500.0, help="requests/s (default: 500, half of the bar)")
    parser.add_argument("--trace", default="", help="Mooncake JSONL whose arrivals are sent, so fast that it fits")
    parser.add_argument("--aiperf", default="", help="its command")
    parser.add_argument("--guidellm", default="", help="its command")
    parser.add_argument("--others-rate", type=float, default=50.0, help="that aiperf and guidellm are asked for")
    parser.add_argument("--json", default="", help="where the figures go too")
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    print("| run | req/s | CPU s/1,000 | req/s a core | late p50 ms | p99 | max | sent/due each 10 s | missed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for pace, gap_ms in PACES.items():
        with echo(gap_ms) as url:
            for arrival in ("poisson", "gamma", "trace") if given.trace else ("poisson", "gamma"):
                row = measure(url, due_times(arrival, given.rate, given.seconds, given.trace), 1)
                row["misses"] = misses(row)
                rows[f"{pace}, {arrival}"] = row
                print(shown(f"{pace}, {arrival}", row), flush=True)
            rate = rows[f"{pace}, poisson"]["per_core_s"] / 2
            row = measure(url, due_times("poisson", rate, given.seconds, given.trace), 1)
            row["misses"] = []
            rows[f"{pace}, poisson at half of what a core could send"] = row
            print(shown(f"{pace}, poisson at half of what a core could send", row), flush=True)
    tools = {}
    for name in ("aiperf", "guidellm"):
        if path := getattr(given, name):
            with echo(PACES["paced"]) as url:
                tools[name] = others.cost(name, path, url, given.others_rate)
                print(f"{name}, paced, {given.others_rate:g} req/s: {others.shown(tools[name])}", flush=True)
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps({"rows": rows, "others": tools}, indent=1))
    return int(any(row["misses"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
