"""The messages between ranks: what is encoded is decoded, anything else is refused by one error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.sglang.messages import (
    COUNT_MAX,
    END_PART,
    METADATA_MAX,
    TEXT_MAX,
    Alive,
    AllReceived,
    End,
    Failed,
    Left,
    Message,
    PartGranted,
    SourceMetadata,
    Unknown,
    decode,
    encode,
)
from kvxfer.errors import InvalidArgumentError, ProtocolError
from kvxfer.types import TransferId

ids = st.binary(min_size=16, max_size=16).map(TransferId)
counts = st.integers(0, COUNT_MAX - 1)
texts = st.text(max_size=60)
messages = st.one_of(
    st.builds(PartGranted, ids, counts, counts, counts, counts),
    st.builds(End, ids, counts),
    st.builds(AllReceived, ids),
    st.builds(Failed, ids, texts, texts),
    st.builds(Left, texts),
    st.builds(Alive),
    st.builds(Unknown, ids),
    st.builds(SourceMetadata, texts),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(messages)
def test_encoded_message_decodes_to_itself(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
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


@pytest.mark.parametrize("count", [-1, COUNT_MAX, True, 1.0, "1", None, [1]])
def test_a_number_is_a_count(count: object) -> None:
    values = json.loads(encode(PartGranted(TransferId(bytes(16)), END_PART, 0, 0, 1)))
    for name in ("part", "pool", "first", "count"):
        with pytest.raises(ProtocolError, match=name):
            decode(json.dumps({**values, name: count}).encode())


@pytest.mark.parametrize("payload", [b"[" * 100_000, b'{"kind":"left","text":' + b'{"a":' * 50_000, b"\xff\xfe"])
def test_deeply_nested_message_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


def test_a_long_text_is_cut() -> None:
    message = decode(encode(Failed(TransferId(bytes(16)), "refused", "x" * 5000)))
    assert isinstance(message, Failed)
    assert len(message.text) == TEXT_MAX
    values = {"kind": "left", "text": "x" * (TEXT_MAX + 1)}
    with pytest.raises(ProtocolError, match="text"):
        decode(json.dumps(values).encode())


def test_agent_metadata_in_a_message_is_never_cut() -> None:
    assert decode(encode(SourceMetadata("x" * METADATA_MAX))) == SourceMetadata("x" * METADATA_MAX)
    with pytest.raises(InvalidArgumentError, match="agent metadata"):
        encode(SourceMetadata("x" * (METADATA_MAX + 1)))
