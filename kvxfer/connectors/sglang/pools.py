"""A rank's memory as pools of its agent: the pages, the auxiliary rows, each state component. Decides what is compared
of each before a byte moves; must never know a room.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvxfer.agent import Agent, Pool
from kvxfer.connectors.sglang.memory import Buffers, EngineMemory
from kvxfer.errors import ConfigError, InvalidArgument
from kvxfer.transport.base import SEGMENTS_MAX, Blocks, Region
from kvxfer.types import CompatibilityRecord, MemoryKind, Segment

NO_ROWS: Blocks = np.empty(0, dtype=np.uint32)


@dataclasses.dataclass(frozen=True)
class Pools:
    """``all``: the pages, then the state components, as messages number them."""

    all: tuple[Pool, ...]
    aux: Pool

    def describe(self, record: CompatibilityRecord) -> None:
        """The pages are of ``record`` from now on, and all else belongs to them. On the agent's loop."""
        for pool in (*self.all, self.aux):
            own = pool.record
            pool.describe(dataclasses.replace(record, axes=own.axes, packing=own.packing))

    def __repr__(self) -> str:
        return f"<Pools of {self.all[0].block_count} pages, {self.aux.block_count} rows, {len(self.all) - 1} states>"


def register(agent: Agent, memory: EngineMemory, record: CompatibilityRecord, checks: str) -> Pools:
    """Register all of it. Raises ConfigError for memory that cannot be a pool."""
    device = memory.cuda_device
    pages = _register(agent, "kv", memory.kv, record, checks, device)
    states = [
        _register(agent, f"state {name}", buffers, _beside(record, f"{index}:{name}", buffers), checks, device)
        for index, (name, buffers) in enumerate(memory.states)
    ]
    aux = _register(agent, "aux", memory.aux, _beside(record, "aux", memory.aux), checks, None)
    return Pools((pages, *states), aux)


def rows_of(pool: Pool, rows: npt.ArrayLike | None) -> Blocks:
    """Row numbers as the agent takes them; ``None`` is none. Raises InvalidArgument for what ``pool`` does not have."""
    array = np.asarray(() if rows is None else rows)
    if array.size == 0:
        return NO_ROWS
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidArgument(f"rows must be a list of numbers, not of shape {array.shape} and {array.dtype}")
    if array.min() < 0 or array.max() >= pool.block_count:
        raise InvalidArgument(f"rows {array.min()} to {array.max()} are not all among the {pool.block_count} there are")
    return np.ascontiguousarray(array, dtype=np.uint32)


def _beside(record: CompatibilityRecord, what: str, buffers: Buffers) -> CompatibilityRecord:
    """What is compared of memory beside the pages: theirs, and its own shape."""
    return dataclasses.replace(record, axes=f"sglang:{what}", packing=",".join(map(str, buffers.item_bytes)))


def _register(
    agent: Agent, what: str, buffers: Buffers, record: CompatibilityRecord, checks: str, device: int | None
) -> Pool:
    if len(buffers.addresses) > SEGMENTS_MAX:
        raise ConfigError(f"{what} has {len(buffers.addresses)} buffers, and a pool at most {SEGMENTS_MAX}")
    base = buffers.base
    region = Region(base, buffers.span_bytes, None)
    if device is not None:
        region = dataclasses.replace(region, memory=MemoryKind.CUDA, device=device)
    segments = [
        Segment(address - base, item, item) for address, item in zip(buffers.addresses, buffers.item_bytes, strict=True)
    ]
    try:
        return agent.register_pool(record, region, block_count=buffers.count, segments=segments, checks=checks)
    except InvalidArgument as error:
        raise ConfigError(f"{what} cannot be registered: {error}") from None
