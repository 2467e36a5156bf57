"""Registered memory: elements read from, and written into, another core's regions, over every lane of one host."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.errors import BlocksBusyError, InvalidArgumentError, LaneUnavailableError, PeerGoneError
from tests.support.native.nodes import NewId

MAPPED, STREAM, CMA, UNIX = native.Lane.MAPPED, native.Lane.STREAM, native.Lane.CMA, native.Lane.UNIX
COMMITTED, FAILED, CANCELLED = (
    native.TransferState.COMMITTED,
    native.TransferState.FAILED,
    native.TransferState.CANCELLED,
)
POISON = 0xEE
each_lane = pytest.mark.parametrize("lane", [MAPPED, CMA, UNIX, STREAM], ids=["mapped", "cma", "unix", "stream"])
each_verb = pytest.mark.parametrize("verb", ["fetch", "push"])


def spans(rows: Any, ids: Any) -> list[tuple[int, int, int]]:
    """(region, offset, length) of each chosen element: what ranges mean, written the slow way."""
    elements = [(int(r), int(o) + i * int(s), int(n)) for r, o, s, n, count in rows for i in range(int(count))]
    return [elements[int(i)] for i in ids]


def check_moved(source: Any, target: Any, moves: list[tuple[tuple[int, int, int], tuple[int, int, int]]]) -> None:
    """Every byte of the targets: moved ones are the source's, all others are the poison they were."""
    expected = {key: np.full(region.memory.size, POISON, np.uint8) for key, region in target.items()}
    for (from_region, from_offset, length), (to_region, to_offset, to_length) in moves:
        assert length == to_length
        got = source[from_region].memory[from_offset : from_offset + length]
        expected[to_region][to_offset : to_offset + length] = got
    for key, region in target.items():
        assert np.array_equal(region.memory, expected[key])


def regions_of(node: Any, count: int, nbytes: int, *, seed: int | None, **options: Any) -> dict[int, Any]:
    made = [node.register(nbytes, **options) for _ in range(count)]
    for index, region in enumerate(made):
        if seed is None:
            region.memory[:] = POISON
        else:
            region.memory[:] = np.random.default_rng(seed + index).integers(0, 256, nbytes, dtype=np.uint8)
    return {region.id: region for region in made}


def irregular(regions: dict[int, Any], lengths: Any, rng: Any) -> list[tuple[int, int, int, int, int]]:
    """One element a row, of the given lengths, scattered over the regions; some of them touch."""
    rows, ends = [], dict.fromkeys(regions, 0)
    for length in lengths:
        region = int(rng.choice(list(regions)))
        offset = ends[region] + int(rng.choice([0, 0, 1, 63]))
        ends[region] = offset + int(length)
        rows.append((region, offset, int(length), int(length), 1))
    return rows


