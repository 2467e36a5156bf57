"""Between the wire's messages and the values of ``kvxfer.types``: the one place where bytes from a peer become trusted.
Must never know their sender or what they are for.

Every ``read_*`` is total: a value, or ProtocolError that names the field. Every bound of a list or a string
stands here by name. ``write_*`` takes our own values; InvalidArgumentError if one of them would be refused at the other
end.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeVar

from kvxfer._pb import control_pb2 as pb
from kvxfer.errors import InvalidArgumentError, ProtocolError
from kvxfer.protocol.directory import Change, Hello
from kvxfer.protocol.facts import FACTS_BYTES_MAX
from kvxfer.protocol.http_url import HttpUrl, address_of
from kvxfer.protocol.pace import ToldPace
from kvxfer.types import (
    STAGES,
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
    check_agent_id,
)

PROTOCOL_VERSION = 1
POOLS_MAX = 64
TEXT_BYTES_MAX = 1024
LANES_MAX = 32
LEG_KEYS_MAX = 8
COUNT_MAX = (1 << 53) - 1
NUMBER_MAX = (1 << 63) - 1
DURATION_MAX_MS = 3_600_000
NAMES_MAX = 16384
"""Agents that one agent is told of by name."""
ASK_NAMES_MAX = 256
"""Agents that one message asks for."""
PART_MEMBERS_MAX = 32
"""Members in one part of a membership update."""
MESSAGE_BYTES_MAX = 32 << 20
"""No message is larger: PART_MEMBERS_MAX members of POOLS_MAX pools with all texts at their bound stay below."""

_UNPRINTABLE = frozenset({"Cc", "Zl", "Zp"})
"""Control characters and the ends of lines and paragraphs: texts stand in logs and in messages."""
UNIX_PATH_BYTES_MAX = 107
"""The kernel's own bound."""
_ROLES = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE, Role.BOTH: pb.ROLE_BOTH}
_EXPOSURES = {Exposure.POOL: pb.EXPOSURE_POOL, Exposure.GRANT: pb.EXPOSURE_GRANT}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}
_MEMORIES = {MemoryKind.HOST: pb.MEMORY_KIND_HOST, MemoryKind.CUDA: pb.MEMORY_KIND_CUDA}
_MEMORIES_BACK = {number: kind for kind, number in _MEMORIES.items()}
_LANES = {lane.value: lane for lane in Lane}
_EXPOSURES_BACK = {number: exposure for exposure, number in _EXPOSURES.items()}
_RECORD_FIELDS = tuple(field.name for field in dataclasses.fields(CompatibilityRecord))
_LOAD_FIELDS = tuple(field.name for field in dataclasses.fields(Load))

Value = TypeVar("Value")
Message = TypeVar("Message")


def _count(name: str, value: int, *, minimum: int = 0, maximum: int = COUNT_MAX) -> int:
    if not minimum <= value <= maximum:
        raise ProtocolError(f"{name} must be {minimum} to {maximum}, not {value}")
    return value


def _text(name: str, value: str) -> str:
    if len(value.encode()) > (FACTS_BYTES_MAX if name == "record.facts" else TEXT_BYTES_MAX):
        bound = f"FACTS_BYTES_MAX={FACTS_BYTES_MAX}" if name == "record.facts" else f"TEXT_BYTES_MAX={TEXT_BYTES_MAX}"
        raise ProtocolError(f"{name} exceeds {bound} bytes")
    if value.isascii() and value.isprintable():  # nearly all texts
        return value
    if any(unicodedata.category(character) in _UNPRINTABLE for character in value):
        raise ProtocolError(f"{name} has control characters")
    return value


def _raw(name: str, value: bytes, *lengths: int) -> bytes:
    if len(value) not in lengths:
        raise ProtocolError(f"{name} must be {' or '.join(map(str, lengths))} bytes, not {len(value)}")
    return value


def _required(name: str, holder: pb.Member | pb.AgentRef | pb.PoolRecord | pb.Register, field: str) -> None:
    if not holder.HasField(field):
        raise ProtocolError(f"{name} lacks {field}")


def read_agent_id(value: str) -> str:
    try:
        return check_agent_id(value)
    except InvalidArgumentError as error:
        raise ProtocolError(str(error)) from None


def read_incarnation(message: pb.Incarnation) -> Incarnation:
    """Any number from 0 up; 0 stands for *none yet* where the caller allows it."""
    return Incarnation(
        _count("incarnation.number", message.number, maximum=NUMBER_MAX),
        _raw("incarnation.boot_nonce", message.boot_nonce, 16),
    )


def write_incarnation(value: Incarnation) -> pb.Incarnation:
    return pb.Incarnation(number=value.number, boot_nonce=value.boot_nonce)


