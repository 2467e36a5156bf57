"""A reader that is stopped or killed in the middle of a copy: the source takes its memory back without waiting for it,
and nothing that was read afterwards is ever committed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.faults.lanes import LANES
from tests.support.faults.parties import POISON, Party
from tests.support.faults.phase_fixture import BLOCKS, PAINT
from tests.support.faults.remote import Remote

pytestmark = pytest.mark.no_sanitizer

SIZE, ELEMENT = 64 << 20, 1 << 20
ATTEMPTS = 20
TTL_S = 1.0
PROMPT_S = 3.0
"""What taking back may cost on a busy machine; a reader that hangs is not waited for."""


class Scene:
    def __init__(self, lane: str) -> None:
        options: dict[str, Any] = {"stall_s": 0.5, "reconnect_s": 1.0, "grant_ttl_s": TTL_S}
        self.source, self.reader = Party("source", [lane], **options), Remote("reader", [lane], **options)
        self.reader.allocate(SIZE)
        self.memory = self.reader.memory_of(0, SIZE)
        self.name = ""

    def catch_in_the_middle(self) -> None:
        """The reader is stopped when some of the bytes have landed, and not the last."""
        for attempt in range(ATTEMPTS):
            index = self.source.allocate(SIZE)
            self.source.fill(attempt, region=index)
            self.source.add_peer(self.reader.metadata())
            self.reader.add_peer(self.source.metadata())
            self.reader.paint(POISON, region=0)
            self.name = f"read-{attempt}"
            self.reader.post(self.name, "READ", "source", 0, 0, element=ELEMENT)
            end = time.monotonic() + 20
            while self.memory[0] == POISON and self.memory[1] == POISON:
                assert time.monotonic() < end, "nothing landed"
            self.reader.stop()
            if (self.memory[-ELEMENT:] == POISON).all():
                return
            self.reader.go_on()
            assert self.reader.outcome(self.name) == "committed"
            self.source.deregister(index)
        raise AssertionError("every read was over before it could be caught")

    @property
    def index(self) -> int:
        return len(self.source.regions) - 1

    def take_back(self) -> None:
        began_s = time.monotonic()
        self.source.deregister(self.index)
        assert time.monotonic() - began_s < PROMPT_S
        self.source.paint(PAINT, region=self.index)

    def close(self) -> None:
        self.source.close()
        self.reader.close()


@pytest.fixture(params=LANES)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    made = Scene(request.param)
    yield made
    made.close()


def test_a_reader_stopped_in_the_middle(scene: Scene) -> None:
    scene.catch_in_the_middle()
    scene.take_back()
    assert scene.source.wait_idle() == ""
    scene.reader.go_on()
    assert scene.reader.outcome(scene.name) in ("grant_revoked", "grant_unknown", "refused", "peer_gone")
    assert scene.reader.wait_idle() == ""
    scene.reader.paint(PAINT, region=0)
    time.sleep(0.2)
    assert (scene.memory == PAINT).all(), "bytes landed after the read had drained"
    assert scene.source.is_painted(PAINT, region=scene.index)


def test_a_reader_killed_in_the_middle(scene: Scene) -> None:
    scene.catch_in_the_middle()
    scene.reader.kill()
    scene.take_back()
    assert scene.source.wait_idle() == ""
    assert scene.source.is_painted(PAINT, region=scene.index)


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "silent"])
def test_a_dead_reader_keeps_no_grant(scene: Scene, is_announced: bool) -> None:
    """Its known death ends its grants at once; where nothing says so, their time to live does."""
    transfers = [secrets.token_hex(16) for _ in range(3)]
    scene.source.add_peer(scene.reader.metadata())
    scene.reader.add_peer(scene.source.metadata())
    for number, transfer in enumerate(transfers):
        first = number * BLOCKS
        ready = (1, BLOCKS // 2, BLOCKS - 1)[number]
        scene.source.grant(transfer, list(range(first, first + BLOCKS)), ready, TTL_S)
        scene.reader.pull(transfer, "source", list(range(first, first + BLOCKS)))
        assert scene.reader.wait_state(transfer, "READING", ready)
    scene.reader.kill()
    if is_announced:
        scene.source.peer_dead("reader")
    for transfer in transfers:
        assert scene.source.wait_ended(transfer) == ("READER_GONE" if is_announced else "EXPIRED")
    assert scene.source.wait_idle() == ""
