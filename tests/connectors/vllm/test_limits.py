"""Engines that are refused when they start, because their KV cache would be moved wrong."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.vllm.groups import GroupKind, KvGroup
from kvxfer.connectors.vllm.limits import FULL_KINDS, check_engine, check_groups, groups_of
from kvxfer.errors import ConfigError
from tests.support.vllm_connector.interface import MANIFEST

MOVED = (*FULL_KINDS, "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec")


def engine(**model: Any) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(**model))


def caches(*kinds: str, fields: dict[str, Any] | None = None, **group: Any) -> SimpleNamespace:
    """A group of layers of these kinds of caches: of one, or under one cover."""
    specs = [type(kind, (), {"block_size": 16, **(fields or {})})() for kind in kinds]
    cover = type(
        "UniformTypeKVCacheSpecs",
        (),
        {"block_size": 16, "kv_cache_specs": {str(n): spec for n, spec in enumerate(specs)}},
    )
    whole = specs[0] if len(specs) == 1 else cover()
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["model.0"], kv_cache_spec=whole, **group)])


def test_a_plain_engine_of_any_version_may_start() -> None:
    check_engine(engine())
    check_engine(engine(enable_sleep_mode=False))
    groups_of(caches("FullAttentionSpec"))
    groups_of(caches("FullAttentionSpec", "MLAAttentionSpec", enable_kv_transfer=True))
    groups_of(caches("MLAAttentionSpec", fields={"tokens_per_state": 1}))


def test_sleep_mode_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"sleep mode.*--enable-sleep-mode"):
        check_engine(engine(enable_sleep_mode=True))


def test_routed_experts_are_refused_by_name() -> None:
    config = engine()
    config.aux_output_config = SimpleNamespace(enabled=True)
    with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
        check_engine(config)


def test_vllm_features_of_one_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"keeps the KV cache of 1 layers from model\.0 on"):
        groups_of(caches("FullAttentionSpec", enable_kv_transfer=False))


@pytest.mark.parametrize(
    "kind",
    sorted(
        line.removeprefix("kind of KV cache ").removesuffix(": there")
        for line in MANIFEST.read_text().splitlines()
        if line.startswith("kind of KV cache") and not any(f" {kind}:" in line for kind in MOVED)
    ),
)
def test_every_other_kind_of_cache_that_vllm_has_is_refused_by_name(kind: str) -> None:
    for config in (caches(kind), caches("FullAttentionSpec", kind)):
        with pytest.raises(ConfigError, match=f"kind {kind} yet"):
            groups_of(config)


def test_a_cache_of_one_state_for_many_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="kind MLAAttentionSpec"):
        groups_of(caches("MLAAttentionSpec", fields={"tokens_per_state": 4}))


def test_windows_chunks_and_states_are_read() -> None:
    def group(kind: str, **fields: Any) -> KvGroup:
        (found,) = groups_of(caches(kind, fields=fields)).groups
        return found

    assert group("SlidingWindowSpec", sliding_window=64).window == 64
    assert group("SlidingWindowSpec", sliding_window=64, extra_retained_tokens=3).window == 67
    assert group("ChunkedLocalAttentionSpec", attention_chunk_size=8).kind is GroupKind.CHUNKED
    state = group("MambaSpec", shapes=((3, 4), (2,)), dtypes=("torch.float32", "torch.bfloat16"), tokens_per_state=-1)
    assert (state.kind, state.content) == (GroupKind.STATE, "3x4 float32 2 bfloat16")


@pytest.mark.parametrize("kind", ["SlidingWindowSpec", "MambaSpec"])
def test_a_cover_of_windows_or_states_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"kind {kind} yet"):
        groups_of(caches("FullAttentionSpec", kind))


def test_blocks_that_vllm_zeroes_amid_a_load_are_refused() -> None:
    config = caches("FullAttentionSpec")
    check_groups(config, engine(), object)
    config.needs_kv_cache_zeroing = True
    with pytest.raises(ConfigError, match="zeroes"):
        check_groups(config, engine(), object)
    check_groups(config, engine(), type("Base", (), {"get_loaded_kv_cache_group_ids": None}))


def test_several_groups_need_a_vllm_that_hears_of_failed_loads() -> None:
    config = caches("FullAttentionSpec")
    config.kv_cache_groups *= 2
    with pytest.raises(ConfigError, match=r"0\.30"):
        check_groups(config, engine(), object)
    check_groups(config, engine(), type("Base", (), {"get_transfer_results": None}))


def test_states_of_a_speculating_engine_are_refused() -> None:
    config = caches("MambaSpec", fields={"shapes": ((1,),), "dtypes": ("f32",)})
    speculating = engine()
    speculating.speculative_config = object()
    with pytest.raises(ConfigError, match="speculatively"):
        check_groups(config, speculating, object)


def test_the_docs_table_names_the_kinds_that_move() -> None:
    text = (pathlib.Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    named = {row[1].strip().strip("`") for row in rows if len(row) == 4 and row[1].strip().endswith("Spec`")}
    assert named == set(MOVED)
    every = {"sliding_window": 8, "attention_chunk_size": 8, "shapes": ((1,),), "dtypes": ("f32",)}
    for kind in named:
        groups_of(caches(kind, fields=every))
