"""While an engine captures a CUDA graph, the driver refuses what another thread asks, and such a question can break the
capture. A refusal says nothing of the copy that was asked about: its buffer is not used again, and its bytes have not
landed, before the driver says so.

No GPU: the stand-in for the driver has a switch for each refusal.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvxfer._native import _core as native
from tests.support.native.cuda_driver import DeviceMemory, Driver, register
from tests.support.native.nodes import NewId, Node

STREAM, UNIX = native.Lane.STREAM, native.Lane.UNIX
COMMITTED, FAILED = native.TransferState.COMMITTED, native.TransferState.FAILED
NBYTES = 1_500_000
"""More than the buffers that one frame has at a time, so that some are used again."""
CAPTURE_ERRORS = range(900, 909)
"""What the driver answers while a stream is being captured."""
DEFAULT_MODE = 0
AHEAD_MAX = 4
"""Buffers that one frame has at a time."""


class Fetch:
    """One fetch from a device into a device."""

    def __init__(self, driver: Driver, pair: tuple[Node, Node], transfer: bytes, **options: Any) -> None:
        source, self.reader = pair
        self.sent, self.landed = driver.alloc(NBYTES, 3), driver.alloc(NBYTES)
        self.regions = register(source, self.sent), register(self.reader, self.landed, device=1)
        self.id = transfer
        near, far = ([(region, 0, 1, NBYTES, 1)] for region in reversed(self.regions))
        self.reader.fetch(transfer, source, near, far, **{"lanes": [STREAM], **options})

    def final(self) -> Any:
        return self.reader.wait_drained(self.id)

    def is_open(self) -> bool:
        self.reader.take()
        return not self.reader.find(native.TransferFinal, id=self.id)

    def has_landed_whole(self) -> bool:
        return same(self.sent, self.landed)


def stays_as_it_is(driver: Driver, fetch: Fetch, *, is_held: bool = True) -> None:
    """No buffer is used again: no copy is asked for but the first ones."""
    if is_held:
        driver.wait_for_copies()
    time.sleep(0.2)
    assert fetch.is_open()
    assert driver.count("waiting") <= (AHEAD_MAX if is_held else 0)
    assert fetch.landed.element(0, 10) == b"\xee" * 10


def same(one: DeviceMemory, other: DeviceMemory) -> bool:
    return one.element(0, NBYTES) == other.element(0, NBYTES)


@pytest.mark.parametrize("lane", [STREAM, UNIX], ids=["stream", "unix"])
def test_a_capture_in_the_global_mode_is_not_broken(driver: Driver, nodes: Any, new_id: NewId, lane: Any) -> None:
    broken = driver.count("broken")
    pair = nodes.pair()
    driver.set(delay_us=300)
    driver.capture()
    fetch = Fetch(driver, pair, new_id(), lanes=[lane])
    assert fetch.final().state == COMMITTED
    assert fetch.has_landed_whole()
    for node in pair:  # what they give back goes through the driver, too
        node.core.close()
    assert driver.count("broken") == broken


@pytest.mark.parametrize("code", [CAPTURE_ERRORS[0], CAPTURE_ERRORS[-1]])
def test_a_refused_question_means_not_ready(driver: Driver, nodes: Any, new_id: NewId, code: int) -> None:
    pair = nodes.pair()
    driver.set(held=True)
    driver.capture(False, query=code)
    fetch = Fetch(driver, pair, new_id())
    stays_as_it_is(driver, fetch)
    driver.set()
    stays_as_it_is(driver, fetch, is_held=False)  # they have ended, and the driver does not say so
    driver.capture(False)
    assert fetch.final().state == COMMITTED
    assert fetch.has_landed_whole()


@pytest.mark.parametrize("code", [900, 1], ids=["capture", "other"])
def test_an_event_that_could_not_be_recorded_says_nothing(driver: Driver, nodes: Any, new_id: NewId, code: int) -> None:
    """It was recorded for an earlier copy, and that one has ended long ago."""
    pair = nodes.pair()
    assert Fetch(driver, pair, new_id()).final().state == COMMITTED
    driver.set(held=True)
    driver.capture(False, record=code)
    fetch = Fetch(driver, pair, new_id())
    stays_as_it_is(driver, fetch)
    driver.capture(False)
    driver.set()
    final = fetch.final()
    if final.state != COMMITTED:  # the driver is asked once more, and then says the same
        assert code not in CAPTURE_ERRORS
        assert final.code == native.Code.memory_gone
    else:
        assert fetch.has_landed_whole()


def test_another_error_ends_the_transfer_by_name_and_after_its_copies(
    driver: Driver, nodes: Any, new_id: NewId
) -> None:
    pair = nodes.pair()
    driver.set(held=True)
    driver.capture(False, query=1)
    fetch = Fetch(driver, pair, new_id())
    driver.wait_for_copies()
    time.sleep(0.1)
    assert fetch.is_open()
    driver.set()
    final = fetch.final()
    assert (final.state, final.code) == (FAILED, native.Code.memory_gone)
    assert final.text.endswith("memory is on a device that failed: CUDA: a copy: invalid argument")


def test_a_caller_has_its_own_mode_again(driver: Driver, nodes: Any, new_id: NewId) -> None:
    """With progress ``caller`` the program's own threads copy."""
    options = {"progress": "caller"}
    pair = nodes("p", core=options), nodes("d", core=options)
    nodes.join(*pair)
    fetch = Fetch(driver, pair, new_id())
    assert fetch.final().state == COMMITTED
    assert driver.library.fake_capture_mode() == DEFAULT_MODE
