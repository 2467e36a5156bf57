"""What does not fit is named, with both values."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from kvxfer.connectors.common.checkpoint import NotKnown, unknown
from kvxfer.connectors.sglang.limits import (
    Identity,
    Layout,
    check_arguments,
    check_components,
    check_peer,
    check_sizes,
    shortened,
)
from kvxfer.connectors.sglang.record import models_of
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.errors import ConfigError, IncompatibleError, WeightsUnknownError
from kvxfer.types import CompatibilityRecord

RECORD = CompatibilityRecord("m", "c", "w", "float32", 3, 2, 16, 16, "page", "6 x 256", "config", "torch_native")
LAYOUT = Layout((256,) * 6, (64, 512))
OURS = Identity(RECORD, LAYOUT)
SHAPE = KvShape((0, 1, 2) * 2, ("k",) * 3 + ("v",) * 3, (8,) * 6, 16, 0, 1, 2)
SIZES = {"attn_tp_size": 1, "attn_cp_size": 1, "pp_size": 1}


def check(*, is_cut: bool = False, decode_tp_size: int = 1, decode_pp_size: int = 1, **prefill: int) -> None:
    check_sizes(
        is_cut=is_cut,
        has_all_heads=False,
        prefill=SimpleNamespace(**(SIZES | prefill)),
        decode_tp_size=decode_tp_size,
        decode_pp_size=decode_pp_size,
    )


def test_equal_engines_match() -> None:
    check_peer(OURS, OURS)
    check()
    check(pp_size=2, decode_pp_size=2)


@pytest.mark.parametrize(("field", "value"), [("attention_backend", "fa3"), ("block_tokens", 64), ("tp_size", 2)])
def test_a_field_of_the_record_is_named_with_both_values(field: str, value: object) -> None:
    with pytest.raises(IncompatibleError, match=f"{field} is .*{getattr(RECORD, field)}.* here and .*{value}.* there"):
        check_peer(OURS, Identity(dataclasses.replace(RECORD, **{field: value}), LAYOUT))


def test_a_list_of_the_layout_is_named_shortly() -> None:
    other = dataclasses.replace(LAYOUT, kv_item_lens=(256,) * 5 + (128,))
    with pytest.raises(IncompatibleError, match="kv_item_lens is '6 x 256' here and '5 x 256, 128' there"):
        check_peer(OURS, Identity(RECORD, other))


def test_weights_that_are_not_known_match_nothing() -> None:
    strange = dataclasses.replace(RECORD, weights_fingerprint=unknown("they were updated"))
    with pytest.raises(WeightsUnknownError, match="there they were updated"):
        check_peer(OURS, Identity(strange, LAYOUT))
    with pytest.raises(WeightsUnknownError):
        check_peer(Identity(strange, LAYOUT), Identity(strange, LAYOUT))


def test_pages_whose_shapes_are_known_may_be_of_other_sizes() -> None:
    ours = Identity(RECORD, LAYOUT, SHAPE)
    theirs = Identity(
        RECORD, dataclasses.replace(LAYOUT, kv_item_lens=(128,) * 6), dataclasses.replace(SHAPE, tp_size=2)
    )
    check_peer(ours, theirs)
    with pytest.raises(IncompatibleError, match="shape is 'known' here and 'not known' there"):
        check_peer(ours, OURS)
    with pytest.raises(IncompatibleError, match="aux_item_lens"):
        check_peer(ours, dataclasses.replace(theirs, layout=dataclasses.replace(LAYOUT, aux_item_lens=(8,))))


@pytest.mark.parametrize("field", SIZES)
def test_sizes_that_differ_are_named(field: str) -> None:
    with pytest.raises(IncompatibleError, match=f"{field} is 1 here and 2 there"):
        check(**{field: 2})


@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (2, 6), (3, 3)])
def test_tensor_parallel_sizes_of_which_one_divides_the_other(prefill: int, decode: int) -> None:
    check(is_cut=True, attn_tp_size=prefill, decode_tp_size=decode)


def test_pipelines_end_in_one_stage_or_in_as_many() -> None:
    check(is_cut=True, pp_size=4)
    with pytest.raises(IncompatibleError, match="pp_size is 2 here and 4 there: it must be the same, or 1 here"):
        check(is_cut=True, pp_size=4, decode_pp_size=2)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 3), (3, 2), (0, 1), (4, 6)])
def test_ranks_that_cannot_be_paired_are_refused(prefill: int, decode: int) -> None:
    with pytest.raises(IncompatibleError, match=f"attn_tp_size is {decode} here and {prefill} there: one must divide"):
        check(is_cut=True, attn_tp_size=prefill, decode_tp_size=decode)


@pytest.mark.parametrize("found", ["dummy", "remote", "layered", "rdma"])
def test_a_load_format_whose_weights_are_never_known_is_named(found: str) -> None:
    for load_format in ("auto", "safetensors", None, SimpleNamespace(value="gguf")):
        check_arguments(SimpleNamespace(load_format=load_format))
    for load_format in (found, SimpleNamespace(value=found)):
        with pytest.raises(ConfigError, match=f"--load-format {found}, which reads no files"):
            check_arguments(SimpleNamespace(load_format=load_format))
    draft = SimpleNamespace(load_format="auto", speculative_draft_load_format=found)
    check_arguments(draft)
    draft.speculative_draft_model_path = "draft"
    with pytest.raises(ConfigError, match=f"--speculative-draft-load-format {found}"):
        check_arguments(draft)
    with pytest.raises(NotKnown, match=f"--speculative-draft-load-format {found}"):
        models_of(draft)()


def test_components_that_are_not_moved_are_named() -> None:
    check_components(["mamba", "swa"], [[1], [2]])
    with pytest.raises(ConfigError, match="dsa_tail"):
        check_components(["dsa_tail"], [[1]])
    with pytest.raises(ConfigError, match="'swa' lie nowhere"):
        check_components(["swa"], [[1, 0]])


def test_a_long_list_is_a_short_text() -> None:
    assert shortened((1, 1, 2)) == "2 x 1, 2"
    assert len(shortened(tuple(range(1000)))) <= 300
