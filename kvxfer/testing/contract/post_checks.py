"""The part of the lane contract about reads and writes of registered memory: which bytes move, which peers may move
them, and when a notification is told. Decides what arrives; must never know how a lane is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from kvxfer.errors import BlocksBusyError, InvalidArgumentError, LaneUnavailableError, PeerGoneError
from kvxfer.policy.lanes import checking_lanes
from kvxfer.testing.contract.parties import LaneMaker, LaneParty
from kvxfer.testing.contract.posted_memory import PostedMemory, Rows, expect_post, has_received, peer_of, post
from kvxfer.testing.contract.steps import SOON_S, expect, expect_idle, raises, two_parties
from kvxfer.transport.plan import Op
from kvxfer.types import Lane

COMMITTED = "committed"
BOTH = (Op.READ, Op.WRITE)


def _random_rows(random: np.random.Generator, memories: list[PostedMemory], lengths: list[int], shape: str) -> Rows:
    """One element for each of ``lengths``, none overlapping, so that the result is known."""
    parts: list[Rows] = []
    size = max(lengths) + 3
    slots = [(memory, slot) for memory in memories for slot in range(len(memory.array) // size)]
    order = random.permutation(len(slots))[: len(lengths)]
    for index, length in zip(order if shape == "scattered" else np.sort(order), lengths, strict=True):
        memory, slot = slots[index]
        parts.append(memory.rows([slot * size + (3 if shape == "scattered" else 0)], length))
    return np.concatenate(parts)


def _expected(before: list[PostedMemory], rows: Rows, data: list[bytes]) -> list[bytes]:
    """What ``before`` holds once ``data`` is in ``rows``."""
    copies = [bytearray(memory.array.tobytes()) for memory in before]
    for (address, length, _), element in zip(rows.tolist(), data, strict=True):
        for copy, memory in zip(copies, before, strict=True):
            at = address - memory.record.address
            if at >= 0 and at + length <= len(copy):
                copy[at : at + length] = element
    return [bytes(copy) for copy in copies]


def _elements(memories: list[PostedMemory], rows: Rows) -> list[bytes]:
    out = []
    for address, length, _ in rows.tolist():
        memory = next(m for m in memories if 0 <= address - m.record.address < len(m.array))
        at = address - memory.record.address
        out.append(memory.array[at : at + length].tobytes())
    return out


def _has_checksums(maker: LaneMaker) -> bool:
    """Whether registered memory goes with checksums there."""
    return bool(checking_lanes([maker.lane], {})[0])


def check_post_bytes(maker: LaneMaker) -> None:
    """Random descriptors in several regions, reads and writes: exactly their bytes, in order, and not one more."""
    random = np.random.default_rng(11)
    foreign = maker.lane is not Lane.MAPPED
    for number in range(8):
        is_checked = _has_checksums(maker) and number > 4
        with two_parties(maker) as (one, other):
            mine = [PostedMemory.register(one, int(random.integers(60_000, 90_000))) for _ in range(2)]
            theirs = [PostedMemory.register(other, 70_000, is_foreign=foreign and i == 1) for i in range(3)]
            shape = "scattered" if number % 2 else "sorted"
            count = int(random.integers(1, 60))
            length = int(random.integers(1, 2000))
            lengths = [length] * count if number % 4 < 2 else random.integers(1, 2000, count).tolist()
            for op in BOTH:
                source, destination = (theirs, mine) if op is Op.READ else (mine, theirs)
                for seed, memory in enumerate(source):
                    memory.fill(seed + number)
                for memory in destination:
                    memory.poison()
                local, remote = (_random_rows(random, memories, lengths, shape) for memories in (mine, theirs))
                elements = _elements(source, remote if op is Op.READ else local)
                truth = _expected(destination, local if op is Op.READ else remote, elements)
                untouched = [memory.array.copy() for memory in source]
                done = post(maker, op, one, local, other, remote, wants_checksums=is_checked)
                expect_post(maker, [one, other], done, COMMITTED)
                assert [memory.array.tobytes() for memory in destination] == truth, f"{op}: bytes differ"
                assert all((m.array == copy).all() for m, copy in zip(source, untouched, strict=True))
                numbers = done.result()
                assert numbers.lane is maker.lane, f"went over {numbers.lane}"
                assert (numbers.bytes, numbers.elements) == (sum(lengths), count)
                assert numbers.elements_checked == (count if is_checked else 0)


def check_post_of_indexed_and_strided(maker: LaneMaker) -> None:
    """A prepared list is posted from again and again, by index arrays, and strided rows are as many elements."""
    with two_parties(maker) as (one, other):
        mine, theirs = PostedMemory.register(one, 64 * 1024), PostedMemory.register(other, 96 * 1024)
        truth = theirs.fill(3)
        remote = one.poster.prepare([(theirs.record.address + 5, 1024, 0, 60, 1500)], peer=peer_of(other))
        local = one.poster.prepare(mine.rows(np.arange(64) * 1024, 1024))
        random = np.random.default_rng(4)
        for _ in range(5):
            mine.poison()
            count = int(random.integers(1, 60))
            from_, to = random.permutation(60)[:count], random.permutation(64)[:count]
            plan = one.poster.plan(Op.READ, local, to, remote, from_)
            for _ in range(2):
                expect_post(maker, [one, other], one.poster.start(plan, lanes=[maker.lane]), COMMITTED)
            for index, slot in zip(from_.tolist(), to.tolist(), strict=True):
                begin = 5 + index * 1500
                assert (mine.array[slot * 1024 : slot * 1024 + 1024] == truth[begin : begin + 1024]).all()
            rest = np.delete(mine.array.reshape(64, 1024), to, axis=0)
            assert (rest == 0xEE).all(), "a byte landed where none may"


def check_post_in_several_transfers(maker: LaneMaker) -> None:
    """More elements than one frame can carry: still one post, one end, one notification."""
    count, step = 11_500, 23
    offsets = np.arange(count) * step + np.random.default_rng(5).integers(0, 6, count)
    for op in BOTH:
        with two_parties(maker) as (one, other):
            mine, theirs = (PostedMemory.register(party, count * step) for party in (one, other))
            source, destination = (theirs, mine) if op is Op.READ else (mine, theirs)
            truth = source.fill(6)
            done = post(maker, op, one, mine.rows(offsets, 16), other, theirs.rows(offsets, 16), notification=b"all")
            expect_post(maker, [one, other], done, COMMITTED)
            assert len(done.transfer_ids) > 1
            expect(maker, [one, other], "told", has_received(other, 1), SOON_S)
            maker.wait([one, other], lambda: False, 0.02)
            assert [payload for _, payload in other.received] == [b"all"]
            is_moved = np.zeros(count * step, bool)
            is_moved[(offsets[:, None] + np.arange(16)).ravel()] = True
            assert (destination.array[is_moved] == truth[is_moved]).all(), "bytes differ"
            assert (destination.array[~is_moved] == 0xEE).all(), "a byte landed where none may"


def check_post_fails_as_one(maker: LaneMaker) -> None:
    """Where one of its transfers is refused a post has failed, whatever the others did, and no notification is sent."""
    count, step = 11_500, 40
    offsets = np.arange(count) * step + np.random.default_rng(8).integers(0, 20, count)
    with two_parties(maker) as (one, other):
        mine, theirs = (PostedMemory.register(party, count * step) for party in (one, other))
        elsewhere = PostedMemory.register(other, 4096)
        nowhere = dataclasses.replace(elsewhere.record, region_id=elsewhere.record.region_id + 1000)
        remote = theirs.rows(offsets, 16)
        remote[-1, 0] = elsewhere.record.address
        peer = peer_of(other, theirs.record, nowhere)
        for op in BOTH:
            failed = post(maker, op, one, mine.rows(offsets, 16), peer, remote, notification=b"never")
            expect_post(maker, [one, other], failed, "refused")
            assert len(failed.transfer_ids) > 1
            expect_idle(maker, [one, other])
        maker.wait([one, other], lambda: False, 0.05)
        assert not other.received
        elsewhere.expect_poison()


def check_many_posts(maker: LaneMaker) -> None:
    """Posts of both kinds and both ways at once, into neighbouring places."""
    with two_parties(maker) as (one, other):
        size, each = 3000, 12
        memories = {party: [PostedMemory.register(party, size * each) for _ in range(4)] for party in (one, other)}
        truths = {}
        for party, (reads, writes, *sources) in memories.items():
            reads.poison()
            writes.poison()
            truths[party] = [memory.fill(7 + index) for index, memory in enumerate(sources)]
        posts = []
        for number in range(each):
            for party, peer in ((one, other), (other, one)):
                into, _, _, own = memories[party]
                _, offered, source, _ = memories[peer]
                at = [number * size]
                posts.append(post(maker, Op.READ, party, into.rows(at, size), peer, source.rows(at, size)))
                posts.append(post(maker, Op.WRITE, party, own.rows(at, size), peer, offered.rows(at, size)))
        for done in posts:
            expect_post(maker, [one, other], done, COMMITTED)
        for party, peer in ((one, other), (other, one)):
            assert (memories[party][0].array == truths[peer][0]).all()
            assert (memories[party][1].array == truths[peer][1]).all()


# --- permissions ---


def check_post_permissions(maker: LaneMaker) -> None:
    """Memory that is not registered for reading or writing is not read or written, whatever the peer believes."""
    with two_parties(maker) as (one, other):
        mine = PostedMemory.register(one, 8192)
        unread = PostedMemory.register(other, 8192, can_read=False)
        unwritten = PostedMemory.register(other, 8192, can_write=False)
        for seed, memory in enumerate((mine, unread, unwritten)):
            memory.fill(seed)
        kept = unwritten.array.copy()
        for op, memory, record in (
            (Op.READ, unread, dataclasses.replace(unread.record, can_read=True)),
            (Op.WRITE, unwritten, dataclasses.replace(unwritten.record, can_write=True)),
        ):
            mine.poison()
            rows = memory.rows([0], 4096)
            refused = post(maker, op, one, mine.rows([0], 4096), peer_of(other, record), rows)
            expect_post(maker, [one, other], refused, "refused")
            mine.expect_poison()
        assert (unwritten.array == kept).all(), "a byte landed where none may"
        for op, memory in ((Op.WRITE, unread), (Op.READ, unwritten)):
            expect_post(
                maker, [one, other], post(maker, op, one, mine.rows([0], 64), other, memory.rows([0], 64)), COMMITTED
            )


def check_post_bounds(maker: LaneMaker) -> None:
    """An element that leaves its region by one byte is refused by the region's owner, as is a region that is not
    there."""
    with two_parties(maker) as (one, other):
        mine, theirs = PostedMemory.register(one, 8192), PostedMemory.register(other, 8192)
        around = PostedMemory.register(other, 8192)
        theirs.fill(1)
        before, beside = theirs.array.copy(), around.array.copy()
        longer = dataclasses.replace(theirs.record, length_bytes=theirs.record.length_bytes + (1 << 20))
        nowhere = dataclasses.replace(theirs.record, region_id=theirs.record.region_id + 1000)
        for record, offset in ((longer, 4097), (longer, 8192), (longer, 9000), (nowhere, 0)):
            for op in BOTH:
                rows = theirs.rows([0, offset], 4096)
                refused = post(maker, op, one, mine.rows([0, 4096], 4096), peer_of(other, record), rows)
                expect_post(maker, [one, other], refused, "refused")
                mine.expect_poison()
        assert (theirs.array == before).all(), "a byte landed where none may"
        assert (around.array == beside).all(), "a byte landed where none may"


def check_removed_region(maker: LaneMaker) -> None:
    """Memory that was registered again is another region: a peer that knows only the old one gets nothing."""
    with two_parties(maker) as (one, other):
        mine, theirs = PostedMemory.register(one, 8192), PostedMemory.register(other, 8192)
        truth = theirs.fill(2)
        stale = peer_of(other)
        rows = theirs.rows([0], 8192)
        expect_post(maker, [one, other], post(maker, Op.READ, one, mine.rows([0], 8192), stale, rows), COMMITTED)
        other.poster.deregister(theirs.registration)
        with raises(InvalidArgumentError):
            other.poster.deregister(theirs.registration)
        mine.poison()
        for op in BOTH:
            refused = post(maker, op, one, mine.rows([0], 8192), stale, rows)
            expect_post(maker, [one, other], refused, "refused")
        again = other.poster.register(theirs.registration.region)
        assert again.record.region_id != theirs.record.region_id
        for op in BOTH:
            refused = post(maker, op, one, mine.rows([0], 8192), stale, rows)
            expect_post(maker, [one, other], refused, "refused")
        is_one_sided = maker.lane not in (Lane.STREAM, Lane.UNIX)
        if not is_one_sided:  # whose reader may look before it asks, and then does not commit
            mine.expect_poison()
        assert (theirs.array == truth).all(), "a byte landed where none may"
        expect_post(maker, [one, other], post(maker, Op.READ, one, mine.rows([0], 8192), other, rows), COMMITTED)
        assert (mine.array == truth).all()


def check_wrong_posts(maker: LaneMaker) -> None:
    """A caller's error is raised at once, and changes nothing."""
    with two_parties(maker) as (one, other):
        mine, theirs = PostedMemory.register(one, 8192), PostedMemory.register(other, 8192)
        for local, remote in (
            (mine.rows([0], 64), theirs.rows([0, 64], 64)),
            (mine.rows([0], 64), theirs.rows([0], 65)),
            (mine.rows([0, 64], [64, 65]), theirs.rows([0, 64], [64, 64])),
            (mine.rows([8129], 64), theirs.rows([0], 64)),
            (theirs.rows([0], 64), theirs.rows([0], 64)),
        ):
            with raises(InvalidArgumentError):
                post(maker, Op.READ, one, local, other, remote)
        prepared = one.poster.prepare(mine.rows([0], 64))
        of_other = one.poster.prepare(theirs.rows([0], 64), peer=peer_of(other))
        for ids in ([1], [0, 0], []):
            with raises(InvalidArgumentError):
                one.poster.post(Op.READ, prepared, ids, of_other, [0], lanes=[maker.lane])
        with raises(InvalidArgumentError):
            one.poster.post(Op.READ, of_other, None, prepared, None, lanes=[maker.lane])
        if not _has_checksums(maker):
            with raises(LaneUnavailableError):
                post(maker, Op.READ, one, mine.rows([0], 64), other, theirs.rows([0], 64), wants_checksums=True)
        stalled = post(maker, Op.READ, one, mine.rows([0], 8192), other, theirs.rows([0], 8192))
        if not stalled.is_drained:
            with raises(BlocksBusyError):
                one.poster.deregister(mine.registration)
        expect_post(maker, [one, other], stalled, COMMITTED)
        one.transport.peer_dead(other.ref)
        with raises(PeerGoneError):
            post(maker, Op.WRITE, one, mine.rows([0], 64), other, theirs.rows([0], 64))