def read_ref(message: pb.AgentRef) -> AgentRef:
    _required("agent ref", message, "incarnation")
    _count("incarnation.number", message.incarnation.number, minimum=1, maximum=NUMBER_MAX)
    return AgentRef(read_agent_id(message.agent_id), read_incarnation(message.incarnation))


def write_ref(value: AgentRef) -> pb.AgentRef:
    return pb.AgentRef(agent_id=value.agent_id, incarnation=write_incarnation(value.incarnation))


def read_record(message: pb.CompatibilityRecord) -> CompatibilityRecord:
    values: dict[str, str | int] = {}
    for name in _RECORD_FIELDS:
        value = getattr(message, name)
        values[name] = _text(f"record.{name}", value) if isinstance(value, str) else _count(f"record.{name}", value)
    return CompatibilityRecord(**values)  # type: ignore[arg-type]


def write_record(value: CompatibilityRecord) -> pb.CompatibilityRecord:
    return pb.CompatibilityRecord(**{name: getattr(value, name) for name in _RECORD_FIELDS})


def read_pool(message: pb.PoolRecord) -> PoolRecord:
    _required("pool", message, "record")
    exposure = _EXPOSURES_BACK.get(message.exposure)
    if exposure is None:
        raise ProtocolError(f"pool.exposure {message.exposure} is unknown")
    memory = _MEMORIES_BACK.get(message.memory)
    if memory is None:
        raise ProtocolError(f"pool.memory {message.memory} is unknown")
    return PoolRecord(
        message.pool_id,
        read_record(message.record),
        _count("pool.block_count", message.block_count, minimum=1),
        _count("pool.block_bytes", message.block_bytes, minimum=1),
        exposure,
        message.is_shareable,
        memory,
    )


def write_pool(value: PoolRecord) -> pb.PoolRecord:
    return pb.PoolRecord(
        pool_id=value.pool_id,
        record=write_record(value.record),
        block_count=value.block_count,
        block_bytes=value.block_bytes,
        exposure=_EXPOSURES[value.exposure],
        is_shareable=value.is_shareable,
        memory=_MEMORIES[value.memory],
    )


def read_pools(messages: Iterable[pb.PoolRecord]) -> tuple[PoolRecord, ...]:
    """At most POOLS_MAX pools with distinct ids."""
    found = list(messages)
    if len(found) > POOLS_MAX:
        raise ProtocolError(f"an agent may have at most POOLS_MAX={POOLS_MAX} pools, not {len(found)}")
    pools = tuple(map(read_pool, found))
    if len({pool.pool_id for pool in pools}) != len(pools):
        raise ProtocolError("pool ids of one agent must differ")
    return pools


def write_pools(values: Iterable[PoolRecord]) -> list[pb.PoolRecord]:
    return _checked(lambda: [write_pool(value) for value in values], read_pools)


def read_address(message: pb.DataAddress) -> DataAddress:
    return DataAddress(
        _text("address.tcp_host", message.tcp_host),
        _count("address.tcp_port", message.tcp_port, maximum=65535),
        _text("address.unix_path", message.unix_path),
        _text("address.host_id", message.host_id),
        _lanes(message.lanes),
    )


def _lanes(names: Iterable[str]) -> tuple[Lane, ...]:
    """A lane of a later version is none that we could use."""
    found = list(names)
    if len(found) > LANES_MAX:
        raise ProtocolError(f"address.lanes names more than LANES_MAX={LANES_MAX}")
    return tuple(dict.fromkeys(_LANES[name] for name in found if name in _LANES))


def write_address(value: DataAddress) -> pb.DataAddress:
    return pb.DataAddress(
        tcp_host=value.tcp_host,
        tcp_port=value.tcp_port,
        unix_path=value.unix_path,
        host_id=value.host_id,
        lanes=[lane.value for lane in value.lanes],
    )


def read_load(message: pb.Load) -> Load:
    load = Load(
        message.queued_requests,
        message.running_requests,
        message.queued_prefill_tokens,
        message.free_blocks,
        message.total_blocks,
    )
    for name in _LOAD_FIELDS:
        _count(f"load.{name}", getattr(load, name))
    return load


def write_load(value: Load) -> pb.Load:
    """A load beyond the wire's bounds is clipped: a wrong count must not end an agent's session."""
    return pb.Load(**{name: min(max(int(getattr(value, name)), 0), COUNT_MAX) for name in _LOAD_FIELDS})


def read_info(message: pb.WorkerInfo) -> WorkerInfo:
    role = _ROLES_BACK.get(message.role)
    if role is None:
        raise ProtocolError(f"info.role {message.role} is unknown")
    return WorkerInfo(
        read_agent_id(message.agent_id),
        role,
        _text("info.model", message.model),
        _text("info.http_url", message.http_url),
        _count("info.max_context_tokens", message.max_context_tokens),
        message.block_tokens,
        _text("info.dialect", message.dialect),
        _stages(message.stages),
    )


