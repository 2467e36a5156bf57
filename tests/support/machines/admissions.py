"""The kinds of admission, and two endpoints of which one admits the other by one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvxfer._native import _core
from kvxfer.protocol.handshake import session_key, session_root
from kvxfer.transport.base import read_ref
from tests.support.machines.region_pair import RegionPair

BEARER_KEY = b"g" * 32
ROOT = session_root(b"the token")


@dataclasses.dataclass(frozen=True)
class Admitting:
    """What an agent that admits unregistered peers says, and what such a peer proves."""

    admission: Any
    other: Any
    """Of the same kind, by another secret."""
    key: Callable[[Any, Any], bytes]
    """Of the admitting agent and its peer."""


ADMISSIONS = {
    "bearer": Admitting(
        _core.PeerAdmission.bearer_key(BEARER_KEY),
        _core.PeerAdmission.bearer_key(b"x" * 32),
        lambda host, peer: BEARER_KEY,
    ),
    "derived": Admitting(
        _core.PeerAdmission.derived_keys(ROOT),
        _core.PeerAdmission.derived_keys(session_root(b"another token")),
        lambda host, peer: session_key(ROOT, read_ref(host), read_ref(peer)),
    ),
}


class AdmittingPair(RegionPair):
    """``a`` knows no peer and admits by ``kind``; ``b`` knows ``a``, and what to prove to it."""

    def __init__(self, kind: str, limits: Any = None) -> None:
        self.kind = ADMISSIONS[kind]
        super().__init__(limits)

    def introduce(self, name: str) -> None:
        if name == "b":
            key = self.kind.key(self.refs["a"], self.refs["b"])
            self.ends["b"].set_peer(self.refs["a"], key, _core.SessionKind.MEMORY)
        else:
            self.ends["a"].admit(self.kind.admission)

    def greet(self) -> list[bytes]:
        """``b`` says something; what ``a`` has heard."""
        self.do("b", self.ends["b"].notify(self.refs["a"], b"hello", self.now)[1])
        self.run()
        return [event.payload for event in self.take("a", _core.NotifReceived)]

    def meet(self) -> int:
        """``b`` dials; ``a``'s session with it."""
        self.do("b", self.ends["b"].notify(self.refs["a"], b"hello", self.now)[1])
        self.run()
        assert self.ends["a"].knows(self.refs["b"])
        return next(session for name, session in self.peer_session if name == "a")


def ready_pair(kind: str) -> AdmittingPair:
    """Each has a region: ``a`` 7, ``b`` 9."""
    pair = AdmittingPair(kind)
    pair.add_region("a", 7, bytes(range(256)))
    pair.add_region("b", 9, bytes(256))
    return pair


def amid(kind: str, op: str) -> AdmittingPair:
    """The peer reads or writes eight elements; two of them are in place."""
    limits, transfers, grants = _core.EndpointLimits(), _core.TransferLimits(), _core.GrantLimits()
    transfers.read_bytes_max = grants.data_bytes_max = 32
    limits.transfers, limits.grants = transfers, grants
    pair = AdmittingPair(kind, limits)
    pair.add_region("a", 7, bytes(range(256)))
    pair.add_region("b", 9, bytes(range(256))[::-1])
    rows = [(9, 0, 16, 16, 8)], [(7, 0, 16, 16, 8)]
    pair.post("b", op, b"t" * 16, *rows, lanes=[_core.Lane.STREAM], notification=b"n")
    pair.pump()
    assert pair.perform("a") ^ pair.perform("b")
    return pair
