"""How fast blocks move between two processes, beside what the machine can do and what others do.

Each contender has two processes, the source and the destination; all have pools of the same size on the same kind of
pages and are given the same lists of blocks. Before each transfer every byte that must arrive is set to its complement,
and afterwards every byte is compared (neither is timed). kvxfer and one other take turns, A B then B A; a share of the
turns is taken by a set of processes of its own each, because which pages a process gets decides about its speed too.

    benchmarks/transfer.py --lanes stream --sizes 4k,64k,1m --against nixl,mooncake,limits
    benchmarks/transfer.py --table            everything in benchmarks/RESULTS.md, which it writes (an hour at most)
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from measure import checksums, directions, small, stages, stripes, tables
from measure import report as reports
from measure.contenders import (
    HUGE,
    LIMITS,
    MAPPED,
    MOONCAKE,
    NIXL,
    ONE_SHOT,
    PREPARED,
    kvxfer,
    missing_peers,
    opponents,
    parse_size,
    peers_python,
    show_size,
)
from measure.ends import HERE, Reference, Site, WorkerFailed
from measure.rows import GrowingRow, Room, Turns, parts_of
from measure.sites import consent_to_shared_huge, netns_obstacle, shared_huge_obstacle, two_namespaces
from measure.stages import NAMESPACES, ONE_HOST, Stage
from peers.limits import LimitsLibrary

from kvxfer.config import COPY_THREADS_MAX

RESULTS = HERE / "RESULTS.md"
PLOT = HERE.parent / "docs" / "benchmarks" / "throughput.png"
POST_POOL_BYTES = 512 << 20
"""Holds 100,000 blocks of 4K."""


class Run:
    """One run of this command."""

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.options = options
        self.begin = time.monotonic()
        self.against = [name for name in options.against.split(",") if name]
        self.library = LimitsLibrary.build()
        self.report = reports.Report(
            machine=reports.machine(),
            command=command,
            commit=reports.commit(),
            date=reports.date(),
            pairs=options.pairs,
            sets=len(parts_of(options.pairs, options.sets)),
            pool_bytes=parse_size(options.pool),
            nbytes=parse_size(options.bytes),
        )

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.begin

    def leave_out(self, what: str, why: str) -> None:
        self.report.left_out.append(f"{what}: {why}")
        print(f"left out: {what}: {why}", flush=True)

    def measure(self, wanted: Sequence[Stage]) -> None:
        """Take the stages in order; neighbours that share processes share them."""
        reference = Reference(self.report.pool_bytes)
        try:
            for (site, lane, pages), group in itertools.groupby(
                wanted, lambda one: (one.site, one.case.lane, one.case.pages)
            ):
                with contextlib.ExitStack() as stack:
                    obstacle = self.prepare(stack, site, lane, pages)
                    if isinstance(obstacle, str):
                        self.leave_out(f"`{lane}`, {pages} pages, {site}", obstacle)
                        continue
                    room = Room(obstacle, reference)
                    stack.callback(room.clear)
                    for stage in group:
                        self.rows(room, stage)
        finally:
            reference.close()

    def prepare(self, stack: contextlib.ExitStack, site: str, lane: str, pages: str) -> Site | str:
        """The site, or why there is none."""
        if lane == MAPPED and pages == HUGE:
            if why := shared_huge_obstacle():
                return why
            stack.enter_context(consent_to_shared_huge())
        return self.place(stack, site)

    @staticmethod
    def place(stack: contextlib.ExitStack, site: str) -> Site | str:
        if site != NAMESPACES:
            return Site()
        return netns_obstacle() or stack.enter_context(two_namespaces())

    def rows(self, room: Room, stage: Stage) -> None:
        case = stage.case
        turns = Turns(room, case, self.report.nbytes)
        others = opponents(case, self.against, self.library)
        ours = kvxfer(case, self.library, stage.via)[0]
        growing: list[GrowingRow] = []
        what = f"`{case.lane}` {case.op} {case.pages} {stage.site} x{case.at_once} {case.lists} {stage.via}"
        threads = tables.how_many(case.lane, case.copy_threads)
        what += f", {threads}" if threads else ""
        first, *later = parts_of(self.report.pairs * stage.rounds, self.report.sets * stage.rounds)
        for i, size in enumerate(stage.sizes):
            if self.elapsed_s > self.options.budget_s:
                sizes = ", ".join(show_size(one) for one in stage.sizes[i:])
                self.leave_out(f"{what}, blocks of {sizes}", f"the run's {self.options.budget_s:.0f} s were over")
                break
            growing.append(GrowingRow(turns, ours, others, size, stage.site, lambda text: print(text, flush=True)))
            growing[-1].take(first)
        for part in later if growing else ():
            if self.elapsed_s > self.options.budget_s:
                self.leave_out(what, f"of {sum(map(len, later))} more pairs, those from {part.start + 1} on")
                break
            room.clear()
            for one in growing:
                one.take(part)
        for row in (one.whole() for one in growing):
            self.report.rows.append(row)
            print(f"{self.elapsed_s:5.0f}s  {tables.line(row)}", flush=True)

    def small(self, what: str, do: Callable[[Room], Any], pool_bytes: int, at: str = ONE_HOST) -> Any:
        """One of the small measurements in a room of its own."""
        with contextlib.ExitStack() as stack:
            site = self.place(stack, at)
            if isinstance(site, str):
                self.leave_out(f"{what}, {at}", site)
                return None
            return self.small_at(site, what, do, pool_bytes)

    def small_at(self, site: Site, what: str, do: Callable[[Room], Any], pool_bytes: int) -> Any:
        reference = Reference(pool_bytes)
        room = Room(site, reference)
        try:
            found = do(room)
            print(f"{self.elapsed_s:5.0f}s  {what}: {found}", flush=True)
            return found
        except WorkerFailed as error:
            print(error, flush=True)
            self.leave_out(what, str(error).splitlines()[0])
            return None
        finally:
            room.clear()
            reference.close()

    def at_both_sites(self, what: str, compare: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """What is compared in turns on `stream`, on one host and in two namespaces."""
        report, rows = self.report, []
        for at in (ONE_HOST, NAMESPACES):
            take = functools.partial(compare, site=at, library=self.library, nbytes=report.nbytes, pairs=report.pairs)
            rows += self.small(what, take, report.pool_bytes, at) or []
        return rows

    def smalls(self) -> None:
        options, report, library, against = self.options, self.report, self.library, self.against
        lanes = options.small_lanes.split(",")
        pool = report.pool_bytes
        if options.directions:
            report.directions = self.at_both_sites("directions", directions.compare)
        if options.stripes:
            report.stripes = self.at_both_sites("stripes", stripes.compare)
        if options.checksums:
            report.checksums = self.at_both_sites("checksums", checksums.cost)
        if options.latency:
            report.latency = (
                self.small("latency", lambda room: small.latency(room, lanes, library, against, report.sets), pool)
                or []
            )
        if options.post_cost:
            report.post_cost = (
                self.small("post cost", lambda room: small.post_cost(room, lanes, library, against), POST_POOL_BYTES)
                or []
            )
        if options.held_gil:
            report.held_gil = self.small("held GIL", lambda room: small.held_gil(room, lanes, library), pool) or []
        if options.idle_peers:
            report.idle_peers = (
                self.small("idle peers", lambda room: small.idle_peers(room, options.idle_peers, library), 64 << 20)
                or {}
            )

    def write(self) -> None:
        self.report.seconds = self.elapsed_s
        if self.options.json:
            self.report.write(pathlib.Path(self.options.json))
        if self.options.table:
            write_table(self.report, pathlib.Path(self.options.results))
        if self.options.plot:
            plot(pathlib.Path(self.options.json), pathlib.Path(self.options.plot))

    def close(self) -> None:
        shutil.rmtree(pathlib.Path(self.library).parent, ignore_errors=True)


def write_table(report: reports.Report, path: pathlib.Path) -> None:
    path.write_text(tables.markdown(report))
    print(f"wrote {path}")


def plot(figures: pathlib.Path, picture: pathlib.Path) -> None:
    """Draw with the peers' Python, which has matplotlib."""
    if why := missing_peers():
        print(f"no plot: {why}")
        return
    picture.parent.mkdir(parents=True, exist_ok=True)
    command = [peers_python(), "-m", "measure.plot", str(figures.resolve()), str(picture.resolve())]
    subprocess.run(command, check=True, cwd=HERE)
    print(f"wrote {picture}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--table", action="store_true", help="measure all of benchmarks/RESULTS.md and write it")
    add("--rewrite", action="store_true", help="write the table (and the plot) anew from --json")
    add("--results", default="", metavar="FILE.md", help="another machine's table: there, not to benchmarks/RESULTS.md")
    add("--against", help="of nixl, mooncake, limits; empty: none; not given: all that are here")
    add("--lanes", default="mapped,cma,stream", help="of mapped, cma, stream, unix, ucx")
    add("--sizes", default="4k,16k,64k,256k,1m,4m", help="of a block")
    add("--bytes", default="64m", help="a transfer moves so much")
    add("--pool", default="256m", help="a pool holds so much")
    add("--pairs", type=int, default=9)
    add("--sets", type=int, default=3, help="of fresh processes that a row's pairs are taken from")
    add("--pages", default="4k", help="of 4k, huge")
    add("--direction", default="read", help="of read, write")
    add("--at-once", default="1", help="how many transfers are posted together: 1,8,64")
    add("--copy-threads", type=int, default=0, help="of kvxfer's reader, on mapped and cma; 0: as processors are idle")
    add("--progress", default="thread", choices=("thread", "caller"), help="which threads of kvxfer move bytes")
    add("--via", default="post", help="of post (descriptors), pull (a pull under a grant)")
    add("--prepared", dest="lists", action="append_const", const=PREPARED, help="lists made before the clock starts")
    add("--one-shot", dest="lists", action="append_const", const=ONE_SHOT, help="lists given while the clock runs")
    add("--netns", action="store_true", help="the ends in two network namespaces, made for this (root only)")
    add("--directions", action="store_true", help="READ and WRITE on stream in turns, here and in two namespaces")
    add("--stripes", action="store_true", help="stream over 1, 2, 4 connections in turns, here and in two namespaces")
    add("--latency", action="store_true", help="one 4K block, and a notification")
    add("--checksums", action="store_true", help="what they cost on stream, here and in two namespaces")
    add("--post-cost", action="store_true", help="of the posting call")
    add("--held-gil", action="store_true", help="speed while the source's Python holds its GIL")
    add("--idle-peers", type=int, default=0, metavar="N", help="processor time of N idle sessions")
    add("--fairness", action="store_true", help="64 transfers at once, slowest over median (as --at-once 64)")
    add("--only-small", action="store_true", help="none of the tables of speeds")
    add("--small-lanes", default="mapped,cma,unix,stream", help="the lanes of --latency, --post-cost and --held-gil")
    add("--budget-s", type=float, default=3600.0, help="no row begins after so long, and no set of processes")
    add("--json", default="", metavar="FILE", help="write the figures there")
    add("--plot", default="", metavar="FILE.png", help="draw them there")
    options = parser.parse_args()
    options.lists = options.lists or [PREPARED]
    if options.fairness:
        options.at_once = "64"
    if options.table:
        options.latency = options.post_cost = options.held_gil = True
        options.checksums = options.directions = options.stripes = True
        options.idle_peers = options.idle_peers or 256
    # Figures and picture lie with the table that they are of. README speaks of the one that has no name of its own.
    if (options.table or options.rewrite) and not options.results:
        options.results, options.plot = str(RESULTS), options.plot or str(PLOT)
        options.json = options.json or str(HERE / "results.json")
    if beside := options.results or options.plot:
        options.json = options.json or str(pathlib.Path(beside).with_suffix(".json"))
    if not 0 <= options.copy_threads <= COPY_THREADS_MAX:
        parser.error(f"--copy-threads is 1 to {COPY_THREADS_MAX}, or 0: as kvxfer chooses")
    if options.netns and (why := netns_obstacle()):
        parser.error(why)
    if options.against is None:
        options.against = LIMITS if missing_peers() and not options.table else f"{NIXL},{MOONCAKE},{LIMITS}"
    if {NIXL, MOONCAKE} & set(options.against.split(",")) and not options.rewrite and (why := missing_peers()):
        parser.error(f"{why}, or leave them out with --against limits")
    return options


def main() -> None:
    options = parse()
    if options.rewrite:
        figures = pathlib.Path(options.json)
        write_table(reports.Report.read(figures), pathlib.Path(options.results))
        return plot(figures, pathlib.Path(options.plot)) if options.plot else None
    # Ended from outside, it still takes away what it made: processes, namespaces, a host setting.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command = shlex.join(["benchmarks/transfer.py", *sys.argv[1:]])
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    os.environ["KVXFER_BENCH_PROGRESS"] = options.progress
    run = Run(options, command)
    print(" ".join(f"{key}={value}" for key, value in run.report.machine.items()), f"commit={run.report.commit}")
    try:
        if options.table:
            run.smalls()
        if not options.only_small:
            run.measure(stages.table() if options.table else list(stages.asked(options)))
        if not options.table:
            run.smalls()
        run.write()
    finally:
        run.close()


if __name__ == "__main__":
    main()
