"""KV blocks: which is taken next, and what is found again."""

from __future__ import annotations

import pytest

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
