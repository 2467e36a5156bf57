"""Views of a rank's pages for peers with another tensor parallel or page size: a pool over the same memory for each
slice of layers and heads that both have in common. Decides where a slice lies; must never know a room.

A block of a view is one token (or one page, where both have equal heads and pages) of the slice: one segment for each
buffer, at the slice's first head. Both sides register the slice that they share, so blocks and segments are alike,
whatever lies between them on either side, and nothing is copied elsewhere on the way. A view is registered when it is
first wanted, and stays.

Safety. The native core keeps a byte from being promised while it is filled and from being filled by two transfers at
once, in whichever pools its blocks are. It does not know of rooms. What keeps a *page* to one room is:

- the slices of the sources of one received room are disjoint (``shape.choose``: each layer and head once), so no two of
  its transfers fill the same byte, even if they go through different pools;
- a page that is filled belongs to one room only, from ``begin`` until that room is over and drained.
  :class:`PageLedger` counts pages over all pools of the memory, and refuses (``blocks_busy``) a page that another room
  fills or gives;
- a page that is given (sent) is only read, so several rooms may give it, to several readers. It stays in the page
  ledger until the room is over and every grant over the page has ended, in all pools;
- aborting a room revokes each of its grants, in all pools, before it returns.

A page that no view has needs none of this: the native ledgers suffice.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.agent import Agent, Pool
from kvxfer.connectors.sglang.memory import Buffers
from kvxfer.connectors.sglang.shape import KvShape, Slice, axes_of, common, packing_of
from kvxfer.errors import BlocksBusyError, InvalidArgumentError, LimitExceededError
from kvxfer.transport.base import Blocks, Region
from kvxfer.types import ChecksumMode, CompatibilityRecord, Segment

VIEWS_MAX = 32
"""Views of one rank, beside its other pools: an agent may publish 64."""
ROWS_MAX = 1 << 32


@dataclasses.dataclass(frozen=True)
class SharedRows:
    """How pages of this rank become blocks of the pool that it shares with one peer."""

    pool: Pool
    own_rows: int = 1
    """How many blocks one of our pages is."""
    peer_rows: int = 1
    """How many blocks one of the peer's pages is."""
    is_view: bool = False

    def rows(self, pages: Blocks) -> Blocks:
        """The blocks of these pages, in order."""
        if self.own_rows == 1:
            return pages
        first = pages.astype(np.uint64)[:, None] * self.own_rows
        return (first + np.arange(self.own_rows, dtype=np.uint64)).ravel().astype(np.uint32)

    def is_all(self, given: int, wanted: int) -> bool:
        """Whether a source that gave ``given`` of the ``wanted`` blocks has given all. If the page sizes differ, the
        last page of this rank may stay incomplete: the prompt ends within it."""
        if self.own_rows == self.peer_rows:
            return given == wanted
        return given == wanted or wanted - self.own_rows < given < wanted


