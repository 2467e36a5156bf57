"""What a seal proves, and that whatever is handed over as a card is one, or one of two errors."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import AuthenticationError, ConfigError, InvalidArgumentError, ProtocolError
from kvxfer.protocol.introduction import CARD_BYTES_MAX, TEXT_MAX, TOKEN_BYTES_MIN, Seal

TOKEN = b"a token that both of them hold, and nobody else"


@given(st.binary(max_size=200), st.binary(min_size=TOKEN_BYTES_MIN, max_size=80))
def test_a_card_is_read_with_the_token_that_sealed_it(card: bytes, token: bytes) -> None:
    text = Seal(token).close(card)
    assert Seal(token).open(text) == card
    with pytest.raises(AuthenticationError):
        Seal(token + b"x").open(text)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_whoever_changes_a_bit_breaks_the_seal(card: bytes, data: st.DataObject) -> None:
    sealed = bytearray(base64.urlsafe_b64decode(Seal(TOKEN).close(card)))
    bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(AuthenticationError):
        Seal(TOKEN).open(base64.urlsafe_b64encode(sealed).decode())


@given(
    st.text(max_size=100)
    | st.binary(max_size=100).map(lambda raw: base64.urlsafe_b64encode(raw).decode())
    | st.text("AQgw-_=", max_size=100)
)
def test_anything_else_is_one_of_two_errors(text: str) -> None:
    with pytest.raises((ProtocolError, AuthenticationError)):
        Seal(TOKEN).open(text)


def test_a_card_is_bounded_on_both_sides() -> None:
    longest = Seal(TOKEN).close(bytes(CARD_BYTES_MAX))
    assert len(longest) == TEXT_MAX
    assert len(Seal(TOKEN).open(longest)) == CARD_BYTES_MAX
    with pytest.raises(InvalidArgumentError, match=str(CARD_BYTES_MAX)):
        Seal(TOKEN).close(bytes(CARD_BYTES_MAX + 1))
    with pytest.raises(ProtocolError):
        Seal(TOKEN).open(longest + "AAAA")


def test_a_token_that_can_be_guessed_seals_nothing() -> None:
    with pytest.raises(ConfigError, match=str(TOKEN_BYTES_MIN)):
        Seal(bytes(TOKEN_BYTES_MIN - 1))
