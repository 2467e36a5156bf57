"""Bytes between two processes, one or both with memory on a CUDA device: all that must arrive does, and no others."""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
from typing import Any

import numpy as np
import pytest

from tests.support.cuda.end import content
from tests.support.cuda.ends import DEVICE, EndProcess, Ends, assert_same, each_lane, needs_device, needs_ucx, poison

pytestmark = needs_device
WAYS = {
    "device to device": (DEVICE, DEVICE),
    "host to device": ("cpu", DEVICE),
    "device to host": (DEVICE, "cpu"),
}
each_way = pytest.mark.parametrize("places", WAYS.values(), ids=WAYS)
each_lane_and_way = pytest.mark.parametrize(
    ("lane", "places"),
    [
        *(
            pytest.param(lane, places, id=f"{lane}-{way}")
            for lane in ("unix", "stream")
            for way, places in WAYS.items()
        ),
        pytest.param("ucx", (DEVICE, DEVICE), id="ucx-device to device", marks=needs_ucx),
    ],
)
COUNTING = pathlib.Path(__file__).parent / "counting_cuda.cpp"
MARGIN = 4096 + 64


def pools(
    source: EndProcess, reader: EndProcess, places: tuple[str, str], blocks: int, half: int, **options: Any
) -> None:
    """The source's blocks lie in two halves far apart, the reader's are whole."""
    nbytes = blocks * 2 * half
    source.ask("allocate", name="kv", place=places[0], nbytes=nbytes, seed=1, margin=MARGIN)
    reader.ask("allocate", name="kv", place=places[1], nbytes=nbytes, margin=MARGIN)
    halves = [(0, half, half), (blocks * half, half, half)]
    source.ask("pool", name="kv", block_bytes=2 * half, blocks=blocks, segments=halves, **options)
    reader.ask("pool", name="kv", block_bytes=2 * half, blocks=blocks, segments=[(0, 2 * half, 2 * half)], **options)


def expected(blocks: int, half: int, granted: Any, filled: Any) -> Any:
    """The reader's memory after it, margins and all other blocks being poison still."""
    nbytes = blocks * 2 * half
    sent = content(1, nbytes).reshape(2, blocks, half)
    whole = poison(nbytes + 2 * MARGIN)
    arrived = whole[MARGIN : MARGIN + nbytes].reshape(blocks, 2, half)
    for part in range(2):
        arrived[filled, part] = sent[part, granted]
    return whole


