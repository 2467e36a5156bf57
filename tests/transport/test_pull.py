"""One pull over a transport that only writes down what it is asked: before it begins, and each of its ends once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.errors import GrantRevokedError, InvalidArgumentError, KvxferError, TransferCancelledError, TransportError
from kvxfer.testing.contract.parties import RECORD
from kvxfer.transport import transfers
from kvxfer.transport.lane_choice import LaneChooser
from kvxfer.transport.pull import Pull, PullOrder, TransferResult
from kvxfer.transport.transfers import TransferTable
from kvxfer.types import Exposure, Lane, Member, PoolRecord, Role, TransferId, TransferState, WorkerInfo
from tests.support.posts_setting import ADDRESS, PEER_REF, Drained, Final, Recorder, final_of

POOL = PoolRecord(1, RECORD, 16, 4096, Exposure.GRANT, False)
SOURCE = Member(PEER_REF, WorkerInfo("b", Role.BOTH, "", ""), ADDRESS, (POOL,))
IDENTITY = bytes(range(16))


class Puller(Recorder):
    """The blocks of each pull that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def pull(self, transfer_id: TransferId, source: Any, pool_id: int, blocks: Any, **how: Any) -> None:
        self.given.append(blocks)

    def unreserve(self, transfer_id: TransferId) -> bool:
        return False


class Case:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.transport = Puller()
        self.table = TransferTable(self.transport)  # type: ignore[arg-type]
        self.lanes = LaneChooser(ADDRESS)
        self.told: list[Any] = []
        order = PullOrder(
            TransferId(IDENTITY), "b", POOL, np.arange(3, dtype=np.uint32), 3, 0, (Lane.STREAM,), 1.0, 1.0
        )
        self.pull = Pull(
            self.table,
            self.lanes,
            order,
            on_granted=None,
            on_final=self.told.append,
            on_drained=lambda: self.told.append("drained"),
        )
        self.pull.enter()
        patch.setattr(transfers, "TransferFinal", Final)
        patch.setattr(transfers, "TransferDrained", Drained)
        patch.setattr(transfers, "TRANSFER_EVENTS", (Final, Drained))

    def begin(self) -> None:
        self.pull.begin(SOURCE, self.lanes.possible(PEER_REF, ADDRESS, [POOL], [POOL], [Lane.STREAM]))

    def finish(self, state: TransferState, code: str) -> Final:
        return final_of(IDENTITY, state, code, blocks_done=3, blocks_before_complete=0)

    def take(self, *events: Any) -> None:
        for event in events:
            self.table.handle(event)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(monkeypatch)


def test_a_pull_cancelled_before_its_source_is_known_never_reaches_the_transport(case: Case) -> None:
    case.pull.cancel()
    case.begin()
    assert case.transport.given == []
    assert [type(told) for told in case.told] == [TransferCancelledError, str]
    assert case.pull.is_drained
    assert case.table.handles == ()


def test_an_id_that_is_under_way_is_refused(case: Case) -> None:
    with pytest.raises(InvalidArgumentError, match="used before"):
        Pull(case.table, case.lanes, case.pull.order, on_granted=None, on_final=print, on_drained=lambda: None).enter()
    case.begin()
    case.take(case.finish(TransferState.COMMITTED, "ok"), Drained(id=IDENTITY))
    assert [type(told) for told in case.told] == [TransferResult, str]


def test_blocks_taken_back_before_it_begins_are_not_given_to_the_transport(case: Case) -> None:
    assert case.pull.unreserve()
    assert not case.pull.unreserve()
    case.begin()
    assert [len(blocks) for blocks in case.transport.given] == [0]
    assert not case.pull.unreserve()


def test_events_that_come_twice_are_told_once(case: Case) -> None:
    case.begin()
    final = case.finish(TransferState.COMMITTED, "ok")
    case.take(final, final, Drained(id=IDENTITY), Drained(id=IDENTITY))
    result = case.pull.result()
    assert case.told == [result, "drained"]
    assert (result.bytes, result.lane, set(result.seconds)) == (
        12288,
        Lane.STREAM,
        {"queue", "plan", "wire", "confirm"},
    )
    assert case.lanes.figures()[str(PEER_REF)][Lane.STREAM].small_count == 1


def test_a_failed_pull_raises_the_named_error(case: Case) -> None:
    case.begin()
    case.take(case.finish(TransferState.FAILED, "grant_revoked"))
    assert not case.pull.is_drained
    with pytest.raises(GrantRevokedError, match="why"):
        case.pull.result()


@pytest.mark.parametrize("is_final", [False, True])
def test_a_transport_that_broke_ends_and_drains_it(case: Case, is_final: bool) -> None:
    case.begin()
    if is_final:
        case.take(case.finish(TransferState.FAILED, "grant_revoked"))
    case.table.fail_all(TransportError("broke"))
    ended: KvxferError = case.told[0]
    assert isinstance(ended, GrantRevokedError if is_final else TransportError)
    assert case.told[1:] == ["drained"]
    assert case.table.handles == ()
    case.take(Drained(id=IDENTITY))
    assert len(case.told) == 2
