"""The messages between ranks: what is encoded is decoded, anything else is refused by one error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.vllm.wire import (
    ATTEMPTS_MAX,
    KEEPS_MAX,
    Ask,
    Await,
    Begun,
    Keep,
    Message,
    PartReady,
    Queued,
    Refuse,
    Release,
    decode,
    encode,
)
from kvxfer.errors import ProtocolError
from kvxfer.types import TransferId

ids = st.binary(min_size=16, max_size=16).map(TransferId)
counts = st.integers(0, (1 << 31) - 1)
attempts = st.integers(0, ATTEMPTS_MAX - 1)
messages = st.one_of(
    st.builds(Ask, ids, counts, attempts, counts, counts, counts, counts, st.booleans()),
    st.builds(PartReady, ids, counts, counts, counts, counts),
    st.builds(Refuse, ids, attempts, st.text(max_size=20), st.text(max_size=200)),
    st.builds(Keep, st.lists(ids, max_size=5).map(tuple)),
    st.builds(Release, ids, counts, counts),
    st.builds(Await, st.lists(ids, max_size=5).map(tuple)),
    st.lists(st.tuples(ids, counts), max_size=5).flatmap(
        lambda some: st.builds(
            Queued,
            st.just(tuple(transfer_id for transfer_id, _ in some)),
            st.just(tuple(position for _, position in some)),
            counts,
            st.booleans(),
        )
    ),
    st.builds(Begun, ids, st.text(max_size=20), st.text(max_size=200)),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(messages)
def test_encoded_message_decodes_to_itself(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_a_violation(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


@given(messages, st.data())
def test_a_changed_field_is_a_message_or_a_violation(message: Message, data: st.DataObject) -> None:
    values = json.loads(encode(message))
    values[data.draw(st.sampled_from(sorted(values)))] = data.draw(json_values)
    try:
        changed = decode(json.dumps(values).encode())
    except ProtocolError:
        return
    assert decode(encode(changed)) == changed


def test_a_queue_has_a_position_for_each_prompt() -> None:
    values = json.loads(encode(Queued((TransferId(bytes(16)),) * 2, (1, 0), 5, True)))
    for positions in ([1], [1, 2, 3], [1, -1], [1, True], [1, 1.0], [1, "2"], None, {"1": 2}, [1, 1 << 31]):
        with pytest.raises(ProtocolError):
            decode(json.dumps({**values, "positions": positions}).encode())
    many = {"transfer_ids": ["0" * 32] * (KEEPS_MAX + 1), "positions": [1] * (KEEPS_MAX + 1)}
    with pytest.raises(ProtocolError, match="1024"):
        decode(json.dumps({**values, **many}).encode())


def test_a_list_has_a_bound() -> None:
    ids = ["0" * 32] * (KEEPS_MAX + 1)
    with pytest.raises(ProtocolError, match="1024"):
        decode(json.dumps({"kind": "keep", "transfer_ids": ids}).encode())


def test_a_long_text_is_cut() -> None:
    message = decode(encode(Refuse(TransferId(bytes(16)), 0, "refused", "x" * 5000)))
    assert isinstance(message, Refuse)
    assert len(message.text) == 512
