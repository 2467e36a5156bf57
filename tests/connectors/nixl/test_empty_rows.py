"""Rows of no bytes: found, paired and transferred as NIXL 1.5.1 does it, on which each case was tried."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.nixl import nixl_agent
from kvxfer.connectors.nixl.bindings import DRAM_SEG, nixlInvalidParamError, nixlNotFoundError, nixlXferDList
from kvxfer.connectors.nixl.prepared import are_inside
from kvxfer.types import RegionRecord
from tests.support.nixl.agents import MakeAgent, finish, memory, notifications, register, row

SIZE = 4096


@pytest.fixture
def ends(pair: tuple[nixl_agent, nixl_agent]) -> tuple[nixl_agent, nixl_agent, Any, Any]:
    """An initiator that knows a target, and the memory of both."""
    initiator, target = pair
    ours, theirs = memory(SIZE, seed=1), memory(SIZE, seed=2)
    register(initiator, ours)
    register(target, theirs)
    initiator.add_remote_agent(target.get_agent_metadata())
    return initiator, target, ours, theirs


def rows_of(array: Any, pieces: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    return [row(array, begin, length) for begin, length in pieces]


@pytest.mark.parametrize("op", ["READ", "WRITE"])
@pytest.mark.parametrize("pieces", [[(0, 0)], [(SIZE, 0)], [(0, 16), (100, 0), (200, 32)], [(7, 0), (0, 64), (9, 0)]])
def test_zero_rows_are_done_and_move_nothing(op: str, pieces: list[tuple[int, int]], ends: Any) -> None:
    initiator, target, ours, theirs = ends
    source, sink = (theirs, ours) if op == "READ" else (ours, theirs)
    wanted = sink.copy()
    for begin, length in pieces:
        wanted[begin : begin + length] = source[begin : begin + length]
    local = initiator.get_xfer_descs(rows_of(ours, pieces), "DRAM")
    remote = initiator.get_xfer_descs(rows_of(theirs, pieces), "DRAM")
    handle = initiator.initialize_xfer(op, local, remote, "target", b"done")
    for _ in range(2):
        finish(initiator, handle)
        assert notifications(target) == {"initiator": [b"done"]}
    assert (sink == wanted).all()
    telemetry = initiator.get_xfer_telemetry(handle)
    assert telemetry.totalBytes == sum(length for _, length in pieces)
    initiator.release_xfer_handle(handle)


def test_zero_rows_of_prepared_lists_keep_their_index(ends: Any) -> None:
    initiator, _, ours, theirs = ends
    pieces = [(0, 16), (16, 0), (32, 16), (48, 0)]
    local = initiator.prep_xfer_dlist("", rows_of(ours, pieces), "DRAM")
    remote = initiator.prep_xfer_dlist("target", rows_of(theirs, pieces), "DRAM")
    before = theirs.copy()
    for indices in ([1], [3, 1]):
        finish(initiator, initiator.make_prepped_xfer("WRITE", local, indices, remote, indices))
    assert (theirs == before).all()
    finish(initiator, initiator.make_prepped_xfer("WRITE", local, [3, 2, 1], remote, [1, 0, 3]))
    assert (theirs[:16] == ours[32:48]).all()
    assert (theirs[16:] == before[16:]).all()
    for mine, other in (([0], [1]), ([1, 2], [2, 1]), ([1], [4]), ([4], [1]), ([1, 3], [1])):
        with pytest.raises(nixlInvalidParamError):
            initiator.make_prepped_xfer("WRITE", local, mine, remote, other)


def test_zero_rows_outside_registered_memory_are_not_found(ends: Any) -> None:
    initiator, _, ours, theirs = ends
    inside, outside = row(ours, 0, 0), (row(ours, 0, 0)[0] + SIZE + 1, 0, 0)
    there, beyond = row(theirs, 0, 0), (row(theirs, 0, 0)[0] + SIZE + 1, 0, 0)
    for mine, other in ((outside, there), (inside, beyond), ((0, 0, 0), there), (inside, (0, 0, 0))):
        local, remote = (initiator.get_xfer_descs([each], "DRAM") for each in (mine, other))
        with pytest.raises(nixlNotFoundError, match="no bytes at"):
            initiator.initialize_xfer("WRITE", local, remote, "target")
    assert initiator.check_remote_metadata("target", initiator.get_xfer_descs([there], "DRAM"))
    assert not initiator.check_remote_metadata("target", initiator.get_xfer_descs([beyond], "DRAM"))


def test_zero_rows_can_be_registered_anywhere(pair: tuple[nixl_agent, nixl_agent]) -> None:
    """An empty tensor is at 0."""
    initiator, target = pair
    empty = [(0, 0, 0, "")]
    ours = initiator.register_memory(empty, "DRAM")
    theirs = target.register_memory([*empty, (64, 0, 0, "")], "DRAM")
    name = initiator.add_remote_agent(target.get_agent_metadata())
    local = initiator.get_xfer_descs([(0, 0, 0)], "DRAM")
    finish(initiator, initiator.initialize_xfer("READ", local, local, name, b"x"))
    assert notifications(target) == {"initiator": [b"x"]}
    initiator.deregister_memory(ours)
    with pytest.raises(nixlNotFoundError):
        initiator.deregister_memory(ours)
    with pytest.raises(nixlNotFoundError, match="registered here"):
        initiator.initialize_xfer("READ", local, local, name)
    target.deregister_memory(theirs)
    initiator.add_remote_agent(target.get_agent_metadata())
    assert not initiator.check_remote_metadata("target", local)


def test_zero_rows_of_partial_metadata_are_added(pair: tuple[nixl_agent, nixl_agent]) -> None:
    initiator, target = pair
    lists = [target.register_memory([(address, 0, 0, "")], "DRAM") for address in (8, 16)]
    initiator.add_remote_agent(target.get_partial_agent_metadata(lists[0], inc_conn_info=True))
    descs = [nixlXferDList(DRAM_SEG, [(address, 0, 0)]) for address in (8, 16)]
    assert [initiator.check_remote_metadata("target", each) for each in descs] == [True, False]
    initiator.add_remote_agent(target.get_partial_agent_metadata(lists[1]))
    assert [initiator.check_remote_metadata("target", each) for each in descs] == [True, True]


def test_zero_rows_to_oneself_are_done(make_agent: MakeAgent) -> None:
    agent = make_agent("a")
    array = memory(SIZE, seed=3)
    register(agent, array)
    descs = agent.get_xfer_descs(rows_of(array, [(0, 0), (5, 0)]), "DRAM")
    finish(agent, agent.initialize_xfer("WRITE", descs, descs, "a", b"self"))
    assert notifications(agent) == {"a": [b"self"]}


def test_zero_rows_to_an_agent_that_was_removed_are_refused(ends: Any) -> None:
    initiator, _, ours, theirs = ends
    local = initiator.get_xfer_descs([row(ours, 0, 0)], "DRAM")
    remote = initiator.get_xfer_descs([row(theirs, 0, 0)], "DRAM")
    handle = initiator.initialize_xfer("WRITE", local, remote, "target")
    initiator.remove_remote_agent("target")
    with pytest.raises(nixlNotFoundError, match="removed"):
        initiator.transfer(handle)


def test_empty_tensors_are_transferred(pair: tuple[nixl_agent, nixl_agent]) -> None:
    torch = pytest.importorskip("torch")
    initiator, target = pair
    sources = [torch.arange(8), torch.empty(0), torch.arange(4)]
    sinks = [torch.zeros(8, dtype=torch.int64), torch.empty(0), torch.zeros(4, dtype=torch.int64)]
    target.register_memory(sources)
    initiator.register_memory(sinks)
    initiator.add_remote_agent(target.get_agent_metadata())
    local, remote = initiator.get_xfer_descs(sinks), initiator.get_xfer_descs(sources)
    finish(initiator, initiator.initialize_xfer("READ", local, remote, "target"))
    assert all(torch.equal(sink, source) for sink, source in zip(sinks, sources, strict=True))


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), max_size=6),
    st.frozensets(st.integers(0, 90), max_size=3),
)
def test_are_inside_is_what_each_record_says(spans: list[tuple[int, int]], empties: frozenset[int]) -> None:
    records = [RegionRecord(number, address, length) for number, (address, length) in enumerate(spans)]
    addresses = np.arange(100, dtype=np.uint64)
    said = are_inside(addresses, records, empties).tolist()
    for address, is_inside in zip(itertools.count(), said, strict=False):
        assert is_inside == (address in empties or any(a <= address <= a + n for a, n in spans))
