"""Descriptor lists, what they are made of, and their bytes."""

from __future__ import annotations

import copy
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.nixl import codec, nixl_agent, packed_rows
from kvxfer.connectors.nixl.bindings import (
    DRAM_SEG,
    FILE_SEG,
    VRAM_SEG,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotFoundError,
    nixlRegDList,
    nixlRemoteDList,
    nixlXferDList,
)
from kvxfer.connectors.nixl.descs import to_dlist
from kvxfer.connectors.nixl.dlists import strided_rows
from tests.support.nixl.agents import logged

ROWS = [(1000, 105, 0), (2000, 30, 0), (1010, 20, 0)]
HIGH = (1 << 64) - 1


def test_a_list_is_what_was_put_in() -> None:
    descs = nixlXferDList(DRAM_SEG, ROWS)
    assert list(descs) == ROWS
    assert descs[1] == ROWS[1]
    assert descs.descCount() == 3
    assert descs.index((2000, 30, 0)) == 1
    descs[0] = (1, 2, 3)
    descs.addDesc((HIGH, 7, 0))
    descs.append((5, 6, 7))
    assert list(descs) == [(1, 2, 3), ROWS[1], ROWS[2], (HIGH, 7, 0), (5, 6, 7)]
    descs.remDesc(0)
    assert next(iter(descs)) == ROWS[1]
    descs.clear()
    assert descs.isEmpty()
    assert bool(descs), "an empty list is no failure, as in NIXL"


def test_registration_lists_carry_bytes() -> None:
    descs = nixlRegDList(DRAM_SEG, [(1, 2, 3, "text"), (4, 5, 6, b"\xff\0")])
    assert list(descs) == [(1, 2, 3, b"text"), (4, 5, 6, b"\xff\0")]
    assert list(descs.trim()) == [(1, 2, 3), (4, 5, 6)]
    descs.addDesc((7, 8, 9, b"x"))
    descs.remDesc(0)
    assert list(descs) == [(4, 5, 6, b"\xff\0"), (7, 8, 9, b"x")]
    remote = nixlRemoteDList(DRAM_SEG, [(1, 2, 3, b"agent")])
    remote.append((4, 5, 6, "other"))
    assert list(remote) == [(1, 2, 3, "agent"), (4, 5, 6, "other")]


@pytest.mark.parametrize("index", [3, -1, 1 << 40])
def test_a_wrong_index_reads_no_foreign_memory(index: int) -> None:
    descs = nixlXferDList(DRAM_SEG, ROWS)
    with pytest.raises(IndexError):
        descs[index]
    with pytest.raises(IndexError):
        descs.remDesc(index)
    with pytest.raises(nixlNotFoundError):
        descs.index((2000, 31, 0))


@pytest.mark.parametrize("bad", [(-1, 2, 3), (1.5, 2, 3), (HIGH + 1, 2, 3), ("1", 2, 3), (1, 2), (1, 2, 3, 4)])
def test_bad_tuples_are_named(bad: Any) -> None:
    with pytest.raises(nixlInvalidParamError):
        nixlXferDList(DRAM_SEG, [ROWS[0], bad])
    descs = nixlXferDList(DRAM_SEG, ROWS)
    with pytest.raises(nixlInvalidParamError):
        descs.addDesc(bad)
    assert list(descs) == ROWS


def test_lists_of_lists_are_no_tuples() -> None:
    with pytest.raises(TypeError):
        nixlXferDList(DRAM_SEG, [[1, 2, 3]])


