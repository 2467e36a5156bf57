"""Whatever reads a peer's bytes in Python: a value or its one error, any bytes and good ones with some changed."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer._pb import control_pb2 as pb
from kvxfer.connectors.nixl import codec, etcd, metadata, p2p
from kvxfer.connectors.nixl.dlists import nixlRegDList, nixlXferDList
from kvxfer.connectors.nixl.enums import nixl_mem_t
from kvxfer.connectors.nixl.errors import nixlBackendError, nixlMismatchError
from kvxfer.connectors.nixl.inbox import envelope_for, open_envelope
from kvxfer.connectors.nixl.registry import newest
from kvxfer.errors import InvalidArgument, ProtocolViolation
from kvxfer.openai.errors import RequestError, error_body
from kvxfer.openai.schemas import load_object
from kvxfer.openai.sse import EventDecoder, encode_event, encode_object
from kvxfer.openai.transfer_params import Part, TransferEnd, TransferParams, parse_transfer_params
from kvxfer.protocol.directory import Change, Hello
from kvxfer.router import failure, merge
from kvxfer.router.legs import PREFILL_TIMINGS, Prefilled, has_answer
from kvxfer.rpc import convert
from kvxfer.transport.descriptors import Descriptors
from kvxfer.transport.peer import RemotePeer
from kvxfer.types import (
    AgentRef,
    CompatibilityRecord,
    DataAddress,
    Exposure,
    Incarnation,
    Lane,
    Load,
    Member,
    MemoryKind,
    PoolRecord,
    RegionRecord,
    Role,
    TransferId,
    WorkerInfo,
)

pytestmark = pytest.mark.no_sanitizer

Change_ = tuple[str, float, bytes]
EDGES = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"-1",
    b"null",
    b"[]",
    b"{}",
    b'"',
    b"1e999",
    b"9" * 25,
    b"\xff" * 8,
    b"[" * 3000,
)
edits = st.lists(
    st.tuples(
        st.sampled_from(("put", "over", "cut", "double")),
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(EDGES) | st.binary(min_size=1, max_size=6),
    ),
    max_size=4,
)


def edited(data: bytes, changes: Sequence[Change_]) -> bytes:
    for kind, place, some in changes:
        at = int(place * (len(data) + 1))
        end = at + len(some)
        middle = {"put": some + data[at:end], "over": some, "cut": b"", "double": data[at:end] * 2}[kind]
        data = data[:at] + middle + data[end:]
    return data


def damaged(samples: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=100) | st.builds(edited, st.sampled_from(samples), edits)


def value_of(read: Callable[[], Any], *errors: type[Exception]) -> Any:
    """What was read, or None where it was refused as it may be; any other exception is the test's failure."""
    try:
        return read()
    except errors:
        return None


REF = AgentRef("a", Incarnation(3, bytes(range(16))))
ADDRESS = DataAddress("127.0.0.1", 4000, "/run/x.sock", "host:0", (Lane.STREAM, Lane.CMA))
REGIONS = (
    RegionRecord(1 << 24, 4096, 100),
    RegionRecord(2, 1 << 40, 1 << 20, MemoryKind.CUDA, 3, exposure=Exposure.GRANT),
)
RECORD = CompatibilityRecord(
    **{
        field.name: 7 if field.type == "int" else "text"
        for field in dataclasses.fields(CompatibilityRecord)  # type: ignore[arg-type]
    }
)

# --- metadata and descriptors of NIXL agents ---

BLOBS = [
    metadata.encode_metadata(metadata.AgentMetadata("a", REF, REGIONS, True, ADDRESS, bytes(32))),
    metadata.encode_metadata(metadata.AgentMetadata("a name", REF, (), False)),
]


@settings(max_examples=400)
@given(damaged(BLOBS), st.lists(st.tuples(*[st.integers(1, 2**64 - 1)] * 2), min_size=1, max_size=3))
@example(BLOBS[0].replace(b'"host",0', b'"host",18446744073709551615'), [(4096, 1)])
@example(BLOBS[0].replace(b"4096,100", b"18446744073709551516,100"), [(2**64 - 100, 50)])
def test_metadata(blob: bytes, rows: list[tuple[int, int]]) -> None:
    """What was accepted can be written again, and its memory looked up."""
    found = value_of(lambda: metadata.decode_metadata(blob), nixlMismatchError)
    if found is None:
        return
    assert metadata.decode_metadata(metadata.encode_metadata(found)) == found
    look_up(newest(found.records), rows)


