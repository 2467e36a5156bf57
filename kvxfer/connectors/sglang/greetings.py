"""Messages between the ranks of a prefill and a decode engine over SGLang's own sockets: before their agents know each
other, and about rooms that no agent knows. Each is signed with the cluster token, so that a room number alone gives a
process that reaches the socket nothing.

A message is three frames: TAG, where the sender hears answers (``host:port``), and the signed JSON, with a postmark.
The decoder is total: a message, or one error. Decides what stands in a message; must never know sockets, nor what it
leads to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from kvxfer.connectors.sglang.limits import Layout
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.errors import InvalidArgumentError, ProtocolError
from kvxfer.protocol.signed_metadata import Signer
from kvxfer.types import CompatibilityRecord, TransferId, check_agent_id

VERSION = 2
TAG = b"KVXFER"
TEXT_MAX = 600
METADATA_MAX = 1 << 16
LIST_MAX = 1 << 14
"""Longest list: the buffers of one rank."""


@dataclasses.dataclass(frozen=True)
class Register:
    """Decode to prefill, before its first room there: my agent, and what my pages are."""

    agent_id: str
    rank: int
    agent_metadata: str
    record: CompatibilityRecord
    layout: Layout
    shape: KvShape | None

    def __post_init__(self) -> None:
        _check_shape(self.rank, self.shape)
        if self.shape is not None:
            sizes = tuple(self.shape.page_bytes(index) for index in range(len(self.shape.layers)))
            if sizes != self.layout.kv_item_lens:
                raise InvalidArgumentError("shape is not of the pages that kv_item_lens says")


@dataclasses.dataclass(frozen=True)
class Registered:
    """Prefill's answer: my agent, and what my pages hold of the model."""

    agent_id: str
    rank: int
    agent_metadata: str
    shape: KvShape | None

    def __post_init__(self) -> None:
        _check_shape(self.rank, self.shape)


@dataclasses.dataclass(frozen=True)
class Refused:
    """Prefill's other answer."""

    code: str
    text: str


@dataclasses.dataclass(frozen=True)
class RoomRequest:
    """Decode to prefill: I want that prompt, under this transfer id, in so many pages. ``required``: how many decode
    ranks request it from that prefill rank. ``prefix_tokens`` are there already. ``is_dummy``: it is read from another
    rank."""

    room: int
    transfer_id: TransferId
    agent_id: str
    rank: int
    pages: int
    required: int
    prefix_tokens: int
    is_dummy: bool


@dataclasses.dataclass(frozen=True)
class Abort:
    """Decode to prefill: I no longer want that room. Without a transfer id I have not requested it yet."""

    room: int
    transfer_id: str
    text: str


@dataclasses.dataclass(frozen=True)
class RoomFailed:
    """Prefill to decode: nothing will be sent for that room."""

    room: int
    transfer_id: TransferId
    code: str
    text: str


@dataclasses.dataclass(frozen=True)
class Postmark:
    """The agent that sent a message, the agent that it is for, and its number among its sender's. Without agents: of no
    sender, for any receiver."""

    by: str = ""
    to: str = ""
    number: int = 0


