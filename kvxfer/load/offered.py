"""The workload that ``WorkloadOptions`` ask for: a trace or made-up requests, cut, scaled and spread over time.

Decides what each option does to a workload, and its order: rows, lengths, arrivals, duration, dispatch mode. Knows
nothing of endpoints. The same options give the same workload, byte for byte.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.load.options import ArrivalKind, TargetOptions, WorkloadOptions
from kvxfer.load.trace_file import TraceFile
from kvxfer.workload import arrivals
from kvxfer.workload.bodies import BodyMaker, extra_body_of
from kvxfer.workload.lengths import ScaledLengths
from kvxfer.workload.prompts import PromptMaker
from kvxfer.workload.readers.rows import TraceRead
from kvxfer.workload.request import REQUESTS_MAX, DispatchMode, Workload, WorkloadRequest
from kvxfer.workload.sessions import MadeUp, in_order, moved, sessions_in, with_mode

REQUESTS_DEFAULT = 100


def workload_from(options: WorkloadOptions) -> Workload:
    """Reads the trace, where one is named, and returns the requests in order, numbered from 0.

    Sessions begin at a rate that makes ``rate`` requests/s due on average. With ``arrival trace`` due and think times
    are divided by ``speedup``. Raises ConfigError, which names file and line where a trace is not what it should be.
    """
    try:
        workload = _from_trace(options) if options.trace else _made_up(options)
        workload = with_mode(workload, options.session_mode)
    except InvalidArgumentError as error:
        raise ConfigError(f"the workload cannot be made: {error}") from None
    return workload


def prompt_maker(options: WorkloadOptions, workload: Workload) -> PromptMaker:
    """The maker of this workload's prompts: its hash ids stand for ``workload.hash_tokens`` tokens each."""
    return PromptMaker(
        seed=options.seed,
        salt=options.salt,
        token_low=options.token_low,
        token_high=options.token_high,
        hash_tokens=workload.hash_tokens,
    )


def body_maker(target: TargetOptions, options: WorkloadOptions, workload: Workload, model: str) -> BodyMaker:
    """The maker of the bodies that are sent to this target. Raises ConfigError for a wrong ``extra_body``."""
    return BodyMaker(
        model,
        "chat" if target.api.value == "chat" else "completions",
        prompt_maker(options, workload),
        ignore_eos=target.ignore_eos,
        extra_body=extra_body_of(target.extra_body),
    )


def mean_rate(workload: Workload) -> float:
    """Requests due per second over the whole workload: those after the first, by the time between the first and the
    last due time. 0 where that is no time at all. Turns that are due after an answer count as if answers took none."""
    timed = with_mode(workload, DispatchMode.TIMESTAMP).requests
    span = (timed[-1].due_s or 0.0) - (timed[0].due_s or 0.0) if timed else 0.0
    return (len(timed) - 1) / span if span > 0 else 0.0


def is_timed(options: WorkloadOptions) -> bool:
    """Whether the trace says when its requests are due. Raises ConfigError for one that cannot be read."""
    if options.trace and options.arrival is None:
        return bool(_opened(options)[0].has_times)
    return options.arrival is ArrivalKind.TRACE


def at_rate(options: WorkloadOptions, rate: float) -> WorkloadOptions:
    """The options of the same workload with so many requests due per second: what has a rate gets that one (a ramp goes
    on in its proportion), and a trace that keeps its own times becomes so much faster or slower. Raises ConfigError."""
    if not is_timed(options):
        return dataclasses.replace(options, rate=rate, end_rate=options.end_rate * rate / options.rate)
    own = mean_rate(workload_from(dataclasses.replace(options, speedup=1.0, duration_s=0.0)))
    if not own:
        raise ConfigError(f"{options.trace} has no rate of its own: all its requests are due at once")
    return dataclasses.replace(options, speedup=rate / own)


