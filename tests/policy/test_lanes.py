"""Which lanes can join a pair, and what is said of the others."""

from __future__ import annotations

import dataclasses

import pytest

from kvxfer.policy.calibration import ENOUGH, Calibration
from kvxfer.policy.lanes import LaneEnd, choose_lanes, explain
from kvxfer.types import CompatibilityRecord, DataAddress, Exposure, Lane, MemoryKind, PoolRecord

RECORD = CompatibilityRecord("m", "c", "w", "f", 1, 1, 1, 1, "a", "p", "r", "b")
POOL = PoolRecord(1, RECORD, 4, 64, Exposure.POOL, True)
ADDRESS = DataAddress("127.0.0.1", 1, "/run/a.sock", "host:0")
END = LaneEnd(ADDRESS, POOL)
ALL = (Lane.MAPPED, Lane.STREAM)


def end(**changes: object) -> LaneEnd:
    address = {name: value for name, value in changes.items() if hasattr(ADDRESS, name)}
    pool = {name: value for name, value in changes.items() if hasattr(POOL, name)}
    return LaneEnd(dataclasses.replace(ADDRESS, **address), dataclasses.replace(POOL, **pool))


def test_all_that_can() -> None:
    lanes, reasons = choose_lanes(END, END, ALL)
    assert lanes == ALL
    assert set(reasons) == set(ALL)
    assert choose_lanes(END, END, ALL[::-1])[0] == ALL[::-1]
    assert explain(Lane.MAPPED, reasons) == "mapped: same host, source pool in shared memory"


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (END, end(host_id="host:1"), "another host"),
        (end(host_id=""), end(host_id=""), "another host"),
        (END, end(unix_path=""), "source listens on no Unix socket"),
        (end(unix_path=""), END, "reader listens on no Unix socket"),
        (END, end(exposure=Exposure.GRANT), "exposed by grant only"),
        (END, end(is_shareable=False), "did not allocate"),
    ],
)
def test_why_not_mapped(ours: LaneEnd, theirs: LaneEnd, why: str) -> None:
    lanes, reasons = choose_lanes(ours, theirs, ALL)
    assert lanes == (Lane.STREAM,)
    assert why in reasons[Lane.MAPPED]
    assert explain(Lane.STREAM, reasons) == (
        f"stream: the source is reached over TCP (not mapped: {reasons[Lane.MAPPED]})"
    )


def test_the_readers_own_pool_does_not_matter() -> None:
    assert choose_lanes(end(is_shareable=False, exposure=Exposure.GRANT), END, ALL)[0] == ALL


def test_nothing_joins() -> None:
    lanes, reasons = choose_lanes(END, end(tcp_port=0, host_id="host:1"), (*ALL, Lane.MEMORY))
    assert lanes == ()
    text = explain(None, reasons)
    for lane in (*ALL, Lane.MEMORY):
        assert f"{lane.value}: " in text
    assert explain(None, {}) == "no lane is allowed"


def test_memory_needs_one_network() -> None:
    one, other = end(host_id="memory:1-0", tcp_port=0), end(host_id="memory:1-1", tcp_port=0)
    assert choose_lanes(one, one, (Lane.MEMORY,))[0] == (Lane.MEMORY,)
    assert choose_lanes(one, other, (Lane.MEMORY,))[0] == ()
    assert choose_lanes(END, END, (Lane.MEMORY,))[0] == ()


def test_lane_that_the_core_gave_up_is_in_the_reason() -> None:
    _, reasons = choose_lanes(END, END, ALL)
    assert explain(Lane.STREAM, reasons, "connect: No such file") == (
        "stream: the source is reached over TCP (not connect: No such file)"
    )


EVERY = (Lane.MAPPED, Lane.CMA, Lane.UCX, Lane.UNIX, Lane.STREAM)


def test_memory_of_an_engine_is_reached_without_a_mapping() -> None:
    assert choose_lanes(END, end(is_shareable=False), EVERY)[0] == EVERY[1:]
    assert choose_lanes(END, end(exposure=Exposure.GRANT), EVERY)[0] == (Lane.UNIX, Lane.STREAM)
    assert choose_lanes(END, end(host_id="host:1"), EVERY)[0] == (Lane.UCX, Lane.STREAM)


NUMPYS = end(is_shareable=False)
MIB = 1 << 20


def test_a_lane_that_is_expected_to_be_slower_says_so() -> None:
    lanes, reasons = choose_lanes(END, NUMPYS, EVERY)
    order = Calibration(is_same_host=True).order(lanes, 4096)
    assert order.lanes == (Lane.UNIX, Lane.CMA, Lane.UCX, Lane.STREAM)
    assert explain(Lane.UNIX, reasons, passed_over=order.passed_over(Lane.UNIX)) == (
        "unix: same host, sent over its Unix socket "
        "(not mapped: kvxfer did not allocate the source pool's memory as shared memory; "
        "cma: possible, expected at 50 us where unix is expected at 45 us; "
        "ucx: possible, expected at 55 us where unix is expected at 45 us)"
    )


