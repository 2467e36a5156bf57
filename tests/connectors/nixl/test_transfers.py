"""READ and WRITE between two agents of one process, and all that can be wrong with them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.nixl import nixl_agent
from kvxfer.connectors.nixl.bindings import (
    DRAM_SEG,
    nixlInvalidParamError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRepostActiveError,
    nixlXferDList,
)
from kvxfer.connectors.nixl.requests import LoopRequest
from tests.support.nixl.agents import POISON, MakeAgent, finish, memory, notifications, register, row, rows, until

BLOCK = 512
COUNT = 64
Pair = tuple[nixl_agent, nixl_agent]


@pytest.fixture(params=["one knows the other", "both know each other"])
def joined(request: pytest.FixtureRequest, pair: Pair) -> tuple[nixl_agent, nixl_agent, Any, Any]:
    """(initiator, target, its memory, the target's memory)."""
    one, other = pair
    mine, theirs = memory(COUNT * BLOCK), memory(COUNT * BLOCK, seed=1)
    register(one, mine)
    register(other, theirs)
    one.add_remote_agent(other.get_agent_metadata())
    if request.param.startswith("both"):
        other.add_remote_agent(one.get_agent_metadata())
    return one, other, mine, theirs


def test_read_and_write_of_prepared_lists(joined: Any) -> None:
    one, other, mine, theirs = joined
    local = one.prep_xfer_dlist("NIXL_INIT_AGENT", rows(mine, BLOCK), "DRAM")
    remote = one.prep_xfer_dlist(b"target", rows(theirs, BLOCK), "DRAM")
    into = np.random.default_rng(2).permutation(COUNT)[:20]
    out_of = np.random.default_rng(3).permutation(COUNT)[:20]
    handle = one.make_prepped_xfer("READ", local, into.astype(np.int32), remote, out_of.tolist(), b"read it")
    finish(one, handle)
    expected = np.full((COUNT, BLOCK), POISON, np.uint8)
    expected[into] = theirs.reshape(COUNT, BLOCK)[out_of]
    assert (mine.reshape(COUNT, BLOCK) == expected).all()
    assert notifications(other) == {"initiator": [b"read it"]}

    mine[:] = memory(len(mine), seed=4)
    expected = theirs.reshape(COUNT, BLOCK).copy()
    expected[out_of] = mine.reshape(COUNT, BLOCK)[into]
    handle = one.make_prepped_xfer("WRITE", local, into, remote, out_of, "written")
    finish(one, handle)
    assert (theirs.reshape(COUNT, BLOCK) == expected).all()
    assert notifications(other) == {"initiator": [b"written"]}
    one.release_xfer_handle(handle)
    one.release_dlist_handle(local)
    one.release_dlist_handle(remote)


def test_one_shot_and_reposts(joined: Any) -> None:
    one, other, mine, theirs = joined
    local = one.get_xfer_descs([row(mine, 0, 100), row(mine, 1000, 7)], "DRAM")
    remote = one.get_xfer_descs([row(theirs, 50, 100), row(theirs, 2000, 7)], "cpu")
    handle = one.initialize_xfer("READ", local, remote, "target", b"first")
    for message, expected in ((b"", b"first"), (b"second", b"second"), (b"", b"second")):
        mine[:] = POISON
        finish(one, handle, one.transfer(handle, message))
        assert (mine[:100] == theirs[50:150]).all()
        assert (mine[1000:1007] == theirs[2000:2007]).all()
        assert set(mine[100:1000].tolist()) == {POISON}
        assert notifications(other) == {"initiator": [expected]}
    assert one.query_xfer_backend(handle) == "UCX"
    telemetry = one.get_xfer_telemetry(handle)
    assert (telemetry.totalBytes, telemetry.descCount) == (107, 2)
    assert telemetry.startTime > 0
    assert telemetry.xferDuration >= telemetry.postDuration > 0
    assert telemetry.lane is not None
    duration, margin, method = one.estimate_xfer_cost(handle)
    assert (duration > 0, margin > 0, method) == (True, True, "ANALYTICAL_BACKEND")


def test_strided_lists(joined: Any) -> None:
    one, _, mine, theirs = joined
    base, theirs_base = mine.ctypes.data, theirs.ctypes.data
    local = one.prep_xfer_dlist("", np.array([[base, 64, 0, 64, 40]], np.uint64), "DRAM")
    remote = one.prep_xfer_dlist(
        "target", np.array([[theirs_base, 64, 0, 256, 20], [theirs_base + 64, 64, 0, 256, 20]], np.uint64), "DRAM"
    )
    finish(one, one.make_prepped_xfer("READ", local, np.arange(40), remote, np.arange(40)))
    first = np.stack([theirs[i * 256 : i * 256 + 64] for i in range(20)])
    second = np.stack([theirs[i * 256 + 64 : i * 256 + 128] for i in range(20)])
    assert (mine[: 40 * 64].reshape(40, 64) == np.concatenate((first, second))).all()
    with pytest.raises(nixlInvalidParamError, match="mem_type"):
        one.prep_xfer_dlist("target", np.array([[theirs_base, 64, 0, 64, 4]], np.uint64))
    for bad in ([theirs_base, 64, 0, 32, 4], [theirs_base, 64, 0, 64, 0], [theirs_base, 64, 0, 1 << 40, 9]):
        with pytest.raises(nixlNotFoundError):
            one.prep_xfer_dlist("target", np.array([bad], np.uint64), "DRAM")


def test_tensors(pair: Pair) -> None:
    torch = pytest.importorskip("torch")
    one, other = pair
    mine, theirs = torch.zeros((10, 16)), torch.rand((10, 16))
    one.register_memory(mine)
    other.register_memory(theirs)
    one.add_remote_agent(other.get_agent_metadata())
    remote: Any = one.deserialize_descs(
        other.get_serialized_descs(other.get_xfer_descs([theirs[i] for i in range(10)]))
    )
    handle = one.initialize_xfer("READ", one.get_xfer_descs([mine[i] for i in range(10)]), remote, "target")
    finish(one, handle)
    assert torch.equal(mine, theirs)


def test_indices_that_are_wrong(joined: Any) -> None:
    one, _, mine, theirs = joined
    local = one.prep_xfer_dlist("", rows(mine, BLOCK), "DRAM")
    remote = one.prep_xfer_dlist("target", rows(theirs, BLOCK), "DRAM")
    halves = one.prep_xfer_dlist("target", rows(theirs, BLOCK // 2), "DRAM")
    for ours, side, its in (
        ([], remote, []),
        ([1, 2], remote, [1]),
        ([COUNT], remote, [0]),
        ([0], remote, [COUNT]),
        ([-1], remote, [0]),
        ([0], halves, [0]),
        ([0], local, [0]),
        (np.zeros((2, 2), np.int32), remote, [0]),
        (["a"], remote, [0]),
    ):
        with pytest.raises(nixlInvalidParamError):
            one.make_prepped_xfer("READ", local, ours, side, its)
    with pytest.raises(nixlInvalidParamError):
        one.make_prepped_xfer("READ", remote, [0], remote, [0])
    with pytest.raises(KeyError):
        one.make_prepped_xfer("RD", local, [0], remote, [0])
    with pytest.raises(KeyError):
        one.make_prepped_xfer("READ", local, [0], remote, [0], b"", ["NOPE"])


def test_descriptors_that_are_wrong(joined: Any) -> None:
    one, _, mine, theirs = joined
    stray = memory(4096)
    inside = one.get_xfer_descs([row(mine, 0, 64)], "DRAM")
    remote = one.get_xfer_descs([row(theirs, 0, 64)], "DRAM")
    outside = one.get_xfer_descs([row(stray, 0, 64)], "DRAM")
    for ours, its, name, error in (
        (inside, remote, "absent", nixlNotFoundError),
        (outside, remote, "target", nixlNotFoundError),
        (inside, outside, "target", nixlNotFoundError),
        (inside, one.get_xfer_descs([row(theirs, len(theirs) - 32, 64)], "DRAM"), "target", nixlNotFoundError),
        (inside, one.get_xfer_descs([row(theirs, 0, 32)], "DRAM"), "target", nixlInvalidParamError),
        (inside, one.get_xfer_descs([row(theirs, 0, 64)] * 2, "DRAM"), "target", nixlInvalidParamError),
        (nixlXferDList(DRAM_SEG), nixlXferDList(DRAM_SEG), "target", nixlNotFoundError),
        ([row(mine, 0, 64)], remote, "target", TypeError),
    ):
        with pytest.raises(error):
            one.initialize_xfer("READ", ours, its, name)


def test_states_of_a_handle(joined: Any) -> None:
    one, _, mine, theirs = joined
    local, remote = one.get_xfer_descs([row(mine)], "DRAM"), one.get_xfer_descs([row(theirs)], "DRAM")
    handle = one.initialize_xfer("READ", local, remote, "target")
    with pytest.raises(nixlNotPostedError):
        one.check_xfer_state(handle)
    with pytest.raises(nixlNotPostedError):
        one.get_xfer_telemetry(handle)
    assert one.estimate_xfer_cost(handle) == (0, 0, "UNKNOWN")
    finish(one, handle)
    assert one.check_xfer_state(handle) == "DONE"
    handle.release()
    handle.release()
    with pytest.raises(nixlInvalidParamError, match="released"):
        one.transfer(handle)


def test_a_transfer_under_way_is_not_posted_again(joined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, mine, theirs = joined
    handle = one.initialize_xfer(
        "READ", one.get_xfer_descs([row(mine)], "DRAM"), one.get_xfer_descs([row(theirs)], "DRAM"), "target"
    )
    poster = one.agent._endpoint.link.poster
    with monkeypatch.context() as patch:
        patch.setattr(poster.transfers, "poll", lambda: None)
        assert one.transfer(handle) == "PROC"
        with pytest.raises(nixlRepostActiveError):
            one.transfer(handle)
    finish(one, handle, "PROC")


def test_telemetry_is_asked_for(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "no")
    off = make_agent("off", capture_telemetry=True)
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "y")
    on = make_agent("on")
    for agent, has in ((off, False), (on, True)):
        source, destination = memory(64, seed=1), memory(64)
        register(agent, source, destination)
        handle = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs([row(source)], "DRAM"),
            agent.get_xfer_descs([row(destination)], "DRAM"),
            agent.name,
        )
        assert agent.transfer(handle) == "DONE"
        if has:
            assert agent.get_xfer_telemetry(handle).totalBytes == 64
        else:
            with pytest.raises(nixlNoTelemetryError):
                agent.get_xfer_telemetry(handle)


def test_to_oneself(make_agent: MakeAgent) -> None:
    agent = make_agent("me")
    source, destination = memory(4096, seed=1), memory(4096)
    registered = register(agent, source, destination)
    local = agent.prep_xfer_dlist("", rows(destination, 64), "DRAM")
    remote = agent.prep_xfer_dlist("me", np.array([[source.ctypes.data, 64, 0, 64, 64]], np.uint64), "DRAM")
    handle = agent.make_prepped_xfer("READ", local, list(range(0, 64, 2)), remote, list(range(63, 0, -2)), b"done")
    assert agent.transfer(handle) == "DONE"
    assert (destination.reshape(64, 64)[::2] == source.reshape(64, 64)[::-1][::2]).all()
    assert (destination.reshape(64, 64)[1::2] == POISON).all()
    assert agent.get_new_notifs() == {"me": [b"done"]}
    with pytest.raises(nixlInvalidParamError):
        agent.make_prepped_xfer("READ", local, [64], remote, [0])
    agent.deregister_memory(registered)
    with pytest.raises(nixlNotAllowedError):
        agent.transfer(handle)


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), min_size=1, max_size=40, unique_by=lambda p: p[1]))
def test_copies_to_oneself_are_those_asked_for(moves: list[tuple[int, int]]) -> None:
    source, destination, expected = memory(256, seed=1), memory(256), memory(256)
    pairs = [rows(array, 8)[[move[side] for move in moves], :2] for side, array in ((0, source), (1, destination))]
    for begin, end in moves:
        expected[end * 8 : end * 8 + 8] = source[begin * 8 : begin * 8 + 8]
    LoopRequest(pairs[0], pairs[1], b"", 0, lambda _: None, lambda: None).post(b"")
    assert (destination == expected).all()


