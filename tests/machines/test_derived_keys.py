"""Unregistered peers that prove a session key derived from the cluster secret."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane
from kvxfer.errors import InvalidArgumentError
from kvxfer.protocol.handshake import session_key, session_root
from kvxfer.transport.base import read_ref
from tests.support.machines.endpoint_pair import Pair

ROOT = session_root(b"the token")
ID = b"t" * 16


class DerivedKeyPair(Pair):
    """``b`` knows ``a``; ``a`` knows the cluster secret and no peer."""

    def __init__(self, root: bytes = ROOT, limits: Any = None) -> None:
        self.root = root
        super().__init__(limits)

    def introduce(self, name: str) -> None:
        if name == "b":
            key = session_key(ROOT, read_ref(self.refs["a"]), read_ref(self.refs["b"]))
            self.ends["b"].set_peer(self.refs["a"], key, _core.SessionKind.MEMORY)
        else:
            self.ends["a"].accept_derived_keys(self.root)

    def greet(self) -> list[bytes]:
        """``b`` says something; what ``a`` has heard."""
        self.do("b", self.ends["b"].notify(self.refs["a"], b"hello", self.now)[1])
        self.pump()
        return [event.payload for event in self.take("a", _core.NotifReceived)]


def test_peer_that_proves_its_derived_key_is_accepted() -> None:
    pair = DerivedKeyPair()
    a, b = pair.ends["a"], pair.refs["b"]
    assert pair.greet() == [b"hello"]
    assert [event.peer for event in pair.take("a", _core.SessionUp)] == [b]
    assert a.is_connected(b)
    pair.do("a", a.grant(ID, 1, [3], reader="b", ttl_ns=10**9, ready_blocks=1, now_ns=pair.now))
    pair.do("b", pair.ends["b"].pull(ID, pair.refs["a"], 1, [5], 0, [Lane.MEMORY], pair.now + 10**9, 1, pair.now))
    pair.pump()
    assert len(pair.take("b", _core.ReadBlocks)) == 1


def test_derived_key_peer_stays_known_when_its_session_ends() -> None:
    """It may come again: what it was granted does not end with a connection."""
    pair = DerivedKeyPair()
    pair.greet()
    pair.cut_all()
    assert pair.ends["a"].knows(pair.refs["b"])
    assert not pair.ends["a"].is_connected(pair.refs["b"])
    assert pair.greet() == [b"hello"]


def test_peer_with_another_secret_is_refused() -> None:
    pair = DerivedKeyPair(session_root(b"another token"))
    assert pair.greet() == []
    assert not pair.ends["a"].knows(pair.refs["b"])
    assert [event.code for event in pair.take("b", _core.Hangup)] == [Code.unauthenticated]


def test_bearer_key_and_derived_keys_exclude_each_other() -> None:
    for first, second in (("accept_derived_keys", "accept_bearer_key"), ("accept_bearer_key", "accept_derived_keys")):
        end = _core.Endpoint(_core.AgentRef("a", 1, b"n" * 16), _core.EndpointLimits())
        getattr(end, first)(ROOT)
        getattr(end, first)(ROOT)
        with pytest.raises(InvalidArgumentError):
            getattr(end, second)(ROOT)


refs = st.builds(
    _core.AgentRef,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    st.integers(0, (1 << 64) - 1),
    st.binary(min_size=16, max_size=16),
)


@given(refs, refs, st.binary(min_size=32, max_size=32))
def test_the_core_derives_the_keys_that_python_does(ours: Any, theirs: Any, root: bytes) -> None:
    if ours == theirs:
        return
    end = _core.Endpoint(ours, _core.EndpointLimits())
    end.accept_derived_keys(root)
    dialer = _core.Endpoint(theirs, _core.EndpointLimits())
    dialer.set_peer(ours, session_key(root, read_ref(ours), read_ref(theirs)), _core.SessionKind.TCP)
    mine, (hello,) = dialer.dialed(ours, _core.SessionKind.TCP, b"1" * 32, 1)
    other, _ = end.accepted(_core.SessionKind.TCP, b"2" * 32, 1)
    (accept,) = end.on_frame(other, hello.frame, 1)
    prove = dialer.on_frame(mine, accept.frame, 1)[0]
    end.on_frame(other, prove.frame, 1)
    assert end.is_connected(theirs)
