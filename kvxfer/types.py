"""The terms of kvxfer as values: frozen, comparable, without behaviour that decides anything."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import numbers
import re
from typing import Any

from kvxfer.errors import InvalidArgumentError

AGENT_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
STAGES = re.compile(r"(?:[0-9]{1,4}(?:,[0-9]{1,4}){1,31})?")
"""Of the layers at which pipeline stages end; empty for one stage."""


def check_agent_id(agent_id: str) -> str:
    """Return ``agent_id``.

    Raise InvalidArgumentError unless it is 1 to 64 of ``[A-Za-z0-9._-]``, starting with a letter or digit.
    """
    if not isinstance(agent_id, str) or AGENT_ID_PATTERN.fullmatch(agent_id) is None:
        raise InvalidArgumentError(
            f"agent id {_shown(agent_id)} must be 1 to 64 letters, digits, '.', '_' or '-', "
            "and start with a letter or digit"
        )
    return agent_id


def _shown(value: object) -> str:
    """For error texts: the beginning of a text, otherwise only the type, since a peer may nest a value without end."""
    return f"{value!r:.100}" if isinstance(value, str) else f"of type {type(value).__name__}"


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise InvalidArgumentError, naming the argument, unless ``value`` is of that kind. A bool is no number, and an
    int may be a float; numbers of other libraries count."""
    wanted = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)
    if not isinstance(value, wanted) or (wanted is not kind and isinstance(value, bool)):
        raise InvalidArgumentError(f"{name} must be of type {kind.__name__}, not {_shown(value)}")


def _check_fields(record: object) -> None:
    """Judge each field of a dataclass of this module by its annotation."""
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        kind = str(field.type).partition("[")[0]
        check_kind(field.name, getattr(record, field.name), _KINDS.get(kind) or globals()[kind])


_KINDS: dict[str, type] = {"int": int, "str": str, "bytes": bytes, "bool": bool, "tuple": tuple}


class Role(enum.StrEnum):
    """What a worker does for requests; ``BOTH`` takes either part."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def can_prefill(self) -> bool:
        return self is not Role.DECODE

    @property
    def can_decode(self) -> bool:
        return self is not Role.PREFILL


class Lane(enum.StrEnum):
    """A way to move bytes inside a session."""

    MAPPED = "mapped"
    CMA = "cma"
    UCX = "ucx"
    UNIX = "unix"
    """As ``stream``, over the Unix socket of an agent on the same host."""
    STREAM = "stream"
    MEMORY = "memory"


class ProgressMode(enum.StrEnum):
    """Which threads move an agent's bytes and answer its peers. docs/lanes.md compares the two."""

    THREAD = "thread"
    """The agent's IO thread, and in its place a thread that is just waiting."""
    CALLER = "caller"
    """The same, and in its place also a thread that is just posting or polling."""


class ChecksumMode(enum.StrEnum):
    """Which transfers carry CRC-32C checksums, computed by the source and verified by the destination."""

    OFF = "off"
    AUTO = "auto"
    """Transfers from another host, on lane ``stream``."""
    ON = "on"
    """Every transfer. A lane that has no checksums for the memory is not used."""
    SAMPLED = "sampled"
    """One transfer in 16, if its lane has checksums."""


class EncryptMode(enum.StrEnum):
    """Which TCP sessions of an agent are encrypted: lane ``stream``, and what is said about a ``ucx`` read. An agent
    never takes a session that is plain where its own mode wants it encrypted, whatever the peer asks for."""

    AUTO = "auto"
    """Those with other hosts. One with the same host is encrypted if its dialer insists."""
    ALWAYS = "always"
    """All; OpenSSL must be there."""
    NEVER = "never"
    """None. Beyond loopback this needs ``insecure``."""


class MemoryKind(enum.StrEnum):
    """Where memory is: the CPU can access ``HOST`` memory, only a device can access ``CUDA`` memory."""

    HOST = "host"
    CUDA = "cuda"


