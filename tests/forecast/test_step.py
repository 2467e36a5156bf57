"""The step model: what one step computes, and what must hold after any order of calls."""

from __future__ import annotations

import collections

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.errors import ConfigError, DoesNotFitError, InvalidArgumentError
from kvxfer.forecast.cost import LinearCost, attended_tokens
from kvxfer.forecast.step import StepLimits, StepModel, StepPhase, StepSequence


def limits(**changes: object) -> StepLimits:
    given: dict[str, object] = {"token_budget": 64, "batch_max": 4, "chunk_max": 64, "block_tokens": 4, "blocks": 64}
    return StepLimits(**{**given, **changes})  # type: ignore[arg-type]


def sequence(prompt: int, output: int = 1, name: str = "s", *, key: int = 0, **more: object) -> StepSequence[str]:
    """``key`` names the prompt: two sequences of one key share all their full blocks."""
    keys = [key * 1000 + index for index in range((prompt + output) // 4)] if key else []
    return StepSequence(name, prompt, output, keys, **more)  # type: ignore[arg-type]


def run(model: StepModel[str]) -> list[tuple[int, int]]:
    """(prompt tokens, decoding sequences) of each step until nothing can be computed."""
    steps = []
    while (step := model.begin()).work:
        steps.append((step.prefill_tokens, step.decode_sequences))
        model.end(step)
    return steps


def test_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    model: StepModel[str] = StepModel(limits(token_budget=8))
    one = sequence(20, 3)
    model.add(one)
    assert run(model) == [(8, 0), (8, 0), (4, 0), (0, 1), (0, 1)]
    assert (one.phase, one.emitted, one.prompt_computed) == (StepPhase.ENDED, 3, 20)
    assert model.cache.used == 0


def test_decoding_sequences_come_before_chunks_of_a_later_prompt() -> None:
    model: StepModel[str] = StepModel(limits(token_budget=8))
    model.add(sequence(4, 5))
    model.end(model.begin())
    model.add(sequence(16))
    step = model.begin()
    assert (step.decode_sequences, step.prefill_tokens) == (1, 7)


def test_batch_has_a_maximum() -> None:
    model: StepModel[str] = StepModel(limits(batch_max=2))
    for _ in range(3):
        model.add(sequence(4, 4))
    model.begin()
    assert (model.running, model.waiting) == (2, 1)


def test_cached_prefix_is_not_computed_again_but_for_the_last_token() -> None:
    model: StepModel[str] = StepModel(limits())
    model.add(sequence(16, key=1))
    run(model)
    again = sequence(16, key=1)
    model.add(again)
    run(model)
    assert (again.cached_tokens, again.prompt_computed) == (12, 4)
    assert model.counts.cache_hit == 12


def test_answer_of_one_turn_is_the_cached_prefix_of_the_next() -> None:
    model: StepModel[str] = StepModel(limits())
    model.add(sequence(8, 9, key=1))
    run(model)
    following = sequence(17, key=1)
    model.add(following)
    run(model)
    assert following.cached_tokens == 16


def test_prefix_cache_can_be_off() -> None:
    model: StepModel[str] = StepModel(limits(has_prefix_cache=False))
    for _ in range(2):
        model.add(sequence(16, key=1))
    run(model)
    assert model.counts.prompt_computed == 32


def test_a_step_says_how_many_begin_with_it() -> None:
    model: StepModel[None] = StepModel(StepLimits(batch_max=2))
    for _ in range(3):
        model.add(StepSequence(None, 4, 2))
    told = []
    while not (step := model.begin()).is_empty:
        told.append(step.admitted)
        model.end(step)
    assert told == [2, 0, 1, 0]


def test_last_sequence_is_preempted_and_computes_its_prompt_again() -> None:
    model: StepModel[str] = StepModel(limits(blocks=4, has_prefix_cache=False))
    first, second = sequence(8, 8, "first"), sequence(4, 8, "second")
    model.add(first)
    model.add(second)
    run(model)
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert (first.emitted, second.emitted) == (8, 8)
    assert second.prompt_computed == 8


def test_held_blocks_stay_until_they_are_released() -> None:
    model: StepModel[str] = StepModel(limits(blocks=4))
    one = sequence(16, holds=True)
    model.add(one)
    run(model)
    assert (one.phase, model.held, model.held_blocks) == (StepPhase.HELD, 1, 4)
    model.add(sequence(16))
    assert model.begin().is_empty
    model.release(one)
    model.release(one)
    assert (model.held, model.held_blocks) == (0, 0)
    assert model.begin().prefill_tokens == 16


def test_remote_prompt_reserves_its_blocks_and_computes_one_token() -> None:
    model: StepModel[str] = StepModel(limits())
    one = sequence(16, 2, remote_tokens=16)
    model.add(one)
    step = model.begin()
    assert (step.to_load, step.work, model.cache.used) == ([one], [], 4)
    model.loaded(one, 16)
    assert run(model) == [(0, 1), (0, 1)]
    assert (one.loaded_tokens, one.prompt_computed) == (15, 1)


def test_remote_prompt_that_does_not_come_is_computed_here() -> None:
    model: StepModel[str] = StepModel(limits())
    one = sequence(16, 1, remote_tokens=16)
    model.add(one)
    model.begin()
    model.loaded(one, 0)
    assert run(model) == [(16, 0)]


@pytest.mark.parametrize("phase", list(StepPhase), ids=lambda phase: phase.name)
def test_abort_frees_all_blocks_in_every_phase(phase: StepPhase) -> None:
    model: StepModel[str] = StepModel(limits())
    remote = 8 if phase is StepPhase.LOADING else 0
    one = sequence(8, 1 if phase in (StepPhase.HELD, StepPhase.ENDED) else 5, remote_tokens=remote)
    one.holds = phase is StepPhase.HELD
    if phase is not StepPhase.NEW:
        model.add(one)
    if phase not in (StepPhase.NEW, StepPhase.WAITING):
        model.end(model.begin())
    assert one.phase is phase
    model.abort(one)
    model.abort(one)
    assert (one.phase, model.cache.used, model.running, model.waiting, model.held) == (StepPhase.ENDED, 0, 0, 0, 0)


def test_sequence_aborted_within_a_step_gets_no_token() -> None:
    model: StepModel[str] = StepModel(limits())
    one, other = sequence(8, 5), sequence(8, 5)
    model.add(one)
    model.add(other)
    step = model.begin()
    model.abort(one)
    assert model.end(step) == [other]


def test_sequence_larger_than_all_blocks_is_refused() -> None:
    model: StepModel[str] = StepModel(limits(blocks=4))
    with pytest.raises(DoesNotFitError, match="need 5 blocks, and the engine has 4"):
        model.add(sequence(16, 2))
    with pytest.raises(InvalidArgumentError, match="must have a token"):
        model.add(sequence(0))


def test_changes_of_the_cache_name_parents() -> None:
    model: StepModel[str] = StepModel(limits(blocks=4), records_changes=True)
    model.add(sequence(8, key=1))
    run(model)
    assert [(c.key, c.is_stored, c.parent) for c in model.cache.drain_changes()] == [
        (1000, True, None),
        (1001, True, 1000),
    ]
    model.add(sequence(16, key=2))
    run(model)
    gone = {change.key for change in model.cache.drain_changes() if not change.is_stored}
    assert gone == {1000, 1001}


def test_cost_is_linear_and_refuses_what_is_no_duration() -> None:
    cost = LinearCost(1.0, 0.5, 0.25, 0.125)
    assert cost.seconds(2, 4, 8) == pytest.approx(1 + 1 + 1 + 1)
    with pytest.raises(ConfigError, match="step_s must be 0 or more"):
        LinearCost(step_s=float("nan"))
    with pytest.raises(ConfigError, match="blocks must be above 0"):
        limits(blocks=0)


@pytest.mark.parametrize("budget", [7, 16, 64])
def test_prompt_tokens_attend_to_all_before_them_whatever_the_chunks(budget: int) -> None:
    """Of seven tokens the last chunk is one token, which counts as a decoding sequence's."""
    model: StepModel[str] = StepModel(limits(token_budget=budget))
    model.add(sequence(50))
    attended = 0
    while (step := model.begin()).work:
        attended += step.prefill_context_tokens + step.context_tokens
        model.end(step)
    assert attended == attended_tokens(50, 0) == sum(range(50))


def test_cached_prefix_is_attended_to() -> None:
    model: StepModel[str] = StepModel(limits())
    model.add(sequence(16, key=1))
    run(model)
    model.add(sequence(16, key=1))
    step = model.begin()
    assert (step.prefill_tokens, step.prefill_context_tokens) == (4, 12 + 13 + 14 + 15)


def test_second_half_of_a_prompt_costs_more_than_the_first() -> None:
    cost = LinearCost(0.0, 1e-5, 0.0, 0.0, 1e-9)
    first, second = (
        cost.seconds(5000, 0, 0, attended_tokens(5000, 0)),
        cost.seconds(5000, 0, 0, attended_tokens(5000, 5000)),
    )
    assert first + second == pytest.approx(10_000 * 1e-5 + 1e-9 * 10_000 * 9_999 / 2)
    assert second - first == pytest.approx(1e-9 * 5000 * 5000)


def test_cached_prefixes_are_given_up_before_a_sequence_waits() -> None:
    model: StepModel[str] = StepModel(limits(blocks=8))
    model.add(sequence(16, key=1))
    run(model)
    assert (model.cache.cached, model.cache.used) == (4, 0)
    running, waiting = sequence(20, 4, key=2), sequence(16, 1, key=3)
    model.add(running)
    model.add(waiting)
    step = model.begin()
    assert (step.work, model.waiting) == ([(running, 20)], 1)
    assert len(model.cache.match([1000 + index for index in range(4)])) == 3
    model.end(step)
    run(model)
    assert (waiting.phase, waiting.preemptions, model.counts.preemptions) == (StepPhase.ENDED, 0, 0)


def test_nothing_is_looked_up_in_a_cache_that_is_off() -> None:
    for has_cache, queried in ((False, 0), (True, 16)):
        model: StepModel[str] = StepModel(limits(has_prefix_cache=has_cache))
        model.add(sequence(16, key=1))
        run(model)
        assert model.counts.cache_queried == queried


def test_two_that_compute_one_prompt_together_keep_two_copies() -> None:
    model: StepModel[str] = StepModel(limits(), records_changes=True)
    for _ in range(2):
        model.add(sequence(16, key=1))
    run(model)
    changes = model.cache.drain_changes()
    assert collections.Counter(change.key for change in changes) == dict.fromkeys(range(1000, 1004), 2)
    assert (model.cache.cached, model.cache.keys) == (8, 4)


class AnyOrder(RuleBasedStateMachine):
    """Calls in any order: blocks are never lost, shared wrongly, or left over."""

    def __init__(self) -> None:
        super().__init__()
        self.model: StepModel[int] = StepModel(limits(token_budget=16, blocks=12, chunk_max=8), records_changes=True)
        self.all: list[StepSequence[int]] = []
        self.step = None
        self.cached: collections.Counter[int] = collections.Counter()
        self.idle = 0

    @rule(
        prompt=st.integers(1, 24),
        output=st.integers(1, 12),
        key=st.integers(0, 3),
        remote=st.booleans(),
        holds=st.booleans(),
    )
    def add(self, prompt: int, output: int, key: int, remote: bool, holds: bool) -> None:
        keys = [key * 1000 + index for index in range((prompt + output) // 4)] if key else []
        one = StepSequence(len(self.all), prompt, output, keys, prompt if remote else 0, holds)
        self.model.add(one)
        self.all.append(one)

    @precondition(lambda self: self.step is None)
    @rule()
    def begin(self) -> None:
        step = self.model.begin()
        assert sum(chunk for _, chunk in step.work) <= 16
        assert len({id(one) for one, _ in step.work}) == len(step.work)
        assert all(len(one.blocks) * 4 >= one.computed + chunk for one, chunk in step.work)
        prefills = [(one, chunk) for one, chunk in step.work if one.total - one.computed > 1]
        assert step.prefill_tokens == sum(chunk for _, chunk in prefills)
        assert step.prefill_context_tokens == sum(
            position for one, chunk in prefills for position in range(one.computed, one.computed + chunk)
        )
        self.step = step  # type: ignore[assignment]

    @precondition(lambda self: self.step is not None)
    @rule()
    def end(self) -> None:
        assert self.step is not None
        for one in self.model.end(self.step):
            assert one.emitted <= one.output_tokens
        self.step = None

    @rule(data=st.data())
    def change_one(self, data: st.DataObject) -> None:
        if self.all:
            one = data.draw(st.sampled_from(self.all))
            act = data.draw(st.sampled_from(["abort", "release", "loaded", "failed"]))
            if act == "abort":
                self.model.abort(one)
            elif act == "release":
                self.model.release(one)
            else:
                self.model.loaded(one, one.prompt_tokens if act == "loaded" else 0)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        uses = collections.Counter(block for one in self.all for block in one.blocks)
        assert self.model.cache.used == len(uses)
        assert self.model.cache.free == 12 - len(uses)
        assert all(uses[block] == self.model.cache._uses[block] for block in range(12))
        held = [one for one in self.all if one.phase is StepPhase.HELD]
        assert self.model.held_blocks == sum(len(one.blocks) for one in held)
        assert all(not one.blocks for one in self.all if one.phase is StepPhase.ENDED)
        for change in self.model.cache.drain_changes():
            self.cached[change.key] += 1 if change.is_stored else -1
            assert self.cached[change.key] >= 0
        assert self.cached.total() == self.model.cache.cached
        assert len(+self.cached) == self.model.cache.keys

    def teardown(self) -> None:
        """Everything ends: each sequence gets all its tokens once loads come and holds are released."""
        if self.step is not None:
            self.model.end(self.step)
        for _ in range(1500):
            for one in self.all:
                self.model.release(one)
                self.model.loaded(one, one.prompt_tokens)
            step = self.model.begin()
            self.model.end(step)
            if all(one.phase is StepPhase.ENDED for one in self.all):
                break
        assert {one.phase for one in self.all} <= {StepPhase.ENDED}
        assert self.model.cache.used == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
