"""Polls that something raises out of: a signal's handler, a callback. No event is lost."""

from __future__ import annotations

import functools
import itertools
import opcode
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.transport.engine import TransferBatch, TransferEngine
from kvxfer.transport.transfers import TransferTable
from kvxfer.types import TransferState
from tests.support.posts_setting import MANY, Drained, Setting

MODULES = {kind.__module__ for kind in (TransferBatch, TransferEngine, TransferTable)}


class Interrupt:
    """Raises where a signal's handler may: after a call, at the begin of a function, at the end of a loop's turn. In
    the modules of posts alone, and there at the `at`-th such place."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.left = at
        self._error = error
        self._last: dict[types.FrameType, str] = {}

    def trace(self, frame: types.FrameType, event: str, _: object) -> Any:
        if frame.f_globals["__name__"] not in MODULES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            last = self._last.get(frame, "")
            self._last[frame] = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
            if last in ("RESUME", "JUMP_BACKWARD") or (
                last.startswith("CALL") and not last.startswith("CALL_INTRINSIC")
            ):
                self.left -= 1
                if self.left < 0:
                    sys.settrace(None)
                    raise self._error
        return self.trace

    def poll(self, poster: TransferEngine) -> bool:
        return self.run(poster.poll)

    def run(self, call: Callable[[], object]) -> bool:
        """Whether it came to raise."""
        before = sys.gettrace()
        # Python 3.12 asks for each instruction only if some frame wanted that before tracing began.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self.trace)
        try:
            call()
        except self._error:
            return True
        finally:
            sys.settrace(before)
        return False


@pytest.mark.parametrize("end", [TransferState.COMMITTED, TransferState.FAILED])
def test_an_interrupt_amid_a_poll(monkeypatch: pytest.MonkeyPatch, end: TransferState) -> None:
    """Wherever it comes: what was taken from the transport is not lost, and the next poll goes on with it."""
    places = 0
    for places in itertools.count():
        setting = Setting(monkeypatch)
        told: list[str] = []
        post = setting.poster.start(
            setting.plan(),
            notification=b"done",
            on_final=lambda post, told=told: told.append("final"),
            on_drained=lambda post, told=told: told.append("drained"),
        )
        for identity in post.transfer_ids:
            setting.finish(identity, end)
        setting.transport.events += [Drained(id=identity) for identity in post.transfer_ids]
        setting.transport.events += ["of no post", "nor this"]
        setting.transport.drain = functools.partial(next, iter([setting.transport.events]), [])  # type: ignore[method-assign]
        has_raised = Interrupt(places).poll(setting.poster)
        setting.poster.poll()
        assert post.poll() is end
        assert told == ["final", "drained"]
        assert post.is_drained
        assert setting.poster.batches == ()
        assert post.statistics().attempts == 3
        # Where it comes between the act and the note that it was done, that is done again.
        assert list(dict.fromkeys(setting.others)) == ["of no post", "nor this"]
        assert len(setting.others) <= 2 + has_raised
        assert set(setting.transport.notified) == ({b"done"} if end is TransferState.COMMITTED else set())
        assert not setting.poster.transfers._left
        if not has_raised:
            break
    assert places > 50


@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_amid_a_start(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], before: int, count: int
) -> None:
    """Wherever it comes, the call raises, and what it had begun is cancelled and kept until it drained: by the first
    start of a plan, and by later ones."""
    places = 0
    for places in itertools.count():
        setting = Setting(monkeypatch)
        plan = setting.plan(count)
        for _ in range(before):
            post = setting.poster.start(plan)
            setting.drained(post)
        assert setting.poster.batches == ()
        known = {asked.id for asked in setting.transport.asked}
        has_raised = Interrupt(places, error).run(lambda setting=setting, plan=plan: setting.poster.start(plan))
        begun = [asked.id for asked in setting.transport.asked if asked.id not in known]
        assert len(set(begun)) == len(begun)
        if not has_raised:
            assert len(begun) == len(plan.parts)
            assert setting.transport.cancelled == []
            break
        assert sorted(setting.transport.cancelled) == sorted(begun)
        assert len(setting.poster.batches) == bool(begun)
        for identity in begun:
            assert setting.poster.handle(Drained(id=identity))
        assert setting.poster.batches == ()
        assert setting.poster.start(plan).transfer_ids[0] not in begun
    assert places > 10


def test_a_callback_that_raises(setting: Setting) -> None:
    """It is called once; the events behind it are not lost."""
    told: list[str] = []

    def fail(what: str) -> None:
        told.append(what)
        raise ValueError(what)

    setting.poster.transfers._on_event = lambda event: fail(str(event))
    post = setting.poster.start(setting.plan(100), on_final=lambda post: fail("final"))
    setting.finish(post.transfer_ids[0])
    setting.transport.events += ["other", Drained(id=post.transfer_ids[0])]
    for what in ("final", "other"):
        with pytest.raises(ValueError, match=what):
            post.poll()
    assert post.poll() is TransferState.COMMITTED
    assert post.is_drained
    assert told == ["final", "other"]
