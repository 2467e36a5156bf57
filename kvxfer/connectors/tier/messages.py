"""What an engine's tier and a ``kvxfer tier`` process say to each other, as notifications between their agents.

Decides the form of every message; :func:`decode` is total: a message, or ProtocolError. No message carries a block: the
blocks move by grants and pulls.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

from kvxfer.connectors.tier.store import RECORD_BYTES, BlockName
from kvxfer.errors import InvalidArgumentError, ProtocolError
from kvxfer.types import TransferId

KEYS_MAX = 512
"""Keys in one message."""
TEXT_BYTES_MAX = 60_000
"""A signed agent metadata text is the longest."""
WORDS_BYTES_MAX = 600


@dataclasses.dataclass(frozen=True)
class TierHello:
    """The engine's first message. ``metadata``: its signed agent metadata, where no coordinator names agents."""

    number: int
    metadata: str = ""


@dataclasses.dataclass(frozen=True)
class TierWelcome:
    """The service knows the engine."""

    number: int


@dataclasses.dataclass(frozen=True)
class Find:
    """Which of these blocks are there?"""

    number: int
    record: bytes
    keys: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """One truth value for each key of the question."""

    number: int
    is_here: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Put:
    """The engine has granted a block to the service: pull and keep it."""

    transfer_id: TransferId
    name: BlockName
    length_bytes: int


@dataclasses.dataclass(frozen=True)
class Get:
    """Grant the block to the engine, which is pulling it."""

    transfer_id: TransferId
    name: BlockName
    length_bytes: int


@dataclasses.dataclass(frozen=True)
class MoveEnded:
    """How a Put ended, or why a Get did not begin. ``code``: an error's stable code; empty: it is kept."""

    transfer_id: TransferId
    code: str = ""
    words: str = ""


@dataclasses.dataclass(frozen=True)
class Used:
    """A request used these blocks, in the order of its tokens."""

    record: bytes
    keys: tuple[bytes, ...]


Message = TierHello | TierWelcome | Find | Found | Put | Get | MoveEnded | Used

_NUMBER = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_COUNT = struct.Struct("<H")


def encode(message: Message) -> bytes:
    """The bytes of a message. Raises InvalidArgumentError beyond a bound."""
    match message:
        case TierHello(number, metadata):
            return b"\x01" + _NUMBER.pack(number) + _text(metadata, TEXT_BYTES_MAX)
        case TierWelcome(number):
            return b"\x02" + _NUMBER.pack(number)
        case Find(number, record, keys):
            return b"\x03" + _NUMBER.pack(number) + record + _keys(keys)
        case Found(number, is_here):
            return b"\x04" + _NUMBER.pack(number) + _COUNT.pack(len(is_here)) + bytes(is_here)
        case Put(transfer_id, name, length):
            return b"\x05" + transfer_id.raw + name.record + _keys((name.key,)) + _LENGTH.pack(length)
        case Get(transfer_id, name, length):
            return b"\x06" + transfer_id.raw + name.record + _keys((name.key,)) + _LENGTH.pack(length)
        case MoveEnded(transfer_id, code, words):
            short = words.encode()[:WORDS_BYTES_MAX].decode(errors="ignore")
            return b"\x07" + transfer_id.raw + _text(code, 64) + _text(short, WORDS_BYTES_MAX)
        case Used(record, keys):
            return b"\x08" + record + _keys(keys)


def decode(payload: bytes) -> Message:
    """Raises ProtocolError for anything that :func:`encode` does not make."""
    reader = _TierReader(payload)
    try:
        message = _read(reader)
    except (InvalidArgumentError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a tier's message is wrong: {error}") from None
    if not reader.is_at_end:
        raise ProtocolError("a tier's message has bytes behind its end")
    return message


def _read(reader: _TierReader) -> Message:
    match reader.take(1)[0]:
        case 1:
            return TierHello(reader.number(), reader.text(TEXT_BYTES_MAX))
        case 2:
            return TierWelcome(reader.number())
        case 3:
            return Find(reader.number(), reader.take(RECORD_BYTES), reader.keys())
        case 4:
            number, flags = reader.number(), reader.take(reader.count())
            if any(flag > 1 for flag in flags):
                raise ProtocolError("a tier's answer has values that are neither yes nor no")
            return Found(number, tuple(map(bool, flags)))
        case 5:
            return Put(TransferId(reader.take(16)), reader.name(), reader.length())
        case 6:
            return Get(TransferId(reader.take(16)), reader.name(), reader.length())
        case 7:
            return MoveEnded(TransferId(reader.take(16)), reader.text(64), reader.text(WORDS_BYTES_MAX))
        case 8:
            return Used(reader.take(RECORD_BYTES), reader.keys())
        case kind:
            raise ProtocolError(f"a tier's message has the unknown kind {kind}")


class _TierReader:
    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._payload)

    def take(self, count: int) -> bytes:
        part = self._payload[self._at : self._at + count]
        if len(part) != count:
            raise ProtocolError("a tier's message ends too early")
        self._at += count
        return part

    def number(self) -> int:
        return int(_NUMBER.unpack(self.take(_NUMBER.size))[0])

    def length(self) -> int:
        return int(_LENGTH.unpack(self.take(_LENGTH.size))[0])

    def count(self) -> int:
        return int(_COUNT.unpack(self.take(_COUNT.size))[0])

    def text(self, most: int) -> str:
        count = self.count()
        if count > most:
            raise ProtocolError(f"a text of {count} bytes is longer than {most}")
        return self.take(count).decode()

    def keys(self) -> tuple[bytes, ...]:
        count = self.count()
        if count > KEYS_MAX:
            raise ProtocolError(f"{count} keys are more than {KEYS_MAX}")
        keys = tuple(self.take(self.take(1)[0]) for _ in range(count))
        for key in keys:
            BlockName(bytes(RECORD_BYTES), key)
        return keys

    def name(self) -> BlockName:
        record, keys = self.take(RECORD_BYTES), self.keys()
        if len(keys) != 1:
            raise ProtocolError(f"a block has one key, not {len(keys)}")
        return BlockName(record, keys[0])


def _keys(keys: Sequence[bytes]) -> bytes:
    if len(keys) > KEYS_MAX:
        raise InvalidArgumentError(f"{len(keys)} keys are more than {KEYS_MAX}")
    return _COUNT.pack(len(keys)) + b"".join(len(key).to_bytes(1, "big") + key for key in keys)


def _text(text: str, most: int) -> bytes:
    data = text.encode()
    if len(data) > most:
        raise InvalidArgumentError(f"a text of {len(data)} bytes is longer than {most}")
    return _COUNT.pack(len(data)) + data
