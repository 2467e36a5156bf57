"""KV blocks: which is taken next, and what is found again."""

from __future__ import annotations

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvxfer.errors import InvalidArgumentError
from kvxfer.forecast.paged_cache import PagedCache


def filled(blocks: int, *keys: int) -> PagedCache:
    """A cache in which ``keys`` are one prefix that no sequence uses."""
    cache = PagedCache(blocks)
    taken = cache.take(len(keys)) or []
    for index, (block, key) in enumerate(zip(taken, keys, strict=True)):
        cache.store(block, key, keys[index - 1] if index else None)
    cache.give_back(taken)
    return cache


def test_match_ends_at_the_first_key_that_is_missing() -> None:
    cache = filled(4, 1, 2, 3)
    assert len(cache.match([1, 2, 9, 3])) == 2
    assert cache.match([2]) == cache.match([1, 2])[1:]


def test_unused_blocks_without_content_are_taken_first() -> None:
    cache = filled(4, 1, 2)
    cache.take(2)
    assert cache.cached == 2


def test_last_block_of_a_prefix_is_forgotten_first() -> None:
    cache = filled(2, 1, 2)
    cache.take(1)
    assert [len(cache.match([1])), len(cache.match([1, 2]))] == [1, 1]


def test_shared_blocks_are_not_free() -> None:
    cache = filled(2, 1)
    found = cache.match([1])
    assert cache.unused_of(found) == 1
    cache.share(found)
    cache.share(found)
    assert (cache.free, cache.unused_of(found)) == (1, 0)
    assert cache.take(2) is None
    cache.give_back(found)
    assert cache.free == 1
    cache.give_back(found)
    assert cache.free == 2


def test_block_given_back_too_often_is_refused() -> None:
    cache = PagedCache(2)
    with pytest.raises(InvalidArgumentError, match="more often"):
        cache.give_back([0])
    with pytest.raises(InvalidArgumentError, match="1 or more"):
        PagedCache(0)


def test_clear_forgets_all_and_frees_nothing() -> None:
    cache = filled(4, 1, 2)
    cache.share(cache.match([1]))
    cache.clear()
    assert (cache.cached, cache.used) == (0, 1)


def stored(cache: PagedCache, *keys: int) -> list[int]:
    """A sequence's blocks, each of which holds a key."""
    taken = cache.take(len(keys)) or []
    for index, (block, key) in enumerate(zip(taken, keys, strict=True)):
        cache.store(block, key, keys[index - 1] if index else None)
    return taken


def test_blocks_without_a_key_go_back_to_the_head_and_the_last_is_taken_first() -> None:
    cache = PagedCache(6)
    first = stored(cache, 1, 2)
    short = cache.take(2) or []
    cache.give_back(first)
    cache.give_back(short)
    assert cache.take(2) == short[::-1]
    assert cache.cached == 2


def test_short_requests_evict_no_prefix() -> None:
    """One free block is enough for any number of requests that fill none."""
    cache = filled(4, 1, 2, 3)
    for _ in range(10):
        cache.give_back(cache.take(1) or [])
    assert len(cache.match([1, 2, 3])) == 3


def test_a_sequence_that_fills_its_blocks_in_part_gives_back_both_kinds() -> None:
    cache = PagedCache(5)
    taken = stored(cache, 1, 2) + (cache.take(2) or [])
    cache.give_back(taken)
    assert cache.take(5) == [taken[3], taken[2], 4, taken[1], taken[0]]


def test_prefix_that_was_used_last_is_forgotten_last() -> None:
    cache = PagedCache(4)
    one, other = stored(cache, 1, 2), stored(cache, 3, 4)
    cache.give_back(one)
    cache.give_back(other)
    found = cache.match([1, 2])
    cache.share(found)
    cache.give_back(found)
    assert cache.take(4) == [other[1], other[0], one[1], one[0]]


def test_a_copy_is_announced_and_removed_and_the_key_is_gone_with_the_last() -> None:
    cache = PagedCache(4, records_changes=True)
    one, other = stored(cache, 1, 2), stored(cache, 1, 2)
    assert [(c.key, c.is_stored, c.parent) for c in cache.drain_changes()] == 2 * [(1, True, None), (2, True, 1)]
    assert (cache.cached, cache.keys, cache.match([1, 2])) == (4, 2, one)
    cache.give_back(one)
    assert cache.take(2) == one[::-1]
    assert [(c.key, c.is_stored) for c in cache.drain_changes()] == [(2, False), (1, False)]
    assert (cache.cached, cache.keys, cache.match([1, 2])) == (2, 2, other)
    cache.give_back(other)
    cache.take(2)
    assert [(c.key, c.is_stored) for c in cache.drain_changes()] == [(2, False), (1, False)]
    assert (cache.cached, cache.keys, cache.match([1, 2])) == (0, 0, [])