class Views:
    """The views of one rank's pages. All methods may be called from any thread; no other caller registers pools
    meanwhile."""

    def __init__(
        self,
        agent: Agent,
        shape: KvShape,
        buffers: Buffers,
        region: Region,
        pages: Pool,
        record: CompatibilityRecord,
        checksum: ChecksumMode,
    ) -> None:
        """``pages``: the pool of whole pages, over the same ``buffers``, which span ``region``."""
        self.shape = shape
        self._agent = agent
        self._buffers = buffers
        self._region = region
        self._pages = pages
        self._record = record
        self._checksum = checksum
        self._lock = threading.Lock()
        self._views: dict[Slice, Pool] = {}

    def __len__(self) -> int:
        return len(self._views)

    def cut(self, peer: KvShape) -> SharedRows:
        """How pages become rows of the pool shared with that peer. Registers the pool if that is needed. Raises
        IncompatibleError naming the field, LimitExceededError for more than VIEWS_MAX, InvalidArgumentError for memory
        of too many tokens, ClosedError."""
        slice_ = common(self.shape, peer)
        if slice_.is_whole:
            return SharedRows(self._pages)
        with self._lock:
            pool = self._views.get(slice_)
            if pool is None:
                if len(self._views) >= VIEWS_MAX:
                    raise LimitExceededError(
                        f"VIEWS_MAX={VIEWS_MAX} slices of these pages are shared with others already"
                    )
                pool = self._views[slice_] = self._register(slice_)
        tokens = slice_.block_tokens
        return SharedRows(pool, self.shape.page_tokens // tokens, peer.page_tokens // tokens, True)

    def describe(self, record: CompatibilityRecord) -> None:
        """Replace the record of the pages and of every view. On the agent's loop."""
        with self._lock:
            self._record = record
            for slice_, pool in self._views.items():
                pool.describe(self._record_of(slice_))

    def _register(self, slice_: Slice) -> Pool:
        shape, tokens = self.shape, slice_.block_tokens
        segments = []
        for index in slice_.buffers(shape):
            head, stride = shape.head_bytes[index], shape.page_bytes(index) // shape.page_tokens * tokens
            at = self._buffers.addresses[index] - self._buffers.base + (slice_.heads.start - shape.heads.start) * head
            length = stride if tokens > 1 else len(slice_.heads) * head
            segments.append(Segment(at, stride, length))
        count = self._buffers.count * shape.page_tokens // tokens
        if count >= ROWS_MAX:
            raise InvalidArgumentError(f"{count} tokens are more than a pool's blocks can be numbered")
        record = self._record_of(slice_)
        return self._agent.register_pool(
            record, self._region, block_count=count, segments=segments, checksum=self._checksum
        )

    def _record_of(self, slice_: Slice) -> CompatibilityRecord:
        own, tokens = self._record, slice_.block_tokens
        return neutral(
            own,
            layers=len(slice_.layers),
            kv_heads=len(slice_.heads),
            block_tokens=tokens,
            axes=axes_of(f"{own.axes}/slice", slice_.layers, slice_.heads, self.shape.total_heads, tokens),
            packing=packing_of(own.packing, self.shape, slice_.buffers(self.shape)),
        )


class PageLedger:
    """Which pages of a rank are filled, and which are given, over all pools of its memory. From any thread."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._filled = np.zeros(count, np.bool_)
        self._given = np.zeros(count, np.uint32)

    @property
    def is_idle(self) -> bool:
        """Whether no page is in the ledger."""
        return not self._filled.any() and not self._given.any()

    def fill(self, pages: Blocks) -> None:
        """Mark pages as one room's until :meth:`filled`. Raises BlocksBusyError, InvalidArgumentError for a page named
        twice."""
        with self._lock:
            self._check(self._filled, pages, "filled by another room")
            self._check(self._given, pages, "given by a room")
            if len(np.unique(pages)) != len(pages):
                raise InvalidArgumentError("a page is named twice")
            self._filled[pages] = True

    def filled(self, pages: Blocks) -> None:
        """Undo :meth:`fill`: that room is over and drained."""
        with self._lock:
            self._filled[pages] = False

    def give(self, pages: Blocks) -> None:
        """Mark pages as granted: they do not change until as many :meth:`given`. Raises BlocksBusyError."""
        with self._lock:
            self._check(self._filled, pages, "filled by a room")
            np.add.at(self._given, pages, 1)

    def given(self, pages: Blocks) -> None:
        """Undo one :meth:`give`: every grant of that room over them has ended."""
        with self._lock:
            np.subtract.at(self._given, pages, 1)

    @staticmethod
    def _check(held: npt.NDArray[Any], pages: Blocks, how: str) -> None:
        busy = pages[held[pages] != 0]
        if len(busy):
            raise BlocksBusyError(f"page {busy[0]} is {how}")


def neutral(record: CompatibilityRecord, **changes: object) -> CompatibilityRecord:
    """A copy of ``record`` with ``changes``, and without a rank: its axes say which part of the model the memory
    holds."""
    return dataclasses.replace(record, tp_rank=0, tp_size=1, **changes)  # type: ignore[arg-type]
