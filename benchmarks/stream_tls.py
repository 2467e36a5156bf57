"""What encryption costs lane ``stream``: beside a plain TLS socket of the same cipher and record size, and beside the
lane without it. All take turns, so that a busy machine slows each of them; the ratios are of medians.

    .venv/bin/python benchmarks/stream_tls.py [--rounds=9] [--mib=256] [--json=FILE]

The socket is ``tls_limit.cpp``, which this builds with the host's C++ compiler and links to its libssl.so.3. Every
contender moves as many bytes out of one memory into another of that size, over loopback, on one connection; kvxfer
moves blocks in random order. Exits with 1 if the encrypted lane is below 0.9 of the socket at its largest blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import select
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from kvxfer._native import _core as native

BAR = 0.9
BLOCKS_BYTES = (4096, 65536, 1 << 20)
HERE = pathlib.Path(__file__).parent


class TlsSocket:
    """The plain TLS socket."""

    def __init__(self, directory: str, nbytes: int) -> None:
        self.program = os.path.join(directory, "tls_limit")
        self.nbytes = nbytes
        libraries = ["-l:libssl.so.3", "-l:libcrypto.so.3"]
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, "-O2", "-o", self.program, str(HERE / "tls_limit.cpp"), *libraries], check=True)

    def measure(self) -> float:
        """GB/s; the second of two rounds, as kvxfer is warm too."""
        done = subprocess.run([self.program, str(self.nbytes), "2"], check=True, capture_output=True, text=True)
        return float(done.stdout.split()[-1])


class StreamPair:
    """Two cores of this process, and a connection between them."""

    def __init__(self, encrypt: str, block_bytes: int, nbytes: int) -> None:
        self.nbytes, self.count = nbytes, nbytes // block_bytes
        self.rng = np.random.default_rng(1)
        refs = [native.AgentRef(name, 1, os.urandom(16)) for name in ("source", "reader")]
        self.source, self.reader = (
            native.Core(ref, native.EndpointLimits(), bind_host="127.0.0.1", bind_port=0, unix_path="", encrypt=encrypt)
            for ref in refs
        )
        key = os.urandom(32)
        for core in (self.source, self.reader):
            core.start()
        for core, ref, peer in ((self.reader, refs[0], self.source), (self.source, refs[1], self.reader)):
            core.set_peer(ref, key, tcp_host="127.0.0.1", tcp_port=peer.tcp_port, unix_path="")
        self.memory = []
        for core, value in ((self.source, 1), (self.reader, 2)):
            region = native.Region(nbytes)
            np.frombuffer(region, np.uint8)[:] = value
            # Not exposed: the plain lane copies too, as it does between hosts.
            core.add_region(native.RegionInfo(1, nbytes, is_exposed=False), region)
            self.memory.append(region)
        self.ranges = native.Ranges(np.array([[1, 0, block_bytes, block_bytes, self.count]], np.uint64))
        self.peer = refs[0]
        self.measure()

    def measure(self) -> float:
        """GB/s of one read of everything."""
        lists = (native.Elements(self.ranges, self.rng.permutation(self.count).astype(np.uint32)) for _ in range(2))
        post = self.reader.prepare_fetch(self.peer, *lists, lanes=[native.Lane.STREAM])
        began = time.perf_counter()
        post.start(os.urandom(16), 120 * 10**9)
        while True:
            for event in self.reader.drain():
                if isinstance(event, native.TransferFinal):
                    assert event.state == native.TransferState.COMMITTED, event.text
                    return self.nbytes / (time.perf_counter() - began) / 1e9
            select.select([self.reader.fileno()], [], [], 1.0)

    def close(self) -> None:
        self.reader.close()
        self.source.close()


def compare(socket: TlsSocket, block_bytes: int, nbytes: int, rounds: int) -> dict[str, object]:
    """Every figure of one size of blocks, and its medians."""
    encrypted, plain = (StreamPair(mode, block_bytes, nbytes) for mode in ("always", "never"))
    figures: dict[str, list[float]] = {"socket": [], "encrypted": [], "plain": []}
    for _ in range(rounds):
        figures["socket"].append(socket.measure())
        figures["encrypted"].append(encrypted.measure())
        figures["plain"].append(plain.measure())
    assert encrypted.reader.statistics().sessions_tls == 1
    for lane in (encrypted, plain):
        lane.close()
    medians = {name: statistics.median(values) for name, values in figures.items()}
    return {
        "block_bytes": block_bytes,
        "gb_per_s": medians,
        "of_socket": medians["encrypted"] / medians["socket"],
        "of_plain": medians["encrypted"] / medians["plain"],
        "all_gb_per_s": figures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        socket = TlsSocket(directory, args.mib << 20)
        rows = [compare(socket, size, args.mib << 20, args.rounds) for size in BLOCKS_BYTES]
    print(f"OpenSSL: {native.openssl_version()}; TLS_AES_128_GCM_SHA256, records of 16 KiB; medians of {args.rounds}")
    print(f"{'block bytes':>12} {'socket':>8} {'encrypted':>10} {'plain':>8}   GB/s     of socket  of plain")
    for row in rows:
        medians = row["gb_per_s"]
        print(
            f"{row['block_bytes']:>12} {medians['socket']:>8.2f} {medians['encrypted']:>10.2f} {medians['plain']:>8.2f}"
            f"            {row['of_socket']:>9.2f} {row['of_plain']:>9.2f}"
        )
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1))
    return int(rows[-1]["of_socket"] < BAR)


if __name__ == "__main__":
    sys.exit(main())
