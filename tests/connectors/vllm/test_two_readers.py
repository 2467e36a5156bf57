"""One prompt that was promised to no engine, and two engines that come for it (a router's retry): exactly one gets it,
whatever the order of their messages, and the other is told why and can end nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

import pytest

from kvxfer.connectors.vllm import pending_send as pending_send_module
from kvxfer.connectors.vllm import source as source_module
from kvxfer.connectors.vllm.params import DecodeLeg, handed_over, parse
from kvxfer.connectors.vllm.steps import LoadOrder
from kvxfer.connectors.vllm.wire import Ask, Claim, Claimed, Keep, Refuse, Release
from tests.support.vllm_connector.orders import Reader, Script, Table, interleavings, run
from tests.support.vllm_connector.pair import LAYERS, OPTIONS, engines_of, finish_order, load_order, new_id, until

Way = Callable[[Reader], Script]
TURNS = 5
"""Of each reader, in every order; what is left comes one by one. It has come first, or not, by then."""


def outcomes_of(ways: tuple[Way, Way], order: tuple[int, ...], finish_at: int, stores: int) -> tuple[list[str], Table]:
    table = Table(stores)
    scripts = [way(Reader(table, name, number)) for way, name, number in zip(ways, "de", (1, 2), strict=True)]
    turns = [*order[:finish_at], 2, *order[finish_at:]]
    return run(table, [*scripts, table.finishing()], turns)[:2], table


@pytest.mark.parametrize("stores", [1, 2])
@pytest.mark.parametrize("finish_at", [0, 1, 4], ids=["computed", "while one waits", "while both wait"])
@pytest.mark.parametrize(
    "ways",
    [(Reader.direct, Reader.direct), (Reader.direct, Reader.ask), (Reader.ask, Reader.ask)],
    ids=["both pull", "one pulls, one asks", "both ask"],
)
def test_of_two_readers_exactly_one_commits(ways: tuple[Way, Way], finish_at: int, stores: int) -> None:
    for order in interleavings([TURNS, TURNS]):
        outcomes, table = outcomes_of(ways, order, finish_at, stores)
        lost = [outcome for outcome in outcomes if outcome != "committed"]
        assert len(lost) == 1, (order, outcomes)
        assert lost[0] in ("refused", "grant_released"), (order, outcomes)  # the latter where the first was through
        assert table.freed == ["r"], (order, outcomes)
        assert not table.agent.table.counts().alive


@pytest.mark.parametrize("stores", [1, 2])
@pytest.mark.parametrize("way", [Reader.direct, Reader.ask])
@pytest.mark.parametrize("finish_at", [0, 1, 4])
def test_one_that_quits_takes_nothing_from_one_that_comes(way: Way, finish_at: int, stores: int) -> None:
    """A reader that was first to say that it wants nothing had the prompt: then it is gone, by name."""
    for order in interleavings([TURNS, 2]):
        outcomes, _ = outcomes_of((way, Reader.quit), order, finish_at, stores)
        has_quit_before = order[:2] == (1, 1) and finish_at <= 2
        assert outcomes[0] == ("grant_released" if has_quit_before else "committed"), (order, outcomes)


@pytest.mark.parametrize("way", [Reader.direct, Reader.ask])
def test_one_that_dies_ends_only_what_was_its_own(way: Way) -> None:
    for order in interleavings([TURNS, 2]):
        outcomes, table = outcomes_of((way, Reader.die), order, 0, 2)
        assert outcomes[0] in ("committed", "refused", "peer_gone", "grant_released", "grant_revoked"), (
            order,
            outcomes,
        )
        is_second = order.index(0) < order.index(1)
        assert not is_second or outcomes[0] == "committed", (order, outcomes)
        assert table.freed == ["r"], (order, outcomes)


# --- single messages ---


def bound_to_d(table: Table) -> None:
    table.finish()
    table.source.on_message("d", Ask(new_id(), 0, 0, 1, 0, 0, LAYERS, is_early=False))


@pytest.mark.parametrize(
    "message",
    [
        Release(new_id(), 0, 1),
        Release(new_id(), 1, 2),
        Keep((new_id(),)),
        Ask(new_id(), 0, 0, 1, 0, 0, LAYERS, is_early=True),
        Ask(new_id(), 0, 3, 1, 0, 0, LAYERS, is_early=False),
        Ask(new_id(), 1, 0, 9, 0, 0, LAYERS, is_early=False),
        Claim(new_id(), 1, is_early=True),
    ],
    ids=repr,
)
def test_messages_of_another_engine_change_nothing(message: Release | Keep | Ask | Claim) -> None:
    table = Table()
    bound_to_d(table)
    (send,) = table.source._sends.values()
    before = (dict(send.readers), set(send.released), send.readers_expected, dict(send.heard_s))
    alive = table.agent.table.counts().alive
    table.source.on_message("e", message)
    assert (dict(send.readers), set(send.released), send.readers_expected, dict(send.heard_s)) == before
    assert (table.freed, table.agent.table.counts().alive) == ([], alive)
    codes = [told.code for told in table.agent.told.get("e", []) if isinstance(told, (Refuse, Claimed))]
    assert codes == (["refused"] if isinstance(message, (Ask, Claim)) else [])


def test_a_repeated_ask_of_another_engine_is_answered() -> None:
    """Not taken for a repeat of the reader's own, which would leave it waiting for its deadline."""
    table = Table()
    bound_to_d(table)
    table.source.on_message("e", Ask(new_id(), 0, 0, 1, 0, 0, LAYERS, is_early=False))
    (refusal,) = table.agent.told["e"]
    assert isinstance(refusal, Refuse)
    assert (refusal.code, refusal.text) == ("refused", "that prompt is promised to another engine")


