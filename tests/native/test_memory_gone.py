"""Registered memory that its owner unmapped: the transfer ends by name at once, nothing of it is committed, and the
process that finds nothing there goes on, whatever it was about to do with it."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import textwrap
import time
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.errors import MemoryGoneError
from tests.support import child
from tests.support.native.nodes import NewId, needs_cma

CMA, STREAM, UNIX = native.Lane.CMA, native.Lane.STREAM, native.Lane.UNIX
COMMITTED, FAILED = native.TransferState.COMMITTED, native.TransferState.FAILED
POISON = 0xEE
SIZE = 4 << 20
SOON_S = 3.0
"""A passing error would be tried again for longer."""

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE = mmap.PAGESIZE
each_lane = pytest.mark.parametrize(
    "lane", [pytest.param(CMA, marks=needs_cma), UNIX, STREAM], ids=["cma", "unix", "stream"]
)
each_verb = pytest.mark.parametrize("verb", ["fetch", "push"])
each_side = pytest.mark.parametrize("gone", ["source", "destination"])
each_checksums = pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])


class Foreign:
    """Memory that kvxfer did not allocate, registered with one node."""

    def __init__(self, node: Any, region: int, nbytes: int) -> None:
        self.id, self.map = region, mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = np.frombuffer(self.map, np.uint8)
        self.address = self.memory.ctypes.data
        node.core.add_foreign_region(native.RegionInfo(region, nbytes), self.address, nbytes, self.map)

    def protect(self, offset: int, length: int, protection: int) -> None:
        assert LIBC.mprotect(self.address + offset, length, protection) == 0

    def lose(self, offset: int, length: int) -> None:
        """As if unmapped, to the kernel and to loads; and not reused meanwhile."""
        self.protect(offset, length, 0)

    def give_back(self) -> None:
        self.protect(0, self.memory.size, mmap.PROT_READ | mmap.PROT_WRITE)


class Both:
    """A source with random bytes, and a destination full of poison."""

    def __init__(self, nodes: Any, verb: str, lane: Any, size: int = SIZE, **options: Any) -> None:
        self.p, self.d = nodes("source", **options), nodes("reader", **options)
        nodes.join(self.p, self.d)
        self.source, self.target = Foreign(self.p, 901, size), Foreign(self.d, 902, size)
        self.source.memory[:] = np.random.default_rng(5).integers(0, 256, size, dtype=np.uint8)
        self.target.memory[:] = POISON
        self.verb, self.lane = verb, lane
        self.own = self.p if verb == "push" else self.d

    def begin(self, transfer: bytes, rows: tuple[Any, Any], **options: Any) -> None:
        from_rows, to_rows = rows
        if self.verb == "push":
            self.p.push(transfer, self.d, from_rows, to_rows, lanes=[self.lane], **options)
        else:
            self.d.fetch(transfer, self.p, to_rows, from_rows, lanes=[self.lane], **options)

    def move(self, transfer: bytes, rows: tuple[Any, Any], **options: Any) -> Any:
        self.begin(transfer, rows, **options)
        return self.own.wait_drained(transfer)


def rows_of(element: int, stride: int, count: int) -> tuple[Any, Any]:
    return [(901, 0, stride, element, count)], [(902, 0, element, element, count)]


def check_named(final: Any, gone: str, region: int) -> None:
    assert (final.state, final.code) == (FAILED, native.Code.memory_gone), final.text
    assert f"the {gone}'s memory" in final.text
    assert f"region {region} at byte " in final.text


@each_lane
@each_verb
@each_side
@each_checksums
@pytest.mark.parametrize(
    ("element", "stride", "count"),
    [(SIZE, SIZE, 1), (65536, 65536, 64), (3000, 5000, 800), (512, 4096, 1000)],
    ids=["whole", "64K", "odd", "small"],
)
def test_memory_that_vanishes_between_two_transfers_fails_the_second_by_name(
    nodes: Any, new_id: NewId, lane: Any, verb: str, gone: str, checksums: bool, element: int, stride: int, count: int
) -> None:
    both = Both(nodes, verb, lane)
    rows = rows_of(element, stride, count)
    assert both.move(new_id(), rows, wants_checksums=checksums).state == COMMITTED
    both.target.memory[:] = POISON
    vanished = both.source if gone == "source" else both.target
    first = PAGE * (element * count // 2 // PAGE)
    vanished.lose(first, SIZE - first)
    begun = time.monotonic()
    final = both.move(new_id(), rows, wants_checksums=checksums)
    assert time.monotonic() - begun < SOON_S
    check_named(final, gone, vanished.id)
    assert int(final.text.rpartition(" ")[2]) >= first - (1 << 20)
    vanished.give_back()
    both.own.wait(lambda _: both.own.is_idle(), "the end of it")
    both.target.memory[:] = POISON
    assert both.move(new_id(), rows, wants_checksums=checksums).state == COMMITTED
    expected = np.full(SIZE, POISON, np.uint8)
    for i in range(count):
        expected[i * element : (i + 1) * element] = both.source.memory[i * stride : i * stride + element]
    assert np.array_equal(both.target.memory, expected)


@each_lane
@each_verb
@each_side
@each_checksums
def test_memory_that_vanishes_amid_transfers_ends_each_of_them_and_what_commits_is_whole(
    nodes: Any, new_id: NewId, lane: Any, verb: str, gone: str, checksums: bool
) -> None:
    """At whatever moment: nothing waits for anything but the transfer's own end."""
    both = Both(nodes, verb, lane)
    rows = rows_of(65536, 65536, 64)
    vanished = both.source if gone == "source" else both.target
    rng = np.random.default_rng(11)
    codes = set()
    for _ in range(12):
        both.target.memory[:] = POISON
        transfer = new_id()
        both.begin(transfer, rows, wants_checksums=checksums)
        end = time.perf_counter() + rng.random() * 0.004
        while time.perf_counter() < end:
            both.own.take()
        vanished.lose(SIZE // 2, SIZE // 2)
        final = both.own.wait_drained(transfer, SOON_S + 5)
        vanished.give_back()
        codes.add(final.code)
        if final.state == COMMITTED:
            assert np.array_equal(both.target.memory, both.source.memory)
        else:
            check_named(final, gone, vanished.id)
    assert codes <= {native.Code.ok, native.Code.memory_gone}
    for node in (both.p, both.d):
        node.wait(lambda _, node=node: node.is_idle(), "the end of all of it")


@each_lane
@each_verb
def test_a_destination_that_may_not_be_written_any_more_is_as_good_as_gone(
    nodes: Any, new_id: NewId, lane: Any, verb: str
) -> None:
    both = Both(nodes, verb, lane)
    both.target.protect(0, SIZE, mmap.PROT_READ)
    final = both.move(new_id(), rows_of(4096, 4096, 1024))
    check_named(final, "destination", 902)
    assert set(both.target.memory.tolist()) == {POISON}


@pytest.mark.parametrize("others", [(STREAM,), (UNIX, STREAM)])
@needs_cma
def test_memory_gone_on_one_lane_is_named_by_the_next(nodes: Any, new_id: NewId, others: tuple[Any, ...]) -> None:
    both = Both(nodes, "fetch", CMA)
    assert both.move(new_id(), rows_of(4096, 4096, 100)).state == COMMITTED
    both.source.lose(0, SIZE)
    transfer, (from_rows, to_rows) = new_id(), rows_of(4096, 4096, 100)
    both.d.fetch(transfer, both.p, to_rows, from_rows, lanes=[CMA, *others])
    final = both.d.wait_drained(transfer)
    check_named(final, "source", 901)
    assert final.lane == others[0]
    assert "region 901" in final.lane_notes


@each_lane
@pytest.mark.parametrize("has_checksums", [False, True], ids=["plain", "checksums"])
def test_blocks_of_a_pool_that_vanish_are_named_and_their_grant_ends(
    nodes: Any, new_id: NewId, lane: Any, has_checksums: bool
) -> None:
    p, d = nodes("source"), nodes("reader", block_bytes=8192, blocks=64, has_checksums=has_checksums)
    nodes.join(p, d)
    d.fill(POISON)
    memory = mmap.mmap(-1, 64 * 8192, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    info = native.PoolInfo(9, 64, 8192, b"d" * 32, False, True, has_checksums)
    p.core.add_foreign_pool(info, array.ctypes.data, array.nbytes, memory, [(0, 8192, 8192)])
    transfer = new_id()
    p.core.grant(transfer, 9, np.arange(40, dtype=np.uint32), reader="", ttl_ns=60 * 10**9)
    p.core.ready(transfer, 40, complete=True)
    assert LIBC.mprotect(array.ctypes.data + 20 * 8192, 8192, 0) == 0
    d.pull(transfer, p, np.arange(40), lanes=[lane])
    final = d.wait_drained(transfer)
    assert LIBC.mprotect(array.ctypes.data + 20 * 8192, 8192, 3) == 0
    assert (final.state, final.code) == (FAILED, native.Code.memory_gone), final.text
    assert "block 20 of pool 9" in final.text
    p.wait_for(native.GrantEnded, id=transfer)
    for node in (p, d):
        node.wait(lambda _, node=node: node.is_idle(), "the end of it")


def test_blocks_that_are_announced_and_not_there_are_refused_by_name(nodes: Any, new_id: NewId) -> None:
    """Their checksums are taken on the caller's own thread."""
    p = nodes("source")
    memory = mmap.mmap(-1, 64 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    info = native.PoolInfo(9, 64, 4096, b"d" * 32, False, True, True)
    p.core.add_foreign_pool(info, array.ctypes.data, array.nbytes, memory, [(0, 4096, 4096)])
    transfer = new_id()
    p.core.grant(transfer, 9, np.arange(40, dtype=np.uint32), reader="", ttl_ns=60 * 10**9)
    assert LIBC.mprotect(array.ctypes.data + 30 * 4096, 4096, 0) == 0
    p.core.ready(transfer, 20)
    with pytest.raises(MemoryGoneError, match="block 30 of pool 9"):
        p.core.ready(transfer, 40, complete=True)
    assert LIBC.mprotect(array.ctypes.data + 30 * 4096, 4096, 3) == 0
    p.core.ready(transfer, 40, complete=True)


def test_a_refused_write_leaves_the_session_and_others_on_it_alone(nodes: Any, new_id: NewId) -> None:
    """The rest of what is under way is read away: other transfers on that connection go on."""
    both = Both(nodes, "fetch", STREAM)
    other = both.d.register(SIZE)
    both.target.lose(SIZE // 2, SIZE // 2)
    lost, kept = new_id(), new_id()
    (from_rows, to_rows) = rows_of(65536, 65536, 64)
    both.d.fetch(lost, both.p, to_rows, from_rows, lanes=[STREAM])
    both.d.fetch(kept, both.p, [(other.id, 0, 65536, 65536, 64)], from_rows, lanes=[STREAM])
    assert both.d.wait_drained(kept).state == COMMITTED
    check_named(both.d.wait_drained(lost), "destination", 902)
    assert np.array_equal(other.memory, both.source.memory)
    assert both.d.core.statistics().dials == 1


FILTERED = """
    import ctypes, pathlib, platform, struct

    libc = ctypes.CDLL(None, use_errno=True)
    numbers = {"x86_64": (0xC000003E, 310, 311), "aarch64": (0xC00000B7, 270, 271)}.get(platform.machine())
    if numbers is None:
        raise SystemExit(77)
    arch, readv, writev = numbers
    steps = [(0x20, 0, 0, 4), (0x15, 0, 4, arch), (0x20, 0, 0, 0), (0x15, 1, 0, readv), (0x15, 0, 1, writev),
             (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    filter = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(program)))
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, filter, 0, 0) != 0:
        raise SystemExit(77)

    from tests.native import test_memory_gone as t
    from tests.support.native.nodes import Nodes

    assert t.native.cma_obstacle() != ""
    nodes = Nodes(pathlib.Path("/nowhere"), [])
    ids = iter(range(1, 100))
    t.run_under_filter(nodes, lambda: next(ids).to_bytes(16, "big"))
    for node in nodes.made:
        node.core.close()
"""


def run_under_filter(nodes: Any, new_id: NewId) -> None:
    for verb in ("fetch", "push"):
        for gone in ("source", "destination"):
            both = Both(nodes, verb, STREAM, has_unix=False)
            rows = rows_of(3000, 5000, 800)
            assert both.move(new_id(), rows, wants_checksums=True).state == COMMITTED
            for i in range(800):
                moved = both.source.memory[i * 5000 : i * 5000 + 3000]
                assert np.array_equal(both.target.memory[i * 3000 : (i + 1) * 3000], moved)
            vanished = both.source if gone == "source" else both.target
            vanished.lose(PAGE * 100, PAGE)
            final = both.move(new_id(), rows, wants_checksums=True)
            check_named(final, gone, vanished.id)
            vanished.give_back()


def test_where_process_vm_readv_is_forbidden_memory_is_read_through_a_pipe() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FILTERED)],
        cwd=child.ROOT,
        env=child.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if ran.returncode == 77:
        pytest.skip("no filter of system calls can be set here")
    assert ran.returncode == 0, ran.stdout + ran.stderr