class Dialect(enum.StrEnum):
    """The form of a worker's requests and answers. A coordinator passes on other names too, from newer workers."""

    KVXFER = "kvxfer"
    VLLM = "vllm"
    SGLANG = "sglang"


class Exposure(enum.StrEnum):
    """What an authenticated reader of a pool could read: the whole pool, or only granted blocks."""

    POOL = "pool"
    GRANT = "grant"


@dataclasses.dataclass(frozen=True, order=True)
class Incarnation:
    """One incarnation of an agent.

    ``number`` comes from the coordinator and only grows; ``boot_nonce`` is 16 random bytes made at start.

    Compared for equality everywhere: a peer of another incarnation is another peer.
    """

    number: int
    boot_nonce: bytes

    def __post_init__(self) -> None:
        _check_fields(self)
        if not 0 <= self.number < 1 << 64:
            raise InvalidArgumentError(f"incarnation number {self.number} does not fit 64 bits")
        if len(self.boot_nonce) != 16:
            raise InvalidArgumentError(f"boot nonce must be 16 bytes, not {len(self.boot_nonce)}")

    def __str__(self) -> str:
        return f"{self.number}.{self.boot_nonce.hex()[:8]}"


@dataclasses.dataclass(frozen=True, order=True)
class AgentRef:
    """Exactly one incarnation of exactly one agent."""

    agent_id: str
    incarnation: Incarnation

    def __post_init__(self) -> None:
        _check_fields(self)

    def __hash__(self) -> int:
        """Of the name alone: a name has few incarnations, and a string keeps its hash."""
        return hash(self.agent_id)

    def __str__(self) -> str:
        return f"{self.agent_id}#{self.incarnation}"


@dataclasses.dataclass(frozen=True, order=True)
class TransferId:
    """128 random bits, minted for each attempt; names one source and one destination."""

    raw: bytes

    def __post_init__(self) -> None:
        check_kind("raw", self.raw, bytes)
        if len(self.raw) != 16:
            raise InvalidArgumentError(f"transfer id must be 16 bytes, not {len(self.raw)}")

    @classmethod
    def from_hex(cls, text: str) -> TransferId:
        """Parse 32 hex digits; raise InvalidArgumentError otherwise."""
        try:
            raw = bytes.fromhex(text)
        except (ValueError, TypeError):
            raise InvalidArgumentError(f"text of a transfer id must be 32 hex digits, not {_shown(text)}") from None
        return cls(raw)

    def __str__(self) -> str:
        return self.raw.hex()


class TransferState(enum.IntEnum):
    """The states of one pull; values equal the native core's. COMMITTED, FAILED and CANCELLED are final."""

    CONNECTING = 0
    WAITING = 1
    GRANTED = 2
    """Its grant exists, and it has no blocks yet."""
    READING = 3
    CONFIRMING = 4
    COMMITTED = 5
    FAILED = 6
    CANCELLED = 7

    @property
    def is_final(self) -> bool:
        return self >= TransferState.COMMITTED


class GrantState(enum.IntEnum):
    """The states of one grant; values equal the native core's. Everything but ALIVE is terminal."""

    ALIVE = 0
    RELEASED = 1
    EXPIRED = 2
    REVOKED = 3
    READER_GONE = 4


@dataclasses.dataclass(frozen=True)
class Segment:
    """Where one part of every block lies.

    Block ``b`` has ``length_bytes`` at ``offset_bytes + b * stride_bytes`` of the pool's region.
    """

    offset_bytes: int
    stride_bytes: int
    length_bytes: int

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.offset_bytes < 0 or self.length_bytes <= 0 or self.stride_bytes < self.length_bytes:
            raise InvalidArgumentError(f"segment {self} needs offset >= 0, length > 0 and stride >= length")


UNKNOWN = "unknown:"
"""The prefix of a fingerprint of unknown weights."""
UNKNOWN_NONCE_BYTES = 16