def test_silence_of_one_that_only_waited_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    table.source.on_message("e", Keep((new_id(),)))
    table.finish()
    table.source.on_message("e", Keep((new_id(),)))
    reader = Reader(table, "d", 1)
    reader.pull(0, 0)
    later_s = time.monotonic() + source_module.SILENT_S + OPTIONS.kv_lease_duration
    monkeypatch.setattr(source_module.time, "monotonic", lambda: later_s)
    table.source.sweep()
    assert table.freed == []
    assert table.agent.table.counts().alive == 2


def test_a_reader_is_not_taken_for_silent_where_this_process_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    bound_to_d(table)
    table.source.on_message("d", Keep((new_id(),)))
    (send,) = table.source._sends.values()
    began_s = now_s = time.monotonic()
    send.heard_s = {"d": now_s}
    gone: list[str] = []
    monkeypatch.setattr(table.source, "_reader_gone", lambda _, why: gone.append(why))
    monkeypatch.setattr(source_module.time, "monotonic", lambda: now_s)
    table.source.sweep()
    now_s += 60.0
    table.source.sweep()
    assert not gone
    while not gone:
        now_s += source_module.SWEEP_S
        table.source.sweep()
    assert now_s - began_s - 60.0 == pytest.approx(source_module.SILENT_S, abs=0.3)
    assert "said nothing" in gone[0]


def test_a_claim_is_won_by_the_engine_that_came_first_also_once_it_is_through() -> None:
    table = Table()
    table.finish()
    for name, rank in (("d.1", 1), ("e.1", 1), ("d.2", 2)):
        table.source.on_message(name, Claim(new_id(), rank, is_early=True))
    assert [told.code for name in ("d.1", "e.1", "d.2") for told in table.agent.told[name]] == ["", "refused", ""]
    table.source.on_message("d", Release(new_id(), 0, 1))
    assert table.freed == ["r"]
    for name, rank in (("d.1", 1), ("e.1", 1)):
        table.source.on_message(name, Claim(new_id(), rank, is_early=True))
    assert [table.agent.told[name][1].code for name in ("d.1", "e.1")] == ["", "grant_released"]


