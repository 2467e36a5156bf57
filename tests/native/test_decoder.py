"""The frame codec: every frame survives every cut, and anything else is one error."""

from __future__ import annotations

import hashlib
import hmac
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer._native import _core as native
from kvxfer.errors import InvalidArgumentError, ProtocolError

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
ids = st.binary(min_size=16, max_size=16)
nonces = st.binary(min_size=32, max_size=32)
HEAD = b"KX" + bytes([native.WIRE_VERSION])
codes = st.sampled_from(list(native.Code))
agents = st.builds(native.AgentRef, st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True), u64, ids)
triples = st.lists(st.tuples(u64, u64, u64), max_size=20)

lanes = st.sampled_from(list(native.Lane))
rows = st.lists(st.tuples(u32, u64, u64, u64, u32), max_size=12)
lists = st.builds(native.WireList, rows, st.lists(u32, max_size=12))
pulls = st.builds(native.Pull, ids, u32, u64, lanes, u32, u32, u64, nonces, u32, nonces, st.booleans())


@st.composite
def readies(draw: st.DrawFn) -> Any:
    blocks = draw(st.lists(u32, max_size=50))
    checksums = draw(st.lists(u32, min_size=len(blocks), max_size=len(blocks))) if draw(st.booleans()) else []
    return native.Ready(*draw(st.tuples(ids, u32, u32, u32, u32, u32, st.booleans(), u32, u32, u32)), blocks, checksums)


frames = st.one_of(
    st.builds(native.Hello, st.sampled_from(list(native.HelloStep)), agents, agents, nonces, nonces),
    pulls,
    st.builds(
        native.Push,
        ids,
        lanes,
        lists,
        lists,
        u32,
        st.booleans(),
        st.none() | st.binary(max_size=100),
        st.integers(0, 5),
        st.booleans(),
    ),
    readies(),
    st.builds(native.Data, ids, u32, u32, u32, st.booleans(), st.integers(0, 100), st.booleans()),
    st.builds(native.Confirm, ids, u64),
    st.builds(native.Verdict, ids, u64, codes),
    st.builds(native.Release, ids),
    st.builds(native.Renew, ids, u32, u32),
    st.builds(native.Revoke, ids, codes, st.binary(max_size=512)),
    st.builds(native.Queued, ids, u32, st.booleans(), u32, st.booleans(), u32),
    st.builds(native.Cancel, ids, u32),
    st.builds(native.Notif, st.just(native.NotifKind.DELIVER), u64, u64, st.binary(max_size=300)),
    st.builds(native.Notif, st.just(native.NotifKind.ACK), u64, u64, st.binary(max_size=300), u32),
    st.builds(
        native.Notif,
        st.just(native.NotifKind.PART),
        u64,
        u64,
        st.binary(min_size=1, max_size=300),
        st.integers(0, 1 << 23),
        st.integers((1 << 23) + 300, 1 << 24),
    ),
    st.builds(native.Ping, st.sampled_from(list(native.PingKind)), u64),
    st.builds(native.ErrorFrame, ids, u32, codes, st.binary(max_size=512)),
    st.builds(native.Map, u32, u64, u32, triples, lanes, u64, st.binary(max_size=100)),
    st.builds(native.Fetch, pulls, lists),
    st.builds(native.Done, ids, codes, st.binary(max_size=512), st.integers(0, 5), u32),
)
KINDS = [
    "hello",
    "pull",
    "push",
    "ready",
    "data",
    "confirm",
    "verdict",
    "release",
    "renew",
    "revoke",
    "cancel",
    "notif",
]
KINDS += ["ping", "error", "map", "fetch", "done", "queued"]


def fields(frame: Any) -> dict[str, Any]:
    found = {name: getattr(frame, name) for name in dir(frame) if not name.startswith("_")}
    return {name: fields(v) if isinstance(v, (native.Pull, native.WireList)) else v for name, v in found.items()}


def decode(data: bytes, cuts: list[int]) -> list[tuple[Any, bytes]]:
    """Frames with their payloads out of `data` fed in chunks that end at `cuts`."""
    decoder = native.Decoder()
    out: list[tuple[Any, bytes]] = []
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    start = 0
    for end in ends:
        decoder.feed(data[start:end])
        start = end
        while True:
            while decoder.payload_pending and (part := decoder.take_payload(1 << 20)):
                out[-1] = (out[-1][0], out[-1][1] + part)
            if decoder.payload_pending or (frame := decoder.next()) is None:
                break
            out.append((frame, b""))
    assert decoder.buffered == 0
    return out


@settings(max_examples=300, deadline=None)
@given(st.lists(frames, min_size=1, max_size=5), st.lists(st.integers(0, 2000), max_size=12))
def test_round_trip_in_any_cut(sent: list[Any], cuts: list[int]) -> None:
    payloads = [b"\x07" * f.payload_bytes if isinstance(f, native.Data) else b"" for f in sent]
    wire = b"".join(native.encode(frame) + payload for frame, payload in zip(sent, payloads, strict=True))
    got = decode(wire, cuts)
    assert [type(frame) for frame, _ in got] == [type(frame) for frame in sent]
    assert [fields(frame) for frame, _ in got] == [fields(frame) for frame in sent]
    assert [payload for _, payload in got] == payloads


