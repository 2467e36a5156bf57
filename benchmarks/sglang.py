"""SGLang's real connection classes over kvxfer beside the same classes over NIXL: one prefill and one decode process a
contender, memory of numpy's, turn by turn (A B, B A) in one run.

Runs SGLang's senders and receivers in `build/sglang-venv` with NIXL's wheel of `build/nixl-wheel` (`make bench-sglang`
makes both), as two schedulers would call them, without a model. Measured alike, for one request whose pages lie
scattered on both sides:

- last send: from the sender's last `send` to when the receiver's `poll` says Success;
- whole: from when both engines had the request to the same moment;
- CPU: processor time of each process in that time, all threads;
- death: prefill is killed while a receiver waits for it: until that receiver's `poll` says Failed, then how long the
  next request takes to fail. SGLang's own settings are left as they are.

Wires: `tcp` is UCX_TLS=tcp for NIXL and the lane `stream` for kvxfer, over loopback; `host` is what each chooses itself
on one host. Before each request all bytes that must arrive are set to their complement, afterwards every byte is
compared; neither is timed. While one contender has its turn the processes of the others are stopped; one that was is
woken by a request of a few pages, which does not count. A ratio is that of the medians, kvxfer's over the other's.

    benchmarks/sglang.py [--wires tcp,host] [--against nixl,drop-in] [--tokens 1900] [--pairs 12] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from measure import report

from tests.support.sglang.pair import Contender, Moved, Pair
from tests.support.sglang.ranks import make_model
from tests.support.sglang.side import Shape

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON = ROOT / "build" / "sglang-venv" / "bin" / "python"
NIXL = ROOT / "build" / "nixl-wheel"
KVXFER, THEIRS, DROP_IN = "kvxfer", "nixl", "drop-in"
NAMES = {
    KVXFER: "kvxfer",
    THEIRS: "SGLang's nixl, NIXL 1.5.1",
    DROP_IN: "SGLang's nixl, `kvxfer nixl`",
}
BARS = {"tcp": 0.5, "host": 0.8}
"""What kvxfer's last send may be of NIXL's."""
DEATH_BAR_S = 3.0
SETTLED_S = 1.5
"""Weights that are younger than a process are unknown to it, and Linux tells in whole seconds when it began."""
FIELDS = tuple(field.name for field in dataclasses.fields(Moved))


def contenders(wire: str, against: list[str], nixl_params: str) -> list[Contender]:
    """kvxfer first."""
    is_tcp = wire == "tcp"
    lanes = {"KVXFER_LANES": "stream"} if is_tcp else {}
    ucx = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"} if is_tcp else {}
    params = {"SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS": nixl_params}
    every = {
        THEIRS: Contender(THEIRS, "nixl", ucx | params, (NIXL,)),
        DROP_IN: Contender(DROP_IN, "nixl", lanes | params, (), (str(PYTHON), "-m", "kvxfer.cli", "nixl", "--")),
    }
    return [Contender(KVXFER, "kvxfer", lanes), *(every[name] for name in against)]


class Run:
    """Of one command."""

    def __init__(self, options: argparse.Namespace, directory: pathlib.Path) -> None:
        self.options, self.directory = options, directory
        pages = 2 * -(-options.tokens // options.page_tokens) + 1
        self.shape = Shape(options.layers, options.heads, options.dim, options.page_tokens, pages)
        make_model(directory / "model", **self.shape.config())
        time.sleep(SETTLED_S)
        self.moved: dict[tuple[str, str], list[Moved]] = {}
        self.deaths: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self.whys: dict[tuple[str, str], list[str]] = {}
        self.lanes: dict[tuple[str, str], list[str]] = {}

    def wire(self, wire: str) -> None:
        sizes = [len(range(at, self.options.pairs, self.options.sets)) for at in range(self.options.sets)]
        at = 0
        for size in filter(None, sizes):
            with contextlib.ExitStack() as stack:
                pairs = []
                for contender in contenders(wire, self.options.against, self.options.nixl_params):
                    pairs.append(Pair(contender, str(PYTHON), self.directory, self.shape))
                    stack.callback(pairs[-1].end)
                for pair in pairs:
                    pair.begin()
                for pair in pairs:
                    pair.move(pair.request(self.options.tokens, "first"))  # meets cold caches, makes connections
                    pair.is_awake(False)
                for turn in range(at, at + size):
                    for pair in pairs if turn % 2 else pairs[::-1]:
                        self.turn(wire, pair, turn)
                for pair in pairs if self.options.deaths else ():
                    self.death(wire, pair)
            at += size

    def turn(self, wire: str, pair: Pair, turn: int) -> None:
        pair.is_awake(True)
        try:
            pair.warm()
            moved = pair.move(pair.request(self.options.tokens, turn, self.options.chunk_pages))
        finally:
            pair.is_awake(False)
        self.moved.setdefault((wire, pair.contender.name), []).append(moved)
        print(f"{wire:5} {pair.contender.name:8} {turn:3} {moved.sent_ms:8.1f} {moved.whole_ms:8.1f} ms", flush=True)

    def death(self, wire: str, pair: Pair) -> None:
        key = wire, pair.contender.name
        pair.is_awake(True)
        pair.warm()
        self.lanes[key] = [lane for lane, count in pair.decode.ask("lanes").items() if count]
        under_way_s, why = pair.lose_prefill()
        next_s, next_why = pair.ask_the_lost()
        self.whys[key] = [why, next_why]
        self.deaths.setdefault(key, []).append((under_way_s, next_s))
        print(f"{wire:5} {pair.contender.name:8} dead {under_way_s:.2f} s, the next {next_s:.2f} s", flush=True)
        pair.end()

    def entries(self) -> list[dict[str, Any]]:
        """One for each wire and contender: medians with quartiles, and what kvxfer's are of it."""
        found = []
        for (wire, name), moved in self.moved.items():
            entry: dict[str, Any] = {"wire": wire, "contender": name, "count": len(moved)}
            ours = self.moved[wire, KVXFER]
            for field in FIELDS:
                values = [getattr(each, field) for each in moved]
                quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
                entry[field] = [round(value, 2) for value in quartiles]
                median = statistics.median(getattr(each, field) for each in ours)
                entry[f"{field}_ratio"] = round(median / statistics.median(values), 3) if name != KVXFER else None
            deaths = self.deaths.get((wire, name), [])
            entry["deaths_s"] = [round(one, 2) for one, _ in deaths]
            entry["next_s"] = [round(one, 2) for _, one in deaths]
            entry["whys"] = self.whys.get((wire, name), [])
            entry["lanes"] = self.lanes.get((wire, name), [])
            found.append(entry)
        return found


