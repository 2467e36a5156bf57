"""What checksums of memory that kvxfer did not allocate cost: they are taken of a copy that the kernel makes.

    .venv/bin/python benchmarks/owner_memory.py

Prints seconds of processor time a GB, of source and reader together (one process), so that it can be read on a machine
that others share: reads of 64 MiB of elements chosen at random out of 256 MiB, the median and the least of nine.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time

import numpy as np

from kvxfer._native import _core as native

TOTAL, MOVED = 256 << 20, 64 << 20
ROUNDS = 9
LANES = {"stream": native.Lane.STREAM, "unix": native.Lane.UNIX}
_ids = itertools.count(1)


def core_of(name: str, directory: str) -> tuple[native.AgentRef, native.Core]:
    ref = native.AgentRef(name, 1, os.urandom(16))
    core = native.Core(
        ref, native.EndpointLimits(), bind_host="127.0.0.1", bind_port=0, unix_path=os.path.join(directory, name)
    )
    core.start()
    return ref, core


def register(core: native.Core, region: int, is_foreign: bool, value: int) -> object:
    """What keeps the memory there. Of both kinds the pages are as large as the kernel likes."""
    if is_foreign:
        memory = np.full(TOTAL, value, np.uint8)
        core.add_foreign_region(native.RegionInfo(region, TOTAL), memory.ctypes.data, TOTAL, memory)
        return memory
    own = native.Region(TOTAL)
    np.frombuffer(own, np.uint8)[:] = value
    core.add_region(native.RegionInfo(region, TOTAL, is_shareable=True), own)
    return own


def measure(
    lane: str, element: int, is_checksummed: bool, is_source_foreign: bool, is_target_foreign: bool
) -> list[float]:
    key, seconds = os.urandom(32), []
    with tempfile.TemporaryDirectory() as directory:
        (one, source), (other, reader) = core_of("source", directory), core_of("reader", directory)
        reader.set_peer(one, key, tcp_host="127.0.0.1", tcp_port=source.tcp_port, unix_path=source.unix_path)
        source.set_peer(other, key, tcp_host="127.0.0.1", tcp_port=reader.tcp_port, unix_path=reader.unix_path)
        kept = [register(source, 1, is_source_foreign, 7), register(reader, 2, is_target_foreign, 1)]
        rng = np.random.default_rng(1)
        for _ in range(ROUNDS):
            order = np.asarray(rng.permutation(TOTAL // element)[: MOVED // element], np.uint32)
            to, of = (native.Ranges(np.array([[r, 0, element, element, TOTAL // element]], np.uint64)) for r in (2, 1))
            post = reader.prepare_fetch(
                one, native.Elements(to, order), native.Elements(of, order), lanes=[LANES[lane]]
            )
            begun = time.process_time()
            post.start(next(_ids).to_bytes(16, "big"), 60 * 10**9, wants_checksums=is_checksummed)
            ends: list[native.TransferFinal] = []
            while not ends:
                reader.wait(10**9)
                ends = [event for event in reader.drain() if isinstance(event, native.TransferFinal)]
            seconds.append((time.process_time() - begun) / MOVED * 1e9)
            assert ends[0].state == native.TransferState.COMMITTED, ends[0].text
        reader.close()
        source.close()
        del kept
    return sorted(seconds)


def main() -> None:
    print("| lane | elements | checksums | kvxfer's memory | the source's is another's | the reader's is | both are |")
    print("|---|---|---|---|---|---|---|")
    for lane, element, is_checksummed in itertools.product(LANES, (4096, 65536, 1 << 20), (True, False)):
        cells = []
        for is_target_foreign, is_source_foreign in itertools.product((False, True), repeat=2):
            seconds = measure(lane, element, is_checksummed, is_source_foreign, is_target_foreign)
            cells.append(f"{seconds[ROUNDS // 2]:.2f} ({seconds[0]:.2f})")
        print(f"| {lane} | {element >> 10}K | {'on' if is_checksummed else 'off'} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
