"""What ranks of SGLang engines tell each other: over SGLang's sockets, and by their agents."""

from __future__ import annotations

from kvxfer.connectors.sglang import greetings, messages
from kvxfer.connectors.sglang.limits import Layout
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.errors import AuthenticationError, ProtocolError
from tests.fuzz.python_targets.samples import RECORD, TRANSFER, Target

SEAL = greetings.seal_of(bytes(32))
ADDRESS = "127.0.0.1:4000"
MARK = greetings.Postmark("sglang-decode-1", "sglang-prefill-1", 7)


def notification(data: bytes) -> object:
    found = messages.decode(data)
    assert messages.decode(messages.encode(found)) == found
    return found


def greeting(data: bytes) -> object:
    """Of a sender that has the token: what is in the seal is anything."""
    return frames(b"\n".join([greetings.TAG, ADDRESS.encode(), SEAL.close(data).encode()]))


def frames(data: bytes) -> object:
    """Of anybody: what comes to the socket, a frame a line."""
    received = data.split(b"\n")
    found, mark = greetings.read(SEAL, received)
    host, port = greetings.address_of(received)
    again = greetings.encode(SEAL, f"[{host}]:{port}", found, mark)
    assert greetings.read(SEAL, again) == (found, mark)
    assert greetings.address_of(again) == (host, port)
    return found


NOTIFICATIONS = [
    messages.Chunk(TRANSFER, 3, 0, 64, 16),
    messages.End(TRANSFER, 4),
    messages.Done(TRANSFER),
    messages.Failed(TRANSFER, "cancelled", "why"),
    messages.Left("why"),
    messages.Alive(),
    messages.Unknown(TRANSFER),
    messages.Card("card"),
]
LAYOUT = Layout((256, 256), (64, 512), ("mamba",), ((96, 32),))
SHAPE = KvShape((0, 0), ("k", "v"), (8, 8), 16, 1, 2, 4)
GREETINGS = [
    greetings.Register("sglang-decode-1", 0, "card", RECORD, LAYOUT, None),
    greetings.Register("sglang-decode-1", 1, "card", RECORD, LAYOUT, SHAPE),
    greetings.Card("sglang-prefill-1", 1, "", SHAPE),
    greetings.Refused("incompatible", "page_size is 16 here and 32 there"),
    greetings.Room((1 << 62) + 1, TRANSFER, "sglang-decode-1", 0, 12, 1, 64, False),
    greetings.Abort(7, str(TRANSFER), "Aborted by AbortReq."),
    greetings.RoomFailed(7, TRANSFER, "refused", "in use"),
]
FRAMES = [greetings.encode(SEAL, ADDRESS, one, MARK) for one in GREETINGS]

TARGETS = {
    "sglang_notification": Target(notification, [messages.encode(one) for one in NOTIFICATIONS], (ProtocolError,)),
    "sglang_greeting": Target(greeting, [SEAL.open(sealed.decode()) for *_, sealed in FRAMES], (ProtocolError,)),
    "sglang_frames": Target(frames, [b"\n".join(one) for one in FRAMES], (ProtocolError, AuthenticationError)),
}