@settings(max_examples=100, deadline=None)
@given(frames)
def test_every_cut_of_every_frame(frame: Any) -> None:
    wire = native.encode(frame)
    assert native.kind_name(frame) == KINDS[wire[3] - 1]
    for cut in range(len(wire)):
        decoder = native.Decoder()
        decoder.feed(wire[:cut])
        assert decoder.next() is None
        decoder.feed(wire[cut:])
        found = decoder.next()
        assert native.encode(found) == wire


@settings(max_examples=150, deadline=None)
@given(frames)
def test_every_body_that_is_too_short_or_too_long_is_refused(frame: Any) -> None:
    wire = native.encode(frame)
    header, body = wire[:4], wire[8:]
    for size in [*range(len(body)), len(body) + 1]:
        decoder = native.Decoder()
        decoder.feed(header + size.to_bytes(4, "little") + (body + b"\0")[:size])
        with pytest.raises(ProtocolError):
            decoder.next()


def test_lists_are_believed_only_as_far_as_they_are_there() -> None:
    """A count of elements is four bytes; what it claims may not be allocated before it has come."""
    wire = native.encode(
        native.Fetch(native.Pull(b"i" * 16, 1, 2, native.Lane.STREAM, 0, 1, 0, b"d" * 32, 0), native.WireList([]))
    )
    body = bytearray(wire[8:])
    for claim in (1, 12289, 2**32 - 1):
        for at in (len(body) - 8, len(body) - 4):
            claimed = bytearray(body)
            claimed[at : at + 4] = claim.to_bytes(4, "little")
            decoder = native.Decoder()
            decoder.feed(wire[:8] + bytes(claimed))
            with pytest.raises(ProtocolError, match="list"):
                decoder.next()


def test_bounds_of_lists() -> None:
    most = 384 * 1024
    native.encode(
        native.Push(
            b"i" * 16,
            native.Lane.STREAM,
            native.WireList([(1, 0, 0, 1, 1)] * (most // 32)),
            native.WireList([], [0] * (most // 4)),
        )
    )
    for beyond in (native.WireList([(1, 0, 0, 1, 1)] * (most // 32 + 1)), native.WireList([], [0] * (most // 4 + 1))):
        with pytest.raises(InvalidArgumentError, match="bound"):
            native.encode(native.Push(b"i" * 16, native.Lane.STREAM, beyond, native.WireList([])))
    with pytest.raises(InvalidArgumentError, match="one checksum"):
        native.encode(native.Ready(b"i" * 16, 1, 1, 1, 0, 1, True, 1, 1, 0, [1, 2], [3]))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 20), st.booleans())
def test_anything_is_a_value_or_one_error(noise: bytes, kind: int, is_framed: bool) -> None:
    data = HEAD + bytes([kind]) + len(noise).to_bytes(4, "little") + noise if is_framed else noise
    decoder = native.Decoder()
    try:
        decoder.feed(data)
        while not decoder.payload_pending and (frame := decoder.next()) is not None:
            assert data.startswith(native.encode(frame))
    except ProtocolError:
        with pytest.raises(ProtocolError):
            decoder.feed(native.encode(native.Release(b"i" * 16)))
        with pytest.raises(ProtocolError):
            decoder.next()


@settings(max_examples=200, deadline=None)
@given(frames, st.randoms())
def test_a_flipped_bit_is_another_frame_or_an_error(frame: Any, rng: random.Random) -> None:
    wire = bytearray(native.encode(frame))
    wire[rng.randrange(len(wire))] ^= 1 << rng.randrange(8)
    decoder = native.Decoder()
    decoder.feed(bytes(wire))
    try:
        found = decoder.next()
    except ProtocolError:
        return
    assert found is None or bytes(wire).startswith(native.encode(found))


def test_bounds() -> None:
    big = HEAD + b"\x0c" + (native.BODY_MAX + 1).to_bytes(4, "little")
    decoder = native.Decoder()
    decoder.feed(big)
    with pytest.raises(ProtocolError, match="bound"):
        decoder.next()
    with pytest.raises(InvalidArgumentError):
        native.encode(native.Notif(native.NotifKind.DELIVER, 1, 1, b"x" * (1 << 20)))
    with pytest.raises(InvalidArgumentError):
        native.encode(native.Data(b"i" * 16, 1, 0, 1, False, 1 << 40))
    decoder = native.Decoder()
    decoder.feed(b"KX\x01\x08")
    decoder.feed(bytes(20))
    with pytest.raises(ProtocolError, match="version 1"):
        decoder.next()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=200))
def test_hashes(message: bytes, key: bytes) -> None:
    assert native.sha256(message) == hashlib.sha256(message).digest()
    assert native.hmac_sha256(key, message) == hmac.new(key, message, "sha256").digest()


@pytest.mark.parametrize("size", [55, 56, 57, 63, 64, 65, 119, 120, 128, 100_000])
def test_hashes_at_the_edges(size: int) -> None:
    message = random.Random(size).randbytes(size)
    assert native.sha256(message) == hashlib.sha256(message).digest()
    assert native.hmac_sha256(message, message) == hmac.new(message, message, "sha256").digest()


@pytest.mark.parametrize(
    ("payload", "begin", "total"),
    [(b"", 0, 1), (b"xy", 0, 1), (b"x", 2, 2), (b"x", 3, 2), (b"x", 0xFFFFFFFF, 4), (b"x", 0, (16 << 20) + 8193)],
)
def test_a_part_beyond_the_end_of_its_notification_is_refused(payload: bytes, begin: int, total: int) -> None:
    with pytest.raises(ProtocolError, match="notification"):
        decode(native.encode(native.Notif(native.NotifKind.PART, 1, 1, payload, begin, total)), [])