def look_up(records: Sequence[RegionRecord], rows: list[tuple[int, int]]) -> None:
    """Found where one region holds it, or InvalidArgument."""
    table = RemotePeer(REF, ADDRESS, records).table
    for address, length in [*rows, *((record.address, min(record.length_bytes, 64)) for record in records)]:
        descriptors = Descriptors(np.array([(address, length, 0)], np.uint64))
        prepared = value_of(lambda d=descriptors: table.resolve(d), InvalidArgument)  # type: ignore[misc]
        holders = [r for r in records if r.address <= address and address + length <= r.address + r.length_bytes]
        assert prepared is None or prepared.regions <= {record.region_id for record in holders}
        if length < 2**20 and any(record.device == 0 for record in holders[:1]) and len(holders) == 1:
            assert prepared is not None


def lists() -> list[bytes]:
    rows = [(1000, 105, 0), (2000, 30, 1), (2**64 - 1, 1, 2**64 - 1)]
    reg = nixlRegDList(nixl_mem_t.DRAM_SEG, [(*row, b"meta") for row in rows])
    return [codec.encode_dlist(nixlXferDList(nixl_mem_t.DRAM_SEG, rows)), codec.encode_dlist(reg)]


@settings(max_examples=400)
@given(damaged(lists()))
def test_serialised_descriptors(data: bytes) -> None:
    found = value_of(lambda: codec.decode_any(data), nixlMismatchError)
    assert found is None or codec.encode_dlist(found) == data


@given(damaged([envelope_for("a name")(b"text"), envelope_for("a")(b"text"), b"\0"]))
def test_notifications(payload: bytes) -> None:
    for agent_id in ("a", metadata.wire_id("a name")):
        opened = open_envelope(agent_id, payload)
        assert opened is None or metadata.wire_id(opened[0]) == agent_id


FRAMES = [
    p2p.HEAD.pack(p2p.MAGIC, 1, kind, len(body)) + body for kind, body in ((1, BLOBS[0]), (2, b""), (3, bytes(33)))
]


@settings(max_examples=150)
@given(damaged(FRAMES))
def test_metadata_exchange(data: bytes) -> None:
    """Frames until the other side hangs up, or one error."""
    one, other = socket.socketpair()
    with one, other:
        one.sendall(data)
        one.shutdown(socket.SHUT_WR)
        other.settimeout(10)
        while (frame := value_of(lambda: p2p.receive_frame(other), nixlMismatchError)) is not None:
            assert len(frame[1]) <= len(data)


EVENT = json.dumps({"result": {"events": [{"type": "DELETE", "kv": {"key": "L25zL2EvbGFiZWw="}}]}}).encode()


@settings(max_examples=300)
@given(damaged([EVENT, EVENT.replace(b"DELETE", b"PUT")]))
@example(EVENT.replace(b'{"key"', b'7, "x": {"key"'))
@example(EVENT.replace(b"[{", b"[3, {"))
def test_etcd_events(line: bytes) -> None:
    keys = value_of(lambda: etcd.deleted_keys(line), nixlBackendError)
    assert keys is None or all(isinstance(key, bytes) for key in keys)


@settings(max_examples=300)
@given(damaged([b'{"kvs": [{"key": "YQ==", "value": "YmxvYg=="}]}', b'{"header": {}}']))
@example(b'{"kvs": [{"value": 3}]}')
@example(b'{"kvs": {"value": "YQ=="}}')
def test_etcd_values(text: bytes) -> None:
    found = value_of(lambda: etcd.first_value(text), nixlBackendError)
    assert found is None or isinstance(found, bytes)


# --- records that applications carry, and the control plane's ---


@settings(max_examples=300)
@given(damaged([record.to_json().encode() for record in REGIONS]))
@example(b"[" * 100_000)
@example(REGIONS[0].to_json().encode().replace(b'"device":0', b'"device":-1'))
@example(REGIONS[0].to_json().encode().replace(b'"device":0', b'"device":1180591620717411303424'))
def test_region_records(text: bytes) -> None:
    found = value_of(lambda: RegionRecord.from_json(text), InvalidArgument)  # type: ignore[arg-type]
    if found is not None:
        assert RegionRecord.from_json(found.to_json()) == found
        look_up([found], [(found.address, 1)])


@settings(max_examples=200)
@given(damaged([RECORD.to_json().encode()]))
@example(b"[" * 100_000)
def test_compatibility_records(text: bytes) -> None:
    found = value_of(lambda: CompatibilityRecord.from_json(text), InvalidArgument)  # type: ignore[arg-type]
    assert found is None or CompatibilityRecord.from_json(found.to_json()) == found


