"""Messages between ranks of two engines beside the transfers: JSON in agents' notifications, one message each.

The decoder is total: a message or ProtocolError. Every message may come twice or late, and means the same then.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeAlias

from kvxfer.errors import InvalidArgumentError, ProtocolError
from kvxfer.types import TransferId

COUNT_MAX = 1 << 31
ATTEMPTS_MAX = 1 << 10
TEXT_MAX = 512
PARTS_MAX = 1 << 20
"""Parts of one attempt."""
KEEPS_MAX = 1024
"""Transfers that one Keep, Await or Queued names."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """Reader to source: rank ``rank`` wants the blocks of this prompt from ``first`` on, as they become final; of them
    ``layers`` layers, from the model's ``first_layer`` on. ``readers`` ranks of its engine will take something from the
    source. ``is_early``: the source may not have heard of the prompt yet. ``attempt`` grows each time that the source
    revoked its grants: earlier grants are void, and parts are numbered from ``attempt * PARTS_MAX`` on."""

    transfer_id: TransferId
    rank: int
    attempt: int
    readers: int
    first: int
    first_layer: int
    layers: int
    is_early: bool

    @property
    def wanted(self) -> range:
        """The layers, as numbered in the model."""
        return range(self.first_layer, self.first_layer + self.layers)


@dataclasses.dataclass(frozen=True)
class PartReady:
    """Source to reader: part ``part`` is granted. It holds the layers that were asked for of blocks ``first`` to
    ``first + count`` of the prompt's ``total``, layer by layer."""

    transfer_id: TransferId
    part: int
    first: int
    count: int
    total: int


@dataclasses.dataclass(frozen=True)
class Refuse:
    """Source to the reader of that attempt: this prompt sends no further blocks. ``code`` is an error's."""

    transfer_id: TransferId
    attempt: int
    code: str
    text: str


@dataclasses.dataclass(frozen=True)
class Keep:
    """Reader to source: I still want these prompts."""

    transfer_ids: tuple[TransferId, ...]


@dataclasses.dataclass(frozen=True)
class Release:
    """Reader to source: rank ``rank`` of ``readers`` needs nothing (more) of this prompt."""

    transfer_id: TransferId
    rank: int
    readers: int


@dataclasses.dataclass(frozen=True)
class Claim:
    """Reader to the source's first rank: rank ``rank`` of the reader will read other ranks' parts of this prompt, or
    release them, if its engine is the reader. Answered with :class:`Claimed`. ``is_early`` as in :class:`Ask`."""

    transfer_id: TransferId
    rank: int
    is_early: bool


@dataclasses.dataclass(frozen=True)
class Claimed:
    """The source's first rank to a reader: with an empty ``code`` your engine is the reader of this prompt; otherwise
    it is not, because of that error."""

    transfer_id: TransferId
    code: str
    text: str


@dataclasses.dataclass(frozen=True)
class Await:
    """Reader's first rank to the source's first rank: requests of my engine wait, without blocks, until you begin these
    prompts. Repeated every half second, and answered each time; each wait ends with a :class:`Begun`."""

    transfer_ids: tuple[TransferId, ...]


@dataclasses.dataclass(frozen=True)
class Queued:
    """The source's first rank to a reader: none of these prompts has begun. ``positions``: the place of each among the
    prompts that this engine has accepted and not begun, from 1; 0: the engine has not heard of it. This engine began
    its last step ``step_age_ms`` ago; with ``has_work`` the next one is due."""

    transfer_ids: tuple[TransferId, ...]
    positions: tuple[int, ...]
    step_age_ms: int
    has_work: bool


@dataclasses.dataclass(frozen=True)
class Begun:
    """The source's first rank to a reader: with an empty ``code`` there is a grant over this prompt; otherwise there
    will be none, because of that error."""

    transfer_id: TransferId
    code: str
    text: str


Message: TypeAlias = Ask | PartReady | Refuse | Keep | Release | Claim | Claimed | Await | Queued | Begun
_KINDS: dict[str, type[Any]] = {
    "ask": Ask,
    "part": PartReady,
    "refuse": Refuse,
    "keep": Keep,
    "release": Release,
    "claim": Claim,
    "claimed": Claimed,
    "await": Await,
    "queued": Queued,
    "begun": Begun,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    """The message as the peer's :func:`decode` reads it."""
    values: dict[str, Any] = {"kind": _NAMES[type(message)]}
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if field.name == "transfer_id":
            value = str(value)
        elif field.name == "transfer_ids":
            value = [str(transfer_id) for transfer_id in value]
        elif field.name == "text":
            value = value[:TEXT_MAX]
        values[field.name] = value
    return json.dumps(values, separators=(",", ":")).encode()


def decode(payload: bytes) -> Message:
    """Raises ProtocolError for anything that :func:`encode` does not make."""
    try:
        values = json.loads(payload)
    except (ValueError, RecursionError):
        raise ProtocolError("a peer's message is not JSON") from None
    name = values.pop("kind", None) if isinstance(values, dict) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    names = set() if kind is None else {field.name for field in dataclasses.fields(kind)}
    if kind is None or set(values) != names:
        raise ProtocolError("a peer's message has an unknown kind or wrong fields")
    message: Message = kind(**{field: _value(field, value) for field, value in values.items()})
    if isinstance(message, Queued) and len(message.positions) != len(message.transfer_ids):
        raise ProtocolError("a peer's message must have one position for each transfer id")
    return message


def _value(name: str, value: Any) -> Any:
    if name == "transfer_id":
        return _transfer_id(value)
    if name == "transfer_ids":
        if not isinstance(value, list) or len(value) > KEEPS_MAX:
            raise ProtocolError(f"{name} of a peer's message is not a list of at most {KEEPS_MAX}")
        return tuple(_transfer_id(item) for item in value)
    if name == "positions":
        if not isinstance(value, list) or len(value) > KEEPS_MAX:
            raise ProtocolError(f"{name} of a peer's message is not a list of at most {KEEPS_MAX}")
        return tuple(_count(name, item) for item in value)
    if name in ("code", "text"):
        if not isinstance(value, str) or len(value) > TEXT_MAX:
            raise ProtocolError(f"{name} of a peer's message is not a short text")
        return value
    if name in ("is_early", "has_work"):
        if not isinstance(value, bool):
            raise ProtocolError(f"{name} of a peer's message is neither true nor false")
        return value
    return _count(name, value, ATTEMPTS_MAX if name == "attempt" else COUNT_MAX)


def _count(name: str, value: Any, end: int = COUNT_MAX) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise ProtocolError(f"{name} of a peer's message is not a count")
    return value


def _transfer_id(value: Any) -> TransferId:
    try:
        return TransferId.from_hex(value)
    except InvalidArgumentError:
        raise ProtocolError("a transfer id of a peer's message is not 32 hex digits") from None
