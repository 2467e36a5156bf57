"""Engines that are cut differently: every head of every token arrives where one rank would hold it, nowhere else."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time

import numpy as np
import pytest

from kvxfer.connectors.sglang.destination import RoomSource
from kvxfer.connectors.sglang.source import RoomReader
from kvxfer.connectors.sglang.views import VIEWS_MAX
from kvxfer.errors import BlocksBusyError, IncompatibleError, InvalidArgumentError, LimitExceededError
from kvxfer.types import Lane, Role
from tests.support.sglang_core.coordinator import coordinator
from tests.support.sglang_core.cores import POISON, RECORD, Rank, introduce, new_id, options, running, until
from tests.support.sglang_core.engines import LATENT, LAYERS, Cutting, Engine, Room, aux_is_of, content, engines
from tests.support.sglang_core.held_reads import held_reads

SOURCE, TARGET = [7, 3, 12, 5, 20, 1, 9, 14], [2, 21, 8, 6, 15, 11, 4, 18]
LANES = [Lane.CMA, Lane.UNIX, Lane.STREAM]


def views(engine: Engine) -> list[int]:
    return [len(rank.core._pools.views or ()) for rank in engine.ranks]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (2, 2)])
def test_heads_arrive_where_they_are_held(tmp_path: pathlib.Path, prefill: int, decode: int, lane: Lane) -> None:
    with engines(tmp_path, Cutting(tp=prefill), Cutting(tp=decode), lanes=(lane,)) as (p, d):
        rooms = [Room(p, d, 1, 22, SOURCE, TARGET), Room(p, d, 2, 9, [0, 2, 4], [0, 1, 3])]
        for row, room in enumerate(rooms):
            room.run(aux_row=row)
        for room in rooms:
            room.wait()
        d.check(*(room.arrived for room in rooms))
        shared = max(1, decode // prefill), max(1, prefill // decode)
        assert views(p) == [0 if prefill == decode else shared[0]] * prefill
        assert views(d) == [0 if prefill == decode else shared[1]] * decode


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 1)])
@pytest.mark.parametrize(("theirs", "ours"), [(4, 8), (8, 4), (1, 16), (6, 4)])
def test_pages_of_other_sizes(tmp_path: pathlib.Path, prefill: int, decode: int, theirs: int, ours: int) -> None:
    cuttings = Cutting(tp=prefill, page_tokens=theirs), Cutting(tp=decode, page_tokens=ours)
    p = Engine.make("p", Role.PREFILL, tmp_path, cuttings[0], pages=90)
    d = Engine.make("d", Role.DECODE, tmp_path, cuttings[1], pages=90)
    with running(*p.ranks, *d.ranks):
        source, target = (list(np.random.default_rng(seed).permutation(90)) for seed in (1, 2))
        rooms = [
            Room(p, d, tokens, tokens, source[at : at + 30], target[at : at + 30])
            for at, tokens in ((0, 1), (30, 24), (60, 29))
        ]
        for row, room in enumerate(rooms):
            room.run(chunk=3, aux_row=row)
        for room in rooms:
            room.wait()
        d.check(*(room.arrived for room in rooms))


@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (2, 4), (4, 2), (4, 4)])
def test_heads_that_several_ranks_hold(tmp_path: pathlib.Path, prefill: int, decode: int) -> None:
    """A model of two heads on four ranks: replicas."""
    with engines(tmp_path, Cutting(tp=prefill, heads=2), Cutting(tp=decode, heads=2)) as (p, d):
        Room(p, d, 1, 22, SOURCE, TARGET).arrive()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_a_latent_is_read_from_one_replica_by_whole_pages(tmp_path: pathlib.Path, prefill: int, decode: int) -> None:
    latent = Cutting(heads=1, sizes=tuple(LATENT.items()))
    cuttings = [dataclasses.replace(latent, tp=tp) for tp in (prefill, decode)]
    with engines(tmp_path, *cuttings) as (p, d):
        Room(p, d, 1, 22, SOURCE, TARGET).arrive()
        assert views(p) == [0] * prefill
        given = [rank.sources.moved(1).bytes > 0 for rank in p.ranks]
        assert given == [at < decode for at in range(prefill)], "the r-th of them, round and round"


@pytest.mark.parametrize(("tp", "decode"), [(1, 1), (2, 1), (2, 4), (2, 2)])
@pytest.mark.parametrize("ours", [4, 8])
def test_layers_of_several_stages(tmp_path: pathlib.Path, tp: int, decode: int, ours: int) -> None:
    with engines(tmp_path, Cutting(pp=2, tp=tp), Cutting(tp=decode, page_tokens=ours)) as (p, d):
        Room(p, d, 1, 22, SOURCE, TARGET).arrive()
        assert d.ranks[0].destinations.received(1).bytes > 0
        pools = [pool for pool in p.ranks[0].core._pools.views._views.values()]  # type: ignore[union-attr]
        assert {pool.record.block_tokens for pool in pools} == {
            4 if (tp, ours) in ((1, 4), (2, 4)) and tp == decode else 1
        }


def test_stages_on_both_sides_need_no_view(tmp_path: pathlib.Path) -> None:
    with engines(tmp_path, Cutting(pp=2, tp=2), Cutting(pp=2, tp=2)) as (p, d):
        Room(p, d, 1, 22, SOURCE, TARGET).arrive()
        assert views(p) == views(d) == [0] * 4


def test_the_auxiliary_row_is_the_first_chosen_sources(tmp_path: pathlib.Path) -> None:
    with engines(tmp_path, Cutting(pp=2), Cutting()) as (p, d):
        room = Room(p, d, 1, 8, SOURCE, TARGET)
        for seed, rank in enumerate(p.ranks):
            rank.write(rank.aux, (3,), seed)
            rank.sources.accept(1)
        p.write(room.source, room.seed)
        transfer_id = new_id()
        d.ranks[0].destinations.begin(1, transfer_id, p.sources[::-1], room.target, 6)
        for rank in p.ranks:
            rank.sources.reader(1, RoomReader(transfer_id, "d.0", 0, len(room.target), d.cutting.shapes[0]))
        room.send(0, 2, is_last=True, aux_row=3)
        room.wait()
        assert aux_is_of(d, p.ranks[1], 3, 6)
        d.check(room.arrived)


def test_a_prefix_that_decode_has_is_not_sent(tmp_path: pathlib.Path) -> None:
    """``first`` counts from what decode wants, in pages of the source."""
    with engines(tmp_path, Cutting(tp=2, page_tokens=4), Cutting(page_tokens=8)) as (p, d):
        room = Room(p, d, 1, 24, SOURCE, TARGET)
        p.write(room.source, room.seed)
        room.begin()
        room.send(0, 1, is_last=False)
        room.send(1, 5, is_last=False)
        room.send(5, 6, is_last=True)
        room.wait()
        d.check(room.arrived)


@pytest.mark.parametrize(("theirs", "ours", "lead"), [(16, 4, 4), (16, 4, 12), (8, 1, 7), (6, 4, 2)])
@pytest.mark.parametrize("decode", [1, 2])
def test_a_prefix_that_ends_within_a_page_of_the_source(
    tmp_path: pathlib.Path, theirs: int, ours: int, lead: int, decode: int
) -> None:
    """SGLang's prefill engine sends from the start of that page on."""
    tokens = 2 * theirs + 1
    with engines(tmp_path, Cutting(page_tokens=theirs), Cutting(tp=decode, page_tokens=ours)) as (p, d):
        source, target = SOURCE[: p.pages_for(tokens)], list(range(d.pages_for(tokens - lead)))
        p.write(source, 1)
        p.ranks[0].sources.accept(1)
        for rank, shape in zip(d.ranks, d.cutting.shapes, strict=True):
            transfer_id = new_id()
            rank.destinations.begin(1, transfer_id, p.sources, target, 0)
            reader = RoomReader(transfer_id, rank.name, rank.rank, len(target), shape, lead)
            p.ranks[0].sources.reader(1, reader)
        p.ranks[0].sources.send(1, 0, [], is_last=False)
        for at in range(len(source)):
            is_last = at == len(source) - 1
            p.ranks[0].sources.send(1, at, source[at : at + 1], is_last=is_last, aux_row=0 if is_last else None)
        p.ranks[0].wait("sent", 1)
        model = content(1, p.cutting)
        given = min(len(source) * theirs - lead, len(target) * ours)
        for rank, shape in zip(d.ranks, d.cutting.shapes, strict=True):
            rank.wait("done", 1)
            for array, layer, part in zip(rank.kv, shape.layers, shape.parts, strict=True):
                held = model[layer, part][lead : lead + given, shape.heads.start : shape.heads.stop]
                expected = np.full(array.size, POISON, np.uint8)
                expected[: held.size] = held.reshape(-1)
                assert (array.reshape(-1) == expected).all()


