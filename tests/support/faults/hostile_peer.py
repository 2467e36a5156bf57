"""A peer that knows the key and the protocol, and says what it likes: real machines for the handshake, bare frames
after it.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any

from kvxfer._native import _core as native
from kvxfer.testing.contract.parties import RECORD
from tests.support.faults.parties import KEY, Party

ANSWER_S = 10.0


class HostilePeer:
    def __init__(self, name: str) -> None:
        self.ref = native.AgentRef(name, 1, os.urandom(16))
        self.endpoint = native.Endpoint(self.ref, native.EndpointLimits())
        self.decoder = native.Decoder()
        self.session = 0
        self.socket = socket.socket()

    def metadata(self) -> dict[str, Any]:
        """So that the victim's coordinator has named it."""
        return {
            "ref": [self.ref.agent_id, self.ref.boot_nonce.hex()],
            "address": ["127.0.0.1", 0, "", "", []],
            "records": [],
        }

    def connect(self, victim: Party) -> None:
        self.socket.close()
        self.decoder = native.Decoder()
        self.socket = socket.create_connection(("127.0.0.1", victim.transport.address.tcp_port), ANSWER_S)

    def dial(self, victim: Party, key: bytes = KEY) -> None:
        """A session that is up; raises EOFError where the victim hangs up."""
        self.connect(victim)
        self.endpoint = native.Endpoint(self.ref, native.EndpointLimits())
        self.endpoint.set_peer(victim.core.agent, key, native.SessionKind.TCP)
        _, effects = self.endpoint.dialed(victim.core.agent, native.SessionKind.TCP, os.urandom(32), 1)
        self._perform(effects)
        while self.endpoint.counts().sessions_up == 0:
            self._perform(self.endpoint.on_frame(1, self.next(), 1))

    def _perform(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, native.SendFrame):
                self.say(effect.frame)

    def say(self, frame: Any) -> None:
        self.shout(native.encode(frame))

    def shout(self, data: bytes) -> None:
        """Whatever it is."""
        self.socket.sendall(data)

    def next(self) -> Any:
        while (frame := self.decoder.next()) is None:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError("hung up")
            self.decoder.feed(data)
        return frame

    def answer(self, transfer: bytes) -> Any:
        """What the victim says of that id; raises EOFError where it hung up."""
        while True:
            frame = self.next()
            if getattr(frame, "id", None) == transfer:
                return frame

    def is_hung_up(self) -> bool:
        """Whether the session ends, whatever is said before."""
        try:
            while True:
                self.next()
        except (EOFError, ConnectionError):
            return True

    def pull(self, transfer: bytes, first: int, count: int, lane: Any = native.Lane.STREAM, *, attempt: int = 1) -> Any:
        digest = RECORD.digest()
        return native.Pull(transfer, attempt, secrets.randbits(63), lane, first, count, 4096, digest, 1000)

    def fetch(self, transfer: bytes, rows: list[tuple[int, int, int, int, int]], *, attempt: int = 1) -> Any:
        count = sum(row[4] for row in rows)
        pull = native.Pull(transfer, attempt, secrets.randbits(63), native.Lane.STREAM, 0, count, 0, bytes(32), 1000)
        return native.Fetch(pull, native.WireList(rows))

    def close(self) -> None:
        self.socket.close()
