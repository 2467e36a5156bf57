"""A contender's two processes, and one transfer between them.

It decides how processes are started, asked and stopped, and in what order a transfer is poisoned, started, timed and
checked. It must never know which library a contender uses, or what its figures are compared with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import tempfile
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parents[1]
LOOPBACK = "127.0.0.1"
CLOSE_S = 5.0


class WorkerFailed(Exception):
    """A contender's process said no, or is gone."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """How one contender's two processes are started."""

    name: str
    module: str
    """The worker in benchmarks/peers."""
    python: str
    pages: str
    settings: tuple[tuple[str, Any], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    label: str = ""
    """What distinguishes this from the contender's other setups."""


@dataclasses.dataclass(frozen=True)
class Site:
    """Where the two ends are: (source, destination)."""

    hosts: tuple[str, str] = (LOOPBACK, LOOPBACK)
    prefixes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """What stands before the command of each end: ``ip netns exec NAME``."""
    devices: tuple[str, str] = ("lo", "lo")


@dataclasses.dataclass(frozen=True)
class Moved:
    """One job's figures."""

    gb_s: float
    cpu_s_per_gb: float
    """Of both processes together."""
    source_cpu_s_per_gb: float
    """Of that, what the source took."""
    slowest_to_median: float
    """Of the transfers that were under way at once."""
    seconds: float


class Reference:
    """The bytes every source holds: random, in a memory file that all processes of the run share."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("kvxfer benchmark reference", 0)
        os.truncate(self.fd, nbytes)
        step = 64 << 20
        random = np.random.default_rng(7)
        for at in range(0, nbytes, step):
            os.pwrite(self.fd, random.bytes(min(step, nbytes - at)), at)

    def close(self) -> None:
        os.close(self.fd)


class End:
    """One process of a contender."""

    def __init__(self, setup: Setup, site: Site, index: int, reference: Reference) -> None:
        self.name = f"{setup.name} {setup.label} {('source', 'destination')[index]}".replace("  ", " ")
        words = {
            "role": ("source", "destination")[index],
            "pages": setup.pages,
            "pool-bytes": reference.nbytes,
            "reference-fd": reference.fd,
            "host": site.hosts[index],
            "peer-host": site.hosts[1 - index],
            "settings": json.dumps(dict(setup.settings)),
        }
        command = [*site.prefixes[index], setup.python, "-m", f"peers.{setup.module}"]
        environment = {key: value.format(device=site.devices[index]) for key, value in setup.environment}
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        self.process = subprocess.Popen(
            [*command, *(f"--{key}={value}" for key, value in words.items())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            pass_fds=[reference.fd],
            cwd=HERE,
            env={**os.environ, **environment},
        )

    def start(self, request: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": request, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure(f"{request}: the process is gone") from None

    def finish(self, request: str) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.failure(f"{request}: the process ended with {self.process.wait(CLOSE_S)}")
        answer = json.loads(line)
        if "error" in answer:
            raise self.failure(f"{request}: {answer['error']}")
        return answer["ok"]

    def ask(self, request: str, **arguments: Any) -> Any:
        self.start(request, **arguments)
        return self.finish(request)

    def failure(self, text: str) -> WorkerFailed:
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().splitlines()[-6:]
        return WorkerFailed("\n  ".join([f"{self.name}: {text}", *last]))

    def stop(self) -> None:
        try:
            self.start("close")
            self.process.wait(CLOSE_S)
        except (WorkerFailed, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        self.log.close()


class Pair:
    """Source and destination of one contender, connected."""

    def __init__(self, setup: Setup, site: Site, reference: Reference) -> None:
        self.setup = setup
        self.is_awake = True
        self.ends = (End(setup, site, 0, reference), End(setup, site, 1, reference))
        try:
            said = self.both("open")
            for end, other in zip(self.ends, reversed(said), strict=True):
                end.start("connect", other=other)
            for end in self.ends:
                end.finish("connect")
        except BaseException:
            self.stop()
            raise
        self.block_bytes = 0

    @property
    def source(self) -> End:
        return self.ends[0]

    @property
    def destination(self) -> End:
        return self.ends[1]

    def both(self, request: str, **arguments: Any) -> list[Any]:
        """Ask both ends at the same time."""
        for end in self.ends:
            end.start(request, **arguments)
        return [end.finish(request) for end in self.ends]

    def use(self, block_bytes: int) -> None:
        if block_bytes != self.block_bytes:
            self.both("use", block_bytes=block_bytes)
            self.block_bytes = block_bytes

    def initiator(self, op: str) -> tuple[End, End]:
        """(the end that starts a transfer in that direction, the other one)."""
        return (self.destination, self.source) if op == "read" else (self.source, self.destination)

    def move(self, op: str, how: dict[str, Any], *, seed: int, block_bytes: int, nbytes: int, at_once: int) -> Moved:
        """One job: poisoned, timed, every byte checked. Raises WorkerFailed, for a wrong byte too."""
        self.use(block_bytes)
        count = max(nbytes // block_bytes // at_once, 1) * at_once
        self.both("job", op=op, how=how, seed=seed, count=count, at_once=at_once)
        initiator, passive = self.initiator(op)
        before = passive.ask("cpu")
        passive.ask("serve")
        got = initiator.ask("move")
        passive_s = passive.ask("cpu") - before
        source_s = passive_s if passive is self.source else got["cpu"]
        if not self.destination.ask("check"):
            raise self.destination.failure(f"wrong bytes: {op} {how}, blocks of {block_bytes}, seed {seed}")
        gigabytes = count * block_bytes / 1e9
        each = sorted(got["each"])
        return Moved(
            gb_s=gigabytes / got["seconds"],
            cpu_s_per_gb=(got["cpu"] + passive_s) / gigabytes,
            source_cpu_s_per_gb=source_s / gigabytes,
            slowest_to_median=each[-1] / each[len(each) // 2],
            seconds=got["seconds"],
        )

    def rest(self) -> None:
        """Neither process runs until :meth:`wake`: some spin while they wait, and slow the measured one."""
        self._signal(signal.SIGSTOP, is_awake=False)

    def wake(self) -> None:
        self._signal(signal.SIGCONT, is_awake=True)

    def _signal(self, number: int, *, is_awake: bool) -> None:
        if self.is_awake != is_awake:
            self.is_awake = is_awake
            for end in self.ends:
                end.process.send_signal(number)

    def stop(self) -> None:
        self.wake()
        for end in self.ends:
            end.stop()
