"""Which rank reads what from which: every part of the model's KV cache from one source, and none twice."""

from __future__ import annotations

import collections
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.vllm.shares import (
    EngineShape,
    Interleave,
    RankShare,
    ranks_read,
    readers_of,
    shape_of,
    shares_of,
    stages_of,
    text_of,
)
from kvxfer.errors import InvalidArgumentError
from kvxfer.layout.tp_sharding import tp_heads


def cut(layers: int, ends: list[int]) -> tuple[tuple[int, ...], ...]:
    """So many layers in stages that end there."""
    bounds = sorted({0, layers, *(end for end in ends if 0 < end < layers)})
    return tuple(tuple(range(*pair)) for pair in itertools.pairwise(bounds))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[EngineShape, EngineShape, int]:
    """Two engines of one model: stages cut anywhere, tensor and context ranks of any size that the heads allow."""
    layers, heads = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    shapes = []
    for _ in range(2):
        tensor_ranks = draw(st.sampled_from([n for n in range(1, 17) if heads % n == 0 or n % heads == 0]))
        replicas = max(1, tensor_ranks // heads)
        context = draw(st.sampled_from([n for n in range(1, replicas + 1) if replicas % n == 0]))
        run = draw(st.sampled_from([1, 2, 4]))
        block_tokens = run * draw(st.integers(1, 4))
        stages = cut(layers, draw(st.lists(st.integers(1, 8), max_size=4)))
        shapes.append(EngineShape(stages, tensor_ranks, Interleave(context, run, block_tokens)))
    return shapes[0], shapes[1], heads


@given(pair=pairs(), tokens=st.integers(1, 40))
def test_each_layer_head_and_token_comes_from_one_source(
    pair: tuple[EngineShape, EngineShape, int], tokens: int
) -> None:
    ours, theirs, heads = pair
    for rank in range(ours.ranks):
        got: collections.Counter[tuple[int, int, int]] = collections.Counter()
        mine = set(ours.interleave.tokens_of(ours.context_rank_of(rank), tokens))
        for share in shares_of(rank, ours, theirs, heads):
            source = share.source_rank
            kept = tp_heads(heads, theirs.tensor_ranks, theirs.tensor_rank_of(source))
            assert set(share.layers) <= set(theirs.layers_of(source))
            assert set(share.heads) <= set(kept)
            common = mine & set(theirs.interleave.tokens_of(theirs.context_rank_of(source), tokens))
            got.update(itertools.product(share.layers, share.heads, common))
        wanted = tp_heads(heads, ours.tensor_ranks, ours.tensor_rank_of(rank))
        assert got == collections.Counter(itertools.product(ours.layers_of(rank), wanted, mine))


@given(pair=pairs())
def test_sources_wait_for_those_that_come(pair: tuple[EngineShape, EngineShape, int]) -> None:
    ours, theirs, heads = pair
    come = collections.defaultdict(list)
    for rank in range(ours.ranks):
        sources = [share.source_rank for share in shares_of(rank, ours, theirs, heads)]
        assert sources == sorted(set(sources))
        for source in sources:
            come[source].append(rank)
    for source in range(theirs.ranks):
        assert readers_of(source, ours, theirs, heads) == tuple(come[source])
        assert come[source], "a rank that no reader has to do with would keep its blocks until they expire"


@given(ours=st.integers(1, 16), theirs=st.integers(1, 16), heads=st.integers(1, 16))
def test_without_stages_and_replicas_it_is_the_division_of_heads(ours: int, theirs: int, heads: int) -> None:
    if heads % ours or heads % theirs:
        return
    layers = (tuple(range(4)),)
    for rank in range(ours):
        shares = shares_of(rank, EngineShape(layers, ours), EngineShape(layers, theirs), heads)
        assert [share.source_rank for share in shares] == list(ranks_read(rank, ours, theirs))
        assert all(share.is_read for share in shares)


def test_a_stage_of_two_is_read_by_one() -> None:
    two, one = EngineShape(((0, 1, 2), (3, 4))), EngineShape(((0, 1, 2, 3, 4),))
    assert shares_of(0, one, two, 4) == (RankShare(0, (0, 1, 2), range(4)), RankShare(1, (3, 4), range(4)))
    assert [shares_of(rank, two, one, 4) for rank in range(2)] == [
        (RankShare(0, (0, 1, 2), range(4)),),
        (RankShare(0, (3, 4), range(4)),),
    ]
    assert readers_of(0, two, one, 4) == (0, 1)
    assert readers_of(1, one, two, 4) == (0,)


def test_stages_cut_elsewhere() -> None:
    ours, theirs = EngineShape(cut(5, [2])), EngineShape(cut(5, [3]))
    assert shares_of(1, ours, theirs, 1) == (RankShare(0, (2,), range(1)), RankShare(1, (3, 4), range(1)))
    assert readers_of(0, ours, theirs, 1) == (0, 1)


def test_of_replicas_one_is_read_and_all_are_told() -> None:
    """MLA: every tensor rank keeps the one latent."""
    layers = ((0, 1),)
    shares = shares_of(0, EngineShape(layers, 1), EngineShape(layers, 4), 1)
    assert [(share.source_rank, share.is_read) for share in shares] == [(0, True), (1, False), (2, False), (3, False)]
    wide = [shares_of(rank, EngineShape(layers, 4), EngineShape(layers, 2), 1) for rank in range(4)]
    assert [[share.source_rank for share in shares] for shares in wide] == [[0], [0], [1], [1]], "divided among them"


def test_of_replicated_heads_one_is_read_each() -> None:
    """Grouped queries: two heads on four ranks, read by one that has both."""
    shares = shares_of(0, EngineShape(((0,),), 1), EngineShape(((0,),), 4), 2)
    assert [(share.source_rank, share.heads) for share in shares if share.is_read] == [(0, range(1)), (2, range(1, 2))]
    assert len(shares) == 4


@given(ranks=st.integers(1, 8), run=st.sampled_from([1, 2, 4]), blocks=st.integers(1, 4), tokens=st.integers(1, 200))
def test_each_token_has_a_slot_of_its_own(ranks: int, run: int, blocks: int, tokens: int) -> None:
    interleave = Interleave(ranks, run, run * blocks)
    places = [(interleave.rank_of(token), *interleave.place(token)) for token in range(tokens)]
    assert len(set(places)) == tokens
    for rank in range(ranks):
        slots = [block * interleave.block_tokens + slot for owner, block, slot in places if owner == rank]
        assert slots == list(range(len(slots))), "a rank fills its blocks in order, without gaps"
        assert len(slots) == len(interleave.tokens_of(rank, tokens))
    assert max(block for _, block, _ in places) == interleave.blocks_for(tokens) - 1


def test_one_context_rank_keeps_everything_in_order() -> None:
    interleave = Interleave(1, 1, 16)
    assert [interleave.place(token) for token in (0, 15, 16, 40)] == [(0, 0), (0, 15), (1, 0), (2, 8)]


@given(tensor_ranks=st.integers(1, 4), ends=st.lists(st.integers(1, 8), max_size=4))
def test_a_record_says_where_stages_end(tensor_ranks: int, ends: list[int]) -> None:
    stages = cut(9, ends)
    assert stages_of(text_of(stages), 9) == stages
    assert shape_of(tensor_ranks * len(stages), stages) == EngineShape(stages, tensor_ranks)


@pytest.mark.parametrize("text", ["3", "5,3", "3,3,5", "0,5", "a", "3,,5", "3,6", "-1,5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        stages_of(text, 5)


@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_stages_have_equally_many_ranks(ranks: int) -> None:
    with pytest.raises(InvalidArgumentError):
        shape_of(ranks, ((0,), (1,)))


@pytest.mark.parametrize("stages", [(), ((),), ((0, 1), (1, 2)), ((1, 0),)], ids=str)
def test_stages_that_make_no_sense(stages: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InvalidArgumentError):
        EngineShape(stages)


@pytest.mark.parametrize(
    ("ours", "theirs", "heads"),
    [
        (EngineShape(((0, 1),)), EngineShape(((0, 1, 2),)), 1),
        (EngineShape(((0,),), 3), EngineShape(((0,),), 1), 2),
        (EngineShape(((0,),), 1), EngineShape(((0,),), 3), 2),
        (EngineShape(((0,),)), EngineShape(((0,),)), 0),
    ],
    ids=["other layers", "our ranks", "their ranks", "no heads"],
)
def test_engines_that_do_not_fit(ours: EngineShape, theirs: EngineShape, heads: int) -> None:
    with pytest.raises(InvalidArgumentError):
        shares_of(0, ours, theirs, heads)


def test_blocks_have_whole_runs() -> None:
    with pytest.raises(InvalidArgumentError):
        Interleave(2, 3, 16)
    with pytest.raises(InvalidArgumentError):
        EngineShape(((0,),), 3, Interleave(2, 1, 16))
