"""The settings of the installed vLLM: every field of its real configuration is written down as one that counts or is
exempt, a usual prefill and decode engine agree, and what changes KV is told by its name.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import subprocess
from typing import Any

from kvxfer.protocol.facts import FACTS_BYTES_MAX, differences, facts_text
from tests.connectors.vllm.test_facts import FIELDS
from tests.support.vllm.engines import CACHE, PYTHON, ROOT

SCRIPTS = ROOT / "tests" / "support" / "vllm"
ALIKE: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048}
PREFILL: dict[str, Any] = {
    **{"max_num_batched_tokens": 2048, "max_num_seqs": 8, "gpu_memory_utilization": 0.8, "seed": 1},
    **{"enforce_eager": True, "async_scheduling": False, "disable_log_stats": True, "num_gpu_blocks_override": 100},
    "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_producer", "kv_port": 1},
}
DECODE: dict[str, Any] = {
    **{"max_num_batched_tokens": 512, "max_num_seqs": 256, "gpu_memory_utilization": 0.9, "max_model_len": 1024},
    **{"enforce_eager": False, "enable_prefix_caching": False, "max_logprobs": 5, "served_model_name": "another"},
    **{"scheduling_policy": "priority", "generation_config": "vllm", "load_format": "safetensors"},
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_consumer", "kv_port": 2},
}
CHANGES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"dtype": "bfloat16"}, "model_config.dtype", "torch.float32", "torch.bfloat16"),
    ({"disable_sliding_window": True}, "model_config.disable_sliding_window", "not set", "true"),
    ({"hf_overrides": {"rms_norm_eps": 1e-3}}, "hf_config.rms_norm_eps", "1e-06", "0.001"),
    ({"model_impl": "transformers"}, "model_config.model_impl", "auto", "transformers"),
    ({"additional_config": {"scale_of_kv": 2}}, "additional_config.scale_of_kv", "not set", "2"),
    (
        {"worker_extension_cls": "json.JSONDecoder"},
        "parallel_config.worker_extension_cls",
        "not set",
        "json.JSONDecoder",
    ),
]
VARIABLES = {"VLLM_CPU_INT4_W4A8": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_HOST_IP": "127.0.0.1"}


def run(script: str, *arguments: str, **environment: str) -> str:
    more = {
        "VLLM_CACHE_ROOT": str(CACHE),
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(PYTHON), str(SCRIPTS / script), *arguments]
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("VLLM_")}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env={**inherited, **more, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_field_of_the_installed_version_is_written_down() -> None:
    """Another version, or a new field: look at what it does, exempt it if it cannot change KV, and write it down."""
    site = next((PYTHON.parent.parent / "lib").glob("python3.*")) / "site-packages"
    places = [str(site), *(path.read_text().strip() for path in site.glob("vllm-of-this-user.pth"))]
    version = next(iter(importlib.metadata.distributions(name="vllm-cpu", path=places))).version
    lines = [line for line in run("config_fields.py").splitlines() if line.startswith(("counts ", "exempt "))]
    assert lines == (FIELDS / f"{version}.txt").read_text().splitlines()


def test_a_usual_pair_agrees_and_what_changes_kv_is_named(tiny_model: pathlib.Path) -> None:
    alike = {**ALIKE, "model": str(tiny_model)}
    asked = [alike, {**alike, **PREFILL}, {**alike, **DECODE}, *({**alike, **change} for change, *_ in CHANGES)]
    plain, prefill, decode, *changed = json.loads(run("config_facts.py", json.dumps(asked)).splitlines()[-1])
    assert plain == prefill == decode
    assert len(facts_text(plain)) < FACTS_BYTES_MAX / 2
    for facts, (change, *named) in zip(changed, CHANGES, strict=True):
        assert tuple(named) in differences(facts_text(plain), facts_text(facts)), change
    [with_variables] = json.loads(run("config_facts.py", json.dumps([alike]), **VARIABLES).splitlines()[-1])
    [difference] = differences(facts_text(plain), facts_text(with_variables))
    assert difference == ("env.VLLM_CPU_INT4_W4A8", "not set", "1")
