"""The mock engine's settings; the command line makes its flags from these fields. Must never know a flag."""

from __future__ import annotations

import dataclasses
import enum

from kvxfer.config import check_positive, is_loopback
from kvxfer.errors import ConfigError
from kvxfer.forecast.cost import LinearCost
from kvxfer.forecast.step import StepLimits
from kvxfer.openai.transfer_params import BODY_BYTES_MAX, LEG_BYTES_MAX

ENGINES_MAX = 4096


class EngineKind(enum.StrEnum):
    """Which engine's routes and error bodies are served. ``any``: all of them."""

    ANY = "any"
    VLLM = "vllm"
    SGLANG = "sglang"
    KVXFER = "kvxfer"


class EngineRole(enum.StrEnum):
    """Which part of a request the engine takes where the request does not say it (SGLang's do not)."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class PaceKind(enum.StrEnum):
    """What decides when a token is ready: a fixed time, or the step model."""

    FIXED = "fixed"
    STEPS = "steps"


class LoadFailurePolicy(enum.StrEnum):
    """What a decode engine does with a request whose KV it cannot get; the words are vLLM's."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


class EventsFormat(enum.StrEnum):
    """How KV events are packed: as arrays (vLLM's releases), or as maps (vLLM's main branch in 2026)."""

    ARRAY = "array"
    MAP = "map"


