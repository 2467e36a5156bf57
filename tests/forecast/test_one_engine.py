"""One engine on a virtual clock: a queue where it must be one, and the mock engine's loop in all else."""

from __future__ import annotations

import asyncio
import itertools
import math
import selectors
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import DoesNotFitError, InvalidArgumentError
from kvxfer.forecast.cost import LinearCost, attended_tokens
from kvxfer.forecast.one_engine import EngineRequest, run_engine
from kvxfer.forecast.step import StepLimits, StepSequence
from kvxfer.mock_engine.step_loop import StepLoop

COST = LinearCost(0.01, 1e-4, 1e-3, 1e-6)
CURVED = LinearCost(0.01, 1e-4, 1e-3, 1e-6, 1e-5)
ONE_AT_A_TIME = StepLimits(batch_max=1, has_prefix_cache=False)


def arrivals(rate: float, count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.cumsum(np.random.Generator(np.random.PCG64(seed)).exponential(1 / rate, count))


def test_a_request_alone_takes_its_steps() -> None:
    run = run_engine(StepLimits(), COST, [EngineRequest(5.0, 100, 3)])
    prompt, second, third = COST.seconds(100, 0, 0), COST.seconds(0, 1, 100), COST.seconds(0, 1, 101)
    assert run.ttft_s[0] == pytest.approx(prompt)
    assert run.e2e_s[0] == pytest.approx(prompt + second + third)
    assert run.tpot_s[0] == pytest.approx((second + third) / 2)
    assert run.gap_s[0] == pytest.approx(third)
    assert run.ended_s == run.last_s[0]


def test_a_prompt_takes_its_chunks_and_what_they_attend_to() -> None:
    run = run_engine(StepLimits(chunk_max=64), CURVED, [EngineRequest(0.0, 100, 1)])
    chunks = CURVED.seconds(64, 0, 0, attended_tokens(64, 0)) + CURVED.seconds(36, 0, 0, attended_tokens(36, 64))
    assert run.ttft_s[0] == pytest.approx(chunks)
    assert run.ttft_s[0] == pytest.approx(2 * 0.01 + 100 * 1e-4 + 1e-5 * 100 * 99 / 2)


def test_a_request_that_comes_in_a_step_joins_the_next() -> None:
    run = run_engine(StepLimits(), COST, [EngineRequest(0.0, 100, 5), EngineRequest(0.001, 100, 1)])
    assert run.first_s[1] == pytest.approx(COST.seconds(100, 0, 0) + COST.seconds(100, 1, 100))


def test_an_answer_of_one_token_has_no_tpot_and_meets_any_limit() -> None:
    run = run_engine(StepLimits(), COST, [EngineRequest(0.0, 100, 1)])
    assert math.isnan(run.tpot_s[0])
    assert run.are_within(tpot_s=1e-9).tolist() == [True]
    assert run.are_within(ttft_s=1e-9).tolist() == [False]


def test_nothing_comes_of_nothing() -> None:
    assert len(run_engine(StepLimits(), COST, []).ttft_s) == 0


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="order"):
        run_engine(StepLimits(), COST, [EngineRequest(1.0, 1, 1), EngineRequest(0.5, 1, 1)])
    with pytest.raises(InvalidArgumentError, match="time"):
        run_engine(StepLimits(), LinearCost(0, 0, 0, 0), [EngineRequest(1.0, 1, 1)])
    with pytest.raises(DoesNotFitError):
        run_engine(StepLimits(blocks=2), COST, [EngineRequest(1.0, 100, 1)])


@given(st.integers(0, 1000), st.floats(0.1, 1.5), st.integers(1, 200))
def test_one_at_a_time_is_a_queue(seed: int, load: float, count: int) -> None:
    """Lindley's recursion, for each request."""
    service = COST.seconds(64, 0, 0)
    at = arrivals(load / service, count, seed)
    run = run_engine(ONE_AT_A_TIME, COST, [EngineRequest(float(one), 64, 1) for one in at])
    free = 0.0
    for one, last in zip(at, run.last_s, strict=True):
        free = max(free, one) + service
        assert last == pytest.approx(free, rel=1e-9)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_mean_wait_is_that_of_the_formula(load: float) -> None:
    """M/D/1: rho s / (2 (1 - rho)); within 4 %, of 50,000 requests."""
    service = COST.seconds(64, 0, 0)
    run = run_engine(
        ONE_AT_A_TIME, COST, (EngineRequest(float(at), 64, 1) for at in arrivals(load / service, 50_000, 3))
    )
    assert float(np.mean(run.ttft_s)) - service == pytest.approx(load * service / (2 * (1 - load)), rel=0.04)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its time jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        loop = self
        self.now = 100.0

        class Jump(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> list[Any]:
                loop.now += timeout or 0.0
                return super().select(0)

        super().__init__(Jump())

    def time(self) -> float:
        return self.now


def of_the_step_loop(
    limits: StepLimits, cost: LinearCost, requests: Sequence[EngineRequest]
) -> tuple[list[list[float]], int]:
    """(times of the tokens of each request, steps) by the mock engine's loop, in virtual time."""
    loop = JumpingLoop()

    async def serve() -> tuple[list[list[float]], int]:
        pace = StepLoop(limits, cost, 1.0)
        began = loop.time()
        times: list[list[float]] = [[] for _ in requests]
        left = sum(request.output_tokens for request in requests)
        done = loop.create_future()

        class Listener:
            def on_token(self, generation: Any) -> None:
                nonlocal left
                times[generation.number].append(loop.time() - began)
                left -= 1
                if not left:
                    done.set_result(None)

        for number, request in enumerate(requests):
            generation: Any = types.SimpleNamespace(listener=Listener(), number=number)
            generation.sequence = StepSequence(generation, request.prompt_tokens, request.output_tokens, request.keys)
            loop.call_at(began + request.arrival_s, pace.start, generation)
        await done
        return times, pace.counts.steps

    try:
        return loop.run_until_complete(serve())
    finally:
        loop.close()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0001, 0.3), st.integers(1, 90), st.integers(1, 12), st.integers(0, 3)),
        min_size=1,
        max_size=40,
    ),
    st.booleans(),
)
def test_times_are_those_of_the_mock_engines_loop(rows: list[tuple[float, int, int, int]], has_cache: bool) -> None:
    """Chunks, preemption, a full batch and the prefix cache among them."""
    limits = StepLimits(
        token_budget=64, batch_max=4, chunk_max=48, block_tokens=8, blocks=20, has_prefix_cache=has_cache
    )
    requests, at = [], 0.0
    for apart, prompt, output, name in rows:
        at += apart
        keys = [name * 1000 + index for index in range((prompt + output) // 8)]
        requests.append(EngineRequest(at, prompt, output, keys))
    run = run_engine(limits, CURVED, requests)
    times, steps = of_the_step_loop(limits, CURVED, requests)
    assert run.counts.steps == steps
    assert run.first_s == pytest.approx([one[0] for one in times], abs=1e-6)
    assert run.last_s == pytest.approx([one[-1] for one in times], abs=1e-6)
    gaps = [max((after - before for before, after in itertools.pairwise(one)), default=0.0) for one in times]
    assert run.gap_s == pytest.approx(gaps, abs=1e-6)
