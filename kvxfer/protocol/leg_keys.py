"""The keys that a router shows to a worker's HTTP port: one for each worker and period of time.

Decides how they follow from the secret of the cluster, so that all its coordinators hand out the same ones and no store
keeps them. Pure; it must never know when a period begins, or how a key travels.
"""

from __future__ import annotations

import hashlib
import hmac

from kvxfer.protocol.handshake import canonical_ref
from kvxfer.types import AgentRef


def leg_secret(root: bytes, period: int) -> bytes:
    """The 32 bytes under all leg keys of one period. ``root`` is from :func:`kvxfer.protocol.handshake.session_root`;
    nothing of it, nor of another period, follows from them."""
    return hmac.digest(root, b"kvxfer leg secret v1" + period.to_bytes(8, "big"), hashlib.sha256)


def leg_key(secret: bytes, worker: AgentRef) -> bytes:
    """The 32-byte key of one incarnation of a worker in the period of ``secret``; another worker's does not follow from
    it."""
    return hmac.digest(secret, b"kvxfer leg key v1" + canonical_ref(worker), hashlib.sha256)
