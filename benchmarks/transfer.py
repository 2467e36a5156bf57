"""How fast blocks move between two processes, beside what the machine could do at best.

Two processes, random blocks out of two pools, ``--transfer-mib`` or more a transfer, measured from ``pull`` until the
reader was told that the transfer committed (confirm included). Before each transfer every destination byte is set to
the complement of what must arrive, and afterwards every byte is compared. The limits run in turns with it, on the same
memory: one thread's memcpy for ``mapped``, one plain TCP connection (vectored writes and reads, best of some window
sizes) for ``stream``. Each figure is a median over pairs; the ratio is the median of the pairs' ratios.

    benchmarks/transfer.py [--sizes 4K,16K,...] [--pairs 9] [--lanes mapped,stream] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import mmap
import os
import pathlib
import platform
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvxfer._native import _core as native

SIZES = "4K,16K,64K,256K,1M,4M"
WINDOWS = (0, 256 << 10, 512 << 10, 1 << 20)
"""Socket buffer sizes that the plain connection is tried with; 0 leaves them to the kernel."""
KEY = b"k" * 32
NONCE = b"n" * 16
DIGEST = b"d" * 32
POOL = 1
LANES = {"mapped": native.Lane.MAPPED, "stream": native.Lane.STREAM}


def parse_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def show_size(size: int) -> str:
    return f"{size >> 20}M" if size % (1 << 20) == 0 else f"{size >> 10}K"


class Limits:
    """The compiled limits; blocks are uint32 arrays, memory is an address."""

    def __init__(self, library: pathlib.Path) -> None:
        self.library = ctypes.CDLL(str(library))

    @staticmethod
    def build(directory: pathlib.Path) -> pathlib.Path:
        library = directory / "limits.so"
        source = pathlib.Path(__file__).with_name("limits.cpp")
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, "-O3", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        return library

    @staticmethod
    def _pointer(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.ctypes.data)

    def copy(self, to: int, origin: int, block_bytes: int, granted: Any, filled: Any) -> None:
        arguments = (ctypes.c_void_p(to), ctypes.c_void_p(origin), ctypes.c_uint64(block_bytes))
        self.library.copy_blocks(
            *arguments, self._pointer(granted), self._pointer(filled), ctypes.c_uint64(len(granted))
        )

    def move(self, verb: str, connection: socket.socket, base: int, block_bytes: int, blocks: Any) -> None:
        function = self.library.send_blocks if verb == "send" else self.library.receive_blocks
        arguments = (ctypes.c_int(connection.fileno()), ctypes.c_void_p(base), ctypes.c_uint64(block_bytes))
        if function(*arguments, self._pointer(blocks), ctypes.c_uint64(len(blocks))) != 0:
            raise OSError("the plain connection broke")


def tune(connection: socket.socket, window: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if window:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, window)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)


def choose(seed: int, blocks: int, count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.random.default_rng(seed).permutation(blocks)[:count].astype(np.uint32)


class Side:
    """A process's core, pool and line to the other process."""

    def __init__(self, name: str, directory: pathlib.Path, control: socket.socket, pool_bytes: int) -> None:
        self.control = control
        self.lines = control.makefile("r")
        self.ref = native.AgentRef(name, 1, NONCE)
        path = str(directory / name)
        self.core = native.Core(self.ref, native.EndpointLimits(), bind_host="127.0.0.1", bind_port=0, unix_path=path)
        self.core.start()
        self.region = native.Region(pool_bytes)
        self.memory = np.frombuffer(self.region, np.uint8)
        self.limits = Limits(directory / "limits.so")
        self.block_bytes = 0

    def say(self, *words: Any) -> None:
        self.control.sendall((json.dumps(words) + "\n").encode())

    def hear(self) -> list[Any]:
        line = self.lines.readline()
        if not line:
            raise SystemExit("the other process ended")
        heard: list[Any] = json.loads(line)
        return heard

    def use_blocks(self, block_bytes: int) -> None:
        if self.block_bytes:
            self.core.remove_pool(POOL)
        self.block_bytes = block_bytes
        info = native.PoolInfo(POOL, len(self.memory) // block_bytes, block_bytes, DIGEST, True)
        self.core.add_pool(info, self.region, [(0, block_bytes, block_bytes)])

    @property
    def blocks(self) -> int:
        return len(self.memory) // self.block_bytes


def run_source(directory: pathlib.Path, control_fd: int, pool_bytes: int) -> None:
    control = socket.socket(fileno=control_fd)
    side = Side("source", directory, control, pool_bytes)
    side.memory[:] = np.random.default_rng(1).integers(0, 256, pool_bytes, dtype=np.uint8)
    socket.send_fds(control, [b"\n"], [side.region.fileno()])
    side.say(side.core.tcp_port)
    port = side.hear()[0]
    reader = native.AgentRef("reader", 1, NONCE)
    side.core.set_peer(reader, KEY, tcp_host="127.0.0.1", tcp_port=port, unix_path=str(directory / "reader"))
    plain: socket.socket | None = None
    while (heard := side.hear())[0] != "quit":
        verb, *arguments = heard
        if verb == "blocks":
            side.use_blocks(arguments[0])
        elif verb == "grant":
            transfer, seed, count = arguments
            blocks = choose(seed, side.blocks, count)
            side.core.grant(bytes.fromhex(transfer), POOL, blocks, reader="reader", ttl_ns=10**10)
            side.core.ready(bytes.fromhex(transfer), count, complete=True)
        elif verb == "ended":
            while side.core.counts().grants.alive:
                time.sleep(0.0005)
            side.core.drain()
        elif verb == "dial":
            if plain is not None:
                plain.close()
            plain = socket.create_connection(("127.0.0.1", arguments[0]))
            tune(plain, arguments[1])
        elif verb == "send" and plain is not None:
            blocks = choose(arguments[0], side.blocks, arguments[1])
            side.say("go")
            side.limits.move("send", plain, side.region.address, side.block_bytes, blocks)
            continue
        side.say("done")
    side.core.close()


@dataclasses.dataclass
class Row:
    lane: str
    block_bytes: int
    kvxfer_gb_s: float
    limit_gb_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    pairs: int
    window: int | None


class Reader(Side):
    """The measuring process."""

    def __init__(self, directory: pathlib.Path, control: socket.socket, pool_bytes: int, transfer_bytes: int) -> None:
        super().__init__("reader", directory, control, pool_bytes)
        self.transfer_bytes = transfer_bytes
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        self.view = mmap.mmap(fds[0], pool_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(fds[0])
        self.far = np.frombuffer(self.view, np.uint8)
        self.source = native.AgentRef("source", 1, NONCE)
        port = self.hear()[0]
        self.core.set_peer(self.source, KEY, tcp_host="127.0.0.1", tcp_port=port, unix_path=str(directory / "source"))
        self.say(self.core.tcp_port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.plain: socket.socket | None = None
        self.seed = 0

    def ask(self, *words: Any) -> None:
        self.say(*words)
        self.hear()

    @property
    def count(self) -> int:
        return -(-self.transfer_bytes // self.block_bytes)

    def measure(self, move: Callable[[int, Any, Any], float]) -> float:
        """GB/s of one move of random blocks, every byte of which was poisoned before and is compared after."""
        self.seed += 1
        granted = choose(self.seed, self.blocks, self.count)
        filled = choose(-self.seed % (1 << 32), self.blocks, self.count)
        own = self.memory.reshape(-1, self.block_bytes)
        far = self.far.reshape(-1, self.block_bytes)
        step = max(1, (4 << 20) // self.block_bytes)
        for i in range(0, self.count, step):
            own[filled[i : i + step]] = ~far[granted[i : i + step]]
        seconds = move(self.seed, granted, filled)
        for i in range(0, self.count, step):
            if not np.array_equal(own[filled[i : i + step]], far[granted[i : i + step]]):
                raise SystemExit(f"wrong bytes at block {self.block_bytes}, seed {self.seed}")
        return self.count * self.block_bytes / seconds / 1e9

    def pull(self, lane: native.Lane, seed: int, granted: Any, filled: Any) -> float:
        transfer = os.urandom(16)
        self.ask("grant", transfer.hex(), seed, len(granted))
        start = time.perf_counter()
        self.core.pull(transfer, self.source, POOL, filled, lanes=[lane])
        final = None
        while final is None:
            select.select([self.core.fileno()], [], [])
            for event in self.core.drain():
                if isinstance(event, native.TransferFinal):
                    final = event
        seconds = time.perf_counter() - start
        if final.state != native.TransferState.COMMITTED:
            raise SystemExit(f"{lane}: {final.code} {final.text} {final.lane_notes}")
        self.ask("ended")
        return seconds

    def copy(self, seed: int, granted: Any, filled: Any) -> float:
        start = time.perf_counter()
        self.limits.copy(self.region.address, self.far.ctypes.data, self.block_bytes, granted, filled)
        return time.perf_counter() - start

    def dial_plain(self, window: int) -> None:
        if self.plain is not None:
            self.plain.close()
        self.say("dial", self.listener.getsockname()[1], window)
        self.plain, _ = self.listener.accept()
        tune(self.plain, window)
        self.hear()

    def receive_plain(self, seed: int, granted: Any, filled: Any) -> float:
        assert self.plain is not None
        self.ask("send", seed, len(granted))
        start = time.perf_counter()
        self.limits.move("receive", self.plain, self.region.address, self.block_bytes, filled)
        return time.perf_counter() - start

    def find_window(self) -> int:
        speeds = {}
        for window in WINDOWS:
            self.dial_plain(window)
            speeds[window] = statistics.median(self.measure(self.receive_plain) for _ in range(4))
        return max(speeds, key=lambda window: speeds[window])

    def row(self, lane: str, block_bytes: int, pairs: int) -> Row:
        self.use_blocks(block_bytes)
        self.ask("blocks", block_bytes)
        window = None
        limit = self.copy
        if lane == "stream":
            window = self.find_window()
            self.dial_plain(window)
            limit = self.receive_plain

        def ours(seed: int, granted: Any, filled: Any) -> float:
            return self.pull(LANES[lane], seed, granted, filled)

        for warm in (ours, limit, ours, limit):
            self.measure(warm)
        got = [(self.measure(ours), self.measure(limit)) for _ in range(pairs)]
        ratios = sorted(a / b for a, b in got)
        return Row(
            lane=lane,
            block_bytes=block_bytes,
            kvxfer_gb_s=statistics.median(a for a, _ in got),
            limit_gb_s=statistics.median(b for _, b in got),
            ratio=statistics.median(ratios),
            ratio_low=ratios[len(ratios) // 4],
            ratio_high=ratios[-1 - len(ratios) // 4],
            pairs=pairs,
            window=window,
        )


def machine() -> dict[str, Any]:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    return {"cpu": cpu, "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--lanes", default="mapped,stream")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--pool-mib", type=int, default=512)
    parser.add_argument("--transfer-mib", type=int, default=256)
    parser.add_argument("--json", default="", help="also write the figures to this file")
    parser.add_argument("--source", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.source:
        return run_source(pathlib.Path(options.source[0]), int(options.source[1]), int(options.source[2]))

    rows = []
    with tempfile.TemporaryDirectory(prefix="kvx-") as name:
        directory = pathlib.Path(name)
        Limits.build(directory)
        near, far = socket.socketpair()
        pool_bytes = options.pool_mib << 20
        command = [sys.executable, __file__, "--source", name, str(far.fileno()), str(pool_bytes)]
        with subprocess.Popen(command, pass_fds=[far.fileno()]) as process:
            far.close()
            try:
                reader = Reader(directory, near, pool_bytes, options.transfer_mib << 20)
                print(" ".join(f"{key}={value}" for key, value in machine().items()))
                print(f"{options.pool_mib} MiB pools, {options.transfer_mib} MiB a transfer, {options.pairs} pairs")
                print(f"{'lane':7} {'block':>6} {'kvxfer':>9} {'limit':>9} {'ratio':>6}  middle half")
                for lane in options.lanes.split(","):
                    for size in options.sizes.split(","):
                        row = reader.row(lane, parse_size(size), options.pairs)
                        rows.append(row)
                        speeds = f"{row.kvxfer_gb_s:7.2f}   {row.limit_gb_s:7.2f}   {row.ratio:6.2f}"
                        spread = f"{row.ratio_low:.2f} to {row.ratio_high:.2f}"
                        print(f"{row.lane:7} {show_size(row.block_bytes):>6} {speeds}  {spread}", flush=True)
                reader.say("quit")
                reader.core.close()
            finally:
                process.terminate()
    if options.json:
        figures = {"machine": machine(), "options": vars(options), "rows": [dataclasses.asdict(row) for row in rows]}
        pathlib.Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
