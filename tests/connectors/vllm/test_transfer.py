"""The source and the loads of two ranks over real agents, without vLLM: which bytes arrive, and how everything ends."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest

from kvxfer.agent import Transfer
from kvxfer.connectors.vllm import loads as loads_module
from kvxfer.connectors.vllm import source as source_module
from kvxfer.connectors.vllm.fetch import LoadEnded
from kvxfer.connectors.vllm.loads import ASKS_MAX, Loads
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.steps import ComputedBlocks, RemotePrompt, StepOrders
from kvxfer.connectors.vllm.wire import Keep, Release
from kvxfer.observe import Span, spans_to
from tests.support.vllm_connector.pair import (
    LAYERS,
    OPTIONS,
    PAGE,
    TRACE,
    Rank,
    arrives,
    close_order,
    code_of,
    finish_order,
    is_idle,
    load_order,
    new_id,
    open_order,
    readership_of,
    until,
)


async def test_a_finished_prompt_is_pulled_without_a_word(p: Rank, d: Rank) -> None:
    for layer in range(LAYERS):
        p.write(layer, [3, 4, 9], 1)
    p.source.begin_step(finish_order((3, 4, 9)))
    over = await arrives(d.load(load_order(0, (7, 1, 2), has_direct=True)), p, [3, 4, 9], d, [7, 1, 2])
    assert (over.report.parts, over.report.bytes) == (1, LAYERS * 3 * PAGE)
    assert 0 < over.report.wire_seconds <= over.report.seconds
    await until(lambda: p.freed == ["r"])
    await is_idle(p)
    await is_idle(d)


async def test_send_grants_and_load_are_spans_of_the_requests_trace(p: Rank, d: Rank) -> None:
    seen: list[Span] = []
    with spans_to(seen.append):
        (finish,) = finish_order((3, 4, 9)).finishes
        p.source.begin_step(StepOrders(finishes=(dataclasses.replace(finish, traceparent=TRACE),)))
        await d.load(dataclasses.replace(load_order(0, (7, 1, 2), has_direct=True), traceparent=TRACE))
        await until(lambda: p.freed == ["r"])
        await until(lambda: "kvxfer.load" in [span.name for span in seen])  # vLLM is told first
    names = [*["kvxfer.grant"] * len(p.agent.pools), "kvxfer.load", "kvxfer.send"]
    assert sorted(span.name for span in seen) == names
    assert {(span.parent, span.error) for span in seen} == {(TRACE, None)}
    (load,) = (span for span in seen if span.name == "kvxfer.load")
    assert load.attributes["bytes"] == LAYERS * 3 * PAGE


async def test_spans_name_the_error_that_ended_them(p: Rank, d: Rank) -> None:
    seen: list[Span] = []
    with spans_to(seen.append):
        p.source.begin_step(finish_order((3, 4, 9)))
        await until(lambda: p.freed == ["r"])
        await d.load(load_order(0, (7, 1, 2), has_direct=True))
    assert {span.name for span in seen} == {"kvxfer.send", "kvxfer.grant", "kvxfer.load"}
    assert {(span.parent, span.error) for span in seen} == {(None, "grant_expired")}


async def test_only_what_is_missing_is_pulled(p: Rank, d: Rank) -> None:
    for layer in range(LAYERS):
        p.write(layer, [3, 4, 9], 1)
    p.source.begin_step(finish_order((3, 4, 9)))
    await arrives(d.load(load_order(1, (5, 6), has_direct=True)), p, [4, 9], d, [5, 6])
    assert not d.memory[:, [0, 7]].any()
    await until(lambda: p.freed == ["r"])
    await is_idle(p)


async def test_a_reader_may_come_before_the_step_that_keeps_the_prompt(p: Rank, d: Rank) -> None:
    loading = d.load(load_order(1, (5, 6), has_direct=True))
    await asyncio.sleep(0.05)
    p.forward(StepOrders(True), [3, 4, 9])
    p.source.begin_step(finish_order((3, 4, 9)))
    await arrives(loading, p, [4, 9], d, [5, 6])


@pytest.mark.parametrize("asks_at", ["before", "in the first step", "after the first step", "after all"])
async def test_chunks_arrive_whenever_they_are_asked_for(p: Rank, d: Rank, asks_at: str) -> None:
    loading: asyncio.Future[LoadEnded] | None = None

    async def maybe_ask(when: str) -> None:
        nonlocal loading
        if when == asks_at:
            loading = d.load(load_order(1, (5, 6, 7, 8), has_direct=False))
            await asyncio.sleep(0.05)

    await maybe_ask("before")
    p.source.begin_step(open_order(5))
    p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (0,)),)), [0], 7)
    p.source.begin_step(StepOrders(True, chunks=(ComputedBlocks("r", (1, 2)),)))
    p.write(0, [1, 2], 8)
    p.source.layer_saved(0)
    await maybe_ask("in the first step")
    for layer in (1, 2):
        p.write(layer, [1, 2], 8)
        p.source.layer_saved(layer)
    p.source.step_saved()
    await maybe_ask("after the first step")
    p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (3, 4)),)), [3, 4], 9)
    p.source.begin_step(finish_order((0, 1, 2, 3, 4), "d"))
    await maybe_ask("after all")
    assert loading is not None
    await arrives(loading, p, [1, 2, 3, 4], d, [5, 6, 7, 8])
    await until(lambda: p.freed == ["r"])
    await is_idle(p)
    await is_idle(d)


async def test_layers_are_announced_as_they_are_written(p: Rank, d: Rank) -> None:
    loading = d.load(load_order(0, (5, 6), has_direct=False))
    await until(lambda: bool(p.source._early))  # a reader that asks later hears of it with the step
    p.source.begin_step(open_order(2))
    p.source.begin_step(StepOrders(True, chunks=(ComputedBlocks("r", (1, 2)),)))
    p.write(1, [1, 2], 1)
    p.source.layer_saved(1)  # not the first: nothing may be read yet
    await asyncio.sleep(0.05)
    assert not d.memory.any()
    p.write(0, [1, 2], 1)
    p.source.layer_saved(0)
    await until(lambda: bool(d.memory[1, 6].any()))
    assert (d.memory[:2, [5, 6]] == p.memory[:2, [1, 2]]).all()
    assert not d.memory[2].any()
    p.write(2, [1, 2], 1)
    p.source.step_saved()
    over = await loading
    assert over.error is None
    assert (d.memory[2, [5, 6]] == p.memory[2, [1, 2]]).all()
    assert over.report.early_bytes > 0 or len(p.agent.pools) > 1


async def test_load_of_a_closed_prompt_fails(p: Rank, d: Rank) -> None:
    loading = d.load(load_order(0, (5, 6, 7), has_direct=False))
    await asyncio.sleep(0.05)
    p.source.begin_step(open_order(3))
    p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (1, 2)),)), [1, 2])
    p.source.begin_step(StepOrders(True, closes=(close_order(will_resume=False),)))
    assert not [pool for pool in p.agent.statistics().pools if pool.granted]
    assert await code_of(loading) == "grant_revoked"
    assert p.freed == []
    await is_idle(d)


async def test_revoked_prompt_that_is_computed_again_is_asked_for_again(p: Rank, d: Rank) -> None:
    loading = d.load(load_order(1, (5, 6), has_direct=False))
    await asyncio.sleep(0.05)
    p.source.begin_step(open_order(3))
    p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (1, 2)),)), [1, 2], 1)
    await until(lambda: bool(d.memory[:, 5].any(axis=1).all()))
    p.forward(StepOrders(True, closes=(close_order(will_resume=True),)), [1, 2], 2)  # another request's bytes
    await is_idle(p)
    await asyncio.sleep(0.05)
    assert not loading.done()
    p.source.begin_step(open_order(3))
    p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (7, 8, 9)),)), [7, 8, 9], 3)
    p.source.begin_step(finish_order((7, 8, 9), "d"))
    over = await arrives(loading, p, [8, 9], d, [5, 6])
    assert (over.report.bytes, over.report.attempts) == (LAYERS * 2 * PAGE, 2)
    assert 0 < over.report.wire_seconds <= over.report.seconds
    await until(lambda: p.freed == ["r"])
    await is_idle(p)


async def test_it_is_asked_for_again_in_the_step_that_took_it_back(p: Rank, d: Rank) -> None:
    loading = d.load(load_order(0, (5, 6), has_direct=False))
    await asyncio.sleep(0.05)
    p.source.begin_step(open_order(2))
    p.source.begin_step(StepOrders(True, chunks=(ComputedBlocks("r", (1, 2)),)))
    closes = (close_order(will_resume=True),)
    chunks = (ComputedBlocks("r", (3, 4)),)
    p.forward(dataclasses.replace(open_order(2), closes=closes, chunks=chunks), [3, 4], 3)
    p.source.begin_step(finish_order((3, 4), "d"))
    assert (await loading).error is None
    assert (d.memory[:, [5, 6]] == p.memory[:, [3, 4]]).all()
    await until(lambda: p.freed == ["r"])


async def test_a_source_that_takes_back_again_and_again_is_given_up(p: Rank, d: Rank) -> None:
    loading = d.load(load_order(0, (5, 6), has_direct=False))
    for attempt in range(ASKS_MAX):
        await until(lambda attempt=attempt: any(ask.attempt == attempt for ask in p.source._early.asks))
        p.source.begin_step(open_order(2))
        p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (1,)),)), [1])
        p.source.begin_step(StepOrders(True, closes=(close_order(will_resume=True),)))
    assert await code_of(loading) == "grant_revoked"
    await is_idle(d)


async def test_a_prompt_that_was_never_begun_is_refused_when_it_ends(p: Rank, d: Rank) -> None:
    loading = d.load(load_order(0, (5, 6), has_direct=False))
    await asyncio.sleep(0.05)
    p.source.begin_step(StepOrders(closes=(close_order(will_resume=False),)))
    assert await code_of(asyncio.wait_for(loading, 5.0)) == "grant_revoked"


async def test_a_prompt_of_two_readers_is_kept_for_both(p: Rank, d: Rank) -> None:
    done: asyncio.Future[LoadEnded] = asyncio.get_running_loop().create_future()
    pages = Pages((), PAGE, d.loads._staging._stores)
    second = Loads(
        d.agent,
        d.loads._staging._pools,
        pages,
        OPTIONS,
        readership_of(1, 2),
        done.set_result,
        asyncio.get_running_loop().call_soon_threadsafe,
    )
    d.loads._readership = readership_of(0, 2)
    p.forward(StepOrders(True), [1, 2])
    p.source.begin_step(finish_order((1, 2)))
    over = await d.load(load_order(0, (5, 6), has_direct=True))
    assert over.error is None
    await asyncio.sleep(0.05)
    assert p.freed == []
    second.release(RemotePrompt("l", new_id(), ("p",)))
    await until(lambda: p.freed == ["r"])
    assert (d.memory[:, [5, 6]] == p.memory[:, [1, 2]]).all()
    await second.close()


async def test_of_replicas_one_is_read_and_all_are_let_go(p: Rank, d: Rank) -> None:
    p.forward(StepOrders(True), [1, 2])
    p.source.begin_step(finish_order((1, 2)))
    order = dataclasses.replace(load_order(0, (5, 6), has_direct=True), sources=("p", "ghost"))
    await arrives(d.load(order), p, [1, 2], d, [5, 6])
    await until(lambda: p.freed == ["r"])


async def test_a_replica_that_is_not_read_is_let_go(p: Rank, d: Rank) -> None:
    p.forward(StepOrders(True), [1, 2])
    p.source.begin_step(finish_order((1, 2)))
    d.loads.release(RemotePrompt("l", new_id(), ("ghost", "p")))
    await until(lambda: p.freed == ["r"])
    assert p.source.expired == 0


async def test_prompt_that_was_not_fetched_expires_and_a_late_reader_is_refused(p: Rank, d: Rank) -> None:
    p.source.begin_step(finish_order((1, 2)))
    await until(lambda: p.freed == ["r"])
    await is_idle(p)
    assert await code_of(d.load(load_order(0, (5, 6), has_direct=True))) == "grant_expired"
    assert not d.memory.any()


async def test_a_waiting_reader_keeps_a_prompt(p: Rank, d: Rank) -> None:
    p.forward(StepOrders(True), [1, 2])
    p.source.begin_step(finish_order((1, 2)))
    d.loads.keep([RemotePrompt("l", new_id(), ("p",))])
    await asyncio.sleep(3 * OPTIONS.kv_lease_duration)
    assert p.freed == []
    over = await d.load(load_order(0, (5, 6), has_direct=True))
    assert over.error is None
    await until(lambda: p.freed == ["r"])


async def test_a_reader_that_falls_silent_loses_it(p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "SILENT_S", 0.3)
    p.source.begin_step(finish_order((1, 2)))
    d.loads.keep([RemotePrompt("l", new_id(), ("p",))])
    await until(lambda: bool(p.source._sends["r"].heard_s))
    await d.loads.close()
    await until(lambda: p.freed == ["r"], within_s=1.0)


async def test_a_reader_that_did_not_run_calls_no_source_silent(d: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more engines than processors a rank stood still for 6 s, and blamed a source that had answered at once."""
    monkeypatch.setattr(loads_module, "SILENT_S", 0.2)
    telling = asyncio.ensure_future(d.loads.notify("p", Keep((new_id(),))))
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251
    assert (await telling).agent_id == "p"


