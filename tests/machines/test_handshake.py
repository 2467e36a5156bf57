"""How a session comes up, and the ways in which it must not: wrong key, replayed proof, reflected hello, wrong
incarnation."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest

from kvxfer._native import _core
from tests.support.limits import endpoint_limits

from_text = {"a": b"a" * 16, "b": b"b" * 16}
TCP = _core.SessionKind.TCP
KEY, NOW = b"k" * 32, 1


def ref(name: str, number: int = 1) -> Any:
    return _core.AgentRef(name, number, from_text[name])


def endpoint(name: str, peer: str, *, key: bytes = KEY, number: int = 1, peer_number: int = 1) -> Any:
    end = _core.Endpoint(ref(name, number), _core.EndpointLimits())
    end.set_peer(ref(peer, peer_number), key, TCP)
    return end


def frames(effects: list[Any]) -> list[Any]:
    return [effect.frame for effect in effects if isinstance(effect, _core.SendFrame)]


def is_up(end: Any) -> bool:
    return bool(end.counts().sessions_up)


def hung_up(effects: list[Any]) -> str:
    (hangup,) = [effect for effect in effects if isinstance(effect, _core.Hangup)]
    return str(hangup.code.name)


class Meeting:
    """A dialer ``a`` and an acceptor ``b``, frame by frame."""

    def __init__(self, **changes: Any) -> None:
        self.a = endpoint("a", "b", peer_number=changes.get("dialed_number", 1))
        self.b = endpoint("b", "a", key=changes.get("key", KEY), number=changes.get("number", 1))
        self.dialer, effects = self.a.dialed(ref("b", changes.get("dialed_number", 1)), TCP, b"1" * 32, NOW)
        self.acceptor, _ = self.b.accepted(TCP, changes.get("nonce", b"2" * 32), NOW)
        (self.hello,) = frames(effects)

    def answer(self) -> list[Any]:
        return list(self.b.on_frame(self.acceptor, self.hello, NOW))


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


def test_comes_up(meeting: Meeting) -> None:
    (accept,) = frames(meeting.answer())
    effects = meeting.a.on_frame(meeting.dialer, accept, NOW)
    assert is_up(meeting.a)
    assert not is_up(meeting.b)
    (prove,) = frames(effects)
    up = meeting.b.on_frame(meeting.acceptor, prove, NOW)
    assert is_up(meeting.b)
    assert [effect.peer for effect in up if isinstance(effect, _core.SessionUp)] == [ref("a")]


def test_proof_matches_its_description(meeting: Meeting) -> None:
    (accept,) = frames(meeting.answer())
    signed = _core.encode(_core.Hello(_core.HelloStep.DIAL, ref("a"), ref("b"), b"1" * 32, b"2" * 32))
    assert accept.mac == hmac.digest(KEY, b"kvxfer session accept v1\n" + signed, hashlib.sha256)


def test_wrong_key() -> None:
    meeting = Meeting(key=b"x" * 32)
    (accept,) = frames(meeting.answer())
    effects = meeting.a.on_frame(meeting.dialer, accept, NOW)
    assert hung_up(effects) == "unauthenticated"
    assert not is_up(meeting.a)


def test_wrong_proof_of_the_dialer(meeting: Meeting) -> None:
    meeting.answer()
    forged = _core.Hello(_core.HelloStep.PROVE, ref("a"), ref("b"), bytes(32), b"m" * 32)
    assert hung_up(meeting.b.on_frame(meeting.acceptor, forged, NOW)) == "unauthenticated"
    assert not is_up(meeting.b)


def test_replayed_proof() -> None:
    old = Meeting()
    (accept,) = frames(old.answer())
    (prove,) = frames(old.a.on_frame(old.dialer, accept, NOW))
    new = Meeting(nonce=b"3" * 32)
    new.answer()
    assert hung_up(new.b.on_frame(new.acceptor, prove, NOW)) == "unauthenticated"
    other = Meeting(nonce=b"4" * 32)
    other.answer()
    replayed = _core.Hello(accept.step, accept.agent, accept.peer, b"4" * 32, accept.mac)
    assert hung_up(other.a.on_frame(other.dialer, replayed, NOW)) == "unauthenticated"


def test_reflected_hello(meeting: Meeting) -> None:
    assert hung_up(meeting.a.on_frame(meeting.dialer, meeting.hello, NOW)) == "peer_gone"
    meeting = Meeting()
    (accept,) = frames(meeting.answer())
    assert hung_up(meeting.b.on_frame(meeting.acceptor, accept, NOW)) in ("peer_gone", "protocol")
    assert not is_up(meeting.b)


def test_reflected_mac(meeting: Meeting) -> None:
    """The acceptor's own proof, turned round, is no proof of the dialer."""
    (accept,) = frames(meeting.answer())
    turned = _core.Hello(_core.HelloStep.PROVE, ref("a"), ref("b"), bytes(32), accept.mac)
    assert hung_up(meeting.b.on_frame(meeting.acceptor, turned, NOW)) == "unauthenticated"


