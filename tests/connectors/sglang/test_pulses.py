"""A prefill engine that is paused, or handles a long control request, is waited for; one that hangs is not."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Iterator

from kvxfer.connectors.sglang import pulses
from tests.support.sglang_core.cores import Rank, begin, idle, new_id, open_room, pair, until

SILENT_S = 0.4
"""After which an engine counts as gone, in these tests."""


@contextlib.contextmanager
def coming_round(rank: Rank, *, is_paused: bool) -> Iterator[None]:
    """The engine's loop, which has work, comes round until the block ends."""
    ending = threading.Event()

    def loop() -> None:
        while not ending.wait(0.01):
            rank.core.come_round(is_paused=is_paused)
            if not is_paused:
                rank.core.pulses.step(True)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def queued(rank: Rank) -> tuple[int, int]:
    """How many prompts of its readers are known, and how many are not."""
    pulls = rank.core.statistics().agent.pulls
    return pulls.queued, pulls.unknown


def test_prompts_of_a_paused_engine_are_waited_for(tmp_path: pathlib.Path) -> None:
    with pair(tmp_path, engine_silent_s=SILENT_S, unknown_wait_s=SILENT_S) as (p, d):
        with coming_round(p, is_paused=True):
            until(lambda: p.core.pulses.is_paused)
            open_room(p, d, 5, (1,), 0)
            begin(p, d, 6, (2,), 1)  # the engine's front keeps this prompt to itself
            until(lambda: queued(d) == (1, 1))
            time.sleep(4 * SILENT_S)
        with coming_round(p, is_paused=False):
            until(lambda: not p.core.pulses.is_paused)
            time.sleep(SILENT_S / 4)
            assert d.none("failed"), "the front hands its prompts over after the pause"
            p.sources.accept(6)
            for room in (5, 6):
                p.sources.send(room, 0, (room,), is_last=True, aux_row=room - 5)
                d.wait("done", room)
                p.wait("sent", room)
                d.destinations.clear(room)
                p.sources.clear(room)
            d.destinations.begin(7, new_id(), [("p", 0)], (3,), 2)
            assert d.wait("failed", 7, 5.0)[2] == "grant_unknown", "no prompt is waited for longer than without a pause"
        d.destinations.clear(7)
        idle(p, d)


def test_an_idle_engine_after_a_pause_is_idle(tmp_path: pathlib.Path) -> None:
    with pair(tmp_path, engine_silent_s=SILENT_S, unknown_wait_s=SILENT_S) as (p, d):
        p.core.come_round(is_paused=True)
        p.core.come_round(is_paused=False)
        d.destinations.begin(5, new_id(), [("p", 0)], (1,), 0)
        assert d.wait("failed", 5, 5.0)[2] == "grant_unknown", "it has no work, and no step is due"


def test_a_loop_that_hangs_in_a_pause_is_given_up(tmp_path: pathlib.Path) -> None:
    with pair(tmp_path, engine_silent_s=SILENT_S) as (p, d):
        with coming_round(p, is_paused=True):
            open_room(p, d, 5, (1,), 0)
            until(lambda: queued(d) == (1, 0))
        assert d.wait("failed", 5, 5.0)[2] == "peer_gone"


def test_a_long_control_request_is_waited_for(tmp_path: pathlib.Path) -> None:
    """Nothing but the agent's thread runs meanwhile. Its caller has a bound."""
    with pair(tmp_path, engine_silent_s=pulses.CALL_S + SILENT_S) as (p, d):
        open_room(p, d, 5, (1,), 0, timeout_s=60.0)
        p.core.pulses.step(True)
        with p.core.pulses.call():
            begin(p, d, 6, (2,), 1, timeout_s=2.5 * (pulses.CALL_S + SILENT_S))
            assert d.wait("failed", 6)[2] == "deadline"
            assert d.none("done")
            assert p.core.pulses.is_paused
        p.core.come_round(is_paused=False)
        p.sources.send(5, 0, (7,), is_last=True, aux_row=0)
        d.wait("done", 5)


def test_short_control_requests_are_no_pause(tmp_path: pathlib.Path) -> None:
    """However many there are, a prompt that never came is not waited for."""
    with pair(tmp_path, unknown_wait_s=SILENT_S) as (p, d):
        d.destinations.begin(5, new_id(), [("p", 0)], (1,), 0)
        end_s = time.monotonic() + 5.0
        while d.none("failed"):
            with p.core.pulses.call():
                assert time.monotonic() < end_s
                time.sleep(0.01)
            p.core.come_round(is_paused=False)
            p.core.pulses.step(True)
        assert d.wait("failed", 5)[2] == "grant_unknown"