def with_warmup(workload: Workload, count: int, rate: float = 0.0) -> tuple[Workload, float]:
    """The workload with ``count`` requests before it, and the second at which the measured window begins.

    The warm-up requests are numbers 0 to count-1, due from 0 on at even distances of 1/rate (0: the workload's own mean
    rate). The workload's requests follow with all due times later by count/rate, so the load goes on without a break.
    They have the lengths of requests taken evenly from the workload, and share no prefix with it: they warm up
    processes and connections, and never its prefix caches. As numbers change, so do the prompts of requests without
    hash ids.
    """
    if count <= 0 or not workload.requests:
        return workload, 0.0
    rate = rate or mean_rate(workload) or 1.0
    shift = count / rate
    own = workload.requests
    before = [
        WorkloadRequest(
            0,
            own[place * len(own) // count % len(own)].prompt_tokens,
            own[place * len(own) // count % len(own)].output_tokens,
            place / rate,
        )
        for place in range(count)
    ]
    later = [
        request if request.due_s is None else dataclasses.replace(request, due_s=request.due_s + shift)
        for request in own
    ]
    return workload.renumbered([*before, *later]), shift


def _made_up(options: WorkloadOptions) -> Workload:
    if options.arrival is ArrivalKind.TRACE:
        raise ConfigError("arrival trace needs a trace")
    made_up = MadeUp(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        length_spread=options.length_spread,
        shared_prefix_tokens=options.shared_prefix_tokens,
        turns=options.turns,
        think_s=options.think_s,
    )
    kind = options.arrival or ArrivalKind.POISSON
    _check_has_use(options, kind)
    count = options.requests or (0 if options.duration_s else REQUESTS_DEFAULT)
    begins = _begins(options, kind, math.ceil(count / options.turns), 1 / options.turns)
    requests = made_up.requests(begins, count or len(begins) * options.turns, options.seed)
    name = f"made-up {options.prompt_tokens}/{options.output_tokens}"
    if options.turns > 1:
        name += f", {options.turns} turns"
    return _bounded(options, Workload(name, requests, hash_tokens=made_up.hash_tokens), f"{kind.value} arrivals")


def _from_trace(options: WorkloadOptions) -> Workload:
    path = pathlib.Path(options.trace)
    found, source = _opened(options)
    if options.requests > len(found.requests):
        raise ConfigError(
            f"{path} has {len(found.requests)} requests, which is less than the {options.requests} that are asked for"
        )
    scaled = ScaledLengths(
        prompt=options.prompt_scale,
        output=options.output_scale,
        prompt_max=int(options.prompt_max),
        output_max=int(options.output_max),
        hash_tokens=found.hash_tokens,
    )
    requests: Sequence[WorkloadRequest] = scaled.of_all(found.requests)
    kind = options.arrival or (ArrivalKind.TRACE if found.has_times else ArrivalKind.POISSON)
    _check_has_use(options, kind)
    if kind is ArrivalKind.TRACE:
        if not found.has_times:
            raise ConfigError(f"{path} says not when requests are due: choose another arrival than trace")
        if options.speedup != 1:
            requests = [
                dataclasses.replace(
                    request, due_s=(request.due_s or 0.0) / options.speedup, think_s=request.think_s / options.speedup
                )
                for request in requests
            ]
    else:
        sessions = sessions_in(requests)
        requests = moved(requests, _begins(options, kind, sessions, sessions / len(requests)))
    if found.left_out:
        source += f"; {found.left_out} rows without a prompt or an answer are left out"
    name = path.name or str(path)
    how = f"{options.speedup:g} x its times" if kind is ArrivalKind.TRACE else f"{kind.value} arrivals"
    return _bounded(options, Workload(name, requests, hash_tokens=scaled.hash_tokens_scaled, source=source), how)


OF_AN_ARRIVAL = {
    "rate": (set(ArrivalKind) - {ArrivalKind.TRACE}, "speedup makes a trace faster, arrival poisson gives it a rate"),
    "end_rate": ({ArrivalKind.RAMP}, "say arrival ramp"),
    "burstiness": ({ArrivalKind.GAMMA}, "say arrival gamma"),
    "speedup": ({ArrivalKind.TRACE}, "say the rate"),
}
"""Settings that not every arrival heeds: which do, and what to say where another does not."""


def _check_has_use(options: WorkloadOptions, kind: ArrivalKind) -> None:
    """Raises ConfigError for a setting that would change nothing: who gave it believes in another load."""
    for field in dataclasses.fields(options):
        kinds, instead = OF_AN_ARRIVAL.get(field.name, ({kind}, ""))
        if kind not in kinds and getattr(options, field.name) != field.default:
            raise ConfigError(f"{field.name} has no place in arrival {kind.value}: {instead}")


def _begins(options: WorkloadOptions, kind: ArrivalKind, count: int, share: float) -> arrivals.Times:
    """``count`` begins of sessions (0: as many as the duration takes), ``share`` of all requests."""
    rate = highest = options.rate * share
    if kind is ArrivalKind.CONSTANT:
        draw: arrivals.DrawArrivals = lambda n: arrivals.constant(n, rate)  # noqa: E731
    elif kind is ArrivalKind.POISSON:
        draw = lambda n: arrivals.poisson(n, rate, options.seed)  # noqa: E731
    elif kind is ArrivalKind.GAMMA:
        draw = lambda n: arrivals.gamma(n, rate, options.burstiness, options.seed)  # noqa: E731
    else:
        ramp_s = options.duration_s or None
        end_rate = options.end_rate * share
        draw = lambda n: arrivals.ramp(n, rate, end_rate, options.seed, ramp_s=ramp_s)  # noqa: E731
        highest = max(rate, end_rate)
    return draw(count) if count else arrivals.until(draw, highest, options.duration_s)


def _bounded(options: WorkloadOptions, workload: Workload, how: str) -> Workload:
    requests = [
        request
        for request in workload.requests
        if not options.duration_s or (request.due_s or 0.0) < options.duration_s
    ]
    if not requests:
        raise ConfigError(f"no request is due within duration_s {options.duration_s:g}")
    return dataclasses.replace(workload, requests=in_order(requests), name=f"{workload.name}, {how}")


def _opened(options: WorkloadOptions) -> tuple[TraceRead, str]:
    """The trace and where it comes from, in words. Raises ConfigError."""
    is_timed = options.arrival in (None, ArrivalKind.TRACE) and options.duration_s
    return TraceFile(
        pathlib.Path(options.trace),
        options.trace_format,
        rows_max=options.requests or REQUESTS_MAX,
        output_tokens=options.output_tokens,
        seed=options.seed,
        end_s=options.duration_s * options.speedup if is_timed else math.inf,
    ).read()