def unknown_fingerprint(why: str, nonce: bytes) -> str:
    """The fingerprint of unknown weights. It equals no other, nor the same owner's next one: ``nonce`` is 16 random
    bytes. Raises InvalidArgumentError for another number of them."""
    if len(nonce) != UNKNOWN_NONCE_BYTES:
        raise InvalidArgumentError(
            f"an unknown fingerprint has a nonce of {UNKNOWN_NONCE_BYTES} bytes, not {len(nonce)}"
        )
    return f"{UNKNOWN}{nonce.hex()}:{why}"


def why_unknown(fingerprint: str) -> str | None:
    """Why that fingerprint is not known; ``None`` for one that is."""
    if not fingerprint.startswith(UNKNOWN):
        return None
    return fingerprint.removeprefix(UNKNOWN).partition(":")[2] or "no reason was given"


@dataclasses.dataclass(frozen=True)
class CompatibilityRecord:
    """What two pools must have in common before a byte moves between them.

    Every field but ``facts`` is compared; a mismatch is refused by the name of the first field that differs, in the
    order below. Weights that are not known (:func:`unknown_fingerprint`) match nothing: ask :meth:`matches`, not
    ``==``.
    """

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
    tp_rank: int = 0
    tp_size: int = 1
    groups: str = ""
    """Which layers share a block table, and what each table keeps; empty: all share one that keeps every token."""
    facts: str = dataclasses.field(default="", compare=False)
    """What ``config_fingerprint`` is a digest of, as a short text that names a difference: it is not compared itself
    (:mod:`kvxfer.protocol.facts`)."""

    def __post_init__(self) -> None:
        _check_fields(self)

    @classmethod
    def opaque(cls, format_name: str) -> CompatibilityRecord:
        """A record for blocks of an unknown format: pools of the same ``format_name`` match if their blocks have equal
        sizes."""
        check_kind("format_name", format_name, str)
        return cls(format_name, "", "", "uint8", 1, 1, 1, 1, axes="bytes", packing="", rope="", attention_backend="")

    @property
    def has_known_weights(self) -> bool:
        """Whether the weights behind the blocks are known."""
        return why_unknown(self.weights_fingerprint) is None

    def matches(self, other: CompatibilityRecord) -> bool:
        """Whether blocks of one mean the same in the other: all is equal, and known."""
        return self == other and self.has_known_weights

    def to_json(self) -> str:
        """Canonical JSON: the same record gives the same text everywhere."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> CompatibilityRecord:
        """Parse what :meth:`to_json` wrote; raise InvalidArgumentError for anything else."""
        try:
            values: Any = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidArgumentError(f"text of a compatibility record is not JSON: {error}") from None
        types = {field.name: (int if field.type == "int" else str) for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(values) | {"facts"} != set(types):
            raise InvalidArgumentError(f"compatibility record must have exactly the fields {sorted(types)}")
        values.setdefault("facts", "")  # agents of earlier versions say none
        for name, kind in types.items():
            if type(values[name]) is not kind:
                raise InvalidArgumentError(f"compatibility record field {name!r} must be {kind.__name__}")
        return cls(**values)

    def digest(self) -> bytes:
        """SHA-256 of :meth:`to_json` without ``facts``: 32 bytes that the native cores compare in the PULL frame."""
        values = dataclasses.asdict(self)
        del values["facts"]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).digest()


@dataclasses.dataclass(frozen=True)
class PoolRecord:
    """A pool as other agents see it."""

    pool_id: int
    record: CompatibilityRecord
    block_count: int
    block_bytes: int
    exposure: Exposure
    is_shareable: bool
    """Whether the pool's memory was allocated by kvxfer, so that ``mapped`` can reach it."""
    memory: MemoryKind = MemoryKind.HOST

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclasses.dataclass(frozen=True)
class RegionRecord:
    """A registered region as other agents see it: an open-ended grant (``can_read``) and offer (``can_write``) of every
    byte of it. ``region_id`` is never used again in one incarnation of an agent, so that a stale record meets a
    refusal."""

    region_id: int
    address: int
    """Its address in its owner's process. ``device`` is a number among the devices of its ``memory`` kind."""
    length_bytes: int
    memory: MemoryKind = MemoryKind.HOST
    device: int = 0
    can_read: bool = True
    can_write: bool = True
    is_shareable: bool = False
    """Whether it was allocated by kvxfer, so that ``mapped`` can reach it."""
    exposure: Exposure = Exposure.POOL

    def __post_init__(self) -> None:
        _check_fields(self)
        if not 0 <= self.region_id < 1 << 32:
            raise InvalidArgumentError(f"region id {self.region_id} does not fit 32 bits")
        if not 0 <= self.device < 1 << 64:
            raise InvalidArgumentError(f"device {self.device} does not fit 64 bits")
        if not (0 < self.address < 1 << 64 and 0 < self.length_bytes <= (1 << 64) - self.address):
            raise InvalidArgumentError(f"{self.length_bytes} bytes at {self.address:#x} are no memory")

    def to_json(self) -> str:
        """JSON that :meth:`from_json` reads. The application transports it to a peer."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RegionRecord:
        """Parse what :meth:`to_json` wrote; raise InvalidArgumentError for anything else."""
        try:
            values: Any = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidArgumentError(f"text of a region record is not JSON: {error}") from None
        kinds = {field.name: _RECORD_KINDS.get(str(field.type), str) for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(values) != set(kinds):
            raise InvalidArgumentError(f"region record must have exactly the fields {sorted(kinds)}")
        for name, kind in kinds.items():
            if type(values[name]) is not kind:
                raise InvalidArgumentError(f"region record field {name!r} must be {kind.__name__}")
        try:
            values["memory"], values["exposure"] = MemoryKind(values["memory"]), Exposure(values["exposure"])
        except ValueError as error:
            raise InvalidArgumentError(f"region record: {error}") from None
        return cls(**values)


_RECORD_KINDS: dict[str, type] = {"int": int, "bool": bool}


@dataclasses.dataclass(frozen=True)
class DataAddress:
    """Where an agent's native core listens. ``host_id`` tells whether two agents may share a kernel (boot id)."""

    tcp_host: str
    tcp_port: int
    unix_path: str
    host_id: str
    lanes: tuple[Lane, ...] = ()
    """The lanes that its operator allows and that it could load; empty if it does not say."""

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclasses.dataclass(frozen=True)
class Load:
    """A worker's load, as each heartbeat reports it; counts, not percentages."""

    queued_requests: int = 0
    running_requests: int = 0
    queued_prefill_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """What a worker registers with the coordinator, beside its pools."""

    agent_id: str
    role: Role
    model: str
    http_url: str
    """Base URL of the worker's HTTP server, or empty for an agent without one."""
    max_context_tokens: int = 0
    block_tokens: int = 0
    dialect: str = Dialect.KVXFER
    stages: str = ""
    """At which layers the pipeline stages of its engine end, as ``16,32`` for two of 16 layers; empty: there is one.
    Matches STAGES."""

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def stage_count(self) -> int:
        return self.stages.count(",") + 1


@dataclasses.dataclass(frozen=True)
class Member:
    """A registered agent as the coordinator publishes it.

    ``session_key`` (32 bytes) proves sessions between the receiver of this record and the member;
    it is empty for watchers, which open no sessions.
    """

    ref: AgentRef
    info: WorkerInfo
    address: DataAddress
    pools: tuple[PoolRecord, ...] = ()
    load: Load = Load()
    is_suspect: bool = False
    """Missed heartbeats: still a member, but gets no new work."""
    is_draining: bool = False
    session_key: bytes = dataclasses.field(default=b"", repr=False)

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclasses.dataclass(frozen=True)
class Membership:
    """A whole, revisioned view; ``gone`` names the incarnations that ended since the revision the receiver last saw."""

    revision: int
    members: tuple[Member, ...] = ()
    gone: tuple[AgentRef, ...] = ()