Greeting: TypeAlias = Register | Registered | Refused | RoomRequest | Abort | RoomFailed
_KINDS: dict[str, type[Any]] = {
    "Register": Register,
    "Card": Registered,
    "Refused": Refused,
    "Room": RoomRequest,
    "Abort": Abort,
    "RoomFailed": RoomFailed,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_WIRE_NAMES = {"agent_metadata": "card"}
"""Fields with another name in the message."""


def signer_of(token: bytes) -> Signer:
    """A signer for these messages only."""
    return Signer(hmac.digest(token, b"kvxfer sglang greetings v1", hashlib.sha256))


def encode(signer: Signer, address: str, greeting: Greeting, mark: Postmark = Postmark()) -> list[bytes]:
    """The frames of a message whose sender hears answers at ``address``; texts are cut to TEXT_MAX characters."""
    values: dict[str, Any] = {"v": VERSION, "kind": _NAMES[type(greeting)], "from": address}
    values["mark"] = [mark.by, mark.to, mark.number]
    for field in dataclasses.fields(greeting):
        value = getattr(greeting, field.name)
        if isinstance(value, TransferId):
            value = str(value)
        elif isinstance(value, CompatibilityRecord | Layout):
            value = json.loads(value.to_json()) if isinstance(value, CompatibilityRecord) else value.to_json()
        elif isinstance(value, KvShape):
            value = json.loads(value.to_json())
        elif field.name in ("text", "code"):
            value = str(value)[:TEXT_MAX]
        values[_WIRE_NAMES.get(field.name, field.name)] = value
    return [TAG, address.encode(), signer.sign(json.dumps(values, separators=(",", ":")).encode()).encode()]


def is_ours(frames: Sequence[bytes]) -> bool:
    """Whether that is a message of ours, and not of SGLang's."""
    return bool(frames) and frames[0] == TAG


def address_of(frames: Sequence[bytes]) -> tuple[str, int]:
    """Where its sender hears answers; the only part of an unverified message that is used. Raises ProtocolError."""
    try:
        host, _, port = frames[1].decode("ascii").rpartition(":")
        if not host or len(host) > 255 or not 0 < int(port) < 1 << 16:
            raise ValueError
        return host.strip("[]"), int(port)
    except (IndexError, ValueError):
        raise ProtocolError("a message of another engine names no address of its sender") from None


def decode(signer: Signer, frames: Sequence[bytes]) -> Greeting:
    """As :func:`read`, without the postmark."""
    return read(signer, frames)[0]


def read(signer: Signer, frames: Sequence[bytes]) -> tuple[Greeting, Postmark]:
    """The message and its postmark. Raises AuthenticationError for a signature of another token, ProtocolError for
    anything else that :func:`encode` does not make."""
    if len(frames) != 3 or not is_ours(frames):
        raise ProtocolError("a message of another engine has not three frames")
    try:
        signed = frames[2].decode("ascii")
    except UnicodeDecodeError:
        raise ProtocolError("a message of another engine is not signed") from None
    try:
        values = json.loads(signer.verify(signed))
    except (ValueError, RecursionError):
        raise ProtocolError("a message of another engine is not JSON") from None
    if not isinstance(values, dict) or values.get("v") != VERSION:
        version = values.get("v") if isinstance(values, dict) else None
        raise ProtocolError(f"the other engine's kvxfer sent message version {version!r:.20}, not {VERSION}")
    kind = _KINDS.get(str(values.get("kind")))
    if kind is None or values.get("from") != frames[1].decode("ascii", "replace"):
        raise ProtocolError("a message of another engine has an unknown kind or another sender")
    fields = {_WIRE_NAMES.get(field.name, field.name): field for field in dataclasses.fields(kind)}
    if set(values) != {"v", "kind", "from", "mark", *fields}:
        raise ProtocolError(f"a message {_NAMES[kind]} of another engine has other fields")
    try:
        mark = _mark(values["mark"])
        made: Greeting = kind(
            **{field.name: _value(name, str(field.type), values[name]) for name, field in fields.items()}
        )
    except (InvalidArgumentError, RecursionError) as error:
        raise ProtocolError(f"a message {_NAMES[kind]} of another engine: {error}") from None
    return made, mark


def _mark(value: Any) -> Postmark:
    if not isinstance(value, list) or len(value) != 3:
        raise InvalidArgumentError("mark is not a postmark")
    by, to = (_value("agent_id", "str", agent_id) if agent_id != "" else "" for agent_id in value[:2])
    return Postmark(by, to, _value("mark", "int", value[2]))


def _value(name: str, kind: str, value: Any) -> Any:
    if kind == "TransferId":
        return TransferId.from_hex(_text(name, value, 32))
    if kind == "CompatibilityRecord":
        return CompatibilityRecord.from_json(json.dumps(value))
    if kind == "Layout":
        return _layout(value)
    if kind == "KvShape | None":
        return None if value is None else KvShape.from_json(json.dumps(value, separators=(",", ":")))
    if kind == "bool":
        if type(value) is not bool:
            raise InvalidArgumentError(f"{name} is not true or false")
        return value
    if kind == "int":
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise InvalidArgumentError(f"{name} is not a count")
        return value
    text = _text(name, value, METADATA_MAX * 2 if name == "card" else TEXT_MAX)
    if name == "agent_id":
        check_agent_id(text)
    return text


def _text(name: str, value: Any, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise InvalidArgumentError(f"{name} is not a text of at most {longest} characters")
    return value


def _check_shape(rank: int, shape: KvShape | None) -> None:
    if shape is not None and shape.tp_rank != rank % shape.tp_size:
        raise InvalidArgumentError(f"shape is of rank {shape.tp_rank} of {shape.tp_size}, and the sender {rank}")


def _layout(value: Any) -> Layout:
    if not isinstance(value, dict) or set(value) != {field.name for field in dataclasses.fields(Layout)}:
        raise InvalidArgumentError("layout has other fields")
    return Layout(
        kv_item_lens=_counts(value["kv_item_lens"]),
        aux_item_lens=_counts(value["aux_item_lens"]),
        state_types=tuple(_text("state_types", name, 64) for name in _list(value["state_types"])),
        state_item_lens=tuple(_counts(lens) for lens in _list(value["state_item_lens"])),
    )


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > LIST_MAX:
        raise InvalidArgumentError(f"layout has something that is not a list of at most {LIST_MAX}")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    return tuple(_value("layout", "int", item) for item in _list(value))
