"""Some tokens of some layers and heads, between one pair of layouts. Decides how they fall into bundles of runs; must
never know how block ids were come by, nor in which form the runs are asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from kvxfer.layout.kv_layout import KvLayout
from kvxfer.layout.runs import Bundle, bundle_blocks, bundle_tokens
from kvxfer.layout.strided_boxes import StridedBox, build_boxes
from kvxfer.layout.token_segments import TokenSegments, join


@dataclasses.dataclass(frozen=True)
class TokenSpan:
    """What a plan is a list of; both sides hold these layers, heads and tokens."""

    source: KvLayout
    destination: KvLayout
    layers: tuple[int, ...]
    heads: range
    segments: TokenSegments

    @property
    def bytes(self) -> int:
        width = sum(part.dims * part.dtype_bytes for part in self.source.parts)
        return int(self.segments.tokens.sum()) * len(self.layers) * len(self.heads) * width

    def boxes(self, tokens: int) -> list[StridedBox]:
        """What a segment of so many tokens is made of; 1 leaves the token axis to the caller."""
        return build_boxes(self.source, self.destination, self.layers, self.heads, tokens)

    def bundles(self) -> Iterator[Bundle]:
        if len(self.segments) == 0:
            return
        ours = self.source.block_tokens if self.source.is_token_linear else 0
        theirs = self.destination.block_tokens if self.destination.is_token_linear else 0
        segments = join(self.segments, ours, theirs)
        if ours and theirs:
            yield from (bundle_tokens(box, segments) for box in self.boxes(1))
            return
        for tokens in np.flatnonzero(np.bincount(segments.tokens)):
            is_alike = segments.tokens == tokens
            alike = segments if is_alike.all() else segments.take(is_alike)
            yield from (bundle_blocks(box, alike) for box in self.boxes(int(tokens)))
