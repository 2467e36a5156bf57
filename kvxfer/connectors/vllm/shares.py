"""Which rank of one engine reads what from which rank of another: layers by pipeline stage, heads by tensor rank, and
tokens by context rank.

Decides that by sizes alone: the plan is the same at every rank of both engines, so a source knows how many readers it
has to wait for. It must never know a block, an address or a peer.

A rank's number counts the tensor ranks of the first stage, then those of the next one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from kvxfer.errors import IncompatibleError, InvalidArgumentError
from kvxfer.layout.kv_layout import Holding
from kvxfer.layout.tp_sharding import choose_sources, tp_heads

Layers = tuple[int, ...]
"""Numbers of layers in the model, ascending."""


@dataclasses.dataclass(frozen=True)
class Interleave:
    """Which tokens a context rank keeps: ``run`` of them, then the next rank the next ``run``, in turn. A block id
    stands for ``ranks * block_tokens`` tokens of the prompt, of which each rank keeps ``block_tokens`` in its block."""

    ranks: int = 1
    run: int = 1
    block_tokens: int = 16

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.run < 1 or self.block_tokens < 1 or self.block_tokens % self.run:
            raise InvalidArgumentError(f"a block of {self.block_tokens} tokens has no whole runs of {self.run}")

    def rank_of(self, token: int) -> int:
        """The context rank that keeps it."""
        return token // self.run % self.ranks

    def place(self, token: int) -> tuple[int, int]:
        """Where its rank keeps it: the position in the prompt's block table, and the slot in that block."""
        block, within = divmod(token, self.ranks * self.block_tokens)
        return block, within // (self.ranks * self.run) * self.run + within % self.run

    def blocks_for(self, tokens: int) -> int:
        """How many blocks of every rank a prompt of ``tokens`` tokens takes; the last ones of some may be empty."""
        return -(-tokens // (self.ranks * self.block_tokens))

    def tokens_of(self, rank: int, tokens: int) -> tuple[int, ...]:
        """Those of a prompt's ``tokens`` that this rank keeps, ascending."""
        return tuple(token for token in range(tokens) if self.rank_of(token) == rank)


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """How an engine divides a model's KV cache: ``stages`` are the layers that each pipeline stage keeps, and each
    stage has ``tensor_ranks`` ranks. Neighbouring tensor ranks with the same heads may divide the tokens among them, as
    ``interleave`` says.

    Raises InvalidArgumentError for layers that two stages keep, or that are not ascending.
    """

    stages: tuple[Layers, ...]
    tensor_ranks: int = 1
    interleave: Interleave = Interleave()

    def __post_init__(self) -> None:
        layers = [layer for stage in self.stages for layer in stage]
        if self.tensor_ranks < 1 or not layers or not all(self.stages):
            raise InvalidArgumentError("an engine has at least one rank, and each stage at least one layer")
        if len(set(layers)) != len(layers) or any(list(stage) != sorted(stage) for stage in self.stages):
            raise InvalidArgumentError("stages of an engine keep some layers twice, or not in their order")
        if self.tensor_ranks % self.interleave.ranks:
            raise InvalidArgumentError(
                f"{self.tensor_ranks} tensor ranks are not whole groups of {self.interleave.ranks} context ranks"
            )

    @property
    def ranks(self) -> int:
        return len(self.stages) * self.tensor_ranks

    @property
    def layers(self) -> Layers:
        """Of the whole model."""
        return tuple(sorted(layer for stage in self.stages for layer in stage))

    def rank(self, stage: int, tensor_rank: int) -> int:
        """The number of one rank among all."""
        return stage * self.tensor_ranks + tensor_rank

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor_ranks

    def tensor_rank_of(self, rank: int) -> int:
        return rank % self.tensor_ranks

    def layers_of(self, rank: int) -> Layers:
        """The layers that this rank keeps, of some heads."""
        return self.stages[self.stage_of(rank)]

    def context_rank_of(self, rank: int) -> int:
        """Which tokens this rank keeps."""
        return self.tensor_rank_of(rank) % self.interleave.ranks


@dataclasses.dataclass(frozen=True)
class RankShare:
    """What one rank of ours takes from rank ``source_rank``: of these ``layers`` the heads ``heads`` (both numbered as
    in the model), and of its tokens those that ours keeps too. Without layers it takes nothing, and only tells the
    source so: another rank has the same (a replica)."""

    source_rank: int
    layers: Layers
    heads: range

    @property
    def is_read(self) -> bool:
        return bool(self.layers)

    @property
    def layer_range(self) -> range:
        """Its layers: stages keep neighbouring ones."""
        return range(self.layers[0], self.layers[-1] + 1) if self.layers else range(0)


def ranks_read(rank: int, ranks: int, sources: int) -> range:
    """Which of ``sources`` tensor ranks have the heads of rank ``rank`` of ``ranks``: several if theirs have fewer
    heads or other boundaries, and one for several of ours if theirs have more."""
    return range(rank * sources // ranks, -(-(rank + 1) * sources // ranks))


@functools.lru_cache(maxsize=1024)
def shares_of(rank: int, ours: EngineShape, theirs: EngineShape, heads: int) -> tuple[RankShare, ...]:
    """What rank ``rank`` of our engine takes from each rank of theirs that it has to do with, ascending. Both keep the
    same model of ``heads`` heads. Of ranks that keep the same it takes from one: at its own place in the model, where
    there is one.

    Every source rank has to do with some rank of ours, whether anything of it is read or not. Raises
    InvalidArgumentError where both do not keep the same layers, or a number of ranks does not divide the heads.
    """
    if ours.layers != theirs.layers:
        raise InvalidArgumentError(
            f"their engine keeps {len(theirs.layers)} layers, ours {len(ours.layers)}, or others"
        )
    tensor_rank, own = ours.tensor_rank_of(rank), set(ours.layers_of(rank))
    wanted = _holding(rank, ours, heads)
    near = ranks_read(tensor_rank, ours.tensor_ranks, theirs.tensor_ranks)
    shares = {
        other: RankShare(other, (), range(0))
        for other in range(theirs.ranks)
        if theirs.tensor_rank_of(other) in near and own & set(theirs.layers_of(other))
    }
    for context in range(theirs.interleave.ranks):
        if not _have_common_tokens(ours, tensor_rank, theirs, context):
            continue
        keep = {
            other: _holding(other, theirs, heads)
            for other in range(theirs.ranks)
            if theirs.context_rank_of(other) == context
        }
        try:
            shards = choose_sources(wanted, {other: keep[other] for other in keep if other in shares})
        except IncompatibleError:  # this context's ranks are elsewhere
            shards = choose_sources(wanted, keep, destination_rank=tensor_rank)
        shares |= {shard.source: RankShare(shard.source, shard.layers, shard.heads) for shard in shards}
    return tuple(shares[other] for other in sorted(shares))


@functools.lru_cache(maxsize=1024)
def readers_of(source_rank: int, ours: EngineShape, theirs: EngineShape, heads: int) -> tuple[int, ...]:
    """The ranks of our engine that read that source rank, or tell it that they do not: it waits for all of them. At
    least one. Raises as :func:`shares_of`."""
    return tuple(
        rank
        for rank in range(ours.ranks)
        if any(share.source_rank == source_rank for share in shares_of(rank, ours, theirs, heads))
    )


def _holding(rank: int, shape: EngineShape, heads: int) -> Holding:
    """What that rank keeps, as the planner takes it."""
    kept = tp_heads(heads, shape.tensor_ranks, shape.tensor_rank_of(rank))
    return Holding(shape.layers_of(rank), kept.start, len(kept), heads)


def _have_common_tokens(ours: EngineShape, tensor_rank: int, theirs: EngineShape, context: int) -> bool:
    """Whether some token of a long prompt is kept by both."""
    mine, other = ours.interleave, theirs.interleave
    if mine.ranks == 1 or other.ranks == 1:
        return True
    turn = mine.ranks * mine.run * other.ranks * other.run  # both begin anew after so many tokens
    return any(
        mine.rank_of(token) == tensor_rank % mine.ranks and other.rank_of(token) == context for token in range(turn)
    )


def stages_of(text: str, layers: int) -> tuple[Layers, ...]:
    """The stages of an engine that keeps a model of ``layers`` layers, from where each ends, as a record says it:
    ``3,5`` are layers 0 to 2, and 3 to 4. Without a text it is one stage. Raises InvalidArgumentError."""
    try:
        ends = [int(end) for end in text.split(",")] if text else [layers]
    except ValueError:
        raise InvalidArgumentError(f"the stages of an engine end at layers, not at {text[:64]!r}") from None
    if ends[-1] != layers or any(end <= begin for begin, end in itertools.pairwise([0, *ends])):
        raise InvalidArgumentError(f"stages that end at {text[:64]} do not divide {layers} layers")
    return tuple(tuple(range(*pair)) for pair in itertools.pairwise([0, *ends]))


def text_of(stages: tuple[Layers, ...]) -> str:
    """What :func:`stages_of` reads; empty for one stage."""
    return "" if len(stages) == 1 else ",".join(str(stage[-1] + 1) for stage in stages)


def shape_of(ranks: int, stages: tuple[Layers, ...]) -> EngineShape:
    """The shape of an engine of so many ranks. Raises InvalidArgumentError unless the stages have equally many."""
    tensor_ranks, rest = divmod(ranks, len(stages))
    if rest or not tensor_ranks:
        raise InvalidArgumentError(f"{len(stages)} stages do not divide {ranks} ranks")
    return EngineShape(stages, tensor_ranks)
