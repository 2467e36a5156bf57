"""Memory that is registered more than once. What a pool promises no transfer into another pool fills, byte by byte,
however the two cut the memory into blocks; and memory is of pools or of regions, not of both."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer._native import _core
from kvxfer.errors import BlocksBusyError, InvalidArgumentError, LimitExceededError
from tests.support.limits import endpoint_limits

BASE = 1 << 20
SECOND = 1_000_000_000
PEER = _core.AgentRef("peer", 1, bytes(16))
SIZE = 160
"""Of the memory: every pool below ends before it."""

Segments = list[tuple[int, int, int]]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, Segments]:
    """A number of blocks, and segments with strides of any kind."""
    count = draw(st.integers(1, 6))
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 6))
        stride = draw(st.one_of(st.just(12), st.integers(length, length + 12)))
        segments.append((draw(st.integers(0, 40)), stride, length))
    return count, segments


def bytes_of(segments: Segments, block: int) -> Any:
    """How often each byte of the memory is in the block, shape [SIZE]."""
    held = np.zeros(SIZE, np.int64)
    for offset, stride, length in segments:
        held[offset + block * stride : offset + block * stride + length] += 1
    return held


class Pools:
    """An endpoint whose pools share memory, and which bytes of it are promised and filled."""

    def __init__(self) -> None:
        self.endpoint = _core.Endpoint(_core.AgentRef("self", 1, bytes(16)), endpoint_limits())
        self.endpoint.set_peer(PEER, bytes(32), _core.SessionKind.MEMORY)
        self.shapes: dict[int, tuple[int, Segments]] = {}
        self.granted: list[tuple[bytes, Any]] = []
        self.filled: list[tuple[bytes, Any]] = []

    def add(self, count: int, segments: Segments) -> int | None:
        pool = len(self.shapes) + 1
        info = _core.PoolInfo(pool, count, sum(length for _, _, length in segments), bytes(32), False)
        overlaps = (sum(bytes_of(segments, block) for block in range(count)) > 1).any()
        if overlaps:
            with pytest.raises(InvalidArgumentError, match="of its blocks share bytes"):
                self.endpoint.add_pool(info, BASE, segments)
            return None
        self.endpoint.add_pool(info, BASE, segments)
        self.shapes[pool] = (count, segments)
        return pool

    def bytes_of(self, pool: int, blocks: list[int]) -> Any:
        return sum(bytes_of(self.shapes[pool][1], block) for block in blocks) > 0

    def is_touched(self, what: list[tuple[bytes, Any]], memory: Any) -> bool:
        return any((other & memory).any() for _, other in what)

    def grant(self, pool: int, blocks: list[int]) -> None:
        identity, memory = os.urandom(16), self.bytes_of(pool, blocks)
        try:
            self.endpoint.grant(identity, pool, blocks, "", SECOND, 0, 0)
        except BlocksBusyError:
            assert self.is_touched(self.filled, memory)
            return
        assert not self.is_touched(self.filled, memory)
        self.granted.append((identity, memory))

    def pull(self, pool: int, blocks: list[int]) -> None:
        identity, memory = os.urandom(16), self.bytes_of(pool, blocks)
        is_free = not self.is_touched(self.filled, memory) and not self.is_touched(self.granted, memory)
        try:
            self.endpoint.pull(identity, PEER, pool, blocks, 0, [_core.Lane.MEMORY], SECOND, 1, 0)
        except BlocksBusyError:
            assert not is_free
            return
        assert is_free
        self.filled.append((identity, memory))

    def end(self, number: int) -> None:
        """Of whatever is under way."""
        if number % 2 and self.granted:
            identity, _ = self.granted.pop(number // 2 % len(self.granted))
            self.endpoint.end_grant(identity, _core.GrantEvent.RELEASE, 0)
        elif self.filled:
            identity, _ = self.filled.pop(number // 2 % len(self.filled))
            self.endpoint.cancel(identity, 0)


@settings(max_examples=200)
@given(
    shapes=st.lists(shapes(), min_size=2, max_size=3),
    acts=st.lists(st.tuples(st.sampled_from(["grant", "pull", "end"]), st.integers(0, 99), st.integers(1, 63))),
)
def test_what_one_pool_promises_no_other_fills(
    shapes: list[tuple[int, Segments]], acts: list[tuple[str, int, int]]
) -> None:
    """Pools of the same bytes, cut in any way: the rule holds for each byte, and refuses nothing that it need not."""
    world = Pools()
    pools = [pool for pool in (world.add(*shape) for shape in shapes) if pool is not None]
    for act, number, mask in acts:
        if act == "end" or not pools:
            world.end(number)
            continue
        pool = pools[number % len(pools)]
        blocks = [block for block in range(world.shapes[pool][0]) if mask >> block & 1]
        if blocks:
            getattr(world, act)(pool, blocks)


def make(*pools: tuple[int, Segments]) -> Pools:
    world = Pools()
    for count, segments in pools:
        assert world.add(count, segments) is not None
    return world


WHOLE: tuple[int, Segments] = (4, [(0, 16, 16)])


def test_the_refusal_names_both_blocks_and_the_state() -> None:
    world = make(WHOLE, (8, [(4, 8, 2)]))
    world.grant(1, [2])
    text = "cannot reserve block 4: it shares memory with block 2 of pool 1, which is granted"
    with pytest.raises(BlocksBusyError, match=text):
        world.endpoint.pull(bytes(16), PEER, 2, [0, 4], 0, [_core.Lane.MEMORY], SECOND, 1, 0)
    world.pull(2, [0])  # the refused one holds nothing
    with pytest.raises(
        BlocksBusyError, match="cannot grant block 0: it shares memory with block 0 of pool 2, which is res"
    ):
        world.endpoint.grant(bytes(16), 1, [0], "", SECOND, 0, 0)


def test_slices_that_interleave_are_filled_at_once() -> None:
    """As SGLang's are, where two sources with other heads fill the same pages."""
    world = make((4, [(0, 16, 8)]), (4, [(8, 16, 8)]), WHOLE)
    world.pull(1, [0, 1])
    world.pull(2, [0, 1])
    assert len(world.filled) == 2
    world.pull(3, [1])
    assert len(world.filled) == 2


