"""Runs against a queue that no process serves: one server, Poisson arrivals, so that the capacity is known."""

from __future__ import annotations

import math

import numpy as np

from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun


def queue_run(
    rate: float,
    served_per_s: float,
    requests: int,
    *,
    warmup: int = 0,
    seed: int = 0,
    is_exponential: bool = True,
    late_s: float = 0.0,
    failing: float = 0.0,
) -> LoadRun:
    """First content comes when the service begins, the last when it ends; a share of ``failing`` fails at once."""
    rng = np.random.Generator(np.random.PCG64(seed))
    count = requests + warmup
    due = np.cumsum(rng.exponential(1 / rate, count))
    due -= due[warmup] if warmup else 0.0
    fails = rng.random(count) < failing
    service = rng.exponential(1 / served_per_s, count) if is_exponential else np.full(count, 1 / served_per_s)
    service[fails] = 0.0
    done = np.cumsum(service)
    end = done + np.maximum.accumulate(due - (done - service))
    records = []
    for number in range(count):
        is_warmup = number < warmup
        record = MeasuredRequest("probe", number, f"r{number}", float(due[number]), 8, 1, is_warmup=is_warmup)
        record.sent_s = float(due[number]) + late_s
        record.end_s = float(end[number])
        if fails[number]:
            record.error, record.end_s = "status_503", record.sent_s
        else:
            record.first_s, record.last_s = float(end[number] - service[number]), record.end_s
            record.output_tokens = 1  # one of its model: a time of service is all that a queue has
        records.append(record)
    return LoadRun("probe", "native", 0.0, (0.0, requests / rate), offered_per_s=rate, records=records)


def waiting_capacity(served_per_s: float, limit_s: float, attainment: float) -> float:
    """The rate of M/M/1 at which that share of requests waits at most ``limit_s``: P(W > t) = rho exp(-(mu - rate) t)
    (Kleinrock 1975, section 5.12), solved by bisection.
    """
    low, high = 0.0, served_per_s
    for _ in range(60):
        rate = (low + high) / 2
        misses = rate / served_per_s * math.exp(-(served_per_s - rate) * limit_s)
        low, high = (rate, high) if misses <= 1 - attainment else (low, rate)
    return low
