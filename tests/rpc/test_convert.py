"""What is written is read back equal; what is out of bounds is refused on both sides."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer._pb import control_pb2 as pb
from kvxfer.errors import InvalidArgumentError, ProtocolError
from kvxfer.protocol.directory import Change, Hello
from kvxfer.rpc import convert
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
    Role,
    WorkerInfo,
)

texts = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=60)
counts = st.integers(0, convert.COUNT_MAX)
small = st.integers(0, 2**32 - 1)
agent_ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
nonces = st.binary(min_size=16, max_size=16)
incarnations = st.builds(Incarnation, st.integers(1, convert.NUMBER_MAX), nonces)
refs = st.builds(AgentRef, agent_ids, incarnations)
records = st.builds(
    CompatibilityRecord,
    **{field.name: small if field.type == "int" else texts for field in dataclasses.fields(CompatibilityRecord)},
)
pools = st.lists(
    st.builds(
        PoolRecord,
        small,
        records,
        st.integers(1, 2**50),
        st.integers(1, 2**50),
        st.sampled_from(Exposure),
        st.booleans(),
        st.sampled_from(MemoryKind),
    ),
    max_size=4,
    unique_by=lambda pool: pool.pool_id,
).map(tuple)
lanes = st.lists(st.sampled_from(Lane), unique=True).map(tuple)
hosts = st.sampled_from(["", "127.0.0.1", "10.1.2.3", "fe80::1", "2001:db8::7"])
paths = st.sampled_from(["", "/run/kvxfer/p0.sock", "/" + "d" * 106])
addresses = st.builds(DataAddress, hosts, st.integers(0, 65535), paths, texts, lanes)
loads = st.builds(Load, counts, counts, counts, counts, counts)
urls = st.sampled_from(["", "http://127.0.0.1:1", "https://[2001:db8::7]:8000/", "http://decode-0.svc:65535"])
infos = st.builds(WorkerInfo, agent_ids, st.sampled_from(Role), texts, urls, counts, small, texts)
hellos = st.builds(
    Hello,
    infos,
    addresses,
    nonces,
    st.integers(0, convert.NUMBER_MAX),
    pools,
    loads,
    st.booleans(),
    counts,
    st.lists(agent_ids, max_size=3).map(tuple),
    st.integers(0, convert.DURATION_MAX_MS),
)
members = st.builds(
    lambda ref, info, *rest: Member(ref, dataclasses.replace(info, agent_id=ref.agent_id), *rest),
    refs,
    infos,
    addresses,
    pools,
    loads,
    st.booleans(),
    st.booleans(),
)


@given(hellos)
def test_a_hello_survives_the_wire(hello: Hello) -> None:
    raw = convert.write_hello(hello).SerializeToString()
    assert convert.read_hello(pb.Register.FromString(raw)) == hello


@given(members, st.lists(st.one_of(loads, members), max_size=5))
def test_a_kept_message_is_that_of_the_newest_member(first: Member, changes: list[Load | Member]) -> None:
    messages, member = convert.MemberMessages(), first
    for change in changes:
        if isinstance(change, Load):
            member = dataclasses.replace(member, load=change)
        else:  # the same agent, in every way another
            info = dataclasses.replace(change.info, agent_id=first.ref.agent_id)
            member = dataclasses.replace(change, ref=dataclasses.replace(first.ref), info=info)
        assert messages.of(member) == convert.write_member(member, b"")
        assert messages.of(member) == convert.write_member(member, b"")


@given(st.lists(members, max_size=5), st.lists(refs, max_size=3), st.booleans(), st.booleans())
def test_a_change_survives_the_wire_in_parts(
    found: list[Member], gone: list[AgentRef], is_whole: bool, is_settled: bool
) -> None:
    change = Change(bytes(16), 7, is_whole, is_settled, tuple(found * 20), tuple(gone))
    parts = list(convert.write_change(change, next_within_ms=1000, key_of=lambda ref: ref.incarnation.boot_nonce * 2))
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(len(part.members) <= convert.PART_MEMBERS_MAX for part in parts)
    read = [convert.read_change(pb.MembershipUpdate.FromString(part.SerializeToString())) for part in parts]
    keyed = [dataclasses.replace(member, session_key=member.ref.incarnation.boot_nonce * 2) for member in found * 20]
    assert [member for part in read for member in part.members] == keyed
    assert [ref for part in read for ref in part.gone] == gone
    assert {(part.revision, part.is_whole, part.is_settled) for part in read} == {(7, is_whole, is_settled)}


@given(st.binary(max_size=40), st.lists(st.binary(min_size=30, max_size=34), max_size=convert.LEG_KEYS_MAX + 2))
def test_leg_keys_are_32_bytes_and_few(secret: bytes, keys: list[bytes]) -> None:
    update = pb.MembershipUpdate(leg_secret=secret, leg_keys=keys)
    if len(secret) in (0, 32):
        assert convert.read_leg_secret(update) == secret
    else:
        with pytest.raises(ProtocolError, match=r"update\.leg_secret"):
            convert.read_leg_secret(update)
    for message in (update, pb.Welcome(leg_keys=keys)):
        if len(keys) <= convert.LEG_KEYS_MAX and all(len(key) == 32 for key in keys):
            assert convert.read_leg_keys(message) == tuple(keys)
        else:
            with pytest.raises(ProtocolError, match=r"leg[_ ]keys"):
                convert.read_leg_keys(message)


def test_the_largest_part_fits_the_largest_message() -> None:
    """A bound on lists and texts is worth something only if their product is within the bound on messages."""
    text = "\u20ac" * (convert.TEXT_BYTES_MAX // 3)
    record = CompatibilityRecord(text, text, text, text, 1 << 31, 1 << 31, 1 << 31, 1 << 31, text, text, text, text)
    full = tuple(PoolRecord(n, record, 1 << 52, 1 << 52, Exposure.POOL, True) for n in range(convert.POOLS_MAX))
    ref = AgentRef("a" * 64, Incarnation(1 << 62, bytes(16)))
    info = WorkerInfo("a" * 64, Role.BOTH, text, text, 1 << 52, 1 << 31, text)
    member = Member(ref, info, DataAddress(text, 65535, text, text), full)
    [part] = convert.write_change(
        Change(bytes(16), 1, True, True, (member,) * convert.PART_MEMBERS_MAX),
        next_within_ms=1,
        key_of=lambda _: bytes(32),
    )
    assert part.ByteSize() <= convert.MESSAGE_BYTES_MAX
    info = dataclasses.replace(info, http_url=f"http://{'.'.join(['h' * 63] * 3)}:80")
    address = DataAddress("2001:db8::7", 65535, "/" + "p" * 106, text)
    known = (f"{'n' * 64}",) * convert.NAMES_MAX
    hello = convert.write_hello(Hello(info, address, bytes(16), 1, full, known=known))
    assert pb.AgentMessage(register=hello).ByteSize() <= 2 << 20


def test_every_field_of_a_record_travels() -> None:
    assert {field.name for field in dataclasses.fields(CompatibilityRecord)} == {
        field.name for field in pb.CompatibilityRecord.DESCRIPTOR.fields
    }
    assert {field.name for field in dataclasses.fields(Load)} == {field.name for field in pb.Load.DESCRIPTOR.fields}


def test_our_own_values_are_checked_before_they_are_sent() -> None:
    info = WorkerInfo("p0", Role.BOTH, "m" * 2000, "")
    with pytest.raises(InvalidArgumentError, match=r"cannot be registered: info\.model"):
        convert.write_hello(Hello(info, DataAddress("", 0, "", ""), bytes(16)))
    with pytest.raises(InvalidArgumentError, match="cannot be registered"):
        convert.write_hello(Hello(WorkerInfo("p0", Role.BOTH, "\ud800", ""), DataAddress("", 0, "", ""), bytes(16)))
    assert convert.read_load(convert.write_load(Load(-5, 1 << 60))) == Load(0, convert.COUNT_MAX)


@pytest.mark.parametrize("stages", ["16", "16,", "a,b", "16,32 ", "9" * 5 + ",1", ",".join(["1"] * 33)])
def test_stages_that_cannot_be_are_refused(stages: str) -> None:
    message = pb.WorkerInfo(agent_id="b", role=pb.ROLE_BOTH, stages=stages)
    with pytest.raises(ProtocolError, match=r"info\.stages"):
        convert.read_info(message)
    message.stages = "16,32"
    assert convert.read_info(message).stages == "16,32"
    assert convert.read_info(convert.write_info(convert.read_info(message))).stage_count == 2


def test_a_member_must_have_its_own_info() -> None:
    ref = pb.AgentRef(agent_id="a", incarnation=pb.Incarnation(number=1, boot_nonce=bytes(16)))
    message = pb.Member(ref=ref, info=pb.WorkerInfo(agent_id="b", role=pb.ROLE_BOTH))
    with pytest.raises(ProtocolError, match="has the info of 'b'"):
        convert.read_member(message)
    message.info.agent_id = "a"
    assert convert.read_member(message).ref.agent_id == "a"
    message.session_key = bytes(31)
    with pytest.raises(ProtocolError, match="session_key must be 0 or 32 bytes"):
        convert.read_member(message)


def test_lanes_of_a_later_version_are_left_out() -> None:
    message = pb.DataAddress(tcp_host="h", lanes=["warp", "stream", "stream"])
    assert convert.read_address(message).lanes == (Lane.STREAM,)
    with pytest.raises(ProtocolError, match="LANES_MAX"):
        convert.read_address(pb.DataAddress(lanes=["stream"] * (convert.LANES_MAX + 1)))
