"""A reader with the right key that asks for what is not its own: the source refuses, counts, reads nothing out, and
goes on serving others. What it could do on the one-sided lanes, past our words, is in docs/faults.md.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from kvxfer._native import _core as native
from kvxfer.config import AgentConfig
from tests.support.faults.hostile_peer import HostilePeer
from tests.support.faults.parties import POISON, Party

HEAD = b"KX" + bytes([native.WIRE_VERSION])
SIZE = 64 * 4096


class Scene:
    """A victim with granted blocks and registered memory, an honest reader, and a hostile one."""

    def __init__(self, refusals_max: int) -> None:
        self.victim = Party("victim", ["stream", "unix", "mapped"], grant_ttl_s=3.0, refusals_max=refusals_max)
        self.honest = Party("honest", ["stream"])
        self.hostile = HostilePeer("hostile")
        self.whole, self.write_only, self.removed = (
            self.victim.allocate(SIZE),
            self.victim.allocate(SIZE, can_read=False),
            self.victim.allocate(SIZE),
        )
        self.read_only = self.victim.allocate(SIZE, can_write=False)
        self.ids = {
            name: self.victim.region_id(getattr(self, name)) for name in ("whole", "write_only", "removed", "read_only")
        }
        self.victim.deregister(self.removed)
        self.victim.add_peer(self.hostile.metadata())
        self.victim.add_peer(self.honest.metadata())
        self.honest.add_peer(self.victim.metadata())
        self.honest.allocate(SIZE)
        self.victim.fill(3)
        self.victim.fill(4, region=self.whole)
        self.hostile.dial(self.victim)
        self.served = 0

    def bytes_out(self) -> int:
        return self.victim.statistics()["bytes_streamed_out"]

    def refused(self) -> int:
        return int(self.victim.core.counts().grants.refused)

    def expect_unharmed(self) -> None:
        """Nothing was written, nothing left but what the honest reader got, and it is served as ever."""
        assert self.bytes_out() == self.served
        for index in (self.whole, self.read_only, self.write_only, self.removed):
            region = self.victim.region(index)
            assert (region == POISON).all() if index != self.whole else self.victim.is_filled(4, region=index)
        name = os.urandom(4).hex()
        self.honest.post(name, "READ", "victim", 0, 0)
        assert self.honest.outcome(name) == "committed"
        assert self.honest.is_filled(4, region=0)
        self.served += SIZE
        assert self.bytes_out() == self.served
        assert self.victim.wait_idle() == ""

    def close(self) -> None:
        self.hostile.close()
        self.honest.close()
        self.victim.close()


@pytest.fixture
def refusals_max() -> int:
    return AgentConfig.refusals_max


@pytest.fixture
def scene(refusals_max: int) -> Iterator[Scene]:
    made = Scene(refusals_max)
    yield made
    made.close()


def test_a_grant_of_somebody_else(scene: Scene) -> None:
    """Pulled, confirmed, renewed and released by a peer that it was not made for: its reader does not notice."""
    transfer = os.urandom(16)
    scene.victim.grant(transfer.hex(), list(range(8)), 8, reader="honest")
    before = scene.refused()
    scene.hostile.say(scene.hostile.pull(transfer, 0, 8))
    told = scene.hostile.answer(transfer)
    assert isinstance(told, native.ErrorFrame)
    assert told.code == native.Code.refused
    assert scene.refused() > before
    scene.hostile.say(native.Confirm(transfer, 7))
    verdict = scene.hostile.answer(transfer)
    assert verdict.code != native.Code.ok
    scene.hostile.say(native.Release(transfer))
    scene.hostile.say(native.Renew(transfer, 9, 1 << 30))
    scene.hostile.say(scene.hostile.fetch(transfer, [(scene.ids["whole"], 0, 64, 64, 1)]))
    assert scene.hostile.answer(transfer).code == native.Code.refused
    assert scene.victim.grant_state(transfer.hex()) == "ALIVE"
    assert scene.bytes_out() == 0
    scene.honest.pull(transfer.hex(), "victim", list(range(8)))
    assert scene.honest.outcome(transfer.hex()) == "committed"
    scene.served += 8 * 4096
    scene.expect_unharmed()


@pytest.mark.parametrize(("first", "count"), [(0, 9), (8, 1), (1, 8), (2**32 - 1, 2), (0, 2**32 - 1)])
def test_a_block_outside_its_grant(scene: Scene, first: int, count: int) -> None:
    transfer = os.urandom(16)
    scene.victim.grant(transfer.hex(), list(range(8)), 8, reader="hostile")
    before = scene.refused()
    scene.hostile.say(scene.hostile.pull(transfer, first, count))
    assert scene.hostile.answer(transfer).code in (native.Code.refused, native.Code.incompatible)
    assert scene.refused() > before
    scene.victim.revoke(transfer.hex())
    scene.expect_unharmed()


OUTSIDE = {
    "past-the-end": ("whole", SIZE - 63, 64, 64, 1),
    "remote-past": ("whole", 1 << 40, 64, 64, 1),
    "last-of-a-run": ("whole", 0, 4096, 4096, 65),
    "wraps": ("whole", (1 << 64) - 32, 64, 64, 1),
    "wide-stride": ("whole", 0, 1 << 62, 64, 8),
    "not-readable": ("write_only", 0, 64, 64, 1),
    "removed": ("removed", 0, 64, 64, 1),
    "unknown": ("", 0, 64, 64, 1),
    "a-pool": ("pool", 0, 64, 64, 1),
}


def row_of(scene: Scene, name: str) -> tuple[int, int, int, int, int]:
    region, offset, stride, length, count = OUTSIDE[name]
    number = {"": 12345, "pool": 7}.get(region) or scene.ids[region]
    return number, offset, stride, length, count


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_byte_outside_what_is_registered(scene: Scene, name: str) -> None:
    transfer = os.urandom(16)
    before = scene.refused()
    scene.hostile.say(scene.hostile.fetch(transfer, [(scene.ids["whole"], 0, 64, 64, 1), row_of(scene, name)]))
    told = scene.hostile.answer(transfer)
    assert isinstance(told, native.ErrorFrame)
    assert told.code == native.Code.refused
    assert scene.refused() == before + 1
    scene.expect_unharmed()


@pytest.mark.parametrize("name", [name for name in OUTSIDE if name != "not-readable"] + ["not-writable", "unequal"])
def test_a_write_where_none_is_allowed(scene: Scene, name: str) -> None:
    transfer = os.urandom(16)
    before = scene.refused()
    row = row_of(scene, name) if name in OUTSIDE else (scene.ids["read_only"], 0, 64, 64, 1)
    if name == "unequal":
        row = (scene.ids["whole"], 0, 65, 65, 1)
    theirs = [(1, 0, 64, 64, row[4])]
    scene.hostile.say(
        native.Push(transfer, native.Lane.STREAM, native.WireList(theirs), native.WireList([row]), 1000, False, b"done")
    )
    told = scene.hostile.answer(transfer)
    assert isinstance(told, native.Done)
    assert told.code == native.Code.refused
    assert scene.refused() == before + 1
    scene.victim.drain()
    assert scene.victim.received == []
    scene.expect_unharmed()


def test_a_replayed_read(scene: Scene) -> None:
    """An id that has ended is good for nothing: not the read itself, nor a confirm, nor another read."""
    transfer = os.urandom(16)
    asked = scene.hostile.fetch(transfer, [(scene.ids["whole"], 0, 4096, 4096, 4)])
    scene.hostile.say(asked)
    assert isinstance(scene.hostile.answer(transfer), native.Ready)
    other = HostilePeer("hostile")  # the bytes of the session are of no use to this test: let it go
    other.ref = scene.hostile.ref
    scene.hostile.close()
    other.dial(scene.victim)
    scene.hostile = other
    other.say(native.Release(transfer))
    assert scene.victim.wait_idle() == ""
    scene.served = scene.bytes_out()
    other.say(asked)
    assert other.answer(transfer).code == native.Code.grant_released
    other.say(native.Confirm(transfer, 1))
    assert other.answer(transfer).code == native.Code.grant_released
    other.say(other.fetch(transfer, [(scene.ids["whole"], 0, 4096, 4096, 8)], attempt=9))
    assert other.answer(transfer).code == native.Code.grant_released
    scene.expect_unharmed()


@pytest.mark.parametrize("refusals_max", [1, AgentConfig.refusals_max])
def test_one_that_tries_on_is_hung_up_on(scene: Scene, refusals_max: int) -> None:
    """What an honest reader may be refused too leaves the session as it is, if nothing says otherwise; a search through
    memory does not."""
    limit = refusals_max
    row = row_of(scene, "past-the-end")
    refused, ended = scene.refused(), scene.victim.statistics()["sessions_ended"]
    for _ in range(limit):
        transfer = os.urandom(16)
        scene.hostile.say(scene.hostile.fetch(transfer, [row]))
        assert scene.hostile.answer(transfer).code == native.Code.refused
    assert scene.hostile.is_hung_up()
    assert scene.refused() == refused + limit
    assert scene.victim.statistics()["sessions_ended"] == ended + 1
    scene.hostile.dial(scene.victim)
    transfer = os.urandom(16)
    scene.hostile.say(scene.hostile.fetch(transfer, [row]))
    assert scene.hostile.answer(transfer).code == native.Code.refused
    scene.expect_unharmed()


@pytest.mark.parametrize("refusals_max", [1])
def test_an_honest_reader_is_told_before_the_first_refusal_ends_its_session(scene: Scene) -> None:
    """Its list was made before the memory was taken back. It does not ask for ever, and gets what it asks for next."""
    stale = scene.victim.allocate(SIZE)
    metadata = scene.victim.metadata()
    scene.honest.add_peer(metadata)
    ended = scene.victim.statistics()["sessions_ended"]
    scene.victim.deregister(stale)
    scene.honest.post("stale", "READ", "victim", 0, len(metadata["records"]) - 1)
    assert scene.honest.outcome("stale") == "refused"
    assert scene.refused() == 1
    assert scene.victim.statistics()["sessions_ended"] == ended + 1
    scene.expect_unharmed()


def test_a_confirm_for_a_removed_region(scene: Scene) -> None:
    """It read while it might, and its memory was taken back before it asked for the verdict."""
    index = scene.victim.allocate(SIZE)
    transfer = os.urandom(16)
    scene.hostile.say(scene.hostile.fetch(transfer, [(scene.victim.region_id(index), 0, 4096, 4096, 1)]))
    assert isinstance(scene.hostile.answer(transfer), native.Ready)
    scene.victim.deregister(index)
    scene.hostile.close()
    scene.hostile.dial(scene.victim)
    scene.hostile.say(native.Confirm(transfer, 77))
    assert scene.hostile.answer(transfer).code == native.Code.grant_revoked
    scene.served = scene.bytes_out()
    scene.expect_unharmed()


@pytest.mark.parametrize(
    "noise",
    [
        HEAD + b"\x02" + struct.pack("<I", (1 << 20) + 1),
        HEAD + b"\x10" + struct.pack("<I", (1 << 32) - 1),
        b"GET / HTTP/1.1\r\n\r\n",
        b"KX\x63\x02" + struct.pack("<I", 8),
        HEAD + b"\xee" + struct.pack("<I", 8) + bytes(8),
        HEAD + b"\x10" + struct.pack("<I", 64) + b"\xff" * 64,
    ],
    ids=["oversized", "huge", "no-frame", "version", "kind", "body"],
)
def test_noise_ends_the_session(scene: Scene, noise: bytes) -> None:
    before = scene.victim.statistics()["sessions_ended"]
    scene.hostile.shout(noise)
    assert scene.hostile.is_hung_up()
    assert scene.victim.statistics()["sessions_ended"] == before + 1
    scene.expect_unharmed()


def test_a_wrong_secret(scene: Scene) -> None:
    before = scene.victim.statistics()["sessions_refused"]
    for _ in range(3):
        with pytest.raises((EOFError, ConnectionError)):
            scene.hostile.dial(scene.victim, b"w" * 32)
    assert scene.victim.statistics()["sessions_refused"] == before + 3
    scene.expect_unharmed()


def test_a_forged_proof(scene: Scene) -> None:
    """One that does not care what the victim proves, and says PROVE with a secret of its own."""
    before = scene.victim.statistics()["sessions_refused"]
    for proof in (bytes(32), os.urandom(32)):
        scene.hostile.connect(scene.victim)
        victim = scene.victim.core.agent
        scene.hostile.say(native.Hello(native.HelloStep.DIAL, scene.hostile.ref, victim, os.urandom(32), bytes(32)))
        assert scene.hostile.next().step == native.HelloStep.ACCEPT
        scene.hostile.say(native.Hello(native.HelloStep.PROVE, scene.hostile.ref, victim, bytes(32), proof))
        scene.hostile.say(scene.hostile.fetch(os.urandom(16), [(scene.ids["whole"], 0, 64, 64, 1)]))
        assert scene.hostile.is_hung_up()
    assert scene.victim.statistics()["sessions_refused"] == before + 2
    scene.expect_unharmed()


def test_a_name_that_is_not_known(scene: Scene) -> None:
    unknown = HostilePeer("unknown")
    with pytest.raises((EOFError, ConnectionError)):
        unknown.dial(scene.victim)
    unknown.close()
    scene.expect_unharmed()


def test_frames_before_the_proof(scene: Scene) -> None:
    for frame in (
        scene.hostile.fetch(os.urandom(16), [(scene.ids["whole"], 0, 64, 64, 1)]),
        native.Confirm(os.urandom(16), 1),
        native.Ping(native.PingKind.ASK, 1),
    ):
        before = scene.victim.statistics()["sessions_refused"]
        scene.hostile.connect(scene.victim)
        scene.hostile.say(frame)
        assert scene.hostile.is_hung_up()
        assert scene.victim.statistics()["sessions_refused"] == before + 1
    scene.expect_unharmed()


def test_a_replayed_proof(scene: Scene) -> None:
    """What was heard of one handshake opens no other session."""
    said: list[bytes] = []
    listener = HostilePeer("hostile")
    listener.ref = scene.hostile.ref
    shout = listener.shout

    def overheard(data: bytes) -> None:
        said.append(data)
        shout(data)

    listener.shout = overheard  # type: ignore[method-assign]
    listener.dial(scene.victim)
    listener.close()
    assert len(said) == 2
    thief = HostilePeer("thief")
    thief.connect(scene.victim)
    thief.shout(said[0])
    thief.next()
    thief.shout(said[1])
    assert thief.is_hung_up()
    thief.close()
    scene.expect_unharmed()