@pytest.mark.parametrize("is_finished", [True, False])
async def test_a_release_frees_it_now_or_when_it_is_finished(p: Rank, d: Rank, is_finished: bool) -> None:
    if is_finished:
        p.source.begin_step(finish_order((1, 2)))
    d.loads.release(RemotePrompt("l", new_id(), ("p",)))
    if not is_finished:
        await until(lambda: bool(p.source._early._releases))
        p.source.begin_step(finish_order((1, 2)))
    await until(lambda: p.freed == ["r"], within_s=OPTIONS.kv_lease_duration / 2)  # not because its time was over
    await is_idle(p)


async def test_a_cancel_ends_it_at_both_sides(p: Rank, d: Rank) -> None:
    loading = d.load(load_order(0, (5, 6, 7), has_direct=False))
    await asyncio.sleep(0.05)
    p.source.begin_step(open_order(3))
    p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (1, 2)),)), [1, 2])
    d.loads.cancel("l")
    assert await code_of(loading) == "cancelled"
    await is_idle(d)
    await until(lambda: not p.agent.statistics().grants.alive)
    p.source.begin_step(finish_order((1, 2, 3), "d"))
    await until(lambda: p.freed == ["r"])


@pytest.mark.parametrize("is_granted", [True, False])
async def test_a_pull_may_end_before_the_call_that_began_it_returned(
    p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch, is_granted: bool
) -> None:
    pull = d.agent.pull

    def take_long(*arguments: Any, **options: Any) -> Transfer:
        transfer = pull(*arguments, **options)
        time.sleep(0.1)  # the loop goes on meanwhile
        return transfer

    for layer in range(LAYERS):
        p.write(layer, [3, 4], 1)
    p.source.begin_step(finish_order((3, 4)))
    if not is_granted:
        await until(lambda: p.freed == ["r"])
    done = d.done["l"] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(d.agent, "pull", take_long)
    assert await asyncio.to_thread(d.loads.begin, load_order(0, (5, 6), has_direct=True))
    over = await asyncio.wait_for(done, 5.0)
    assert (over.error.code if over.error else "") == ("" if is_granted else "grant_expired")
    assert (d.memory[:, [5, 6]] == p.memory[:, [3, 4]]).all() == is_granted