def _stages(text: str) -> str:
    if not STAGES.fullmatch(text):
        raise ProtocolError("info.stages must say at which layers the pipeline stages end, as '16,32'")
    return text


def write_info(value: WorkerInfo) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        agent_id=value.agent_id,
        role=_ROLES[value.role],
        model=value.model,
        http_url=value.http_url,
        max_context_tokens=value.max_context_tokens,
        block_tokens=value.block_tokens,
        dialect=value.dialect,
        stages=value.stages,
    )


def read_member(message: pb.Member) -> Member:
    _required("member", message, "ref")
    _required("member", message, "info")
    member = Member(
        read_ref(message.ref),
        read_info(message.info),
        read_address(message.address),
        read_pools(message.pools),
        read_load(message.load),
        message.is_suspect,
        message.is_draining,
        _raw("member.session_key", message.session_key, 0, 32),
    )
    if member.ref.agent_id != member.info.agent_id:
        raise ProtocolError(f"member {member.ref} has the info of {member.info.agent_id!r}")
    return member


def write_member(value: Member, session_key: bytes) -> pb.Member:
    return pb.Member(
        ref=write_ref(value.ref),
        info=write_info(value.info),
        address=write_address(value.address),
        pools=[write_pool(pool) for pool in value.pools],
        load=write_load(value.load),
        is_suspect=value.is_suspect,
        is_draining=value.is_draining,
        session_key=session_key,
    )


def read_hello(message: pb.Register) -> Hello:
    """What an agent registers, still unjudged."""
    if message.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"protocol_version {message.protocol_version} is not {PROTOCOL_VERSION}, the only one spoken here"
        )
    for field in ("info", "address", "incarnation"):
        _required("register", message, field)
    incarnation = read_incarnation(message.incarnation)
    info, address = read_info(message.info), read_address(message.address)
    _check_places(info, address)
    return Hello(
        info,
        address,
        incarnation.boot_nonce,
        incarnation.number,
        read_pools(message.pools),
        read_load(message.load),
        message.is_draining,
        _count("sessions", message.sessions),
        read_names(message.known),
        _count("return_within_ms", message.return_within_ms, maximum=DURATION_MAX_MS),
    )


def read_names(values: Collection[str]) -> tuple[str, ...]:
    """At most NAMES_MAX agent ids."""
    _check_length("NAMES_MAX", NAMES_MAX, len(values))
    return tuple(map(read_agent_id, values))


def read_ask(message: pb.Ask) -> tuple[str, ...]:
    """At most ASK_NAMES_MAX agent ids."""
    _check_length("ASK_NAMES_MAX", ASK_NAMES_MAX, len(message.agent_ids))
    return tuple(map(read_agent_id, message.agent_ids))


def read_acquaintances(message: pb.AcquaintRequest) -> dict[str, tuple[str, ...]]:
    """Those that named each agent: at most NAMES_MAX agent ids in all."""
    _check_length("NAMES_MAX", NAMES_MAX, sum(1 + len(each.others) for each in message.acquaintances))
    return {read_agent_id(each.agent_id): read_names(each.others) for each in message.acquaintances}


def write_acquaintances(value: Mapping[str, Iterable[str]]) -> pb.AcquaintRequest:
    return pb.AcquaintRequest(
        acquaintances=[pb.Acquaintance(agent_id=agent_id, others=others) for agent_id, others in value.items()]
    )


def _check_length(name: str, bound: int, found: int) -> None:
    if found > bound:
        raise ProtocolError(f"at most {name}={bound} agents may be named at once, not {found}")


def _check_places(info: WorkerInfo, address: DataAddress) -> None:
    """Others dial these: each is of its kind, or empty."""
    try:
        if info.http_url:
            HttpUrl.parse("info.http_url", info.http_url)
    except InvalidArgumentError as error:
        raise ProtocolError(str(error)) from None
    host = address_of(address.tcp_host)
    if address.tcp_host and (host is None or host.is_unspecified or host.is_multicast):
        raise ProtocolError(f"address.tcp_host must be an IP address that can be dialled, not {address.tcp_host!r}")
    path = address.unix_path
    if path and not (path.startswith("/") and len(path.encode()) <= UNIX_PATH_BYTES_MAX):
        raise ProtocolError(f"address.unix_path must be absolute and at most {UNIX_PATH_BYTES_MAX} bytes")


