"""Whether the load test's own driver and aiperf 0.13 say the same of one server: the same bodies, the same due times.

A turn starts a mock engine anew (TTFT 200 ms, 20 ms a token; a fifth of the answers comes 100 ms late, by the same
seed, so that the limits part good from bad) and sends one workload to it: native, aiperf, native, aiperf. Requests are
due at 8/s, Poisson. A turn with a request that was sent more than 30 ms late is void and taken again: the machine was
busy. A row is the median of each driver's turns; the bar is 2 % or 1 ms, and 1 % for goodput. Exit code
1: a bar is missed, or an answer failed; 2: the machine was too busy, three times.

TTFT since sent is the servers' part of it. E2E counts from when a request was due, so each driver's lateness is in it.
aiperf's times are those that it wrote of each request; ours are of the records of `kvxfer load`.

    python benchmarks/load_agreement.py --aiperf build/aiperf-venv/bin/aiperf    made by `make nightly-aiperf`
    python benchmarks/load_agreement.py --check                                   20 requests, one turn each, no bar
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable

import numpy as np

from kvxfer.load.drive.start import drive
from kvxfer.load.drive_aiperf import drive_aiperf
from kvxfer.load.limits import LatencyLimits
from kvxfer.load.offered import body_maker, workload_from
from kvxfer.load.options import DriveOptions, TargetOptions, WorkloadOptions
from kvxfer.load.record import MeasuredRequest

HERE = pathlib.Path(__file__).resolve().parent
NATIVE, AIPERF = "native", "aiperf"
TTFT_MS, ITL_MS, LATE_MS = 200.0, 20.0, 100.0
PERCENTILES = (50, 90)
LATEST_S = 0.03
"""A turn in which any request was sent later than this says how busy the machine was: it is void, and taken again."""
TRIES = 3


LIMITS = LatencyLimits(ttft_s=0.25, tpot_s=0.03)


@dataclasses.dataclass
class Turn:
    """One driver's run."""

    driver: str
    window_s: float
    records: list[MeasuredRequest]

    @property
    def latest_s(self) -> float:
        return max((record.lateness_s or 0.0 for record in self.records), default=0.0)

    def figures(self) -> dict[str, float]:
        """Milliseconds, and requests/s in time."""
        good = [record for record in self.records if record.is_good]
        found: dict[str, float] = {}
        reads: dict[str, Callable[[MeasuredRequest], float]] = {
            "TTFT since sent": lambda record: record.ttft_since_sent_s,
            "TPOT": lambda record: math.inf if record.tpot_s is None else record.tpot_s,
            "E2E": lambda record: record.e2e_s,
            "lateness": lambda record: record.lateness_s or 0.0,
        }
        for name, read in reads.items():
            values = [read(record) * 1e3 for record in good]
            for percentile in PERCENTILES:
                found[f"{name} p{percentile}, ms"] = float(np.percentile(values, percentile))
        found["goodput, 1/s"] = sum(LIMITS.is_met(record) for record in good) / self.window_s
        return found


class MockEngine:
    """A process with one engine."""

    def __init__(self) -> None:
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE.parent)]
        command = [sys.executable, "-m", "kvxfer.cli", "mock-engine", "--seed", "1", "--model", "mock"]
        self.process = subprocess.Popen(
            [*command, "--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the mock engine did not start")
        self.url = str(json.loads(line)["engines"][0]["http_url"])
        late = {"fault": "late", "delay_s": LATE_MS / 1e3, "probability": 0.2}
        request = urllib.request.Request(f"{self.url}/mock/faults", json.dumps(late).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(10)


def turn(driver: str, options: WorkloadOptions, command: str) -> Turn:
    """One run of one driver. Raises SystemExit where it did not end by itself."""
    workload = workload_from(options)
    engine = MockEngine()
    records: list[MeasuredRequest] = []
    try:
        target = TargetOptions(url=engine.url, model="mock")
        body = body_maker(target, options, workload, "mock").body
        drive_options = DriveOptions(aiperf=command, timeout_s=30)
        send = drive if driver == NATIVE else drive_aiperf
        result = send(workload, body, target, drive_options, run=driver, on_record=records.append)
    finally:
        engine.close()
    if result.ended != "complete":
        raise SystemExit(f"{driver}: {result.ended}: {result.message}")
    span_s = workload.span_s
    return Turn(driver, span_s + span_s / max(1, len(records) - 1), sorted(records, key=lambda one: one.number))


def table(turns: list[Turn]) -> tuple[list[str], bool]:
    """Lines for a reader, and whether every bar is met."""
    each = [(one.driver, one.figures()) for one in turns]
    lines = [f"{'':24} {NATIVE:>10} {AIPERF:>10} {'ratio':>8} {'difference':>11}  turns"]
    met = True
    for name in each[0][1]:
        of = {driver: [found[name] for who, found in each if who == driver] for driver in (NATIVE, AIPERF)}
        ours, theirs = statistics.median(of[NATIVE]), statistics.median(of[AIPERF])
        difference = ours - theirs
        if name.startswith("goodput"):
            passed, bar = abs(difference) <= 0.01 * theirs, "1 %"
        elif name.startswith("lateness"):
            passed, bar = True, "no bar"
        else:
            passed, bar = abs(difference) <= max(0.02 * theirs, 1.0), "2 % or 1 ms"
        met &= passed
        ratio = ours / theirs if theirs else float("nan")
        shown = " ".join(f"{found[name]:.2f}" for _, found in each)
        verdict = bar if bar == "no bar" else f"{'within' if passed else 'BEYOND'} {bar}"
        lines.append(f"{name:24} {ours:10.3f} {theirs:10.3f} {ratio:8.4f} {difference:+11.3f}  {shown}  {verdict}")
    failed = {one.driver: sum(not record.is_good for record in one.records) for one in turns}
    for one in turns:
        missed = [record for record in one.records if record.is_good and not LIMITS.is_met(record)]
        early = [record for record in missed if record.ttft_since_sent_s <= (LIMITS.ttft_s or 0.0)]
        lines.append(
            f"{one.driver}: {len(missed)} not in time, {len(early)} of them by the driver's lateness or their TPOT;"
            f" latest {one.latest_s * 1e3:.1f} ms"
        )
    lines.append(f"requests a turn: {len(turns[0].records)}; failed: {failed}")
    return lines, met and not any(failed.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", default="build/aiperf-venv/bin/aiperf", help="aiperf's command")
    parser.add_argument("--requests", type=int, default=200, help="of each turn")
    parser.add_argument("--rate", type=float, default=8.0, help="requests due per second")
    parser.add_argument("--pairs", type=int, default=2, help="turns of each driver")
    parser.add_argument("--check", action="store_true", help="20 requests, one turn each, no bar")
    given = parser.parse_args()
    requests, pairs = (20, 1) if given.check else (given.requests, given.pairs)
    options = WorkloadOptions(rate=given.rate, requests=requests, prompt_tokens=256, output_tokens=24, seed=28)
    turns = []
    for number in range(pairs):
        for driver in (NATIVE, AIPERF):
            for _ in range(TRIES):
                print(f"turn {number + 1} of {pairs}: {driver}", flush=True)
                taken = turn(driver, options, given.aiperf)
                if given.check or taken.latest_s <= LATEST_S:
                    break
                print(f"void: a request was sent {taken.latest_s * 1e3:.0f} ms late, the machine was busy", flush=True)
            else:
                print("the machine is too busy")
                return 2
            turns.append(taken)
    lines, met = table(turns)
    print("\n".join(lines))
    return 0 if met or given.check else 1


if __name__ == "__main__":
    sys.exit(main())
