"""Cards that agents can be known by where no coordinator announces them: what others must know of one life, sealed with
the cluster token. Whoever carries a card needs no trust: it is read only after its seal proved that a holder of the
token wrote every byte of it. Decides what a seal covers; must never know what stands on a card.

The text is ``base64url(seal + card)``, the seal an HMAC-SHA256 under a key that is made of the token and used for this
only. Who sees a card can try guesses of the token against it, hence TOKEN_BYTES_MIN.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re

from kvxfer.errors import AuthenticationError, ConfigError, InvalidArgumentError, ProtocolError

TOKEN_BYTES_MIN = 32
SEAL_BYTES = 32
CARD_BYTES_MAX = 1 << 16
TEXT_MAX = (SEAL_BYTES + CARD_BYTES_MAX + 2) // 3 * 4
"""Characters of a sealed card."""
_TEXT = re.compile(r"[A-Za-z0-9_-]+={0,2}")


class Seal:
    """Seals cards, and opens what was sealed with the same token."""

    def __init__(self, token: bytes) -> None:
        """Raises ConfigError for a token that is too short."""
        if len(token) < TOKEN_BYTES_MIN:
            raise ConfigError(f"introductions need a cluster token of at least {TOKEN_BYTES_MIN} bytes")
        self._key = hmac.digest(token, b"kvxfer introduction key v1", hashlib.sha256)

    def close(self, card: bytes) -> str:
        """The sealed card. Raises InvalidArgumentError for one of more than CARD_BYTES_MAX."""
        if len(card) > CARD_BYTES_MAX:
            raise InvalidArgumentError(f"a card has at most {CARD_BYTES_MAX} bytes, not {len(card)}")
        return base64.urlsafe_b64encode(self._over(card) + card).decode()

    def open(self, text: str) -> bytes:
        """The card. Raises ProtocolError where that is no sealed card, AuthenticationError where its seal is of
        another token, or of another card."""
        if len(text) > TEXT_MAX or _TEXT.fullmatch(text) is None:
            raise ProtocolError("that is no sealed card")
        try:
            sealed = base64.urlsafe_b64decode(text)
        except binascii.Error:
            raise ProtocolError("that is no sealed card") from None
        seal, card = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._over(card)):
            raise AuthenticationError("the card was not sealed with this cluster's token, or was changed")
        return card

    def _over(self, card: bytes) -> bytes:
        return hmac.digest(self._key, b"kvxfer introduction v1\n" + card, hashlib.sha256)