def below(entry: dict[str, Any]) -> list[str]:
    """What of an entry misses its bar."""
    found = []
    ratio, bar = entry["sent_ms_ratio"], BARS[entry["wire"]]
    if entry["contender"] == THEIRS and ratio > bar:
        found.append(f"{entry['wire']}: last send is {ratio:.2f} of NIXL's, the bar is {bar}")
    if entry["contender"] == KVXFER:
        late = [each for each in entry["deaths_s"] + entry["next_s"] if each >= DEATH_BAR_S]
        found += [f"{entry['wire']}: a dead prefill is told of after {each:.2f} s" for each in late]
    return found


def table(entries: list[dict[str, Any]]) -> str:
    lines = [
        "| wire | | last send, ms | kvxfer's of it | bar | whole, ms | kvxfer's of it | CPU, ms | a dead prefill, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        sent, whole = ("{1:.1f} ({0:.1f} to {2:.1f})".format(*entry[field]) for field in ("sent_ms", "whole_ms"))
        is_theirs, is_ours = entry["contender"] == THEIRS, entry["contender"] == KVXFER
        cells = [
            entry["wire"],
            NAMES[entry["contender"]] + (f" (`{'`, `'.join(entry['lanes'])}`)" if entry["lanes"] else ""),
            sent,
            "" if is_ours else f"{entry['sent_ms_ratio']:.2f}",
            f"{BARS[entry['wire']]}" if is_theirs else "",
            whole,
            "" if is_ours else f"{entry['whole_ms_ratio']:.2f}",
            f"{entry['prefill_cpu_ms'][1]:.0f} + {entry['decode_cpu_ms'][1]:.0f}",
            ", ".join(f"{a:.1f} then {b:.1f}" for a, b in zip(entry["deaths_s"], entry["next_s"], strict=True)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: [part for part in text.split(",") if part]  # noqa: E731
    add = parser.add_argument
    add("--wires", type=names, default=["tcp", "host"], help="of tcp, host")
    add("--against", type=names, default=[THEIRS], help="of nixl, drop-in (SGLang's nixl on `kvxfer nixl`)")
    add("--tokens", type=int, default=1900)
    add("--layers", type=int, default=12, help="with 8 KV heads of 128 in bfloat16: 48 KiB a token")
    add("--heads", type=int, default=8)
    add("--dim", type=int, default=128)
    add("--page-tokens", type=int, default=16)
    add("--chunk-pages", type=int, default=0, help="pages of one send; 0: all in one")
    add("--pairs", type=int, default=12)
    add("--sets", type=int, default=3, help="of fresh processes that the pairs are taken from")
    add("--deaths", action=argparse.BooleanOptionalAction, default=True, help="kill prefill at the end of each set")
    add("--nixl-params", default="{}", metavar="JSON", help="SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS")
    add("--json", type=pathlib.Path)
    options = parser.parse_args()
    for name, known in (("wires", BARS), ("against", (THEIRS, DROP_IN))):
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    for path in (PYTHON, *([NIXL / "nixl_cu12"] if THEIRS in options.against else [])):
        if not path.exists():
            parser.error(f"{path.relative_to(ROOT)} is not there: `make bench-sglang` makes it")
    return options


def main() -> int:
    options = parse()
    begun_s = time.monotonic()
    machine, commit = report.machine(), report.commit()
    with tempfile.TemporaryDirectory(prefix="kvx-") as name:
        directory = pathlib.Path(name)
        for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
            os.environ[variable] = str(directory / variable.lower())
            pathlib.Path(os.environ[variable]).mkdir(mode=0o700)
        run = Run(options, directory)
        for wire in options.wires:
            run.wire(wire)
    entries = run.entries()
    shape = run.shape
    print(f"\n{', '.join(f'{key} {value}' for key, value in machine.items())}; commit {commit}, {report.date()}")
    print(f"{options.tokens} tokens of {shape.token_bytes >> 10} KiB, pages of {shape.tokens} tokens;", end=" ")
    print(f"{options.pairs} pairs of {options.sets} sets of processes; {time.monotonic() - begun_s:.0f} s\n")
    print(table(entries))
    misses = [text for entry in entries for text in below(entry)]
    for text in misses:
        print(f"BELOW {text}")
    if options.json is not None:
        settings = {key: str(value) for key, value in vars(options).items()}
        whole = {"machine": machine, "commit": commit, "settings": settings, "entries": entries}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