@dataclasses.dataclass(frozen=True)
class MockEngineOptions:
    """How the engines of one process run. Raises ConfigError for a bad value."""

    host: str = dataclasses.field(default="127.0.0.1", metadata={"help": "address to listen on"})
    ports: str = dataclasses.field(
        default="", metadata={"help": "ports, one engine each: 8100-8107 or 8100,8102; default: --count free ones"}
    )
    count: int = dataclasses.field(default=1, metadata={"help": "engines on free ports, if --ports is not given"})
    roles: tuple[EngineRole, ...] = dataclasses.field(
        default=(EngineRole.BOTH,),
        metadata={"help": "role of each engine in the order of its port; the last one counts for all that follow"},
    )
    kind: EngineKind = dataclasses.field(default=EngineKind.ANY, metadata={"help": "which engine's routes are served"})
    model: tuple[str, ...] = dataclasses.field(
        default=("mock",), metadata={"help": "names of the model; a request for another one is 404"}
    )
    max_model_len: int = dataclasses.field(default=131072, metadata={"help": "most tokens of a prompt and its answer"})
    answer_tokens: int = dataclasses.field(
        default=64, metadata={"help": "tokens of an answer whose request names no limit"}
    )
    insecure: bool = dataclasses.field(
        default=False, metadata={"help": "allow a non-loopback host although anything there can be asked"}
    )
    pace: PaceKind = dataclasses.field(
        default=PaceKind.FIXED, metadata={"help": "fixed: --ttft-ms and --itl-ms; steps: the step model"}
    )
    ttft_ms: float = dataclasses.field(default=0.0, metadata={"help": "fixed pace: time to the first token"})
    itl_ms: float = dataclasses.field(
        default=10.0, metadata={"help": "fixed pace: time between two tokens; 0: all at once"}
    )
    speed: float = dataclasses.field(
        default=1.0, metadata={"help": "step model: how many times faster than real time it runs"}
    )
    step_ms: float = dataclasses.field(default=6.0, metadata={"help": "step model: time of an empty step"})
    prefill_token_us: float = dataclasses.field(
        default=25.0, metadata={"help": "step model: time for each prompt token"}
    )
    decode_sequence_us: float = dataclasses.field(
        default=20.0, metadata={"help": "step model: time for each sequence that gets a token"}
    )
    context_token_ns: float = dataclasses.field(
        default=4.0, metadata={"help": "step model: time for each token of a decoding sequence's context"}
    )
    prefill_context_token_ns: float = dataclasses.field(
        default=0.0,
        metadata={"help": "step model: time for each token that a prompt token attends to, those before it"},
    )
    max_num_batched_tokens: int = dataclasses.field(default=8192, metadata={"help": "step model: tokens of a step"})
    max_num_seqs: int = dataclasses.field(default=256, metadata={"help": "step model: running sequences"})
    block_size: int = dataclasses.field(default=16, metadata={"help": "tokens of a KV block"})
    blocks: int = dataclasses.field(default=8192, metadata={"help": "KV blocks"})
    prefix_caching: bool = dataclasses.field(
        default=True, metadata={"help": "step model: reuse the KV of a prompt's beginning"}
    )
    prompt_tokens_details: bool = dataclasses.field(
        default=True,
        metadata={
            "help": "tell cached prompt tokens in usage, as vLLM does with --enable-prompt-tokens-details and SGLang "
            "with --enable-cache-report"
        },
    )
    kv_lease_s: float = dataclasses.field(
        default=30.0, metadata={"help": "how long a prefill engine holds blocks that are not fetched"}
    )
    kv_wait_s: float = dataclasses.field(
        default=30.0, metadata={"help": "how long a decode engine waits for a prefill that has not come"}
    )
    kv_load_failure_policy: LoadFailurePolicy = dataclasses.field(
        default=LoadFailurePolicy.FAIL, metadata={"help": "what a decode engine does if it cannot get a prompt's KV"}
    )
    transfer_ms: float = dataclasses.field(default=0.0, metadata={"help": "time of a transfer of KV"})
    transfer_token_us: float = dataclasses.field(
        default=0.0, metadata={"help": "more time of a transfer for each token"}
    )
    bootstrap_port: int = dataclasses.field(
        default=0, metadata={"help": "first port of SGLang's bootstrap servers, one an engine; 0: the HTTP port serves"}
    )
    kv_events_port: int = dataclasses.field(
        default=0, metadata={"help": "first port of the KV events (ZMQ), one an engine; 0: none"}
    )
    kv_events_replay_port: int = dataclasses.field(
        default=0, metadata={"help": "first port that replays KV events; 0: none"}
    )
    kv_events_topic: str = dataclasses.field(default="", metadata={"help": "topic of the KV events"})
    kv_events_format: EventsFormat = dataclasses.field(
        default=EventsFormat.ARRAY, metadata={"help": "how KV events are packed"}
    )
    max_body_bytes: int = dataclasses.field(
        default=BODY_BYTES_MAX + LEG_BYTES_MAX, metadata={"help": "longest body of a request"}
    )
    record: int = dataclasses.field(default=64, metadata={"help": "requests that /mock/requests shows; 0: none"})
    seed: int = dataclasses.field(default=0, metadata={"help": "seed of the faults that have a probability"})

    def __post_init__(self) -> None:
        check_positive("count", self.count, maximum=ENGINES_MAX)
        for name in ("speed", "kv_lease_s", "kv_wait_s"):
            check_positive(name, getattr(self, name), maximum=1e6)
        for name in ("max_model_len", "answer_tokens", "max_body_bytes"):
            check_positive(name, getattr(self, name), maximum=1 << 31)
        for name in (
            *("ttft_ms", "itl_ms", "transfer_ms", "transfer_token_us", "step_ms", "prefill_token_us"),
            *("decode_sequence_us", "context_token_ns", "prefill_context_token_ns"),
        ):
            if not 0 <= getattr(self, name) <= 1e7:
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)!r}")
        if not 0 <= self.record <= 1 << 16:
            raise ConfigError(f"record must be 0 to {1 << 16}, not {self.record!r}")
        if not self.roles:
            raise ConfigError("roles must name at least one role")
        if not self.model or not all(self.model):
            raise ConfigError("model must name at least one model")
        if not is_loopback(self.host) and not self.insecure:
            raise ConfigError(
                f"host {self.host!r} is not loopback, and the mock engine asks for no key; --insecure accepts that"
            )
        engines = len(self.port_list)
        if len(self.roles) > engines:
            raise ConfigError(f"roles names {len(self.roles)} roles, and there are {engines} engines: give more ports")
        for name in ("bootstrap_port", "kv_events_port", "kv_events_replay_port"):
            if not 0 <= getattr(self, name) <= 65536 - engines:
                raise ConfigError(f"{name} must leave room for {engines} ports below 65536, not {getattr(self, name)}")
        if (self.kv_events_port or self.kv_events_replay_port) and self.pace is not PaceKind.STEPS:
            raise ConfigError("KV events come from the step model: they need --pace steps")
        if self.kv_events_replay_port and not self.kv_events_port:
            raise ConfigError("kv_events_replay_port needs kv_events_port")
        _ = self.limits, self.cost

    @property
    def port_list(self) -> list[int]:
        """The port of each engine; 0 stands for a free one."""
        if not self.ports:
            return [0] * self.count
        found: list[int] = []
        for part in self.ports.split(","):
            first, dash, last = part.strip().partition("-")
            try:
                begin, end = int(first), int(last) if dash else int(first)
            except ValueError:
                raise ConfigError(f"ports must be like 8100-8107 or 8100,8102, not {self.ports!r:.100}") from None
            if not 0 <= begin <= end < 65536 or (begin == 0 < end) or end - begin >= ENGINES_MAX:
                raise ConfigError(f"ports must be 1 to 65535, at most {ENGINES_MAX}, rising; not {part.strip()!r:.100}")
            found += range(begin, end + 1)
        named = [port for port in found if port]
        if len(set(named)) != len(named):
            raise ConfigError(f"ports names a port twice: {self.ports!r:.100}")
        return found

    def role_of(self, index: int) -> EngineRole:
        return self.roles[min(index, len(self.roles) - 1)]

    @property
    def limits(self) -> StepLimits:
        return StepLimits(
            token_budget=self.max_num_batched_tokens,
            batch_max=self.max_num_seqs,
            chunk_max=self.max_num_batched_tokens,
            block_tokens=self.block_size,
            blocks=self.blocks,
            has_prefix_cache=self.prefix_caching,
        )

    @property
    def cost(self) -> LinearCost:
        return LinearCost(
            self.step_ms / 1e3,
            self.prefill_token_us / 1e6,
            self.decode_sequence_us / 1e6,
            self.context_token_ns / 1e9,
            self.prefill_context_token_ns / 1e9,
        )
