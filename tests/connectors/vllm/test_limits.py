"""Engines that are refused when they start, because their KV cache would be moved wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.vllm.limits import KINDS, check_engine, check_transferable
from kvxfer.errors import ConfigError
from tests.support.vllm_connector.interface import MANIFEST


def engine(**model: Any) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(**model))


def caches(*kinds: str, fields: dict[str, Any] | None = None, **group: Any) -> SimpleNamespace:
    """A group of layers of these kinds of caches: of one, or under one cover."""
    specs = [type(kind, (), fields or {})() for kind in kinds]
    cover = type("UniformTypeKVCacheSpecs", (), {"kv_cache_specs": {str(n): spec for n, spec in enumerate(specs)}})
    whole = specs[0] if len(specs) == 1 else cover()
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["model.0"], kv_cache_spec=whole, **group)])


def test_a_plain_engine_of_any_version_may_start() -> None:
    check_engine(engine())
    check_engine(engine(enable_sleep_mode=False))
    check_transferable(caches("FullAttentionSpec"))
    check_transferable(caches("FullAttentionSpec", "MLAAttentionSpec", enable_kv_transfer=True))
    check_transferable(caches("MLAAttentionSpec", fields={"tokens_per_state": 1}))


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
        check_transferable(caches("FullAttentionSpec", enable_kv_transfer=False))


@pytest.mark.parametrize(
    "kind",
    sorted(
        line.removeprefix("kind of KV cache ").removesuffix(": there")
        for line in MANIFEST.read_text().splitlines()
        if line.startswith("kind of KV cache") and not any(f" {kind}:" in line for kind in KINDS)
    ),
)
def test_every_other_kind_of_cache_that_vllm_has_is_refused_by_name(kind: str) -> None:
    for config in (caches(kind), caches("FullAttentionSpec", kind)):
        with pytest.raises(ConfigError, match=f"kind {kind} yet"):
            check_transferable(config)


def test_a_cache_of_one_state_for_many_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="kind MLAAttentionSpec"):
        check_transferable(caches("MLAAttentionSpec", fields={"tokens_per_state": 4}))