def test_a_pool_that_was_removed_is_in_nobodys_way() -> None:
    world = make(WHOLE, WHOLE)
    world.grant(1, [0])
    with pytest.raises(BlocksBusyError):
        world.endpoint.remove_pool(1)
    world.end(1)
    world.endpoint.remove_pool(1)
    world.pull(2, [0])
    assert len(world.filled) == 1


def test_two_large_pools_with_strides_that_never_meet() -> None:
    """Found by counting, not by looking at every block."""
    count = 1 << 20
    world = Pools()
    for pool, offset in ((1, 0), (2, 2)):
        segments = [(offset, 6 * pool, 2)]
        world.endpoint.add_pool(_core.PoolInfo(pool, count >> pool, 2, bytes(32), False), BASE, segments)
    world.endpoint.grant(bytes(16), 1, [7], "", SECOND, 0, 0)
    world.endpoint.pull(bytes(15) + b"1", PEER, 2, [3], 0, [_core.Lane.MEMORY], SECOND, 1, 0)


def interleaved(segments: int) -> Segments:
    """As the layers of a cache whose blocks have all layers."""
    return [(64 * number, 64 * segments, 64) for number in range(segments)]


def test_many_segments_of_one_stride_are_judged_without_looking_at_their_pairs() -> None:
    """4096 lie in each other, which are 8 million pairs: more than are judged one by one."""
    segments = interleaved(4096)
    endpoint = Pools().endpoint
    for pool in (1, 2):
        endpoint.add_pool(_core.PoolInfo(pool, 64, 64 * 4096, bytes(32), False), BASE, segments)
    endpoint.grant(bytes(16), 1, [7], "", SECOND, 0, 0)
    with pytest.raises(BlocksBusyError, match="block 7 of pool 1"):
        endpoint.pull(bytes(15) + b"1", PEER, 2, [7], 0, [_core.Lane.MEMORY], SECOND, 1, 0)
    segments[4000] = (64 * 3999 + 1, 64 * 4096, 64)
    with pytest.raises(InvalidArgumentError, match="segments 3999 and 4000 of its blocks share bytes"):
        endpoint.add_pool(_core.PoolInfo(3, 64, 64 * 4096, bytes(32), False), BASE, segments)