def test_memory_that_was_taken_back_is_refused(joined: Any) -> None:
    one, other, mine, _theirs = joined
    more = memory(4096, seed=9)
    registered = register(other, more)
    one.add_remote_agent(other.get_agent_metadata())
    local = one.prep_xfer_dlist("", [row(mine, 0, 4096)], "DRAM")
    remote = one.prep_xfer_dlist("target", [row(more)], "DRAM")
    handles = [one.make_prepped_xfer(op, local, [0], remote, [0], b"x") for op in ("READ", "WRITE")]
    for handle in handles:
        finish(one, handle)
    assert len(notifications(other, 2)["initiator"]) == 2
    other.deregister_memory(registered)
    with pytest.raises(nixlNotFoundError):
        other.deregister_memory(registered)
    more[:], before = POISON, mine.copy()
    for handle in handles:
        with pytest.raises(nixlNotAllowedError):
            finish(one, handle)
    register(other, more)
    for handle in handles:
        with pytest.raises(nixlNotAllowedError):
            finish(one, handle)
    assert (mine == before).all()
    assert set(more.tolist()) == {POISON}
    assert other.get_new_notifs() == {}
    one.add_remote_agent(other.get_agent_metadata())
    fresh = one.prep_xfer_dlist("target", [row(more)], "DRAM")
    finish(one, one.make_prepped_xfer("READ", local, [0], fresh, [0]))
    assert set(mine[:4096].tolist()) == {POISON}


