from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_BOTH: _ClassVar[Role]

class Exposure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPOSURE_UNSPECIFIED: _ClassVar[Exposure]
    EXPOSURE_POOL: _ClassVar[Exposure]
    EXPOSURE_GRANT: _ClassVar[Exposure]

class MemoryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_KIND_HOST: _ClassVar[MemoryKind]
    MEMORY_KIND_CUDA: _ClassVar[MemoryKind]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_BOTH: Role
EXPOSURE_UNSPECIFIED: Exposure
EXPOSURE_POOL: Exposure
EXPOSURE_GRANT: Exposure
MEMORY_KIND_HOST: MemoryKind
MEMORY_KIND_CUDA: MemoryKind

class Incarnation(_message.Message):
    __slots__ = ("number", "boot_nonce")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BOOT_NONCE_FIELD_NUMBER: _ClassVar[int]
    number: int
    boot_nonce: bytes
    def __init__(self, number: _Optional[int] = ..., boot_nonce: _Optional[bytes] = ...) -> None: ...

class AgentRef(_message.Message):
    __slots__ = ("agent_id", "incarnation")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    incarnation: Incarnation
    def __init__(self, agent_id: _Optional[str] = ..., incarnation: _Optional[_Union[Incarnation, _Mapping]] = ...) -> None: ...

class CompatibilityRecord(_message.Message):
    __slots__ = ("model", "config_fingerprint", "weights_fingerprint", "dtype", "layers", "kv_heads", "head_dim", "block_tokens", "axes", "packing", "rope", "attention_backend", "tp_rank", "tp_size", "groups", "facts")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    config_fingerprint: str
    weights_fingerprint: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    axes: str
    packing: str
    rope: str
    attention_backend: str
    tp_rank: int
    tp_size: int
    groups: str
    facts: str
    def __init__(self, model: _Optional[str] = ..., config_fingerprint: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_tokens: _Optional[int] = ..., axes: _Optional[str] = ..., packing: _Optional[str] = ..., rope: _Optional[str] = ..., attention_backend: _Optional[str] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., groups: _Optional[str] = ..., facts: _Optional[str] = ...) -> None: ...

class PoolRecord(_message.Message):
    __slots__ = ("pool_id", "record", "block_count", "block_bytes", "exposure", "is_shareable", "memory")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPOSURE_FIELD_NUMBER: _ClassVar[int]
    IS_SHAREABLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    pool_id: int
    record: CompatibilityRecord
    block_count: int
    block_bytes: int
    exposure: Exposure
    is_shareable: bool
    memory: MemoryKind
    def __init__(self, pool_id: _Optional[int] = ..., record: _Optional[_Union[CompatibilityRecord, _Mapping]] = ..., block_count: _Optional[int] = ..., block_bytes: _Optional[int] = ..., exposure: _Optional[_Union[Exposure, str]] = ..., is_shareable: bool = ..., memory: _Optional[_Union[MemoryKind, str]] = ...) -> None: ...

