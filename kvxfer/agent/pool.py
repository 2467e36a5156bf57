"""One registered pool of one agent: its record, its memory, its shape. Decides nothing; must never know which blocks
are in use (the owner's bookkeeping and the transport's ledger do).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvxfer.agent.arguments import judged
from kvxfer.errors import InvalidArgumentError
from kvxfer.transport.base import Region, check_segments
from kvxfer.types import ChecksumMode, CompatibilityRecord, PoolRecord, Segment


class Pool:
    """Made by :meth:`Agent.allocate_pool` and :meth:`Agent.register_pool`; keeps its memory alive as long as it exists
    itself.
    """

    def __init__(
        self,
        published: PoolRecord,
        region: Region,
        segments: Sequence[Segment],
        checksum: ChecksumMode = ChecksumMode.OFF,
        is_published: bool = True,
        on_described: Callable[[Pool], None] = lambda _: None,
    ) -> None:
        check_segments(
            segments,
            block_count=published.block_count,
            block_bytes=published.block_bytes,
            length_bytes=region.length_bytes,
        )
        self._published = published
        self.region = region
        self.segments = tuple(segments)
        self.checksum = checksum
        """Which transfers of its blocks carry checksums."""
        self.is_published = is_published
        """Whether other agents are told of it."""
        self._on_described = on_described

    @property
    def pool_id(self) -> int:
        return self._published.pool_id

    @property
    def record(self) -> CompatibilityRecord:
        return self._published.record

    @property
    def published(self) -> PoolRecord:
        """The pool as other agents see it."""
        return self._published

    @judged
    def describe(self, record: CompatibilityRecord) -> None:
        """Replace the record, because the owner has learnt what its blocks are or no longer knows it. From now on this
        agent, and its peers once they have heard of it, compare ``record``. On the agent's loop. Raises ClosedError."""
        self._published = dataclasses.replace(self._published, record=record)
        self._on_described(self)

    @property
    def block_count(self) -> int:
        return self._published.block_count

    @property
    def block_bytes(self) -> int:
        return self._published.block_bytes

    @property
    def is_shareable(self) -> bool:
        return self._published.is_shareable

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory that kvxfer allocated: uint8, shape [block_count, block_bytes].

        Raises InvalidArgumentError for a registered pool: its memory is the caller's own.
        """
        owner = self.region.owner
        if not self.region.is_allocated or not isinstance(owner, np.ndarray):
            raise InvalidArgumentError(
                "only a pool that kvxfer allocated has an array; this one's memory is the caller's"
            )
        return owner[: self.block_count * self.block_bytes].reshape(self.block_count, self.block_bytes)

    def __repr__(self) -> str:
        kind = "allocated" if self.region.is_allocated else "registered"
        return f"<Pool {self.pool_id} {self.record.model}: {self.block_count} blocks of {self.block_bytes} B, {kind}>"


def plan_segments(
    block_count: int, length_bytes: int, segments: Sequence[Segment] | None
) -> tuple[tuple[Segment, ...], int]:
    """The segments of a pool and the bytes of one block; without ``segments``, block ``b`` is the ``b``-th of equal
    parts of the memory. Raises InvalidArgumentError where that does not come out even.
    """
    if block_count < 1:
        raise InvalidArgumentError(f"a pool needs at least one block, not {block_count}")
    if segments is not None:
        return tuple(segments), sum(segment.length_bytes for segment in segments)
    block_bytes, rest = divmod(length_bytes, block_count)
    if rest or not block_bytes:
        raise InvalidArgumentError(f"{length_bytes} bytes do not divide into {block_count} equal blocks; give segments")
    return (Segment(0, block_bytes, block_bytes),), block_bytes
