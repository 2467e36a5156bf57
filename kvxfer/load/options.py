"""What a load test is told, as settings: each becomes a flag of ``kvxfer load``. Decides which values are possible."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any
from urllib.parse import urlsplit

from kvxfer.config import check_positive
from kvxfer.errors import ConfigError
from kvxfer.workload.request import REQUESTS_MAX, TOKENS_MAX, DispatchMode


class ApiKind(enum.Enum):
    """Which route the requests go to."""

    COMPLETIONS = "completions"
    """Prompts as token ids: lengths and shared prefixes are exact."""
    CHAT = "chat"
    """Prompts as text: the server's template and tokenizer take part, so lengths are estimates."""


class ArrivalKind(enum.Enum):
    """How the due times of requests are spread. ``trace`` takes those of the trace."""

    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"
    RAMP = "ramp"
    TRACE = "trace"


class DriverKind(enum.Enum):
    NATIVE = "native"
    AIPERF = "aiperf"


def _help(text: str, **more: Any) -> dict[str, Any]:
    return {"help": text, **more}


@dataclasses.dataclass(frozen=True)
class TargetOptions:
    """Where the requests go."""

    url: str = dataclasses.field(
        default="http://127.0.0.1:8000", metadata=_help("the server, up to what stands before /v1")
    )
    model: str = dataclasses.field(default="", metadata=_help("its name; empty: the first that /v1/models lists"))
    api: ApiKind = dataclasses.field(
        default=ApiKind.COMPLETIONS,
        metadata=_help("completions: prompts as token ids, with exact lengths; chat: prompts as text"),
    )
    api_key_file: str = dataclasses.field(default="", metadata=_help("file with the API key, sent as a bearer token"))
    ca_file: str = dataclasses.field(default="", metadata=_help("certificates that an https server is checked against"))
    extra_body: str = dataclasses.field(
        default="", metadata=_help("JSON object: more members of each body", metavar="JSON")
    )
    ignore_eos: bool = dataclasses.field(
        default=True, metadata=_help("ask the engine for answers of exactly the planned length")
    )
    account: bool = dataclasses.field(
        default=True, metadata=_help("ask a kvxfer router for its account of each request (x-kvxfer-account)")
    )

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            _ = parts.port
        except ValueError:
            raise ConfigError(f"url has no valid port: {self.url!r:.200}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ConfigError(f"url must be like http://127.0.0.1:8000, not {self.url!r:.200}")
        if self.ca_file and parts.scheme != "https":
            raise ConfigError(f"ca_file is for https, and url is {self.url!r:.200}: leave it out, or use https")


@dataclasses.dataclass(frozen=True)
class WorkloadOptions:
    """What is sent, and when."""

    trace: str = dataclasses.field(
        default="",
        metadata=_help("a trace: Mooncake JSONL, Azure or BurstGPT CSV, prompts as text; empty: made-up requests"),
    )
    trace_format: str = dataclasses.field(
        default="auto",
        metadata=_help(
            "of the trace; auto: found by its first line, where that is certain",
            choices=("auto", "mooncake", "azure", "burstgpt", "servegen", "prompts"),
        ),
    )
    arrival: ArrivalKind | None = dataclasses.field(
        default=None,
        metadata=_help("how due times are spread (default: trace with a trace that has times, else poisson)"),
    )
    rate: float = dataclasses.field(
        default=1.0, metadata=_help("requests due per second, on average; not with --arrival trace")
    )
    end_rate: float = dataclasses.field(default=0.0, metadata=_help("of --arrival ramp: the rate at its end"))
    burstiness: float = dataclasses.field(
        default=1.0,
        metadata=_help("of --arrival gamma: its shape; 1 is Poisson, less comes in bursts, more is more regular"),
    )
    speedup: float = dataclasses.field(default=1.0, metadata=_help("of --arrival trace: so many times as fast"))
    requests: int = dataclasses.field(
        default=0, metadata=_help("how many; 0: all of the trace, or 100, or as many as --duration-s takes")
    )
    duration_s: float = dataclasses.field(default=0.0, metadata=_help("requests due later are left out; 0: no bound"))
    prompt_tokens: int = dataclasses.field(default=512, metadata=_help("of made-up requests"))
    output_tokens: int = dataclasses.field(default=64, metadata=_help("of made-up requests"))
    length_spread: float = dataclasses.field(
        default=0.0, metadata=_help("made-up lengths are uniform within +- this share of the mean; 0 to 1")
    )
    shared_prefix_tokens: int = dataclasses.field(
        default=0, metadata=_help("prompt tokens that all made-up requests begin with")
    )
    turns: int = dataclasses.field(default=1, metadata=_help("of each made-up session"))
    think_s: float = dataclasses.field(default=1.0, metadata=_help("between the turns of a made-up session"))
    session_mode: DispatchMode = dataclasses.field(
        default=DispatchMode.THINK,
        metadata=_help("when later turns are due: at their time in the trace, or a think time after the turn before"),
    )
    prompt_scale: float = dataclasses.field(default=1.0, metadata=_help("lengths of a trace's prompts times this"))
    output_scale: float = dataclasses.field(default=1.0, metadata=_help("lengths of a trace's answers times this"))
    prompt_max: int = dataclasses.field(default=0, metadata=_help("longer prompts of a trace are cut; 0: none is"))
    output_max: int = dataclasses.field(default=0, metadata=_help("longer answers of a trace are cut; 0: none is"))
    token_low: int = dataclasses.field(default=100, metadata=_help("lowest token id of made-up prompts"))
    token_high: int = dataclasses.field(default=500, metadata=_help("token ids of made-up prompts are below this"))
    seed: int = dataclasses.field(default=0, metadata=_help("the same seed gives the same bytes"))
    salt: str = dataclasses.field(
        default="", metadata=_help("another salt gives prompts that share no prefix with those of a run before")
    )

    def __post_init__(self) -> None:
        for name in ("rate", "burstiness", "speedup", "prompt_scale", "output_scale"):
            check_positive(name, getattr(self, name), maximum=1e6)
        for name in ("prompt_tokens", "output_tokens"):
            check_positive(name, getattr(self, name), maximum=TOKENS_MAX)
        check_positive("turns", self.turns, maximum=10_000)
        if not 0 <= self.requests <= REQUESTS_MAX:
            raise ConfigError(f"requests must be 0 to {REQUESTS_MAX}, not {self.requests}")
        for name in ("duration_s", "think_s", "end_rate", "prompt_max", "output_max", "shared_prefix_tokens"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not 0 <= self.length_spread < 1:
            raise ConfigError(f"length_spread must be 0 or more and below 1, not {self.length_spread}")
        if self.shared_prefix_tokens >= self.prompt_tokens:
            raise ConfigError("shared_prefix_tokens must be less than prompt_tokens")
        if not 0 <= self.token_low < self.token_high <= 1 << 31:
            raise ConfigError(f"token_low must be below token_high, not {self.token_low} and {self.token_high}")
        if self.arrival is ArrivalKind.TRACE and not self.trace:
            raise ConfigError("arrival trace needs a trace")
        if self.arrival is ArrivalKind.RAMP and not self.end_rate:
            raise ConfigError("arrival ramp needs end_rate")


@dataclasses.dataclass(frozen=True)
class DriveOptions:
    """How it is sent."""

    driver: DriverKind = dataclasses.field(
        default=DriverKind.NATIVE, metadata=_help("what sends the requests; aiperf is an environment of its own")
    )
    processes: int = dataclasses.field(
        default=0, metadata=_help("that send; 0: one for each 500 requests/s, at most one for each processor")
    )
    warmup: int = dataclasses.field(
        default=0, metadata=_help("requests sent before, at the same rate, that count for nothing")
    )
    drain_s: float = dataclasses.field(
        default=120.0, metadata=_help("how long answers are waited for after the last request was due")
    )
    timeout_s: float = dataclasses.field(
        default=600.0, metadata=_help("an answer that takes longer has failed, from when it was sent")
    )
    connections_max: int = dataclasses.field(
        default=10_000, metadata=_help("open at once, all processes together; a request beyond that has failed")
    )
    aiperf: str = dataclasses.field(default="aiperf", metadata=_help("of --driver aiperf: its command"))

    def __post_init__(self) -> None:
        for name in ("drain_s", "timeout_s"):
            check_positive(name, getattr(self, name), maximum=86400)
        check_positive("connections_max", self.connections_max, maximum=1_000_000)
        if not 0 <= self.processes <= 256:
            raise ConfigError(f"processes must be 0 to 256, not {self.processes}")
        if not 0 <= self.warmup <= REQUESTS_MAX:
            raise ConfigError(f"warmup must be 0 to {REQUESTS_MAX}, not {self.warmup}")


@dataclasses.dataclass(frozen=True)
class GoalOptions:
    """What is good."""

    goodput: str = dataclasses.field(
        default="",
        metadata=_help('limits in ms that a request must meet: "ttft:200 tpot:50", also e2e and gap (the longest)'),
    )
    attainment: float = dataclasses.field(
        default=0.9, metadata=_help("share of the requests due that must meet all limits")
    )

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"attainment must be above 0 and at most 1, not {self.attainment}")


@dataclasses.dataclass(frozen=True)
class OutOptions:
    """Where the artefacts go."""

    out: str = dataclasses.field(
        default="",
        metadata=_help(
            "new directory for run.json, requests.jsonl, summary.csv and report.html; empty: kvxfer-load-DATE-TIME here"
        ),
    )
    report: bool = dataclasses.field(default=True, metadata=_help("write report.html"))
