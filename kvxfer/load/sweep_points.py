"""Which points a sweep has: splits into prefill and decode, times policies, times lanes. Pure."""

from __future__ import annotations

import dataclasses
import enum
import re
import shlex
from typing import Any

from kvxfer.config import check_positive
from kvxfer.errors import ConfigError

POINTS_MAX = 1000
WORKERS_MAX = 64
"""Of one role."""
DEFAULT = "default"
"""In a list of policies or lanes: what the service does when it is told nothing."""
PLACES = ("{prefill}", "{decode}", "{port}", "{policy}", "{lane}")


class PointKind(enum.Enum):
    """What is done at each point."""

    RUN = "run"
    """One run at the workload's rate."""
    SEARCH = "search"
    """A search for the highest rate within the limits."""


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """What is compared, and how the service of a point is started. Raises ConfigError for a bad value."""

    splits: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"help": "prefill:decode workers, as 1:1,2:1,1:2; 0:2 has decode workers only"}
    )
    workers: int = dataclasses.field(
        default=0, metadata={"help": "all splits of so many workers, in place of --splits", "metavar": "N"}
    )
    policies: tuple[str, ...] = dataclasses.field(
        default=(DEFAULT,),
        metadata={"help": "values of kvxfer serve --policy, settings joined by +: default,local-prefill=off"},
    )
    lanes: tuple[str, ...] = dataclasses.field(
        default=(DEFAULT,), metadata={"help": "values of kvxfer serve --lanes, one lane a point: mapped,stream"}
    )
    per_point: PointKind = dataclasses.field(
        default=PointKind.RUN,
        metadata={"help": "a run at the workload's rate, or a search for the highest rate within the limits"},
    )
    serve_model: str = dataclasses.field(default="tiny", metadata={"help": "model of kvxfer serve"})
    mock: str | None = dataclasses.field(
        default=None,
        metadata={"help": "kvxfer serve --mock: engines without a model, with these flags", "metavar": "'FLAGS'"},
    )
    threads: int = dataclasses.field(default=0, metadata={"help": "kvxfer serve --threads", "metavar": "N"})
    stack: str = dataclasses.field(
        default="",
        metadata={
            "help": "command of a service of another maker, with {prefill}, {decode} and {port} in it (also {policy}, "
            "{lane}); it runs until it gets SIGINT",
            "metavar": "'COMMAND'",
        },
    )
    nice: int = dataclasses.field(
        default=10,
        metadata={
            "help": "so much lower is the priority of the service than that of what sends: both share this machine",
            "metavar": "N",
        },
    )
    start_s: float = dataclasses.field(default=300.0, metadata={"help": "how long the start of a point may take"})

    def __post_init__(self) -> None:
        check_positive("start_s", self.start_s, maximum=86400)
        if not 0 <= self.threads <= 4096:
            raise ConfigError(f"threads must be 0 to 4096, not {self.threads}")
        if not 0 <= self.nice <= 19:
            raise ConfigError(f"nice must be 0 to 19, not {self.nice}")
        if self.workers and not 2 <= self.workers <= 2 * WORKERS_MAX:
            raise ConfigError(f"workers must be 2 to {2 * WORKERS_MAX}, not {self.workers}")
        if bool(self.workers) == bool(self.splits):
            raise ConfigError("a sweep needs either splits or workers")
        for name in ("policies", "lanes"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"{name} must name at least one, and none twice")
        if self.mock is not None and (self.stack or self.lanes != (DEFAULT,)):
            raise ConfigError("mock engines have no lanes, and are no stack of another maker")
        if self.stack:
            for name, place in (("prefill", 0), ("decode", 1), ("port", 2)):
                if PLACES[place] not in self.stack:
                    raise ConfigError(f"stack must have {{{name}}} in it")
            for name, place in (("policies", 3), ("lanes", 4)):
                if getattr(self, name) != (DEFAULT,) and PLACES[place] not in self.stack:
                    raise ConfigError(f"stack must have {PLACES[place]} in it, because {name} are given")
            try:
                shlex.split(self.stack)
            except ValueError as error:
                raise ConfigError(f"stack: {error}") from None
        _ = points(self)


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """One service that is tested."""

    prefill: int
    decode: int
    policy: str = DEFAULT
    lane: str = DEFAULT

    @property
    def devices(self) -> int:
        return self.prefill + self.decode

    @property
    def name(self) -> str:
        """As in ``2P1D``, with policy and lane where they are not the default."""
        words = [f"{self.prefill}P{self.decode}D", *(word for word in (self.policy, self.lane) if word != DEFAULT)]
        return " ".join(words)

    @property
    def coordinates(self) -> dict[str, Any]:
        """For ``LoadRun.point``; what is the default is left out."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if value != DEFAULT} | {"devices": self.devices}


def points(options: SweepOptions) -> list[SweepPoint]:
    """All points, in the order of the lists: splits, then policies, then lanes. Raises ConfigError for a split that is
    none, or for more than POINTS_MAX."""
    if options.workers:
        most = min(options.workers - 1, WORKERS_MAX)
        splits = [(count, options.workers - count) for count in range(max(1, options.workers - WORKERS_MAX), most + 1)]
    else:
        splits = [_split(text) for text in options.splits]
    if len(set(splits)) != len(splits):
        raise ConfigError("splits must not name one twice")
    found = [
        SweepPoint(prefill, decode, policy, lane)
        for prefill, decode in splits
        for policy in options.policies
        for lane in options.lanes
    ]
    if len(found) > POINTS_MAX:
        raise ConfigError(f"a sweep has at most {POINTS_MAX} points, not {len(found)}")
    return found


def _split(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,3}):([0-9]{1,3})", text.strip())
    prefill, decode = map(int, match.groups()) if match else (-1, -1)
    if not (0 <= prefill <= WORKERS_MAX and 1 <= decode <= WORKERS_MAX):
        raise ConfigError(f"a split is prefill:decode, as 2:1, with up to {WORKERS_MAX} of each, not {text!r:.40}")
    return prefill, decode


def serve_flags(options: SweepOptions, point: SweepPoint) -> list[str]:
    """Flags of ``kvxfer serve`` for a point."""
    words = [f"--prefill={point.prefill}", f"--decode={point.decode}"]
    if options.mock is None:
        words += [f"--model={options.serve_model}", f"--threads={options.threads}"]
    else:
        words += [f"--mock={options.mock}"]
    if point.policy != DEFAULT:
        words += [f"--policy={point.policy}"]
    if point.lane != DEFAULT:
        words += [f"--lanes={point.lane.replace('+', ',')}"]
    return words


def stack_command(options: SweepOptions, point: SweepPoint, port: int) -> list[str]:
    """The words of ``options.stack`` for a point. No shell reads them: what a point says stays one word."""
    values = (point.prefill, point.decode, port, point.policy, point.lane)
    words = shlex.split(options.stack)
    for place, value in zip(PLACES, values, strict=True):
        words = [word.replace(place, str(value)) for word in words]
    return words