@each_lane
@each_verb
def test_irregular_elements(p: Any, d: Any, new_id: NewId, lane: native.Lane, verb: str) -> None:
    rng = np.random.default_rng(7)
    lengths = rng.integers(1, 9000, 700)
    options = {"is_foreign": lane != MAPPED}
    own, other = (p, d) if verb == "push" else (d, p)
    source_regions = regions_of(own if verb == "push" else other, 3, 4 << 20, seed=1, **options)
    target_regions = regions_of(other if verb == "push" else own, 2, 6 << 20, seed=None)
    source_rows, target_rows = irregular(source_regions, lengths, rng), irregular(target_regions, lengths, rng)
    order = rng.permutation(700)[:600]
    local, remote = (source_rows, target_rows) if verb == "push" else (target_rows, source_rows)
    transfer = new_id()
    own.post(verb, transfer, other, local, remote, ids=(order, order), lanes=[lane])
    final = own.wait_drained(transfer)
    assert (final.state, final.code, final.lane) == (COMMITTED, native.Code.ok, lane), final.text
    check_moved(
        source_regions, target_regions, list(zip(spans(source_rows, order), spans(target_rows, order), strict=True))
    )
    assert own.core.transfer_state(transfer) == COMMITTED
    reader = other if verb == "push" else own
    moved = reader.core.statistics()
    counted = {
        MAPPED: moved.bytes_mapped,
        CMA: moved.bytes_cma,
        UNIX: moved.bytes_streamed_in,
        STREAM: moved.bytes_streamed_in,
    }
    assert counted[lane] == int(lengths[order].sum())
    deadline = time.monotonic() + 10
    while not (own.is_idle() and other.is_idle()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert own.is_idle()
    assert other.is_idle()


@each_lane
@each_verb
def test_rows_against_tables(p: Any, d: Any, new_id: NewId, lane: native.Lane, verb: str) -> None:
    """Strided on one side, single elements on the other, enough for several reads; indices repeat on the source
    only."""
    rng = np.random.default_rng(8)
    count, size = 3000, 4096
    source, target = (p, d)
    source_regions = regions_of(source, 2, 2 * count * size, seed=3)
    target_regions = regions_of(target, 1, count * size + 5, seed=None)
    a, b = source_regions
    (t,) = target_regions
    strided = [(a, 10, 8000, size, count // 2), (b, 0, size, size, count // 2)]
    table = [(t, 5 + int(i) * size, size, size, 1) for i in rng.permutation(count)]
    indices = rng.integers(0, count, count)
    everything = np.arange(count)
    transfer = new_id()
    if verb == "push":
        p.push(transfer, d, strided, table, ids=(indices, everything), lanes=[lane])
        final = p.wait_drained(transfer)
    else:
        d.fetch(transfer, p, table, strided, ids=(everything, indices), lanes=[lane])
        final = d.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, lane), final.text
    assert final.blocks_done == count
    check_moved(
        source_regions, target_regions, list(zip(spans(strided, indices), spans(table, everything), strict=True))
    )


@each_lane
@each_verb
@pytest.mark.parametrize("wants_checksums", [False, True], ids=["plain", "checksums"])
def test_sums_and_notification(
    p: Any, d: Any, new_id: NewId, lane: native.Lane, verb: str, wants_checksums: bool
) -> None:
    """The notification comes once the bytes are committed at the peer, and never before."""
    own, other = (p, d) if verb == "push" else (d, p)
    size, count = 100_003, 40
    (source,) = regions_of(p, 1, size * count, seed=5).values()
    (target,) = regions_of(d, 1, size * count, seed=None).values()
    rows = {region.id: [(region.id, 0, size, size, count)] for region in (source, target)}
    local, remote = (source, target) if verb == "push" else (target, source)
    for round_ in range(3):
        target.memory[:] = POISON
        transfer = new_id()
        note = b"%d" % round_
        own.post(
            verb,
            transfer,
            other,
            rows[local.id],
            rows[remote.id],
            lanes=[lane],
            notification=note,
            wants_checksums=wants_checksums,
        )
        told = other.wait_for(native.NotifReceived, payload=note)
        assert told.sender == own.ref
        assert (told.seq == 0) == (verb == "push")
        assert target.memory.tobytes() == source.memory.tobytes()
        if verb == "push":
            (offer,) = other.find(native.OfferEnded)[round_:]
            assert (offer.sender, offer.state, offer.bytes) == (own.ref, COMMITTED, size * count)
        assert own.wait_drained(transfer).state == COMMITTED
    assert other.core.statistics().checksum_failures == own.core.statistics().checksum_failures == 0


def test_one_round_trip_on_a_known_region(p: Any, d: Any, new_id: NewId) -> None:
    """The second read of a mapped region is done with two frames out and no more MAP."""
    (source,) = regions_of(p, 1, 1 << 16, seed=5).values()
    (target,) = regions_of(d, 1, 1 << 16, seed=None).values()
    for _ in range(5):
        transfer = new_id()
        d.fetch(transfer, p, [(target.id, 0, 64, 64, 10)], [(source.id, 64, 64, 64, 10)], lanes=[MAPPED])
        assert d.wait_drained(transfer).state == COMMITTED
    assert d.core.statistics().mappings == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda own, other: ([(own, 0, 64, 64, 2)], [(other, 0, 64, 64, 3)]),
        lambda own, other: ([(own, 0, 64, 64, 1)], [(other, 0, 65, 65, 1)]),
        lambda own, other: ([(own, 4033, 64, 64, 1)], [(other, 0, 64, 64, 1)]),
        lambda own, other: ([(own, 0, 64, 64, 65)], [(other, 0, 64, 64, 65)]),
        lambda own, other: ([(own + 77, 0, 64, 64, 1)], [(other, 0, 64, 64, 1)]),
    ],
    ids=["count", "length", "end", "row-end", "unknown"],
)
@each_verb
def test_own_mistakes(p: Any, d: Any, new_id: NewId, verb: str, make: Any) -> None:
    own, other = p.register(4096), d.register(1 << 20)
    local, remote = make(own.id, other.id)
    with pytest.raises(InvalidArgumentError):
        p.post(verb, new_id(), d, local, remote)
    assert p.is_idle()


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((0, 5), np.uint64),
        [[1, 0, 0, 0, 1]],
        [[1, 0, 64, 64, 0]],
        [[1, 0, 63, 64, 2]],
        [[1, 2**63, 64, 64, 1]],
        [[1, 0, 2**62, 64, 4]],
        [[2**32, 0, 64, 64, 1]],
        [[1, 0, 64, 64, 2**32]],
    ],
)
def test_ranges_that_are_none(rows: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        native.Ranges(np.array(rows, np.uint64).reshape(-1, 5))


@each_verb
def test_post_to_an_unknown_peer_is_refused(p: Any, d: Any, new_id: NewId, verb: str) -> None:
    own = p.register(4096)
    unknown = native.AgentRef("unknown", 1, os.urandom(16))
    with pytest.raises(PeerGoneError):
        p.post(verb, new_id(), unknown, [(own.id, 0, 64, 64, 1)], [(9, 0, 64, 64, 1)])
    elements = native.Elements(native.Ranges(np.array([[own.id, 0, 64, 64, 1]], np.uint64)), np.zeros(1, np.uint32))
    with pytest.raises(LaneUnavailableError):
        getattr(p.core, f"prepare_{verb}")(d.ref, elements, elements, lanes=[]).start(new_id(), 10**9)


@each_lane
@each_verb
def test_removed_region(p: Any, d: Any, new_id: NewId, lane: native.Lane, verb: str) -> None:
    """What is not registered any more is neither read nor written, known lane or not."""
    own, other = (p, d) if verb == "push" else (d, p)
    source, target = p.register(1 << 16), d.register(1 << 16)
    source.memory[:] = 1
    local, remote = (source, target) if verb == "push" else (target, source)
    rows = ([(local.id, 0, 4096, 4096, 16)], [(remote.id, 0, 4096, 4096, 16)])
    known = new_id()
    own.post(verb, known, other, *rows, lanes=[lane])
    assert own.wait_drained(known).state == COMMITTED
    assert set(target.memory.tolist()) == {1}
    deadline = time.monotonic() + 10
    while not other.is_idle() and time.monotonic() < deadline:
        time.sleep(0.005)
    other.core.remove_region(remote.id)
    target.memory[:] = POISON
    gone = new_id()
    own.post(verb, gone, other, *rows, lanes=[lane])
    final = own.wait_drained(gone)
    assert final.state == FAILED
    assert final.code in (native.Code.refused, native.Code.grant_unknown), final.text
    if (
        lane in (native.Lane.STREAM, native.Lane.UNIX) or verb == "push"
    ):  # others read at once, and throw the bytes away
        assert set(target.memory.tolist()) == {POISON}
    with pytest.raises(InvalidArgumentError):
        other.core.remove_region(remote.id)
    with pytest.raises(InvalidArgumentError):
        other.core.add_region(native.RegionInfo(remote.id, 4096), native.Region(4096))
    if lane == MAPPED:
        reader = other if verb == "push" else own
        assert reader.core.statistics().mappings == 1


@pytest.mark.parametrize("rights", [{"can_read": False}, {"can_write": False}], ids=["no-read", "no-write"])
def test_rights(p: Any, d: Any, new_id: NewId, rights: dict[str, bool]) -> None:
    own, other = p.register(4096), d.register(4096, **rights)
    own.memory[:], other.memory[:] = 1, 2
    rows = ([(own.id, 0, 64, 64, 8)], [(other.id, 0, 64, 64, 8)])
    for verb, is_allowed in (("push", rights.get("can_write", True)), ("fetch", rights.get("can_read", True))):
        transfer = new_id()
        p.post(verb, transfer, d, *rows)
        final = p.wait_drained(transfer)
        assert (final.state == COMMITTED) == is_allowed
        assert is_allowed or final.code == native.Code.refused, final.text


def test_not_exposed_is_served_by_stream_only(p: Any, d: Any, new_id: NewId) -> None:
    source, target = p.register(4096, is_foreign=True, is_exposed=False), d.register(4096)
    source.memory[:] = 3
    transfer = new_id()
    d.fetch(transfer, p, [(target.id, 0, 64, 64, 8)], [(source.id, 0, 64, 64, 8)], lanes=[MAPPED, CMA, STREAM])
    final = d.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, STREAM), final.text
    assert target.element(0, 512) == b"\x03" * 512
    assert final.lane_notes


