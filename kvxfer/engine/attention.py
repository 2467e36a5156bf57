"""Paged attention: where each position's key and value lie in the pool, and how a step reads and writes them.

Decides the gather and the kernel for each group of sequences. It must never know of models' layers beyond their
number, nor of requests. Two decisions matter for speed. The pool is seen as rows of one head's ``block_tokens``
vectors, so that one ``index_select`` of whole rows (4 KB for head_dim 64 in fp32) puts a sequence's keys and values
side by side, in the very order that the kernel wants, without a second copy. And single tokens (decode) of sequences
of similar length share one gather and one kernel call, with the query heads of a KV head as rows of one small matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

Span = tuple[int, int, Sequence[int]]
"""(start, end, block table) of one chunk."""

QUERY_TILE = 256
"""Rows of a later chunk that share one mask: bounds the mask's size and skips keys that no row of a tile sees."""
PADDING_MAX = 1.25
"""Longest over shortest sequence of a decode group."""


@dataclasses.dataclass(frozen=True)
class PagedLayout:
    """A pool's geometry. ``pool``: [block_count, elements of a block], the model's dtype."""

    pool: torch.Tensor
    layers: int
    kv_heads: int
    heads: int
    block_tokens: int
    head_dim: int

    @property
    def kv(self) -> torch.Tensor:
        return self.pool.view(-1, self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def layer_rows(self) -> int:
        """Rows (one head's keys, or values, of one block) of one layer in one block."""
        return 2 * self.kv_heads

    def rows_from(self, layer: int) -> torch.Tensor:
        """[rows, block_tokens * head_dim] from ``layer``'s first row on: an index made for layer 0 finds ``layer``."""
        return self.pool.view(-1, self.block_tokens * self.head_dim)[layer * self.layer_rows :]

    def slots_from(self, layer: int) -> torch.Tensor:
        """As :meth:`rows_from`, for single positions: [slots, head_dim]."""
        return self.pool.view(-1, self.head_dim)[layer * self.layer_rows * self.block_tokens :]


class _Gather:
    """The keys and values of some sequences of ``blocks`` blocks each, brought together for one layer at a time."""

    def __init__(self, layout: PagedLayout, tables: torch.Tensor) -> None:
        count, blocks = tables.shape
        self._layout = layout
        first = tables * (layout.layers * layout.layer_rows)
        heads = torch.arange(layout.layer_rows, device=tables.device).view(2, 1, layout.kv_heads, 1)
        self._index = (first.view(1, count, 1, blocks) + heads).view(-1)
        self._out = layout.pool.new_empty(len(self._index), layout.block_tokens * layout.head_dim)
        self._shape = (2, count, layout.kv_heads, blocks * layout.block_tokens, layout.head_dim)

    def __call__(self, layer: int) -> torch.Tensor:
        """[2, sequences, kv_heads, positions, head_dim]; overwritten by the next call."""
        torch.index_select(self._layout.rows_from(layer), 0, self._index, out=self._out)
        return self._out.view(self._shape)


class _Prefill:
    """Several tokens of one sequence, rows ``row ..`` of the step."""

    def __init__(self, layout: PagedLayout, span: Span, row: int) -> None:
        start, end, table = span
        device = layout.pool.device
        blocks = -(-end // layout.block_tokens)
        self._gather = _Gather(layout, torch.tensor([list(table[:blocks])], device=device))
        self._row, self._start, self._end = row, start, end
        self._tiles = []
        if start:
            for first in range(start, end, QUERY_TILE):
                last = min(first + QUERY_TILE, end)
                mask = torch.full((last - first, last), float("-inf"), dtype=layout.pool.dtype, device=device)
                self._tiles.append((first - start, last - start, last, mask.triu_(first + 1)))

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        keys, values = self._gather(layer)[:, :, :, : self._end]
        rows = slice(self._row, self._row + self._end - self._start)
        queries, mixed = query[rows].transpose(0, 1).unsqueeze(0), out[rows]
        if not self._tiles:
            whole = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            mixed.copy_(whole[0].transpose(0, 1))
        for first, last, seen, mask in self._tiles:
            part = scaled_dot_product_attention(
                queries[:, :, first:last], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, enable_gqa=True
            )
            mixed[first:last].copy_(part[0].transpose(0, 1))


class _Decode:
    """One token each of several sequences of similar length."""

    def __init__(self, layout: PagedLayout, spans: Sequence[Span], rows: Sequence[int]) -> None:
        device = layout.pool.device
        ends = [end for _, end, _ in spans]
        self._longest = max(ends)
        blocks = -(-self._longest // layout.block_tokens)
        tables = []
        for _, end, table in spans:
            own = list(table[: -(-end // layout.block_tokens)])
            tables.append(own + own[:1] * (blocks - len(own)))
        self._gather = _Gather(layout, torch.tensor(tables, device=device))
        self._rows = torch.tensor(list(rows), device=device)
        self._is_whole = list(rows) == list(range(len(rows)))
        self._group = (len(rows), layout.kv_heads, layout.heads // layout.kv_heads, layout.head_dim)
        self._mask: torch.Tensor | None = None
        self._tail: tuple[torch.Tensor, torch.Tensor] | None = None
        if min(ends) != self._longest:
            beyond = torch.arange(self._longest, device=device) >= torch.tensor(ends, device=device).view(-1, 1)
            mask = torch.zeros(beyond.shape, dtype=layout.pool.dtype, device=device).masked_fill_(beyond, float("-inf"))
            self._mask = mask.view(len(rows), 1, 1, -1).expand(-1, -1, self._group[2], -1)
            sequences, positions = beyond.nonzero(as_tuple=True)
            self._tail = (sequences, positions)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        gathered = self._gather(layer)[:, :, :, : self._longest]
        if self._tail is not None:
            # Beyond a sequence's end lie other bytes, and a NaN there would survive the mask (0 * NaN).
            gathered.transpose(2, 3)[:, self._tail[0], self._tail[1]] = 0
        rows = query if self._is_whole and len(query) == len(self._rows) else query[self._rows]
        mixed = scaled_dot_product_attention(rows.view(self._group), gathered[0], gathered[1], attn_mask=self._mask)
        out[self._rows] = mixed.reshape(len(self._rows), *out.shape[1:])


class AttentionPlan:
    """Everything of a step's attention that all layers share."""

    def __init__(self, layout: PagedLayout, slots: torch.Tensor, groups: Sequence[_Prefill | _Decode]) -> None:
        self._layout = layout
        self._key_slots = slots
        self._value_slots = slots + layout.kv_heads * layout.block_tokens
        self._groups = groups

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the step's keys and values, each [tokens, kv_heads, head_dim], into their blocks."""
        slots = self._layout.slots_from(layer)
        slots.index_copy_(0, self._key_slots, key.reshape(-1, self._layout.head_dim))
        slots.index_copy_(0, self._value_slots, value.reshape(-1, self._layout.head_dim))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of ``query`` [tokens, heads, head_dim] over what the pool holds: [tokens, heads * head_dim]."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in self._groups:
            group.attend(layer, query, out)
        return out.view(len(out), -1)


def plan_attention(layout: PagedLayout, spans: Sequence[Span], positions: torch.Tensor) -> AttentionPlan:
    """Plan one step. ``positions``: [tokens], the positions of all spans one after another."""
    device = layout.pool.device
    owners = [table[position // layout.block_tokens] for start, end, table in spans for position in range(start, end)]
    blocks = torch.tensor(owners, device=device)
    heads = torch.arange(layout.kv_heads, device=device) * layout.block_tokens
    block_slots = layout.layers * layout.layer_rows * layout.block_tokens
    slots = (blocks * block_slots + positions % layout.block_tokens).view(-1, 1) + heads
    groups: list[_Prefill | _Decode] = []
    singles: list[tuple[int, Span]] = []
    row = 0
    for span in spans:
        if span[1] - span[0] == 1:
            singles.append((row, span))
        else:
            groups.append(_Prefill(layout, span, row))
        row += span[1] - span[0]
    for group in _similar(singles, layout.block_tokens):
        groups.append(_Decode(layout, [span for _, span in group], [at for at, _ in group]))
    return AttentionPlan(layout, slots.view(-1), groups)


def _similar(singles: Sequence[tuple[int, Span]], slack: int) -> list[list[tuple[int, Span]]]:
    """Group by length, so that little is gathered for nothing: within a factor of 1.25, or ``slack`` tokens."""
    groups: list[list[tuple[int, Span]]] = []
    for single in sorted(singles, key=lambda item: item[1][1]):
        end = single[1][1]
        if groups and end <= max(groups[-1][0][1][1] * PADDING_MAX, groups[-1][0][1][1] + slack):
            groups[-1].append(single)
        else:
            groups.append([single])
    return groups
