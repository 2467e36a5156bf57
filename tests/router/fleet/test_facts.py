"""What engines say of themselves, and what peers might send instead."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.router.fleet.facts import (
    EngineIdentity,
    EngineLoad,
    load_of,
    read_metrics,
    read_models,
    read_server_info,
)
from kvxfer.types import Load

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="100"} 1.0
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m",tp_rank="0"} 5.0
sglang:num_running_reqs{model_name="m",tp_rank="1"} 5.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
sglang:num_decode_transfer_queue_reqs{model_name="m",tp_rank="0"} 1.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.5
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 3200.0
"""


def test_metrics_of_vllm_are_added_up_over_its_engines() -> None:
    said = read_metrics(VLLM)
    assert said == EngineLoad(running=7, queued=3, used=0.5, blocks=200, block_tokens=16)
    assert load_of(said, EngineIdentity()) == (Load(3, 7, 0, 100, 200), 16)


def test_metrics_of_one_engine_behind_a_shared_address() -> None:
    said = read_metrics(VLLM, dp_rank=1)
    assert said == EngineLoad(running=4, queued=2, used=0.75, blocks=100, block_tokens=16)
    assert read_metrics(VLLM, dp_rank=2) is None


def test_metrics_of_sglang_are_of_its_first_tensor_parallel_rank() -> None:
    said = read_metrics(SGLANG)
    assert said == EngineLoad(running=5, queued=3, used=0.5, pool_tokens=3200)
    assert load_of(said, EngineIdentity(block_tokens=32)) == (Load(3, 5, 0, 50, 100), 32)


def test_metrics_without_the_size_of_the_pool_still_say_how_full_it_is() -> None:
    said = read_metrics(b"vllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.9\n")
    assert said is not None
    load, block_tokens = load_of(said, EngineIdentity())
    assert (load.free_blocks, load.total_blocks, block_tokens) == (100, 1000, 0)
    assert load_of(EngineLoad(running=1), EngineIdentity())[0] == Load(0, 1)


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1", b"x", b"", b"1e300"])
def test_metrics_that_are_no_count_are_left_out(value: bytes) -> None:
    assert read_metrics(b"vllm:num_requests_running " + value + b"\n") is None
    said = read_metrics(VLLM.replace(b"0.25", value))
    assert said is not None
    assert said.used == 0.75


def test_metrics_of_neither_engine_say_nothing() -> None:
    assert read_metrics(b"") is None
    assert read_metrics(b"up 1\nxvllm:num_requests_running 1\nvllm:num_requests_running_total 1\n") is None


@given(st.binary(max_size=300), st.integers(0, 600), st.integers(0, 600))
def test_metrics_of_any_bytes_are_a_load_or_nothing(noise: bytes, at: int, end: int) -> None:
    for page in (noise, VLLM[:at] + noise + VLLM[end:], VLLM[:at]):
        said = read_metrics(page)
        if said is not None:
            load, block_tokens = load_of(said, EngineIdentity())
            assert 0 <= load.free_blocks <= load.total_blocks
            assert min(load.running_requests, load.queued_requests, block_tokens) >= 0


def test_metrics_page_of_many_lines_is_read_in_part() -> None:
    line = b'vllm:num_requests_running{engine="%d"} 1\n'
    said = read_metrics(b"".join(line % n for n in range(10_000)))
    assert said is not None
    assert said.running == 64


def test_models_name_the_model_and_then_its_adapters() -> None:
    data = [
        {"id": "adapter", "parent": "base", "max_model_len": None},
        {"id": "base", "parent": None, "max_model_len": 4096},
        {"id": "also-base", "parent": None, "max_model_len": 4096},
        {"id": 7},
        "nonsense",
    ]
    identity = read_models(json.dumps({"object": "list", "data": data}).encode())
    assert identity is not None
    assert (identity.models, identity.max_context_tokens) == (("base", "also-base", "adapter"), 4096)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"{",
        b"[]",
        b'{"data":{}}',
        b'{"data":[]}',
        b'{"data":[{"id":""}]}',
        b'{"data":[{"id":["x"]}]}',
        b"[" * 9999,
    ],
)
def test_models_that_name_none_say_nothing(page: bytes) -> None:
    assert read_models(page) is None


def test_server_info_of_sglang() -> None:
    page = {"context_length": 8192, "page_size": 16, "max_total_num_tokens": 3200, "other": [1]}
    assert read_server_info(json.dumps(page).encode()) == EngineIdentity((), 8192, 16, 3200)
    assert read_server_info(b'{"context_length":null,"page_size":true,"max_total_num_tokens":-1}') == EngineIdentity()
    assert read_server_info(b"no") == EngineIdentity()
