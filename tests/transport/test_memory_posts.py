"""Reads and writes of registered memory over an in-process network that loses, repeats and cuts."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer._native import _core
from kvxfer.config import AgentConfig
from kvxfer.testing.contract.parties import LaneParty, MemoryLaneMaker, introduce, make_party
from kvxfer.testing.contract.posted_memory import PostedMemory, expect_post, outcome, post
from kvxfer.testing.contract.steps import PLAIN, expect_idle
from kvxfer.transport import Passage, PassageFate
from kvxfer.transport.memory import MemoryTransport
from kvxfer.transport.plan import Op

CONFIG = AgentConfig(stall_s=0.2, reconnect_s=5.0)
SIZE = 64 * 1024


@pytest.fixture
def maker() -> MemoryLaneMaker:
    return MemoryLaneMaker()


def join(maker: MemoryLaneMaker) -> tuple[LaneParty, LaneParty]:
    one, other = make_party(maker, "one", PLAIN, CONFIG), make_party(maker, "other", PLAIN, CONFIG)
    introduce(one, other)
    return one, other


FRAMES = {
    Op.READ: ["dial", "hello", "fetch", "ready", "read", "confirm", "verdict", "release", "notif"],
    Op.WRITE: ["dial", "hello", "push", "pull", "ready", "read", "confirm", "verdict", "release", "done"],
}


@pytest.mark.parametrize(("op", "what"), [(op, what) for op, names in FRAMES.items() for what in names])
@pytest.mark.parametrize("fate", [PassageFate.DROP, PassageFate.TWICE, PassageFate.CUT])
def test_one_fault_anywhere_is_survived(maker: MemoryLaneMaker, op: Op, what: str, fate: PassageFate) -> None:
    """A lost, repeated or cut message costs time, never the post, nor its notification; which is told once."""
    met = []

    def fault(passage: Passage) -> PassageFate:
        if passage.what == what and not met:
            met.append(passage)
            return fate
        return PassageFate.ARRIVE

    one, other = parties = join(maker)
    mine, theirs = PostedMemory.register(one, SIZE), PostedMemory.register(other, SIZE)
    source, destination = (theirs, mine) if op is Op.READ else (mine, theirs)
    truth = source.fill(1)
    maker.network.fault = fault
    done = post(maker, op, one, mine.rows([0, 5000], 4096), other, theirs.rows([0, 5000], 4096), notification=b"told")
    expect_post(maker, parties, done, "committed")
    maker.wait(parties, lambda: False, 60.0)
    assert met
    assert (destination.array[:4096] == truth[:4096]).all()
    assert (destination.array[5000:9096] == truth[5000:9096]).all()
    assert [payload for _, payload in other.received] == [b"told"]
    assert [offer.state for offer in other.offers] == ([] if op is Op.READ else [_core.TransferState.COMMITTED])
    expect_idle(maker, parties)


@pytest.mark.parametrize("seed", range(60))
def test_many_faults(seed: int) -> None:
    """Whatever is lost, repeated or cut: a post that says committed is, and one that does not is drained in time."""
    maker = MemoryLaneMaker()
    random = np.random.default_rng(seed)
    parties = join(maker)
    memories = {party: (PostedMemory.register(party, SIZE), PostedMemory.register(party, SIZE)) for party in parties}
    truths = {party: sources.fill(seed) for party, (_, sources) in memories.items()}
    fates = [PassageFate.DROP, PassageFate.TWICE, PassageFate.CUT]
    maker.network.fault = lambda _: fates[random.integers(3)] if random.random() < 0.08 else PassageFate.ARRIVE
    posts = []
    for number in range(12):
        party, peer = parties[:: random.choice([1, -1])]
        op = Op(random.choice(list(Op)))
        at = [number * 4096]
        if op is Op.READ:
            local, remote = memories[party][0].rows(at, 4096), memories[peer][1].rows(at, 4096)
        else:
            local, remote = memories[party][1].rows(at, 4096), memories[peer][0].rows(at, 4096)
        payload = b"%d" % number
        moved = post(maker, op, party, local, peer, remote, notification=payload, deadline_s=30.0)
        posts.append((moved, op, party, peer, number, payload))
        if random.random() < 0.15:
            moved.cancel()
        maker.wait(parties, lambda: False, float(random.random()) * 0.002)
    for moved, *_ in posts:
        expect_post(maker, parties, moved, "committed", "cancelled", "deadline", "peer_gone", within_s=200.0)
    maker.network.fault = None
    maker.wait(parties, lambda: False, 100.0)
    for moved, op, party, peer, number, payload in posts:
        told = [text for _, text in peer.received].count(payload)
        assert told <= 1
        if outcome(moved) == "committed":
            assert told == 1
            reader, source = (party, peer) if op is Op.READ else (peer, party)
            part = slice(number * 4096, (number + 1) * 4096)
            assert (memories[reader][0].array[part] == truths[source][part]).all(), "bytes differ"
    expect_idle(maker, parties)
    for party in parties:
        for memory in memories[party]:
            party.poster.deregister(memory.registration)


def test_bytes_of_a_region_that_was_taken_back_are_not_committed(maker: MemoryLaneMaker) -> None:
    """All of it was read, and then it was deregistered before the reader asked whether that was right."""
    one, other = parties = join(maker)
    mine, theirs = PostedMemory.register(one, SIZE), PostedMemory.register(other, SIZE)
    maker.network.fault = lambda passage: PassageFate.HOLD if passage.what == "confirm" else PassageFate.ARRIVE
    read = post(maker, Op.READ, one, mine.rows([0], 4096), other, theirs.rows([0], 4096))
    maker.wait(parties, lambda: False, 0.1)
    assert not read.is_final
    assert isinstance(other.transport, MemoryTransport)
    other.poster.deregister(theirs.registration)
    theirs.fill(9)
    maker.network.fault = None
    maker.network.release_held()
    expect_post(maker, parties, read, "grant_revoked")
