"""A search whose probes are sent: the rate that a server holds within the limits.

Decides how a probe is made of a plan, and what is kept of it. Where the next probe is put is for ``search`` to say.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvxfer.errors import AuthenticationError, ConfigError, PeerGoneError, ProtocolError
from kvxfer.load.conclude import JudgedRun, judge, limits_of
from kvxfer.load.drive.start import UNREACHED, StopFlag
from kvxfer.load.execute import LoadPlan, OnProgress, OnRecord, execute
from kvxfer.load.offered import workload_from
from kvxfer.load.options import GoalOptions
from kvxfer.load.run import LoadRun
from kvxfer.load.search import SearchOptions, SearchProbe, SearchResult, search
from kvxfer.load.settle import WarmedUp, round_requests, settle
from kvxfer.load.verdicts import CACHE_WAS_WARM, OF_TOKENS, RunVerdict


@dataclasses.dataclass
class SoughtRate:
    """What a search found, with its probes."""

    result: SearchResult
    judged: list[JudgedRun]
    warmed: WarmedUp

    @property
    def verdict(self) -> RunVerdict:
        """The answer in a sentence; a failure where there is no rate."""
        return RunVerdict(self.result.reason or "rate", self.result.sentence, self.result.rate is None)

    @property
    def findings(self) -> list[RunVerdict]:
        """What its probes say of the whole answer."""
        told = [verdict for one in self.judged for verdict in one.verdicts]
        found = [*self.warmed.findings]
        found += [RunVerdict("contradiction", sentence, False) for sentence in self.result.contradictions]
        if self.result.is_wide:
            said = (
                f"The rate is known only to between {self.result.low:.3g} and {self.result.high:.3g} requests/s: more "
                "--probe-requests or --probes-max, or a --start-rate that is nearer, say more."
            )
            found.append(RunVerdict("wide", said, False))
        for name in OF_TOKENS:
            same = [verdict for verdict in told if verdict.name == name]
            if same:
                sentence = f"In {len(same)} of {len(self.judged)} probes, by the last of them: {same[-1].sentence}"
                found.append(RunVerdict(name, sentence, False))
        warm = sum(verdict.name == CACHE_WAS_WARM for verdict in told)
        if not warm:
            return found
        sentence = (
            f"The server's prefix cache was warm in {warm} of {len(self.judged)} probes, so the rate is not that "
            "of new prompts. A search with the same seed has the same prompts: give another --salt."
        )
        return [*found, RunVerdict(CACHE_WAS_WARM, sentence, False)]

    def to_json(self) -> dict[str, Any]:
        """``crossing`` has what the report draws."""
        found = self.result
        crossing = None if found.rate is None else {"rate": found.rate, "low": found.low, "high": found.high}
        return {"search": {**found.to_json(), "warmup": self.warmed.to_json()}, "crossing": crossing}


OF_A_PROBE = {
    "rate": "start-rate, rate-min and rate-max say where it is sought",
    "end_rate": "a search has one rate for each probe",
    "requests": "probe-requests says how many a probe has",
    "duration_s": "probe-requests says how long a probe lasts",
    "warmup": "probe-warmup says how many go before each probe",
}
"""Settings of one run that a search decides itself, and what stands for them."""


def check(goal: GoalOptions, plan: LoadPlan) -> None:
    """Raises ConfigError where there is nothing to search for, and for a setting that a search decides itself."""
    limits_of(goal)
    for name, instead in OF_A_PROBE.items():
        options = plan.drive if name == "warmup" else plan.workload
        default = next(field.default for field in dataclasses.fields(options) if field.name == name)
        if getattr(options, name) != default:
            raise ConfigError(f"a search takes no {name.replace('_', '-')}: {instead}")
    if not goal.goodput:
        raise ConfigError('a search needs limits, as goodput "ttft:200 tpot:50"')
    if goal.attainment >= 1:
        raise ConfigError("a search needs an attainment below 1: no number of requests shows that all are good")


def seek(
    plan: LoadPlan,
    goal: GoalOptions,
    options: SearchOptions,
    *,
    name: str = "",
    point: Mapping[str, Any] | None = None,
    on_probe: Callable[[SearchProbe], None] = lambda probe: None,
    on_judged: Callable[[JudgedRun], None] = lambda judged: None,
    on_record: OnRecord = lambda record: None,
    on_progress: OnProgress | None = None,
    stop: StopFlag | None = None,
) -> SoughtRate:
    """Search the highest rate within ``goal``. ``name`` begins the names of the probes, ``point`` is where they are in
    a sweep. ``on_probe`` is called before each, ``on_judged`` after it. Raises what :func:`check` and
    :func:`kvxfer.load.execute.execute` raise; a server that is gone once a probe was made ends the search instead, so
    that what was measured is kept."""
    check(goal, plan)
    if plan.workload.trace:  # one that is too short is said now, not by the first probe that needs more of it
        workload_from(dataclasses.replace(plan.workload, requests=options.probe_requests))
    judged: list[JudgedRun] = []

    def run_at(probe: SearchProbe) -> LoadRun:
        on_probe(probe)
        there = plan.at_rate(probe.rate, probe.requests, warmup=probe.warmup, seed=probe.seed, salt=probe.salt)
        names: dict[str, Any] = {
            "name": f"{name} probe {probe.number}".strip(),
            "point": {**(point or {}), "rate": probe.rate},
        }
        try:
            made = execute(there, **names, on_record=on_record, on_progress=on_progress, stop=stop)
        except (PeerGoneError, ProtocolError, AuthenticationError):
            if not judged:
                raise
            driver = plan.drive.driver.value
            made = LoadRun(**names, driver=driver, began_unix_s=time.time(), window_s=(0.0, 0.0), ended=UNREACHED)
            made.settings = there.settings
        judged.append(judge(made, goal))
        on_judged(judged[-1])
        return made

    warmed = warm_up(plan, options.start_rate, options.warmup, name=name, on_progress=on_progress, stop=stop)
    found = search(run_at, limits_of(goal), goal.attainment, options, seed=plan.workload.seed)
    return SoughtRate(found, judged, warmed)


def warm_up(
    plan: LoadPlan,
    rate: float,
    most: int,
    *,
    name: str = "",
    on_progress: OnProgress | None = None,
    stop: StopFlag | None = None,
) -> WarmedUp:
    """Rounds of at most ``most`` requests at ``rate``, which are measured for this alone and kept nowhere, until the
    service has settled. Raises what :func:`kvxfer.load.execute.execute` raises."""
    seed = plan.workload.seed

    def run_round(number: int) -> LoadRun:
        salt, requests = f"warm-up-{seed}-{number}", round_requests(rate, most)
        there = plan.at_rate(rate, requests, warmup=0, seed=seed + number, salt=salt)
        return execute(there, name=f"{name} warm-up {number}".strip(), on_progress=on_progress, stop=stop)

    return settle(run_round)
