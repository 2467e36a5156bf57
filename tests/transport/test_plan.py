"""How a post is cut into transfers: every frame within its bound, every element once."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.errors import InvalidArgumentError
from kvxfer.transport.descriptors import INDEX_BYTES, RANGE_BYTES, Descriptors, MemoryTable, Prepared, RemotePeer
from kvxfer.transport.plan import LIST_BYTES_MAX, SHARE_BYTES_MIN, Op, PlanPart, TransferPlan, make_plan
from kvxfer.types import AgentRef, DataAddress, Incarnation, RegionRecord

RECORD = RegionRecord(7, 1 << 30, 1 << 29)
PEER = RemotePeer(AgentRef("b", Incarnation(1, bytes(16))), DataAddress("", 1, "", "h"), [RECORD])


def scattered(count: int, length: int = 16, peer: RemotePeer | None = PEER) -> Prepared:
    """A table: a strided range for each element."""
    steps = 700 + np.random.default_rng(count).integers(0, 50, count)
    return prepare(np.cumsum(steps) - steps[0] + RECORD.address, length, peer)


def paged(count: int, length: int = 512, peer: RemotePeer | None = PEER) -> Prepared:
    """Pages: one strided range."""
    order = np.random.default_rng(count).permutation(count)
    return prepare(order * length + RECORD.address, length, peer)


def strided(rows: int, count: int, peer: RemotePeer | None = PEER) -> Prepared:
    starts = RECORD.address + np.arange(rows) * count * 40
    return resolve(np.stack(np.broadcast_arrays(starts, 32, 0, count, 40), axis=1).astype(np.uint64), peer)


def prepare(starts: np.ndarray, length: int, peer: RemotePeer | None) -> Prepared:
    return resolve(np.stack(np.broadcast_arrays(starts, length, 0), axis=1).astype(np.uint64), peer)


def resolve(rows: np.ndarray, peer: RemotePeer | None) -> Prepared:
    return MemoryTable([RECORD]).resolve(Descriptors.of(rows), peer)


def is_sent_whole(prepared: Prepared, part: PlanPart) -> bool:
    return part.remote.ranges.row_count == prepared.ranges.row_count


def wire_bytes(prepared: Prepared, part: PlanPart) -> int:
    ids, is_whole = part.remote.ids, is_sent_whole(prepared, part)
    if is_whole and prepared.is_table:
        return RANGE_BYTES * len(ids)
    strided = len(prepared.strided) if is_whole else min(len(prepared.strided), len(ids))
    return RANGE_BYTES * strided + INDEX_BYTES * len(ids)


def covered(plan: TransferPlan, prepared: Prepared) -> list[tuple[int, int]]:
    """(offset, length) of every remote element, in order."""
    out = []
    for part in plan.parts:
        ids, starts = part.remote.ids, prepared.strided
        if not is_sent_whole(prepared, part):  # cut out: looked up again by its place in the whole list
            out += [None] * len(ids)  # type: ignore[list-item]
            continue
        row = prepared.strided_of(ids)
        first = np.cumsum(starts[:, 4]) - starts[:, 4]
        offsets = starts[row, 1] + (ids - first[row]) * starts[row, 2]
        out += list(zip(offsets.tolist(), starts[row, 3].tolist(), strict=True))
    return out


@pytest.mark.parametrize("op", Op)
def test_small_posts_are_one_transfer(op: Op) -> None:
    for make in (scattered, paged):
        local, remote = make(5000, peer=None), make(5000)
        plan = make_plan(op, local, None, remote, None)
        assert len(plan.parts) == 1
        assert (plan.elements, plan.nbytes) == (5000, local.nbytes)
        assert is_sent_whole(remote, plan.parts[0])
        ids = [4, 4999, 0]
        some = make_plan(op, local, ids, remote, ids[::-1])
        assert some.elements == 3
        assert covered(some, remote) == [covered(plan, remote)[i] for i in ids[::-1]]


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("kind", ["table", "pages", "strided", "mixed"])
def test_large_posts_are_cut(op: Op, kind: str) -> None:
    local, remote = {
        "table": lambda: (scattered(100_000, peer=None), scattered(100_000)),
        "pages": lambda: (paged(120_000, peer=None), paged(120_000)),
        "strided": lambda: (strided(9000, 5, None), strided(9000, 5)),
        "mixed": lambda: (scattered(50_000, 512, None), paged(50_000, 512)),
    }[kind]()
    plan = make_plan(op, local, None, remote, None)
    assert len(plan.parts) > 1 or (kind, op) == ("mixed", Op.READ)
    assert sum(len(part.remote.ids) for part in plan.parts) == remote.count
    for part in plan.parts:
        assert len(part.local.ids) == len(part.remote.ids)
        assert wire_bytes(remote, part) <= LIST_BYTES_MAX
        if op is Op.WRITE:
            assert wire_bytes(local, PlanPart(part.remote, part.local)) <= LIST_BYTES_MAX
        assert int(part.remote.ids.max()) < part.remote.ranges.count
        assert int(part.local.ids.max()) < part.local.ranges.count
    if kind != "strided":
        truth = make_plan(op, local, [0], remote, [0])
        assert covered(plan, remote)[0] == covered(truth, remote)[0]
        assert len(set(covered(plan, remote))) == remote.count


def test_parts_of_many_rows_name_the_same_bytes() -> None:
    """A list of more strided rows than one frame can carry is cut into lists of its own."""
    remote = strided(9000, 5)
    ids = np.random.default_rng(1).permutation(45_000).astype(np.uint32)
    plan = make_plan(Op.READ, strided(9000, 5, None), ids, remote, ids)
    seen: list[int] = []
    for part in plan.parts:
        assert not is_sent_whole(remote, part)
        assert part.remote.ranges.row_count < 9000 or part.remote.ranges.count == 45_000
        lengths = part.remote.ranges.lengths()
        assert (lengths == 32).all()
        seen.append(len(part.remote.ids))
    assert sum(seen) == 45_000


def test_a_large_post_is_spread_over_connections() -> None:
    local, remote = paged(40_000, 1024, None), paged(40_000, 1024)
    assert len(make_plan(Op.READ, local, None, remote, None, shares=4).parts) == 4
    few = list(range(1000))
    assert len(make_plan(Op.READ, local, few, remote, few, shares=4).parts) == 1
    enough = list(range(2 * SHARE_BYTES_MIN // 1024))
    assert len(make_plan(Op.READ, local, enough, remote, enough, shares=4).parts) == 2


def test_plan_of_lists_that_do_not_pair_is_refused() -> None:
    local, remote = scattered(10, peer=None), scattered(10)
    for ids, other, why in (
        ([0], [0, 1], "do not pair"),
        ([10], [0], "outside"),
        ([], [], "non-empty"),
        ([-1], [0], "0 to"),
        ([[1]], [0], "shape"),
        ([0.5], [0], "integers"),
    ):
        with pytest.raises(InvalidArgumentError, match=why):
            make_plan(Op.READ, local, ids, remote, other)
    with pytest.raises(InvalidArgumentError, match="prepared for a peer"):
        make_plan(Op.READ, remote, None, remote, None)
    with pytest.raises(InvalidArgumentError, match="prepared for a peer"):
        make_plan(Op.READ, local, None, local, None)
    with pytest.raises(InvalidArgumentError, match="pair 0 have different"):
        make_plan(Op.READ, local, None, scattered(10, 15), None)
    rows = np.array([[RECORD.address + i * 100, 10 + i % 3, 0] for i in range(12)], dtype=np.uint64)
    uneven, theirs = resolve(rows, None), resolve(rows, PEER)
    plan = make_plan(Op.WRITE, uneven, [1, 2, 4], theirs, [4, 5, 7])
    assert plan.nbytes == 11 + 12 + 11
    with pytest.raises(InvalidArgumentError, match="pair 1 have different"):
        make_plan(Op.WRITE, uneven, [1, 2, 4], theirs, [4, 6, 7])