def test_a_block_keeps_its_key_until_it_is_taken() -> None:
    cache = PagedCache(1, records_changes=True)
    [block] = stored(cache, 1)
    cache.store(block, 2, None)
    assert [change.key for change in cache.drain_changes()] == [1]
    assert (cache.match([1]), cache.match([2])) == ([block], [])


class PlainCache:
    """The same in lists, without any index. ``queue`` has the free blocks in the order in which they are taken."""

    def __init__(self, blocks: int) -> None:
        self.queue = list(range(blocks))
        self.users = [0] * blocks
        self.held: list[tuple[int, int]] = []
        """(block, key) in the order in which they were stored."""

    def keys(self) -> dict[int, int]:
        return dict(self.held)

    def match(self, keys: list[int]) -> list[int]:
        found: list[int] = []
        for key in keys:
            copies = [block for block, held in self.held if held == key]
            if not copies:
                break
            found.append(copies[0])
        return found

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] += 1
        self.queue = [block for block in self.queue if not self.users[block]]

    def take(self, count: int) -> list[int] | None:
        if count > len(self.queue):
            return None
        taken = self.queue[:count]
        self.share(taken)
        self.held = [(block, key) for block, key in self.held if block not in taken]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
        free = [block for block in reversed(blocks) if not self.users[block]]
        keys = self.keys()
        head, tail = [one for one in free if one not in keys], [one for one in free if one in keys]
        self.queue = head + self.queue + tail


BLOCKS = 10


class BesidePlain(RuleBasedStateMachine):
    """Sequences in any order: the cache gives the very blocks that the plain one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache(BLOCKS, records_changes=True)
        self.plain = PlainCache(BLOCKS)
        self.sequences: list[tuple[list[int], list[int]]] = []
        """(blocks, keys) of each."""
        self.announced: collections.Counter[int] = collections.Counter()

    @rule(name=st.integers(0, 2), full=st.integers(0, 4), more=st.integers(0, 2))
    def begin(self, name: int, full: int, more: int) -> None:
        keys = [name * 100 + index for index in range(full)]
        found = self.cache.match(keys)
        assert found == self.plain.match(keys)
        wanted = full - len(found) + more
        unused = sum(not self.plain.users[block] for block in found)
        assert self.cache.unused_of(found) == unused
        if wanted > self.cache.free - unused:
            return
        self.cache.share(found)
        self.plain.share(found)
        taken = self.cache.take(wanted)
        assert taken == self.plain.take(wanted)
        assert taken is not None
        self.sequences.append((found + taken, keys))

    @rule(count=st.integers(0, BLOCKS))
    def take_too_many(self, count: int) -> None:
        if count > len(self.plain.queue):
            assert self.cache.take(count) is None

    @rule(data=st.data(), count=st.integers(1, 4))
    def fill(self, data: st.DataObject, count: int) -> None:
        """The first ``count`` blocks of a sequence are full, whether or not others hold the same."""
        if self.sequences:
            blocks, keys = data.draw(st.sampled_from(self.sequences))
            known = self.plain.keys()
            for index, (block, key) in enumerate(zip(blocks[:count], keys, strict=False)):
                self.cache.store(block, key, keys[index - 1] if index else None)
                if block not in known:
                    self.plain.held.append((block, key))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.sequences:
            blocks, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
            self.cache.give_back(blocks)
            self.plain.give_back(blocks)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.plain.held = []

    @invariant()
    def counts_agree(self) -> None:
        keys = self.plain.keys()
        assert (self.cache.free, self.cache.used) == (len(self.plain.queue), BLOCKS - len(self.plain.queue))
        assert (self.cache.cached, self.cache.keys) == (len(keys), len(set(keys.values())))

    @invariant()
    def readers_of_changes_know_how_many_blocks_hold_a_key(self) -> None:
        for change in self.cache.drain_changes():
            self.announced[change.key] += 1 if change.is_stored else -1
            assert self.announced[change.key] >= 0
        assert +self.announced == collections.Counter(self.plain.keys().values())

    @invariant()
    def blocks_without_a_key_come_first(self) -> None:
        keys = self.plain.keys()
        has_key = [block in keys for block in self.plain.queue]
        assert has_key == sorted(has_key)

    def teardown(self) -> None:
        """The whole order in which blocks are taken."""
        assert self.cache.take(self.cache.free) == self.plain.take(len(self.plain.queue))


TestBesidePlain = BesidePlain.TestCase
TestBesidePlain.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