def test_engines_whose_names_are_alike_are_told_apart() -> None:
    """An engine may be called as another's rank would be."""
    table = Table()
    bound_to_d(table)
    table.source.on_message("d.1", Release(new_id(), 0, 1))
    assert table.freed == []
    assert pending_send_module.engine_of("d.1", 1) == "d"
    assert pending_send_module.engine_of("d.1", 0) == "d.1"


# --- over real agents ---


@pytest.mark.parametrize("stores", [1, 2])
@pytest.mark.parametrize("how", ["loop", "thread"])
@pytest.mark.parametrize("firsts", [(0, 0), (0, 1)], ids=["alike", "one has the beginning"])
async def test_two_engines_with_one_answer(stores: int, how: str, firsts: tuple[int, int]) -> None:
    async with engines_of(OPTIONS, ("p", "d", "e"), stores=stores, how=how) as made:
        p = made["p"]
        p.forward(finish_order((3, 4, 9)), [3, 4, 9], 5)
        blocks = [(7, 1, 2)[first:] for first in firsts]
        loads = [
            made[name].load(load_order(first, some, has_direct=True))
            for name, first, some in zip("de", firsts, blocks, strict=True)
        ]
        overs = await asyncio.wait_for(asyncio.gather(*loads), 10.0)
        errors = [over.error for over in overs]
        assert errors.count(None) == 1, errors
        assert next(error.code for error in errors if error is not None) in ("refused", "grant_released")
        winner = errors.index(None)
        first, memory = firsts[winner], made["de"[winner]].memory
        assert (memory[:, list(blocks[winner])] == p.memory[:, [3, 4, 9][first:]]).all()
        await until(lambda: p.freed == ["r"])


@pytest.mark.parametrize("attempt", range(3))
async def test_two_engines_of_two_ranks_with_one_answer(attempt: int) -> None:
    """Each rank of the source sees only one rank of each: the first rank says whose the prompt is."""
    async with engines_of(OPTIONS, ("p", "d", "e"), ranks=2) as made:
        for name in ("p", "p.1"):
            made[name].forward(finish_order((3, 4, 9)), [3, 4, 9], 5)
        answer = handed_over(new_id(), ("p", "p.1"), "r", 3)
        answer["kvxfer"]["open"] = False  # what a client says of it is not believed
        leg = parse(answer)
        assert isinstance(leg, DecodeLeg)
        order = dataclasses.replace(load_order(0, (7, 1, 2), has_direct=True), sources=leg.sources, is_open=leg.is_open)
        names = ["d", "e", "e.1", "d.1"] if attempt % 2 else ["e.1", "d", "d.1", "e"]
        overs = dict(zip(names, await asyncio.gather(*(made[name].load(order) for name in names)), strict=True))
        outcomes = {engine: {overs[engine].error is None, overs[f"{engine}.1"].error is None} for engine in "de"}
        assert sorted(outcomes.values(), key=str) == [{False}, {True}], overs
        for name in ("p", "p.1"):
            await until(lambda name=name: made[name].freed == ["r"])
        winner = "d" if True in outcomes["d"] else "e"
        for rank in ("", ".1"):
            read, held = made[winner + rank].memory, made["p" + rank].memory
            assert (read[:, [7, 1, 2]] == held[:, [3, 4, 9]]).all()


async def test_a_rank_lets_go_only_of_what_its_engine_has_won() -> None:
    async with engines_of(OPTIONS, ("p", "d", "e"), ranks=2) as made:
        for name in ("p", "p.1"):
            made[name].forward(finish_order((3, 4, 9)), [3, 4, 9], 5)
        order: LoadOrder = dataclasses.replace(
            load_order(0, (7, 1, 2), has_direct=True), sources=("p", "p.1"), is_open=True
        )
        assert (await made["d"].load(order)).error is None
        made["e.1"].loads._let_go(order)
        over = await made["d.1"].load(order)
        assert over.error is None