@pytest.mark.parametrize(("theirs", "ours", "lead"), [(4, 4, 1), (8, 4, 8), (8, 4, 1 << 40)])
def test_a_lead_that_cannot_be_is_refused(tmp_path: pathlib.Path, theirs: int, ours: int, lead: int) -> None:
    with engines(tmp_path, Cutting(page_tokens=theirs), Cutting(page_tokens=ours)) as (p, d):
        transfer_id = new_id()
        p.ranks[0].sources.accept(1)
        d.ranks[0].destinations.begin(1, transfer_id, p.sources, (1, 2), 0)
        p.ranks[0].sources.reader(1, RoomReader(transfer_id, "d.0", 0, 2, d.cutting.shapes[0], lead))
        assert d.ranks[0].wait("failed", 1)[2] == "protocol"
        p.ranks[0].sources.clear(1)


def test_share_registers_views_in_advance(tmp_path: pathlib.Path) -> None:
    with engines(tmp_path, Cutting(), Cutting(tp=2)) as (p, d):
        for shape in d.cutting.shapes:
            p.ranks[0].core.share(shape)
        p.ranks[0].core.share(None)
        assert views(p) == [2]
        with pytest.raises(IncompatibleError, match="total_heads"):
            p.ranks[0].core.share(Cutting(heads=8).shapes[0])
        introduce(*p.ranks, *d.ranks)
        Room(p, d, 1, 22, SOURCE, TARGET).arrive()
        assert views(p) == [2]


