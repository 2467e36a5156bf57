"""What pages a region is made of: asked for, taken where the host has them, refused with what to do about it."""

from __future__ import annotations

import mmap
import os
import pathlib
import re
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.errors import InvalidArgumentError, LimitExceededError

MIB = 1 << 20


SWITCH = pathlib.Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def gives_them_on_request() -> bool:
    return SWITCH.exists() and not any(word in SWITCH.read_text() for word in ("[never]", "[deny]"))


def free_huge_pages() -> int:
    found = re.search(r"HugePages_Free:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text())
    return int(found.group(1)) if found else 0


def test_small_ones_where_large_ones_are_not_wanted() -> None:
    region = native.Region(4 * MIB, huge="never")
    assert region.page_bytes == mmap.PAGESIZE
    assert region.nbytes == 4 * MIB


def test_the_size_is_the_one_that_was_asked_for() -> None:
    region = native.Region(3 * MIB + 5)
    assert (region.nbytes, len(np.frombuffer(region, np.uint8))) == (3 * MIB + 5, 3 * MIB + 5)
    assert os.fstat(region.fileno()).st_size >= 3 * MIB + 5
    assert region.page_bytes >= mmap.PAGESIZE


@pytest.mark.skipif(free_huge_pages() > 0 or gives_them_on_request(), reason="this host has huge pages to give")
def test_required_ones_that_are_not_there() -> None:
    with pytest.raises(LimitExceededError, match="no huge pages for a region") as caught:
        native.Region(4 * MIB, huge="require")
    for hint in ("0 are free", "vm.nr_hugepages", "shmem_enabled"):
        assert hint in str(caught.value)


def test_a_wish_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="huge"):
        native.Region(MIB, huge="sometimes")


@pytest.mark.skipif(free_huge_pages() < 4, reason="the host has reserved no huge pages (sysctl vm.nr_hugepages)")
def test_a_pool_on_huge_pages_is_mapped(nodes: Any) -> None:
    p, d = nodes.pair(blocks=1000, block_bytes=4096)
    assert p.region.page_bytes >= 2 * MIB
    transfer = d.pull_granted(p, range(1000), range(999, -1, -1), lanes=[native.Lane.MAPPED])
    assert d.wait_drained(transfer).state == native.TransferState.COMMITTED
    assert d.content(range(999, -1, -1)) == p.content(range(1000))