INFO = WorkerInfo("a", Role.BOTH, "model", "http://127.0.0.1:1", 100, 16, "dialect")
POOL = PoolRecord(1, RECORD, 8, 64, Exposure.POOL, True, MemoryKind.HOST)
MEMBER = Member(REF, INFO, ADDRESS, (POOL,), Load(1, 2, 3, 4, 5), False, True, bytes(32))
CHANGE = Change(bytes(16), 5, True, True, (MEMBER,), (REF,))
MESSAGES: list[tuple[Any, Callable[[Any], Any], bytes]] = [
    (
        pb.Register,
        convert.read_hello,
        convert.write_hello(Hello(INFO, ADDRESS, bytes(16), 3, (POOL,))).SerializeToString(),
    ),
    (pb.Member, convert.read_member, convert.write_member(MEMBER, bytes(32)).SerializeToString()),
    (
        pb.MembershipUpdate,
        convert.read_change,
        convert.write_change(CHANGE, next_within_ms=10, key_of=lambda _: bytes(32))[0].SerializeToString(),
    ),
    (pb.PoolRecord, convert.read_pool, convert.write_pool(POOL).SerializeToString()),
    (pb.Load, convert.read_load, convert.write_load(Load(1, 2, 3, 4, 5)).SerializeToString()),
]


@pytest.mark.parametrize(("kind", "read", "sample"), MESSAGES, ids=[message[0].__name__ for message in MESSAGES])
@settings(max_examples=300)
@given(data=st.data())
def test_control_messages(kind: Any, read: Callable[[Any], Any], sample: bytes, data: st.DataObject) -> None:
    assert read(kind.FromString(sample)) is not None
    message = value_of(lambda: kind.FromString(data.draw(damaged([sample]))), DecodeError)
    if message is not None:
        value_of(lambda: read(message), ProtocolViolation)


# --- what the router and the workers tell each other ---

PARAMS = TransferParams(TransferId(bytes(16)), 2, Part.DECODE, TransferEnd("p", 1, "a"), TransferEnd("d", 1, "b"))


@settings(max_examples=300)
@given(damaged([encode_object(PARAMS.to_json())]))
def test_transfer_params(text: bytes) -> None:
    found = value_of(lambda: parse_transfer_params(load_object(text)), RequestError)
    assert found is None or parse_transfer_params(found.to_json()) == found


CHUNK = {"choices": [{"text": "a", "delta": {"content": "b"}, "finish_reason": None}], "kvxfer": {"lane": "cma"}}
EVENTS = [encode_event(CHUNK), encode_event(error_body("busy", code="overloaded")), b"data: [DONE]\n\n"]


@settings(max_examples=300)
@given(damaged(EVENTS))
@example(EVENTS[0].replace(b'"cma"', b"1e999"))
@example(EVENTS[1].replace(b'"overloaded"', b"NaN"))
def test_events_of_a_worker(data: bytes) -> None:
    """Whatever a stream's events say, the client gets whole events: the worker's own bytes, or JSON."""
    for event in value_of(lambda: EventDecoder().feed(data), ProtocolViolation) or ():
        assert has_answer(event) in (True, False)
        ended = failure.from_event("decode", event.data)
        assert ended is None or encode_event(ended.body)
        passed = merge.merge_event(event, {"attempt": 2})
        assert passed == event.raw or EventDecoder().feed(passed)[0].json()["kvxfer"]["attempt"] == 2


@settings(max_examples=300)
@given(damaged([encode_object(CHUNK), encode_object(error_body("busy"))]), st.sampled_from((400, 429, 500, 503)))
@example(encode_object(CHUNK).replace(b'"cma"', b"1e999"), 500)
@example(b'{"error": {"message": "m", "param": 1e999, "more": NaN}}', 500)
def test_answers_of_a_worker(content: bytes, status: int) -> None:
    assert encode_object(failure.from_answer("decode", status, content).body)
    merged = merge.merge_body(content, {"attempt": 2})
    assert merged == content or json.loads(merged)["kvxfer"]["attempt"] == 2


JSON = st.recursive(st.none() | st.floats() | st.text(max_size=3), lambda some: st.lists(some, max_size=2))


@given(st.dictionaries(st.sampled_from(sorted(PREFILL_TIMINGS)), JSON))
@example({"queue_s": float("inf")})
def test_timings_of_a_prefill_worker(timings: dict[str, Any]) -> None:
    """They go into D's account, or D's event stays as it is."""
    account = Prefilled({"timings": timings}).account()
    [event] = EventDecoder().feed(encode_event(CHUNK))
    merged = merge.merge_event(event, account)
    assert merged == event.raw or merged == encode_event({**CHUNK, "kvxfer": {"lane": "cma", **account}})