def test_a_remote_that_was_removed(joined: Any) -> None:
    one, other, mine, theirs = joined
    local = one.prep_xfer_dlist("", [row(mine)], "DRAM")
    remote = one.prep_xfer_dlist("target", [row(theirs)], "DRAM")
    handle = one.make_prepped_xfer("READ", local, [0], remote, [0])
    finish(one, handle)
    one.remove_remote_agent("target")
    assert one.check_xfer_state(handle) == "DONE"
    for _ in range(2):
        with pytest.raises(nixlNotFoundError):
            one.transfer(handle)
        with pytest.raises(nixlNotFoundError):
            one.make_prepped_xfer("READ", local, [0], remote, [0])
        one.add_remote_agent(other.get_agent_metadata())
    fresh = one.prep_xfer_dlist("target", [row(theirs)], "DRAM")
    mine[:] = POISON
    finish(one, one.make_prepped_xfer("READ", local, [0], fresh, [0]))
    assert (mine == theirs).all()


def test_notifications(joined: Any) -> None:
    one, other, _, _ = joined
    one.make_connection("target")
    one.send_notif("target", b"prefix and tail")
    one.send_notif("target", "text", "UCX")
    one.send_notif("target", b"")
    until(lambda: len(other.update_notifs().get("initiator", [])) == 3)
    assert not other.check_remote_xfer_done("initiator", b"tail")
    assert not other.check_remote_xfer_done("other", b"")
    assert other.check_remote_xfer_done("initiator", b"tail", tag_is_prefix=False)
    assert other.check_remote_xfer_done(b"initiator", "te")
    assert not other.check_remote_xfer_done("initiator", b"te")
    assert other.check_remote_xfer_done("initiator", b"")
    assert other.notifs == {"initiator": []}
    one.send_notif("initiator", b"to myself")
    assert one.get_new_notifs() == {"initiator": [b"to myself"]}
    with pytest.raises(nixlInvalidParamError):
        one.send_notif("target", bytes((16 << 20) + 1))


