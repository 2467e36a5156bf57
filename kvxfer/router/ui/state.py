"""What the operators' page shows, as one JSON object that all viewers share.

Decides how often it is put together, so that many viewers cost no more than one. It must never change anything.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from prometheus_client.metrics_core import Metric

from kvxfer import __version__
from kvxfer.router.core import RouterCore
from kvxfer.router.front import Door
from kvxfer.router.history import SPAN_S, STEP_S, Decision

FRESH_S = 0.9
"""How long a rendering serves every viewer at least. The page asks each second."""
REST = 50.0
"""A rendering serves for so many times the time that it took, so that a large fleet's costs 2 % of the event loop."""


class Rendered(NamedTuple):
    content: bytes
    etag: str
    """Of the content: an unchanged state has an unchanged one."""


class StateFeed:
    """``wall`` gives Unix time; it is asked once, so that what is past keeps its time when the clock is set."""

    def __init__(self, core: RouterCore, door: Door, *, wall: Callable[[], float] = time.time) -> None:
        self._core = core
        self._door = door
        self._unix_offset_s = wall() - core.now()
        self._kept: Rendered | None = None
        self._fresh_until_s = 0.0

    def rendered(self) -> Rendered:
        """The state as JSON, as old as FRESH_S and REST allow."""
        begun_s = self._core.now()
        if self._kept is None or begun_s >= self._fresh_until_s:
            content = json.dumps(self.state(), separators=(",", ":"), allow_nan=False).encode()
            digest = hashlib.blake2b(content, digest_size=12).hexdigest()
            self._kept = Rendered(content, f'"{digest}"')
            self._fresh_until_s = begun_s + max(FRESH_S, REST * (self._core.now() - begun_s))
        return self._kept

    def state(self) -> dict[str, Any]:
        """All of it, put together now. Nothing in it changes only because time passes within one step of the series,
        so that a router at rest renders the same bytes."""
        core, history = self._core, self._core.history
        now_s = core.now()
        steps = [
            {"begun_unix_s": self._unix_s(step.pop("begun_s"), digits=0), **step} for step in history.series(now_s)
        ]
        ejected = {(pair["prefill"], pair["decode"]) for pair in core.workers.describe_pairs()}
        return {
            "version": __version__,
            "router": {
                "status": "draining" if self._door.is_draining else "ok",
                "inflight": self._door.inflight_everywhere,
                "inflight_max": core.options.max_inflight,
                "coordinator": core.options.coordinator,
                "coordinator_connected": core.workers.is_connected,
                "models": list(core.workers.models()),
            },
            "workers": core.workers.describe(),
            "pairs": [{**pair, "is_ejected": (pair["prefill"], pair["decode"]) in ejected} for pair in history.pairs()],
            "lanes": history.lanes(),
            "series": {
                "step_s": STEP_S,
                "span_s": SPAN_S,
                "ends_unix_s": self._unix_s(now_s // STEP_S * STEP_S + STEP_S, digits=0),
                "steps": steps,
            },
            "decisions": [self._decision(decision) for decision in history.decisions()],
            "counters": self._counters(),
        }

    def _unix_s(self, router_s: float, *, digits: int = 3) -> float:
        return round(router_s + self._unix_offset_s, digits)

    def _decision(self, decision: Decision) -> dict[str, Any]:
        values = decision._asdict()
        ttft_s = values["ttft_s"]
        return {
            "ended_unix_s": self._unix_s(values.pop("ended_s")),
            **values,
            "ttft_s": None if ttft_s is None else round(ttft_s, 4),
            "duration_s": round(values["duration_s"], 4),
        }

    def _counters(self) -> dict[str, dict[str, int]]:
        """Since the start, by their labels."""
        metrics, fleet = self._core.metrics, self._core.workers.counters
        return {
            "requests": dict(sorted(self._core.history.outcomes().items())),
            "placements": _by_label(metrics.collected(metrics.placements)),
            "retries": _by_label(metrics.collected(metrics.retries)),
            "retries_refused": _by_label(metrics.collected(metrics.retries_refused)),
            "leg_failures": _by_label(metrics.collected(metrics.leg_failures)),
            "recomputes": _by_label(metrics.collected(metrics.recomputes), "verdict"),
            "prefills_forgone": _by_label(metrics.collected(metrics.prefills_forgone)),
            "ejections": {"": sum(fleet.ejections.values())},
            "pair_ejections": {"": sum(fleet.pair_ejections.values())},
        }


def _by_label(counted: Iterable[Metric], *labels: str) -> dict[str, int]:
    """A counter's values by their labels, or by those of ``labels`` alone, joined by spaces."""
    values: dict[str, int] = {}
    for family in counted:
        for sample in family.samples:
            if sample.name.endswith("_total"):
                name = " ".join(sample.labels[label] for label in labels or sorted(sample.labels))
                values[name] = values.get(name, 0) + int(sample.value)
    return values