def test_share_that_no_source_has_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    with engines(tmp_path, Cutting(pp=2, tp=2), Cutting()) as (p, d):
        rooms = d.ranks[0].destinations
        for sources, field in ((p.sources[:2], "layers"), (p.sources[1:], "heads"), (p.sources[::2], "heads")):
            with pytest.raises(IncompatibleError, match=field) as caught:
                rooms.begin(1, new_id(), sources, (1, 2), 0)
            assert caught.value.field == field
        for other, field in ((Cutting(heads=8), "total_heads"), (Cutting(sizes=(("k", 24),)), "parts")):
            with pytest.raises(IncompatibleError, match=field):
                rooms.begin(1, new_id(), [RoomSource("p.0", 0, other.shapes[0])], (1, 2), 0)
        with pytest.raises(IncompatibleError, match="head_bytes of v of layer 0: 16 here, 17 there"):
            rooms.begin(1, new_id(), [RoomSource("p.0", 0, Cutting(sizes=(("k", 24), ("v", 17))).shapes[0])], (1, 2), 0)
        with pytest.raises(InvalidArgumentError, match="shape"):
            rooms.begin(1, new_id(), [p.sources[0], ("p.1", 1)], (1, 2), 0)
        for twice in (p.sources[0], p.sources[1]._replace(rank=0), None):
            with pytest.raises(InvalidArgumentError, match="each agent and rank once"):
                rooms.begin(1, new_id(), [p.sources[0], twice] if twice else [], (1, 2), 0)
        rooms.begin(1, new_id(), p.sources, (1, 2), 0)  # nothing was left behind
        rooms.abort(1, "")
        d.ranks[0].wait("failed", 1)


