"""The seam between an engine's tier and what keeps its blocks: names of blocks, moves, and what a store must do.

Decides what two blocks must have in common to be the same one; must never know an engine, a file or a peer.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidArgumentError, KvxferError

RECORD_BYTES = 32
KEY_BYTES_MAX = 64
"""An engine's hash of a block's tokens and of all before it, and the number of its KV group."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockName:
    """What a block is called in every store. ``record``: SHA-256 of what says which bytes a block of these tokens has
    (model, weights, layout); ``key``: the engine's name for the tokens. Raises InvalidArgumentError for other
    lengths."""

    record: bytes
    key: bytes

    def __post_init__(self) -> None:
        if len(self.record) != RECORD_BYTES or not 0 < len(self.key) <= KEY_BYTES_MAX:
            raise InvalidArgumentError(
                f"a block's name has a record of {RECORD_BYTES} bytes and a key of 1 to {KEY_BYTES_MAX}, "
                f"not {len(self.record)} and {len(self.key)}"
            )

    def content_digest(self, length_bytes: int) -> bytes:
        """32 bytes by which two agents compare which block they mean, and how long it is."""
        parts = (self.record, len(self.key).to_bytes(1, "big"), self.key, length_bytes.to_bytes(8, "big"))
        return hashlib.sha256(b"kvxfer tier block 1" + b"".join(parts)).digest()

    def __str__(self) -> str:
        return f"{self.key.hex()[:16]} of {self.record.hex()[:8]}"


class Presence(enum.Enum):
    """What a store knows of a block at this moment."""

    HERE = "here"
    ABSENT = "absent"
    ASKED = "asked"
    """It has to ask, and will know soon."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockMove:
    """One block between a store and a row of the engine's memory."""

    name: BlockName
    row: int


Outcomes = Sequence[KvxferError | None]
"""For each move, in order: why it failed, or ``None``."""
Done = Callable[[Outcomes], None]
"""Called once, on any thread, when nothing of these moves touches the engine's memory any more."""
Rows = npt.NDArray[np.uint8]
"""An engine's memory: uint8, shape [rows, bytes of a row]."""


@dataclasses.dataclass(frozen=True)
class StoreFigures:
    """What a store has counted, all since it was opened but the first three."""

    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    """0: unknown here."""
    evictions: int = 0


class BlockStore(Protocol):
    """From the engine's thread, and none of the calls waits. Nothing but :meth:`close` raises."""

    def find(self, name: BlockName) -> Presence:
        """Whether the block could be loaded now. It may be evicted before it is."""

    def flush(self) -> None:
        """Send what :meth:`find` has to ask."""

    @property
    def is_asking(self) -> bool:
        """Whether answers are awaited."""

    def save(self, moves: Sequence[BlockMove], done: Done) -> None:
        """Copy rows to the store; they do not change until ``done``. A block that is there already is a success."""

    def load(self, moves: Sequence[BlockMove], done: Done) -> None:
        """Copy blocks to rows. A row whose move failed may hold anything."""

    def use(self, names: Sequence[BlockName]) -> None:
        """A request used these blocks, in the order of its tokens: the last ones are evicted first."""

    def figures(self) -> StoreFigures:
        """Counts as of now."""

    def close(self) -> None:
        """End it. Returns when nothing touches the engine's memory any more. Callable twice."""
