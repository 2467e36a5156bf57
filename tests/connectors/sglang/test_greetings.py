"""What ranks say before agents know each other: read as it was written, or one error."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.sglang import greetings
from kvxfer.connectors.sglang.greetings import Abort, Postmark, Refused, Register, Registered, RoomFailed, RoomRequest
from kvxfer.connectors.sglang.limits import Layout
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.errors import AuthenticationError, ProtocolError
from kvxfer.types import CompatibilityRecord, TransferId

SIGNER = greetings.signer_of(b"t" * 32)
RECORD = CompatibilityRecord("m", "c", "w", "float32", 3, 2, 16, 16, "page", "6 x 256", "config", "torch_native")
LAYOUT = Layout((256, 256), (64, 512), ("mamba",), ((96, 32),))
SHAPE = KvShape((0, 0), ("k", "v"), (8, 8), 16, 1, 2, 4)
ID = TransferId(bytes(range(16)))
ALL = [
    Register("sglang-decode-1", 0, "metadata", RECORD, LAYOUT, None),
    Register("sglang-decode-1", 1, "metadata", RECORD, LAYOUT, SHAPE),
    Registered("sglang-prefill-1", 1, "", None),
    Registered("sglang-prefill-1", 1, "", SHAPE),
    Refused("incompatible", "page_size is 16 here and 32 there"),
    RoomRequest((1 << 62) + 1, ID, "sglang-decode-1", 0, 12, 1, 64, False),
    Abort(7, str(ID), "Aborted by AbortReq."),
    Abort(7, "", "gone"),
    RoomFailed(7, ID, "refused", "in use"),
]


@pytest.mark.parametrize("greeting", ALL, ids=lambda greeting: type(greeting).__name__)
@pytest.mark.parametrize(("address", "place"), [("10.0.0.1:77", ("10.0.0.1", 77)), ("[::1]:8", ("::1", 8))])
def test_encoded_greeting_decodes_to_itself(greeting: greetings.Greeting, address: str, place: tuple[str, int]) -> None:
    frames = greetings.encode(SIGNER, address, greeting)
    assert greetings.is_ours(frames)
    assert greetings.address_of(frames) == place
    assert greetings.decode(SIGNER, frames) == greeting


@pytest.mark.parametrize("mark", [Postmark(), Postmark("d", "p", (1 << 63) - 1), Postmark("d", "", 7)])
def test_a_postmark_is_heard_with_it(mark: Postmark) -> None:
    assert greetings.read(SIGNER, greetings.encode(SIGNER, "h:1", ALL[0], mark)) == (ALL[0], mark)


@pytest.mark.parametrize(
    "mark", [None, [], ["d", "p"], ["d", "p", -1], ["d", "p", True], ["d", None, 1], ["a b", "", 1]]
)
def test_greeting_with_a_wrong_postmark_is_refused(mark: object) -> None:
    tag, address, signed = greetings.encode(SIGNER, "h:1", ALL[0])
    values = json.loads(SIGNER.verify(signed.decode())) | {"mark": mark}
    with pytest.raises(ProtocolError):
        greetings.read(SIGNER, [tag, address, SIGNER.sign(json.dumps(values).encode()).encode()])


def test_another_token_is_not_believed() -> None:
    frames = greetings.encode(greetings.signer_of(b"u" * 32), "h:1", ALL[0])
    with pytest.raises(AuthenticationError):
        greetings.decode(SIGNER, frames)


def test_an_address_that_was_changed_is_not_believed() -> None:
    tag, _, signed = greetings.encode(SIGNER, "h:1", ALL[0])
    with pytest.raises(ProtocolError, match="another sender"):
        greetings.decode(SIGNER, [tag, b"other:1", signed])


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greetings, "VERSION", 1)
    frames = greetings.encode(SIGNER, "h:1", ALL[2])
    monkeypatch.undo()
    with pytest.raises(ProtocolError, match="version 1, not 2"):
        greetings.decode(SIGNER, frames)


def test_sglangs_own_messages_are_not_ours() -> None:
    assert not greetings.is_ours([b"ABORT", b"7"])
    assert not greetings.is_ours([])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def changed(greeting: greetings.Greeting, **fields: object) -> list[bytes]:
    """The frames of one that says something else in those fields."""
    tag, address, signed = greetings.encode(SIGNER, "h:1", greeting)
    values = json.loads(SIGNER.verify(signed.decode())) | fields
    return [tag, address, SIGNER.sign(json.dumps(values).encode()).encode()]


@given(st.sampled_from(ALL), st.data())
def test_a_field_of_another_kind_is_refused_or_read(greeting: greetings.Greeting, data: st.DataObject) -> None:
    values = json.loads(SIGNER.verify(greetings.encode(SIGNER, "h:1", greeting)[2].decode()))
    frames = changed(greeting, **{data.draw(st.sampled_from(sorted(values))): data.draw(JSON)})
    try:
        found = greetings.decode(SIGNER, frames)
    except ProtocolError:
        return
    assert {field.name for field in dataclasses.fields(found)} <= set(values)


SHAPE_VALUES = json.loads(SHAPE.to_json())


@pytest.mark.parametrize("greeting", [ALL[1], ALL[3]], ids=["Register", "Registered"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_bytes": [8, 0]}, "head_bytes"),
        ({"head_bytes": [8, 8.0]}, "head_bytes"),
        ({"layers": [0] * 5000, "parts": ["k"] * 5000, "head_bytes": [8] * 5000}, "layers"),
        ({"layers": [0, True]}, "layers"),
        ({"page_tokens": 1 << 60}, "page_tokens"),
        ({"total_heads": -1}, "total_heads"),
        ({"tp_size": 1 << 60}, "tp_size"),
        ({"tp_size": 3}, "tp_size"),
        ({"tp_rank": 0}, "of rank 0 of 2, and the sender 1"),
        ({"more": 1}, "exactly the fields"),
    ],
)
def test_a_shape_is_not_believed(greeting: greetings.Greeting, changes: dict[str, object], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        greetings.decode(SIGNER, changed(greeting, shape=SHAPE_VALUES | changes))


@pytest.mark.parametrize("changes", [{"head_bytes": [8, 4]}, {"page_tokens": 8}, {"total_heads": 8}])
def test_a_shape_that_is_not_of_the_pages_is_not_believed(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="shape is not of the pages"):
        greetings.decode(SIGNER, changed(ALL[1], shape=SHAPE_VALUES | changes))
    with pytest.raises(ProtocolError, match="shape is not of the pages"):
        greetings.decode(
            SIGNER,
            changed(
                ALL[1],
                shape={name: value[:1] if isinstance(value, list) else value for name, value in SHAPE_VALUES.items()},
            ),
        )


def test_nesting_without_end_is_an_error() -> None:
    for field in ("shape", "record", "layout"):
        nested: object = []
        for _ in range(800):
            nested = [nested]
        with pytest.raises(ProtocolError):
            greetings.decode(SIGNER, changed(ALL[1], **{field: nested}))


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_any_bytes_are_a_greeting_or_one_error(frames: list[bytes]) -> None:
    for each in (frames, [greetings.TAG, *frames]):
        with pytest.raises((ProtocolError, AuthenticationError)):
            greetings.decode(SIGNER, each)
