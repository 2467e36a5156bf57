"""Whether the load test's search finds a capacity that is known: the error of its answer, and how many runs it took.

A mock engine runs the step model on a real clock. The same model without a clock, with 100,000 requests, says which
Poisson rate it holds within the limits. Then the search runs against the real process, through the native driver, with
two seeds. A search takes about eight minutes. The machine must be idle: a late generator is told and ends the search.

    python benchmarks/load_search.py [--seeds 1,2] [--requests 900] [--exact-requests 100000] [--exact-rate 0]
                                     [--model-only]

``--model-only`` searches on the virtual clock instead: without a driver, and in a minute, over as many seeds as asked.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

from kvxfer.forecast.capacity import engine_capacity
from kvxfer.forecast.cost import LinearCost
from kvxfer.forecast.one_engine import EngineRequest, run_engine
from kvxfer.forecast.step import StepLimits
from kvxfer.load.limits import LatencyLimits
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun
from kvxfer.load.search import ProbeResult, SearchOptions, SearchProbe, SearchResult, search
from kvxfer.workload.arrivals import poisson
from kvxfer.workload.request import Workload
from kvxfer.workload.sessions import MadeUp

STEPS = StepLimits(token_budget=2048, batch_max=64, chunk_max=2048, blocks=8192, has_prefix_cache=False)
COST = LinearCost(step_s=0.01, prefill_token_s=300e-6, decode_sequence_s=100e-6, context_token_s=0.0)
ENGINE = (
    *("--pace", "steps", "--no-prefix-caching", "--max-num-batched-tokens", "2048", "--max-num-seqs", "64"),
    *("--step-ms", "10", "--prefill-token-us", "300", "--decode-sequence-us", "100", "--context-token-ns", "0"),
    *("--blocks", "8192", "--record", "0", "--log-level", "warning"),
)
"""The same engine, as flags."""
MADE_UP = MadeUp(prompt_tokens=128, output_tokens=16, length_spread=0.5)
LIMITS = LatencyLimits.parse("ttft:420 tpot:150")
ATTAINMENT = 0.9
LENGTHS = 10_000
"""Of so many requests; the exact computation takes them in turn."""


def workload(probe: SearchProbe) -> Workload:
    count = probe.warmup + probe.requests
    requests = MADE_UP.requests(poisson(count, probe.rate, probe.seed), count, probe.seed)
    return Workload(f"probe {probe.number}", requests)


def window(probe: SearchProbe, sent: Workload) -> tuple[float, float]:
    """A microsecond wider than the due times, which a record may have rounded."""
    return (sent.requests[probe.warmup].due_s or 0.0) - 1e-6, sent.span_s + 1e-6


def exact_capacity(requests: int) -> float:
    lengths = [(one.prompt_tokens, one.output_tokens) for one in MADE_UP.requests(np.zeros(LENGTHS), LENGTHS, 99)]
    found = engine_capacity(
        STEPS,
        COST,
        lengths,
        lambda run: run.are_within(ttft_s=LIMITS.ttft_s, tpot_s=LIMITS.tpot_s),
        ATTAINMENT,
        requests=requests,
        warmup=1000,
        seed=7,
    )
    return found.rate_per_s


def of_the_model(probe: SearchProbe) -> LoadRun:
    """A run without a clock."""
    sent = workload(probe)
    served = run_engine(
        STEPS, COST, (EngineRequest(one.due_s or 0.0, one.prompt_tokens, one.output_tokens) for one in sent.requests)
    )
    run = LoadRun(sent.name, "native", 0.0, window(probe, sent), offered_per_s=probe.rate)
    for one, first, last, gap in zip(sent.requests, served.first_s, served.last_s, served.gap_s, strict=True):
        record = MeasuredRequest(sent.name, one.number, "", one.due_s or 0.0, one.prompt_tokens, one.output_tokens)
        record.is_warmup = one.number < probe.warmup
        record.sent_s, record.first_s, record.last_s, record.end_s = (
            record.due_s,
            float(first),
            float(last),
            float(last),
        )
        record.output_tokens, record.longest_gap_s = one.output_tokens, float(gap)
        run.records.append(record)
    return run


class OfTheEngine:
    """Runs against a process, through the native driver."""

    def __init__(self, address: str) -> None:
        from kvxfer.load.options import DriveOptions, TargetOptions

        self._target = TargetOptions(url=f"http://{address}", account=False)
        self._options = DriveOptions(processes=1)

    def __call__(self, probe: SearchProbe) -> LoadRun:
        from kvxfer.load.drive.start import drive
        from kvxfer.workload.bodies import BodyMaker
        from kvxfer.workload.prompts import PromptMaker

        sent = workload(probe)
        maker = BodyMaker("mock", "completions", PromptMaker(seed=probe.seed, salt=probe.salt))
        run = LoadRun(sent.name, "native", time.time(), window(probe, sent), offered_per_s=probe.rate)
        done = drive(
            sent,
            maker.body,
            self._target,
            self._options,
            run=f"probe-{probe.number}",
            warmup=probe.warmup,
            on_record=run.records.append,
        )
        run.ended = done.ended
        return run


@contextlib.contextmanager
def mock_engine() -> Iterator[str]:
    command = [sys.executable, "-m", "kvxfer.cli", "mock-engine", *ENGINE]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()


def tell_probe(seed: int, one: ProbeResult) -> None:
    values = {name: value for name, value in one.to_json().items() if name not in ("seed", "salt", "verdicts")}
    values["verdicts"] = [verdict.name for verdict in one.verdicts]
    late = one.summary.of_all["lateness"].p99
    values["lateness_p99_ms"] = None if late is None or math.isinf(late) else round(late * 1e3, 3)
    print(json.dumps({"search": seed, **values}), flush=True)


def tell_result(seed: int, result: SearchResult, exact: float, took_s: float) -> None:
    answer = {key: value for key, value in result.to_json().items() if key not in ("probes", "sentence")}
    error = None if result.rate is None else round(result.rate / exact - 1, 4)
    values = {**answer, "exact": round(exact, 3), "error": error, "took_s": round(took_s)}
    print(json.dumps({"search": seed, **values}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--requests", type=int, default=900)
    parser.add_argument("--start-rate", type=float, default=8.0)
    parser.add_argument("--exact-requests", type=int, default=100_000)
    parser.add_argument("--exact-rate", type=float, default=0.0, help="known already; 0: compute it")
    parser.add_argument("--model-only", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    exact = args.exact_rate or exact_capacity(args.exact_requests)
    took = round(time.monotonic() - began, 1)
    print(json.dumps({"exact_requests_per_s": round(exact, 3), "limits": str(LIMITS), "took_s": took}), flush=True)
    options = SearchOptions(start_rate=args.start_rate, probe_requests=args.requests)
    results: list[SearchResult] = []
    with contextlib.ExitStack() as stack:
        run_at = of_the_model if args.model_only else OfTheEngine(stack.enter_context(mock_engine()))
        for seed in map(int, args.seeds.split(",")):
            began = time.monotonic()
            result = search(
                run_at, LIMITS, ATTAINMENT, options, seed=seed, on_probe=functools.partial(tell_probe, seed)
            )
            results.append(result)
            tell_result(seed, result, exact, time.monotonic() - began)
    rates = [result.rate for result in results if result.rate is not None]
    errors = [abs(rate / exact - 1) for rate in rates]
    print(
        json.dumps(
            {
                "searches": len(results),
                "answered": len(rates),
                "error_median": round(float(np.median(errors)), 4) if errors else None,
                "error_max": round(max(errors), 4) if errors else None,
                "within_5_percent": sum(error <= 0.05 for error in errors),
                "bounds_hold": sum((one.low or 0) <= exact <= (one.high or 0) for one in results if one.rate),
                "probes": sum(len(one.probes) for one in results) / len(results),
                "rate_sd": round(float(np.std(rates)), 3) if rates else None,
                "options": dataclasses.asdict(options),
            }
        )
    )


if __name__ == "__main__":
    main()
