"""What two engines compare, and which are refused at start."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace

import pytest

from kvxfer.connectors.vllm.record import (
    adapter_fingerprint,
    check_groups,
    check_parallel,
    config_fingerprint,
    weights_fingerprint,
)
from kvxfer.errors import ConfigError


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


def test_weights_are_told_apart_by_their_bytes(tmp_path: pathlib.Path) -> None:
    prints = []
    for name, content in (("a", b"x" * 999), ("b", b"x" * 999), ("c", b"x" * 998 + b"y"), ("d", b"x" * 998)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(len(b"{}").to_bytes(8, "little") + b"{}" + content)
        prints.append(weights_fingerprint(str(directory), "", "0"))
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_weights_that_are_no_files_are_their_name_and_seed() -> None:
    assert weights_fingerprint("org/model", "", "0") == weights_fingerprint("org/model", "", "0")
    assert weights_fingerprint("org/model", "", "0") != weights_fingerprint("org/model", "", "1")


def test_an_adapter_is_what_its_files_hold_wherever_they_lie(tmp_path: pathlib.Path) -> None:
    seen = set()
    for rank, weights in ((8, b"1" * 9000), (8, b"1" * 8999 + b"2"), (16, b"1" * 9000)):
        both = []
        for place in ("here", "there"):
            directory = tmp_path / place
            directory.mkdir(exist_ok=True)
            (directory / "adapter_config.json").write_text(f'{{"r": {rank}}}')
            (directory / "adapter_model.safetensors").write_bytes(weights)
            both.append(adapter_fingerprint(str(directory)))
        assert both[0] == both[1]
        seen |= set(both)
    assert len(seen) == 3
    assert adapter_fingerprint("org/one") != adapter_fingerprint("org/other")
