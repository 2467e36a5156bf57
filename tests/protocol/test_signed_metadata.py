"""What a signature proves, and that any other text is one of two errors."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import AuthenticationError, ConfigError, InvalidArgumentError, ProtocolError
from kvxfer.protocol.signed_metadata import METADATA_BYTES_MAX, TEXT_MAX, TOKEN_BYTES_MIN, Signer

TOKEN = b"a token that both of them hold, and no other process"


@given(st.binary(max_size=200), st.binary(min_size=TOKEN_BYTES_MIN, max_size=80))
def test_metadata_with_the_same_token_verifies_and_with_another_fails(metadata: bytes, token: bytes) -> None:
    text = Signer(token).sign(metadata)
    assert Signer(token).verify(text) == metadata
    with pytest.raises(AuthenticationError):
        Signer(token + b"x").verify(text)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_metadata_with_a_changed_bit_fails(metadata: bytes, data: st.DataObject) -> None:
    signed = bytearray(base64.urlsafe_b64decode(Signer(TOKEN).sign(metadata)))
    bit = data.draw(st.integers(0, len(signed) * 8 - 1))
    signed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(AuthenticationError):
        Signer(TOKEN).verify(base64.urlsafe_b64encode(signed).decode())


@given(
    st.text(max_size=100)
    | st.binary(max_size=100).map(lambda raw: base64.urlsafe_b64encode(raw).decode())
    | st.text("AQgw-_=", max_size=100)
)
def test_verify_of_any_text_raises_one_of_two_errors(text: str) -> None:
    with pytest.raises((ProtocolError, AuthenticationError)):
        Signer(TOKEN).verify(text)


def test_metadata_over_its_limit_is_refused_on_both_sides() -> None:
    longest = Signer(TOKEN).sign(bytes(METADATA_BYTES_MAX))
    assert len(longest) == TEXT_MAX
    assert len(Signer(TOKEN).verify(longest)) == METADATA_BYTES_MAX
    with pytest.raises(InvalidArgumentError, match=str(METADATA_BYTES_MAX)):
        Signer(TOKEN).sign(bytes(METADATA_BYTES_MAX + 1))
    with pytest.raises(ProtocolError):
        Signer(TOKEN).verify(longest + "AAAA")


def test_signer_with_a_short_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=str(TOKEN_BYTES_MIN)):
        Signer(bytes(TOKEN_BYTES_MIN - 1))
