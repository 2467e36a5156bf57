"""What two engines compare, and which are refused at start."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace

import pytest

from kvxfer.connectors.vllm.record import (
    adapter_fingerprint,
    check_groups,
    check_parallel,
    check_scales,
    config_fingerprint,
    engine_facts,
    weights_fingerprint,
)
from kvxfer.errors import ConfigError
from kvxfer.types import why_unknown


class FullAttentionSpec: ...


class SlidingWindowSpec: ...


class MambaSpec: ...


def groups(*kinds: type) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=kind()) for kind in kinds])


def test_one_group_of_full_attention_is_moved() -> None:
    check_groups(groups(FullAttentionSpec))


@pytest.mark.parametrize("kinds", [(SlidingWindowSpec,), (MambaSpec,), (FullAttentionSpec, MambaSpec)])
def test_hybrid_models_are_refused_by_their_kinds(kinds: tuple[type, ...]) -> None:
    with pytest.raises(ConfigError, match=", ".join(sorted(kind.__name__ for kind in kinds))):
        check_groups(groups(*kinds))


def test_a_rank_keeps_all_tokens_of_all_layers() -> None:
    check_parallel(SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1))
    with pytest.raises(ConfigError, match="pipeline_parallel_size 2"):
        check_parallel(SimpleNamespace(pipeline_parallel_size=2))
    with pytest.raises(ConfigError, match="decode_context_parallel_size 2"):
        check_parallel(SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=2))


def test_a_config_is_the_same_wherever_it_lies() -> None:
    one = {"hidden_size": 8, "rope_theta": 1e4, "_name_or_path": "/a", "transformers_version": "1"}
    two = {"rope_theta": 1e4, "hidden_size": 8, "_name_or_path": "/b", "torch_dtype": "float16"}
    assert config_fingerprint(one) == config_fingerprint(two)
    assert config_fingerprint(one) != config_fingerprint({**one, "rope_theta": 5e5})


def test_flags_of_the_engine_are_of_its_config() -> None:
    def of(**flags: object) -> str:
        model = SimpleNamespace(model="m", revision=None, **flags)
        return config_fingerprint(
            {"hidden_size": 8}, engine_facts(SimpleNamespace(model_config=model, cache_config=None))
        )

    plain = of(quantization=None, multimodal_config=None)
    assert of() == plain
    seen = {plain, of(quantization="fp8"), of(disable_sliding_window=True), of(quantization_config={"linear": "int8"})}
    assert len(seen) == 4


def test_how_images_are_made_ready_is_of_the_config(tmp_path: pathlib.Path) -> None:
    def of(name: str, content: str, **kwargs: object) -> str:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "preprocessor_config.json").write_text(content)
        multimodal = SimpleNamespace(mm_processor_kwargs=kwargs)
        model = SimpleNamespace(model=str(directory), revision=None, multimodal_config=multimodal)
        return config_fingerprint({}, engine_facts(SimpleNamespace(model_config=model, cache_config=None)))

    assert of("a", "{}") == of("b", "{}")
    assert len({of("a", "{}"), of("a", '{"size": 1}'), of("a", "{}", num_crops=4)}) == 3
    nowhere = SimpleNamespace(model="no/such", revision=None, multimodal_config=SimpleNamespace(mm_processor_kwargs={}))
    facts = [engine_facts(SimpleNamespace(model_config=nowhere, cache_config=None)) for _ in range(2)]
    assert facts[0] != facts[1]  # what cannot be read equals nothing


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
