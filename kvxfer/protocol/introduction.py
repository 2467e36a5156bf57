"""How two agents that nobody announced to each other prove that they are of one cluster, before either says who it is.

The guest dials, the host was dialed; both hold the cluster token, which is never sent::

    guest -> host    MAGIC, guest's nonce
    host  -> guest   host's nonce, proof(HOST)                the host holds the token
    guest -> host    proof(GUEST, card), card                 so does the guest, and this is who it is
    host  -> guest   proof(MET, guest's card, card), card     the host knows it now, and is this

A proof is an HMAC over both nonces, the step, and the cards said so far: it fits one exchange, one step and one side.
Somebody without the token learns of the host one HMAC, and of the guest nothing but that it dialed. Decides what a
proof covers; must never know what stands on a card.
"""

from __future__ import annotations

import enum
import hashlib
import hmac

from kvxfer.errors import AuthenticationFailed, InvalidArgument

MAGIC = b"kvxmeet1"
NONCE_BYTES = PROOF_BYTES = 32
CARD_BYTES_MAX = 1 << 16


class Step(enum.Enum):
    """Whose proof it is, and of what."""

    HOST = b"host"
    GUEST = b"guest"
    MET = b"met"


class Exchange:
    """The proofs of one exchange."""

    def __init__(self, token: bytes, guest_nonce: bytes, host_nonce: bytes) -> None:
        """Raises InvalidArgument for an empty token or nonces of another length."""
        if not token:
            raise InvalidArgument("cluster token is empty")
        if len(guest_nonce) != NONCE_BYTES or len(host_nonce) != NONCE_BYTES:
            raise InvalidArgument(f"a nonce has {NONCE_BYTES} bytes")
        key = hmac.digest(token, b"kvxfer introduction v1", hashlib.sha256)
        self._key = hmac.digest(key, guest_nonce + host_nonce, hashlib.sha256)

    def proof(self, step: Step, *cards: bytes) -> bytes:
        """PROOF_BYTES."""
        said = b"".join(len(part).to_bytes(4, "big") + part for part in (step.value, *cards))
        return hmac.digest(self._key, said, hashlib.sha256)

    def check(self, proof: bytes, step: Step, *cards: bytes) -> None:
        """Raises AuthenticationFailed unless it is that proof."""
        if not hmac.compare_digest(proof, self.proof(step, *cards)):
            raise AuthenticationFailed("the other agent does not hold this cluster's token")