def test_another_incarnation_was_dialed() -> None:
    meeting = Meeting(number=2)
    effects = meeting.answer()
    assert hung_up(effects) == "peer_gone"
    (error,) = frames(effects)
    assert b"not the incarnation that was dialed" in error.text


def test_unknown_incarnation_of_the_dialer(meeting: Meeting) -> None:
    meeting.b.peer_dead(ref("a"), NOW)
    assert hung_up(meeting.answer()) == "unauthenticated"


@pytest.mark.parametrize(
    "frame",
    [
        _core.Release(bytes(16)),
        _core.Ping(_core.PingKind.ASK, 1),
        _core.Pull(b"i" * 16, 1, 1, _core.Lane.STREAM, 0, 1, 16, bytes(32), 0),
        _core.Confirm(b"i" * 16, 1),
        _core.Notif(_core.NotifKind.DELIVER, 1, 1, b""),
    ],
)
def test_nothing_is_taken_before_the_proof(meeting: Meeting, frame: Any) -> None:
    assert hung_up(meeting.b.on_frame(meeting.acceptor, frame, NOW)) == "protocol"


def test_second_hello_ends_the_session(meeting: Meeting) -> None:
    (accept,) = frames(meeting.answer())
    meeting.a.on_frame(meeting.dialer, accept, NOW)
    assert hung_up(meeting.a.on_frame(meeting.dialer, accept, NOW)) == "protocol"


def test_a_handshake_has_its_time(meeting: Meeting) -> None:
    due = meeting.b.next_deadline()
    assert due == NOW + _core.EndpointLimits().handshake_ns
    assert hung_up(meeting.b.tick(due)) == "transport"
    assert meeting.b.next_deadline() > due


def test_sessions_are_bounded() -> None:
    limits = endpoint_limits(sessions_max=1)
    end = _core.Endpoint(ref("b"), limits)
    assert end.accepted(TCP, bytes(32), NOW)[1] == []
    assert hung_up(end.accepted(TCP, bytes(32), NOW)[1]) == "overloaded"


def test_error_text_of_a_peer_is_made_printable(meeting: Meeting) -> None:
    """The owner reads the reason of an end as text, whatever bytes a peer took for one."""
    said = _core.ErrorFrame(bytes(16), 0, _core.Code.refused, b"\xff\n" * 6)
    (hangup,) = meeting.b.on_frame(meeting.acceptor, said, NOW)
    assert hangup.text == "?" * 12

    decoder = _core.Decoder()
    hello = _core.encode(meeting.hello).replace(b"\x01\x00\x00\x00a", b"\x01\x00\x00\x00\xff", 1)
    decoder.feed(hello)
    meeting = Meeting()
    effects = meeting.b.on_frame(meeting.acceptor, decoder.next(), NOW)
    assert [e.text for e in effects if isinstance(e, _core.Hangup)] == ["agent ? is not known here in that incarnation"]
