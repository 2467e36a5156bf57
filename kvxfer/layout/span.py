"""A span: some tokens, layers and heads that move between two layouts. Decides how a span is divided into bundles of
runs; must never know where the block ids came from, nor in which form a caller wants the runs.
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
    """Tokens, layers and heads that both sides hold; a plan is a list of spans."""

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
        """The boxes of a segment of so many tokens. With ``tokens`` 1 the boxes have no token axis, and the caller adds
        it."""
        return build_boxes(self.source, self.destination, self.layers, self.heads, tokens)

    def bundles(self) -> Iterator[Bundle]:
        """One bundle for each box. Where a side is not token-linear, each number of tokens has boxes of its own."""
        if len(self.segments) == 0:
            return
        source_tokens = self.source.block_tokens if self.source.is_token_linear else 0
        destination_tokens = self.destination.block_tokens if self.destination.is_token_linear else 0
        segments = join(self.segments, source_tokens, destination_tokens)
        if source_tokens and destination_tokens:
            yield from (bundle_tokens(box, segments) for box in self.boxes(1))
            return
        for tokens in np.flatnonzero(np.bincount(segments.tokens)):
            is_alike = segments.tokens == tokens
            alike = segments if is_alike.all() else segments.take(is_alike)
            yield from (bundle_blocks(box, alike) for box in self.boxes(int(tokens)))