@each_lane
def test_removing_in_the_middle(p: Any, d: Any, new_id: NewId, lane: native.Lane) -> None:
    """Peers' writes into a region end when it is removed, and nothing lands after; an own fetch refuses the removal."""
    size = 32 << 20
    source = p.register(size)
    source.memory[:] = 1
    refused = removed = 0
    for round_ in range(6):
        target = d.register(size)
        target.memory[:] = POISON
        transfer = new_id()
        p.push(transfer, d, [(source.id, 0, 65536, 65536, 512)], [(target.id, 0, 65536, 65536, 512)], lanes=[lane])
        d.wait(lambda _, t=target: t.memory[0] != POISON, "the first bytes")
        time.sleep(0.0005 * round_)
        try:
            d.core.remove_region(target.id)
            removed += 1
        except BlocksBusyError:
            refused += 1
        else:
            target.memory[:] = 0x55
        final = p.wait_drained(transfer)
        assert final.state in (COMMITTED, FAILED)
        if final.state == FAILED:
            time.sleep(0.05)
            assert set(np.unique(target.memory)) == {0x55}
    assert removed
    assert not refused
    target = d.register(size)
    mine = new_id()
    d.fetch(mine, p, [(target.id, 0, 65536, 65536, 512)], [(source.id, 0, 65536, 65536, 512)], lanes=[lane])
    try:
        d.core.remove_region(target.id)
    except BlocksBusyError:
        d.core.cancel(mine)
    assert d.wait_drained(mine).state in (COMMITTED, CANCELLED)


