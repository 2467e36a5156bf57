"""What an engine's first rank knows of prompts that have not begun, and when it knows that one will not come."""

from __future__ import annotations

import pytest

from kvxfer.connectors.vllm import accepted as module
from kvxfer.connectors.vllm.accepted import FORGET_S, Accepted
from kvxfer.connectors.vllm.wire import KEEPS_MAX, Queued
from kvxfer.types import TransferId

WAIT_S = 2.0
ONE, TWO, THREE = (TransferId(bytes([number]) * 16) for number in (1, 2, 3))


def answer(accepted: Accepted, *ids: TransferId, now_s: float = 0.0, is_computing: bool = False) -> Queued:
    (queued,) = accepted.answer(list(ids), now_s, is_computing=is_computing)
    return queued


def until_unknown(accepted: Accepted, steps_at: tuple[float, ...], *, is_busy_until: float = 0.0) -> float:
    """When the question for ONE, which came at 0, is over; it is repeated, and the engine steps at those times."""
    left = list(steps_at)
    for tick in range(1, 300):
        now_s = tick / 10
        accepted.ask("d", ONE, now_s)
        while left and left[0] <= now_s:
            accepted.step_began(left.pop(0))
            if now_s >= is_busy_until:
                accepted.step_over()
        if accepted.sweep(now_s) == [("d", ONE)]:
            return now_s
    return float("inf")


def test_positions_are_the_order_in_which_prompts_were_accepted() -> None:
    accepted = Accepted(WAIT_S)
    accepted.accept(ONE)
    accepted.accept(TWO)
    assert answer(accepted, TWO, THREE, ONE).positions == (2, 0, 1)
    assert accepted.take(ONE) == []
    accepted.accept_again(THREE)
    assert answer(accepted, TWO, THREE, ONE).positions == (2, 1, 0)
    assert len(accepted) == 2


def test_an_answer_says_how_the_engine_gets_on() -> None:
    accepted = Accepted(WAIT_S)
    assert answer(accepted, ONE, now_s=5.0) == Queued((ONE,), (0,), 0, False)
    accepted.step_began(6.0)
    assert answer(accepted, ONE, now_s=6.25) == Queued((ONE,), (0,), 250, True)
    accepted.step_over()
    assert answer(accepted, ONE, now_s=6.25) == Queued((ONE,), (0,), 250, False)
    assert answer(accepted, ONE, now_s=6.25, is_computing=True).has_work
    accepted.accept(TWO)
    assert answer(accepted, ONE, now_s=1e9) == Queued((ONE,), (0,), (1 << 31) - 1, True)
    many = accepted.answer([ONE] * (KEEPS_MAX + 1), 6.0, is_computing=False)
    assert [len(queued.transfer_ids) for queued in many] == [KEEPS_MAX, 1]


@pytest.mark.parametrize(
    ("steps_at", "unknown_at"),
    [((), 2.0), ((0.1,), 2.1), ((0.1, 0.2), 2.0), ((0.5, 2.4), 2.5), ((1.9,), 3.9), ((1.9, 2.6), 2.6)],
    ids=["idle", "one step", "two steps", "idle long enough", "a late step", "two late steps"],
)
def test_a_prompt_that_never_comes_is_unknown_soon(steps_at: tuple[float, ...], unknown_at: float) -> None:
    accepted = Accepted(WAIT_S)
    accepted.ask("d", ONE, 0.0)
    assert until_unknown(accepted, steps_at) == pytest.approx(unknown_at, abs=0.11)


def test_an_engine_in_a_long_step_has_not_taken_in_its_queue() -> None:
    accepted = Accepted(WAIT_S)
    accepted.ask("d", ONE, 0.0)
    assert until_unknown(accepted, (0.1, 8.0), is_busy_until=8.0) == pytest.approx(8.0)


def test_an_engine_that_has_work_and_makes_no_step_proves_nothing() -> None:
    accepted = Accepted(WAIT_S)
    accepted.step_began(0.0)
    accepted.accept(TWO)
    accepted.step_over()
    accepted.ask("d", ONE, 0.0)
    assert until_unknown(accepted, ()) == float("inf")
    assert answer(accepted, ONE, now_s=30.0) == Queued((ONE,), (0,), 30_000, True)


def test_a_prompt_that_is_accepted_late_is_not_unknown_any_more() -> None:
    accepted = Accepted(WAIT_S)
    accepted.ask("d", ONE, 0.0)
    for tick in range(1, 100):
        accepted.ask("d", ONE, tick / 10)
        accepted.step_began(tick / 10)
        if tick == 19:
            accepted.accept(ONE)
        assert accepted.sweep(tick / 10) == []
    assert accepted.take(ONE) == ["d"]
    assert accepted.take(ONE) == []


def test_agent_that_asks_no_more_is_forgotten() -> None:
    accepted = Accepted(WAIT_S)
    accepted.accept(ONE)
    for agent_id in ("d", "e", "f"):
        accepted.ask(agent_id, ONE, 0.0)
    accepted.forget("e", ONE)
    accepted.ask("f", ONE, 1.0)
    assert accepted.sweep(FORGET_S) == []
    assert accepted.take(ONE) == ["f"]


def test_both_lists_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACCEPTED_MAX", 1)
    monkeypatch.setattr(module, "AWAITED_MAX", 1)
    accepted = Accepted(WAIT_S)
    accepted.accept(ONE)
    accepted.accept(TWO)
    assert answer(accepted, ONE, TWO).positions == (1, 0)
    assert accepted.ask("d", ONE, 0.0)
    assert not accepted.ask("d", TWO, 0.0)
    assert accepted.ask("d", ONE, 1.0)