def test_many_notifications_come_in_order(joined: Any) -> None:
    one, other, _, _ = joined
    messages = [b"%d" % number for number in range(3000)]
    for message in messages:
        one.send_notif("target", message)
    assert notifications(other, len(messages)) == {"initiator": messages}


def test_names_that_are_no_agent_ids(make_agent: MakeAgent) -> None:
    name = "grüße / " + "x" * 100
    one, other = make_agent(name), make_agent("target")
    one.add_remote_agent(other.get_agent_metadata())
    assert other.add_remote_agent(one.get_agent_metadata()) == name.encode()
    one.send_notif("target", b"hello")
    assert notifications(other) == {name: [b"hello"]}
    other.send_notif(name, b"hello too")
    assert notifications(one) == {"target": [b"hello too"]}


def test_no_device_api(pair: Pair) -> None:
    with pytest.raises(nixlNotSupportedError):
        pair[0].prep_mem_view(nixlXferDList(DRAM_SEG))
    with pytest.raises(nixlNotSupportedError):
        pair[0].release_mem_view(1)


def test_a_dropped_agent_is_closed() -> None:
    agent = nixl_agent("a")
    endpoint = agent.agent._endpoint
    handle = agent.prep_xfer_dlist
    gone = weakref.ref(agent.agent)
    del agent, handle
    gc.collect()
    assert gone() is None
    assert not endpoint.is_open