def test_a_source_that_gives_less_than_its_share_fails_the_room(tmp_path: pathlib.Path) -> None:
    with engines(tmp_path, Cutting(tp=2), Cutting()) as (p, d):
        room = Room(p, d, 1, 22, SOURCE, TARGET)
        room.begin()
        p.ranks[0].sources.send(1, 0, room.source, is_last=True, aux_row=0)
        p.ranks[1].sources.send(1, 0, room.source[:-1], is_last=True, aux_row=0)
        _, _, code, text = d.ranks[0].wait("failed", 1)
        assert code == "protocol"
        assert "heads 2-3 of 4" in text
        assert "20 of 24" in text
        for rank in p.ranks:
            rank.wait("unsent", 1)


def test_a_source_that_is_asked_for_what_it_does_not_hold_says_so(tmp_path: pathlib.Path) -> None:
    with engines(tmp_path, Cutting(tp=2), Cutting(tp=2)) as (p, d):
        p.ranks[0].sources.accept(1)
        transfer_id = new_id()
        d.ranks[1].destinations.begin(1, transfer_id, [("p.0", 0, d.cutting.shapes[1])], (1,), 0)  # type: ignore[list-item]
        p.ranks[0].sources.reader(1, RoomReader(transfer_id, "d.1", 1, 1, d.cutting.shapes[1]))
        _, _, code, text = d.ranks[1].wait("failed", 1)
        assert code == "incompatible"
        assert "heads: 0-1 here, 2-3 there" in text
        p.ranks[0].sources.clear(1)


def test_a_source_that_holds_something_else_than_it_says_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    """Decode takes it for a rank of two; it is the whole model's, and is told of another reader."""
    with engines(tmp_path, Cutting(), Cutting(tp=4)) as (p, d):
        p.ranks[0].sources.accept(1)
        transfer_id = new_id()
        d.ranks[1].destinations.begin(1, transfer_id, p.sources, (1,), 0)
        p.ranks[0].sources.reader(1, RoomReader(transfer_id, "d.1", 1, 1, d.cutting.shapes[2]))
        p.ranks[0].sources.send(1, 0, (7,), is_last=True, aux_row=0)
        _, _, code, text = d.ranks[1].wait("failed", 1)
        assert code == "incompatible"
        assert "axes" in text
        d.check()


@pytest.mark.parametrize("prefill", [1, 2])
def test_a_source_that_keeps_a_token_otherwise_is_refused_by_name(tmp_path: pathlib.Path, prefill: int) -> None:
    """Each is told that the other is cut as itself; blocks are of equal size, and mean something else."""
    swapped = Cutting(sizes=(("k", 16), ("v", 24)))
    with engines(tmp_path, Cutting(tp=prefill), swapped) as (p, d):
        transfer_id = new_id()
        shapes = dataclasses.replace(swapped, tp=prefill).shapes
        sources = [source._replace(shape=shape) for source, shape in zip(p.sources, shapes, strict=True)]
        d.ranks[0].destinations.begin(1, transfer_id, sources, (1,), 0)
        for rank in p.ranks:
            rank.sources.accept(1)
            rank.sources.reader(1, RoomReader(transfer_id, "d.0", 0, 1, Cutting().shapes[0]))
            rank.sources.send(1, 0, (7,), is_last=True, aux_row=0)
        _, _, code, text = d.ranks[0].wait("failed", 1)
        assert (code, "packing" in text) == ("incompatible", True), text
        d.check()


def test_other_weights_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    p = Engine.make("p", Role.PREFILL, tmp_path, Cutting(tp=2))
    d = Engine.make("d", Role.DECODE, tmp_path, Cutting(), record=dataclasses.replace(RECORD, weights_fingerprint="w9"))
    with running(*p.ranks, *d.ranks):
        Room(p, d, 1, 22, SOURCE, TARGET).run()
        _, _, code, text = d.ranks[0].wait("failed", 1)
        assert (code, "weights_fingerprint" in text) == ("incompatible", True)
        d.check()
        d.ranks[0].core.describe(RECORD)  # they are the same after all; views are described too
        time.sleep(0.1)
        Room(p, d, 2, 22, SOURCE, TARGET).arrive()


