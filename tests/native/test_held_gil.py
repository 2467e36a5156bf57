"""A process whose Python never gives its GIL back is read from and written into all the same, by every lane."""

from __future__ import annotations

import json
import mmap
import pathlib
import select
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from tests.support.native.nodes import POISON, UCX_LIBRARY, NewId, needs_cma, needs_ucx

MAPPED, CMA, UCX = native.Lane.MAPPED, native.Lane.CMA, native.Lane.UCX
COMMITTED = native.TransferState.COMMITTED
BLOCK, BLOCKS = 65536, 256
NBYTES = BLOCK * BLOCKS
KEY = b"k" * 32
REGION = 900
Node = Any

THROUGH_SOCKETS = [pytest.param(native.Lane.STREAM, id="stream"), pytest.param(native.Lane.UNIX, id="unix")]
BY_ITSELF = [pytest.param(CMA, id="cma", marks=needs_cma), pytest.param(UCX, id="ucx", marks=needs_ucx)]
LANES = [pytest.param(MAPPED, id="mapped"), *BY_ITSELF, *THROUGH_SOCKETS]

FAR = textwrap.dedent(
    """
    import ctypes, json, os, sys, threading
    import numpy as np
    from kvxfer._native import _core as native

    how = json.loads(sys.argv[1])
    core = native.Core(native.AgentRef("far", 1, b"f" * 16), native.EndpointLimits(), bind_host="127.0.0.1",
                       bind_port=0, unix_path=how["path"], ucx_library=how["library"])
    core.start()
    region = native.Region(how["blocks"] * how["block"])
    memory = np.frombuffer(region, np.uint8)
    memory[:] = how["poison"]
    if how["is_source"]:
        memory[:] = np.random.default_rng(how["seed"]).integers(0, 256, memory.size, dtype=np.uint8)
    if how["is_pool"]:
        core.add_pool(native.PoolInfo(7, how["blocks"], how["block"], b"d" * 32, True, True), region,
                      [(0, how["block"], how["block"])])
    else:
        core.add_region(native.RegionInfo(how["region"], memory.size, is_shareable=True), region)
    near = native.AgentRef("near", 1, bytes.fromhex(how["nonce"]))
    core.set_peer(near, how["key"].encode(), tcp_host="127.0.0.1", tcp_port=how["port"], unix_path=how["near_path"])
    transfer = bytes.fromhex(how["transfer"])
    if how["is_pool"]:
        core.grant(transfer, 7, np.arange(how["blocks"], dtype=np.uint32), reader="near", ttl_ns=60 * 10**9)
        core.ready(transfer, how["blocks"], complete=True)
    print(json.dumps({"port": core.tcp_port, "file": region.fileno()}), flush=True)

    go = os.pipe()

    def get_in():
        os.read(go[0], 1)
        os.write(1, b"got in\\n")

    thread = threading.Thread(target=get_in)
    thread.start()
    sys.stdin.readline()
    sys.setswitchinterval(3600)  # no other thread gets the GIL between two calls either
    libc, byte = ctypes.PyDLL(None), ctypes.create_string_buffer(1)  # PyDLL's calls keep the GIL
    libc.write(go[1], byte, 1)
    libc.write(1, b"holding\\n", 8)
    libc.read(0, byte, 1)
    os.write(1, b"released\\n")
    thread.join()
    sys.stdin.readline()
    """
)


