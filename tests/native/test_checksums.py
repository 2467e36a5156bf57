"""Checksums travel with the bytes, and bytes that are not what their source sent are never committed."""

from __future__ import annotations

import mmap
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.errors import GrantRevokedError
from tests.support.native.nodes import NewId
from tests.support.native.rawpeer import KEY, RawSource

MAPPED, STREAM, CMA, UNIX = native.Lane.MAPPED, native.Lane.STREAM, native.Lane.CMA, native.Lane.UNIX
BLOCK, BLOCKS = 5000, 64
DIGEST = b"d" * 32


@pytest.mark.parametrize("lane", [MAPPED, CMA, UNIX, STREAM], ids=["mapped", "cma", "unix", "stream"])
def test_pools_with_checks(nodes: Any, new_id: NewId, lane: native.Lane) -> None:
    """Announced step by step, in segments that are cut differently."""
    halves = [(0, 2500, 2500), (BLOCKS * 2500, 2500, 2500)]
    p, d = nodes.pair(
        block_bytes=BLOCK, blocks=BLOCKS, has_checksums=True, is_exposed=True, source={"segments": halves}, reader={}
    )
    transfer = new_id()
    rng = np.random.default_rng(2)
    granted, filled = rng.permutation(BLOCKS)[:50], rng.permutation(BLOCKS)[:50]
    p.grant(transfer, granted, ready=0)
    d.pull(transfer, p, filled, lanes=[lane])
    for count in (1, 20, 20, 50):
        p.core.ready(transfer, count, complete=count == 50)
    assert d.wait_drained(transfer).state == native.TransferState.COMMITTED
    assert d.content(filled) == p.content(granted)
    assert d.core.statistics().checksum_failures == 0


def test_changed_after_they_were_announced(nodes: Any, new_id: NewId) -> None:
    """A source that breaks its promise is found out, on a lane whose bytes it does not touch."""
    p, d = nodes.pair(block_bytes=BLOCK, blocks=BLOCKS, has_checksums=True)
    transfer = new_id()
    p.grant(transfer, np.arange(10))
    p.memory[7 * BLOCK + 1] ^= 1
    d.pull(transfer, p, np.arange(10), lanes=[MAPPED])
    final = d.wait_drained(transfer)
    assert (final.state, final.code) == (native.TransferState.FAILED, native.Code.checksum)
    assert d.core.statistics().checksum_failures == 1
    assert d.is_idle()


def test_a_pool_is_not_taken_back_under_its_checksums(nodes: Any, new_id: NewId) -> None:
    """They are taken on the caller's thread: a thread that ends the grant meanwhile, and removes the pool, waits for
    that."""
    p = nodes("source")
    blocks, size = 2048, 1 << 20
    memory = mmap.mmap(-1, blocks * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)  # takes no memory
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # each page that is looked at for the first time is a counted fault
    array = np.frombuffer(memory, np.uint8)
    info = native.PoolInfo(9, blocks, size, DIGEST, False, False, True)
    p.core.add_foreign_pool(info, array.ctypes.data, array.nbytes, array, [(0, size, size)])
    transfer = new_id()
    p.core.grant(transfer, 9, np.arange(blocks, dtype=np.uint32), reader="", ttl_ns=60 * 10**9)
    ended_s = 0.0

    def announce() -> None:
        nonlocal ended_s
        with pytest.raises(GrantRevokedError):
            p.core.ready(transfer, blocks, complete=True)
        ended_s = time.monotonic()

    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=announce)
    began_s = time.monotonic()
    thread.start()
    while resource.getrusage(resource.RUSAGE_SELF).ru_minflt < faults + 20_000:
        assert thread.is_alive()
    p.core.end_grant(transfer, native.GrantEvent.REVOKE)
    p.core.remove_pool(9)
    removed_s = time.monotonic()
    thread.join()
    assert removed_s - began_s > 0.8 * (ended_s - began_s)


Corrupt = Callable[[bytearray, int], None]


@pytest.fixture
def from_raw(nodes: Any, new_id: NewId) -> Iterator[Callable[[Corrupt], tuple[Any, Any]]]:
    """Pulls ten blocks from a source whose payloads a function changes on their way; the reader, and how it ended."""
    sources: list[RawSource] = []

    def pull(corrupt: Corrupt) -> tuple[Any, Any]:
        d = nodes("reader", block_bytes=BLOCK, blocks=BLOCKS, has_checksums=True)
        d.fill(0xEE)
        transfer = new_id()

        def add(endpoint: Any) -> None:
            endpoint.set_peer(d.ref, KEY, native.SessionKind.TCP)
            endpoint.add_pool(native.PoolInfo(3, BLOCKS, BLOCK, DIGEST, False, False, True))
            endpoint.grant(transfer, 3, list(range(10)), "", 10**11, 10, time.monotonic_ns())

        def content(effect: Any) -> bytes:
            frame = effect.frame
            assert frame.has_checksums
            blocks = [bytes([index + 1]) * BLOCK for index in effect.blocks]
            checksums = b"".join(native.crc32c(block).to_bytes(4, "little") for block in blocks)
            payload = bytearray(b"".join(blocks) + checksums)
            assert len(payload) == frame.payload_bytes
            corrupt(payload, frame.count)
            return bytes(payload)

        source = RawSource(add, content)
        sources.append(source)
        d.core.set_peer(source.ref, KEY, tcp_host="127.0.0.1", tcp_port=source.port, unix_path="")
        d.pull(transfer, source.ref, np.arange(10), lanes=[STREAM])
        final = d.wait_drained(transfer)
        d.core.close()
        return d, final

    yield pull
    for source in sources:
        source.close()


def test_an_honest_source(from_raw: Any) -> None:
    d, final = from_raw(lambda payload, count: None)
    assert final.state == native.TransferState.COMMITTED, final.text
    assert d.content(range(10)) == [bytes([index + 1]) * BLOCK for index in range(10)]


@pytest.mark.parametrize("at", [0, BLOCK * 3 + 17, -1, -40], ids=["first", "middle", "last-sum", "first-sum"])
def test_one_wrong_bit(from_raw: Any, at: int) -> None:
    def flip(payload: bytearray, count: int) -> None:
        payload[at] ^= 4

    d, final = from_raw(flip)
    assert (final.state, final.code) == (native.TransferState.FAILED, native.Code.checksum)
    assert d.core.statistics().checksum_failures == 1


def test_two_blocks_for_each_other(from_raw: Any) -> None:
    def swap(payload: bytearray, count: int) -> None:
        payload[:BLOCK], payload[BLOCK : 2 * BLOCK] = payload[BLOCK : 2 * BLOCK], payload[:BLOCK]

    _, final = from_raw(swap)
    assert final.code == native.Code.checksum