@pytest.mark.parametrize("side", ["prefill", "decode", "one source"])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 2)])
def test_an_abort_midway_drains_everything(tmp_path: pathlib.Path, prefill: int, decode: int, side: str) -> None:
    with engines(tmp_path, Cutting(tp=prefill), Cutting(tp=decode)) as (p, d), contextlib.ExitStack() as stack:
        room = Room(p, d, 1, 22, SOURCE, TARGET)
        p.write(room.source, room.seed)
        release = [stack.enter_context(held_reads(rank)) for rank in d.ranks]
        room.begin()
        room.send(0, 3, is_last=False)
        until(lambda: all(rank.core.statistics().agent.outcomes for rank in d.ranks))
        for rank in d.ranks if side == "decode" else p.ranks if side == "prefill" else p.ranks[:1]:
            (rank.destinations if side == "decode" else rank.sources).abort(1, "enough")
        if side == "prefill":
            assert all(rank.core._pools.ledger.is_idle for rank in p.ranks), "its pages are free at once"  # type: ignore[union-attr]
        touched = d.ranks[:1] if (prefill, side) == (4, "one source") else d.ranks
        time.sleep(0.3)
        for rank in touched:
            assert not rank.destinations.is_drained(1), "its reads are under way"
            assert rank.none("failed")
            with pytest.raises(BlocksBusyError, match="filled by another room"):
                rank.destinations.begin(2, new_id(), p.sources, room.target[:1], 1)
        for let in release:
            let()
        for rank in touched:
            assert rank.wait("failed", 1)[2] in ("cancelled", "grant_revoked", "grant_released")
            assert rank.destinations.is_drained(1)
        for rank in (*p.ranks, *d.ranks):
            rank.sources.abort(1, "all of it")
            rank.destinations.abort(1, "all of it")
        until(lambda: p.is_free and d.is_free)
        room.clear()
        again = Room(p, d, 3, 22, SOURCE, TARGET)
        again.run()
        again.wait()
        d.check(again.arrived)


def test_one_source_of_several_that_leaves_fails_the_room_on_all(tmp_path: pathlib.Path) -> None:
    p = Engine.make("p", Role.PREFILL, tmp_path, Cutting(tp=2))
    d = Engine.make("d", Role.DECODE, tmp_path, Cutting())
    with running(*p.ranks, *d.ranks):
        room = Room(p, d, 1, 22, SOURCE, TARGET)
        p.write(room.source, room.seed)
        room.begin()
        room.send(0, 3, is_last=False)
        until(lambda: d.ranks[0].destinations.received(1).bytes == 2 * 12 * 2 * 40 * LAYERS)
        p.ranks[1].core.stop()
        assert d.ranks[0].wait("failed", 1, 4.0)[2] in ("peer_gone", "grant_revoked", "closed")
        assert d.ranks[0].destinations.is_drained(1)
        p.ranks[0].wait("unsent", 1, 1.0)
        until(lambda: p.ranks[0].core._pools.ledger.is_idle and d.is_free)  # type: ignore[union-attr]


def test_a_page_is_not_given_while_it_is_filled(tmp_path: pathlib.Path) -> None:
    """One rank that reads and gives, through pools whose ledgers know nothing of each other."""
    with engines(tmp_path, Cutting(), Cutting(tp=2)) as (p, d):
        both, other = p.ranks[0], d.ranks[0]
        both.destinations.begin(1, new_id(), d.sources, (5, 6), 0)
        both.sources.accept(2)
        both.sources.reader(2, RoomReader(new_id(), other.name, 0, 2, d.cutting.shapes[0]))
        both.sources.send(2, 0, (6, 7), is_last=True, aux_row=1)
        assert both.wait("unsent", 2)[2:] == ("blocks_busy", "page 6 is filled by a room")
        both.destinations.abort(1, "")
        both.wait("failed", 1)
        both.sources.accept(3)
        both.sources.reader(3, RoomReader(new_id(), other.name, 0, 2, d.cutting.shapes[0]))
        both.sources.send(3, 0, (6, 7), is_last=True, aux_row=1)
        with pytest.raises(BlocksBusyError, match="page 7 is given by a room"):
            both.destinations.begin(4, new_id(), d.sources, (8, 7), 0)
        both.sources.abort(3, "")
        both.destinations.begin(4, new_id(), d.sources, (8, 7), 0)
        both.destinations.clear(4)


