"""Requests that wait for prompts of another engine: told at once when these begin, and given up by name."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from kvxfer.connectors.vllm import accepted
from kvxfer.connectors.vllm.steps import (
    Accept,
    Close,
    ComputedBlocks,
    RemotePrompt,
    Revoke,
    Standing,
    StepOrders,
    WaitOrder,
)
from kvxfer.connectors.vllm.waits import Waits
from kvxfer.connectors.vllm.wire import Await, Queued, Release
from kvxfer.errors import PeerGoneError
from tests.support.vllm_connector.pair import (
    OPTIONS,
    Rank,
    close_order,
    finish_order,
    load_order,
    new_id,
    open_order,
    two_ranks,
    until,
)

QUICK = dataclasses.replace(OPTIONS, unknown_wait_s=0.3, engine_silent_s=0.6)
NOTHING = StepOrders()
ACCEPT = StepOrders(accepts=(Accept("r", new_id()),))


@pytest_asyncio.fixture
async def ranks() -> AsyncIterator[tuple[Rank, Rank]]:
    async with two_ranks(QUICK) as made:
        yield made


def wait_order(timeout_s: float = 60.0, request_id: str = "l", seed: int = 1) -> WaitOrder:
    return WaitOrder(request_id, new_id(seed), "p", timeout_s)


def idle_step(rank: Rank, orders: StepOrders = NOTHING) -> None:
    rank.source.begin_step(orders)
    rank.source.step_saved()
    rank.source.step_over()


async def over(rank: Rank, request_id: str = "l", within_s: float = 5.0) -> Standing:
    def ends() -> list[Standing]:
        return [standing for standing in rank.stood if standing.request_id == request_id and standing.is_over]

    await until(lambda: bool(ends()), within_s)
    (end,) = ends()
    assert len(rank.waits) == 0
    return end


async def test_a_wait_is_queued_and_ends_with_the_step_that_begins_the_prompt(p: Rank, d: Rank) -> None:
    idle_step(p, ACCEPT)
    d.waits.start(wait_order())
    await until(lambda: [standing.is_known for standing in d.stood] == [True])
    assert not d.stood[0].is_over
    begun_s = time.monotonic()
    p.source.begin_step(open_order(2))
    end = await over(d)
    assert (end.code, end.text) == ("", "")
    assert end.seconds > 0
    assert time.monotonic() - begun_s < 0.4  # it was told, and did not have to ask
    loading = d.load(load_order(0, (5, 6), has_direct=False))
    p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (1, 2)),)), [1, 2])
    p.source.begin_step(finish_order((1, 2), "d"))
    assert (await loading).error is None


@pytest.mark.parametrize("reader", ["d", None])
async def test_a_finished_prompt_needs_no_wait(p: Rank, d: Rank, reader: str | None) -> None:
    p.forward(StepOrders(True), [1, 2])
    idle_step(p, finish_order((1, 2), reader))
    d.waits.start(wait_order())
    assert (await over(d)).code == ""
    await asyncio.sleep(0.1)
    assert p.source.take_read() == ()  # an engine that only asked whether it is there is no reader
    assert (await d.load(load_order(0, (5, 6), has_direct=False))).error is None
    await until(lambda: p.source.take_read() == ("r",))


async def test_a_leg_that_never_arrived_costs_little(p: Rank, d: Rank) -> None:
    d.waits.start(wait_order())
    end = await over(d)
    assert end.code == "grant_unknown"
    assert QUICK.unknown_wait_s <= end.seconds < QUICK.unknown_wait_s + 0.6
    assert not d.stood[0].is_known
    assert p.freed == []


async def test_a_busy_engine_takes_in_its_queue_twice_before_a_prompt_is_unknown(p: Rank, d: Rank) -> None:
    p.source.begin_step(StepOrders(True))
    d.waits.start(wait_order())
    await asyncio.sleep(QUICK.unknown_wait_s + 0.2)  # one long forward
    assert not d.stood
    p.source.step_over()
    idle_step(p, ACCEPT)
    await until(lambda: [standing.is_known for standing in d.stood] == [True])
    d.waits.leave("l")
    assert len(d.waits) == 0


async def test_a_source_without_room_for_the_question_says_so_at_once(
    p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted, "AWAITED_MAX", 1)
    idle_step(p, ACCEPT)
    d.waits.start(wait_order())
    await until(lambda: bool(d.stood))
    d.waits.start(wait_order(request_id="more", seed=2))
    await until(lambda: any(standing.is_over for standing in d.stood), within_s=0.4)
    (end,) = [standing for standing in d.stood if standing.is_over]
    assert (end.request_id, end.code) == ("more", "overloaded")
    assert "AWAITED_MAX" in end.text
    d.waits.leave("l")


@pytest.mark.parametrize("code", ["grant_revoked", "weights_unknown"])
async def test_a_prompt_that_is_withdrawn_is_refused_at_once(p: Rank, d: Rank, code: str) -> None:
    idle_step(p, ACCEPT)
    d.waits.start(wait_order())
    await until(lambda: bool(d.stood))
    p.source.begin_step(StepOrders(closes=(Close("r", new_id(), "it was aborted", False, code),)))
    end = await over(d, within_s=0.4)
    assert end.code == code
    assert "it was aborted" in end.text
    d.waits.start(wait_order(request_id="late"))
    assert (await over(d, "late")).code == code


async def test_a_prompt_that_was_taken_back_and_will_resume_is_waited_for(p: Rank, d: Rank) -> None:
    p.source.begin_step(open_order(2))
    p.source.begin_step(StepOrders(closes=(close_order(will_resume=True),)))
    p.source.step_over()
    d.waits.start(wait_order())
    await until(lambda: [standing.is_known for standing in d.stood] == [True])
    p.source.begin_step(open_order(2))
    assert (await over(d)).code == ""


async def test_a_prompt_of_another_reader_is_refused(p: Rank, d: Rank) -> None:
    p.source.begin_step(open_order(2, reader="other"))
    d.waits.start(wait_order())
    assert (await over(d)).code == "refused"


async def test_a_hung_engine_is_given_up(p: Rank, d: Rank) -> None:
    """Its agent is alive, and would say for ever that the prompt is queued."""
    idle_step(p, ACCEPT)
    d.waits.start(wait_order())
    end = await over(d)
    assert end.code == "peer_gone"
    assert "made no step" in end.text
    assert QUICK.engine_silent_s <= end.seconds < QUICK.engine_silent_s + 0.8


async def test_an_engine_that_steps_is_waited_for(p: Rank, d: Rank) -> None:
    idle_step(p, ACCEPT)
    d.waits.start(wait_order())
    for _ in range(16):
        await asyncio.sleep(0.1)
        idle_step(p)
    assert [(standing.is_known, standing.is_over) for standing in d.stood] == [(True, False)]
    p.source.begin_step(open_order(2))
    assert (await over(d)).seconds > 1.5


async def test_the_legs_own_time_ends_it(p: Rank, d: Rank) -> None:
    idle_step(p, ACCEPT)
    d.waits.start(wait_order(timeout_s=0.25))
    end = await over(d)
    assert end.code == "deadline"
    assert "timeout_s 0.25 passed, in the source's queue" in end.text
    assert 0.25 <= end.seconds < 0.4


async def test_wait_for_an_unknown_source_ends_as_peer_gone(d: Rank) -> None:
    d.waits.start(dataclasses.replace(wait_order(), source="ghost"))
    assert (await over(d)).code == "peer_gone"


async def test_an_engine_that_says_nothing_is_given_up() -> None:
    told: list[Standing] = []

    async def notify(agent_id: str, messages: Sequence[Await]) -> None:
        """It takes everything."""

    waits = Waits(QUICK, notify, told.append)
    waits.start(wait_order())
    await until(lambda: bool(told))
    assert (told[0].code, "said nothing" in told[0].text) == ("peer_gone", True)
    await waits.close()


async def test_all_that_waits_for_one_engine_is_asked_at_once() -> None:
    asked: list[Sequence[Await]] = []

    async def notify(agent_id: str, messages: Sequence[Await]) -> None:
        assert agent_id == "p"
        asked.append(messages)

    waits = Waits(OPTIONS, notify, lambda _: None)
    for seed in range(1, 1501):
        waits.start(wait_order(request_id=f"l{seed}", seed=seed))
    await until(lambda: len(asked) == 2)
    assert [[len(message.transfer_ids) for message in messages] for messages in asked] == [[1024, 476]] * 2
    await waits.close()
    assert len(waits) == 0


async def test_a_wait_under_a_name_that_waits_replaces_it() -> None:
    told: list[Standing] = []

    async def notify(agent_id: str, messages: Sequence[Await]) -> None:
        """It takes everything."""

    waits = Waits(OPTIONS, notify, told.append)
    waits.start(wait_order(timeout_s=0.1))
    waits.start(wait_order(seed=2))
    await asyncio.sleep(0.2)
    assert (told, len(waits)) == ([], 1)
    await waits.close()


async def test_a_source_that_is_gone_ends_its_waits_only() -> None:
    told: list[Standing] = []

    async def notify(agent_id: str, messages: Sequence[Await]) -> None:
        if agent_id == "p":
            raise PeerGoneError("no sign of it")

    waits = Waits(OPTIONS, notify, told.append)
    waits.start(wait_order())
    waits.start(dataclasses.replace(wait_order(request_id="other"), source="q"))
    await until(lambda: bool(told))
    waits.on_message("q", Queued((new_id(2),), (1,), 10**6, True))  # of a prompt that nothing here waits for
    assert [(standing.request_id, standing.code) for standing in told] == [("l", "peer_gone")]
    assert len(waits) == 1
    await waits.close()


async def test_a_request_that_is_let_go_is_forgotten_by_its_source(p: Rank, d: Rank) -> None:
    idle_step(p, ACCEPT)
    d.waits.start(wait_order())
    await until(lambda: bool(d.stood))
    d.waits.leave("l")
    d.loads.release(RemotePrompt("l", new_id(), ("p",)))
    await until(lambda: not p.source._accepted._questions)
    idle_step(p, finish_order((1, 2), "d"))
    await until(lambda: p.freed == ["r"])
    assert not [standing for standing in d.stood if standing.is_over]


async def test_a_prompt_that_is_taken_back_for_room_is_refused_by_that_name(p: Rank, d: Rank) -> None:
    p.forward(StepOrders(True), [1, 2])
    idle_step(p, finish_order((1, 2), "d"))
    idle_step(p, StepOrders(revokes=(Revoke("r", "no_room: blocks"),)))
    assert p.freed == ["r"]
    for number, has_direct in enumerate((True, False)):
        done = await d.load(dataclasses.replace(load_order(0, (5, 6), has_direct=has_direct), request_id=f"l{number}"))
        assert done.error is not None
        assert (done.error.code, "no_room" in done.report.text) == ("grant_revoked", True)
    idle_step(p, StepOrders(revokes=(Revoke("r", "no_room: again"),)))
    assert p.freed == ["r"]
    d.waits.start(wait_order())
    end = await over(d)
    assert (end.code, "no_room" in end.text) == ("grant_revoked", True)


async def test_a_release_of_a_waiting_prompt_is_remembered_until_it_begins(p: Rank) -> None:
    idle_step(p, ACCEPT)
    p.source.on_message("d", Release(new_id(), 0, 1))
    idle_step(p, finish_order((1, 2), "d"))
    assert p.freed == ["r"]
