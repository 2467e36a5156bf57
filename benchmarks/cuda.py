"""How fast blocks move between two processes that have them on one CUDA device, beside what the device can do.

READ of random blocks, posts prepared, in the turns of benchmarks/transfer.py (A B, then B A; a ratio is the median of
the pairs' ratios; every byte is poisoned before and compared after). Beside kvxfer, over each lane: the driver's own
copies of the same blocks out of the other process's memory, mapped by CUDA's IPC (`ucx`); a plain socket between host
memory, and the same lane between host memory (`unix`, `stream`); NIXL's wheel over UCX, where a Python is named that
has it. Copies of what lies together (D2D, D2H and H2D of pinned memory) are taken before and after each lane.

    benchmarks/cuda.py --json cuda.json
    benchmarks/cuda.py --against nixl,limits --nixl-python .venv/bin/python --nixl-module nixl_cu13
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import statistics
import sys
import time
from typing import Any

from measure import contenders
from measure import report as reports
from measure.contenders import LIMIT_NAMES, LIMITS, NIXL, PREPARED, READ, SMALL, Case, Option, parse_size, show_size
from measure.ends import Reference, Setup, Site, WorkerFailed
from measure.rows import GrowingRow, Room, Row, Turns, parts_of
from peers.limits import LimitsLibrary

CUDA = "cuda"
"""Instead of a kind of pages."""
LANES = ("ucx", "unix", "stream")
COPY_ROUNDS = 9
QUIET = (("UCX_LOG_LEVEL", "error"), ("UCX_WARN_UNUSED_ENV_VARS", "n"))


class Contenders:
    """The contenders, lane by lane."""

    def __init__(self, options: argparse.Namespace, library: str) -> None:
        self.options = options
        self.library = library
        self.setup = Setup("kvxfer", "cuda_worker", sys.executable, CUDA, (("device", options.device),))

    def ours(self, lane: str) -> Option:
        return Option(self.setup, (("lane", lane), ("lists", PREPARED), ("via", "post")), "")

    def others(self, lane: str) -> dict[str, list[Option]]:
        against, found = self.options.against.split(","), {}
        if LIMITS in against:
            found |= self.limits(lane)
        if NIXL in against and lane != "unix":
            found |= self.nixl(lane)
        return found

    def limits(self, lane: str) -> dict[str, list[Option]]:
        if lane == "ucx":
            is_device = self.options.device != "cpu"
            return {"driver's copies": [Option(self.setup, (("limit", "ipc"),), "")]} if is_device else {}
        host = Case(lane, READ, SMALL, PREPARED, 1)
        plain = LIMIT_NAMES[contenders.LIMIT_OF[lane]]
        return {
            plain: contenders.limits(host, self.library),
            f"{lane}, host memory": contenders.kvxfer(host, self.library),
        }

    def nixl(self, lane: str) -> dict[str, list[Option]]:
        if lane == "ucx":
            # By default UCX reads by cuda_ipc only where there is NVLink, and by its emulation on one GPU.
            get = (("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on"),)
            tuned = (
                ("GET by cuda_ipc", ()),
                ("GET by cuda_ipc, no progress thread", (("progress", "source"),)),
                ("GET by cuda_ipc, 2 threads", (("num_threads", 2),)),
            )
            made = [self.nixl_option(label, get, settings) for label, settings in tuned]
            return {"NIXL": [self.nixl_option("default", (), ())], "NIXL tuned": made}
        # UCX sends device memory over TCP by copies of its own.
        segments = (("UCX_TCP_TX_SEG_SIZE", "64k"), ("UCX_TCP_RX_SEG_SIZE", "64k"))
        tcp = (("UCX_TLS", "tcp,cuda_copy"), ("UCX_NET_DEVICES", "lo"))
        labels = (("tcp", tcp), ("tcp, 64K segments", (*tcp, *segments)))
        return {"NIXL tcp": [self.nixl_option(label, environment, ()) for label, environment in labels]}

    def nixl_option(self, label: str, environment: contenders.How, settings: contenders.How) -> Option:
        options = self.options
        where = (("PYTHONPATH", options.nixl_path),) if options.nixl_path else ()
        settings = (("device", options.device), ("module", options.nixl_module), *settings)
        environment = (*QUIET, *where, *environment)
        setup = Setup(NIXL, "nixl_worker", options.nixl_python, CUDA, settings, environment, label)
        return Option(setup, (("lists", PREPARED), ("pause_us", 0)), label)


class Run:
    """One run of this command."""

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.options = options
        self.begin = time.monotonic()
        self.report = reports.Report(
            machine=reports.machine(),
            command=command,
            commit=options.commit or reports.commit(),
            date=reports.date(),
            pairs=options.pairs,
            sets=options.sets,
            pool_bytes=parse_size(options.pool),
            nbytes=parse_size(options.bytes),
        )
        self.copies: dict[str, dict[str, list[float]]] = {}
        """By lane: GB/s of copies of what lies together, before and after it."""

    def measure(self) -> None:
        options, report = self.options, self.report
        reference = Reference(report.pool_bytes)
        room = Room(Site(), reference)
        library = LimitsLibrary.build() if LIMITS in options.against else ""
        parties = Contenders(options, library)
        try:
            for lane in options.lanes.split(","):
                try:
                    self.lane(lane, room, parties)
                except WorkerFailed as error:
                    print(error, flush=True)
                    report.left_out.append(f"`{lane}`: {str(error).splitlines()[0]}")
                room.clear()
        finally:
            room.clear()
            reference.close()
            if library:
                shutil.rmtree(pathlib.Path(library).parent, ignore_errors=True)
        report.seconds = time.monotonic() - self.begin

    def lane(self, lane: str, room: Room, parties: Contenders) -> None:
        options, report = self.options, self.report
        report.machine |= room.pair(parties.setup).destination.ask("gpu")
        self.copies[lane] = {}
        self.take_copies(lane, room, parties.setup)
        turns = Turns(room, Case(lane, READ, CUDA, PREPARED, 1), report.nbytes)
        first, *later = parts_of(report.pairs, report.sets)
        growing = []
        for size in map(parse_size, options.sizes.split(",")):
            if self.is_late(f"`{lane}`, blocks of {show_size(size)}"):
                break
            others = parties.others(lane)
            growing.append(GrowingRow(turns, parties.ours(lane), others, size, "one host", print))
            growing[-1].take(first)
            print(line(growing[-1].whole()), flush=True)
        for part in later:
            if self.is_late(f"`{lane}`: pairs from {part.start + 1} on"):
                break
            room.clear()
            for one in growing:
                one.take(part)
        self.take_copies(lane, room, parties.setup)
        report.rows += [one.whole() for one in growing]

    def is_late(self, what: str) -> bool:
        is_late = time.monotonic() - self.begin > self.options.budget_s
        if is_late:
            self.report.left_out.append(f"{what}: the run's {self.options.budget_s:.0f} s were over")
        return is_late

    def take_copies(self, lane: str, room: Room, setup: Setup) -> None:
        nbytes = min(self.report.nbytes, self.report.pool_bytes)
        got = room.pair(setup).destination.ask("copies", nbytes=nbytes, rounds=COPY_ROUNDS)
        for name, values in got.items():
            self.copies[lane].setdefault(name, []).extend(values)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self.report) | {"copies_gb_s": self.copies}


def line(row: Row) -> str:
    parts = [f"{row.lane:7}{show_size(row.block_bytes):>4} {row.gb_s.median:8.2f} GB/s"]
    parts += [f"{row.cpu_s_per_gb:.3f} CPU s/GB"] + ([row.error] if row.error else [])
    for one in row.others:
        label = f" ({one.settings})" if one.settings else ""
        parts.append(f"{one.name}{label} {one.error or f'{one.gb_s.median:.2f}, ratio {one.ratio.median:.2f}'}")
    return " | ".join(parts)


def table(run: Run) -> str:
    """All of it as markdown."""
    report = run.report
    lines = [" ".join(f"{key}={value}" for key, value in report.machine.items()) + f" commit={report.commit}", ""]
    for lane, copies in run.copies.items():
        medians = ", ".join(f"{name} {statistics.median(values):.1f}" for name, values in copies.items())
        rows = [row for row in report.rows if row.lane == lane]
        names = list(dict.fromkeys(one.name for row in rows for one in row.others))
        lines += [f"`{lane}`; copies of {show_size(report.nbytes)} that lie together, GB/s: {medians}", ""]
        titles = ["blocks", "kvxfer GB/s", "CPU s/GB", *(f"{name} GB/s | ratio" for name in names)]
        lines += ["| " + " | ".join(titles) + " |"]
        lines += ["|---" * (3 + 2 * len(names)) + "|"]
        for row in rows:
            cells = [show_size(row.block_bytes), row.error or f"{row.gb_s.median:.2f}", f"{row.cpu_s_per_gb:.3f}"]
            by_name = {one.name: one for one in row.others}
            for name in names:
                one = by_name.get(name)
                if one is None or one.error:
                    cells += ["failed" if one else "", ""]
                else:
                    spread = f"{one.ratio.median:.2f} ({one.ratio.low:.2f} to {one.ratio.high:.2f})"
                    cells += [f"{one.gb_s.median:.2f}", spread]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines + [f"left out: {what}" for what in report.left_out])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--lanes", default="ucx,unix,stream", help=f"of {', '.join(LANES)}")
    add("--sizes", default="4k,16k,64k,1m", help="of a block")
    add("--bytes", default="256m", help="a transfer moves so much")
    add("--pool", default="1g", help="a pool holds so much")
    add("--pairs", type=int, default=9)
    add("--sets", type=int, default=1, help="of fresh processes that a row's pairs are taken from")
    add("--device", default="cuda:0", help="as torch names it; cpu tries the benchmark, and measures nothing")
    add("--against", default=LIMITS, help="of limits, nixl; empty: none")
    add("--nixl-python", default=sys.executable, help="the Python that has NIXL's wheel, and torch")
    add("--nixl-path", default="", metavar="DIR", help="more PYTHONPATH for it")
    add("--nixl-module", default="nixl_cu12", help="the wheel's: nixl_cu12 or nixl_cu13")
    add("--budget-s", type=float, default=3600.0, help="no row begins after so long")
    add("--commit", default="", help="what the report says, where this is no checkout")
    add("--json", default="", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    if unknown := set(options.lanes.split(",")) - set(LANES):
        parser.error(f"no lane of a device's is called {', '.join(sorted(unknown))}; lanes are {', '.join(LANES)}")
    return options


def main() -> None:
    options = parse()
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    run = Run(options, shlex.join(["benchmarks/cuda.py", *sys.argv[1:]]))
    run.measure()
    print(table(run))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(run.as_dict(), indent=1) + "\n")


if __name__ == "__main__":
    main()
