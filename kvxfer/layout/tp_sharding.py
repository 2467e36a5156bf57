"""Which source ranks a destination rank pulls from, and which part of the model from each. Decides how a model cut one
way (tensor and pipeline parallel) is put together cut another way; must never know blocks, strides or peers.

Several sources may hold the same: MLA latents, and KV heads where there are more ranks than heads. Any one of them will
do, and destination rank r takes the r-th of them, round and round, so that no source serves all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvxfer.errors import IncompatibleError, InvalidArgumentError
from kvxfer.layout.kv_layout import Holding


@dataclasses.dataclass(frozen=True)
class SourceShard:
    """What one destination rank takes from source rank ``source``: these layers, these of the model's heads."""

    source: int
    layers: tuple[int, ...]
    heads: range


def tp_heads(total_heads: int, tp_size: int, tp_rank: int) -> range:
    """The KV heads that vLLM and SGLang give a rank: an equal share, or one head that several ranks hold.

    Raises InvalidArgumentError where neither number divides the other.
    """
    if total_heads <= 0 or tp_size <= 0 or not 0 <= tp_rank < tp_size:
        raise InvalidArgumentError(f"tp_rank: {tp_rank} of {tp_size} ranks with {total_heads} heads makes no sense")
    if total_heads % tp_size == 0:
        each = total_heads // tp_size
        return range(tp_rank * each, (tp_rank + 1) * each)
    if tp_size % total_heads == 0:
        head = tp_rank * total_heads // tp_size
        return range(head, head + 1)
    raise InvalidArgumentError(f"tp_size: {tp_size} ranks cannot share {total_heads} heads evenly")


def choose_sources(
    destination: Holding, sources: Mapping[int, Holding], *, destination_rank: int = 0
) -> tuple[SourceShard, ...]:
    """Shares that cover all of ``destination`` exactly once, by source rank; ``sources`` maps rank to what it holds.

    As few sources as intervals of heads allow. Raises IncompatibleError where the numbers of heads differ (field
    ``total_heads``), or where no source holds some layer or head (field ``layers`` or ``heads``).
    """
    for rank, held in sources.items():
        if held.total_heads != destination.total_heads:
            raise IncompatibleError(
                f"total_heads: source rank {rank} knows {held.total_heads}, the destination {destination.total_heads}",
                field="total_heads",
            )
    by_layer: dict[int, list[tuple[range, list[int]]]] = {}
    for rank in sorted(sources):
        held = sources[rank]
        heads = range(held.head_offset, held.head_offset + held.heads)
        for layer in held.layers:
            kinds = by_layer.setdefault(layer, [])
            same = next((ranks for known, ranks in kinds if known == heads), None)
            if same is None:
                kinds.append((heads, [rank]))
            else:
                same.append(rank)

    found: dict[tuple[int, range], list[int]] = {}
    end = destination.head_offset + destination.heads
    for layer in destination.layers:
        if layer not in by_layer:
            raise IncompatibleError(f"layers: no source holds layer {layer}", field="layers")
        head = destination.head_offset
        while head < end:
            holders = [kind for kind in by_layer[layer] if head in kind[0]]
            if not holders:
                raise IncompatibleError(f"heads: no source holds head {head} of layer {layer}", field="heads")
            heads, ranks = max(holders, key=lambda kind: kind[0].stop)
            stop = min(end, heads.stop)
            found.setdefault((ranks[destination_rank % len(ranks)], range(head, stop)), []).append(layer)
            head = stop
    return tuple(
        SourceShard(source, tuple(layers), heads)
        for (source, heads), layers in sorted(found.items(), key=lambda item: (item[0][0], item[0][1].start))
    )


def count_readers(source_rank: int, sources: Mapping[int, Holding], destinations: Mapping[int, Holding]) -> int:
    """How many destination ranks take something from ``source_rank``, when each follows ``choose_sources``."""
    return sum(
        any(shard.source == source_rank for shard in choose_sources(held, sources, destination_rank=rank))
        for rank, held in destinations.items()
    )
