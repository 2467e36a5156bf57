"""Memory whose every block says what it is: which prompt's KV, which position, computed by which life, the how-manieth
time; must never know who reads it.

A block is written whole, because what the simulation asks is *when* a block is read, not how a copy is torn: a read
that overlaps a write is two reads of different blocks here.
"""

from __future__ import annotations

import struct

BLOCK_BYTES = 16
_LAYOUT = struct.Struct("<IIII")


def content(prompt: int, position: int, life: int, generation: int) -> bytes:
    """The bytes of one block."""
    return _LAYOUT.pack(prompt, position, life, generation)


def describe(block: bytes) -> str:
    prompt, position, life, generation = _LAYOUT.unpack(block)
    return f"prompt {prompt} position {position} of life {life} generation {generation}"


class Memory:
    """The blocks of one pool of one life. It outlives its process, as mapped memory does."""

    def __init__(self, block_count: int, life: int) -> None:
        self.life = life
        self.blocks = [content(0, block, life, 0) for block in range(block_count)]
        self.is_process_alive = True
        self._generation = 0

    def scrub(self, block: int) -> None:
        """Overwrite with something that belongs to no prompt and was never there before."""
        self._generation += 1
        self.blocks[block] = content(0, block, self.life, self._generation)

    def compute(self, block: int, prompt: int, position: int) -> bytes:
        """Write one block of a prompt's KV; each computation differs, as other rounding would make it."""
        self._generation += 1
        self.blocks[block] = content(prompt, position, self.life, self._generation)
        return self.blocks[block]
