"""Divisions of an engine among ranks, and pages: which are moved, and which are refused by name."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.connectors.vllm.groups import GroupKind, KvGroup, KvGroups
from kvxfer.connectors.vllm.pages import LayerStorage, Pages
from kvxfer.connectors.vllm.parallel import check_parallel, engine_shape, ranks_of, stages_text, total_heads
from kvxfer.connectors.vllm.readership import Readership
from kvxfer.connectors.vllm.record import check_page_bytes
from kvxfer.connectors.vllm.shares import shape_of, stages_of
from kvxfer.connectors.vllm.steps import LoadOrder
from kvxfer.errors import ConfigError, IncompatibleError
from kvxfer.transport.base import Region
from kvxfer.types import TransferId

PLAIN = KvGroups.plain(16)
WINDOWED = KvGroups((KvGroup(GroupKind.SLIDING, 16, 64), KvGroup(GroupKind.FULL, 16)))


class Knows:
    """vLLM's class of connectors, of a version that tells stages apart."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None: ...


def engine(speculative: Any = None, **sizes: int) -> SimpleNamespace:
    parallel = SimpleNamespace(**{"pipeline_parallel_size": 1, "tensor_parallel_size": 1, **sizes})
    return SimpleNamespace(parallel_config=parallel, speculative_config=speculative)


def test_a_rank_keeps_all_tokens_of_its_layers() -> None:
    check_parallel(engine(decode_context_parallel_size=1), WINDOWED, object)
    check_parallel(engine(pipeline_parallel_size=2), PLAIN, Knows)
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        with pytest.raises(ConfigError, match=f"{name} 2"):
            check_parallel(engine(**{name: 2}), PLAIN, Knows)


@pytest.mark.parametrize(
    ("made", "groups", "base", "why"),
    [
        (engine(pipeline_parallel_size=2), WINDOWED, Knows, "several KV groups"),
        (engine(pipeline_parallel_size=2), PLAIN, object, "which stage an agent is of: 0.32 and newer"),
        (engine(SimpleNamespace(), pipeline_parallel_size=2), PLAIN, Knows, "speculatively"),
    ],
)
def test_stages_that_cannot_be_told_apart_are_refused(
    made: SimpleNamespace, groups: KvGroups, base: type[Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size 2.*{why}"):
        check_parallel(made, groups, base)


def test_every_rank_of_every_stage_has_an_agent() -> None:
    assert ranks_of(engine(pipeline_parallel_size=2, tensor_parallel_size=4).parallel_config) == 8
    assert stages_text(engine(tensor_parallel_size=4)) == ""


def test_a_latent_is_one_head() -> None:
    model = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: 16)
    assert total_heads(SimpleNamespace(model_config=model)) == 16
    model.use_mla = True
    assert total_heads(SimpleNamespace(model_config=model)) == 1


def pages(layers: int) -> Pages:
    region = Region(0, 64 * layers, None)
    store = LayerStorage(region, layers, 0, np.arange(layers), np.ones(layers, np.int64))
    return Pages(tuple(f"layer {at}" for at in range(layers)), 64, (store,))


def test_a_stage_has_a_cache_for_each_of_its_layers() -> None:
    assert engine_shape(2, "", 1, pages(5)) == shape_of(2, stages_of("", 5))
    assert engine_shape(4, "2,5", 2, pages(3)) == shape_of(4, stages_of("2,5", 5))
    with pytest.raises(ConfigError, match="3 layers of a stage keep 2 caches"):
        engine_shape(4, "2,5", 2, pages(2))


def order(sources: int, stages: str = "") -> LoadOrder:
    names = tuple(f"p.{rank}" for rank in range(sources))
    return LoadOrder("l", TransferId(bytes(16)), names, 0, (1,), 16, b"", has_direct=False, stages=stages)


def test_a_reader_of_all_layers_reads_every_stage() -> None:
    reader = Readership(0, shape_of(1, stages_of("", 12)), 4)
    assert [share.layer_range for share, _ in reader.of(order(2, "4,12"))] == [range(4), range(4, 12)]
    assert [share.heads for share, _ in reader.of(order(2, "12"))] == [range(2), range(2, 4)]


@pytest.mark.parametrize(
    ("sources", "stages"),
    [(3, "6,12"), (2, "6,11"), (2, "x"), (2, "6,,12"), (5, ""), (1, "6,12"), (3, "")],
)
def test_what_no_engine_can_be_is_refused_by_name(sources: int, stages: str) -> None:
    """Stages must divide the layers and the ranks, tensor ranks the heads: of 12 layers with 4 heads."""
    reader = Readership(0, shape_of(1, stages_of("", 12)), 4)
    with pytest.raises(IncompatibleError, match="the source's ranks"):
        reader.of(order(sources, stages))
    assert reader.told_by(order(sources, stages)) == ()
    assert reader.counterpart(order(sources, stages)) is None


def test_several_storages_have_equal_stages() -> None:
    reader = Readership(0, shape_of(2, stages_of("6,12", 12)), 4, storages=2)
    assert reader.counterpart(order(2, "6,12")) is not None
    assert reader.counterpart(order(2)) is None
    with pytest.raises(IncompatibleError, match="2 storages"):
        reader.of(order(1))


def caches(*groups: Any) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in groups])


def test_a_page_that_moves_is_vllms_whole_page() -> None:
    """Scales of each token may lie beside what vLLM registers."""
    check_page_bytes(pages(3), caches(SimpleNamespace(page_size_bytes=64)))
    check_page_bytes(pages(3), caches(SimpleNamespace(page_size_bytes=128)))  # kernels cut a block in two
    check_page_bytes(pages(3), caches(SimpleNamespace()))
    each = SimpleNamespace(kv_cache_specs={"a": SimpleNamespace(page_size_bytes=64)})
    check_page_bytes(pages(3), caches(each))
    each.kv_cache_specs["b"] = SimpleNamespace(page_size_bytes=72)
    for spec in (SimpleNamespace(page_size_bytes=72), SimpleNamespace(page_size_bytes=32), each):
        with pytest.raises(ConfigError, match="something lies beside the tensors"):
            check_page_bytes(pages(3), caches(spec))
    (store,) = pages(3).stores
    overlaid = Pages(("a", "b", "c"), 64, (dataclasses.replace(store, group=np.zeros(3, np.int64)),))
    check_page_bytes(overlaid, caches(SimpleNamespace(page_size_bytes=48)))  # the rest of its page is room
    with pytest.raises(ConfigError, match="something lies beside the tensors"):
        check_page_bytes(overlaid, caches(SimpleNamespace(page_size_bytes=72)))