def test_one_page_is_given_to_several_rooms(tmp_path: pathlib.Path) -> None:
    """A prefix that prompts share, and that readers of both kinds take."""
    with engines(tmp_path, Cutting(), Cutting(tp=2)) as (p, d):
        whole = Engine.make("e", Role.DECODE, tmp_path, Cutting())
        with running(*whole.ranks):
            introduce(*p.ranks, *whole.ranks)
            rooms = [Room(p, d, 1, 8, [3, 9], [1, 2], 5), Room(p, whole, 2, 8, [3, 9], [4, 0], 5)]
            for row, room in enumerate(rooms):
                room.run(aux_row=row)
            for room in rooms:
                room.wait()
            d.check(rooms[0].arrived)
            whole.check(rooms[1].arrived)


def test_state_components_are_not_shared_out(tmp_path: pathlib.Path) -> None:
    with engines(tmp_path, Cutting(tp=2), Cutting(), states=1) as (p, d):
        with pytest.raises(IncompatibleError, match="states"):
            d.ranks[0].destinations.begin(1, new_id(), p.sources, (1,), 0, states=[(1,)])
        room = Room(p, d, 2, 8, SOURCE, TARGET)
        room.run()
        room.wait()


def test_views_are_bounded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.connectors.sglang.views.VIEWS_MAX", 1)
    assert VIEWS_MAX < 64
    with engines(tmp_path, Cutting(), Cutting(tp=2)) as (p, d):
        p.ranks[0].core._pools.cut(d.cutting.shapes[0])
        p.ranks[0].core._pools.cut(d.cutting.shapes[0])
        with pytest.raises(LimitExceededError, match="VIEWS_MAX=1"):
            p.ranks[0].core._pools.cut(d.cutting.shapes[1])
        transfer_id = new_id()
        p.ranks[0].sources.accept(1)
        d.ranks[1].destinations.begin(1, transfer_id, p.sources, (1,), 0)
        p.ranks[0].sources.reader(1, RoomReader(transfer_id, "d.1", 1, 1, d.cutting.shapes[1]))
        assert d.ranks[1].wait("failed", 1)[2] == "limit_exceeded"
        p.ranks[0].sources.clear(1)


def test_metadata_older_than_a_view_is_replaced(tmp_path: pathlib.Path) -> None:
    """Adapters hand over the metadata that they had first, again and again."""
    with engines(tmp_path, Cutting(tp=2), Cutting()) as (p, d):
        old = {rank.name: rank.core.export_metadata() for rank in p.ranks}
        for number in (1, 2):
            room = Room(p, d, number, 22, SOURCE, TARGET)
            room.arrive()
            room.clear()
            for name, metadata in old.items():
                d.ranks[0].core.add_remote_agent(metadata, name)


def test_views_by_a_coordinator(tmp_path: pathlib.Path) -> None:
    token_file = pathlib.Path(options(tmp_path).token_file)
    with (
        coordinator(token_file) as address,
        engines(tmp_path, Cutting(tp=2), Cutting(), coordinator=address) as (p, d),
    ):
        for number in (1, 2):
            room = Room(p, d, number, 22, SOURCE, TARGET)
            room.arrive()
            room.clear()


def test_a_rank_without_a_shape_says_so(tmp_path: pathlib.Path) -> None:
    chosen = options(tmp_path)
    p, d = Rank("p", Role.PREFILL, chosen), Rank("d", Role.DECODE, chosen, shape=Cutting().shapes[0])
    with running(p, d):
        with pytest.raises(IncompatibleError, match="shape"):
            p.destinations.begin(1, new_id(), [RoomSource("d", 0, Cutting().shapes[0])], (1,), 0)
        d.destinations.begin(1, new_id(), [("p", 0)], (1,), 0)
        p.sources.accept(1)
        p.sources.reader(1, RoomReader(new_id(), "d", 0, 1, Cutting().shapes[0]))
        assert d.wait("failed", 1)[2] == "incompatible"
        p.sources.clear(1)
