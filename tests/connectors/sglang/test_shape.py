"""What two ranks have in common, worked out by each: the same, and all of it once."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.sglang.memory import Buffers, EngineMemory
from kvxfer.connectors.sglang.shape import KvShape, asking, axes_of, choose, common, packing_of, spans
from kvxfer.connectors.sglang.views import PageLedger, SharedRows
from kvxfer.errors import BlocksBusyError, ConfigError, InvalidArgumentError, ProtocolError
from tests.support.sglang_core.engines import Cutting

SHAPE = Cutting(tp=2).shape(0, 1)
powers = st.sampled_from([1, 2, 4, 8])
cuttings = st.builds(Cutting, tp=powers, pp=st.sampled_from([1, 2, 4]), page_tokens=st.sampled_from([1, 4]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


@given(st.tuples(cuttings, cuttings, powers))
def test_every_head_of_every_layer_is_read_once(made: tuple[Cutting, Cutting, int]) -> None:
    prefill, decode = (dataclasses.replace(cutting, heads=made[2]) for cutting in made[:2])
    for ours in decode.shapes:
        chosen = choose(ours, prefill.shapes)
        read: list[tuple[int, int]] = []
        for place, slice_ in chosen.items():
            theirs = prefill.shapes[place]
            assert slice_ == common(ours, theirs) == common(theirs, ours)
            read += itertools.product(slice_.layers, slice_.heads)
            for shape in (ours, theirs):
                keys = [(shape.layers[index], shape.parts[index]) for index in slice_.buffers(shape)]
                assert keys == sorted(itertools.product(slice_.layers, ("k", "v")))
        assert sorted(read) == sorted(itertools.product(sorted(set(ours.layers)), ours.heads))


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product([1, 2, 4, 8], repeat=2)))
def test_replicas_are_taken_round_and_round(prefill: int, decode: int) -> None:
    theirs, ours = (Cutting(tp=tp, heads=1, sizes=(("latent", 9),)).shapes for tp in (prefill, decode))
    for rank, shape in enumerate(ours):
        chosen = choose(shape, theirs)
        assert list(chosen) == [rank % prefill]
        assert chosen[rank % prefill].is_whole


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layers": ()}, "layers"),
        ({"layers": (0, 1)}, "layers"),
        ({"layers": (0, 1, 2, 3, 0, 1, 2, -1)}, "layers"),
        ({"layers": (0,) * 8}, "parts"),
        ({"parts": ("k",) * 7 + ("",)}, "parts"),
        ({"parts": ("k",) * 7 + ("x y",)}, "parts"),
        ({"head_bytes": (0,) * 8}, "head_bytes"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"total_heads": 0}, "total_heads"),
        ({"tp_rank": 2}, "tp_rank"),
        ({"tp_size": 3}, "tp_size"),
        ({"tp_size": 1 << 40}, "tp_size"),
        ({"tp_rank": -1}, "tp_rank"),
    ],
)
def test_a_shape_that_makes_no_sense_names_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(SHAPE, **changes)
    values = {**json.loads(SHAPE.to_json()), **changes}
    with pytest.raises(ProtocolError):
        KvShape.from_json(json.dumps(values))


@given(st.tuples(cuttings, cuttings, powers))
def test_as_many_ranks_ask_as_sglang_says(made: tuple[Cutting, Cutting, int]) -> None:
    """Of SGLang's pairing: each decode rank asks the prefill ranks that lie under it, or the one that it lies under."""
    prefill, decode = (dataclasses.replace(cutting, heads=made[2], pp=1) for cutting in made[:2])
    asked = [0] * prefill.tp
    for rank, ours in enumerate(decode.shapes):
        first = rank * prefill.tp // decode.tp
        paired = prefill.shapes[first : first + max(1, prefill.tp // decode.tp)]
        assert choose(ours, paired), "no other source is needed"
        for source in paired:
            asked[source.tp_rank] += 1
    assert asked == [asking(source, decode.shapes[0]) for source in prefill.shapes]


def test_a_shape_must_be_of_its_buffers() -> None:
    sizes = tuple(SHAPE.page_bytes(index) for index in range(8))
    aux = Buffers((1,), (8,), (8,))
    kv = Buffers(tuple(range(1, 9)), sizes, sizes)
    EngineMemory(kv, aux, shape=SHAPE)
    with pytest.raises(ConfigError, match="shape"):
        EngineMemory(kv, aux, shape=dataclasses.replace(SHAPE, page_tokens=8))


@given(cuttings)
def test_a_shape_travels_as_json(cutting: Cutting) -> None:
    for shape in cutting.shapes[:8] if cutting.tp <= 4 else []:
        assert KvShape.from_json(shape.to_json()) == shape


@given(st.text(max_size=40) | json_values.map(json.dumps))
def test_text_is_a_shape_or_a_violation(text: str) -> None:
    with pytest.raises(ProtocolError):
        KvShape.from_json(text)


@given(st.data())
def test_a_changed_field_is_a_shape_or_a_violation(data: st.DataObject) -> None:
    values = json.loads(SHAPE.to_json())
    values[data.draw(st.sampled_from(sorted(values)))] = data.draw(json_values)
    try:
        changed = KvShape.from_json(json.dumps(values))
    except ProtocolError:
        return
    assert KvShape.from_json(changed.to_json()) == changed


def test_records_say_in_short_what_a_pool_holds() -> None:
    assert spans([5, 1, 2, 3, 9, 10]) == "1-3+5+9-10"
    assert axes_of("w/slice", range(32), range(2, 4), 8, 1) == "w/slice: layers 0-31, heads 2-3 of 8, 1 tokens"
    many, other = range(0, 400, 2), (*range(0, 398, 2), 399)
    assert len(axes_of("w", many, range(1), 1, 1)) < 120
    assert axes_of("w", many, range(1), 1, 1) != axes_of("w", other, range(1), 1, 1)
    shape = Cutting().shape(0, 0)
    assert packing_of("plain", shape, [0, 1]) == "plain:0.k.24+1.k.24"
    assert packing_of("plain", shape, range(8)) != packing_of("plain", shape, range(7))


def test_the_end_of_a_last_page_need_not_come() -> None:
    def is_all(own: int, peer: int, given: int, wanted: int) -> bool:
        return SharedRows(None, own, peer, True).is_all(given, wanted)  # type: ignore[arg-type]

    assert [given for given in range(18) if is_all(8, 4, given, 16)] == [*range(9, 17)]
    assert [given for given in range(18) if is_all(4, 4, given, 16)] == [16]
    assert is_all(8, 4, 0, 0)


def test_the_table_of_pages() -> None:
    ledger = PageLedger(8)
    one, other = (np.array(pages, np.uint32) for pages in ([1, 2], [2, 3]))
    ledger.fill(one)
    for act in (ledger.fill, ledger.give):
        with pytest.raises(BlocksBusyError, match="page 2"):
            act(other)
    with pytest.raises(InvalidArgumentError, match="twice"):
        ledger.fill(np.array([5, 5], np.uint32))
    ledger.filled(one)
    assert ledger.is_idle
    ledger.give(one)
    ledger.give(other)
    ledger.given(one)
    with pytest.raises(BlocksBusyError, match="page 2 is given"):
        ledger.fill(one)
    ledger.given(other)
    ledger.fill(one)
    assert not ledger.is_idle