class DataAddress(_message.Message):
    __slots__ = ("tcp_host", "tcp_port", "unix_path", "host_id", "lanes")
    TCP_HOST_FIELD_NUMBER: _ClassVar[int]
    TCP_PORT_FIELD_NUMBER: _ClassVar[int]
    UNIX_PATH_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    tcp_host: str
    tcp_port: int
    unix_path: str
    host_id: str
    lanes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tcp_host: _Optional[str] = ..., tcp_port: _Optional[int] = ..., unix_path: _Optional[str] = ..., host_id: _Optional[str] = ..., lanes: _Optional[_Iterable[str]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("queued_requests", "running_requests", "queued_prefill_tokens", "free_blocks", "total_blocks")
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    queued_requests: int
    running_requests: int
    queued_prefill_tokens: int
    free_blocks: int
    total_blocks: int
    def __init__(self, queued_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("agent_id", "role", "model", "http_url", "max_context_tokens", "block_tokens", "dialect", "stages")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIALECT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    role: Role
    model: str
    http_url: str
    max_context_tokens: int
    block_tokens: int
    dialect: str
    stages: str
    def __init__(self, agent_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., model: _Optional[str] = ..., http_url: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., dialect: _Optional[str] = ..., stages: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("ref", "info", "address", "pools", "load", "is_suspect", "is_draining", "session_key")
    REF_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    IS_SUSPECT_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    ref: AgentRef
    info: WorkerInfo
    address: DataAddress
    pools: _containers.RepeatedCompositeFieldContainer[PoolRecord]
    load: Load
    is_suspect: bool
    is_draining: bool
    session_key: bytes
    def __init__(self, ref: _Optional[_Union[AgentRef, _Mapping]] = ..., info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., address: _Optional[_Union[DataAddress, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolRecord, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., is_suspect: bool = ..., is_draining: bool = ..., session_key: _Optional[bytes] = ...) -> None: ...

class MembershipUpdate(_message.Message):
    __slots__ = ("epoch", "revision", "is_whole", "is_last", "is_settled", "members", "gone", "next_within_ms", "leg_secret", "leg_keys", "pace")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    IS_SETTLED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    NEXT_WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    LEG_SECRET_FIELD_NUMBER: _ClassVar[int]
    LEG_KEYS_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    revision: int
    is_whole: bool
    is_last: bool
    is_settled: bool
    members: _containers.RepeatedCompositeFieldContainer[Member]
    gone: _containers.RepeatedCompositeFieldContainer[AgentRef]
    next_within_ms: int
    leg_secret: bytes
    leg_keys: _containers.RepeatedScalarFieldContainer[bytes]
    pace: AgentPace
    def __init__(self, epoch: _Optional[bytes] = ..., revision: _Optional[int] = ..., is_whole: bool = ..., is_last: bool = ..., is_settled: bool = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., gone: _Optional[_Iterable[_Union[AgentRef, _Mapping]]] = ..., next_within_ms: _Optional[int] = ..., leg_secret: _Optional[bytes] = ..., leg_keys: _Optional[_Iterable[bytes]] = ..., pace: _Optional[_Union[AgentPace, _Mapping]] = ...) -> None: ...

class AgentPace(_message.Message):
    __slots__ = ("heartbeat_ms", "dead_after_ms", "return_within_ms")
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    DEAD_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    RETURN_WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_ms: int
    dead_after_ms: int
    return_within_ms: int
    def __init__(self, heartbeat_ms: _Optional[int] = ..., dead_after_ms: _Optional[int] = ..., return_within_ms: _Optional[int] = ...) -> None: ...

class AgentMessage(_message.Message):
    __slots__ = ("register", "heartbeat", "update_pools", "deregister", "ask")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_POOLS_FIELD_NUMBER: _ClassVar[int]
    DEREGISTER_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    register: Register
    heartbeat: Heartbeat
    update_pools: UpdatePools
    deregister: Deregister
    ask: Ask
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., update_pools: _Optional[_Union[UpdatePools, _Mapping]] = ..., deregister: _Optional[_Union[Deregister, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("protocol_version", "info", "address", "pools", "incarnation", "load", "is_draining", "sessions", "known", "return_within_ms")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    RETURN_WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    info: WorkerInfo
    address: DataAddress
    pools: _containers.RepeatedCompositeFieldContainer[PoolRecord]
    incarnation: Incarnation
    load: Load
    is_draining: bool
    sessions: int
    known: _containers.RepeatedScalarFieldContainer[str]
    return_within_ms: int
    def __init__(self, protocol_version: _Optional[int] = ..., info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., address: _Optional[_Union[DataAddress, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolRecord, _Mapping]]] = ..., incarnation: _Optional[_Union[Incarnation, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., is_draining: bool = ..., sessions: _Optional[int] = ..., known: _Optional[_Iterable[str]] = ..., return_within_ms: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("load", "is_draining", "next_within_ms")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NEXT_WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    load: Load
    is_draining: bool
    next_within_ms: int
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., is_draining: bool = ..., next_within_ms: _Optional[int] = ...) -> None: ...

class UpdatePools(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolRecord]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolRecord, _Mapping]]] = ...) -> None: ...

class Deregister(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ask(_message.Message):
    __slots__ = ("agent_ids",)
    AGENT_IDS_FIELD_NUMBER: _ClassVar[int]
    agent_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, agent_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "membership", "drain", "stopping")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    membership: MembershipUpdate
    drain: DrainOrder
    stopping: Stopping
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., membership: _Optional[_Union[MembershipUpdate, _Mapping]] = ..., drain: _Optional[_Union[DrainOrder, _Mapping]] = ..., stopping: _Optional[_Union[Stopping, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("ref", "heartbeat_ms", "dead_after_ms", "leg_keys", "return_within_ms")
    REF_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    DEAD_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    LEG_KEYS_FIELD_NUMBER: _ClassVar[int]
    RETURN_WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    ref: AgentRef
    heartbeat_ms: int
    dead_after_ms: int
    leg_keys: _containers.RepeatedScalarFieldContainer[bytes]
    return_within_ms: int
    def __init__(self, ref: _Optional[_Union[AgentRef, _Mapping]] = ..., heartbeat_ms: _Optional[int] = ..., dead_after_ms: _Optional[int] = ..., leg_keys: _Optional[_Iterable[bytes]] = ..., return_within_ms: _Optional[int] = ...) -> None: ...

class DrainOrder(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Stopping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("agent_id", "reason")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    reason: str
    def __init__(self, agent_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AcquaintRequest(_message.Message):
    __slots__ = ("acquaintances",)
    ACQUAINTANCES_FIELD_NUMBER: _ClassVar[int]
    acquaintances: _containers.RepeatedCompositeFieldContainer[Acquaintance]
    def __init__(self, acquaintances: _Optional[_Iterable[_Union[Acquaintance, _Mapping]]] = ...) -> None: ...

class Acquaintance(_message.Message):
    __slots__ = ("agent_id", "others")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    others: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, agent_id: _Optional[str] = ..., others: _Optional[_Iterable[str]] = ...) -> None: ...

class AcquaintResponse(_message.Message):
    __slots__ = ("absent",)
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    absent: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, absent: _Optional[_Iterable[str]] = ...) -> None: ...

class StoredMember(_message.Message):
    __slots__ = ("owner", "sessions", "member")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    owner: str
    sessions: int
    member: Member
    def __init__(self, owner: _Optional[str] = ..., sessions: _Optional[int] = ..., member: _Optional[_Union[Member, _Mapping]] = ...) -> None: ...
