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
    Keep,
    Message,
    Part,
    Refuse,
    Release,
    decode,
    encode,
)
from kvxfer.errors import ProtocolViolation
from kvxfer.types import TransferId

ids = st.binary(min_size=16, max_size=16).map(TransferId)
counts = st.integers(0, (1 << 31) - 1)
attempts = st.integers(0, ATTEMPTS_MAX - 1)
messages = st.one_of(
    st.builds(Ask, ids, counts, attempts, counts, counts, st.booleans()),
    st.builds(Part, ids, counts, counts, counts, counts),
    st.builds(Refuse, ids, attempts, st.text(max_size=20), st.text(max_size=200)),
    st.builds(Keep, st.lists(ids, max_size=5).map(tuple)),
    st.builds(Release, ids, counts, counts),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(messages)
def test_what_is_encoded_is_decoded(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_a_violation(payload: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(payload)


@given(messages, st.data())
def test_a_changed_field_is_a_message_or_a_violation(message: Message, data: st.DataObject) -> None:
    values = json.loads(encode(message))
    values[data.draw(st.sampled_from(sorted(values)))] = data.draw(json_values)
    try:
        changed = decode(json.dumps(values).encode())
    except ProtocolViolation:
        return
    assert decode(encode(changed)) == changed


def test_a_list_has_a_bound() -> None:
    ids = ["0" * 32] * (KEEPS_MAX + 1)
    with pytest.raises(ProtocolViolation, match="1024"):
        decode(json.dumps({"kind": "keep", "transfer_ids": ids}).encode())


def test_a_long_text_is_cut() -> None:
    message = decode(encode(Refuse(TransferId(bytes(16)), 0, "refused", "x" * 5000)))
    assert isinstance(message, Refuse)
    assert len(message.text) == 512