def write_hello(value: Hello) -> pb.Register:
    """Raises InvalidArgumentError if the coordinator would call it a violation."""

    def build() -> pb.Register:
        return pb.Register(
            protocol_version=PROTOCOL_VERSION,
            info=write_info(value.info),
            address=write_address(value.address),
            pools=[write_pool(pool) for pool in value.pools],
            load=write_load(value.load),
            is_draining=value.is_draining,
            incarnation=pb.Incarnation(number=value.number, boot_nonce=value.boot_nonce),
            sessions=value.sessions,
            known=value.known,
            return_within_ms=value.return_within_ms,
        )

    return _checked(build, read_hello)


def read_change(message: pb.MembershipUpdate) -> Change:
    """One part of an update; ``message.is_last`` says whether it is the last."""
    return Change(
        _raw("update.epoch", message.epoch, 16),
        _count("update.revision", message.revision),
        message.is_whole,
        message.is_settled,
        tuple(map(read_member, message.members)),
        tuple(map(read_ref, message.gone)),
    )


def read_leg_secret(message: pb.MembershipUpdate) -> bytes:
    """Empty: it is what it was, or there is none."""
    return _raw("update.leg_secret", message.leg_secret, 0, 32)


def read_leg_keys(message: pb.Welcome | pb.MembershipUpdate) -> tuple[bytes, ...]:
    """Empty: they are what they were, or there are none."""
    if len(message.leg_keys) > LEG_KEYS_MAX:
        raise ProtocolError(f"more than LEG_KEYS_MAX={LEG_KEYS_MAX} leg keys")
    return tuple(_raw("leg_keys", key, 32) for key in message.leg_keys)


def _differ_in_load(before: Member, after: Member) -> bool:
    """Whether two members are the same but for the load, as is seen at once: most changes are of that kind."""
    return (
        before.info is after.info
        and before.address is after.address
        and before.pools is after.pools
        and (before.ref, before.is_suspect, before.is_draining) == (after.ref, after.is_suspect, after.is_draining)
    )


class MemberMessages:
    """The newest message of each member, which many receivers are sent."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[Member, pb.Member]] = {}

    def of(self, member: Member) -> pb.Member:
        """Without a session key, and not to be changed."""
        agent_id = member.ref.agent_id
        before, message = self._newest.get(agent_id, (None, None))
        if before is member and message is not None:
            return message
        if before is not None and message is not None and _differ_in_load(before, member):
            message.load.CopyFrom(write_load(member.load))
        else:
            message = write_member(member, b"")
        self._newest[agent_id] = (member, message)
        return message

    def forget(self, agent_id: str) -> None:
        self._newest.pop(agent_id, None)


def write_change(
    change: Change,
    *,
    next_within_ms: int,
    key_of: Callable[[AgentRef], bytes] | None,
    messages: MemberMessages | None = None,
) -> Iterator[pb.MembershipUpdate]:
    """The update in parts of at most PART_MEMBERS_MAX members; ``key_of`` gives the receiver's session key with a
    member, if it has one. ``messages`` saves the work that was done for other receivers.
    """
    messages = messages or MemberMessages()
    for start in range(0, len(change.members) or 1, PART_MEMBERS_MAX):
        is_last = start + PART_MEMBERS_MAX >= len(change.members)
        update = pb.MembershipUpdate(
            epoch=change.epoch,
            revision=change.revision,
            is_whole=change.is_whole,
            is_settled=change.is_settled,
            is_last=is_last,
            gone=map(write_ref, change.gone) if is_last else (),
            next_within_ms=next_within_ms,
        )
        for member in change.members[start : start + PART_MEMBERS_MAX]:
            message = update.members.add()
            message.CopyFrom(messages.of(member))
            if key_of is not None:
                message.session_key = key_of(member.ref)
        yield update


def read_pace(message: pb.AgentPace | pb.Welcome) -> ToldPace:
    """What an agent is told of its heartbeats."""
    return ToldPace(
        _count("pace.heartbeat_ms", message.heartbeat_ms, minimum=1, maximum=DURATION_MAX_MS),
        _count("pace.dead_after_ms", message.dead_after_ms, minimum=1, maximum=DURATION_MAX_MS),
        _count("pace.return_within_ms", message.return_within_ms, maximum=DURATION_MAX_MS),
    )


def write_pace(value: ToldPace) -> pb.AgentPace:
    return pb.AgentPace(
        heartbeat_ms=value.heartbeat_ms,
        dead_after_ms=value.dead_after_ms,
        return_within_ms=value.return_within_ms,
    )


def _checked(build: Callable[[], Message], read: Callable[[Message], Value]) -> Message:
    try:
        message = build()
        read(message)
    except (ProtocolError, ValueError, TypeError, KeyError) as error:
        raise InvalidArgumentError(f"cannot be registered: {error}") from None
    return message