def test_arrays_are_copied() -> None:
    array = np.array(ROWS, np.uint64)
    descs = nixlXferDList(DRAM_SEG, array)
    array[:] = 0
    assert list(descs) == ROWS
    assert list(nixlRegDList(DRAM_SEG, np.array(ROWS, np.int64))) == [(*row, b"") for row in ROWS]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3)),
        np.zeros((2, 3), np.int32),
        np.zeros((2, 4), np.uint64),
        np.zeros(3, np.uint64),
        np.asfortranarray(np.zeros((2, 3), np.uint64)),
        np.full((2, 3), -1, np.int64),
    ],
)
def test_bad_arrays_are_named(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(nixlInvalidParamError):
        nixlXferDList(DRAM_SEG, array)


def test_strided_rows_change_places() -> None:
    assert strided_rows(np.array([[9, 8, 0, 16, 4]], np.uint64)).tolist() == [[9, 8, 0, 4, 16]]
    with pytest.raises(nixlInvalidParamError):
        strided_rows(np.zeros((1, 5), np.int32))


def test_equality_is_of_type_rows_and_order() -> None:
    one = nixlXferDList(DRAM_SEG, ROWS)
    assert one == nixlXferDList(DRAM_SEG, np.array(ROWS, np.int64))
    assert one != nixlXferDList(VRAM_SEG, ROWS)
    assert one != nixlXferDList(DRAM_SEG, ROWS[::-1])
    assert one != ROWS
    assert nixlRegDList(DRAM_SEG, [(1, 2, 3, "a")]) != nixlRegDList(DRAM_SEG, [(1, 2, 3, "b")])


# --- what agents make lists of ---


BAD_LISTS: list[tuple[Any, str | None]] = [
    ([(1, 2, 3, 4)], "DRAM"),
    ([(1, 2, 3)], None),
    (nixlRegDList(DRAM_SEG), None),
    ([[1, 2, 3]], "DRAM"),
    ([1, 2, 3], "DRAM"),
    ("abc", "DRAM"),
    (np.zeros((2, 4), np.uint64), "DRAM"),
    (np.zeros((2, 3), np.uint64), None),
]
"""What NIXL 1.5.1 logs, and answers with None."""
BAD_ROWS: list[Any] = [
    [(1, 2, 3), (1, 2)],
    [(1, -2, 3)],
    [(1, 2, "3")],
    np.zeros((2, 3)),
    [],
    None,
]
"""What it raises for."""


@pytest.mark.parametrize(("descs", "memory_type"), BAD_LISTS)
def test_bad_list_is_logged_and_none(
    descs: Any, memory_type: str | None, pair: tuple[nixl_agent, nixl_agent], caplog: pytest.LogCaptureFixture
) -> None:
    with logged(caplog):
        assert pair[0].get_xfer_descs(descs, memory_type) is None
    assert len(caplog.records) == 1
    assert caplog.records[0].levelname == "ERROR"


def test_bad_registration_is_none_and_not_registered(pair: tuple[nixl_agent, nixl_agent]) -> None:
    agent = pair[0]
    assert agent.get_reg_descs([(1, 2, 3)], "DRAM") is None
    assert agent.get_reg_descs(nixlXferDList(DRAM_SEG)) is None
    assert agent.get_remote_descs([(1, 2, 3)], "DRAM") is None
    with pytest.raises(nixlInvalidParamError):
        agent.register_memory([(1, 2, 3)], "DRAM")


@pytest.mark.parametrize("descs", BAD_ROWS)
def test_bad_row_raises(descs: Any, pair: tuple[nixl_agent, nixl_agent]) -> None:
    with pytest.raises(nixlInvalidParamError):
        pair[0].get_xfer_descs(descs, "DRAM")
    with pytest.raises(KeyError):
        pair[0].get_xfer_descs([(1, 2, 3)], "V-RAM")


@pytest.mark.parametrize(("value", "is_none"), [("", True), ("none", True), ("raise", False)])
def test_bad_input_setting_decides(value: str, is_none: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_NIXL_BAD_INPUT", value)
    agent = nixl_agent("a")
    try:
        if is_none:
            assert agent.get_xfer_descs([(1, 2, 3, 4)], "DRAM") is None
        else:
            with pytest.raises(nixlInvalidParamError) as caught:
                agent.get_xfer_descs([(1, 2, 3, 4)], "DRAM")
            assert type(caught.value) is nixlInvalidParamError
    finally:
        agent.close()


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    whole = to_dlist(nixlXferDList, tensor, None)
    assert list(whole) == [(tensor.data_ptr(), 256, 0)]
    assert whole.getType() is DRAM_SEG
    parts = to_dlist(nixlRegDList, [tensor[i] for i in range(8)], None)
    assert list(parts)[3] == (tensor.data_ptr() + 96, 32, 0, b"")
    for bad in (tensor.T, [tensor[0], tensor[:, 1]], [tensor[0], (1, 2, 3)]):
        with pytest.raises(nixlInvalidParamError):
            to_dlist(nixlXferDList, bad, None)


# --- bytes ---


def test_lists_survive_the_way() -> None:
    for descs in (
        nixlXferDList(DRAM_SEG, [*ROWS, (HIGH, 1, 0)]),
        nixlXferDList(VRAM_SEG),
        nixlRegDList(FILE_SEG, [(0, 0, 0, "/a/file"), (1, 2, 3, b"")]),
    ):
        data = codec.encode_dlist(descs)
        assert codec.decode_any(data) == descs
        assert copy.deepcopy(descs) == descs
        with pytest.raises(nixlMismatchError):
            codec.decode_any(data + b"x")
        with pytest.raises(nixlMismatchError):
            codec.decode_any(data[:-1])
    with pytest.raises(nixlMismatchError):
        codec.decode_dlist(codec.encode_dlist(nixlRegDList(DRAM_SEG)), nixlXferDList)


def test_no_list_is_serialised_too(pair: tuple[nixl_agent, nixl_agent]) -> None:
    """NIXL's kvbench sends one of its peers nothing this way."""
    data = pair[0].get_serialized_descs(None)
    assert pair[1].deserialize_descs(data) is None
    for bad in (data[:-1], data + b"x", data[:10] + b"\x01" + data[11:], data[:16] + b"\x01" + data[17:]):
        with pytest.raises(nixlMismatchError):
            codec.decode_any(bad)
    with pytest.raises(nixlMismatchError, match="NoneType"):
        codec.decode_dlist(data, nixlXferDList)
    with pytest.raises(nixlInvalidParamError):
        codec.encode_dlist([])  # type: ignore[arg-type]


def test_a_pickle_is_refused_by_name(pair: tuple[nixl_agent, nixl_agent]) -> None:
    agent = pair[0]
    descs = agent.get_xfer_descs(memory_rows := [(1 << 40, 64, 0)], "DRAM")
    data = agent.get_serialized_descs(descs)
    assert agent.deserialize_descs(data) == descs
    assert list(descs) == memory_rows
    with pytest.raises(nixlMismatchError, match="pickle"):
        agent.deserialize_descs(b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x08builtins.")
    with pytest.raises(TypeError):
        agent.deserialize_descs("text")  # type: ignore[arg-type]


HEADS = st.builds(
    lambda kind, memory_type, count, rest: (
        packed_rows.MAGIC + struct.pack("<BBB5xQ", 1, kind, memory_type, count) + rest
    ),
    st.integers(0, 3),
    st.integers(0, 6),
    st.sampled_from([0, 1, 2, 1 << 24, 1 << 63]),
    st.binary(max_size=96),
)


@given(st.one_of(st.binary(max_size=128), HEADS))
def test_any_bytes_are_a_list_or_one_error(data: bytes) -> None:
    try:
        descs = codec.decode_any(data)
    except nixlMismatchError:
        return
    assert codec.encode_dlist(descs) == data