class Far:
    """A process with one memory, as a pool that is granted whole or as a region; its GIL is held from :meth:`hold` to
    :meth:`let_go`, and a thread of its own waits for it all the while.
    """

    def __init__(
        self, near: Node, directory: pathlib.Path, lane: native.Lane, transfer: bytes | None, seed: int | None
    ) -> None:
        """``transfer``: of the grant of its pool; ``None``: a region. ``seed``: of its bytes; ``None``: poison."""
        how = {
            "path": str(directory / "far"),
            "library": UCX_LIBRARY.path if lane == UCX else "",
            "blocks": BLOCKS,
            "block": BLOCK,
            "poison": POISON,
            "is_source": seed is not None,
            "seed": seed,
            "region": REGION,
            "nonce": near.ref.boot_nonce.hex(),
            "key": KEY.decode(),
            "port": near.core.tcp_port,
            "near_path": near.core.unix_path,
            "is_pool": transfer is not None,
            "transfer": (transfer or b"").hex(),
        }
        command = [sys.executable, "-c", FAR, json.dumps(how)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.ref = native.AgentRef("far", 1, b"f" * 16)
        told = json.loads(self.line())
        near.core.set_peer(self.ref, KEY, tcp_host="127.0.0.1", tcp_port=told["port"], unix_path=how["path"])
        with open(f"/proc/{self.process.pid}/fd/{told['file']}", "rb") as file:
            mapping = mmap.mmap(file.fileno(), NBYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        self.memory = np.frombuffer(mapping, np.uint8)
        """Looked at from here, without that process."""

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the far process ended"
        return str(line.decode().strip())

    def say(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def hold(self) -> None:
        self.say()
        assert self.line() == "holding"

    def expect_held(self) -> None:
        """No thread of its has run since."""
        assert self.process.stdout is not None
        assert not select.select([self.process.stdout], [], [], 0)[0], self.line()

    def let_go(self) -> None:
        self.say()
        assert {self.line(), self.line()} == {"released", "got in"}

    def __enter__(self) -> Far:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture
def directory(private_directories: pathlib.Path) -> pathlib.Path:
    return private_directories / "sockets"


def make_near(nodes: Any, lane: native.Lane) -> Node:
    core = {"ucx_library": UCX_LIBRARY.path} if lane == UCX else {}
    return nodes("near", block_bytes=BLOCK, blocks=BLOCKS, is_exposed=True, core=core)


def pattern(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8)


def scattered(seed: int) -> tuple[Any, Any]:
    """All elements of one side, in random order, and of the other."""
    rng = np.random.default_rng(seed)
    return rng.permutation(BLOCKS).astype(np.uint32), rng.permutation(BLOCKS).astype(np.uint32)


def moved(source: Any, read: Any, filled: Any) -> Any:
    """What the destination holds afterwards."""
    expected = np.full((BLOCKS, BLOCK), POISON, np.uint8)
    expected[filled] = source.reshape(BLOCKS, BLOCK)[read]
    return expected.ravel()


@pytest.mark.parametrize("lane", LANES)
def test_a_write_needs_nothing_of_the_destinations_python(
    nodes: Any, new_id: NewId, directory: pathlib.Path, lane: native.Lane
) -> None:
    """It connects, fills all of the memory and is confirmed to the writer while the destination holds its GIL."""
    near = make_near(nodes, lane)
    ours, (read, filled) = near.register(NBYTES), scattered(1)
    ours.memory[:] = pattern(2)
    transfer, rows = new_id(), (0, BLOCK, BLOCK, BLOCKS)
    with Far(near, directory, lane, None, None) as far:
        assert (far.memory == POISON).all()
        far.hold()
        near.push(transfer, far.ref, [(ours.id, *rows)], [(REGION, *rows)], ids=(read, filled), lanes=[lane])
        final = near.wait_drained(transfer)
        assert (final.state, final.lane, final.lane_notes) == (COMMITTED, lane, ""), final.text
        assert np.array_equal(far.memory, moved(ours.memory, read, filled))
        far.expect_held()
        far.let_go()


@pytest.mark.parametrize("lane", LANES)
def test_a_read_needs_nothing_of_the_sources_python(
    nodes: Any, new_id: NewId, directory: pathlib.Path, lane: native.Lane
) -> None:
    near = make_near(nodes, lane)
    ours, (read, filled) = near.register(NBYTES), scattered(3)
    ours.memory[:] = POISON
    transfer, rows = new_id(), (0, BLOCK, BLOCK, BLOCKS)
    with Far(near, directory, lane, None, 4) as far:
        far.hold()
        near.fetch(transfer, far.ref, [(ours.id, *rows)], [(REGION, *rows)], ids=(filled, read), lanes=[lane])
        final = near.wait_drained(transfer)
        assert (final.state, final.lane, final.lane_notes) == (COMMITTED, lane, ""), final.text
        assert np.array_equal(ours.memory, moved(pattern(4), read, filled))
        far.expect_held()
        far.let_go()


@pytest.mark.parametrize("lane", LANES)
def test_a_pull_needs_nothing_of_the_sources_python(
    nodes: Any, new_id: NewId, directory: pathlib.Path, lane: native.Lane
) -> None:
    near, transfer = make_near(nodes, lane), new_id()
    near.fill(POISON)
    _, filled = scattered(5)
    with Far(near, directory, lane, transfer, 6) as far:
        far.hold()
        near.pull(transfer, far.ref, filled, lanes=[lane])
        final = near.wait_drained(transfer)
        assert (final.state, final.lane, final.lane_notes) == (COMMITTED, lane, ""), final.text
        assert np.array_equal(near.memory, moved(pattern(6), np.arange(BLOCKS), filled))
        far.expect_held()
        far.let_go()
