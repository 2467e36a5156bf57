"""What NIXL agents send each other, and what comes out of the store that they meet in."""

from __future__ import annotations

import math
from typing import Any

from kvxfer.connectors.nixl import codec, metadata, p2p, tcpstore
from kvxfer.connectors.nixl.deadline_socket import DeadlineSocket
from kvxfer.connectors.nixl.dlists import nixlRegDList, nixlXferDList
from kvxfer.connectors.nixl.enums import nixl_mem_t
from kvxfer.connectors.nixl.errors import nixlBackendError, nixlMismatchError
from kvxfer.connectors.nixl.notification_inbox import envelope_for, open_envelope
from kvxfer.connectors.nixl.registry import newest
from tests.fuzz.python_targets.samples import ADDRESS, REF, REGIONS, Target, look_up


def nixl_descriptors(data: bytes) -> object:
    found = codec.decode_any(data)
    assert codec.encode_dlist(found) == data
    return found


def nixl_metadata(data: bytes) -> object:
    found = metadata.decode_metadata(data)
    assert metadata.decode_metadata(metadata.encode_metadata(found)) == found
    look_up(newest(found.records))
    return found


def nixl_notification(data: bytes) -> object:
    for agent_id in ("a", metadata.wire_id("a name")):
        opened = open_envelope(agent_id, data)
        assert opened is None or metadata.wire_id(opened[0]) == agent_id
    return data


class Connection:
    """A socket on which these bytes come, and then the other side has hung up."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def recv(self, size: int) -> bytes:
        part, self._data = self._data[:size], self._data[size:]
        return part

    def sendall(self, data: bytes) -> None: ...
    def settimeout(self, timeout_s: float) -> None: ...
    def shutdown(self, how: int) -> None: ...
    def close(self) -> None: ...


def nixl_frames(data: bytes) -> object:
    connection: Any = Connection(data)
    found = []
    while (frame := p2p.receive_frame(DeadlineSocket(connection, math.inf))) is not None:
        found.append(frame)
    assert sum(p2p.HEAD.size + len(body) for _, body in found) == len(data)
    return found


def tcpstore_answer(data: bytes) -> object:
    connection: Any = Connection(data)
    client: Any = tcpstore.TcpStoreClient("127.0.0.1:1", 1.0, 1.0)
    client._dial = lambda *rest: DeadlineSocket(connection, math.inf)
    found = client.get("a", "metadata")
    assert found is None or len(found) < len(data)
    return found


BLOBS = [
    metadata.encode_metadata(metadata.AgentMetadata("a", REF, REGIONS, True, ADDRESS, bytes(32))),
    metadata.encode_metadata(metadata.AgentMetadata("a name", REF, (), False)),
]
ROWS = [(1000, 105, 0), (2000, 30, 1), (2**64 - 1, 1, 2**64 - 1)]
LISTS = [
    codec.encode_dlist(nixlXferDList(nixl_mem_t.DRAM_SEG, ROWS)),
    codec.encode_dlist(nixlRegDList(nixl_mem_t.DRAM_SEG, [(*row, b"meta") for row in ROWS])),
    codec.encode_dlist(None),
]
FRAMES = [
    b"".join(p2p.HEAD.pack(p2p.MAGIC, p2p.VERSION, kind, len(body)) + body for kind, body in frames)
    for frames in ([(p2p.LOAD, BLOBS[1]), (p2p.SEND, b"")], [(p2p.FORGET, bytes(33))])
]

TARGETS = {
    "nixl_descriptors": Target(nixl_descriptors, LISTS, (nixlMismatchError,)),
    "nixl_metadata": Target(nixl_metadata, BLOBS, (nixlMismatchError,)),
    "nixl_notification": Target(
        nixl_notification, [envelope_for("a name")(b"text"), envelope_for("a")(b"text"), b"\0"]
    ),
    "nixl_frames": Target(nixl_frames, FRAMES, (nixlMismatchError,)),
    "tcpstore_answer": Target(
        tcpstore_answer, [b"\0" + tcpstore._text(b"blob"), b"\1", b"\0" + tcpstore._text(b"")], (nixlBackendError,)
    ),
}
