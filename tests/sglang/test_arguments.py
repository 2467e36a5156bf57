"""SGLang's real server arguments: all of them are known, and a usual pair has the same facts."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import pytest

from kvxfer.connectors.sglang.facts import facts_of
from tests.support.sglang import launch
from tests.support.sglang.arguments import ARGUMENTS

USUAL = {
    "prefill": (
        *("--disable-radix-cache", "--chunked-prefill-size", "512", "--disable-overlap-schedule", "--log-requests"),
        *("--mem-fraction-static", "0.2", "--disable-prefill-cuda-graph", "--served-model-name", "p"),
    ),
    "decode": (
        *("--max-running-requests", "64", "--page-size", "32", "--num-reserved-decode-tokens", "256"),
        *("--mem-fraction-static", "0.5", "--cuda-graph-max-bs-decode", "16", "--log-level", "debug"),
        *("--stream-interval", "4", "--watchdog-timeout", "60", "--dtype", "float32", "--context-length", "4096"),
    ),
}
"""Flags in which a prefill and a decode engine of one model differ."""


def facts(model: pathlib.Path, role: str, *flags: str) -> dict[str, str]:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from kvxfer.connectors.sglang.adapter_0_5_23 import resolved

    load_plugins()
    command = launch.server("python", str(model), 31000, *flags, role=role, bootstrap=8998)
    arguments: Any = prepare_server_args(command[3:])
    return facts_of(resolved(arguments), ModelConfig.from_server_args(arguments))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """One model, at two places."""
    directory = tmp_path_factory.mktemp("models")
    first = launch.make_tiny_llama(directory / "first")
    return first, pathlib.Path(shutil.copytree(first, directory / "second"))


def test_every_argument_of_this_version_is_recorded() -> None:
    """An argument that a version adds counts. Record it, and think of whether it can change KV."""
    from sglang.srt.server_args import ServerArgs

    assert sorted(ServerArgs.__struct_fields__) == sorted(ARGUMENTS)


def test_a_usual_prefill_and_decode_engine_have_the_same_facts(models: tuple[pathlib.Path, pathlib.Path]) -> None:
    prefill, decode = (facts(model, role, *USUAL[role]) for model, role in zip(models, USUAL, strict=True))
    assert prefill == decode
    assert "content " in prefill["tokenizer_path"]


def test_scales_of_the_kv_cache_are_compared(models: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> None:
    scales = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for path, text in zip(scales, ("{}", "{}", "[]"), strict=True):
        path.write_text(text)
    one, same, other = (facts(models[0], "prefill", "--quantization-param-path", str(path)) for path in scales)
    assert one == same
    differ = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    assert differ == {"quantization_param_path"}