@each_lane_and_way
@pytest.mark.parametrize(("blocks", "half"), [(4000, 2500), (60, 512 << 10)], ids=["small", "1 MiB"])
def test_pools(ends: Ends, transfer: str, lane: str, places: tuple[str, str], blocks: int, half: int) -> None:
    source, reader = ends(lane)
    pools(source, reader, places, blocks, half)
    rng = np.random.default_rng(3)
    granted, filled = (rng.permutation(blocks)[: blocks * 3 // 4] for _ in range(2))
    source.ask("grant", transfer=transfer, blocks=granted.tolist())
    reader.ask("pull", transfer=transfer, blocks=filled.tolist(), lanes=[lane])
    final = reader.ask("wait", transfer=transfer)
    assert (final["state"], final["lane"]) == ("COMMITTED", lane), final
    assert_same(reader.bytes("kv"), expected(blocks, half, granted, filled))
    assert_same(source.bytes("kv")[MARGIN:-MARGIN], content(1, blocks * 2 * half))
    reader.ask("remove_pool")


@each_way
@pytest.mark.parametrize("lane", ["unix", "stream"])
def test_pools_with_checksums(ends: Ends, transfer: str, lane: str, places: tuple[str, str]) -> None:
    source, reader = ends(lane)
    blocks, half = 500, 5000
    pools(source, reader, places, blocks, half, has_checksums=True)
    filled = np.arange(blocks)[::-1]
    source.ask("grant", transfer=transfer, blocks=list(range(blocks)))
    reader.ask("pull", transfer=transfer, blocks=filled.tolist(), lanes=[lane])
    final = reader.ask("wait", transfer=transfer)
    assert (final["state"], final["checked"]) == ("COMMITTED", blocks), final
    assert_same(reader.bytes("kv"), expected(blocks, half, np.arange(blocks), filled))


@needs_ucx
@pytest.mark.parametrize("places", [("cpu", DEVICE), (DEVICE, "cpu")], ids=["host to device", "device to host"])
def test_ucx_leaves_to_the_next_lane_what_it_cannot_read_in_one_go(
    ends: Ends, transfer: str, places: tuple[str, str]
) -> None:
    """Between the host and a device, without RDMA, UCX has only its emulation, which is off."""
    source, reader = ends("ucx,unix")
    pools(source, reader, places, 50, 5000)
    source.ask("grant", transfer=transfer, blocks=list(range(50)))
    reader.ask("pull", transfer=transfer, blocks=list(range(50)), lanes=["ucx", "unix"])
    final = reader.ask("wait", transfer=transfer)
    assert (final["state"], final["lane"]) == ("COMMITTED", "unix"), final
    assert "No zero-copy protocol" in final["notes"]
    assert_same(reader.bytes("kv"), expected(50, 5000, np.arange(50), np.arange(50)))


@needs_ucx
def test_ucx_is_passed_over_where_checksums_are_on(ends: Ends, transfer: str) -> None:
    source, reader = ends("ucx,unix")
    pools(source, reader, (DEVICE, DEVICE), 50, 5000, has_checksums=True)
    source.ask("grant", transfer=transfer, blocks=list(range(50)))
    reader.ask("pull", transfer=transfer, blocks=list(range(50)), lanes=["ucx", "unix"])
    final = reader.ask("wait", transfer=transfer)
    assert (final["state"], final["lane"], final["checked"]) == ("COMMITTED", "unix", 50), final


@each_lane_and_way
@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_registered_memory(ends: Ends, lane: str, places: tuple[str, str], op: str) -> None:
    """20,000 small elements, five of a little more than 1 MiB, and a last one of a single byte."""
    source, reader = ends(lane)
    rows = [(0, 1000, 20_000, 1500), (30_000_000, (1 << 20) + 3, 5, (1 << 20) + 501), (36_000_000, 1, 1, 1)]
    nbytes = 36_000_001
    addresses = [
        source.ask("allocate", name="kv", place=places[0], nbytes=nbytes, seed=1, margin=MARGIN),
        reader.ask("allocate", name="kv", place=places[1], nbytes=nbytes, margin=MARGIN),
    ]
    records = [end.ask("register", name="kv") for end in (source, reader)]
    theirs, ours = ([(base + at, length, 0, count, step) for at, length, count, step in rows] for base in addresses)
    actor = reader if op == "READ" else source
    near, far, record = (ours, theirs, records[0]) if op == "READ" else (theirs, ours, records[1])
    number = actor.ask("post", op=op, near=near, far=far, records=[record], lane=lane)
    final = actor.ask("finish", number=number)
    assert (final["state"], final.get("lane")) == ("COMMITTED", lane), final
    sent, whole = content(1, nbytes), poison(nbytes + 2 * MARGIN)
    for at, length, count, step in rows:
        for place in range(at, at + count * step, step):
            whole[MARGIN + place : MARGIN + place + length] = sent[place : place + length]
    assert_same(reader.bytes("kv"), whole)
    for end in (source, reader):
        end.ask("deregister", name="kv")


def counting_library(directory: pathlib.Path) -> pathlib.Path:
    """counting_cuda.cpp, linked with the driver of this host."""
    ctypes.CDLL("libcuda.so.1")
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    driver = next(line.split()[-1] for line in maps if "/libcuda.so" in line)
    library = directory / "libcounting_cuda.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-shared", "-fPIC", str(COUNTING), "-o", str(library)]
    subprocess.run([*command, "-Wl,--no-as-needed", driver, "-ldl"], check=True, timeout=120)
    return library


@pytest.mark.parametrize("has_batch", [True, False], ids=["batch", "single"])
def test_both_copy_calls(ends: Ends, transfer: str, tmp_path: pathlib.Path, has_batch: bool) -> None:
    """The driver's batches are used where it has them (12.8), and single copies move the same bytes."""
    environment = {"KVXFER_CUDA_LIBRARY": str(counting_library(tmp_path))}
    if not has_batch:
        environment["COUNTING_CUDA_HAS_NO_BATCH"] = "1"
    source, reader = ends("unix", environment)
    blocks, half = 2000, 2500
    pools(source, reader, (DEVICE, DEVICE), blocks, half)
    rng = np.random.default_rng(5)
    granted, filled = rng.permutation(blocks), rng.permutation(blocks)
    source.ask("grant", transfer=transfer, blocks=granted.tolist())
    reader.ask("pull", transfer=transfer, blocks=filled.tolist(), lanes=["unix"])
    final = reader.ask("wait", transfer=transfer)
    assert final["state"] == "COMMITTED", final
    assert_same(reader.bytes("kv"), expected(blocks, half, granted, filled))
    for end in (source, reader):
        counts = end.ask("counts", library=environment["KVXFER_CUDA_LIBRARY"])
        assert counts["failures"] == 0
        if has_batch and counts["batches"] == 0:
            pytest.skip("this driver is older than 12.8: it has no batches")
        assert (counts["batches"] > 0) == has_batch
        assert (counts["copies"] >= blocks) == (not has_batch)


def test_host_and_device_in_one_post(ends: Ends) -> None:
    source, reader = ends("stream")
    bases = [
        source.ask("allocate", name="host", place="cpu", nbytes=1 << 20, seed=1),
        source.ask("allocate", name="device", place=DEVICE, nbytes=1 << 20, seed=2),
    ]
    to = reader.ask("allocate", name="kv", place=DEVICE, nbytes=2 << 20)
    records = [source.ask("register", name=name) for name in ("host", "device")]
    reader.ask("register", name="kv")
    far = [(base, 4096, 0, 128, 8192) for base in bases]
    number = reader.ask("post", op="READ", near=[(to, 4096, 0, 256, 8192)], far=far, records=records, lane="stream")
    final = reader.ask("finish", number=number)
    assert final["state"] == "COMMITTED", final
    whole = poison(2 << 20).reshape(256, 8192)
    for number, seed in enumerate((1, 2)):
        whole[128 * number : 128 * (number + 1), :4096] = content(seed, 1 << 20).reshape(128, 8192)[:, :4096]
    assert_same(reader.bytes("kv"), whole.reshape(-1))


@each_lane
def test_memory_that_takes_the_place_of_other_memory(ends: Ends, lane: str) -> None:
    """Freed to the driver and allocated anew, mostly at the same address: no transfer reads by an old mapping."""
    source, reader = ends(lane)
    nbytes, places = 32 << 20, set()
    for seed in range(4):
        base = source.ask("allocate", name="kv", place=DEVICE, nbytes=nbytes, seed=seed)
        to = reader.ask("allocate", name="kv", place=DEVICE, nbytes=nbytes)
        places.add(base)
        record = source.ask("register", name="kv")
        reader.ask("register", name="kv")
        near, far = [(to, 65536, 0, 512, 65536)], [(base, 65536, 0, 512, 65536)]
        number = reader.ask("post", op="READ", near=near, far=far, records=[record], lane=lane)
        final = reader.ask("finish", number=number)
        assert final["state"] == "COMMITTED", final
        assert_same(reader.bytes("kv"), content(seed, nbytes))
        for end in (source, reader):
            end.ask("deregister", name="kv")
            end.ask("free", name="kv")
    assert len(places) < 4, "each allocation had a place of its own: this shows nothing here"
