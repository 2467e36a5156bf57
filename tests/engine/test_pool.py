"""The block pool against a model that is nothing but dictionaries, and its rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.engine.pool import BlockPool
from kvxfer.errors import InvalidArgumentError, OverloadedError

BLOCKS, TOKENS = 8, 2
prompts = st.lists(st.integers(0, 1), max_size=11)


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share prefixes, publish, leave; ``content`` remembers what each published block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, TOKENS)
        self.sequences: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}
        self.last_used: dict[int, int] = {}
        self.clock = 0

    def references(self, block: int) -> int:
        return sum(blocks.count(block) for blocks in self.sequences)

    def cached_prefix(self, prompt: list[int]) -> int:
        held = set(self.content.values())
        count = 0
        while (count + 1) * TOKENS <= len(prompt) and tuple(prompt[: (count + 1) * TOKENS]) in held:
            count += 1
        return count

    @rule(prompt=prompts)
    def admit(self, prompt: list[int]) -> None:
        expected = self.cached_prefix(prompt)
        shared = self.pool.match(prompt)
        assert len(shared) == expected
        for index, block in enumerate(shared):
            assert self.content[block] == tuple(prompt[: (index + 1) * TOKENS])
        self.sequences.append(shared)
        need = -(-len(prompt) // TOKENS) - len(shared)
        used = sum(1 for block in range(BLOCKS) if self.references(block))
        if need > BLOCKS - used:
            with pytest.raises(OverloadedError):
                self.pool.allocate(need)
            self.leave(len(self.sequences) - 1)
            return
        idle = {block: self.last_used[block] for block in self.content if not self.references(block)}
        fresh = self.pool.allocate(need)
        assert len(set(fresh)) == need
        taken = [block for block in fresh if block in self.content]
        kept = [when for block, when in idle.items() if block not in taken]
        for block in taken:
            assert idle[block] < min(kept, default=self.clock + 1), "a younger block was evicted before an older one"
            del self.content[block]
        assert not any(self.references(block) for block in fresh)
        self.sequences[-1] = shared + fresh
        digests = self.pool.digests(prompt)
        for index, digest in enumerate(digests):
            block, text = self.sequences[-1][index], tuple(prompt[: (index + 1) * TOKENS])
            is_first = text not in self.content.values()
            assert self.pool.publish(block, digest) is (is_first or self.content.get(block) == text)
            if is_first:
                self.content[block] = text

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.integers(0, len(self.sequences) - 1)))

    def leave(self, index: int) -> None:
        blocks = self.sequences.pop(index)
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.clock += 1
            self.last_used[block] = self.clock

    @rule(block=st.integers(0, BLOCKS - 1))
    def forget(self, block: int) -> None:
        self.pool.forget([block])
        self.content.pop(block, None)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        now = self.pool.statistics()
        used = sum(1 for block in range(BLOCKS) if self.references(block))
        cached = sum(1 for block in self.content if not self.references(block))
        assert (now.used, now.cached, now.free, now.total) == (used, cached, BLOCKS - used - cached, BLOCKS)
        assert [self.pool.references(block) for block in range(BLOCKS)] == [self.references(b) for b in range(BLOCKS)]


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_allocate_takes_nothing_when_too_few_are_left() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(3)
    with pytest.raises(OverloadedError, match="2 KV blocks are needed, 1 of 4"):
        pool.allocate(2)
    assert pool.statistics().free == 1


def test_release_of_an_unreferenced_block_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(4, 16)
    first, second = pool.allocate(2)
    with pytest.raises(InvalidArgumentError, match="references"):
        pool.release([first, second, second])
    assert pool.statistics().used == 2
    with pytest.raises(InvalidArgumentError, match="not one of"):
        pool.release([4])


def test_another_salt_gives_other_digests() -> None:
    assert BlockPool(1, 2, salt=b"a").digests([1, 2]) != BlockPool(1, 2, salt=b"b").digests([1, 2])


def test_digests_cover_full_blocks_and_everything_before() -> None:
    pool = BlockPool(1, 2)
    one, two = pool.digests([1, 2, 3, 4, 5])
    other, same_tokens = pool.digests([9, 2, 3, 4])
    assert len({one, two, other, same_tokens}) == 4


def test_publish_needs_a_reference_and_one_content() -> None:
    pool = BlockPool(2, 2)
    with pytest.raises(InvalidArgumentError):
        pool.publish(0, b"digest")
    (block,) = pool.allocate(1)
    assert pool.publish(block, b"digest")
    assert pool.publish(block, b"digest")
    with pytest.raises(InvalidArgumentError, match="other content"):
        pool.publish(block, b"another")


def test_prefix_outlives_its_tail() -> None:
    pool = BlockPool(3, 1)
    blocks = pool.allocate(3)
    for block, digest in zip(blocks, pool.digests([1, 2, 3]), strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.match([1, 2, 3]) == blocks[:2]
    assert pool.statistics().evicted_blocks == 1


@pytest.mark.parametrize(("blocks", "tokens"), [(0, 1), (1, 0), (-1, 16)])
def test_a_pool_needs_blocks_and_tokens(blocks: int, tokens: int) -> None:
    with pytest.raises(InvalidArgumentError):
        BlockPool(blocks, tokens)
