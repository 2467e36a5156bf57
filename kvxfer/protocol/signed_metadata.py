"""Agent metadata that travels without a coordinator: what peers must know of one incarnation, signed with the cluster
token. The channel that carries it needs no trust: the receiver parses it only after the signature proved that a holder
of the token wrote every byte. Decides what a signature covers; must never know what the metadata says.

The text is ``base64url(signature + metadata)``. The signature is an HMAC-SHA256 under a key that is derived from the
token for this purpose only. A reader of the text can test guesses of the token against it, hence TOKEN_BYTES_MIN.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re

from kvxfer.errors import AuthenticationError, ConfigError, InvalidArgumentError, ProtocolError

TOKEN_BYTES_MIN = 32
SIGNATURE_BYTES = 32
METADATA_BYTES_MAX = 1 << 16
TEXT_MAX = (SIGNATURE_BYTES + METADATA_BYTES_MAX + 2) // 3 * 4
"""Characters of signed metadata."""
_TEXT = re.compile(r"[A-Za-z0-9_-]+={0,2}")


class Signer:
    """Signs bytes with a token, and verifies what was signed with the same token."""

    def __init__(self, token: bytes) -> None:
        """Raises ConfigError for a token that is too short."""
        if len(token) < TOKEN_BYTES_MIN:
            raise ConfigError(f"discovery needs a cluster token of at least {TOKEN_BYTES_MIN} bytes")
        self._key = hmac.digest(token, b"kvxfer introduction key v1", hashlib.sha256)

    def sign(self, metadata: bytes) -> str:
        """The signed text. Raises InvalidArgumentError for more than METADATA_BYTES_MAX bytes."""
        if len(metadata) > METADATA_BYTES_MAX:
            raise InvalidArgumentError(f"agent metadata has at most {METADATA_BYTES_MAX} bytes, not {len(metadata)}")
        return base64.urlsafe_b64encode(self._signature(metadata) + metadata).decode()

    def verify(self, text: str) -> bytes:
        """The metadata. Raises ProtocolError for a text of another form, AuthenticationError for a signature of
        another token or of other bytes."""
        if len(text) > TEXT_MAX or _TEXT.fullmatch(text) is None:
            raise ProtocolError("the text is not signed agent metadata")
        try:
            signed = base64.urlsafe_b64decode(text)
        except binascii.Error:
            raise ProtocolError("the text is not signed agent metadata") from None
        signature, metadata = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(metadata)):
            raise AuthenticationError("the agent metadata was signed with another token, or was changed")
        return metadata

    def _signature(self, metadata: bytes) -> bytes:
        return hmac.digest(self._key, b"kvxfer introduction v1\n" + metadata, hashlib.sha256)