def test_too_many_pairs_of_segments_are_refused() -> None:
    """Of strides that differ, which lie in each other like the shells of an onion."""
    count = 4096
    segments = [(number, 2 * (count - number), 1) for number in range(count)]
    with pytest.raises(LimitExceededError, match="pairs of segments lie in each other"):
        Pools().endpoint.add_pool(_core.PoolInfo(1, 2, count, bytes(32), False), BASE, segments)


@pytest.mark.parametrize("end", [1 << 63, (1 << 64) - 1, 1 << 64, (1 << 64) + 4096])
def test_memory_whose_end_is_no_address_is_refused(end: int) -> None:
    """A sum of 64 bits would wrap, and see no pool there."""
    world = make(WHOLE)
    with pytest.raises(InvalidArgumentError, match=r"ends past all addresses|shares memory"):
        world.endpoint.add_region(_core.RegionInfo(9, min(end - 4096, (1 << 64) - 1)), 4096)


@pytest.mark.parametrize("is_region_first", [True, False], ids=["region first", "pool first"])
@pytest.mark.parametrize("begin", [0, 15, 16, 63, 64, 100])
def test_a_region_is_no_part_of_a_pool(begin: int, is_region_first: bool) -> None:
    """In either order; beside one, or in the gaps of its blocks, it may lie."""
    segments = [(16, 24, 8)]
    covered = {16 + 24 * block + byte for block in range(4) for byte in range(8)}
    endpoint = Pools().endpoint
    steps = [
        functools.partial(endpoint.add_region, _core.RegionInfo(9, 5), BASE + begin),
        functools.partial(endpoint.add_pool, _core.PoolInfo(1, 4, 8, bytes(32), False), BASE, segments),
    ]
    first, second = steps if is_region_first else reversed(steps)
    first()
    if covered.isdisjoint(range(begin, begin + 5)):
        second()
        return
    text = r"shares memory with (region 9|block \d of pool 1): register it as one of the two"
    with pytest.raises(InvalidArgumentError, match=text):
        second()
    counts = endpoint.counts()
    assert len(counts.pools) + len(counts.regions) == 1


def test_regions_may_share_memory() -> None:
    """Peers may write any byte of them at any time, so each of them promises nothing that another breaks."""
    world = Pools()
    for region in (8, 9):
        world.endpoint.add_region(_core.RegionInfo(region, 64), BASE)


def test_a_region_that_was_removed_is_in_nobodys_way() -> None:
    world = Pools()
    world.endpoint.add_region(_core.RegionInfo(9, 64), BASE)
    world.endpoint.remove_region(9, 0)
    assert world.add(*WHOLE) == 1


def test_pools_whose_place_is_not_said_overlap_nothing() -> None:
    world = Pools()
    for pool in (1, 2):
        world.endpoint.add_pool(_core.PoolInfo(pool, 4, 16, bytes(32), False))
        world.shapes[pool] = WHOLE
    world.endpoint.grant(bytes(16), 1, [0], "", SECOND, 0, 0)
    world.endpoint.pull(bytes(15) + b"1", PEER, 2, [0], 0, [_core.Lane.MEMORY], SECOND, 1, 0)
