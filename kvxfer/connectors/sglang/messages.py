"""Messages between ranks of a prefill and a decode engine beside the transfers: JSON in agents' notifications, one
message each.

The decoder is total: a message or ProtocolError. A message about a transfer that is not known, or is over, means
nothing.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeAlias

from kvxfer.errors import InvalidArgumentError, ProtocolError
from kvxfer.types import TransferId

COUNT_MAX = 1 << 31
TEXT_MAX = 512
METADATA_MAX = 60_000
"""Characters of signed agent metadata: it fits one notification."""
_TEXTS = {"code": TEXT_MAX, "text": TEXT_MAX, "card": METADATA_MAX}
END_PART = COUNT_MAX - 1
"""The part that is the auxiliary row, which SGLang reads the first token from; all others have smaller numbers."""
KV_POOL = 0
"""The pool of the pages; the state components are those after it, in their order."""


@dataclasses.dataclass(frozen=True)
class PartGranted:
    """Source to reader: part ``part`` is granted. It holds the rows ``first`` to ``first + count`` of those that the
    reader wants in ``pool`` (KV_POOL, or a state component)."""

    transfer_id: TransferId
    part: int
    pool: int
    first: int
    count: int


@dataclasses.dataclass(frozen=True)
class End:
    """Source to reader: there are ``parts`` parts, beside END_PART."""

    transfer_id: TransferId
    parts: int


@dataclasses.dataclass(frozen=True)
class AllReceived:
    """Reader to source: everything that you granted is committed here, and I read nothing of it any more."""

    transfer_id: TransferId


@dataclasses.dataclass(frozen=True)
class Failed:
    """Either side to the other: this transfer is over, because of an error with that ``code``."""

    transfer_id: TransferId
    code: str
    text: str


@dataclasses.dataclass(frozen=True)
class Left:
    """Either side to the other: my engine ends, and all my rooms with it."""

    text: str


@dataclasses.dataclass(frozen=True)
class Alive:
    """Either side to the other: the confirmation of this message shows that you are alive."""


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Reader to source: I do not know a pool that you granted from; send your metadata again."""

    transfer_id: TransferId


@dataclasses.dataclass(frozen=True)
class SourceMetadata:
    """Source to reader: my agent and all its pools (:meth:`Agent.export_metadata`)."""

    agent_metadata: str


Message: TypeAlias = PartGranted | End | AllReceived | Failed | Left | Alive | Unknown | SourceMetadata
_KINDS: dict[str, type[Any]] = {
    "chunk": PartGranted,
    "end": End,
    "done": AllReceived,
    "failed": Failed,
    "left": Left,
    "alive": Alive,
    "unknown": Unknown,
    "card": SourceMetadata,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_WIRE_NAMES = {"agent_metadata": "card"}
"""Fields with another name in the message."""


def encode(message: Message) -> bytes:
    """The message as the peer's :func:`decode` reads it; texts are cut to TEXT_MAX characters, but agent metadata is
    not: raises InvalidArgumentError for more than METADATA_MAX."""
    if isinstance(message, SourceMetadata) and len(message.agent_metadata) > METADATA_MAX:
        raise InvalidArgumentError(f"agent metadata of {len(message.agent_metadata)} characters does not fit a message")
    values: dict[str, Any] = {"kind": _NAMES[type(message)]}
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        name = _WIRE_NAMES.get(field.name, field.name)
        values[name] = value if isinstance(value, int) else str(value)[: _TEXTS.get(name, TEXT_MAX)]
    return json.dumps(values, separators=(",", ":")).encode()


def decode(payload: bytes) -> Message:
    """Raises ProtocolError for anything that :func:`encode` does not make."""
    try:
        values = json.loads(payload)
    except (ValueError, RecursionError):
        raise ProtocolError("a peer's message is not JSON") from None
    name = values.pop("kind", None) if isinstance(values, dict) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    fields = () if kind is None else dataclasses.fields(kind)
    names = {_WIRE_NAMES.get(field.name, field.name): field.name for field in fields}
    if kind is None or set(values) != set(names):
        raise ProtocolError("a peer's message has an unknown kind or wrong fields")
    message: Message = kind(**{names[name]: _value(name, value) for name, value in values.items()})
    return message


def _value(name: str, value: Any) -> Any:
    if name == "transfer_id":
        try:
            return TransferId.from_hex(value)
        except InvalidArgumentError:
            raise ProtocolError("a transfer id of a peer's message is not 32 hex digits") from None
    if name in _TEXTS:
        if not isinstance(value, str) or len(value) > _TEXTS[name]:
            raise ProtocolError(f"{name} of a peer's message is not a short text")
        return value
    if type(value) is not int or not 0 <= value < COUNT_MAX:
        raise ProtocolError(f"{name} of a peer's message is not a count")
    return value
