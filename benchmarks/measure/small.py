"""What is no table of speeds: latency, the cost of posting, a held GIL, idle peers.

It decides what is measured there and how often; each function returns plain figures for the report. It must never know
how they are shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from measure.contenders import (
    CMA,
    PREPARED,
    SMALL,
    STREAM,
    UNIX,
    Case,
    kvxfer,
    kvxfer_setup,
    mooncake,
    nixl,
)
from measure.ends import Pair, Setup, WorkerFailed
from measure.rows import Room

BLOCK_BYTES = 4096
WARM_ROUNDS, LATENCY_ROUNDS = 50, 500
SCATTERED, AGAIN = 100_000, 10_000
POST_ROUNDS = 7
PEER_POST_ROUNDS = 3
"""A peer moves its bytes while it posts them, which takes a second or more."""
GIL_BYTES = 64 << 20
GIL_TURNS = 3
GIL_ROUNDS = 15
GIL_BLOCK_BYTES = 64 << 10
IDLE_WATCH_S = 4.0
SETTLE_S = 20.0
SOCKET_OF = {STREAM: "tcp"}
"""The plain socket that a lane's sessions are like; all others speak over a Unix socket."""


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Microseconds."""
    ordered = sorted(seconds)
    return {"p50_us": statistics.median(ordered) * 1e6, "p99_us": ordered[len(ordered) * 99 // 100] * 1e6}


def case_of(lane: str, pages: str = SMALL, at_once: int = 1) -> Case:
    return Case(lane, "read", pages, PREPARED, at_once)


def latency(room: Room, lanes: Sequence[str], library: str, against: Sequence[str], sets: int) -> list[dict[str, Any]]:
    """One 4K block, post to completion, and a notification, in turns with the round trip of that kind of socket; by
    ``sets`` pairs of processes, one after the other."""
    found = []
    for lane in lanes:
        setup = kvxfer(case_of(lane), library)[0].setup
        kind = SOCKET_OF.get(lane, "unix")
        # A lane that carries the block itself is compared with a socket that carries as much.
        answer_bytes = BLOCK_BYTES if lane in (STREAM, UNIX) else 64
        took: dict[str, list[float]] = {}
        entry: dict[str, Any] = {"contender": f"kvxfer {lane}", "socket": kind}
        try:
            for _ in range(sets):
                pair = room.pair(setup)
                pair.both("plain", kind=kind)
                for rounds in (WARM_ROUNDS, max(1, LATENCY_ROUNDS // sets)):
                    pair.source.ask("echo", kind=kind, rounds=2 * rounds, nbytes=answer_bytes)
                    asked = {"rounds": rounds, "block_bytes": BLOCK_BYTES, "lane": lane}
                    seen = pair.destination.ask("latency", **asked, kind=kind, answer_bytes=answer_bytes)
                for name, seconds in seen.items():
                    took.setdefault(name, []).extend(seconds)
                room.clear()
        except WorkerFailed as error:
            room.clear()
            found.append({"contender": entry["contender"], "error": str(error).splitlines()[0]})
            continue
        found.append(entry | {name: quantiles(seconds) for name, seconds in took.items()})
    options = []
    if "nixl" in against:
        options += [("NIXL", nixl(case_of(CMA))), ("NIXL tcp", nixl(case_of(STREAM)))]
    if "mooncake" in against:
        options += [("Mooncake tcp", mooncake(case_of(STREAM)))]
    for name, choices in options:
        try:
            pair = room.pair(choices[0].setup)
            pair.destination.ask("latency", rounds=WARM_ROUNDS, block_bytes=BLOCK_BYTES)
            took = pair.destination.ask("latency", rounds=LATENCY_ROUNDS, block_bytes=BLOCK_BYTES)
        except WorkerFailed as error:
            found.append({"contender": name, "error": str(error).splitlines()[0]})
            continue
        found.append({"contender": name, **{key: quantiles(seconds) for key, seconds in took.items()}})
    return found


def post_cost(room: Room, lanes: Sequence[str], library: str, against: Sequence[str]) -> list[dict[str, Any]]:
    """What the posting call takes: 100,000 scattered blocks planned and posted, 10,000 prepared ones posted again."""
    asked = {"block_bytes": BLOCK_BYTES, "scattered": SCATTERED, "prepared": AGAIN, "rounds": POST_ROUNDS}
    turns: list[tuple[str, Setup, dict[str, Any]]] = []
    found: list[dict[str, Any]] = []
    for lane in lanes:
        turns.append((f"kvxfer {lane}", kvxfer(case_of(lane), library)[0].setup, {"lane": lane}))
    if "nixl" in against:
        for name, lane in (("NIXL", CMA), ("NIXL tcp", STREAM)):
            turns.append((name, nixl(case_of(lane))[0].setup, {"rounds": PEER_POST_ROUNDS}))
    if "mooncake" in against:
        turns.append(("Mooncake tcp", mooncake(case_of(STREAM))[0].setup, {"rounds": PEER_POST_ROUNDS}))
    for name, setup, more in turns:
        try:
            took = room.pair(setup).destination.ask("post_cost", **{**asked, **more})
        except WorkerFailed as error:
            found.append({"contender": name, "error": str(error).splitlines()[0]})
            continue
        found.append({"contender": name, **{key: quantiles(seconds) for key, seconds in took.items()}})
    return found


def held_gil(room: Room, lanes: Sequence[str], library: str) -> list[dict[str, Any]]:
    """Speed while the source's Python sleeps with its GIL held, over the speed while it does not; in turns."""
    found = []
    for lane in lanes:
        option = kvxfer(case_of(lane), library)[0]
        pair = room.pair(option.setup)
        pair.use(GIL_BLOCK_BYTES)
        ratios = []
        turn_s = 0.5
        for turn in range(GIL_ROUNDS):
            speed = {}
            for held in (False, True) if turn % 2 else (True, False):
                if held:
                    pair.source.ask("hold_gil", seconds=max(0.3, 1.5 * turn_s))
                    time.sleep(0.03)
                begin = time.perf_counter()
                speed[held] = statistics.median(alone(pair, dict(option.how), turn * 10 + i) for i in range(GIL_TURNS))
                turn_s = time.perf_counter() - begin
                pair.source.ask("cpu")  # answered only after the hold
            ratios.append(speed[True] / speed[False])
        found.append({"contender": f"kvxfer {lane}", "ratio": statistics.median(ratios), "ratios": ratios})
    return found


