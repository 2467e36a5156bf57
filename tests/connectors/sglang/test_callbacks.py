"""Callbacks from the agent's thread: in order, and not of a room whose number is another room's by then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvxfer.connectors.sglang.callbacks import Callbacks


@dataclasses.dataclass(eq=False)
class Numbered:
    number: int


def test_a_room_that_was_cleared_before_its_end_was_told_ends_no_later_one() -> None:
    soon: list[Callable[[], None]] = []
    callbacks, told = Callbacks(soon.append), list[tuple[object, ...]]()
    first, second = Numbered(7), Numbered(7)
    rooms = {7: first}
    callbacks.tell_of(first, rooms, lambda *what: told.append(what), "cancelled")
    rooms[7] = second
    callbacks.tell_of(second, rooms, lambda *what: told.append(what), "done")
    for call in soon:
        call()
    assert told == [(7, "done")]
