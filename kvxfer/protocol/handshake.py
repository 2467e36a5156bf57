"""Decides whether two pools may be joined, and derives the secrets that prove a session; must never know how either
travels.

Compatibility is compared field by field on the whole records, so that a refusal can name what differs; the digest that
the native cores compare in a PULL frame only repeats that verdict cheaply. ``block_count``, ``exposure`` and
``pool_id`` are not compared: pools of different size and reach exchange blocks happily. ``block_bytes`` is: equal
records that lay blocks out differently are a bug somewhere, and bytes must not move over it.

Session keys are derived, not drawn: a restarted coordinator with the same token gives every pair the key that it had,
so that sessions survive it. A key is bound to both incarnations; a restarted agent has new keys with all peers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections.abc import Sequence

from kvxfer.errors import IncompatibleError, InvalidArgumentError, WeightsUnknownError
from kvxfer.protocol import facts
from kvxfer.types import AgentRef, CompatibilityRecord, PoolRecord, why_unknown

SESSION_KEY_BYTES = 32
NAMED_MAX = 12
"""The most differences that one error names."""


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """One field in which two pools differ."""

    field: str
    ours: str | int
    theirs: str | int

    def __str__(self) -> str:
        if self.is_unknown:
            sides = (("here", self.ours), ("there", self.theirs))
            whys = [f"{where} {why}" for where, value in sides if (why := why_unknown(str(value))) is not None]
            return f"{self.field} is not known: {', '.join(whys)}"
        return f"{self.field} is {self.ours!r} here and {self.theirs!r} there"

    @property
    def is_unknown(self) -> bool:
        """Whether one side does not know its weights: then it cannot be said that they differ, nor that they do not."""
        is_weights = self.field == "weights_fingerprint"
        return is_weights and any(why_unknown(str(value)) is not None for value in (self.ours, self.theirs))


def compare(ours: PoolRecord, theirs: PoolRecord) -> tuple[Mismatch, ...]:
    """Every field that forbids moving blocks between the two pools, in the order of CompatibilityRecord, then
    ``block_bytes``.
    """
    if ours.record.matches(theirs.record) and ours.block_bytes == theirs.block_bytes:
        return ()
    found = compare_records(ours.record, theirs.record)
    if ours.block_bytes != theirs.block_bytes:
        found = (*found, Mismatch("block_bytes", ours.block_bytes, theirs.block_bytes))
    return found


def compare_records(ours: CompatibilityRecord, theirs: CompatibilityRecord) -> tuple[Mismatch, ...]:
    """Every field in which the two differ, or that one does not know, in their order. Of ``config_fingerprint`` those
    settings are named that differ, if both records say what it was made of."""
    found: list[Mismatch] = []
    for field in dataclasses.fields(CompatibilityRecord):
        if not field.compare:
            continue
        mismatch = Mismatch(field.name, getattr(ours, field.name), getattr(theirs, field.name))
        if mismatch.ours == mismatch.theirs and not mismatch.is_unknown:
            continue
        named = facts.differences(ours.facts, theirs.facts) if field.name == "config_fingerprint" else ()
        found += [Mismatch(*difference) for difference in named] or [mismatch]
    return tuple(found)


def check(ours: PoolRecord, theirs: PoolRecord) -> None:
    """Raise IncompatibleError, naming every field that differs (``.field`` is the first), unless blocks may move
    between the two pools; WeightsUnknownError where nothing differs but what one of them does not know.
    """
    mismatches = compare(ours, theirs)
    if not mismatches:
        return
    kind = WeightsUnknownError if all(found.is_unknown for found in mismatches) else IncompatibleError
    raise kind(f"pools do not match: {sentence(mismatches)}", field=mismatches[0].field)


def sentence(mismatches: Sequence[Mismatch]) -> str:
    """The first NAMED_MAX of them with both values, and how many more there are."""
    more = len(mismatches) - NAMED_MAX
    return "; ".join([*map(str, mismatches[:NAMED_MAX]), *([f"and {more} more"] if more > 0 else [])])


def session_root(token: bytes) -> bytes:
    """The 32-byte secret under all session keys of a cluster; raises InvalidArgumentError for an empty token."""
    if not token:
        raise InvalidArgumentError("cluster token is empty")
    return hmac.digest(token, b"kvxfer session root v1", hashlib.sha256)


def session_key(root: bytes, one: AgentRef, other: AgentRef) -> bytes:
    """The 32-byte key of one pair of incarnations; the same whichever way round they are given."""
    return hmac.digest(
        root, b"kvxfer session key v1" + b"".join(sorted((canonical_ref(one), canonical_ref(other)))), hashlib.sha256
    )


def canonical_ref(ref: AgentRef) -> bytes:
    """One incarnation as bytes that no other incarnation has: lengths are fixed or written down."""
    name = ref.agent_id.encode()
    return len(name).to_bytes(2, "big") + name + ref.incarnation.number.to_bytes(8, "big") + ref.incarnation.boot_nonce
