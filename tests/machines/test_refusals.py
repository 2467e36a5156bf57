"""A session ends with the last refusal that it survives, and what an honest peer has under way goes on without it."""

from __future__ import annotations

import pytest

from kvxfer._native import _core
from tests.support.limits import endpoint_limits
from tests.support.machines.region_pair import RegionPair

BYTES = bytes(range(256))


def pair_that_survives(refusals: int) -> RegionPair:
    pair = RegionPair(endpoint_limits(refusals_max=refusals))
    pair.add_region("a", 7, BYTES)
    pair.add_region("a", 8, BYTES, can_read=False)
    pair.add_region("b", 9, bytes(256))
    return pair


def ask_for_what_may_not_be_read(pair: RegionPair, number: int) -> None:
    identity = bytes([number]) * 16
    pair.post("b", "fetch", identity, [(9, 240, 16, 16, 1)], [(8, 0, 16, 16, 1)])


def test_the_session_survives_all_but_the_last() -> None:
    """The answer to that is lost with the session: it is asked for again, in the next one."""
    pair = pair_that_survives(3)
    for number in (1, 2):
        ask_for_what_may_not_be_read(pair, number)
        pair.run()
    assert pair.finals("b") == [("FAILED", "refused")] * 2
    assert pair.take("a", _core.Hangup) == []
    ask_for_what_may_not_be_read(pair, 3)
    pair.run()
    assert [(e.code.name, e.text) for e in pair.take("a", _core.Hangup)] == [
        ("refused", "refusals_max (3) is reached on this session")
    ]
    assert pair.finals("b") == [("FAILED", "refused")]
    assert pair.ends["a"].counts().grants.refused == 4
    assert pair.ends["a"].counts().sessions_up == 1


class Said(Exception):
    """A frame that ends the test."""


def test_the_answer_goes_out_before_the_session_ends_with_the_first() -> None:
    """These two lose what is on its way when a session ends, and would ask and be refused for ever."""
    pair = pair_that_survives(1)

    def look(frame: object) -> int:
        if isinstance(frame, _core.ErrorFrame):
            raise Said(frame)
        return 1

    ask_for_what_may_not_be_read(pair, 1)
    with pytest.raises(Said) as said:
        pair.pump(look)
    (frame,) = said.value.args
    assert (frame.id, frame.code) == (bytes([1]) * 16, _core.Code.refused)
    assert len(pair.take("a", _core.Hangup)) == 1


def test_transfer_in_progress_continues_in_another_session() -> None:
    pair = pair_that_survives(2)
    ask_for_what_may_not_be_read(pair, 1)
    pair.run()
    pair.post("b", "fetch", b"g" * 16, [(9, 0, 128, 128, 1)], [(7, 0, 128, 128, 1)])
    pair.pump()  # asked for, and granted; it has not been read yet
    ask_for_what_may_not_be_read(pair, 2)
    pair.run()
    assert len(pair.take("a", _core.Hangup)) == 1
    assert sorted(pair.finals("b")) == [("COMMITTED", "ok"), ("FAILED", "refused"), ("FAILED", "refused")]
    assert pair.memory["b"][9][:128] == BYTES[:128]
    assert pair.ends["a"].counts().sessions_up == 1
