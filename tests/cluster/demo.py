"""`make demo-cluster`: what docs/cluster.md does by hand, and then one part of each kind killed while requests run.

usage: python -m tests.cluster.demo [--lines 4] [--down-s 6] [--verbose]

Three coordinators on three nodes of etcd, two routers, two prefill and two decode workers; the last line is
"none failed" where no request failed, no token was wrong, and no client had to ask again but where a router died.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import pathlib
import random
import socket
import ssl
import sys
import time

from kvxfer.cli.console import Checklist, duration, table
from kvxfer.cli.serve import resolve_model
from kvxfer.errors import ConfigError, KvxferError
from tests.support import demos
from tests.support.cluster import plan
from tests.support.cluster.asking import Clients, KnownAnswer, Tally, known_answers
from tests.support.cluster.parts import ClusterParts, etcd_binary

VICTIMS = (
    ("coordinator", "c0"),
    ("etcd node", "n0"),
    ("router", "r0"),
    ("prefill worker", "p0"),
    ("decode worker", "d0"),
)
BETWEEN = 10
"""So many requests end before each fault, and at least as many within it."""
UNCHOSEN = range(10_000, 32_000)
"""Ports that Linux gives to no connection: a part's port stays free while the part is down."""


@dataclasses.dataclass(frozen=True)
class FaultRow:
    """``down_s``: from the kill until the part was up again; ``whole_s``: from then until the whole was whole."""

    kind: str
    name: str
    tally: Tally
    down_s: float
    whole_s: float


def free_ports(count: int) -> list[int]:
    """Raises ConfigError where there are not so many."""
    found: list[int] = []
    for port in random.sample(UNCHOSEN, len(UNCHOSEN)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise ConfigError(f"of the ports {UNCHOSEN.start} to {UNCHOSEN.stop} on 127.0.0.1 {count} must be free")


async def demo(folder: pathlib.Path, lines: int, down_s: float) -> bool:
    model = await resolve_model("tiny")
    made = plan.ClusterPlan(plan.Ports.of(free_ports(plan.PORTS)), str(folder))
    names = [*plan.ETCD, *plan.SERVICES]
    print("Making two CAs and a certificate for each process.", flush=True)
    what = "three etcd nodes, three coordinators, four workers and two routers"
    async with ClusterParts(made, folder) as parts:
        parts.issue()
        known = asyncio.create_task(asyncio.to_thread(known_answers, model))
        print(f"Starting {what}, each its own process:\n", flush=True)
        parts.on_ready = Checklist(names).set
        await parts.start()
        parts.on_ready = lambda name, how: None
        rows, whole = await hurt(parts, await known, lines, down_s)
    return verdict(rows, whole, parts.lost)


async def hurt(
    parts: ClusterParts, known: list[KnownAnswer], lines: int, down_s: float
) -> tuple[list[FaultRow], Tally]:
    """Kill one of each kind while requests run; the rows of the table, and what became of all requests."""
    routers = [f"https://{parts.plan.address(name)}" for name in plan.ROUTERS]
    context = ssl.create_default_context(cafile=parts.plan.ca_file)
    print(f"\nRequests run through {' and '.join(routers)}.\n", flush=True)
    rows = []
    async with Clients(routers, context, known, lines) as clients:
        await clients.some(BETWEEN)
        for kind, name in VICTIMS:
            tally, began_s = clients.begin(), time.monotonic()
            print(f"  kill -9 {kind} {name} ...", end="", flush=True)
            await parts.kill(name)
            await clients.some(BETWEEN, at_least_s=down_s)
            await parts.begin(name)
            up_s = time.monotonic()
            whole_s = await parts.whole()
            await clients.some(BETWEEN)
            clients.begin()
            rows.append(FaultRow(kind, name, tally, up_s - began_s, whole_s))
            print(f" started again, and whole: {tally.done} requests", flush=True)
    for reason, count in clients.retry_reasons.items():
        print(f"  {count} asked again: {reason}", flush=True)
    return rows, clients.whole


def shown(rows: list[FaultRow]) -> str:
    """The table."""
    head = ["killed", "requests", "failed", "retried", "wrong tokens", "was down", "whole again after"]
    return table([head, *map(_cells, rows)])


def _cells(row: FaultRow) -> list[str]:
    tally = row.tally
    counts = map(str, (tally.done, len(tally.failed), tally.retried, tally.wrong))
    return [f"{row.kind} {row.name}", *counts, duration(row.down_s), duration(row.whole_s)]


def verdict(rows: list[FaultRow], whole: Tally, lost: list[str]) -> bool:
    """Print the table and the last line; whether all is well."""
    print(
        f"\n{shown(rows)}\n\n{whole.done} requests in all, {whole.remote} with a prompt from a prefill worker.",
        flush=True,
    )
    for sentence in (*dict.fromkeys(whole.failed), *lost):
        print(f"  {sentence}", flush=True)
    if whole.failed or whole.wrong or lost:
        print(f"{len(whole.failed)} requests failed, {whole.wrong} answers were wrong", flush=True)
        return False
    if asked_again := sum(row.tally.retried for row in rows if row.kind != "router"):
        print(f"{asked_again} requests were asked again although no router was killed", flush=True)
        return False
    if not whole.remote or not all(row.tally.done for row in rows):
        print("no request ran, or no prefill worker had a part in one, so nothing was shown", flush=True)
        return False
    print("none failed", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser("demo-cluster", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lines", type=demos.count(1, 64), default=4, help="requests at once (4)")
    parser.add_argument("--down-s", type=demos.count(0, 600), default=6, help="least seconds that a part is down (6)")
    parser.add_argument("--verbose", action="store_true", help="show what the processes logged")
    options = parser.parse_args()
    try:
        etcd_binary()
    except KvxferError as error:
        print(f"demo-cluster: {error}", file=sys.stderr)
        return 2

    async def work(directory: pathlib.Path) -> bool:
        return await demo(directory, options.lines, options.down_s)

    return demos.run("demo-cluster", work, is_verbose=options.verbose)


if __name__ == "__main__":
    sys.exit(main())