async def test_a_cancel_of_what_the_forward_thread_pulls_ends_it(p: Rank, d: Rank) -> None:
    loading = d.load(load_order(0, (5, 6, 7), has_direct=True))
    await until(lambda: "l" in d.loads._fetches)
    d.loads.cancel("l")
    assert await code_of(asyncio.wait_for(loading, 5.0)) == "cancelled"
    p.source.begin_step(finish_order((1, 2, 3), "d"))
    await until(lambda: p.freed == ["r"])
    await is_idle(p)
    await is_idle(d)


async def test_a_cancel_in_the_step_that_began_it_ends_it(ranks: tuple[Rank, Rank]) -> None:
    _, d = ranks
    loading = d.load(load_order(0, (5, 6, 7), has_direct=False))
    d.loads.cancel("l")
    assert await code_of(asyncio.wait_for(loading, 5.0)) == "cancelled"
    await is_idle(d)


async def test_a_request_that_comes_again_while_the_first_is_being_cancelled_ends_too(p: Rank, d: Rank) -> None:
    order = load_order(0, (5, 6), has_direct=False)
    first = d.load(order)
    p.source.begin_step(open_order(2))
    await until(lambda: bool(p.source._sends["r"].readers))
    d.loads.cancel("l")
    second = d.load(dataclasses.replace(order, request_id="again", blocks=(7, 8)))
    errors = [(await asyncio.wait_for(loading, 5.0)).error for loading in (first, second)]
    assert [error.code if error else "" for error in errors] == ["cancelled", "invalid_argument"]
    p.source.begin_step(finish_order((1, 2), "d"))
    await until(lambda: p.freed == ["r"])
    await is_idle(d)


