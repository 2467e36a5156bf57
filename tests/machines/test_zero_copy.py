"""Payloads that the kernel has only references to: the reader asks after its last read, and takes no other verdict."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.limits import endpoint_limits
from tests.support.machines.region_pair import RegionPair

ID = b"t" * 16
DATA = bytes(range(256))


class ZeroCopyPair(RegionPair):
    """``a`` sends all its blocks zero-copy."""

    def __init__(self, limits: Any) -> None:
        super().__init__(limits)
        self.heard: list[Any] = []

    def send_zero_copy(self, *, is_zero_copy: bool = True) -> Any:
        """Performs ``a``'s SendData; returns ``b``'s landing and the frame, nothing of it read yet."""
        (effect,) = self.take("a", _core.SendData)
        plain = effect.frame
        said = plain.id, plain.attempt, plain.first, plain.count, plain.complete, plain.payload_bytes
        frame = _core.Data(*said, is_zero_copy=is_zero_copy)
        _, theirs = self.peer_session["a", effect.session]
        landing = self.ends["b"].data_arrives(theirs, frame, self.now)
        self.do(
            "a",
            self.ends["a"].data_sent(
                effect.session, ID, frame.attempt, frame.count, self.now, is_zero_copy=is_zero_copy
            ),
        )
        return landing, frame

    def verdicts(self) -> list[Any]:
        return [frame for _, _, frame in self.wire if isinstance(frame, _core.Verdict)]


def posted(*, frames: int = 1) -> ZeroCopyPair:
    """``b`` has asked for four elements; they go out in so many frames."""
    pair = ZeroCopyPair(endpoint_limits(data_bytes_max=256 // frames))
    pair.add_region("a", 7, DATA)
    pair.add_region("b", 9, bytes(256))
    pair.post("b", "fetch", ID, [(9, 0, 64, 64, 4)], [(7, 0, 64, 64, 4)], lanes=[Lane.STREAM])
    pair.pump(lambda frame: pair.heard.append(frame) or 1)
    return pair


@pytest.fixture
def pair() -> ZeroCopyPair:
    return posted()


def confirms(pair: ZeroCopyPair) -> list[Any]:
    return [frame for _, _, frame in pair.wire if isinstance(frame, _core.Confirm)]


def test_the_source_says_nothing_by_itself(pair: ZeroCopyPair) -> None:
    landing, _ = pair.send_zero_copy()
    assert pair.verdicts() == []
    pair.pump()
    assert pair.finals("b") == []
    pair.do("b", pair.ends["b"].read_landed(ID, landing.token, pair.now))
    assert len(confirms(pair)) == 1
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")]


def test_an_ok_from_before_the_last_read_is_none(pair: ZeroCopyPair) -> None:
    """Of the attempt, as for bytes that were copied: true when it was said, and said too soon."""
    (pull,) = [frame.pull for frame in pair.heard if isinstance(frame, _core.Fetch)]
    landing, _ = pair.send_zero_copy()
    session = next(session for name, session in pair.peer_session if name == "b")
    b = pair.ends["b"]
    early = _core.Verdict(ID, pull.nonce, Code.ok)
    pair.do("b", b.on_frame(session, early, pair.now))
    pair.do("b", b.read_landed(ID, landing.token, pair.now))
    pair.do("b", b.on_frame(session, early, pair.now))
    assert pair.finals("b") == []
    pair.remove_region("a", 7)
    pair.run()
    ((state, _),) = pair.finals("b")
    assert state == "FAILED"


def test_a_session_that_is_lost_before_the_question(pair: ZeroCopyPair) -> None:
    landing, _ = pair.send_zero_copy()
    pair.cut_all()
    pair.do("b", pair.ends["b"].read_landed(ID, landing.token, pair.now))
    pair.advance(5 * S)
    assert pair.finals("b") == [("COMMITTED", "ok")]


@pytest.mark.parametrize("frames", [[True, False], [False, True], [False, False]])
def test_one_zero_copy_frame_is_enough_to_ask_for_a_verdict(frames: list[bool]) -> None:
    pair = posted(frames=2)
    for is_zero_copy in frames:
        assert (confirms(pair), pair.verdicts()) == ([], [])
        landing, _ = pair.send_zero_copy(is_zero_copy=is_zero_copy)
        pair.do("b", pair.ends["b"].read_landed(ID, landing.token, pair.now))
    assert (len(confirms(pair)), len(pair.verdicts())) == ((1, 0) if any(frames) else (0, 1))
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")]


def test_an_attempt_after_it_that_is_copied_needs_no_question() -> None:
    """It was asked for after the last read of zero-copy bytes."""
    pair = posted(frames=2)
    landing, _ = pair.send_zero_copy()
    pair.do("b", pair.ends["b"].read_landed(ID, landing.token, pair.now))
    pair.take("a", _core.SendData)  # the other half is on its way when the session is lost
    pair.cut_all()
    for _ in range(100):
        pair.advance(50 * MS)
        if any(isinstance(effect, _core.SendData) for effect in pair.told["a"]):
            break
    landing, frame = pair.send_zero_copy(is_zero_copy=False)
    assert frame.first == 2
    assert len(pair.verdicts()) == 1
    pair.do("b", pair.ends["b"].read_landed(ID, landing.token, pair.now))
    assert confirms(pair) == []
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")]


def test_zero_copy_data_with_checksums_is_refused() -> None:
    with pytest.raises(Exception, match="zero-copy"):
        _core.encode(_core.Data(ID, 1, 0, 1, True, 20, has_checksums=True, is_zero_copy=True))
    whole = bytearray(_core.encode(_core.Data(ID, 1, 0, 1, True, 16, is_zero_copy=True)))
    decoder = _core.Decoder()
    decoder.feed(bytes(whole))
    assert decoder.next().is_zero_copy
    whole[whole.index(2, 8 + 16 + 12)] = 3
    decoder = _core.Decoder()
    decoder.feed(bytes(whole))
    with pytest.raises(Exception, match="payload"):
        decoder.next()
