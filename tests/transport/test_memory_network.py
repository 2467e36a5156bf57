"""The in-process network: virtual time, faults, and the same run from the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.clock import SystemClock
from kvxfer.config import AgentConfig
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.testing.contract.parties import LaneParty, MemoryLaneMaker, fresh_id, introduce, make_party
from kvxfer.testing.contract.steps import PLAIN, expect_outcome, expect_poison, grant, granted_pull, pull
from kvxfer.transport import MemoryNetwork, Passage, PassageFate
from kvxfer.transport.counts import is_idle
from kvxfer.transport.memory_bytes import BlockMemory
from kvxfer.types import TransferId

CONFIG = AgentConfig(stall_s=0.2, reconnect_s=5.0)


@pytest.fixture
def maker() -> MemoryLaneMaker:
    return MemoryLaneMaker()


def join(maker: MemoryLaneMaker) -> tuple[LaneParty, LaneParty]:
    source, destination = make_party(maker, "source", PLAIN, CONFIG), make_party(maker, "destination", PLAIN, CONFIG)
    introduce(source, destination)
    return source, destination


def move(maker: MemoryLaneMaker, parties: tuple[LaneParty, LaneParty], transfer_id: TransferId, *outcomes: str) -> None:
    source, destination = parties
    truth = source.fill(1)
    grant(source, transfer_id, [1, 2])
    pull(maker, destination, source, transfer_id, [3, 4])
    expect_outcome(maker, parties, destination, transfer_id, *outcomes)
    if destination.outcome(transfer_id) == "committed":
        assert (destination.read([3, 4]) == truth[[1, 2]]).all()
    else:
        expect_poison(destination, range(3))


@pytest.mark.parametrize("what", ["dial", "hello", "pull", "ready", "read", "confirm", "verdict", "release"])
@pytest.mark.parametrize("fate", [PassageFate.DROP, PassageFate.TWICE, PassageFate.CUT])
def test_one_fault_anywhere_is_survived(maker: MemoryLaneMaker, what: str, fate: PassageFate) -> None:
    """A lost, repeated or cut message costs time, never the transfer; nor what it held."""
    met = []

    def fault(passage: Passage) -> PassageFate:
        if passage.what == what and not met:
            met.append(passage)
            return fate
        return PassageFate.ARRIVE

    parties = join(maker)
    maker.network.fault = fault
    move(maker, parties, fresh_id(), "committed", "grant_released")
    maker.wait(parties, lambda: False, 60.0)
    assert met
    assert all(is_idle(party.transport.counts()) for party in parties)


def test_held_passage_arrives_when_it_is_released(maker: MemoryLaneMaker) -> None:
    source, destination = parties = join(maker)
    maker.network.fault = lambda passage: PassageFate.HOLD if passage.what == "read" else PassageFate.ARRIVE
    source.fill(1)
    transfer_id = granted_pull(maker, source, destination, [1])
    maker.wait(parties, lambda: False, 1.0)
    destination.transport.cancel(transfer_id)
    maker.wait(parties, lambda: False, 1.0)
    assert destination.outcome(transfer_id) == "cancelled"
    assert destination.drained[transfer_id.raw] == 0
    assert destination.transport.counts().pools[0].quarantined == 1
    maker.network.release_held()
    maker.network.fault = None
    expect_outcome(maker, parties, destination, transfer_id, "cancelled")
    expect_poison(destination)
    assert is_idle(destination.transport.counts())


def test_a_cut_connection_comes_back(maker: MemoryLaneMaker) -> None:
    source, destination = parties = join(maker)
    source.fill(1)
    transfer_id = granted_pull(maker, source, destination, [1, 2], ready=1)
    maker.wait(parties, lambda: False, 0.1)
    maker.network.cut(destination.ref, source.ref)
    source.transport.ready(transfer_id, 2, layers=0, complete=True)
    expect_outcome(maker, parties, destination, transfer_id, "committed")
    assert destination.finals[transfer_id.raw][0].attempts == 2


def test_the_same_seed_gives_the_same_run() -> None:
    def run() -> list[tuple[str, str, int]]:
        maker, log = MemoryLaneMaker(), []
        parties = join(maker)

        def note(passage: Passage) -> PassageFate:
            log.append((passage.sender.agent_id, passage.what, maker.network.now_ns))
            return PassageFate.ARRIVE

        maker.network.fault = note
        for number in range(3):
            move(maker, parties, TransferId(bytes([number]) * 16), "committed")
        return log

    assert run() == run() != []


def test_time() -> None:
    network = MemoryNetwork()
    network.advance(1.5)
    assert network.now_ns == 1_500_000_000
    assert not network.step()
    assert network.run(lambda: True)
    assert not network.run(lambda: False)
    with pytest.raises(InvalidArgumentError, match="real clock"):
        network.drive()
    with pytest.raises(InvalidArgumentError, match="real clock"):
        MemoryNetwork(clock=SystemClock()).advance(1.0)


def test_a_closed_transport_says_so(maker: MemoryLaneMaker) -> None:
    source, destination = join(maker)
    source.transport.close()
    source.transport.close()
    assert source.transport.drain() == []
    with pytest.raises(ClosedError):
        source.transport.counts()
    with pytest.raises(ClosedError):
        grant(source, fresh_id(), [1])
    with pytest.raises(ClosedError):
        source.transport.fileno()
    assert "closed" in repr(source.transport)
    destination.transport.close()


@pytest.mark.parametrize(("has_checksums", "outcome"), [(True, "checksum"), (False, "committed")])
def test_a_checksum_finds_what_changed_on_the_way(
    maker: MemoryLaneMaker, monkeypatch: pytest.MonkeyPatch, has_checksums: bool, outcome: str
) -> None:
    """The owner's checksums, made when it announced the blocks, meet other bytes: nothing commits."""
    source = make_party(maker, "source", PLAIN, CONFIG, has_checksums=has_checksums)
    destination = make_party(maker, "destination", PLAIN, CONFIG)
    introduce(source, destination)
    source.fill(1)
    transfer_id = fresh_id()
    grant(source, transfer_id, [1, 2])
    read = BlockMemory.read

    def flip(self: BlockMemory, blocks: list[int]) -> np.ndarray:
        data = read(self, blocks)
        data[-1, -1] ^= 1
        return data

    monkeypatch.setattr(BlockMemory, "read", flip)
    pull(maker, destination, source, transfer_id, [3, 4])
    expect_outcome(maker, [source, destination], destination, transfer_id, outcome)