async def test_an_engine_that_is_not_the_reader_cannot_let_go(p: Rank, d: Rank) -> None:
    p.source.begin_step(finish_order((1, 2), "other"))
    p.source.on_message("d", Release(new_id(), 0, 1))
    assert p.freed == []
    p.source.on_message("other", Release(new_id(), 0, 1))
    assert p.freed == ["r"]
    await is_idle(d)


async def test_another_prompt_is_refused(p: Rank, d: Rank) -> None:
    p.forward(StepOrders(True), [1, 2])
    p.source.begin_step(finish_order((1, 2)))
    assert await code_of(d.load(load_order(0, (5, 6), has_direct=True, content_digest=b"x" * 32))) == "incompatible"
    assert not d.memory.any()


async def test_a_prompt_of_another_length_is_refused(p: Rank, d: Rank) -> None:
    p.forward(StepOrders(True), [1, 2, 3])
    p.source.begin_step(finish_order((1, 2, 3)))
    assert await code_of(d.load(load_order(0, (5, 6), has_direct=False))) == "incompatible"
    assert not d.memory.any()


@pytest.mark.deep
async def test_a_promise_that_its_source_never_made_is_not_waited_for(p: Rank, d: Rank) -> None:
    """The request says that it was computed: its source is asked soon, and does not know it."""
    begun_s = time.monotonic()
    assert await code_of(d.load(load_order(0, (5, 6), has_direct=True))) == "grant_unknown"
    assert time.monotonic() - begun_s < OPTIONS.load_deadline_s / 2
    await is_idle(d)


async def test_a_prompt_for_another_reader_is_refused(p: Rank, d: Rank) -> None:
    p.source.begin_step(open_order(2, reader="other"))
    p.forward(StepOrders(True, chunks=(ComputedBlocks("r", (1, 2)),)), [1, 2])
    assert await code_of(d.load(load_order(0, (5, 6), has_direct=False))) == "refused"
    assert not d.memory.any()


async def test_load_from_an_unknown_source_fails_as_peer_gone(ranks: tuple[Rank, Rank]) -> None:
    _, d = ranks
    order = dataclasses.replace(load_order(0, (5, 6), has_direct=False), sources=("ghost",))
    assert await code_of(d.load(order)) == "peer_gone"
