"""The `cma` lane: bytes arrive whole, lies are told as such, and where ptrace is not allowed the reason is said."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from tests.support.native.lying_source import KEY, LyingSource
from tests.support.native.nodes import NewId, needs_cma
from tests.support.restricted import NOT_APPLICABLE, Restrictions, restricted

CMA, STREAM = native.Lane.CMA, native.Lane.STREAM
COMMITTED = native.TransferState.COMMITTED
BLOCK, BLOCKS = 4096, 16
BYTES = BLOCK * BLOCKS

pytestmark = needs_cma


# --- bytes arrive ---


def test_a_pull(nodes: Any) -> None:
    p, d = nodes.pair(blocks=3000, is_exposed=True, is_shareable=False)
    granted = np.random.default_rng(1).permutation(3000)[:2500]
    filled = np.sort(np.random.default_rng(2).permutation(3000)[:2500])
    transfer = d.pull_granted(p, granted, filled, lanes=[CMA])
    final = d.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, CMA), final.text
    assert d.content(filled) == p.content(granted)
    others = sorted(set(range(3000)) - set(filled.tolist()))
    assert set(b"".join(d.content(others))) == {0xEE}
    assert d.core.statistics().bytes_cma == 2500 * BLOCK


def test_blocks_that_are_cut_differently_on_both_sides(nodes: Any) -> None:
    """Segments of 1000 and 3096 bytes there, of 4096 here: no run of one side is a run of the other."""
    cut = [(0, 1000, 1000), (1000 * 64, 3096, 3096)]
    p, d = nodes.pair(is_exposed=True, is_shareable=False, region_bytes=BLOCK * 64, source={"segments": cut})
    transfer = d.pull_granted(p, range(64), range(63, -1, -1), lanes=[CMA])
    assert d.wait_drained(transfer).state == COMMITTED
    assert d.content(range(63, -1, -1)) == p.content(range(64))


@pytest.mark.parametrize("has_checksums", [False, True], ids=["plain", "checksums"])
def test_memory_that_kvxfer_did_not_make(nodes: Any, new_id: NewId, has_checksums: bool) -> None:
    p, d = nodes("source"), nodes("reader")
    nodes.join(p, d)
    theirs, ours = p.register(1 << 20, is_foreign=True), d.register(1 << 20, is_foreign=True)
    theirs.memory[:] = np.random.default_rng(3).integers(0, 256, 1 << 20, dtype=np.uint8)
    ours.memory[:] = 0xEE
    transfer = new_id()
    d.fetch(
        transfer,
        p,
        [(ours.id, 100, 3000, 3000, 100), (ours.id, 600_000, 3000, 3000, 1)],
        [(theirs.id, 7, 5000, 3000, 100), (theirs.id, 900_001, 3000, 3000, 1)],
        lanes=[CMA],
        wants_checksums=has_checksums,
    )
    final = d.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, CMA), final.text
    expected = np.full(1 << 20, 0xEE, np.uint8)
    for i in range(100):
        expected[100 + 3000 * i : 3100 + 3000 * i] = theirs.memory[7 + 5000 * i : 3007 + 5000 * i]
    expected[600_000:603_000] = theirs.memory[900_001:903_001]
    assert np.array_equal(ours.memory, expected)


def test_unexposed_pool_is_read_by_stream_not_cma(nodes: Any) -> None:
    p, d = nodes.pair(is_exposed=False)
    transfer = d.pull_granted(p, [1, 2], [3, 4], lanes=[CMA, STREAM])
    final = d.wait_drained(transfer)
    assert (final.state, final.lane) == (COMMITTED, STREAM)
    assert "exposed" in final.lane_notes
    assert d.content([3, 4]) == p.content([1, 2])


def test_memory_that_went_before_the_word_of_it(p: Any, d: Any, new_id: NewId) -> None:
    """Where the source knows of nothing, the next lane shows that it is the memory, and no lane, that is missing."""
    memory = mmap.mmap(-1, BYTES)
    address = address_of(memory)
    region_id = 900
    p.core.add_foreign_region(native.RegionInfo(region_id, BYTES), address, BYTES, memory)
    ours = d.register(BYTES)
    rows = [(ours.id, 0, BLOCK, BLOCK, BLOCKS)], [(region_id, 0, BLOCK, BLOCK, BLOCKS)]
    first, second, third = new_id(), new_id(), new_id()
    d.fetch(first, p, *rows, lanes=[CMA])
    assert d.wait_drained(first).state == COMMITTED
    p.wait(lambda _: p.is_idle(), "the release of the first")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(address, BYTES, 0) == 0  # as if unmapped, and not reused meanwhile
    d.fetch(second, p, *rows, lanes=[CMA, STREAM], deadline_s=20.0)
    final = d.wait_drained(second)
    assert (final.state, final.code) == (native.TransferState.FAILED, native.Code.memory_gone), final.text
    p.core.remove_region(region_id)
    d.fetch(third, p, *rows, lanes=[CMA, STREAM], deadline_s=20.0)
    final = d.wait_drained(third)
    assert (final.state, final.code) == (native.TransferState.FAILED, native.Code.refused), final.text


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("gone_mib", [0, 1, 3])
def test_some_of_the_memory_is_gone(nodes: Any, new_id: NewId, threads: int, gone_mib: int) -> None:
    """Whichever of the first calls finds it, nothing is committed; once it is back, the lane is as good as before."""
    p, d = nodes("source"), nodes("reader", core={"copy_threads": threads})
    nodes.join(p, d)
    size = 8 << 20
    memory = mmap.mmap(-1, size)
    address = address_of(memory)
    p.core.add_foreign_region(native.RegionInfo(901, size), address, size, memory)
    np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(4).integers(0, 256, size, dtype=np.uint8)
    ours = d.register(size)
    rows = [(ours.id, 0, BLOCK, BLOCK, size // BLOCK)], [(901, 0, BLOCK, BLOCK, size // BLOCK)]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    gone = address + (gone_mib << 20), 1 << 20
    assert libc.mprotect(*gone, 0) == 0
    first, second = new_id(), new_id()
    d.fetch(first, p, *rows, lanes=[CMA], deadline_s=20.0)
    final = d.wait_drained(first)
    assert (final.state, final.code) == (native.TransferState.FAILED, native.Code.memory_gone), final.text
    assert final.text.endswith(f"region 901 at byte {gone_mib << 20}")
    assert libc.mprotect(*gone, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    ours.memory[:] = 0xEE
    d.fetch(second, p, *rows, lanes=[CMA])
    assert d.wait_drained(second).state == COMMITTED
    assert ours.memory.tobytes() == memory[:]


# --- sources that lie ---


def own_memory() -> mmap.mmap:
    memory = mmap.mmap(-1, BYTES)
    memory[:] = b"\x5a" * BYTES
    return memory


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Liar(LyingSource):
    """A source whose pool may be read by every lane, and that minds not how its reader hangs up."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.endpoint.remove_pool(3)
        self.endpoint.add_pool(native.PoolInfo(3, BLOCKS, BLOCK, b"d" * 32, False, True))

    def serve(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().serve()


@pytest.fixture
def lie(nodes: Any, new_id: NewId, private_directories: pathlib.Path) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Pulls blocks 1 and 2 of a source in this process, its MAP `change`d first; returns the reader and the end."""
    sources: list[Liar] = []
    kept: list[Any] = []

    def pull(change: Callable[[dict[str, Any]], None], ids: list[int] | None = None) -> tuple[Any, Any]:
        d = nodes("reader", block_bytes=BLOCK, blocks=BLOCKS)
        d.fill(0xEE)
        path = private_directories / "sockets" / "liar"
        source = Liar(path, d.ref, None, [], ids)
        memory, nonce = own_memory(), ctypes.create_string_buffer(source.ref.boot_nonce, 16)
        kept.extend((memory, nonce))
        says: dict[str, Any] = {
            "pool": 3,
            "region_bytes": BYTES,
            "block_count": BLOCKS,
            "segments": [(0, BLOCK, BLOCK)],
            "lane": CMA,
            "address": address_of(memory),
            "key": ctypes.addressof(nonce).to_bytes(8, "little"),
        }
        change(says)
        source.frame = native.Map(**says)
        sources.append(source)
        source.thread.start()
        transfer = new_id()
        source.endpoint.grant(transfer, 3, [1, 2], "", 10**11, 2, 1)
        d.core.set_peer(source.ref, KEY, tcp_host="127.0.0.1", tcp_port=0, unix_path=str(path))
        d.pull(transfer, source.ref, [4, 5], lanes=[CMA])
        final = d.wait_drained(transfer)
        d.core.close()
        path.unlink()
        return d, final

    yield pull
    for source in sources:
        source.close()


def test_an_honest_source(lie: Any) -> None:
    d, final = lie(lambda says: None)
    assert final.state == COMMITTED, final.text
    assert set(d.block(4) + d.block(5)) == {0x5A}


def another_nonce(says: dict[str, Any]) -> None:
    says["key"] = says["address"].to_bytes(8, "little")


def nowhere(says: dict[str, Any]) -> None:
    says["address"] = 4096


def around_the_end(says: dict[str, Any]) -> None:
    says["address"] = (1 << 64) - BLOCK


def no_key(says: dict[str, Any]) -> None:
    says["key"] = b"\x01\x02"


def key_of_nowhere(says: dict[str, Any]) -> None:
    says["key"] = (8).to_bytes(8, "little")


def segment_outside(says: dict[str, Any]) -> None:
    says["segments"] = [(BYTES, BLOCK, BLOCK)]


def blocks_without_segments(says: dict[str, Any]) -> None:
    says["segments"] = []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (another_nonce, "not the one that the session was made with"),
        (nowhere, "not mapped"),
        (around_the_end, "wraps around"),
        (no_key, "where its nonce lies"),
        (key_of_nowhere, "not where it says"),
        (segment_outside, "leaves the region"),
        (blocks_without_segments, "map has no segments"),
    ],
)
def test_a_lie_is_told_as_such(lie: Any, change: Any, why: str) -> None:
    d, final = lie(change)
    assert final.state == native.TransferState.FAILED
    assert why in final.text + final.lane_notes
    assert set(d.memory.tobytes()) == {0xEE}


def test_blocks_outside_of_the_pool_are_not_read(lie: Any) -> None:
    d, final = lie(lambda says: None, ids=[1, BLOCKS])
    assert final.state == native.TransferState.FAILED
    assert "outside" in final.text + final.lane_notes
    assert set(d.memory.tobytes()) == {0xEE}


# --- processes ---

READER = textwrap.dedent(
    """
    import ctypes, json, os, select, sys, time
    import numpy as np
    from kvxfer._native import _core as native

    drop, source_pid, nonce, port, path, transfer = sys.argv[1:]
    if drop == "user":
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    elif drop == "capabilities":
        none = (ctypes.c_uint32 * 6)()
        version = (ctypes.c_uint32 * 2)(0x20080522, 0)
        assert ctypes.CDLL(None).capset(version, none) == 0
    obstacle = native.cma_obstacle(int(source_pid))
    ref = native.AgentRef("reader", 1, b"r" * 16)
    core = native.Core(ref, native.EndpointLimits(), bind_host="127.0.0.1", bind_port=0, unix_path="")
    core.start()
    memory = np.full(4096 * 16, 0xEE, np.uint8)
    info = native.PoolInfo(7, 16, 4096, b"d" * 32, False, False, False)
    core.add_foreign_pool(info, memory.ctypes.data, memory.nbytes, memory, [(0, 4096, 4096)])
    source = native.AgentRef("source", 1, bytes.fromhex(nonce))
    core.set_peer(source, b"k" * 32, tcp_host="127.0.0.1", tcp_port=int(port), unix_path=path)
    lanes = [native.Lane.CMA, native.Lane.STREAM]
    blocks = np.arange(8, dtype=np.uint32)
    deadline = time.monotonic_ns() + 30 * 10**9
    core.pull(bytes.fromhex(transfer), source, 7, blocks, lanes=lanes, deadline_ns=deadline)
    final = None
    while final is None:
        select.select([core.fileno()], [], [], 1)
        final = next((e for e in core.drain() if isinstance(e, native.TransferFinal)), None)
    core.close()
    got = memory[: 8 * 4096].tobytes().hex()
    print(json.dumps([obstacle, final.state.name, final.lane.name, final.lane_notes + final.text, got]))
    """
)


def read_from_afar(nodes: Any, transfer: bytes, drop: str) -> tuple[str, str, str]:
    """A reader in a process of its own that gave something up first: what it met, by which lane it read, and why."""
    p = nodes("source", blocks=16, is_exposed=True, is_shareable=False)
    p.fill_random()
    reader = native.AgentRef("reader", 1, b"r" * 16)
    p.core.set_peer(reader, KEY, tcp_host="127.0.0.1", tcp_port=1, unix_path="")
    os.chmod(p.core.unix_path, 0o777)
    p.grant(transfer, range(8), ttl_s=60)
    arguments = [drop, os.getpid(), p.ref.boot_nonce.hex(), p.core.tcp_port, p.core.unix_path, transfer.hex()]
    command = [sys.executable, "-c", READER, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    obstacle, state, lane, notes, got = json.loads(done.stdout)
    assert state == "COMMITTED", notes
    assert bytes.fromhex(got) == b"".join(p.content(range(8)))
    return obstacle, lane, notes


@pytest.fixture
def open_nodes(nodes: Any) -> Iterator[Any]:
    """Nodes whose Unix sockets another user can reach, so that it is not the directory that keeps them apart."""
    with tempfile.TemporaryDirectory(prefix="kvx-open-") as directory:
        os.chmod(directory, 0o711)
        nodes.directory = pathlib.Path(directory)
        yield nodes


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user or give capabilities up")


def test_another_process_is_read(nodes: Any, new_id: NewId) -> None:
    obstacle, lane, notes = read_from_afar(nodes, new_id(), "nothing")
    assert obstacle == "", obstacle
    assert lane == "CMA", notes


@needs_root
def test_without_capabilities_the_next_lane_serves(open_nodes: Any, new_id: NewId) -> None:
    obstacle, lane, notes = read_from_afar(open_nodes, new_id(), "capabilities")
    assert lane == "STREAM"
    assert "ptrace is not allowed" in obstacle
    assert "ptrace is not allowed" in notes


@needs_root
def test_under_another_user_the_next_lane_serves(open_nodes: Any, new_id: NewId) -> None:
    obstacle, lane, notes = read_from_afar(open_nodes, new_id(), "user")
    assert lane == "STREAM"
    assert "ptrace is not allowed" in obstacle
    assert "user" in notes


OBSTACLES = textwrap.dedent(
    """
    import ctypes, json, os, pathlib, sys
    from kvxfer._native import _core as native

    yama, drop, *pids = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if yama:  # a file that says so, in a mount namespace of our own
        path = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
        root, over = b"/", b"/proc/sys/kernel"
        is_private = libc.unshare(0x20000) == 0 and libc.mount(None, root, None, 0x44000, None) == 0
        if not is_private or libc.mount(b"tmpfs", over, b"tmpfs", 0, None) != 0:
            sys.exit(77)
        path.parent.mkdir()
        path.write_text(yama)
    if drop:
        none = (ctypes.c_uint32 * 6)()
        version = (ctypes.c_uint32 * 2)(0x20080522, 0)
        assert libc.capset(version, none) == 0
    print(json.dumps([native.cma_obstacle(*map(int, pid)) for pid in ([], *([pid] for pid in pids))]))
    """
)
HIDDEN = textwrap.dedent(
    """
    import ctypes, os, sys

    if os.geteuid() == 0:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
    print(flush=True)
    sys.stdin.read()
    """
)


def obstacles(yama: str, drop: str, *pids: int) -> list[str]:
    """Of a process that met that setting of Yama's, and gave its capabilities up where ``drop`` says something."""
    command = [sys.executable, "-c", OBSTACLES, yama, drop, *map(str, pids)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("no file of the kernel's can be hidden here: no mount namespaces")
    assert done.returncode == 0, done.stderr
    told: list[str] = json.loads(done.stdout)
    return told


@pytest.fixture
def hidden() -> Iterator[int]:
    """A process that is not dumpable; as root, another user's."""
    with subprocess.Popen([sys.executable, "-c", HIDDEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process.pid
        process.communicate()


YAMA = "ptrace is not allowed: /proc/sys/kernel/yama/ptrace_scope is "


@needs_root
def test_cma_obstacle_names_yama(hidden: int) -> None:
    how = "(as root: sysctl kernel.yama.ptrace_scope=0, or give it CAP_SYS_PTRACE)"
    also = "; the source is not dumpable (do not start it setuid or with file capabilities)"
    for scope in ("1", "2"):
        assert obstacles(scope, "capabilities", hidden) == [f"{YAMA}{scope} {how}", f"{YAMA}{scope} {how}{also}"]
    assert obstacles("2", "", hidden) == ["", ""]
    own, _ = obstacles("3", "", hidden)  # the kernel itself has no Yama of this scope, and lets it read the other one
    assert own == f"{YAMA}3 (which nothing but a reboot with another setting lifts)"
    assert obstacles("0", "capabilities", hidden)[0] == ""


def from_a_hidden_process(pid: int) -> list[str]:
    """What a process that is not dumpable hears of itself, and of that one of the same user."""
    told = "print(native.cma_obstacle()); print(native.cma_obstacle(int(sys.argv[1])))"
    reads = HIDDEN.replace("print(flush=True)", told).replace("import ctypes", f"{IMPORT}; import ctypes")
    command = [sys.executable, "-c", reads, str(pid)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


IMPORT = "from kvxfer._native import _core as native"


def test_a_process_that_is_not_dumpable_knows_that_no_other_can_read_it(hidden: int) -> None:
    own, _ = from_a_hidden_process(hidden)
    assert own.endswith(
        "this process is not dumpable, so no other can read it (do not start it setuid or with file capabilities)"
    )


def test_a_source_that_is_not_dumpable_is_told_as_such(hidden: int) -> None:
    """Whatever else stands against it on this host (Yama's setting, privileges), that is among the reasons."""
    _, other = from_a_hidden_process(hidden)
    assert other.startswith("ptrace is not allowed: ")
    assert "not dumpable" in other


@pytest.mark.parametrize(
    ("forbidden", "said"),
    [
        ({"process_vm_readv": errno.EPERM}, "process_vm_readv is not to be had: "),
        ({"process_vm_readv": errno.ENOSYS}, "process_vm_readv is not to be had: "),
        ({"pidfd_open": errno.EPERM, "getsockopt": errno.ENOPROTOOPT}, "pidfd_open is not to be had "),
    ],
)
def test_a_forbidden_system_call_is_named(forbidden: dict[str, int], said: str) -> None:
    code = f"{IMPORT}; print(native.cma_obstacle()); print(native.cma_missing_calls()); print(native.cma_obstacle(1))"
    command = restricted([sys.executable, "-c", code], Restrictions(forbidden=forbidden))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == NOT_APPLICABLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(said) and "a seccomp profile that has to allow it" in line for line in lines), lines


def test_an_obstacle_is_told_of_a_process_that_is_not_there() -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    assert "cannot be read" in native.cma_obstacle(int(done.stdout))
