"""Memory of others moves into huge pages, and what it holds stays as it is."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import pathlib
import re
import threading

import numpy as np
import numpy.typing as npt
import pytest

from kvxfer.transport import huge_pages
from kvxfer.transport.base import Region
from kvxfer.transport.huge_pages import HUGE_BYTES, MADV_COLLAPSE, PIECE_BYTES, Collapsing, collapse, is_allowed

LENGTH = PIECE_BYTES + 5 * HUGE_BYTES


@pytest.fixture
def memory() -> npt.NDArray[np.uint8]:
    """Touched, in small pages, and not aligned to huge ones."""
    mapping = mmap.mmap(-1, LENGTH + 2 * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(mapping, np.uint8)
    begin = -array.ctypes.data % HUGE_BYTES + 4096
    array = array[begin : begin + LENGTH]
    array[:] = np.random.default_rng(7).integers(0, 256, LENGTH, np.uint8)
    return array


def in_huge_pages(address: int) -> int:
    """Bytes of the mapping that ``address`` lies in."""
    is_it = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_it = int(found[1], 16) <= address < int(found[2], 16)
        elif is_it and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def can_collapse() -> bool:
    mapping = mmap.mmap(-1, 2 * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(mapping, np.uint8)
    array.fill(1)
    return collapse(array.ctypes.data, array.nbytes, threading.Event()) > 0


def test_bytes_stay_and_pages_are_huge(memory: npt.NDArray[np.uint8]) -> None:
    if not can_collapse():
        pytest.skip("this host makes no huge pages when it is asked")
    before = memory.copy()
    assert in_huge_pages(memory.ctypes.data) == 0
    done = collapse(memory.ctypes.data, memory.nbytes, threading.Event())
    assert done <= LENGTH - HUGE_BYTES, "not the two ends"
    # Of a piece that the host had no room for a part may be huge all the same.
    assert in_huge_pages(memory.ctypes.data + HUGE_BYTES) >= max(done, HUGE_BYTES)
    assert np.array_equal(memory, before)


def test_a_stopped_one_does_no_more(memory: npt.NDArray[np.uint8]) -> None:
    stop = threading.Event()
    stop.set()
    assert collapse(memory.ctypes.data, memory.nbytes, stop) == 0
    assert in_huge_pages(memory.ctypes.data + HUGE_BYTES) == 0


def test_a_host_set_to_never_is_not_overruled(
    memory: npt.NDArray[np.uint8], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "SWITCHES", tmp_path)
    assert not is_allowed(), "no switch at all"
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert is_allowed()
    of_size = tmp_path / "hugepages-2048kB" / "enabled"
    of_size.parent.mkdir()
    for chosen, allowed in (("[inherit] madvise never", True), ("inherit madvise [never]", False)):
        of_size.write_text(f"always {chosen}\n")
        assert is_allowed() is allowed
    assert collapse(memory.ctypes.data, memory.nbytes, threading.Event()) == 0
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    for chosen, allowed in (("[inherit] madvise never", False), ("inherit [madvise] never", True)):
        of_size.write_text(f"always {chosen}\n")
        assert is_allowed() is allowed


@pytest.mark.parametrize(
    ("of_piece", "of_kernel", "done"),
    [(errno.EAGAIN, 0, 5 * HUGE_BYTES), (errno.EINVAL, 0, 5 * HUGE_BYTES), (errno.EPERM, 0, 0), (0, errno.EINVAL, 0)],
)
def test_one_piece_that_cannot_be_had_does_not_end_it_and_a_kernel_without_it_does(
    of_piece: int, of_kernel: int, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def madvise(address: int, length_bytes: int, advice: int) -> int:
        if advice != MADV_COLLAPSE:
            return 0
        return of_kernel if length_bytes == 0 else of_piece if length_bytes == PIECE_BYTES else 0

    monkeypatch.setattr(huge_pages, "is_allowed", lambda: True)
    monkeypatch.setattr(huge_pages, "_madvise", madvise)
    assert collapse(HUGE_BYTES, LENGTH, threading.Event()) == done


def test_memory_smaller_than_a_huge_page_is_left_alone() -> None:
    small = ctypes.create_string_buffer(HUGE_BYTES - 1)
    assert collapse(ctypes.addressof(small), HUGE_BYTES - 1, threading.Event()) == 0


def test_in_the_background(memory: npt.NDArray[np.uint8]) -> None:
    before = memory.copy()
    collapsing = Collapsing([Region(memory.ctypes.data, memory.nbytes, memory)])
    collapsing.start()
    for _ in range(20):  # it may be used meanwhile
        memory += 1
        before += 1
    collapsing.join(60.0)
    assert not collapsing._thread.is_alive()
    collapsing.stop()
    collapsing.join(1.0)
    assert np.array_equal(memory, before)