def test_a_lane_that_was_measured_to_be_slower_says_so() -> None:
    """The figures are those of the moment when the order was made."""
    calibration = Calibration(is_same_host=True)
    for lane, gb_per_s in ((Lane.CMA, 3.1), (Lane.STREAM, 4.25)) * ENOUGH:
        calibration.measured(lane, 64 * MIB, 64 * MIB / (gb_per_s * 1e9))
    lanes, reasons = choose_lanes(END, END, (Lane.CMA, Lane.UNIX, Lane.STREAM))
    order = calibration.order(lanes, 64 * MIB)
    assert order.lanes == (Lane.STREAM, Lane.UNIX, Lane.CMA)
    for _ in range(20):
        calibration.measured(Lane.STREAM, 64 * MIB, 60.0)
    assert explain(Lane.STREAM, reasons, passed_over=order.passed_over(Lane.STREAM)) == (
        "stream: the source is reached over TCP (not cma: possible, measured at 3.1 GB/s where stream is measured at "
        "4.2 GB/s; unix: possible, expected at 4 GB/s where stream is measured at 4.2 GB/s)"
    )


def test_lanes_passed_over_and_given_up_are_both_in_the_reason() -> None:
    lanes, reasons = choose_lanes(END, END, (Lane.CMA, Lane.STREAM, Lane.UNIX))
    order = Calibration(is_same_host=True).order(lanes, 4096)
    assert order.lanes == (Lane.UNIX, Lane.CMA, Lane.STREAM)
    used, notes = Lane.STREAM, "connect: No such file; ptrace is not allowed"  # of unix, then of cma
    assert explain(used, reasons, notes, passed_over=order.passed_over(used)) == (
        "stream: the source is reached over TCP (not connect: No such file; ptrace is not allowed)"
    )
    lanes, reasons = choose_lanes(END, END, (Lane.UCX, Lane.CMA, Lane.STREAM, Lane.UNIX))
    order = Calibration(is_same_host=True).order(lanes, 4096)
    used, notes = Lane.CMA, "connect: No such file"  # of unix
    assert explain(used, reasons, notes, passed_over=order.passed_over(used)) == (
        "cma: same host and user, read out of the source process "
        "(not ucx: possible, expected at 55 us where cma is expected at 50 us; connect: No such file)"
    )


def test_in_the_operators_order_nothing_was_passed_over() -> None:
    lanes, reasons = choose_lanes(END, END, (Lane.UNIX, Lane.CMA, Lane.STREAM))
    order = Calibration(is_same_host=True).order(lanes, 4096)
    assert explain(Lane.UNIX, reasons, passed_over=order.passed_over(Lane.UNIX)) == (
        "unix: same host, sent over its Unix socket"
    )


def test_a_merit_is_no_reason_against_a_lane() -> None:
    """Where nothing is used yet, and where there are no figures."""
    _, reasons = choose_lanes(END, NUMPYS, (Lane.MAPPED, Lane.CMA))
    assert (
        explain(None, reasons)
        == "mapped: kvxfer did not allocate the source pool's memory as shared memory; cma: possible"
    )
    _, reasons = choose_lanes(END, END, ALL)
    assert explain(Lane.STREAM, reasons) == "stream: the source is reached over TCP (not mapped: possible)"


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_device_memory_goes_by_ucx_and_by_sockets(side: str) -> None:
    ends = {"ours": END, "theirs": END, side: end(memory=MemoryKind.CUDA)}
    lanes, reasons = choose_lanes(ends["ours"], ends["theirs"], EVERY)
    assert lanes == (Lane.UCX, Lane.UNIX, Lane.STREAM)
    where = {"ours": "the destination", "theirs": "the source"}[side]
    assert reasons[Lane.MAPPED] == reasons[Lane.CMA] == f"{where} memory is on a device"
    ends[side] = end(memory=MemoryKind.CUDA, lanes=(Lane.CMA, Lane.STREAM))
    assert choose_lanes(ends["ours"], ends["theirs"], EVERY)[0] == (Lane.STREAM,)


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_lane_that_the_operator_forbids_is_not_used(side: str) -> None:
    ends = {"ours": END, "theirs": END, side: end(lanes=(Lane.STREAM, Lane.CMA))}
    lanes, reasons = choose_lanes(ends["ours"], ends["theirs"], EVERY)
    assert lanes == (Lane.CMA, Lane.STREAM)
    assert "not served " + {"ours": "here", "theirs": "at the source"}[side] in reasons[Lane.MAPPED]
