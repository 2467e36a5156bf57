"""What an engine says of itself: vLLM's and SGLang's metrics, and SGLang's server, model and load objects.

Decides names and text only; the numbers are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from kvxfer.forecast.step import StepCounts
from kvxfer.mock_engine.generation import EnginePace
from kvxfer.mock_engine.holds import KvHolds
from kvxfer.mock_engine.options import EngineKind, EngineRole, MockEngineOptions
from kvxfer.mock_engine.statistics import BUCKETS_S, EngineCounts, EngineTimes, SecondsHistogram

VLLM_VERSION = "0.32.0"
SGLANG_VERSION = "0.5.23"


class ShownEngine(Protocol):
    """The engine, as far as it is shown."""

    options: MockEngineOptions
    port: int
    role: EngineRole
    bootstrap_port: int
    pace: EnginePace
    holds: KvHolds
    counts: EngineCounts
    times: EngineTimes


def metrics_text(engine: ShownEngine) -> bytes:
    """The page ``/metrics``."""
    kind = engine.options.kind
    lines: list[str] = []
    if kind in (EngineKind.ANY, EngineKind.VLLM, EngineKind.KVXFER):
        lines += _vllm(engine)
    if kind in (EngineKind.ANY, EngineKind.SGLANG):
        lines += _sglang(engine)
    lines += _own(engine)
    return ("\n".join(lines) + "\n").encode()


def _metric(name: str, kind: str, value: float, labels: str) -> Iterator[str]:
    yield f"# TYPE {name} {kind}"
    yield f"{name}{{{labels}}} {value:.10g}"


def _histogram(name: str, times: SecondsHistogram, labels: str) -> Iterator[str]:
    yield f"# TYPE {name} histogram"
    total = 0
    for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), times.counts, strict=True):
        total += count
        yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
    yield f"{name}_sum{{{labels}}} {times.sum:.10g}"
    yield f"{name}_count{{{labels}}} {total}"


def _vllm(engine: ShownEngine) -> Iterator[str]:
    options, pace = engine.options, engine.pace
    counts: StepCounts = pace.counts
    labels = f'model_name="{options.model[0]}",engine="0"'
    yield from _metric("vllm:num_requests_running", "gauge", pace.running, labels)
    yield from _metric("vllm:num_requests_waiting", "gauge", pace.waiting, labels)
    yield from _metric("vllm:kv_cache_usage_perc", "gauge", min(1.0, pace.used_blocks / options.blocks), labels)
    yield from _metric("vllm:num_preemptions_total", "counter", counts.preemptions, labels)
    yield from _metric("vllm:prefix_cache_queries_total", "counter", counts.cache_queried, labels)
    yield from _metric("vllm:prefix_cache_hits_total", "counter", counts.cache_hit, labels)
    computed = counts.prompt_computed + counts.cache_hit + counts.loaded
    yield from _metric("vllm:prompt_tokens_total", "counter", computed, labels)
    yield from _metric("vllm:generation_tokens_total", "counter", counts.output, labels)
    yield from _metric("vllm:nixl_num_kv_expired_reqs_total", "counter", engine.holds.counts.expired, labels)
    yield "# TYPE vllm:request_success_total counter"
    for reason in sorted({"stop", "length", *engine.counts.finished}):
        count = engine.counts.finished.get(reason, 0)
        yield f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}'
    yield from _histogram("vllm:time_to_first_token_seconds", engine.times.ttft, labels)
    yield from _histogram("vllm:e2e_request_latency_seconds", engine.times.e2e, labels)
    cached = options.prefix_caching
    info = f'block_size="{options.block_size}",num_gpu_blocks="{options.blocks}",enable_prefix_caching="{cached}"'
    yield from _metric("vllm:cache_config_info", "gauge", 1, f'{info},engine="0"')
    lora = 'max_lora="0",waiting_lora_adapters="",running_lora_adapters=""'
    yield from _metric("vllm:lora_requests_info", "gauge", 0, lora)


def _sglang(engine: ShownEngine) -> Iterator[str]:
    options, pace = engine.options, engine.pace
    labels = f'model_name="{options.model[0]}",tp_rank="0",pp_rank="0",engine_type="{_sglang_mode(engine.role)}"'
    hit = pace.counts.cache_hit / (pace.counts.cache_queried or 1)
    yield from _metric("sglang:num_running_reqs", "gauge", pace.running, labels)
    yield from _metric("sglang:num_queue_reqs", "gauge", pace.waiting, labels)
    yield from _metric("sglang:num_used_tokens", "gauge", pace.used_blocks * options.block_size, labels)
    yield from _metric("sglang:token_usage", "gauge", min(1.0, pace.used_blocks / options.blocks), labels)
    yield from _metric("sglang:max_total_num_tokens", "gauge", options.blocks * options.block_size, labels)
    yield from _metric("sglang:cache_hit_rate", "gauge", hit, labels)
    prompt = pace.counts.prompt_computed + pace.counts.cache_hit + pace.counts.loaded
    yield from _metric("sglang:prompt_tokens_total", "counter", prompt, labels)
    yield from _metric("sglang:generation_tokens_total", "counter", pace.counts.output, labels)
    yield from _histogram("sglang:time_to_first_token_seconds", engine.times.ttft, labels)
    yield from _histogram("sglang:e2e_request_latency_seconds", engine.times.e2e, labels)


def _own(engine: ShownEngine) -> Iterator[str]:
    counts, holds, labels = engine.counts, engine.holds, f'role="{engine.role}"'
    for name, value in (
        ("prompt_tokens_computed", engine.pace.counts.prompt_computed),
        ("blocks_released", holds.counts.blocks_released),
        ("blocks_expired", holds.counts.blocks_expired),
        ("clients_left", counts.clients_left),
        ("recomputes", counts.recomputes),
        ("silent_recomputes", counts.silent_recomputes),
    ):
        yield from _metric(f"mock:{name}_total", "counter", value, labels)
    yield from _metric("mock:blocks_held", "gauge", engine.pace.held_blocks, labels)


def _sglang_mode(role: EngineRole) -> str:
    return "null" if role is EngineRole.BOTH else role.value


def server_info(engine: ShownEngine) -> dict[str, Any]:
    """SGLang's ``/server_info``."""
    options = engine.options
    return {
        "model_path": options.model[0],
        "served_model_name": options.model[0],
        "tokenizer_path": options.model[0],
        "version": SGLANG_VERSION,
        "tp_size": 1,
        "dp_size": 1,
        "disaggregation_mode": _sglang_mode(engine.role),
        "disaggregation_bootstrap_port": engine.bootstrap_port or engine.port,
        "context_length": options.max_model_len,
        "page_size": options.block_size,
        "max_running_requests": options.max_num_seqs,
        "max_total_num_tokens": options.blocks * options.block_size,
        "chunked_prefill_size": options.max_num_batched_tokens,
        "status": "ready",
        "internal_states": [{"max_running_requests_per_dp": options.max_num_seqs}],
    }


def model_info(engine: ShownEngine) -> dict[str, Any]:
    """SGLang's ``/model_info``."""
    return {
        "model_path": engine.options.model[0],
        "tokenizer_path": engine.options.model[0],
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
    }


def load_info(engine: ShownEngine) -> dict[str, Any]:
    """One entry of SGLang's ``/get_load`` and ``/v1/loads``."""
    pace = engine.pace
    return {
        "dp_rank": 0,
        "num_reqs": pace.running + pace.waiting,
        "num_running_reqs": pace.running,
        "num_waiting_reqs": pace.waiting,
        "num_tokens": pace.used_blocks * engine.options.block_size,
        "max_total_num_tokens": engine.options.blocks * engine.options.block_size,
        "token_usage": round(min(1.0, pace.used_blocks / engine.options.blocks), 4),
    }
