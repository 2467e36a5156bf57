"""How long a process stood still."""

from __future__ import annotations

from kvxfer.connectors.common.pauses import PAUSED_S, Pauses


def test_a_look_in_time_or_a_little_late_is_no_pause() -> None:
    pauses = Pauses(0.25)
    assert [pauses.look(at_s) for at_s in (100.0, 100.25, 100.25, 100.25 + 0.25 + PAUSED_S / 2)] == [0.0] * 4


def test_a_pause_is_what_is_beyond_the_period() -> None:
    pauses = Pauses(0.25)
    assert [pauses.look(at_s) for at_s in (100.0, 160.25, 160.5)] == [0.0, 60.0, 0.0]
