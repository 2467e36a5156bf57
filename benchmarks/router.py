"""kvxfer's router beside vllm-router, sglang-router and smg, in front of the same mock engines, in one run.

Two prefill and two decode engines (`kvxfer mock-engine`) are in one process for each pace; each router is a process of
its own in front of them. The routers take turns, A B C then C B A and so on; while one has its turn the others are
stopped. A share of the turns is taken by fresh processes (`--sets`). A third process is the client: it checks every
answer against what the engines themselves answer. A wrong answer, a prompt that was not prefilled exactly once or a KV
transfer that did not happen makes the run void: exit code 1, and why.

- streams: 64 clients, 2 KB prompts, 32 tokens at 10 ms: CPU seconds of the router's processes for 1,000 requests (user
  and system, children included, from /proc), requests/s, TTFT.
- long: the same with prompts of 64 KB. unpaced: all tokens come at once; requests/s.
- unloaded: one request at a time. Median TTFT through the router less that of the same two legs sent by hand.
- memory: RSS and PSS of the fresh processes, and the anonymous memory that each of 1,000 open streams adds.

A ratio is that of the medians, kvxfer's over the best peer's. Routers run with their defaults, but for `--policy`.

    benchmarks/router.py --install                     the peers into build/routers-venv, then the whole run
    benchmarks/router.py --measures streams --pairs 12 --against vllm-router --dialects vllm
    benchmarks/router.py --check                       20 requests each: that all of it works
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import shlex
import sys
import tempfile
import time
from typing import Any

from measure import report
from routers import measures, plot, tables
from routers.contenders import CONTENDERS, DIALECTS, KVXFER, PEERS, Contender, Place, free_ports, install, missing
from routers.measures import MEASURES, Measure, Sizes
from routers.processes import Engines, Router, Void

OPEN_FILES = 16384


class Run:
    """Of one command."""

    def __init__(self, options: argparse.Namespace, directory: pathlib.Path) -> None:
        self.options, self.directory = options, directory
        self.sizes: Sizes = options.sizes
        self.turns: list[tables.Turn] = []
        self._directories = 0

    def new_directory(self) -> pathlib.Path:
        self._directories += 1
        found = self.directory / str(self._directories)
        found.mkdir()
        return found

    def dialect(self, dialect: str) -> None:
        contenders = [each for each in CONTENDERS if each.name in self.options.names and dialect in each.dialects]
        shares = [range(at, self.options.pairs, self.options.sets) for at in range(self.options.sets)]
        for number, share in enumerate(filter(None, shares)):
            for itl_ms in dict.fromkeys(each.itl_ms for each in self.options.measured):
                chosen = [each for each in self.options.measured if each.itl_ms == itl_ms]
                with contextlib.ExitStack() as stack:
                    self.set_of_processes(stack, dialect, contenders, chosen, number, list(share))

    def set_of_processes(
        self,
        stack: contextlib.ExitStack,
        dialect: str,
        contenders: list[Contender],
        chosen: list[Measure],
        number: int,
        share: list[int],
    ) -> None:
        engines = Engines(dialect, chosen[0].itl_ms, self.new_directory())
        stack.callback(engines.end)
        routers = {}
        for contender in contenders:
            router = routers[contender.name] = self.start(contender, dialect, engines)
            stack.callback(router.end)
            router.wait_ready(finds_all=self.sizes.is_whole)
            router.is_awake(False)
        for measure in chosen:
            # Only a fresh process can say what an idle one needs, so a set takes the memory once.
            for turn in share[:1] if measure.name == "memory" else share:
                for name in routers if turn % 2 == 0 else reversed(routers):
                    self.turn(
                        measure, routers[name], {"dialect": dialect, "contender": name, "set": number, "turn": turn}
                    )

    def start(self, contender: Contender, dialect: str, engines: Engines) -> Router:
        is_ours, directory = contender.name == KVXFER, self.new_directory()
        port, metrics_port = (0, 0) if is_ours else free_ports(2)
        more = shlex.split(self.options.kvxfer_args if is_ours else self.options.peer_args)
        place = Place(
            dialect, engines.prefill, engines.decode, directory, port, metrics_port, self.options.policy, tuple(more)
        )
        return Router(contender.name, contender.command(place), directory, port, engines)

    def turn(self, measure: Measure, router: Router, what: dict[str, Any]) -> None:
        router.is_awake(True)
        try:
            figures = measures.take(measure.name, router, what["dialect"], self.sizes)
        finally:
            router.is_awake(False)
        self.turns.append({**what, "measure": measure.name, "figures": figures})
        shown = ", ".join(f"{name} {value:g}" for name, value in figures.items())
        say(f"{what['dialect']:6} {measure.name:8} {what['turn']:2} {what['contender']:13} {shown}")


def say(text: str) -> None:
    """Progress; stdout has the table only."""
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: [part for part in text.split(",") if part]  # noqa: E731
    add = parser.add_argument
    add("--dialects", type=names, default=list(DIALECTS), help=f"of {', '.join(DIALECTS)}")
    add("--measures", type=names, default=[each.name for each in MEASURES], help="of those above")
    add("--against", type=names, help=f"of {', '.join(PEERS)}; empty: none; not given: all")
    add("--without-kvxfer", action="store_true", help="the peers alone")
    add("--pairs", type=int, default=6, help="turns of each router in each measure")
    add("--sets", type=int, default=3, help="of fresh processes that the turns are taken from")
    add("--policy", default="round_robin", help="the peers' placement; empty: each peer's default")
    add("--kvxfer-args", default="", metavar="ARGS", help="more flags of kvxfer's router")
    add("--peer-args", default="", metavar="ARGS", help="more flags of every peer")
    add("--check", action="store_true", help="20 requests each; peers that are not installed are left out, by name")
    add("--install", action="store_true", help="install the peers first, unless these versions are there")
    add("--index", default="", metavar="URL", help="where --install gets them: pip's --index-url")
    add("--pip-args", default="", metavar="ARGS", help="more arguments for pip")
    add("--out", type=pathlib.Path, metavar="FILE.json", help="all figures")
    add("--plot", type=pathlib.Path, metavar="FILE.svg", help="a picture of those that have bars")
    options = parser.parse_args()
    for name, known in (("dialects", DIALECTS), ("measures", [each.name for each in MEASURES]), ("against", PEERS)):
        if unknown := set(getattr(options, name) or ()) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    options.sizes = measures.CHECK if options.check else Sizes()
    if options.check:
        options.pairs = options.sets = 1
    if options.install and missing():
        install(options.index, shlex.split(options.pip_args))
    against = list(PEERS) if options.against is None else options.against
    if against and (why := missing()):
        if not options.check:
            parser.error(f"{why}, or leave them out with --against=")
        for name in against:
            print(f"left out: {name}: {why}")
        against = []
    options.names = ([] if options.without_kvxfer else [KVXFER]) + against
    if not options.names:
        parser.error("nothing is left to be measured")
    options.measured = [each for each in MEASURES if each.name in options.measures]
    return options


def head(options: argparse.Namespace, machine: dict[str, Any], commit: str, seconds: float) -> str:
    sizes: Sizes = options.sizes
    of = "of one set" if options.sets == 1 else f"of {options.sets} sets"
    return (
        f"{', '.join(f'{key} {value}' for key, value in machine.items())}; commit {commit}, {report.date()}\n"
        f"{options.pairs} turns {of} of processes; {sizes.clients} clients, {sizes.requests} requests a turn "
        f"({sizes.unpaced_requests} unpaced), {sizes.streams} open streams; {seconds:.0f} s. "
        "Medians (quartiles)"
    )


def main() -> int:
    options = parse()
    begun_s = time.monotonic()
    machine, commit = report.machine(), report.commit()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES if hard < 0 else min(OPEN_FILES, hard), hard))
    with tempfile.TemporaryDirectory(prefix="kvx-") as name:
        directory = pathlib.Path(name)
        for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
            os.environ[variable] = str(directory / variable.lower())
            pathlib.Path(os.environ[variable]).mkdir(mode=0o700)
        run = Run(options, directory)
        try:
            for dialect in options.dialects:
                run.dialect(dialect)
        except Void as why:
            print(f"VOID {why}")
            return 1
    rows = tables.rows(run.turns)
    titles = {each.name: each.title for each in CONTENDERS if each.name in options.names}
    print(f"{head(options, machine, commit, time.monotonic() - begun_s)}\n\n{tables.markdown(rows, titles)}")
    for text in tables.misses(rows) if not options.check else ():
        print(f"BELOW {text}")
    if options.out is not None:
        settings = {key: str(value) for key, value in vars(options).items()}
        whole: dict[str, Any] = {"machine": machine, "commit": commit, "date": report.date(), "settings": settings}
        whole |= {"sizes": dataclasses.asdict(options.sizes), "rows": rows, "turns": run.turns}
        options.out.write_text(json.dumps(whole, indent=1) + "\n")
    if options.plot is not None:
        options.plot.write_text(plot.svg(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