@each_verb
@each_lane
def test_cancel_in_the_middle(p: Any, d: Any, new_id: NewId, lane: native.Lane, verb: str) -> None:
    """Once drained, the source may write its memory and the target is not written any more."""
    own, other = (p, d) if verb == "push" else (d, p)
    size = 32 << 20
    source, target = p.register(size), d.register(size)
    local, remote = (source, target) if verb == "push" else (target, source)
    for round_ in range(5):
        source.memory[:], target.memory[:] = 1, POISON
        transfer = new_id()
        own.post(
            verb, transfer, other, [(local.id, 0, 65536, 65536, 512)], [(remote.id, 0, 65536, 65536, 512)], lanes=[lane]
        )
        own.wait(lambda _: target.memory[0] != POISON, "the first bytes")
        time.sleep(0.0004 * round_)
        own.core.cancel(transfer)
        final = own.wait_drained(transfer)
        if verb == "push":
            source.memory[:] = 0xAA
            if final.state == CANCELLED:
                d.wait(lambda _, n=round_: len(d.find(native.OfferEnded)) == n + 1, "the end of the offer")
        else:  # the source learns of the end a little later, and sends until then
            deadline = time.monotonic() + 30
            while not p.is_idle() and time.monotonic() < deadline:
                time.sleep(0.002)
        if final.state == CANCELLED and verb == "fetch":
            target.memory[:] = 0x55
            time.sleep(0.02)
            assert set(np.unique(target.memory)) == {0x55}
        elif final.state == COMMITTED:
            assert set(np.unique(target.memory)) == {1}


def test_64_at_once_take_turns(p: Any, d: Any, new_id: NewId) -> None:
    size = 1 << 20
    source, target = p.register(64 * size), d.register(64 * size)
    source.memory[:] = np.random.default_rng(1).integers(0, 256, 64 * size, dtype=np.uint8)
    for lane in (STREAM, UNIX, MAPPED, CMA):
        target.memory[:] = POISON
        ids = [new_id() for _ in range(64)]
        for index, transfer in enumerate(ids):
            row = (index * size, 4096, 4096, size // 4096)
            d.fetch(transfer, p, [(target.id, *row)], [(source.id, *row)], lanes=[lane])
        for transfer in ids:
            assert d.wait_drained(transfer).state == COMMITTED
        assert target.memory.tobytes() == source.memory.tobytes()
