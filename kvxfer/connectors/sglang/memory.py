"""What an SGLang rank registers, as plain numbers. Decides whether they make sense; must never know which request a
page belongs to, nor touch a byte.

Buffers are in the order in which SGLang has them (``kv_data_ptrs`` and so on); both sides must have the same order. A
*row* is one item of every buffer: one page of all layers, one request's row of all auxiliary buffers.
"""

from __future__ import annotations

import dataclasses

from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Equally many rows in each of several buffers: row ``i`` of a buffer lies at ``address + i * item_bytes``.

    Raises ConfigError for no buffers, for lists of unequal length, and for a buffer that has no address or is shorter
    than one row."""

    addresses: tuple[int, ...]
    lengths: tuple[int, ...]
    """Bytes of each buffer; more than a whole number of rows is allowed."""
    item_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.addresses or not len(self.addresses) == len(self.lengths) == len(self.item_bytes):
            counts = f"{len(self.addresses)} addresses, {len(self.lengths)} lengths, {len(self.item_bytes)} item sizes"
            raise ConfigError(f"buffers need one address, length and item size each, not {counts}")
        for address, length, item in zip(self.addresses, self.lengths, self.item_bytes, strict=True):
            if address <= 0 or not 0 < item <= length:
                raise ConfigError(f"{length} bytes at {address:#x} in items of {item} bytes are not a buffer")

    @property
    def count(self) -> int:
        """How many rows there are: those of the shortest buffer."""
        return min(length // item for length, item in zip(self.lengths, self.item_bytes, strict=True))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, in all buffers together."""
        return sum(self.item_bytes)

    @property
    def base(self) -> int:
        """The lowest address of all buffers."""
        return min(self.addresses)

    @property
    def span_bytes(self) -> int:
        """Bytes from :attr:`base` to the end of the last buffer; memory between the buffers counts too."""
        return max(address + length for address, length in zip(self.addresses, self.lengths, strict=True)) - self.base


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """The memory of one rank. ``states``: what hybrid models keep beside the pages, by the name of its kind, in
    SGLang's order. ``cuda_device``: the device that has the pages and states; ``None``: the host has them, as it always
    has ``aux``. ``shape``: which part of the model the pages hold. With a shape, a peer may have another tensor
    parallel or page size; ``None``: a peer's pages must be equal to this rank's. Raises ConfigError for a shape with
    other page sizes than these buffers have."""

    kv: Buffers
    aux: Buffers
    states: tuple[tuple[str, Buffers], ...] = ()
    cuda_device: int | None = None
    shape: KvShape | None = None

    def __post_init__(self) -> None:
        if self.shape is None:
            return
        sizes = tuple(self.shape.page_bytes(index) for index in range(len(self.shape.layers)))
        if sizes != self.kv.item_bytes:
            one, other = f"{sizes}"[:80], f"{self.kv.item_bytes}"[:80]
            raise ConfigError(f"shape: its pages have {one} bytes in each buffer, and the buffers' {other}")
