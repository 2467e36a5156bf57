"""Jobs of an engine's tier over a store that does as it is told: what unknown weights, failures and ends mean."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.tier import messages
from kvxfer.connectors.tier.jobs import TierJobs
from kvxfer.connectors.tier.messages import Find, Found, Get, Message, MoveEnded, Put, TierHello, TierWelcome, Used
from kvxfer.connectors.tier.store import BlockMove, BlockName, Done, Presence, StoreFigures
from kvxfer.errors import BlockDamagedError, KvxferError, ProtocolError, WeightsUnknownError
from kvxfer.types import TransferId

BLOCK = 100
KEYS = [bytes([number]) * 36 for number in range(4)]
FIRST, SECOND = bytes(32), bytes([1]) * 32


class ToldStore:
    """Keeps names; a load of a name in ``broken`` fails; ends jobs when told."""

    def __init__(self) -> None:
        self.names: set[BlockName] = set()
        self.broken: set[bytes] = set()
        self.open: list[tuple[Sequence[BlockMove], Done, bool]] = []
        self.used: list[bytes] = []
        self.is_asking = False

    def find(self, name: BlockName) -> Presence:
        return Presence.HERE if name in self.names else Presence.ABSENT

    def flush(self) -> None:
        pass

    def save(self, moves: Sequence[BlockMove], done: Done) -> None:
        self.open.append((moves, done, False))

    def load(self, moves: Sequence[BlockMove], done: Done) -> None:
        self.open.append((moves, done, True))

    def use(self, names: Sequence[BlockName]) -> None:
        self.used += [name.key for name in names]

    def figures(self) -> StoreFigures:
        return StoreFigures()

    def close(self) -> None:
        pass

    def finish(self) -> None:
        for moves, done, is_load in self.open:
            outcomes: list[KvxferError | None] = [None] * len(moves)
            for place, move in enumerate(moves):
                if is_load and move.name.key in self.broken:
                    outcomes[place] = BlockDamagedError("broken")
                elif not is_load:
                    self.names.add(move.name)
            done(outcomes)
        self.open.clear()


class Weighed:
    """An engine whose record may change, or not be known."""

    def __init__(self) -> None:
        self.record: bytes | None = FIRST
        self.store = ToldStore()
        self.jobs = TierJobs(self.store, BLOCK, self.known)

    def known(self) -> bytes:
        if self.record is None:
            raise WeightsUnknownError("they are being read")
        return self.record


@pytest.fixture
def engine() -> Weighed:
    return Weighed()


def test_a_stored_block_is_found_loaded_and_counted(engine: Weighed) -> None:
    jobs, store = engine.jobs, engine.store
    assert jobs.find("a", KEYS[0]) is Presence.ABSENT
    jobs.save(1, "a", KEYS[:2], [3, 4])
    assert jobs.has_work
    assert jobs.take_ended() == []
    store.finish()
    (end,) = jobs.take_ended()
    assert (end.job_id, end.is_success, end.moved_bytes) == (1, True, 2 * BLOCK)
    assert [jobs.find("b", key) for key in KEYS[:3]] == [Presence.HERE, Presence.HERE, Presence.ABSENT]
    jobs.load(2, "b", KEYS[:2], [0, 1])
    store.finish()
    assert jobs.take_ended()[0].good_keys == tuple(KEYS[:2])
    jobs.request_over("b")
    assert store.used == KEYS[:3]
    total = jobs.counter.total()
    assert (total.hits, total.misses, total.loaded_bytes, total.saved_bytes) == (2, 2, 2 * BLOCK, 2 * BLOCK)
    assert not jobs.has_work


def test_a_request_does_not_try_a_block_again_that_failed_for_it(engine: Weighed) -> None:
    jobs, store = engine.jobs, engine.store
    store.names = {BlockName(FIRST, key) for key in KEYS}
    store.broken = {KEYS[1]}
    assert jobs.find("a", KEYS[1]) is Presence.HERE
    jobs.load(1, "a", KEYS[:3], [0, 1, 2])
    store.finish()
    (end,) = jobs.take_ended()
    assert (end.is_success, end.good_keys) == (False, (KEYS[0], KEYS[2]))
    assert [jobs.find(request, KEYS[1]) for request in "ab"] == [Presence.ABSENT, Presence.HERE]
    assert jobs.counter.total().errors == {("load", "block_damaged"): 1}


def test_of_a_prefix_longer_than_the_primary_tier_as_much_comes_back_as_has_room(engine: Weighed) -> None:
    """The primary tier of vLLM: a block that is here gets a row at once, that of the least recently used block where
    none is free; a row whose load runs is not to be had."""
    jobs, store, rows_max = engine.jobs, engine.store, 4
    keys = [bytes([number]) * 36 for number in range(10)]
    store.names = {BlockName(FIRST, key) for key in keys}
    rows: dict[bytes, bool] = {}  # by last use: whether it is there
    for _ in range(5):
        prefix, pending, promoted = 0, False, []
        for key in keys:
            if key not in rows:
                evictable = next((row for row, is_there in rows.items() if is_there), None)
                is_here = jobs.find("a", key) is Presence.HERE
                if not is_here or (len(rows) == rows_max and evictable is None):
                    break
                if len(rows) == rows_max and evictable is not None:
                    del rows[evictable]
                rows[key] = False
                promoted.append(key)
            pending |= not rows[key]
            prefix += 1
        if promoted:
            jobs.load(1, "a", promoted, list(range(len(promoted))))
        jobs.step_over()
        store.finish()
        for end in jobs.take_ended():
            rows.update(dict.fromkeys(end.good_keys, True))
        if not pending:
            break
    assert (prefix, pending) == (rows_max, False)
    assert jobs.find("b", keys[-1]) is Presence.HERE  # another request may have more room


def test_with_unknown_weights_nothing_is_stored_or_loaded_by_name(engine: Weighed) -> None:
    engine.store.names = {BlockName(FIRST, KEYS[0])}
    engine.record = None
    assert engine.jobs.find("a", KEYS[0]) is Presence.ABSENT
    engine.jobs.save(1, "a", KEYS[:1], [0])
    engine.jobs.load(2, "a", KEYS[:1], [0])
    assert not engine.store.open
    assert [end.good_keys for end in engine.jobs.take_ended()] == [(), ()]
    assert engine.jobs.counter.total().errors == {
        ("find", "weights_unknown"): 1,
        ("save", "weights_unknown"): 1,
        ("load", "weights_unknown"): 1,
    }


@pytest.mark.parametrize("record", [None, SECOND])
def test_what_was_loading_while_the_weights_changed_is_not_used(engine: Weighed, record: bytes | None) -> None:
    engine.jobs.load(1, "a", KEYS[:2], [0, 1])
    engine.record = record
    engine.store.finish()
    (end,) = engine.jobs.take_ended()
    assert (end.is_success, end.good_keys) == (False, ())


NAMES = st.builds(BlockName, st.binary(min_size=32, max_size=32), st.binary(min_size=1, max_size=64))
IDS = st.builds(TransferId, st.binary(min_size=16, max_size=16))
NUMBERS, RECORDS = st.integers(0, (1 << 32) - 1), st.binary(min_size=32, max_size=32)
KEY_LISTS = st.lists(st.binary(min_size=1, max_size=64), max_size=20).map(tuple)
MESSAGES = st.one_of(
    st.builds(TierHello, NUMBERS, st.text(max_size=100)),
    st.builds(TierWelcome, NUMBERS),
    st.builds(Find, NUMBERS, RECORDS, KEY_LISTS),
    st.builds(Found, NUMBERS, st.lists(st.booleans(), max_size=20).map(tuple)),
    st.builds(Put, IDS, NAMES, st.integers(0, 1 << 40)),
    st.builds(Get, IDS, NAMES, st.integers(0, 1 << 40)),
    st.builds(MoveEnded, IDS, st.text("abc_", max_size=20), st.text(max_size=50)),
    st.builds(Used, RECORDS, KEY_LISTS),
)


@given(MESSAGES)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    assert messages.decode(messages.encode(message)) == message


@given(MESSAGES, st.data())
def test_other_bytes_are_a_message_or_one_error(message: Message, data: st.DataObject) -> None:
    payload = bytearray(messages.encode(message))
    for place in data.draw(st.lists(st.integers(0, len(payload) - 1), max_size=3)):
        payload[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for body in (bytes(payload), bytes(payload[:cut]), data.draw(st.binary(max_size=60))):
        with contextlib.suppress(ProtocolError):
            messages.decode(body)
