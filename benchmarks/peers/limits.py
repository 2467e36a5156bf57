"""What the machine can do at best with the same two pools: the limits, as a part of a worker.

It decides how a limit is run between the two processes that also run kvxfer, on the very same memory: one thread's
memcpy out of the mapped source pool, process_vm_readv, and one plain socket with vectored writes and reads. It must
never know a protocol: the only thing it exchanges is one byte that says "now" or "done".
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
import socket
import subprocess
import tempfile
import threading
from typing import Any

import numpy as np

from peers.memory import Ids, address_of
from peers.worker import DESTINATION, SOURCE, Job

RUNS_A_CALL = 1024


class LimitsLibrary:
    """limits.cpp, compiled; blocks are uint32 arrays, memory is an address."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)

    @staticmethod
    def build() -> str:
        """Compile it; returns the path, in a new temporary directory. Raises CalledProcessError."""
        source = pathlib.Path(__file__).resolve().parents[1] / "limits.cpp"
        library = os.path.join(tempfile.mkdtemp(prefix="kvx-limits-"), "limits.so")
        compiler = os.environ.get("CXX", "g++")
        command = [compiler, "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", str(source), "-o", library]
        subprocess.run(command, check=True)
        return library

    def copy(self, to: int, origin: int, block_bytes: int, source: Ids, destination: Ids) -> None:
        self.library.copy_blocks(
            ctypes.c_void_p(to),
            ctypes.c_void_p(origin),
            ctypes.c_uint64(block_bytes),
            ctypes.c_void_p(address_of(source)),
            ctypes.c_void_p(address_of(destination)),
            ctypes.c_uint64(len(source)),
        )

    def read(self, pid: int, to: int, origin: int, block_bytes: int, source: Ids, destination: Ids) -> None:
        failed = self.library.read_blocks(
            ctypes.c_int(pid),
            ctypes.c_void_p(to),
            ctypes.c_uint64(origin),
            ctypes.c_uint64(block_bytes),
            ctypes.c_void_p(address_of(source)),
            ctypes.c_void_p(address_of(destination)),
            ctypes.c_uint64(len(source)),
            ctypes.c_uint64(RUNS_A_CALL),
        )
        if failed:
            raise OSError(failed, "process_vm_readv")

    def move(self, verb: str, plain: socket.socket, base: int, block_bytes: int, blocks: Ids, chunk: int) -> None:
        function = self.library.send_blocks if verb == "send" else self.library.receive_blocks
        failed = function(
            ctypes.c_int(plain.fileno()),
            ctypes.c_void_p(base),
            ctypes.c_uint64(block_bytes),
            ctypes.c_void_p(address_of(blocks)),
            ctypes.c_uint64(len(blocks)),
            ctypes.c_uint64(chunk),
        )
        if failed:
            raise OSError(failed, "the plain connection broke")

    def ask(self, plain: socket.socket, rounds: int, nbytes: int, *, is_polling: bool) -> list[float]:
        took = np.zeros(rounds, np.uint64)
        counts = ctypes.c_uint64(rounds), ctypes.c_uint64(nbytes)
        failed = self.library.ask(ctypes.c_int(plain.fileno()), *counts, ctypes.c_void_p(address_of(took)), is_polling)
        if failed:
            raise OSError(failed, "a round trip of the plain connection")
        return [float(one) / 1e9 for one in took]

    def wake(self, eventfd: int, rounds: int, pause_us: int) -> list[int]:
        """Write an eventfd ``rounds`` times, from outside of Python; returns when, in ns of the monotonic clock."""
        written = np.zeros(rounds, np.uint64)
        counts = ctypes.c_uint64(rounds), ctypes.c_uint64(pause_us * 1000)
        failed = self.library.wake(ctypes.c_int(eventfd), *counts, ctypes.c_void_p(address_of(written)))
        if failed:
            raise OSError(failed, "eventfd")
        return [int(one) for one in written]

    def answer(self, plain: socket.socket, rounds: int, nbytes: int) -> None:
        self.library.answer(ctypes.c_int(plain.fileno()), ctypes.c_uint64(rounds), ctypes.c_uint64(nbytes))


