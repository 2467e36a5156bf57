"""Pools are compared by every field, and session keys belong to exactly one pair of incarnations."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import IncompatibleError, InvalidArgumentError, WeightsUnknownError
from kvxfer.protocol import handshake
from kvxfer.types import (
    AgentRef,
    CompatibilityRecord,
    Exposure,
    Incarnation,
    PoolRecord,
    unknown_fingerprint,
    why_unknown,
)

RECORD = CompatibilityRecord("m", "c", "w", "float16", 2, 3, 64, 16, "lb2thd", "plain", "rope", "sdpa")
POOL = PoolRecord(1, RECORD, 8, 4096, Exposure.GRANT, False)
FIELDS = [field.name for field in dataclasses.fields(CompatibilityRecord) if field.compare]

refs = st.builds(
    AgentRef,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    st.builds(Incarnation, st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=16)),
)


def other_value(value: str | int) -> str | int:
    return value + 1 if isinstance(value, int) else value + "x"


@given(st.sets(st.sampled_from([*FIELDS, "block_bytes"])))
def test_every_difference_is_named_in_order(names: set[str]) -> None:
    changes = {name: other_value(getattr(RECORD, name)) for name in names if name in FIELDS}
    theirs = dataclasses.replace(
        POOL,
        record=dataclasses.replace(RECORD, **changes),
        block_bytes=POOL.block_bytes + ("block_bytes" in names),
        pool_id=7,
        block_count=9,
        exposure=Exposure.POOL,
        is_shareable=True,
    )
    found = [mismatch.field for mismatch in handshake.compare(POOL, theirs)]
    assert found == [name for name in [*FIELDS, "block_bytes"] if name in names]
    if not names:
        handshake.check(POOL, theirs)
        return
    with pytest.raises(IncompatibleError, match=found[0]) as caught:
        handshake.check(POOL, theirs)
    assert caught.value.field == found[0]


UNKNOWN = unknown_fingerprint("being read", bytes(16))


def of(weights: str, **changes: str) -> PoolRecord:
    return dataclasses.replace(POOL, record=dataclasses.replace(RECORD, weights_fingerprint=weights, **changes))


@pytest.mark.parametrize(("ours", "theirs"), [("w", UNKNOWN), (UNKNOWN, "w"), (UNKNOWN, UNKNOWN)])
def test_check_of_unknown_weights_refuses_them_by_name_even_if_they_look_alike(ours: str, theirs: str) -> None:
    assert [mismatch.field for mismatch in handshake.compare(of(ours), of(theirs))] == ["weights_fingerprint"]
    with pytest.raises(WeightsUnknownError, match=r"weights_fingerprint is not known: \w+ being read") as caught:
        handshake.check(of(ours), of(theirs))
    assert (caught.value.code, caught.value.field) == ("weights_unknown", "weights_fingerprint")
    with pytest.raises(IncompatibleError, match="dtype") as caught:  # it is known that these differ
        handshake.check(of(ours), of(theirs, dtype="float32"))
    assert caught.value.code == "incompatible"


def test_an_unknown_fingerprint_equals_no_other() -> None:
    one, other = (unknown_fingerprint("why", bytes([n]) * 16) for n in (1, 2))
    assert one != other
    assert why_unknown(one) == why_unknown(other) == "why"
    assert why_unknown("52f9fb37b672f481758fd97dc7256e9c") is None
    assert why_unknown("unknown:") == "no reason was given"
    assert of(one).record.digest() != of(other).record.digest()
    with pytest.raises(InvalidArgumentError, match="16 bytes"):
        unknown_fingerprint("why", b"")


@given(refs, refs, refs)
def test_a_key_is_symmetric_and_belongs_to_one_pair(one: AgentRef, other: AgentRef, third: AgentRef) -> None:
    root = handshake.session_root(b"token")
    key = handshake.session_key(root, one, other)
    assert len(key) == handshake.SESSION_KEY_BYTES
    assert key == handshake.session_key(root, other, one)
    if {one, other} != {one, third}:
        assert key != handshake.session_key(root, one, third)
    assert key != handshake.session_key(handshake.session_root(b"another"), one, other)


def test_a_root_needs_a_token() -> None:
    with pytest.raises(InvalidArgumentError):
        handshake.session_root(b"")


def test_keys_stay_as_they_are() -> None:
    """Agents of two versions must derive the same key: a change here is a change of the protocol."""
    one = AgentRef("p0", Incarnation(1, bytes(16)))
    other = AgentRef("d0", Incarnation(2, bytes(range(16))))
    key = handshake.session_key(handshake.session_root(b"token"), one, other)
    assert key.hex() == "074f09a647de8ce9b631523ca819fc2dea38f085bc688dd1b6f081b3028a077d"
