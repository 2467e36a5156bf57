"""A whole service that is asked for an hour while something of it breaks every 10 seconds.

Two prefill and two decode workers of a tiny model, two routers, two coordinators on three nodes of etcd: each process
is on a host of its own (a network namespace) with a disk of its own. Clients ask what they know the answers of. A seed
says which fault befalls which part. At the end a verdict: no wrong token, every failure named, no client error that
another try before the first token could have avoided, answers all the time, flat memory, descriptors and threads, no
stranded block. Exit code 1 where one rule is not met, 77 where there is no place for it.

    benchmarks/soak.py [--minutes 60] [--seed 1] [--out build/soak] [--kinds kill,stop] [--plan]

Needs Linux with namespaces (as root, or where users may make them), iproute2, and etcd. Writes run.json, soak.svg and
the processes' logs to the folder. Nothing runs on after it, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from soaking import box, judge, picture, plan
from soaking.cluster import ROLES, ROUTERS, SoakedCluster, obstacle
from soaking.faults import Faults
from soaking.load import Clients
from soaking.records import HappenedFault
from soaking.watch import Watch

from kvxfer.errors import ConfigError, KvxferError

QUESTIONS = 40
LINES = 6
MODEL = "tiny"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--minutes", type=float, default=60.0, metavar="N", help="how long clients ask (default: 60)")
    add("--seed", type=int, default=1, metavar="N", help="of the faults, the prompts and the clients (default: 1)")
    add("--out", type=pathlib.Path, default=pathlib.Path("build/soak"), metavar="DIR", help="(default: build/soak)")
    add("--kinds", default=",".join(plan.BEFALLS), metavar="A,B,...", help="faults that there may be (default: all)")
    add("--clients", type=int, default=LINES, metavar="N", help=f"clients at once (default: {LINES})")
    add("--plan", action="store_true", help="print the faults that would come, and end")
    return made


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    kinds = tuple(filter(None, options.kinds.split(",")))
    try:
        if unknown := set(kinds) - set(plan.BEFALLS):
            raise ConfigError(
                f"--kinds: there is no fault {', '.join(sorted(unknown))}; there are {', '.join(plan.BEFALLS)}"
            )
        if not 0 < options.minutes <= 60 * 24 * 7:
            raise ConfigError(f"--minutes must be above 0 and at most a week, not {options.minutes:g}")
        if options.plan:
            print(*plan.plan(options.seed, options.minutes * 60, ROLES, kinds), sep="\n")
            return 0
        if why := box.obstacle() or obstacle():
            return skip(why)
        box.enter(__file__, arguments)
        return asyncio.run(soak(options, kinds))
    except KvxferError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2


def skip(why: str) -> int:
    """Nothing can be soaked here; the file $SKIPPED, where one is named, says so to `.ci/parts`."""
    sentence = f"kvxfer: nothing was soaked: {why}"
    print(sentence, file=sys.stderr)
    if os.environ.get("SKIPPED"):
        pathlib.Path(os.environ["SKIPPED"]).write_text(sentence + "\n")
    return 77


async def soak(options: argparse.Namespace, kinds: Sequence[str]) -> int:
    from soaking.answers import questions

    from kvxfer.engine.tiny import make_tiny_model

    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        whole = box.Box(pathlib.Path(place))
        began_s = time.monotonic()
        model = make_tiny_model(whole.files / MODEL, max_position_embeddings=8192, seed=1)
        asks = questions(model, options.seed, QUESTIONS)
        print(f"{len(asks)} answers are known after {time.monotonic() - began_s:.1f} s", flush=True)
        cluster = SoakedCluster(whole, model, whole.files / "cluster-token")
        try:
            return await _run(options, kinds, cluster, Faults(cluster, whole.files), asks)
        finally:
            cluster.keep_logs(options.out / "logs")
            whole.close()


async def _run(
    options: argparse.Namespace, kinds: Sequence[str], cluster: SoakedCluster, faults: Faults, asks: Sequence[Any]
) -> int:
    began_s = time.monotonic()
    await cluster.start()
    print(f"{len(ROLES)} processes see each other after {time.monotonic() - began_s:.1f} s", flush=True)
    for kind, why in faults.left_out.items():
        print(f"no fault {kind}: {why}", flush=True)
    began_s = cluster.began_s = time.monotonic()
    clients = Clients({name: cluster.parts[name].url for name in ROUTERS}, asks, MODEL, options.seed, began_s)
    watch = Watch(cluster, began_s)
    watch.start()
    clients.start(options.clients)
    span_s = options.minutes * 60
    chosen = [kind for kind in kinds if kind in faults.kinds]
    happened: list[HappenedFault] = []
    to_come = plan.plan(options.seed, span_s, ROLES, chosen)
    for planned in to_come:
        at_s = max(planned.at_s, happened[-1].began_s + plan.EVERY_S if happened else 0.0)
        await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
        if time.monotonic() > began_s + span_s - plan.EVERY_S:
            break
        happened.append(await _happen(planned, cluster, faults, began_s, clients))
    await asyncio.sleep(max(0.0, began_s + span_s - time.monotonic()))
    await clients.stop()
    whole_s = None
    with contextlib.suppress(KvxferError):
        whole_s = round(await cluster.whole(), 2)
    held = await watch.held_when_quiet()
    await watch.stop()
    span_s = time.monotonic() - began_s
    await cluster.close()
    run = judge.Soaked(
        span_s, clients.asked, happened, list(watch.processes.values()), cluster.endings, held, watch.late,
        watch.blocks, kinds, len(to_come), faults.left_out, whole_s,
    )  # fmt: skip
    return _report(options, run)


async def _happen(
    planned: plan.PlannedFault, cluster: SoakedCluster, faults: Faults, began_s: float, clients: Clients
) -> HappenedFault:
    at_s = time.monotonic() - began_s
    named = (planned.kind, planned.victim, planned.peer, planned.amount)
    fault = HappenedFault(*named, round(at_s, 2), 0.0)
    try:
        async with faults.made(planned):
            await asyncio.sleep(planned.length_s)
        fault.ended_s = round(time.monotonic() - began_s, 2)
        fault.whole_s = round(await cluster.whole(), 2)
    except KvxferError as error:
        cluster.note(planned.victim, str(error))
        fault.ended_s = fault.ended_s or round(time.monotonic() - began_s, 2)
    failed = sum(1 for asked in clients.asked for each in asked.attempts if each.name and each.ended_s >= at_s)
    whole = "never" if fault.whole_s is None else f"{fault.whole_s:.1f} s"
    print(f"{at_s:7.1f} s  {str(planned)[11:]}; whole after {whole}; {failed} attempts failed", flush=True)
    return fault


def _report(options: argparse.Namespace, run: judge.Soaked) -> int:
    verdicts = judge.judge(run)
    is_met = all(verdict.is_met for verdict in verdicts)
    word = "met" if is_met else "NOT MET"
    title = f"{run.span_s / 60:.1f} minutes, seed {options.seed}, {len(run.faults)} faults: {word}"
    told = {
        "format": 1,
        "seed": options.seed,
        "minutes": options.minutes,
        "is_met": is_met,
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
        **dataclasses.asdict(run),
    }
    (options.out / "run.json").write_text(json.dumps(told) + "\n")
    (options.out / "soak.svg").write_text(picture.svg(run, verdicts, title, run.blocks))
    print(title)
    for verdict in verdicts:
        print(f"  {'met' if verdict.is_met else 'NOT MET':8} {verdict.rule:12} {verdict.sentence}")
    print(f"written: {options.out / 'run.json'}, {options.out / 'soak.svg'}, {options.out / 'logs'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
