"""The layers that one rank keeps of a model: all of them, or those of its pipeline stage.

Decides how a part of them is named between two engines whose stages end elsewhere, and what its bytes are said to be.
It must never know a block, an address or a peer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct

from kvxfer.errors import IncompatibleError

_LAYERS = struct.Struct("<32sII")


@dataclasses.dataclass(frozen=True)
class StageLayers:
    """``count`` of a model's ``total`` layers, from ``first`` on. Ranges of layers are numbered as in the model."""

    first: int
    count: int
    total: int

    @classmethod
    def whole(cls, layers: int) -> StageLayers:
        """Of an engine with one stage."""
        return cls(0, layers, layers)

    @property
    def layers(self) -> range:
        return range(self.first, self.first + self.count)

    def local(self, layers: range) -> range:
        """Their places among the layers of this rank. Raises IncompatibleError where it does not keep them all."""
        if not layers or layers.start < self.first or layers.stop > self.first + self.count:
            raise IncompatibleError(
                f"layers {layers.start} to {layers.stop - 1} are wanted of a rank that keeps layers {self.first} to "
                f"{self.first + self.count - 1} of {self.total}",
                field="layers",
            )
        return range(layers.start - self.first, layers.stop - self.first)

    def why_not(self, layers: range) -> IncompatibleError | None:
        """The error with which these layers are refused; ``None``: this rank keeps them."""
        try:
            self.local(layers)
        except IncompatibleError as error:
            return error
        return None

    def content(self, digest: bytes, layers: range) -> bytes:
        """The digest of what these layers of blocks hold, whose whole has this ``digest``: both ends of a transfer say
        it, so that no engine reads other layers than it asked for. Of all layers it is ``digest``; else the SHA-256 of
        ``digest``, the first layer and their number (little-endian uint32)."""
        if len(layers) == self.total:
            return digest
        return hashlib.sha256(_LAYERS.pack(digest, layers.start, len(layers))).digest()
