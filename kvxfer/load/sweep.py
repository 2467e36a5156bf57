"""Repeats a test over services that differ in one thing: the split into prefill and decode, the policy, the lane.

Decides the order, and that each point has a service of its own, started anew and ended with all its processes. What is
done at a point is the caller's. A point that fails is kept with its reason, and the sweep goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from kvxfer.errors import KvxferError
from kvxfer.load.run import LoadRun
from kvxfer.load.served import StartedService, serve_command, served
from kvxfer.load.sweep_points import SweepOptions, SweepPoint, points, serve_flags, stack_command

RunPoint = Callable[[str, str, SweepPoint], "LoadRun | Sequence[LoadRun]"]
"""Tests the service at a url, with a model ("" where the service does not say it), for a point."""


@dataclasses.dataclass
class PointResult:
    """What came of one point."""

    point: SweepPoint
    runs: list[LoadRun] = dataclasses.field(default_factory=list)
    failure: str = ""
    """Why the point says nothing, or not all that it should; a sentence without its end."""
    start_s: float = 0.0
    """How long the service took to start."""


@dataclasses.dataclass
class SweepResult:
    """The points that were tried, in their order."""

    points: list[PointResult] = dataclasses.field(default_factory=list)
    is_interrupted: bool = False

    @property
    def runs(self) -> list[LoadRun]:
        return [run for result in self.points for run in result.runs]

    def best(self, goodput_per_s: Callable[[PointResult], float | None]) -> PointResult | None:
        """The point with the highest goodput per device; of equal ones the first. None where no point has one above 0.

        ``goodput_per_s``: of a point, None where it has none. Points with a failure are left out.
        """
        found, most = None, 0.0
        for result in self.points:
            goodput = None if result.failure else goodput_per_s(result)
            if goodput is not None and goodput / result.point.devices > most:
                found, most = result, goodput / result.point.devices
        return found


def sweep(
    options: SweepOptions,
    run_point: RunPoint,
    *,
    on_point: Callable[[int, int, SweepPoint], None] = lambda number, total, point: None,
    on_result: Callable[[PointResult], None] = lambda result: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> SweepResult:
    """Test all points, one after the other. ``on_point`` is called before each, ``on_result`` after each.

    ``is_stopped``: asked before each point and while a service starts; a stopped sweep returns what it has, as it does
    after a KeyboardInterrupt. Errors of kvxfer and of the system are kept with the point; others are raised.
    """
    result = SweepResult()
    todo = points(options)
    for number, point in enumerate(todo):
        if is_stopped():
            result.is_interrupted = True
            break
        on_point(number, len(todo), point)
        made = PointResult(point)
        result.points.append(made)
        try:
            _try_point(options, made, run_point, is_stopped)
        except KeyboardInterrupt:
            made.failure = made.failure or "interrupted"
            result.is_interrupted = True
        except (KvxferError, OSError) as error:
            made.failure = sentence(error)
        result.is_interrupted = result.is_interrupted or is_stopped()
        on_result(made)
        if result.is_interrupted:
            break
    return result


def _try_point(options: SweepOptions, made: PointResult, run_point: RunPoint, is_stopped: Callable[[], bool]) -> None:
    began_s = time.monotonic()
    with service_of(options, made.point, is_stopped=is_stopped) as service:
        made.start_s = time.monotonic() - began_s
        failures = []
        try:
            runs = run_point(service.url, service.model, made.point)
            made.runs = [runs] if isinstance(runs, LoadRun) else list(runs)
        except (KvxferError, OSError) as error:
            failures = [sentence(error)]
        made.failure = "; ".join(failures + service.losses())
    for run in made.runs:
        run.point = {**made.point.coordinates, **run.point}


def sentence(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def service_of(
    options: SweepOptions, point: SweepPoint, *, is_stopped: Callable[[], bool] = lambda: False
) -> Iterator[StartedService]:
    """The service of one point while the block runs. Raises what :func:`kvxfer.load.served.served` raises."""
    if options.stack:
        port = free_port()
        command, url = stack_command(options, point, port), f"http://127.0.0.1:{port}"
    else:
        command, url = serve_command(*serve_flags(options, point)), ""
    with served(command, url=url, nice=options.nice, start_s=options.start_s, is_stopped=is_stopped) as service:
        yield service


def free_port() -> int:
    """A port of 127.0.0.1 that is free now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
