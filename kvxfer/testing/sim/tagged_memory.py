"""Memory whose every block says what it is: which prompt's KV, which position, computed by which incarnation, the
how-manieth time; must never know its readers.

A block is written whole, because what the simulation asks is *when* a block is read, not how a copy is torn: a read
that overlaps a write is two reads of different blocks here. An incarnation has three areas: its pool, and two that it
registers as regions, under ids that change while the bytes below stay where they are.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

from kvxfer.testing.sim.elements import places

BLOCK_BYTES = 16
POOL = 1
_LAYOUT = struct.Struct("<IIII")


class Cell(NamedTuple):
    """One block of the pool (``region`` is :data:`POOL`), or one element of a registered region."""

    region: int
    slot: int


def content(prompt: int, position: int, incarnation: int, generation: int) -> bytes:
    """The bytes of one block."""
    return _LAYOUT.pack(prompt, position, incarnation, generation)


def describe(block: bytes) -> str:
    prompt, position, incarnation, generation = _LAYOUT.unpack(block)
    return f"prompt {prompt} position {position} of incarnation {incarnation} generation {generation}"


def tag_of(block: bytes) -> int:
    """Which prompt's the block says it is."""
    prompt: int = _LAYOUT.unpack(block)[0]
    return prompt


def checksum(block: bytes) -> int:
    """The stand-in for CRC-32C: the machines carry checksums, and never compute one."""
    return zlib.crc32(block)


def flipped(block: bytes) -> bytes:
    """The same block with one bit that is not what was sent."""
    return block[:-1] + bytes([block[-1] ^ 0x40])


def cells(extent: Any) -> list[Cell]:
    """The cells of an extent."""
    if extent.ranges is None:
        return [Cell(extent.pool, block) for block in extent.blocks]
    return [Cell(place.region, place.offset // BLOCK_BYTES) for place in places(extent)]


class TaggedMemory:
    """The areas of one incarnation. They outlive their process, as mapped memory does."""

    def __init__(self, block_count: int, incarnation: int, region_cells: int = 0) -> None:
        self.incarnation = incarnation
        self.blocks = [content(0, block, incarnation, 0) for block in range(block_count)]
        self._areas = [[content(0, index, incarnation, 0) for index in range(region_cells)] for _ in range(2)]
        self._under: dict[int, list[bytes]] = {POOL: self.blocks}
        self.is_process_alive = True
        self._generation = 0

    def expose(self, region: int, area: int) -> None:
        """From now on ``region`` is that area (0 or 1), and it stays so for readers that go on using that name."""
        self._under[region] = self._areas[area]

    def read(self, cell: Cell) -> bytes:
        return self._under[cell.region][cell.slot]

    def write(self, cell: Cell, data: bytes) -> None:
        self._under[cell.region][cell.slot] = data

    def scrub(self, block: int) -> None:
        """Overwrite with something that belongs to no prompt and was never there before."""
        self.renew(Cell(POOL, block))

    def renew(self, cell: Cell) -> bytes:
        """As :meth:`scrub`, of any cell; what it holds now."""
        self._generation += 1
        data = content(0, cell.slot, self.incarnation, self._generation)
        self.write(cell, data)
        return data

    def compute(self, block: int, prompt: int, position: int) -> bytes:
        """Write one block of a prompt's KV; each computation differs, as other rounding would make it."""
        self._generation += 1
        self.blocks[block] = content(prompt, position, self.incarnation, self._generation)
        return self.blocks[block]
