"""Which ranks of other engines one rank of ours reads or has to tell something, by :mod:`.shares` and what a request
says of its sources.

Decides what such a request may say: what no engine can be is refused by name, and is told nothing. It must never know a
block, an address or a peer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from kvxfer.connectors.vllm.shares import EngineShape, RankShare, readers_of, shape_of, shares_of, stages_of
from kvxfer.connectors.vllm.stage import StageLayers
from kvxfer.connectors.vllm.staging import HeadShare
from kvxfer.connectors.vllm.steps import LoadOrder, RemotePrompt
from kvxfer.errors import IncompatibleError, InvalidArgumentError, KvxferError


class Readership:
    """Of rank ``rank`` of an engine of shape ``ours``, whose model has ``heads`` KV heads. ``storages`` of its memory
    keep its layers."""

    def __init__(self, rank: int, ours: EngineShape, heads: int, *, storages: int = 1) -> None:
        self.rank = rank
        self._ours = ours
        self._heads = heads
        self._storages = storages
        kept = ours.layers_of(rank)
        self.stage = StageLayers(kept[0], len(kept), len(ours.layers))

    def of(self, order: LoadOrder | RemotePrompt) -> Sequence[tuple[RankShare, int]]:
        """Its shares of the sources' ranks; of each source, how many ranks of this engine it has to do with. Raises
        IncompatibleError where no engine can have such ranks, or nothing can be read of them."""
        try:
            return _plan(self.rank, self._ours, self._theirs(order), self._heads, self._storages)
        except InvalidArgumentError as error:
            raise IncompatibleError(f"the source's ranks: {error}") from None

    def told_by(self, order: LoadOrder | RemotePrompt) -> Sequence[tuple[RankShare, int]]:
        """The same; nothing where :meth:`of` raises."""
        try:
            return self.of(order)
        except KvxferError:
            return ()

    def read_by(self, order: LoadOrder) -> list[RankShare]:
        """The shares of which something is read."""
        return [share for share, _ in self.of(order) if share.is_read]

    def counterpart(self, order: LoadOrder) -> RankShare | None:
        """The share of the source's rank of the same number, if both engines are divided alike: what it grants as a
        whole is what this rank wants. Else ``None``."""
        if len(order.sources) != self._ours.ranks:
            return None
        shares = self.told_by(order)
        is_alike = bool(shares) and self._theirs(order) == self._ours
        return next((share for share, _ in shares if share.source_rank == self.rank), None) if is_alike else None

    def local(self, share: RankShare) -> range:
        """Its layers, by their places among those of this rank."""
        return self.stage.local(share.layer_range)

    def cut(self, order: LoadOrder, share: RankShare) -> HeadShare:
        """How both engines divide the heads."""
        theirs = self._theirs(order)
        return HeadShare(
            theirs.tensor_rank_of(share.source_rank),
            theirs.tensor_ranks,
            self._ours.tensor_rank_of(self.rank),
            self._ours.tensor_ranks,
        )

    def _theirs(self, order: LoadOrder | RemotePrompt) -> EngineShape:
        return _shape(len(order.sources), order.stages, self.stage.total)


@functools.lru_cache(maxsize=1024)
def _shape(ranks: int, stages: str, layers: int) -> EngineShape:
    return shape_of(ranks, stages_of(stages, layers))


@functools.lru_cache(maxsize=1024)
def _plan(
    rank: int, ours: EngineShape, theirs: EngineShape, heads: int, storages: int
) -> tuple[tuple[RankShare, int], ...]:
    if ours == theirs:  # whatever the heads of each layer are
        return ((RankShare(rank, ours.layers_of(rank), range(heads)), 1),)
    if storages > 1 and ours.stages != theirs.stages:
        raise IncompatibleError(
            f"this version of vLLM keeps the KV cache in {storages} storages, and the source's pipeline stages are "
            "others: 0.29 and newer keep it in one"
        )
    return tuple(
        (share, len(readers_of(share.source_rank, ours, theirs, heads)))
        for share in shares_of(rank, ours, theirs, heads)
    )