def alone(pair: Pair, how: dict[str, Any], seed: int) -> float:
    """GB/s of a read for which the source's Python is not asked for anything."""
    count = GIL_BYTES // GIL_BLOCK_BYTES
    pair.destination.ask("job", op="read", how=how, seed=seed + 1, count=count, at_once=1)
    seconds = float(pair.destination.ask("move")["seconds"])
    if not pair.destination.ask("check"):
        raise pair.destination.failure("wrong bytes while the source's GIL was held")
    return GIL_BYTES / seconds / 1e9


def idle_peers(room: Room, count: int, library: str) -> dict[str, Any]:
    """``count`` agents connected to one source and idle: processor time of both processes, with and without them."""
    pair = room.pair(kvxfer_setup(SMALL, library, shared=False))
    alone_s = watch(pair)
    contact = pair.source.ask("contact")
    others = pair.destination.ask("many", count=count, other=contact)
    pair.source.ask("admit", others=others)
    pair.destination.ask("greet", name=contact["name"])
    deadline = time.monotonic() + SETTLE_S
    while (up := pair.source.ask("sessions")) < count and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1.0)
    return {"peers": count, "sessions": up, "watched_s": IDLE_WATCH_S, "cpu": watch(pair), "cpu_before": alone_s}


def watch(pair: Pair) -> dict[str, float]:
    """CPU seconds a second of each process, while nothing is asked of it."""
    before = pair.both("cpu")
    time.sleep(IDLE_WATCH_S)
    after = pair.both("cpu")
    names = ("source", "destination")
    return {name: (b - a) / IDLE_WATCH_S for name, a, b in zip(names, before, after, strict=True)}
