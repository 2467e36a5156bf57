"""What one coordinator costs at scale: processor time a heartbeat, bytes, memory, and how soon all agents are in.

The coordinator is a process of its own, pinned to one CPU. The agents are real sessions with a connection each, in
processes on the other CPUs; each tells a new load with every heartbeat. A watcher stands for a router. In this order:
all agents join; heartbeats alone for SECONDS; twenty agents come and go; heartbeats again, while a watcher hears all
loads; the coordinator is killed, starts anew with nothing, and all agents come back at once. Exit code 1 where one
agent did not join, was declared gone, lost its connection or did not come back, where the new coordinator did not
settle, or where a bar of processor time is missed: 150 us a heartbeat, 200 us with a watcher.

    benchmarks/coordinator_scale.py [--agents 10000] [--seconds 60] [--herds 2] [--peers 4] [--bar-us 150]
        [--watched-bar-us 200] [--flag=--x=y] [--only-heartbeats] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from control.herd import session
from control.tap import Tap

from kvxfer import open_files
from kvxfer.rpc import CoordinatorSession, MembershipWatch, load_or_create_token

BAR_US, WATCHED_BAR_US = 150.0, 200.0
COMINGS, OTHER_COMINGS = 20, 1
"""Agents that come and go on purpose: those whose bytes are counted, and the one behind a tap."""
ENDED = "kvxfer_coordinator_incarnations_ended_total"
TICKS_A_S = os.sysconf("SC_CLK_TCK")
HERE = pathlib.Path(__file__).parent
SPARE_FILES = 512


class Pinned:
    """A process on given CPUs that talks JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, cpus: set[int], *words: str) -> Pinned:
        process = await asyncio.create_subprocess_exec(
            "taskset",
            "--cpu-list",
            ",".join(map(str, sorted(cpus))),
            sys.executable,
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent)))},
        )
        return cls(process)

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(await self.process.stdout.readline()))

    async def ask(self, word: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())
        return await self.answer()

    def cpu_s(self) -> float:
        """User and system time of all its threads."""
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_A_S

    def resident(self) -> int:
        """Bytes."""
        lines = pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@dataclasses.dataclass