# --- notifications ---


def check_post_notifications(maker: LaneMaker) -> None:
    """The notification comes once, when the bytes are there and not before; for a post that failed, never."""
    with two_parties(maker) as (one, other):
        size = 200_000
        mine, theirs = PostedMemory.register(one, size), PostedMemory.register(other, size)
        truth = mine.fill(9)
        seen: list[tuple[bytes, bool]] = []
        other.on_received = lambda payload: seen.append((payload, bool((theirs.array == truth).all())))
        rows, parties = theirs.rows(np.arange(50) * 4000, 4000), [one, other]
        for number in range(3):
            theirs.poison()
            told = post(
                maker, Op.WRITE, one, mine.rows(np.arange(50) * 4000, 4000), other, rows, notification=b"%d" % number
            )
            expect_post(maker, parties, told, COMMITTED)
            expect(maker, parties, "told", has_received(other, number + 1), SOON_S)
            assert seen[-1] == (b"%d" % number, True), "told before the bytes were there"
        mine.poison()
        read = post(maker, Op.READ, one, mine.rows([0], size), other, theirs.rows([0], size), notification=b"read")
        expect_post(maker, parties, read, COMMITTED)
        expect(maker, parties, "told", lambda: seen[-1][0] == b"read", SOON_S)
        assert (mine.array == truth).all()
        _refused_in_silence(maker, one, other, mine, theirs)
        assert len(seen) == 4
        for number in range(20):
            one.transport.notify(other.ref, b"n%d" % number)
        expect(maker, parties, "in order", lambda: len(seen) == 24, SOON_S)
        assert [payload for payload, _ in seen[4:]] == [b"n%d" % number for number in range(20)]


def _refused_in_silence(
    maker: LaneMaker, one: LaneParty, other: LaneParty, mine: PostedMemory, theirs: PostedMemory
) -> None:
    nowhere = dataclasses.replace(theirs.record, region_id=theirs.record.region_id + 1000)
    for op in BOTH:
        rows = theirs.rows([0], 64)
        refused = post(maker, op, one, mine.rows([0], 64), peer_of(other, nowhere), rows, notification=b"never")
        expect_post(maker, [one, other], refused, "refused")
    maker.wait([one, other], lambda: False, 0.05)


POST_CHECKS: tuple[Callable[[LaneMaker], None], ...] = (
    check_post_bytes,
    check_post_of_indexed_and_strided,
    check_post_in_several_transfers,
    check_post_fails_as_one,
    check_many_posts,
    check_post_permissions,
    check_post_bounds,
    check_removed_region,
    check_wrong_posts,
    check_post_notifications,
)
