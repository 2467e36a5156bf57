"""Made-up load tests that look like real ones: a 2P2D deployment whose queues grow with the rate."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvxfer.load.judge import RunSummary, summarize
from kvxfer.load.limits import LatencyLimits
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun
from kvxfer.load.stationarity import stationarity
from kvxfer.load.verdicts import RunVerdict, judge_run

BEGAN_UNIX_S = 1_790_000_000.0
LIMITS = LatencyLimits(ttft_s=0.4, tpot_s=0.025)
ATTAINMENT = 0.9
SETTINGS: dict[str, Any] = {
    "target": {"url": "http://127.0.0.1:8000", "model": "llama-3.1-8b", "api": "completions"},
    "workload": {"arrival": "poisson", "seed": 7, "salt": "a"},
    "goal": {"goodput": str(LIMITS), "attainment": ATTAINMENT},
}


@dataclasses.dataclass
class MadeUp:
    """What ``RunDirectory.finish`` takes."""

    kind: str
    runs: list[LoadRun]
    summaries: list[RunSummary]
    verdicts: dict[str, list[RunVerdict]]
    extra: dict[str, Any]


def made_up_run(
    name: str = "run",
    *,
    rate: float = 10.0,
    requests: int = 900,
    split: tuple[int, int] = (2, 2),
    failing: float = 0.002,
    has_accounts: bool = True,
    seed: int = 0,
) -> LoadRun:
    """Prompts are prefilled one after the other by each prefill worker, and decoding slows down with what runs."""
    draw = np.random.default_rng([seed, requests])
    due = np.cumsum(draw.exponential(1.0, requests)) / rate
    prompts = np.clip(draw.lognormal(6.8, 0.9, requests), 32, 16_000).astype(int)
    answers = np.clip(draw.lognormal(4.6, 0.5, requests), 4, 800).astype(int)
    lateness = draw.exponential(0.0003, requests)
    free = [0.0] * split[0]
    records = []
    for number in range(requests):
        p, d = int(np.argmin(free)), number % split[1]
        sent = float(due[number] + lateness[number])
        began = max(free[p], sent + 0.002)
        prefill = 0.008 + 0.00007 * float(prompts[number])
        free[p] = began + prefill
        transfer = 0.002 + 0.000004 * float(prompts[number])
        gap = 0.004 + float(draw.exponential(0.003))
        first = began + prefill + transfer + gap + 0.0008
        tpot = (0.012 + 0.0011 * rate / split[1] ** 1.2) * float(draw.lognormal(0.0, 0.12))
        last = first + tpot * float(answers[number] - 1)
        record = MeasuredRequest(
            *(name, number, f"{name}-{number}", float(due[number]), int(prompts[number]), int(answers[number])),
            **{"sent_s": sent, "first_s": first, "last_s": last, "end_s": last + 0.0005, "status": 200},
            **{"output_tokens": int(answers[number]), "tokens_from": "usage", "chunks": int(answers[number])},
            longest_gap_s=tpot * 2.5,
        )
        if draw.random() < failing:
            record.first_s = record.last_s = record.output_tokens = record.longest_gap_s = None
            record.status, record.error, record.message = 503, "overloaded", "the queue is full"
        elif has_accounts:
            record.account = account(
                f"prefill-{p}", f"decode-{d}", began - sent, prefill, transfer, first - sent, last - sent
            )
        records.append(record)
    return LoadRun(
        **{"name": name, "driver": "native", "began_unix_s": BEGAN_UNIX_S, "window_s": (0.0, float(due[-1]) + 1e-6)},
        **{"workload": "made-up, timestamp", "source": "made up by a test", "offered_per_s": rate},
        point={"rate": rate, "prefill": split[0], "decode": split[1], "devices": sum(split)},
        settings=SETTINGS,
        records=records,
    )


def account(p: str, d: str, began: float, prefill: float, transfer: float, first: float, last: float) -> dict[str, Any]:
    """What a router says of a request; seconds, from when it was sent."""

    def times(**seconds: float) -> dict[str, float]:
        return {name: round(value, 6) for name, value in seconds.items()}

    return {
        **{"prefill_agent": p, "decode_agent": d, "attempts": 1},
        **times(placed_s=0.0002, prefill_sent_s=0.0004, prefill_ended_s=began + prefill - 0.0004),
        **times(decode_sent_s=began + prefill - 0.0002, first_s=first - 0.0006, ended_s=last - 0.0006),
        "prefill": times(queue_s=began - 0.0008),
        "decode": {"prefill": "remote", "seconds": times(wire=transfer, plan=0.0003, confirm=0.0002)},
    }


def finished(kind: str, runs: list[LoadRun], found: str = "", **extra: Any) -> MadeUp:
    summaries = [summarize(run, LIMITS, ATTAINMENT) for run in runs]
    verdicts = {
        run.name: judge_run(run, summary, stationarity(run, LIMITS))
        for run, summary in zip(runs, summaries, strict=True)
    }
    if found:
        verdicts[""] = [RunVerdict("found", found, False)]
    return MadeUp(kind, runs, summaries, verdicts, extra)


def made_up_search(requests: int = 900) -> MadeUp:
    rates = (4.0, 8.0, 16.0, 12.0, 14.0, 13.0)
    runs = [made_up_run(f"probe {at} at {rate:g}/s", rate=rate, requests=requests) for at, rate in enumerate(rates, 1)]
    made = finished("search", runs)
    held = {rate: one.is_attained for rate, one in zip(rates, made.summaries, strict=True)}
    low = max((rate for rate, is_held in held.items() if is_held), default=0.0)
    high = min((rate for rate, is_held in held.items() if not is_held), default=max(rates))
    found = f"It holds {(low + high) / 2:g} requests/s ({low:g} to {high:g})."
    return finished("search", runs, found, crossing={"rate": (low + high) / 2, "low": low, "high": high})


def made_up_sweep(requests: int = 300) -> MadeUp:
    runs = [
        made_up_run(f"{p}P{d}D at {rate:g}/s", rate=rate, split=(p, d), requests=requests)
        for p in (1, 2, 3)
        for d in (1, 2, 3)
        for rate in (4.0, 8.0, 12.0, 16.0)
    ]
    made = finished("sweep", runs)
    held = [at for at, one in enumerate(made.summaries) if one.is_attained]
    best = max(held, key=lambda at: made.summaries[at].goodput_per_device_per_s or 0.0)
    made.verdicts[""] = [RunVerdict("best", f"{runs[best].name} has the best goodput for each worker.", False)]
    return made
