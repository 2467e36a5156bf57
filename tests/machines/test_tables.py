"""The state tables, pair by pair, against what their essays say."""

from __future__ import annotations

from kvxfer._native import _core
from kvxfer._native._core import GrantEvent as GE
from kvxfer._native._core import GrantState as GS
from kvxfer._native._core import PushEvent as PE
from kvxfer._native._core import TransferEvent as TE
from kvxfer._native._core import TransferState as TS

ENDS = {GE.RELEASE: GS.RELEASED, GE.REVOKE: GS.REVOKED, GE.EXPIRE: GS.EXPIRED, GE.READER_DEAD: GS.READER_GONE}
FINAL = (TS.COMMITTED, TS.FAILED, TS.CANCELLED)
LIVE = (TS.CONNECTING, TS.WAITING, TS.GRANTED, TS.READING, TS.CONFIRMING)

LISTED = {
    (TS.CONNECTING, TE.SESSION_UP): TS.WAITING,
    (TS.CONNECTING, TE.SESSION_UP_LANDED): TS.CONFIRMING,
    (TS.CONNECTING, TE.LANDED): TS.CONNECTING,
    (TS.CONNECTING, TE.LANDED_ALL): TS.CONNECTING,
    (TS.WAITING, TE.GRANTED): TS.GRANTED,
    (TS.GRANTED, TE.GRANTED): TS.GRANTED,
    (TS.CONNECTING, TE.RESERVED): TS.CONNECTING,
    (TS.WAITING, TE.RESERVED): TS.WAITING,
    (TS.GRANTED, TE.RESERVED): TS.WAITING,
    (TS.WAITING, TE.KNOWN): TS.READING,
    (TS.READING, TE.KNOWN): TS.READING,
    (TS.WAITING, TE.HEARD): TS.READING,
    (TS.READING, TE.HEARD): TS.READING,
    (TS.READING, TE.LANDED): TS.READING,
    (TS.READING, TE.LANDED_ALL): TS.CONFIRMING,
    (TS.CONFIRMING, TE.HEARD): TS.CONFIRMING,
    (TS.CONFIRMING, TE.VERDICT_OK): TS.COMMITTED,
    **{(state, TE.SESSION_LOST): TS.CONNECTING for state in LIVE},
    **{(state, TE.FAIL): TS.FAILED for state in LIVE},
    **{(state, TE.CANCEL): TS.CANCELLED for state in LIVE},
    **{(state, event): state for state in FINAL for event in TE},
}


def test_grant_table() -> None:
    rows = _core.grant_transitions()
    assert len(rows) == len(GS) * len(GE)
    for state, event, after in rows:
        if state != GS.ALIVE:
            assert after == (None if event == GE.READY else state), (state, event)
        else:
            assert after == ENDS.get(event, GS.ALIVE), (state, event)


def test_nothing_revives_a_grant() -> None:
    assert all(after != GS.ALIVE for state, _, after in _core.grant_transitions() if state != GS.ALIVE)


def test_transfer_table() -> None:
    rows = _core.transfer_transitions()
    assert len(rows) == len(TS) * len(TE)
    for state, event, after in rows:
        assert after == LISTED.get((state, event)), (state, event)


def test_only_a_verdict_commits_and_only_when_everything_landed() -> None:
    ways = [(state, event) for state, event, after in _core.transfer_transitions() if after == TS.COMMITTED != state]
    assert ways == [(TS.CONFIRMING, TE.VERDICT_OK)]


PUSH_LISTED = {
    (TS.CONNECTING, PE.SESSION_UP): TS.WAITING,
    (TS.WAITING, PE.DONE): TS.COMMITTED,
    **{(state, PE.SESSION_LOST): TS.CONNECTING for state in LIVE[:2]},
    **{(state, PE.FAIL): TS.FAILED for state in LIVE[:2]},
    **{(state, PE.CANCEL): TS.CANCELLED for state in LIVE[:2]},
    **{(state, event): state for state in FINAL for event in PE},
}


def test_push_table() -> None:
    rows = _core.push_transitions()
    assert len(rows) == len(TS) * len(PE)
    for state, event, after in rows:
        assert after == PUSH_LISTED.get((state, event)), (state, event)
