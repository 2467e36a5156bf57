"""Records that applications carry, agent metadata, and what agents and the coordinator tell each other."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvxfer._pb import control_pb2 as pb
from kvxfer.agent.discovery import Discovery
from kvxfer.errors import InvalidArgumentError, KvxferError, PeerGoneError, ProtocolError, RefusedError
from kvxfer.protocol.directory import Directory
from kvxfer.protocol.liveness import LivenessLimits
from kvxfer.protocol.mirror import Mirror
from kvxfer.protocol.signed_metadata import Signer
from kvxfer.rpc import convert, link
from kvxfer.types import AgentRef, CompatibilityRecord, RegionRecord
from tests.fuzz.python_targets.samples import CHANGE, HELLO, INFO, MEMBER, POOL, RECORD, REF, REGIONS, Target, look_up


def text_of(data: bytes) -> str:
    """Those that read a text are given one."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise InvalidArgumentError("no text") from None


def region_record(data: bytes) -> object:
    found = RegionRecord.from_json(text_of(data))
    assert RegionRecord.from_json(found.to_json()) == found
    look_up([found])
    return found


def compatibility_record(data: bytes) -> object:
    found = CompatibilityRecord.from_json(text_of(data))
    assert CompatibilityRecord.from_json(found.to_json()) == found
    assert len(found.digest()) == 32
    return found


TOKEN = b"t" * 32
SIGNER = Signer(TOKEN)
DISCOVERY: Any = Discovery(
    TOKEN,
    INFO,
    types.SimpleNamespace(published=()),  # type: ignore[arg-type]
    types.SimpleNamespace(  # type: ignore[arg-type]
        peers=types.SimpleNamespace(find=lambda agent_id: None, discover=lambda member: None)
    ),
    types.SimpleNamespace(ref=AgentRef("b", REF.incarnation), admit=lambda admission: None),  # type: ignore[arg-type]
)


def agent_metadata(data: bytes) -> object:
    """Any bytes, signed by a holder of the token."""
    member = DISCOVERY.add_remote_agent(SIGNER.sign(data), "a", None)
    assert convert.read_member(convert.write_member(member, member.session_key)) == member
    return member


def signed_metadata(data: bytes) -> object:
    return DISCOVERY.add_remote_agent(data.decode("latin-1"), "a", None)


def message_of(kind: Any, data: bytes) -> Any:
    """gRPC's part of the reading."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ProtocolError("no message") from None


LIMITS = LivenessLimits(suspect_after_ns=10, dead_after_ns=20, gap_max_ns=5)


def agent_message(data: bytes) -> object:
    """As the coordinator reads it. What it takes over from one agent, every other one can read."""
    message = message_of(pb.AgentMessage, data)
    directory = Directory(LIMITS, 0, epoch=bytes(16))
    stream = directory.register(HELLO, fresh_number=None, now_ns=0).stream
    match message.WhichOneof("kind"):
        case "register":
            directory.register(convert.read_hello(message.register), fresh_number=7, now_ns=1)
        case "heartbeat":
            beat = message.heartbeat
            directory.heartbeat(stream, convert.read_load(beat.load), is_draining=beat.is_draining, now_ns=1)
        case "update_pools":
            directory.update_pools(stream, convert.read_pools(message.update_pools.pools), now_ns=1)
        case "deregister":
            directory.deregister(stream, now_ns=1)
    change = directory.change_since(None, with_load=True)
    for part in convert.write_change(change, next_within_ms=1, key_of=lambda _: bytes(32)):
        convert.read_change(pb.MembershipUpdate.FromString(part.SerializeToString()))
    return message


def coordinator_message(data: bytes) -> object:
    """As an agent reads it, which knows some members already."""
    message = message_of(pb.CoordinatorMessage, data)
    mirror = Mirror()
    mirror.apply(CHANGE)
    match message.WhichOneof("kind"):
        case "welcome":
            convert.read_leg_keys(message.welcome)
            return convert.read_ref(message.welcome.ref)
        case "membership":
            convert.read_leg_secret(message.membership)
            convert.read_leg_keys(message.membership)
            seen = mirror.apply(convert.read_change(message.membership), is_last=message.membership.is_last)
            if seen is not None:
                assert len({member.ref.agent_id for member in seen.members}) == len(seen.members)
    return message


STATUSES = list(grpc.StatusCode)


def grpc_status(data: bytes) -> object:
    """How a call to the coordinator ended: the number of a status, the code, a line break, the details."""
    code, has_code, details = data[1:].decode("utf-8", "replace").partition("\n")
    status = STATUSES[(data or b"\0")[0] % len(STATUSES)]
    error = link.error_from_status("coordinator", status, details, code if has_code else None)
    assert isinstance(error, KvxferError)
    assert str(error)
    return error


AGENT_MESSAGES = [
    pb.AgentMessage(register=convert.write_hello(HELLO)),
    pb.AgentMessage(
        register=convert.write_hello(dataclasses.replace(HELLO, info=dataclasses.replace(INFO, agent_id="b")))
    ),
    pb.AgentMessage(heartbeat=pb.Heartbeat(load=convert.write_load(MEMBER.load), is_draining=True)),
    pb.AgentMessage(update_pools=pb.UpdatePools(pools=convert.write_pools([POOL]))),
    pb.AgentMessage(deregister=pb.Deregister()),
]
[UPDATE] = convert.write_change(CHANGE, next_within_ms=10, key_of=lambda _: bytes(32))
COORDINATOR_MESSAGES = [
    pb.CoordinatorMessage(membership=UPDATE),
    pb.CoordinatorMessage(welcome=pb.Welcome(ref=convert.write_ref(REF), heartbeat_ms=1, dead_after_ms=5)),
    pb.CoordinatorMessage(drain=pb.DrainOrder(reason="why")),
]

TARGETS = {
    "region_record": Target(region_record, [r.to_json().encode() for r in REGIONS], (InvalidArgumentError,)),
    "compatibility_record": Target(compatibility_record, [RECORD.to_json().encode()], (InvalidArgumentError,)),
    "agent_metadata": Target(agent_metadata, [convert.write_member(MEMBER, b"").SerializeToString()], (PeerGoneError,)),
    "signed_metadata": Target(
        signed_metadata, [SIGNER.sign(convert.write_member(MEMBER, b"").SerializeToString()).encode()], (PeerGoneError,)
    ),
    "agent_message": Target(
        agent_message,
        [message.SerializeToString() for message in AGENT_MESSAGES],
        (ProtocolError, RefusedError),
    ),
    "coordinator_message": Target(
        coordinator_message,
        [message.SerializeToString() for message in COORDINATOR_MESSAGES],
        (ProtocolError,),
    ),
    "grpc_status": Target(grpc_status, [b"\2refused\nno", b"\7no"]),
}
