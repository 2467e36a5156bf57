"""What two engines compare, and which are refused at start."""

from __future__ import annotations

import dataclasses
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.common.checkpoint import config_fingerprint
from kvxfer.connectors.vllm.facts import engine_facts
from kvxfer.connectors.vllm.record import adapter_fingerprint, check_scales, weights_fingerprint
from kvxfer.errors import ConfigError
from kvxfer.protocol.facts import differences, digest_of, facts_text
from kvxfer.types import why_unknown


def test_a_config_is_the_same_wherever_it_lies() -> None:
    one = {"hidden_size": 8, "rope_theta": 1e4, "_name_or_path": "/a", "transformers_version": "1"}
    two = {"rope_theta": 1e4, "hidden_size": 8, "_name_or_path": "/b", "torch_dtype": "float16"}
    assert config_fingerprint(one) == config_fingerprint(two)
    assert facts_of(one) == facts_of(two)
    assert config_fingerprint(one) != config_fingerprint({**one, "rope_theta": 5e5})
    assert differing(one, {**one, "rope_theta": 5e5}) == [("hf_config.rope_theta", "10000.0", "500000.0")]


class HfConfig(dict[str, Any]):
    def to_dict(self) -> dict[str, Any]:
        return dict(self)


def dataclass_of(name: str, **values: Any) -> Any:
    """As vLLM's configuration objects are."""
    return dataclasses.make_dataclass(name, [(key, Any) for key in values])(**values)


def facts_of(
    config: dict[str, Any] | None = None, cache: Any = None, speculative: Any = None, **flags: Any
) -> dict[str, str]:
    """The facts of an engine with those flags of its model."""
    hf_config = HfConfig(config or {"hidden_size": 8})
    made = {"model": "m", "revision": None, "max_model_len": 4096, "hf_config": hf_config, **flags}
    engine = dataclass_of(
        "VllmConfig",
        model_config=dataclass_of("ModelConfig", **made),
        cache_config=cache,
        speculative_config=speculative,
    )
    return engine_facts(engine, variables=())


def differing(one: Any, other: Any) -> list[tuple[str, str, str]]:
    """How two model configs, or two engines' facts, differ."""
    texts = [
        facts_text(side if all(isinstance(v, str) for v in side.values()) else facts_of(side)) for side in (one, other)
    ]
    return list(differences(*texts))


def test_flags_of_the_engine_are_of_its_config() -> None:
    plain = facts_of(quantization=None, multimodal_config=None)
    assert facts_of(disable_sliding_window=False, max_model_len=8192) == plain
    assert facts_of(seed=7, served_model_name="x", tokenizer="/elsewhere") == plain
    named = {
        "model_config.quantization": facts_of(quantization="fp8"),
        "model_config.disable_sliding_window": facts_of(disable_sliding_window=True),
        "model_config.quantization_config.linear": facts_of(quantization_config={"linear": "int8"}),
        "model_config.of_a_version_to_come": facts_of(of_a_version_to_come=1),
        "cache_config.kv_cache_dtype_skip_layers": facts_of(
            cache=dataclass_of("CacheConfig", kv_cache_dtype_skip_layers=["0"])
        ),
        "cache_config.kv_sharing_fast_prefill": facts_of(
            cache=dataclass_of("CacheConfig", kv_sharing_fast_prefill=True)
        ),
    }
    for name, facts in named.items():
        assert [difference[0] for difference in differing(plain, facts)] == [name]


def test_a_platforms_own_settings_say_themselves_what_they_are() -> None:
    class Own:
        def __init__(self, value: int) -> None:
            self.value = value

        def compute_hash(self) -> str:
            return f"of {self.value}"

    model = dataclass_of("ModelConfig", max_model_len=8, hf_config=HfConfig(hidden_size=8))

    def of(value: Any) -> dict[str, str]:
        return engine_facts(dataclass_of("VllmConfig", model_config=model, additional_config=value), variables=())

    assert of(Own(1)) == of(Own(1))
    assert list(differences(facts_text(of(Own(1))), facts_text(of(Own(2))))) == [("additional_config", "of 1", "of 2")]
    with pytest.raises(ConfigError, match="additional_config has a value of type object"):
        of(object())


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters", "text_config"])
def test_rotary_embeddings_chosen_by_the_longest_context_are_of_its_config(name: str) -> None:
    long = {name: {"rope_type": "longrope", "short_factor": [1.0]}}
    if name == "text_config":
        long = {name: {"rope_scaling": {"type": "su", "short_factor": [1.0]}}}
    plain = {name: {"rope_type": "llama3", "factor": 8.0, "of": [{"type": ["longrope"]}]}}
    assert facts_of(long, max_model_len=4096) != facts_of(long, max_model_len=131072)
    assert facts_of(plain, max_model_len=4096) == facts_of(plain, max_model_len=131072)


def test_a_draft_model_is_of_the_config() -> None:
    def drafted(size: int, method: str = "eagle", **more: Any) -> dict[str, str]:
        draft = dataclass_of("ModelConfig", hf_config=HfConfig(hidden_size=size), max_model_len=4096)
        return facts_of(speculative=dataclass_of("SpeculativeConfig", method=method, draft_model_config=draft, **more))

    assert len({digest_of(facts) for facts in (facts_of(), drafted(8), drafted(16))}) == 3
    assert drafted(8, num_speculative_tokens=2) == drafted(8, num_speculative_tokens=5)
    assert drafted(8, "ngram") == facts_of()  # drafts come out of the text: no layer of a model is in the cache
    assert ("draft.hf_config.hidden_size", "8", "16") in differing(drafted(8), drafted(16))


def test_how_images_are_made_ready_is_of_the_config(tmp_path: pathlib.Path) -> None:
    def of(name: str, content: str, scales: str = "", **kwargs: object) -> dict[str, str]:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "preprocessor_config.json").write_text(content)
        (directory / "scales.json").write_text(scales)
        path = str(directory / "scales.json") if scales else None
        images = dataclass_of("MultiModalConfig", mm_processor_kwargs=kwargs, mm_encoder_fp8_scale_path=path)
        return facts_of(model=str(directory), multimodal_config=images)

    assert of("a", "{}") == of("b", "{}")
    assert of("a", "{}", "1.5") == of("b", "{}", "1.5")
    differs = (
        of("a", "{}"),
        of("a", '{"size": 1}'),
        of("a", "{}", num_crops=4),
        of("a", "{}", "1"),
        of("a", "{}", "2"),
    )
    assert len({digest_of(facts) for facts in differs}) == 5
    nowhere = {"model": "no/such", "multimodal_config": dataclass_of("MultiModalConfig", mm_processor_kwargs={})}
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
