"""What two engines compare, and which are refused at start."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.vllm.record import (
    adapter_fingerprint,
    check_scales,
    config_fingerprint,
    engine_facts,
    weights_fingerprint,
)
from kvxfer.errors import ConfigError
from kvxfer.types import why_unknown


def test_a_config_is_the_same_wherever_it_lies() -> None:
    one = {"hidden_size": 8, "rope_theta": 1e4, "_name_or_path": "/a", "transformers_version": "1"}
    two = {"rope_theta": 1e4, "hidden_size": 8, "_name_or_path": "/b", "torch_dtype": "float16"}
    assert config_fingerprint(one) == config_fingerprint(two)
    assert config_fingerprint(one) != config_fingerprint({**one, "rope_theta": 5e5})


class HfConfig(dict[str, Any]):
    def to_dict(self) -> dict[str, Any]:
        return dict(self)


def facts_of(config: dict[str, Any] | None = None, cache: Any = None, speculative: Any = None, **flags: Any) -> str:
    """The fingerprint of an engine with those flags of its model, as one text."""
    hf_config = HfConfig(config or {"hidden_size": 8})
    model = SimpleNamespace(**{"model": "m", "revision": None, "max_model_len": 4096, "hf_config": hf_config, **flags})
    engine = SimpleNamespace(model_config=model, cache_config=cache, speculative_config=speculative)
    return config_fingerprint(hf_config.to_dict(), engine_facts(engine))


def test_flags_of_the_engine_are_of_its_config() -> None:
    plain = facts_of(quantization=None, multimodal_config=None)
    assert facts_of(disable_sliding_window=False, max_model_len=8192) == plain
    seen = {
        plain,
        facts_of(quantization="fp8"),
        facts_of(disable_sliding_window=True),
        facts_of(quantization_config={"linear": "int8"}),
        facts_of(cache=SimpleNamespace(kv_cache_dtype_skip_layers=["0"])),
        facts_of(cache=SimpleNamespace(kv_sharing_fast_prefill=True)),
    }
    assert len(seen) == 6


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters", "text_config"])
def test_rotary_embeddings_chosen_by_the_longest_context_are_of_its_config(name: str) -> None:
    long = {name: {"rope_type": "longrope", "short_factor": [1.0]}}
    if name == "text_config":
        long = {name: {"rope_scaling": {"type": "su", "short_factor": [1.0]}}}
    plain = {name: {"rope_type": "llama3", "factor": 8.0, "of": [{"type": ["longrope"]}]}}
    assert facts_of(long, max_model_len=4096) != facts_of(long, max_model_len=131072)
    assert facts_of(plain, max_model_len=4096) == facts_of(plain, max_model_len=131072)


def test_a_draft_model_is_of_the_config() -> None:
    def drafted(size: int) -> str:
        draft = SimpleNamespace(hf_config=HfConfig(hidden_size=size))
        return facts_of(speculative=SimpleNamespace(method="eagle", draft_model_config=draft))

    assert len({facts_of(), drafted(8), drafted(16)}) == 3
    assert drafted(8) == drafted(8)


def test_how_images_are_made_ready_is_of_the_config(tmp_path: pathlib.Path) -> None:
    def of(name: str, content: str, **kwargs: object) -> str:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "preprocessor_config.json").write_text(content)
        return facts_of(model=str(directory), multimodal_config=SimpleNamespace(mm_processor_kwargs=kwargs))

    assert of("a", "{}") == of("b", "{}")
    assert len({of("a", "{}"), of("a", '{"size": 1}'), of("a", "{}", num_crops=4)}) == 3
    nowhere = {"model": "no/such", "multimodal_config": SimpleNamespace(mm_processor_kwargs={})}
    assert facts_of(**nowhere) != facts_of(**nowhere)  # what cannot be read equals nothing


def test_scales_that_each_engine_finds_out_are_refused() -> None:
    check_scales(SimpleNamespace(calculate_kv_scales=False))
    check_scales(SimpleNamespace())
    with pytest.raises(ConfigError, match="scales"):
        check_scales(SimpleNamespace(calculate_kv_scales=True))


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"])
def test_weights_fingerprint_of_any_kind_of_weight_file_is_its_content(suffix: str, tmp_path: pathlib.Path) -> None:
    prints = []
    for name, content in (("a", b"x" * 999), ("b", b"x" * 999), ("c", b"x" * 998 + b"y"), ("d", b"x" * 998)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / f"model{suffix}").write_bytes(content)
        prints.append(weights_fingerprint(str(directory), "", "0"))
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_weights_fingerprint_without_files_equals_nothing(tmp_path: pathlib.Path) -> None:
    for model in ("org/model", str(tmp_path)):
        prints = [weights_fingerprint(model, "", "0") for _ in range(2)]
        assert prints[0] != prints[1]
        assert all(why_unknown(found) for found in prints)


def test_an_adapter_is_what_its_files_hold_wherever_they_lie(tmp_path: pathlib.Path) -> None:
    seen = set()
    for rank, weights in ((8, b"1" * 9000), (8, b"1" * 8999 + b"2"), (16, b"1" * 9000), (8, b"2" + b"1" * 8999)):
        both = []
        for place in ("here", "there"):
            directory = tmp_path / place
            directory.mkdir(exist_ok=True)
            (directory / "adapter_config.json").write_text(f'{{"r": {rank}}}')
            (directory / "adapter_model.safetensors").write_bytes(weights)
            both.append(adapter_fingerprint(str(directory)))
        assert both[0] == both[1]
        seen |= set(both)
    assert len(seen) == 4
    assert adapter_fingerprint("org/one") != adapter_fingerprint("org/one")
