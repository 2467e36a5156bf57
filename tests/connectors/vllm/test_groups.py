"""Which blocks of each KV group a prompt has, and in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.vllm.groups import GROUP_BITS, TEXT_MAX, GroupKind, KvGroup, KvGroups

FULL = KvGroup(GroupKind.FULL, 16)
SLIDING = KvGroup(GroupKind.SLIDING, 16, 64)
CHUNKED = KvGroup(GroupKind.CHUNKED, 16, 64)
STATE = KvGroup(GroupKind.STATE, 1024)

blocks = st.sampled_from([8, 16, 32, 48])
groups = st.one_of(
    st.builds(KvGroup, st.just(GroupKind.FULL), blocks),
    st.builds(KvGroup, st.just(GroupKind.SLIDING), blocks, st.integers(1, 200)),
    st.builds(KvGroup, st.just(GroupKind.CHUNKED), blocks, st.sampled_from([48, 96, 192])),
    st.builds(KvGroup, st.just(GroupKind.STATE), st.sampled_from([16, 1024])),
)
models = st.builds(KvGroups, st.lists(groups, min_size=1, max_size=5).map(tuple))


def test_positions_at_the_edges_of_windows_and_chunks() -> None:
    assert SLIDING.positions(63) == range(0, 4)
    assert SLIDING.positions(64) == range(0, 4)  # the next token sees the last 63
    assert SLIDING.positions(79) == range(1, 5)
    assert CHUNKED.positions(63) == range(0, 4)
    assert CHUNKED.positions(64) == range(4, 4)  # the next token begins a chunk
    assert CHUNKED.positions(65) == range(4, 5)
    assert STATE.positions(1) == range(0, 1)
    assert STATE.positions(1025) == range(1, 2)
    assert [group.positions(0) for group in (FULL, SLIDING, CHUNKED, STATE)] == [range(0)] * 4


@given(models, st.integers(1, 600))
def test_every_token_that_the_next_one_sees_is_there_and_no_other_block(model: KvGroups, tokens: int) -> None:
    places = set(model.sequence(tokens).places)
    assert len(places) == len(model.sequence(tokens))
    for number, group in enumerate(model.groups):
        if group.kind is GroupKind.STATE:
            seen = [tokens - 1]
        elif group.kind is GroupKind.CHUNKED:
            seen = [token for token in range(tokens) if token // group.window == tokens // group.window]
        elif group.kind is GroupKind.SLIDING:
            seen = [token for token in range(tokens) if token > tokens - group.window]
        else:
            seen = list(range(tokens))
        mine = {position for of, position in places if of == number}
        assert {token // group.block_tokens for token in seen} <= mine
        if group.kind is not GroupKind.CHUNKED:  # a chunk that begins within a block needs that whole block
            assert mine <= {token // group.block_tokens for token in seen} or group.window == 1


@given(models, st.integers(1, 600), st.data())
def test_what_is_computed_is_a_beginning_and_what_is_missing_an_end(
    model: KvGroups, tokens: int, data: st.DataObject
) -> None:
    sequence = model.sequence(tokens)
    computed = data.draw(st.integers(0, tokens - 1))
    count = sequence.full_after(computed)
    for at, (number, position) in enumerate(sequence.places):
        group = model.groups[number]
        is_full = group.kind is not GroupKind.STATE and (position + 1) * group.block_tokens <= computed
        assert is_full == (at < count)


def test_numbers_carry_the_group_and_a_block_that_is_gone_is_none() -> None:
    sequence = KvGroups((FULL, SLIDING, STATE)).sequence(90)
    tables = [[1, 2, 3, 4, 5, 6], [0, 8, 9, 10, 11, 12], [7]]
    found = sequence.numbers(tables)
    assert found is not None
    assert [(number >> GROUP_BITS, number & 0xFFFF) for number in found[:3]] == [(0, 1), (0, 2), (1, 8)]
    assert found[-1] == 2 << GROUP_BITS | 7
    assert sequence.numbers([tables[0], [0, 0, 9, 10, 11, 12], [7]]) is None
    assert sequence.numbers([tables[0][:5], *tables[1:]]) is None
    assert KvGroups.plain(16).sequence(40).numbers([[0, 5, 9]]) == (0, 5, 9)


def test_the_record_tells_groups_apart_and_stays_short() -> None:
    layers = [f"model.layers.{number}" for number in range(400)]
    assert KvGroups.plain(16).to_text(layers) == ""

    def model(window: int, count: int) -> KvGroups:
        return KvGroups((KvGroup(GroupKind.SLIDING, 16, window, tuple(layers[:count]), "f32"), FULL))

    assert model(64, 2).to_text(layers) == "sliding 64/16 [f32] of layers 0,1; full 0/16 [] of layers "
    many = {model(window, 400).to_text(layers) for window in (64, 128)}
    assert len(many) == 2
    assert all(len(text) <= TEXT_MAX for text in many)
