"""An engine takes back what it keeps for others only where waiting would bring nothing."""

from __future__ import annotations

import pytest

from kvxfer.errors import ConfigError
from kvxfer.policy.room import Held, Room

S = 1_000_000_000
OLD = Held("old", since_ns=1 * S, has_begun=False)
YOUNG = Held("young", since_ns=2 * S, has_begun=False)
READ = Held("read", since_ns=3 * S, has_begun=True)
ALL = [OLD, YOUNG, READ]


def test_the_youngest_whose_reader_has_not_begun_goes_at_once_where_nothing_will_free_blocks() -> None:
    room = Room[str]()
    assert room.victim(ALL, is_wanted=True, will_free=False, now_ns=10 * S) == "young"
    assert room.revoked == 1


def test_nothing_goes_while_nothing_is_wanted() -> None:
    room = Room[str]()
    assert room.victim(ALL, is_wanted=False, will_free=False, now_ns=10 * S) is None
    assert room.look_at_ns() is None


def test_one_that_is_being_read_is_never_taken() -> None:
    assert Room[str]().victim([READ], is_wanted=True, will_free=False, now_ns=10 * S) is None


def test_running_requests_are_waited_for_while_blocks_are_freed() -> None:
    room = Room[str](patience_s=2.0)
    for second in range(60):  # a running request ends every second: plain pressure
        assert room.victim(ALL, is_wanted=True, will_free=True, now_ns=second * S) is None
        room.freed(second * S)
    assert room.look_at_ns() == 61 * S
    assert room.victim(ALL, is_wanted=True, will_free=True, now_ns=61 * S - 1) is None
    assert room.victim(ALL, is_wanted=True, will_free=True, now_ns=61 * S) == "young"


def test_patience_begins_when_room_is_wanted_and_not_before() -> None:
    room = Room[str](patience_s=2.0)
    room.freed(0)
    assert room.victim(ALL, is_wanted=True, will_free=True, now_ns=100 * S) is None
    assert room.victim(ALL, is_wanted=False, will_free=True, now_ns=101 * S) is None
    assert room.victim(ALL, is_wanted=True, will_free=True, now_ns=102 * S) is None
    assert room.victim(ALL, is_wanted=True, will_free=True, now_ns=104 * S) == "young"


def test_one_at_a_time_until_its_blocks_came_back() -> None:
    room = Room[str](patience_s=2.0)
    assert room.victim(ALL, is_wanted=True, will_free=False, now_ns=10 * S) == "young"
    assert room.victim([OLD], is_wanted=True, will_free=False, now_ns=11 * S) is None
    room.freed(11 * S)
    assert room.victim([OLD], is_wanted=True, will_free=False, now_ns=11 * S) == "old"
    assert room.victim([YOUNG], is_wanted=True, will_free=False, now_ns=13 * S - 1) is None
    assert room.victim([YOUNG], is_wanted=True, will_free=False, now_ns=13 * S) == "young"  # those of old never came


def test_where_nothing_can_be_taken_it_asks_to_be_asked_later() -> None:
    room = Room[str](patience_s=2.0)
    assert room.victim([READ], is_wanted=True, will_free=True, now_ns=10 * S) is None
    assert room.victim([READ], is_wanted=True, will_free=True, now_ns=13 * S) is None
    assert room.look_at_ns() == 15 * S


def test_a_patience_that_makes_no_sense_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="room_wait_s"):
        Room[str](patience_s=0)


def test_where_there_is_nothing_to_give_up_it_looks_again_after_its_patience_and_not_at_once() -> None:
    room = Room[str]()
    for now_ns in (10 * S, 12 * S, 13 * S):
        assert room.victim([READ], is_wanted=True, will_free=True, now_ns=now_ns) is None
        at_ns = room.look_at_ns()
        assert at_ns is not None
        assert at_ns > now_ns
    assert room.victim([OLD, READ], is_wanted=True, will_free=True, now_ns=14 * S) == "old"
