"""What is said over the socket pair between the command and a sending process."""

from __future__ import annotations

import socket

from kvxfer.load.drive import control
from kvxfer.load.drive.control import ControlLine


def lines() -> tuple[ControlLine, ControlLine]:
    ours, theirs = socket.socketpair()
    return ControlLine(ours), ControlLine(theirs)


def test_what_was_said_before_the_end_is_heard() -> None:
    """Though what is said to a process that has ended fails."""
    ours, theirs = lines()
    theirs.say(control.RECORD, b"{}")
    theirs.say(control.ENDED, b"{}")
    theirs.flush()
    theirs.close()
    ours.say(control.STOP)
    ours.flush()
    assert not ours.has_unsent
    assert list(ours.heard()) == [(control.RECORD, b"{}"), (control.ENDED, b"{}")]
    assert not ours.is_open
    ours.close()


def test_what_the_socket_does_not_take_stays() -> None:
    ours, theirs = lines()
    for _ in range(100):
        ours.say(control.RECORD, b"x" * 10_000)
    ours.flush()
    assert ours.has_unsent
    heard = 0
    while heard < 100:
        heard += len(list(theirs.heard()))
        ours.flush()
    assert not ours.has_unsent
    ours.close()
    theirs.close()