class PlainSockets:
    """Blocking sockets between the two ends, one for each kind and window; the source listens."""

    def __init__(self, role: str, host: str) -> None:
        self.role = role
        self.listeners: dict[str, socket.socket] = {}
        if role == SOURCE:
            self.directory = tempfile.mkdtemp(prefix="kvx-plain-")
            self.listeners["tcp"] = socket.create_server((host, 0))
            self.listeners["unix"] = socket.socket(socket.AF_UNIX)
            self.listeners["unix"].bind(os.path.join(self.directory, "plain"))
            self.listeners["unix"].listen()
        self.far: dict[str, Any] = {}
        self.connected: dict[tuple[str, int], socket.socket] = {}

    def addresses(self) -> dict[str, Any]:
        return {kind: listener.getsockname() for kind, listener in self.listeners.items()}

    def get(self, kind: str, window: int) -> socket.socket:
        """The socket; both ends must ask for it, at about the same time."""
        if (kind, window) not in self.connected:
            if self.role == SOURCE:
                plain, _ = self.listeners[kind].accept()
            elif kind == "tcp":
                plain = socket.create_connection(tuple(self.far["tcp"]))
            else:
                plain = socket.socket(socket.AF_UNIX)
                plain.connect(self.far["unix"])
            if kind == "tcp":
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if window:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, window)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
            self.connected[kind, window] = plain
        return self.connected[kind, window]

    def close(self) -> None:
        for one in (*self.connected.values(), *self.listeners.values()):
            one.close()
        if self.role == SOURCE:
            os.unlink(os.path.join(self.directory, "plain"))
            os.rmdir(self.directory)


class Limits:
    """The limits of one end. A job's ``how``: ``{"limit": "memcpy" | "readv" | "tcp" | "unix", "window", "chunk"}``."""

    def __init__(self, role: str, host: str, library: str, address: int) -> None:
        self.role = role
        self.address = address
        self.library = LimitsLibrary(library)
        self.plain = PlainSockets(role, host)
        self.far_mapping = 0
        self.thread: threading.Thread | None = None

    def describe(self, region_fd: int | None) -> dict[str, Any]:
        return {"plain": self.plain.addresses(), "region_fd": region_fd}

    def connect(self, other: dict[str, Any], nbytes: int) -> None:
        self.far_pid: int = other["pid"]
        self.far_address: int = other["address"]
        self.plain.far = other["limits"]["plain"]
        if self.role == DESTINATION and other["limits"]["region_fd"] is not None:
            fd = os.open(f"/proc/{self.far_pid}/fd/{other['limits']['region_fd']}", os.O_RDONLY)
            self.far_view = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
            os.close(fd)
            self.far_view.madvise(mmap.MADV_HUGEPAGE)
            self.far_mapping = address_of(np.frombuffer(self.far_view, np.uint8))

    def make(self, job: Job) -> None:
        """Both ends: connect what the job needs, before any clock."""
        if job.how["limit"] in ("tcp", "unix"):
            self.plain.get(job.how["limit"], job.how["window"])

    def serve(self, job: Job) -> None:
        """The passive end of a plain socket, on a thread of its own."""
        if job.how["limit"] in ("tcp", "unix"):
            self.thread = threading.Thread(target=self._serve, args=[job], daemon=True)
            self.thread.start()

    def _serve(self, job: Job) -> None:
        plain, chunk = self.plain.get(job.how["limit"], job.how["window"]), job.how["chunk"]
        for source, destination in job.pairs:
            if job.op == "read":
                plain.recv(1)
                self.library.move("send", plain, self.address, job.block_bytes, source, chunk)
            else:
                self.library.move("receive", plain, self.address, job.block_bytes, destination, chunk)
                plain.send(b"d")

    def move(self, job: Job) -> None:
        kind = job.how["limit"]
        for source, destination in job.pairs:
            if kind == "memcpy":
                self.library.copy(self.address, self.far_mapping, job.block_bytes, source, destination)
            elif kind == "readv":
                far = self.far_address
                self.library.read(self.far_pid, self.address, far, job.block_bytes, source, destination)
            else:
                plain, chunk = self.plain.get(kind, job.how["window"]), job.how["chunk"]
                if job.op == "read":
                    plain.send(b"n")
                    self.library.move("receive", plain, self.address, job.block_bytes, destination, chunk)
                else:
                    self.library.move("send", plain, self.address, job.block_bytes, source, chunk)
                    plain.recv(1)

    def close(self) -> None:
        self.plain.close()

    def echo(self, kind: str, rounds: int, nbytes: int) -> None:
        """The far end of :meth:`round_trips`, on a thread of its own."""
        plain = self.plain.get(kind, 0)
        threading.Thread(target=self.library.answer, args=[plain, rounds, nbytes], daemon=True).start()

    def round_trip(self, kind: str, nbytes: int, *, is_polling: bool) -> float:
        """Seconds of one byte there and ``nbytes`` back on a plain socket; the asking end polls, or sleeps."""
        return self.library.ask(self.plain.get(kind, 0), 1, nbytes, is_polling=is_polling)[0]