class Bench:
    """One run."""

    args: argparse.Namespace
    token_file: str
    cpus: list[int]
    port: int = 0
    found: dict[str, Any] = dataclasses.field(default_factory=dict)

    async def coordinator(self) -> Pinned:
        words = ["-m", "kvxfer.cli", "coordinator", f"--port={self.port}", f"--token-file={self.token_file}"]
        words += [f"--members-max={2 * self.args.agents}", "--metrics-port=0", "--log-level=error"]
        started = await Pinned.start({self.cpus[0]}, *words, f"--exit-with-parent={os.getpid()}", *self.args.flag)
        ready = await started.answer()
        self.port = int(ready["address"].rpartition(":")[2])
        self.metrics = f"{ready['http_url']}/metrics"
        return started

    def metric(self, name: str) -> float:
        """The sum of a metric's series. Raises KeyError where there is no metric of this name."""
        with urllib.request.urlopen(self.metrics, timeout=30) as answer:
            return sum_of(answer.read().decode(), name)

    def note(self, text: str) -> None:
        print(f"{text}: {json.dumps(self.found)[-400:]}", file=sys.stderr, flush=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def herds(self) -> list[Pinned]:
        cpus = set(self.cpus[1:]) or set(self.cpus)
        each = -(-self.args.agents // self.args.herds)
        words = ("-m", "control.herd", self.address, self.token_file)
        counts = [min(each, self.args.agents - first) for first in range(0, self.args.agents, each)]
        return [
            await Pinned.start(cpus, *words, str(number * each), str(count), str(self.args.peers))
            for number, count in enumerate(counts)
        ]

    async def run(self) -> dict[str, Any]:
        coordinator = await self.coordinator()
        herds = await self.herds()
        found = self.found
        try:
            empty = coordinator.resident()
            cpu_s, started_s = coordinator.cpu_s(), time.monotonic()
            joined = await asyncio.gather(*(herd.ask("join") for herd in herds))
            found["joined"] = sum(each["joined"] for each in joined)
            found["join_s"] = round(time.monotonic() - started_s, 1)
            found["join_cpu_us_an_agent"] = round((coordinator.cpu_s() - cpu_s) / self.args.agents * 1e6)
            self.note("so far")
            await asyncio.gather(*(herd.ask("ask") for herd in herds))
            await self._settle(herds)
            found["resident_kib_an_agent"] = round((coordinator.resident() - empty) / self.args.agents / 1024, 1)
            found["heartbeats"] = await self._beat(coordinator, herds)
            self.note("so far")
            if self.args.only_heartbeats:
                return found
            await self._bytes(coordinator, herds)
            coordinator = await self._restart(coordinator, herds)
            found["resident_kib_an_agent_after_restart"] = round(
                (coordinator.resident() - empty) / self.args.agents / 1024, 1
            )
        finally:
            for process in (*herds, coordinator):
                await process.end()
        return found

    async def _settle(self, herds: list[Pinned]) -> None:
        """Let the first round of heartbeats at the new interval pass."""
        await asyncio.sleep(max(5.0, 2 * self.interval_s()))

    def interval_s(self) -> float:
        return self.metric("kvxfer_coordinator_heartbeat_interval_seconds") or 1.0

    async def _counts(self, herds: list[Pinned]) -> dict[str, float]:
        answers = await asyncio.gather(*(herd.ask("statistics") for herd in herds))
        return {name: sum(answer[name] for answer in answers) for name in answers[0]}

    async def _beat(self, coordinator: Pinned, herds: list[Pinned]) -> dict[str, Any]:
        """Heartbeats for SECONDS, each with a new load."""
        before, cpu_s, started_s = await self._counts(herds), coordinator.cpu_s(), time.monotonic()
        while time.monotonic() - started_s < self.args.seconds:
            await asyncio.gather(*(herd.ask("vary") for herd in herds))
            await asyncio.sleep(1.0)
        after, spent_s, wall_s = (
            await self._counts(herds),
            coordinator.cpu_s() - cpu_s,
            time.monotonic() - started_s,
        )
        beats = after["heartbeats"] - before["heartbeats"]
        return {
            "count": round(beats),
            "a_second": round(beats / wall_s, 1),
            "interval_s": self.interval_s(),
            "cpu_us_each": round(spent_s / max(beats, 1) * 1e6, 1),
            "cpu_share": round(spent_s / wall_s, 3),
            "agents_cpu_us_each": round((after["cpu_s"] - before["cpu_s"]) / max(beats, 1) * 1e6, 1),
            "lost_connections": round(after["losses"] - before["losses"]),
            "members_known_by_an_agent": round(after["members_known"] / len(herds), 1),
        }

    async def _bytes(self, coordinator: Pinned, herds: list[Pinned]) -> None:
        """Through a tap each: one agent, one watcher of nothing but structure, and the watchers that hear all loads."""
        token = load_or_create_token(self.token_file)
        agent_tap, watch_tap = await Tap(self.address).start(), await Tap(self.address).start()
        agent = session(agent_tap.address, token, 1 << 20, on_membership=lambda view: None)
        await agent.start()
        gone: list[Any] = []
        heard = [0]

        def on_membership(view: Any) -> None:
            heard[0] += 1
            gone.extend(view.gone)

        async with MembershipWatch(watch_tap.address, token, on_membership=on_membership) as watch:
            await watch.wait_connected()
            self.found["snapshot_bytes_a_member"] = round(watch_tap.down / (self.args.agents + 1))
            await self._settle(herds)
            up, down, beats = agent_tap.up, agent_tap.down, agent.heartbeats
            await asyncio.sleep(max(self.args.seconds / 2, 4 * self.interval_s()))
            beats = max(agent.heartbeats - beats, 1)
            self.found["bytes_a_heartbeat"] = {
                "up": round((agent_tap.up - up) / beats),
                "down": round((agent_tap.down - down) / beats),
            }
            await self._changes(token, watch_tap, agent_tap, agent)
            self.found["with_a_watcher"] = await self._watched(coordinator, herds, watch_tap)
            self.found["gone_heard_by_the_watcher"] = len(gone) - COMINGS
        await agent.close()
        for tap in (agent_tap, watch_tap):
            tap.close()

    async def _changes(self, token: bytes, watch_tap: Tap, agent_tap: Tap, agent: CoordinatorSession) -> None:
        """Agents come and go; bytes of each coming and each going at a watcher and at an agent."""
        await asyncio.sleep(2 * self.interval_s())
        idle_down, started_s = watch_tap.down, time.monotonic()
        await asyncio.sleep(max(5.0, 2 * self.interval_s()))
        idle_a_s = (watch_tap.down - idle_down) / (time.monotonic() - started_s)
        agent_down, beats = agent_tap.down, agent.heartbeats
        down, started_s = watch_tap.down, time.monotonic()
        for number in range(COMINGS):
            come = session(self.address, token, (2 << 20) + number, on_membership=lambda view: None)
            await come.start()
            await asyncio.sleep(0.1)
            await come.close()
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.5 * self.interval_s())
        idle = idle_a_s * (time.monotonic() - started_s)
        own = self.found["bytes_a_heartbeat"]["down"] * (agent.heartbeats - beats)
        self.found["bytes_a_coming_and_going"] = {
            "watcher": round((watch_tap.down - down - idle) / COMINGS),
            "agent": round((agent_tap.down - agent_down - own) / COMINGS),
        }

    async def _watched(self, coordinator: Pinned, herds: list[Pinned], tap: Tap) -> dict[str, Any]:
        down = tap.down
        found = await self._beat(coordinator, herds)
        found["watcher_bytes_a_heartbeat"] = round((tap.down - down) / max(found["count"], 1))
        return found

    async def _restart(self, coordinator: Pinned, herds: list[Pinned]) -> Pinned:
        """Kill it; how soon are all back at the next one, which knows none of them?"""
        before = await self._counts(herds)
        self.found["ended_at_first_coordinator"] = round(self.metric(ENDED)) - COMINGS - OTHER_COMINGS
        await coordinator.end()
        started_s = time.monotonic()
        coordinator = await self.coordinator()
        cpu_s = coordinator.cpu_s()
        while (await self._counts(herds))["connected"] < self.args.agents:
            await asyncio.sleep(0.5)
            if time.monotonic() - started_s > 300:
                break
        back_s = time.monotonic() - started_s
        spent_s = coordinator.cpu_s() - cpu_s
        for _ in range(200):
            if is_settled := bool(self.metric("kvxfer_coordinator_settled")):
                break
            await asyncio.sleep(0.5)
        settled_s = time.monotonic() - started_s
        await self._settle(herds)
        after = await self._counts(herds)
        self.found["restart"] = {
            "back_s": round(back_s, 1),
            "settled_s": round(settled_s, 1),
            "is_settled": is_settled,
            "connected": round(after["connected"]),
            "gone_heard_by_agents": round(after["gone"] - before["gone"]),
            "losses_an_agent": round((after["losses"] - before["losses"]) / self.args.agents, 3),
            "cpu_us_an_agent": round(spent_s / self.args.agents * 1e6),
            "ended_at_coordinator": round(self.metric(ENDED)),
        }
        return coordinator


def sum_of(text: str, name: str) -> float:
    """The sum of a metric's series in Prometheus' text. A metric with labels may have none yet. Raises KeyError."""
    lines = text.splitlines()
    if not any(line.startswith(f"# TYPE {name} ") for line in lines):
        raise KeyError(name)
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def misses(args: argparse.Namespace, found: Mapping[str, Any]) -> Iterator[str]:
    """What was not met."""
    yield from _missed_by_heartbeats("a heartbeat", found["heartbeats"], args.bar_us)
    if found["joined"] != args.agents:
        yield f"of {args.agents} agents {found['joined']} joined"
    if args.only_heartbeats:
        return
    yield from _missed_by_heartbeats("a heartbeat with a watcher", found["with_a_watcher"], args.watched_bar_us)
    if found["gone_heard_by_the_watcher"]:
        yield f"the watcher heard of {found['gone_heard_by_the_watcher']} more ended agents than ended"
    if found["ended_at_first_coordinator"]:
        yield f"ended_at_first_coordinator: {found['ended_at_first_coordinator']}"
    restart = found["restart"]
    if restart["connected"] != args.agents:
        yield f"of {args.agents} agents {restart['connected']} came back"
    if not restart["is_settled"]:
        yield f"the restarted coordinator was not settled after {restart['settled_s']} s"
    for name in ("gone_heard_by_agents", "ended_at_coordinator"):
        if restart[name]:
            yield f"{name}: {restart[name]}"


def _missed_by_heartbeats(what: str, heartbeats: Mapping[str, Any], bar_us: float) -> Iterator[str]:
    if not heartbeats["count"]:
        yield f"{what}: there was none"
    if heartbeats["cpu_us_each"] > bar_us:
        yield f"{what} costs {heartbeats['cpu_us_each']} us of processor time, the bar is {bar_us:g}"
    if heartbeats["lost_connections"]:
        yield f"{what}: {heartbeats['lost_connections']} connections were lost meanwhile"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of heartbeats that are measured, twice")
    parser.add_argument("--herds", type=int, default=2, help="processes that the agents are in")
    parser.add_argument("--peers", type=int, default=4, help="how many others each agent asks for")
    parser.add_argument("--bar-us", type=float, default=BAR_US, help="of processor time a heartbeat")
    parser.add_argument("--watched-bar-us", type=float, default=WATCHED_BAR_US, help="the same with a watcher")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of the coordinator, --flag=--x=y")
    parser.add_argument("--only-heartbeats", action="store_true", help="stop after the first heartbeats")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    files = open_files.raise_limit()
    if files < args.agents + SPARE_FILES:
        parser.error(f"{args.agents} connections need {args.agents + SPARE_FILES} open files, {files} are allowed")
    with tempfile.TemporaryDirectory() as folder:
        cpus = sorted(os.sched_getaffinity(0))
        token_file = str(pathlib.Path(folder) / "token")
        load_or_create_token(token_file)
        found = {"agents": args.agents, "cpus": len(cpus)}
        found |= asyncio.run(Bench(args, token_file, cpus).run())
    text = json.dumps(found, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    missed = list(misses(args, found))
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
