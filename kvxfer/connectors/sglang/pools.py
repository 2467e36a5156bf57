"""A rank's memory as pools of its agent: the pages, the auxiliary rows, each state component. Decides what is compared
of each before a byte moves; must never know a room.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvxfer.agent import Agent, Pool
from kvxfer.connectors.sglang.memory import Buffers, EngineMemory
from kvxfer.connectors.sglang.shape import KvShape, axes_of, packing_of
from kvxfer.connectors.sglang.views import Cut, PageBook, Views, neutral
from kvxfer.errors import ConfigError, IncompatibleError, InvalidArgumentError
from kvxfer.transport.base import SEGMENTS_MAX, Blocks, Region
from kvxfer.types import ChecksumMode, CompatibilityRecord, MemoryKind, Segment

NO_ROWS: Blocks = np.empty(0, dtype=np.uint32)


@dataclasses.dataclass(frozen=True)
class Pools:
    """``all``: the pages, then the state components, as messages number them. ``views`` and ``book`` are there where
    the shape of the pages is known."""

    all: tuple[Pool, ...]
    aux: Pool
    views: Views | None = None
    book: PageBook | None = None

    @property
    def shape(self) -> KvShape | None:
        """What the pages hold of the model."""
        return None if self.views is None else self.views.shape

    def cut(self, peer: KvShape | None) -> Cut:
        """What the pages have in common with those of a peer; one without a shape must have pages like ours. Raises
        IncompatibleError and as :meth:`Views.cut`."""
        if self.views is None and peer is not None:
            raise IncompatibleError("shape: this rank does not know what its pages hold of the model", field="shape")
        return Cut(self.all[0]) if self.views is None or peer is None else self.views.cut(peer)

    def describe(self, record: CompatibilityRecord) -> None:
        """The pages are of ``record`` from now on, and all else belongs to them. On the agent's loop."""
        for pool in (*self.all, self.aux):
            own = pool.record
            kept = own if self.views is not None else record
            pool.describe(
                dataclasses.replace(
                    record,
                    layers=kept.layers,
                    kv_heads=kept.kv_heads,
                    block_tokens=kept.block_tokens,
                    axes=own.axes,
                    packing=own.packing,
                    tp_rank=kept.tp_rank,
                    tp_size=kept.tp_size,
                )
            )
        if self.views is not None:
            self.views.describe(record)

    def __repr__(self) -> str:
        rows = f"{self.all[0].block_count} pages, {self.aux.block_count} rows, {len(self.all) - 1} states"
        return f"<Pools of {rows}, {len(self.views or ())} views>"


def register(agent: Agent, memory: EngineMemory, record: CompatibilityRecord, checks: str) -> Pools:
    """Register all of it. Raises ConfigError for memory that cannot be a pool."""
    device, shape, beside = memory.cuda_device, memory.shape, record
    pages_record = record
    if shape is not None:
        pages_record = _of_pages(record, shape)
        beside = neutral(record, layers=0, kv_heads=shape.total_heads, block_tokens=0)
    pages = _register(agent, "kv", memory.kv, pages_record, checks, device)
    states = [
        _register(agent, f"state {name}", buffers, _beside(beside, f"{index}:{name}", buffers), checks, device)
        for index, (name, buffers) in enumerate(memory.states)
    ]
    aux = _register(agent, "aux", memory.aux, _beside(beside, "aux", memory.aux), checks, None)
    if shape is None:
        return Pools((pages, *states), aux)
    views = Views(agent, shape, memory.kv, _region(memory.kv, device), pages, record, checks)
    return Pools((pages, *states), aux, views, PageBook(pages.block_count))


def rows_of(pool: Pool, rows: npt.ArrayLike | None) -> Blocks:
    """Row numbers as the agent takes them; ``None`` is none. Raises InvalidArgumentError for what ``pool`` does not
    have."""
    array = np.asarray(() if rows is None else rows)
    if array.size == 0:
        return NO_ROWS
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidArgumentError(f"rows must be a list of numbers, not of shape {array.shape} and {array.dtype}")
    if array.min() < 0 or array.max() >= pool.block_count:
        raise InvalidArgumentError(
            f"rows {array.min()} to {array.max()} are not all among the {pool.block_count} there are"
        )
    return np.ascontiguousarray(array, dtype=np.uint32)


def _beside(record: CompatibilityRecord, what: str, buffers: Buffers) -> CompatibilityRecord:
    """What is compared of memory beside the pages: theirs, and its own shape."""
    return dataclasses.replace(record, axes=f"sglang:{what}", packing=",".join(map(str, buffers.item_bytes)))


def _of_pages(record: CompatibilityRecord, shape: KvShape) -> CompatibilityRecord:
    """What is compared of whole pages: they may be another rank's, if it holds the same."""
    buffers = range(len(shape.layers))
    return neutral(
        record,
        layers=len(shape.holding.layers),
        kv_heads=len(shape.heads),
        block_tokens=shape.page_tokens,
        axes=axes_of(f"{record.axes}/page", shape.layers, shape.heads, shape.total_heads, shape.page_tokens),
        packing=packing_of(record.packing, shape, buffers),
    )


def _region(buffers: Buffers, device: int | None) -> Region:
    region = Region(buffers.base, buffers.span_bytes, None)
    return region if device is None else dataclasses.replace(region, memory=MemoryKind.CUDA, device=device)


def _register(
    agent: Agent, what: str, buffers: Buffers, record: CompatibilityRecord, checks: str, device: int | None
) -> Pool:
    if len(buffers.addresses) > SEGMENTS_MAX:
        raise ConfigError(f"{what} has {len(buffers.addresses)} buffers, and a pool at most {SEGMENTS_MAX}")
    base = buffers.base
    region = _region(buffers, device)
    segments = [
        Segment(address - base, item, item) for address, item in zip(buffers.addresses, buffers.item_bytes, strict=True)
    ]
    try:
        return agent.register_pool(
            record, region, block_count=buffers.count, segments=segments, checksum=ChecksumMode(checks)
        )
    except InvalidArgumentError as error:
        raise ConfigError(f"{what} cannot be registered: {error}") from None
