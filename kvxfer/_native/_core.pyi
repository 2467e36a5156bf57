"""
kvxfer's native core. Bad calls and failures raise the exceptions of kvxfer.errors.
"""

from collections.abc import Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray


class Lane(enum.Enum):
    MAPPED = 1

    STREAM = 2

    MEMORY = 3

    CMA = 4

    UCX = 5

    UNIX = 6

class SessionKind(enum.Enum):
    TCP = 1

    UNIX = 2

    MEMORY = 3

class GrantState(enum.IntEnum):
    ALIVE = 0

    RELEASED = 1

    EXPIRED = 2

    REVOKED = 3

    READER_GONE = 4

class GrantEvent(enum.Enum):
    READY = 0

    PULL = 1

    CONFIRM = 2

    RENEW = 3

    RELEASE = 4

    REVOKE = 5

    EXPIRE = 6

    READER_DEAD = 7

class TransferState(enum.IntEnum):
    CONNECTING = 0

    WAITING = 1

    GRANTED = 2

    READING = 3

    CONFIRMING = 4

    COMMITTED = 5

    FAILED = 6

    CANCELLED = 7

class TransferEvent(enum.Enum):
    SESSION_UP = 0

    SESSION_UP_LANDED = 1

    GRANTED = 2

    RESERVED = 3

    KNOWN = 4

    HEARD = 5

    LANDED = 6

    LANDED_ALL = 7

    SESSION_LOST = 8

    VERDICT_OK = 9

    FAIL = 10

    CANCEL = 11

class PushEvent(enum.Enum):
    SESSION_UP = 0

    SESSION_LOST = 1

    DONE = 2

    FAIL = 3

    CANCEL = 4

class HelloStep(enum.Enum):
    DIAL = 1

    ACCEPT = 2

    PROVE = 3

class NotifKind(enum.Enum):
    DELIVER = 1

    ACK = 2

    PART = 3

class PingKind(enum.Enum):
    ASK = 1

    ANSWER = 2

class Code(enum.Enum):
    ok = 0

    internal = 1

    invalid_argument = 2

    blocks_busy = 3

    limit_exceeded = 4

    closed = 5

    incompatible = 6

    refused = 7

    unauthenticated = 8

    protocol = 9

    overloaded = 10

    transport = 11

    peer_gone = 12

    deadline = 13

    no_lane = 14

    grant_expired = 15

    grant_revoked = 16

    grant_released = 17

    grant_unknown = 18

    checksum = 19

    cancelled = 20

    memory_gone = 21

class AgentRef:
    """One incarnation of one agent."""

    def __init__(self, agent_id: str, number: int, boot_nonce: bytes) -> None: ...

    @property
    def agent_id(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def boot_nonce(self) -> bytes: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __lt__(self, arg: AgentRef, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class PeerAdmission:
    """
    What unregistered peers must prove to be admitted. Without one, they are refused.
    """

    @staticmethod
    def bearer_key(key: bytes) -> PeerAdmission:
        """
        These 32 bytes, which also registered peers prove when they dial. A peer may use any name.
        """

    @staticmethod
    def derived_keys(cluster_secret: bytes) -> PeerAdmission:
        """The session key of both incarnations, derived from these 32 bytes."""

class Ranges:
    """
    Byte ranges of regions: rows of (region, offset, stride, length, count), seen as one list of elements.
    """

    def __init__(self, rows: Annotated[NDArray[numpy.uint64], dict(shape=(None, 5), order='C', device='cpu', writable=False)]) -> None: ...

    @property
    def count(self) -> int: ...

    @property
    def uniform_bytes(self) -> int: ...

    @property
    def row_count(self) -> int: ...

    @property
    def is_table(self) -> bool: ...

    @property
    def rows(self) -> list[tuple[int, int, int, int, int]]: ...

    def lengths(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
        """Bytes of each element."""

class Extent:
    """Some blocks of a pool, or some elements of ranges, in order."""

    @property
    def pool(self) -> int: ...

    @property
    def first(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def blocks(self) -> list[int]:
        """The block ids, or element ids."""

    @property
    def ranges(self) -> Ranges | None: ...

class RegionInfo:
    """An open-ended grant and offer of one registered region."""

    def __init__(self, id: int, bytes: int, can_read: bool = True, can_write: bool = True, is_shareable: bool = False, is_exposed: bool = True) -> None: ...

    @property
    def id(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def can_read(self) -> bool: ...

    @property
    def can_write(self) -> bool: ...

    @property
    def is_shareable(self) -> bool: ...

    @property
    def is_exposed(self) -> bool: ...

class WireList:
    """Elements of regions as a frame carries them; no indices: all."""

    def __init__(self, rows: Sequence[tuple[int, int, int, int, int]], indices: Sequence[int] = []) -> None: ...

    @property
    def rows(self) -> list[tuple[int, int, int, int, int]]: ...

    @property
    def indices(self) -> list[int]: ...

class Hello:
    def __init__(self, step: HelloStep, agent: AgentRef, peer: AgentRef, nonce: bytes, mac: bytes) -> None: ...

    @property
    def step(self) -> HelloStep: ...

    @property
    def agent(self) -> AgentRef: ...

    @property
    def peer(self) -> AgentRef: ...

    @property
    def nonce(self) -> bytes: ...

    @property
    def mac(self) -> bytes: ...

class Pull:
    def __init__(self, id: bytes, attempt: int, nonce: int, lane: Lane, first: int, count: int, block_bytes: int, digest: bytes, wait_ms: int, content_digest: bytes = ..., wants_checksums: bool = False) -> None: ...

    @property
    def wants_checksums(self) -> bool: ...

    @property
    def id(self) -> bytes: ...

    @property
    def attempt(self) -> int: ...

    @property
    def nonce(self) -> int: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def first(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def digest(self) -> bytes: ...

    @property
    def wait_ms(self) -> int: ...

    @property
    def content_digest(self) -> bytes: ...

class Fetch:
    def __init__(self, pull: Pull, elements: WireList) -> None: ...

    @property
    def pull(self) -> Pull: ...

    @property
    def elements(self) -> WireList: ...

class Push:
    def __init__(self, id: bytes, lane: Lane, source: WireList, to: WireList, deadline_ms: int = 0, wants_checksums: bool = False, notification: bytes | None = None, turn: int = 0, is_last: bool = True) -> None: ...

    @property
    def id(self) -> bytes: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def source(self) -> WireList: ...

    @property
    def to(self) -> WireList: ...

    @property
    def deadline_ms(self) -> int: ...

    @property
    def wants_checksums(self) -> bool: ...

    @property
    def turn(self) -> int: ...

    @property
    def is_last(self) -> bool: ...

    @property
    def notification(self) -> bytes | None: ...

class Done:
    def __init__(self, id: bytes, code: Code, text: bytes, turn: int = 0, checked: int = 0) -> None: ...

    @property
    def id(self) -> bytes: ...

    @property
    def code(self) -> Code: ...

    @property
    def turn(self) -> int: ...

    @property
    def checked(self) -> int: ...

    @property
    def text(self) -> bytes:
        """Bytes: a peer may send anything."""

class Ready:
    def __init__(self, id: bytes, attempt: int, seq: int, blocks: int, layers: int, total: int, complete: bool, ttl_ms: int, pool: int, ids_first: int, ids: Sequence[int], checksums: Sequence[int] = []) -> None: ...

    @property
    def id(self) -> bytes: ...

    @property
    def attempt(self) -> int: ...

    @property
    def seq(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    @property
    def layers(self) -> int: ...

    @property
    def total(self) -> int: ...

    @property
    def complete(self) -> bool: ...

    @property
    def ttl_ms(self) -> int: ...

    @property
    def pool(self) -> int: ...

    @property
    def ids_first(self) -> int: ...

    @property
    def ids(self) -> list[int]: ...

    @property
    def checksums(self) -> list[int]: ...

class Data:
    def __init__(self, id: bytes, attempt: int, first: int, count: int, complete: bool, payload_bytes: int, has_checksums: bool = False, is_zero_copy: bool = False) -> None: ...

    @property
    def id(self) -> bytes: ...

    @property
    def attempt(self) -> int: ...

    @property
    def first(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def complete(self) -> bool: ...

    @property
    def payload_bytes(self) -> int: ...

    @property
    def has_checksums(self) -> bool: ...

    @property
    def is_zero_copy(self) -> bool: ...

class Confirm:
    def __init__(self, id: bytes, nonce: int) -> None: ...

    @property
    def id(self) -> bytes: ...

    @property
    def nonce(self) -> int: ...

class Verdict:
    def __init__(self, id: bytes, nonce: int, code: Code) -> None: ...

    @property
    def id(self) -> bytes: ...

    @property
    def nonce(self) -> int: ...

    @property
    def code(self) -> Code: ...

class Release:
    def __init__(self, id: bytes) -> None: ...

    @property
    def id(self) -> bytes: ...

class Renew:
    def __init__(self, id: bytes, seq: int, ttl_ms: int) -> None: ...

    @property
    def id(self) -> bytes: ...

    @property
    def seq(self) -> int: ...

    @property
    def ttl_ms(self) -> int: ...

class Revoke:
    def __init__(self, id: bytes, code: Code, text: bytes = ...) -> None: ...

    @property
    def id(self) -> bytes: ...

    @property
    def code(self) -> Code: ...

    @property
    def text(self) -> bytes:
        """Bytes: a peer may send anything."""

class Queued:
    def __init__(self, id: bytes, attempt: int, is_known: bool, position: int, has_work: bool, age_ms: int) -> None: ...

    @property
    def id(self) -> bytes: ...

    @property
    def attempt(self) -> int: ...

    @property
    def is_known(self) -> bool: ...

    @property
    def position(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def age_ms(self) -> int: ...

class Cancel:
    def __init__(self, id: bytes, attempt: int) -> None: ...

    @property
    def id(self) -> bytes: ...

    @property
    def attempt(self) -> int: ...

class Notif:
    def __init__(self, kind: NotifKind, seq: int, oldest: int, payload: bytes, begin: int = 0, total: int = 0) -> None: ...

    @property
    def kind(self) -> NotifKind: ...

    @property
    def seq(self) -> int: ...

    @property
    def oldest(self) -> int: ...

    @property
    def begin(self) -> int: ...

    @property
    def total(self) -> int: ...

    @property
    def payload(self) -> bytes: ...

class Ping:
    def __init__(self, kind: PingKind, token: int) -> None: ...

    @property
    def kind(self) -> PingKind: ...

    @property
    def token(self) -> int: ...

class ErrorFrame:
    def __init__(self, id: bytes, attempt: int, code: Code, text: bytes) -> None: ...

    @property
    def id(self) -> bytes: ...

    @property
    def attempt(self) -> int: ...

    @property
    def code(self) -> Code: ...

    @property
    def text(self) -> bytes:
        """Bytes: a peer may send anything."""

class Map:
    def __init__(self, pool: int, region_bytes: int, block_count: int, segments: Sequence[tuple[int, int, int]], lane: Lane = Lane.MAPPED, address: int = 0, key: bytes = ...) -> None: ...

    @property
    def pool(self) -> int: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def address(self) -> int: ...

    @property
    def key(self) -> bytes: ...

    @property
    def region_bytes(self) -> int: ...

    @property
    def block_count(self) -> int: ...

    @property
    def segments(self) -> list[tuple[int, int, int]]: ...

def encode(frame: Hello | Pull | Push | Ready | Data | Confirm | Verdict | Release | Renew | Revoke | Cancel | Notif | Ping | ErrorFrame | Map | Fetch | Done | Queued) -> bytes:
    """The bytes of a frame, DATA's payload excluded."""

def kind_name(frame: Hello | Pull | Push | Ready | Data | Confirm | Verdict | Release | Renew | Revoke | Cancel | Notif | Ping | ErrorFrame | Map | Fetch | Done | Queued) -> str: ...

class Decoder:
    """
    Takes bytes in any chunks; gives frames, or ProtocolError once and for ever.
    """

    def __init__(self) -> None: ...

    def feed(self, data: bytes) -> None: ...

    def next(self) -> Hello | Pull | Push | Ready | Data | Confirm | Verdict | Release | Renew | Revoke | Cancel | Notif | Ping | ErrorFrame | Map | Fetch | Done | Queued | None: ...

    @property
    def payload_pending(self) -> int: ...

    def take_payload(self, max: int) -> bytes: ...

    @property
    def buffered(self) -> int: ...

class Dial:
    @property
    def peer(self) -> AgentRef: ...

    @property
    def kind(self) -> SessionKind: ...

class Hangup:
    @property
    def session(self) -> int: ...

    @property
    def code(self) -> Code: ...

    @property
    def text(self) -> str: ...

class SendFrame:
    @property
    def session(self) -> int: ...

    @property
    def frame(self) -> Hello | Pull | Push | Ready | Data | Confirm | Verdict | Release | Renew | Revoke | Cancel | Notif | Ping | ErrorFrame | Map | Fetch | Done | Queued: ...

class SendMap:
    @property
    def session(self) -> int: ...

    @property
    def pool(self) -> int: ...

    @property
    def lane(self) -> Lane: ...

class SendData:
    @property
    def session(self) -> int: ...

    @property
    def frame(self) -> Data: ...

    @property
    def source(self) -> Extent: ...

    @property
    def checksums(self) -> list[int]: ...

    @property
    def serial(self) -> int: ...

    @property
    def pool(self) -> int: ...

    @property
    def blocks(self) -> list[int]: ...

class ReadBlocks:
    @property
    def id(self) -> bytes: ...

    @property
    def token(self) -> int: ...

    @property
    def session(self) -> int: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def source(self) -> Extent: ...

    @property
    def to(self) -> Extent: ...

    @property
    def checksums(self) -> list[int]: ...

    @property
    def remote_pool(self) -> int: ...

    @property
    def from_blocks(self) -> list[int]: ...

    @property
    def pool(self) -> int: ...

    @property
    def to_blocks(self) -> list[int]: ...

class StopRead:
    @property
    def id(self) -> bytes: ...

class GrantEnded:
    @property
    def id(self) -> bytes: ...

    @property
    def state(self) -> GrantState: ...

class TransferProgress:
    @property
    def id(self) -> bytes: ...

    @property
    def state(self) -> TransferState: ...

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int: ...

class TransferGranted:
    @property
    def id(self) -> bytes: ...

class TransferFinal:
    @property
    def id(self) -> bytes: ...

    @property
    def state(self) -> TransferState: ...

    @property
    def code(self) -> Code: ...

    @property
    def text(self) -> str: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def lane_notes(self) -> str: ...

    @property
    def attempts(self) -> int: ...

    @property
    def blocks_done(self) -> int: ...

    @property
    def blocks_before_complete(self) -> int: ...

    @property
    def queue_ns(self) -> int: ...

    @property
    def wire_ns(self) -> int: ...

    @property
    def confirm_ns(self) -> int: ...

    @property
    def blocks_checked(self) -> int: ...

    @property
    def session(self) -> int: ...

class TransferDrained:
    @property
    def id(self) -> bytes: ...

class OfferEnded:
    @property
    def id(self) -> bytes: ...

    @property
    def sender(self) -> AgentRef: ...

    @property
    def state(self) -> TransferState: ...

    @property
    def code(self) -> Code: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def bytes(self) -> int: ...

class NotifReceived:
    @property
    def sender(self) -> AgentRef: ...

    @property
    def seq(self) -> int: ...

    @property
    def payload(self) -> bytes: ...

class NotifDelivered:
    @property
    def receiver(self) -> AgentRef: ...

    @property
    def seq(self) -> int: ...

class NotifFailed:
    @property
    def receiver(self) -> AgentRef: ...

    @property
    def seq(self) -> int: ...

    @property
    def code(self) -> Code: ...

class SessionUp:
    @property
    def session(self) -> int: ...

    @property
    def peer(self) -> AgentRef: ...

    @property
    def kind(self) -> SessionKind: ...

class PoolInfo:
    def __init__(self, id: int, block_count: int, block_bytes: int, digest: bytes, is_shareable: bool, is_exposed: bool = False, has_checksums: bool = False) -> None: ...

class Ledger:
    def __init__(self, info: PoolInfo) -> None: ...

    def grant(self, blocks: Sequence[int]) -> None: ...

    def end_grant(self, blocks: Sequence[int]) -> None: ...

    def reserve(self, blocks: Sequence[int]) -> None: ...

    def quarantine(self, blocks: Sequence[int]) -> None: ...

    def give_back(self, blocks: Sequence[int]) -> None: ...

    def is_reserved(self, block: int) -> bool: ...

    def is_granted(self, block: int) -> bool: ...

    @property
    def granted_count(self) -> int: ...

    @property
    def reserved_count(self) -> int: ...

    @property
    def quarantined_count(self) -> int: ...

class GrantLimits:
    def __init__(self) -> None: ...

    @property
    def grants_max(self) -> int: ...

    @grants_max.setter
    def grants_max(self, arg: int, /) -> None: ...

    @property
    def tombstones_max(self) -> int: ...

    @tombstones_max.setter
    def tombstones_max(self, arg: int, /) -> None: ...

    @property
    def waiting_max(self) -> int: ...

    @waiting_max.setter
    def waiting_max(self, arg: int, /) -> None: ...

    @property
    def ttl_ns(self) -> int: ...

    @ttl_ns.setter
    def ttl_ns(self, arg: int, /) -> None: ...

    @property
    def lifetime_max_ns(self) -> int: ...

    @lifetime_max_ns.setter
    def lifetime_max_ns(self, arg: int, /) -> None: ...

    @property
    def wait_max_ns(self) -> int: ...

    @wait_max_ns.setter
    def wait_max_ns(self, arg: int, /) -> None: ...

    @property
    def unknown_wait_ns(self) -> int: ...

    @unknown_wait_ns.setter
    def unknown_wait_ns(self, arg: int, /) -> None: ...

    @property
    def queued_every_ns(self) -> int: ...

    @queued_every_ns.setter
    def queued_every_ns(self, arg: int, /) -> None: ...

    @property
    def away_max_ns(self) -> int: ...

    @away_max_ns.setter
    def away_max_ns(self, arg: int, /) -> None: ...

    @property
    def data_bytes_max(self) -> int: ...

    @data_bytes_max.setter
    def data_bytes_max(self, arg: int, /) -> None: ...

class TransferLimits:
    def __init__(self) -> None: ...

    @property
    def stall_ns(self) -> int: ...

    @stall_ns.setter
    def stall_ns(self, arg: int, /) -> None: ...

    @property
    def reconnect_ns(self) -> int: ...

    @reconnect_ns.setter
    def reconnect_ns(self, arg: int, /) -> None: ...

    @property
    def ttl_ns(self) -> int: ...

    @ttl_ns.setter
    def ttl_ns(self, arg: int, /) -> None: ...

    @property
    def engine_silent_ns(self) -> int: ...

    @engine_silent_ns.setter
    def engine_silent_ns(self, arg: int, /) -> None: ...

    @property
    def read_bytes_max(self) -> int: ...

    @read_bytes_max.setter
    def read_bytes_max(self, arg: int, /) -> None: ...

class EndpointLimits:
    def __init__(self) -> None: ...

    @property
    def grants(self) -> GrantLimits: ...

    @grants.setter
    def grants(self, arg: GrantLimits, /) -> None: ...

    @property
    def transfers(self) -> TransferLimits: ...

    @transfers.setter
    def transfers(self, arg: TransferLimits, /) -> None: ...

    @property
    def transfers_max(self) -> int: ...

    @transfers_max.setter
    def transfers_max(self, arg: int, /) -> None: ...

    @property
    def finished_max(self) -> int: ...

    @finished_max.setter
    def finished_max(self, arg: int, /) -> None: ...

    @property
    def sessions_max(self) -> int: ...

    @sessions_max.setter
    def sessions_max(self, arg: int, /) -> None: ...

    @property
    def refusals_max(self) -> int: ...

    @refusals_max.setter
    def refusals_max(self, arg: int, /) -> None: ...

    @property
    def notifications_max(self) -> int: ...

    @notifications_max.setter
    def notifications_max(self, arg: int, /) -> None: ...

    @property
    def notification_bytes_max(self) -> int: ...

    @notification_bytes_max.setter
    def notification_bytes_max(self, arg: int, /) -> None: ...

    @property
    def notification_queue_bytes_max(self) -> int: ...

    @notification_queue_bytes_max.setter
    def notification_queue_bytes_max(self, arg: int, /) -> None: ...

    @property
    def notification_piece_bytes(self) -> int: ...

    @notification_piece_bytes.setter
    def notification_piece_bytes(self, arg: int, /) -> None: ...

    @property
    def handshake_ns(self) -> int: ...

    @handshake_ns.setter
    def handshake_ns(self, arg: int, /) -> None: ...

    @property
    def stripes(self) -> int: ...

    @stripes.setter
    def stripes(self, arg: int, /) -> None: ...

    @property
    def lanes(self) -> int:
        """
        The lanes that this agent reads by and serves: bit `1 << lane` for each.
        """

    @lanes.setter
    def lanes(self, arg: int, /) -> None: ...

class GrantCounts:
    @property
    def alive(self) -> int: ...

    @property
    def waiting_pulls(self) -> int: ...

    @property
    def expected(self) -> int: ...

    @property
    def unread(self) -> int: ...

    @property
    def unread_blocks(self) -> int: ...

    @property
    def released(self) -> int: ...

    @property
    def expired(self) -> int: ...

    @property
    def revoked(self) -> int: ...

    @property
    def reader_gone(self) -> int: ...

    @property
    def verdicts_ok(self) -> int: ...

    @property
    def verdicts_refused(self) -> int: ...

    @property
    def refused(self) -> int: ...

class PoolCounts:
    @property
    def pool(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    @property
    def granted(self) -> int: ...

    @property
    def reserved(self) -> int: ...

    @property
    def quarantined(self) -> int: ...

class RegionCounts:
    @property
    def region(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def grants(self) -> int: ...

    @property
    def transfers(self) -> int: ...

class EndpointCounts:
    @property
    def grants(self) -> GrantCounts: ...

    @property
    def pools(self) -> list[PoolCounts]: ...

    @property
    def regions(self) -> list[RegionCounts]: ...

    @property
    def pulls_unknown(self) -> int: ...

    @property
    def pulls_queued(self) -> int: ...

    @property
    def pulls_granted(self) -> int: ...

    @property
    def transfers_live(self) -> int: ...

    @property
    def transfers_draining(self) -> int: ...

    @property
    def sessions_up(self) -> int: ...

    @property
    def sessions_opening(self) -> int: ...

    @property
    def peers(self) -> int: ...

    @property
    def notifications_pending(self) -> int: ...

class GrantTable:
    def __init__(self, limits: GrantLimits) -> None: ...

    def grant(self, id: bytes, ledger: Ledger, blocks: Sequence[int], reader: str, ttl_ns: int, now_ns: int, content_digest: bytes = ...) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def expect(self, id: bytes, reader: str) -> None: ...

    def pulse(self, has_work: bool, took_in: bool, now_ns: int) -> None: ...

    def has_begun(self, id: bytes) -> bool: ...

    def abort_grant(self, id: bytes) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def ready(self, id: bytes, blocks: int, layers: int, complete: bool, now_ns: int, checksums: Sequence[int] = []) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def end(self, id: bytes, event: GrantEvent, now_ns: int, why: str = '') -> tuple[GrantState, list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]]: ...

    def bind(self, id: bytes, reader: str, now_ns: int) -> str: ...

    def state(self, id: bytes, now_ns: int) -> GrantState | None: ...

    def on_pull(self, session: int, peer: AgentRef, pull: Pull, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def on_confirm(self, session: int, peer: AgentRef, confirm: Confirm, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def on_release(self, peer: AgentRef, id: bytes, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def on_renew(self, peer: AgentRef, renew: Renew, now_ns: int) -> None: ...

    def on_cancel(self, session: int, cancel: Cancel) -> None: ...

    def data_sent(self, session: int, id: bytes, attempt: int, count: int, now_ns: int, is_zero_copy: bool = False) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def data_failed(self, id: bytes, code: Code, text: str, now_ns: int, serial: int = 0) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def session_closed(self, session: int, now: int) -> None: ...

    def reader_dead(self, reader: AgentRef, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def tick(self, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def next_deadline(self) -> int: ...

    def counts(self) -> GrantCounts: ...

def grant_transitions() -> list[tuple[GrantState, GrantEvent, GrantState | None]]: ...

def transfer_transitions() -> list[tuple[TransferState, TransferEvent, TransferState | None]]: ...

def push_transitions() -> list[tuple[TransferState, PushEvent, TransferState | None]]: ...

class Landing:
    @property
    def token(self) -> int: ...

    @property
    def to(self) -> Extent: ...

    @property
    def pool(self) -> int: ...

    @property
    def blocks(self) -> list[int]: ...

class Endpoint:
    """
    All machines of one agent. Every method that can cause effects returns them, last.
    """

    def __init__(self, agent: AgentRef, limits: EndpointLimits) -> None: ...

    @property
    def agent(self) -> AgentRef: ...

    def set_peer(self, peer: AgentRef, key: bytes, control: SessionKind) -> None: ...

    def peer_dead(self, peer: AgentRef, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def knows(self, peer: AgentRef) -> bool: ...

    def add_pool(self, info: PoolInfo, base: int = 0, segments: Sequence[tuple[int, int, int]] = []) -> None:
        """
        `base` and `segments` (offset, stride, length): where its blocks lie. Those that share bytes with blocks of another pool are busy while
        those are.
        """

    def set_digest(self, pool: int, digest: bytes) -> None: ...

    def remove_pool(self, pool: int) -> None: ...

    def grant(self, id: bytes, pool: int, blocks: Sequence[int], reader: str, ttl_ns: int, ready_blocks: int, now_ns: int, content_digest: bytes = ...) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def expect(self, id: bytes, reader: str) -> None: ...

    def pulse(self, has_work: bool, took_in: bool, now_ns: int) -> None: ...

    def has_begun(self, id: bytes) -> bool: ...

    def reserve(self, id: bytes, blocks: Sequence[int], first: int, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def unreserve(self, id: bytes, now_ns: int) -> tuple[bool, list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]]: ...

    def abort_grant(self, id: bytes) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def abort_pull(self, id: bytes, source: AgentRef, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def ready(self, id: bytes, blocks: int, layers: int, complete: bool, now_ns: int, checksums: Sequence[int] = []) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def end_grant(self, id: bytes, event: GrantEvent, now_ns: int, why: str = '') -> tuple[GrantState, list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]]: ...

    def bind_grant(self, id: bytes, reader: str, now_ns: int) -> str: ...

    def grant_state(self, id: bytes, now_ns: int) -> GrantState | None: ...

    def is_granted(self, id: bytes, serial: int, now_ns: int) -> bool: ...

    def pull(self, id: bytes, source: AgentRef, pool: int, blocks: Sequence[int], first: int, lanes: Sequence[Lane], deadline_ns: int, nonce_seed: int, now_ns: int, content_digest: bytes = ..., wants_checksums: bool = False, count: int = 0, granted_ns: int = 0, tells_granted: bool = False) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def becoming_ready(self, id: bytes, blocks: int) -> tuple[int, list[int]]:
        """
        The pool, and the blocks that `ready(id, blocks)` would newly announce, if the owner must supply their CRC-32Cs.
        """

    def admit(self, admission: PeerAdmission) -> None: ...

    def is_connected(self, peer: AgentRef) -> bool: ...

    def add_region(self, info: RegionInfo, base: int = 0) -> None: ...

    def remove_region(self, region: int, now_ns: int) -> tuple[bool, list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]]:
        """
        True: it is removed. False: busy; call again once reads into it have drained.
        """

    def fetch(self, id: bytes, peer: AgentRef, local: Ranges, local_ids: Sequence[int], remote: Ranges, remote_ids: Sequence[int], lanes: Sequence[Lane], deadline_ns: int, nonce_seed: int, now_ns: int, notification: bytes | None = None, wants_checksums: bool = False) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def push(self, id: bytes, peer: AgentRef, local: Ranges, local_ids: Sequence[int], remote: Ranges, remote_ids: Sequence[int], lanes: Sequence[Lane], deadline_ns: int, nonce_seed: int, now_ns: int, notification: bytes | None = None, wants_checksums: bool = False) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def cancel(self, id: bytes, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def transfer_state(self, id: bytes) -> TransferState | None: ...

    def notify(self, to: AgentRef, payload: bytes, now_ns: int) -> tuple[int, list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]]: ...

    def dialed(self, peer: AgentRef, kind: SessionKind, nonce: bytes, now_ns: int) -> tuple[int, list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]]: ...

    def dial_failed(self, peer: AgentRef, kind: SessionKind, code: Code, text: str, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def accepted(self, kind: SessionKind, nonce: bytes, now_ns: int) -> tuple[int, list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]]: ...

    def closed(self, session: int, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def heard(self, session: int, now_ns: int) -> None: ...

    def on_frame(self, session: int, frame: Hello | Pull | Push | Ready | Data | Confirm | Verdict | Release | Renew | Revoke | Cancel | Notif | Ping | ErrorFrame | Map | Fetch | Done | Queued, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def data_sent(self, session: int, id: bytes, attempt: int, count: int, now_ns: int, is_zero_copy: bool = False, serial: int = 0) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def data_failed(self, id: bytes, code: Code, text: str, now_ns: int, serial: int = 0) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def data_arrives(self, session: int, data: Data, now_ns: int) -> Landing: ...

    def is_landing(self, id: bytes, token: int) -> bool: ...

    def read_landed(self, id: bytes, token: int, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def read_stopped(self, id: bytes, token: int, code: Code, text: str, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def tick(self, now_ns: int) -> list[Dial | Hangup | SendFrame | SendMap | SendData | ReadBlocks | StopRead | GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp]: ...

    def next_deadline(self) -> int: ...

    def counts(self) -> EndpointCounts: ...

WIRE_VERSION: int = 3

BODY_MAX: int = 1048576

NEVER_NS: int = 9223372036854775807

def sha256(message: bytes) -> bytes: ...

def hmac_sha256(key: bytes, message: bytes) -> bytes: ...

class SessionRefused:
    """
    A session that never came up, and why; `peer` is None if the dialer was not yet known.
    """

    @property
    def peer(self) -> AgentRef | None: ...

    @property
    def kind(self) -> SessionKind: ...

    @property
    def code(self) -> Code: ...

    @property
    def text(self) -> str: ...

class CoreFailed:
    """
    The IO thread ended with an internal error: nothing is read or written any more, every call raises.
    """

    @property
    def text(self) -> str: ...

class CoreStatistics:
    """
    Counters of a core; `connections` and `sessions_*` (except refused) are current values, the others only grow.
    """

    @property
    def bytes_mapped(self) -> int:
        """Copied out of peers' mapped pools."""

    @property
    def bytes_cma(self) -> int:
        """Copied out of peers' memory by the kernel."""

    @property
    def bytes_ucx(self) -> int: ...

    @property
    def bytes_streamed_in(self) -> int:
        """Over TCP and Unix sockets, into blocks and elements."""

    @property
    def bytes_streamed_out(self) -> int: ...

    @property
    def bytes_spliced_out(self) -> int:
        """Those sent zero-copy to peers under this kernel."""

    @property
    def bytes_discarded(self) -> int:
        """Payload for reads that had ended."""

    @property
    def runs_mapped(self) -> int:
        """Contiguous runs of memory that were copied; `runs_cma` the same."""

    @property
    def runs_cma(self) -> int: ...

    @property
    def calls_cma(self) -> int:
        """Of process_vm_readv."""

    @property
    def gets_ucx(self) -> int: ...

    @property
    def gets_ucx_most(self) -> int:
        """The most gets of one read that were in flight at once."""

    @property
    def runs_streamed_out(self) -> int:
        """
        Runs of blocks that were offered to the kernel, counted again if it did not take all.
        """

    @property
    def calls_streamed_out(self) -> int:
        """System calls that offered them."""

    @property
    def frames_in(self) -> int: ...

    @property
    def frames_out(self) -> int: ...

    @property
    def wakeups(self) -> int:
        """Times that the event loop polled its sockets, or slept on them."""

    @property
    def connections(self) -> int: ...

    @property
    def sessions_tcp(self) -> int: ...

    @property
    def sessions_unix(self) -> int: ...

    @property
    def sessions_refused(self) -> int: ...

    @property
    def sessions_ended(self) -> int:
        """
        Sessions that were up, and ended because one side sent a malformed frame or too many refused requests.
        """

    @property
    def dials(self) -> int: ...

    @property
    def dials_failed(self) -> int: ...

    @property
    def mappings(self) -> int:
        """
        Pools and regions of peers that this agent may read by a one-sided lane.
        """

    @property
    def mappings_refused(self) -> int: ...

    @property
    def checksum_failures(self) -> int:
        """
        Reads thrown away because their bytes did not match the source's checksums.
        """

    @property
    def sessions_tls(self) -> int:
        """Those of `sessions_tcp` that are encrypted."""

    @property
    def tls_failures(self) -> int:
        """
        Encrypted sessions that were up, and ended because a record was not the peer's.
        """

    @property
    def tls_key_updates(self) -> int:
        """Times that this agent changed the key that it sends by."""

class Region:
    """
    Shared memory made by kvxfer: a sealed memfd, page aligned, zeroed. It stays mapped while this object, a view of its buffer or a
    pool over it exists. `numpy.frombuffer(region, dtype=numpy.uint8)` is a writable view.
    """

    def __init__(self, nbytes: int, *, populate: bool = True, huge: str = 'auto') -> None:
        """
        `populate` makes every page resident now, so that a lack of memory shows here. `huge` pages: "auto" (if the host has them),
        "never", "require" (raises LimitExceededError if it has none). Raises LaneUnavailableError if the host gives processes no sealed
        shared memory: memfd_create is forbidden, or the kernel is too old.
        """

    @property
    def page_bytes(self) -> int:
        """The size of most of its pages."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def fileno(self) -> int:
        """The memfd, which the region owns: another process can map it."""

class Elements:
    """
    A list of elements of registered memory: elements `ids` (uint32, shape [n]) of `ranges`, in this order.
    """

    def __init__(self, ranges: Ranges, ids: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    @property
    def ranges(self) -> Ranges: ...

    @property
    def ids(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,), writable=False)]:
        """uint32, shape [n], read-only."""

class PreparedPost:
    """
    A read or write of a peer's elements that can be started again and again, by any thread: see Core.
    """

    def start(self, id: bytes, timeout_ns: int, notification: bytes | None = None, wants_checksums: bool = False) -> None:
        """
        Start one transfer `id` (16 bytes never used before). It ends in TransferFinal and TransferDrained, after `timeout_ns` at the
        latest. `notification` goes to the peer once it is committed; `wants_checksums`: its bytes go with CRC-32Cs. Raises
        InvalidArgumentError, PeerGoneError, LimitExceededError, LaneUnavailableError.
        """

class Core:
    """
    One agent's sockets, mappings and machines, on one native thread that needs no GIL. Every method is thread-safe. Times are
    nanoseconds of CLOCK_MONOTONIC (`time.monotonic_ns()`). Events come through `fileno()` and `drain()`.
    """

    def __init__(self, agent: AgentRef, limits: EndpointLimits, *, bind_host: str, bind_port: int, unix_path: str, ucx_library: str = '', ucx_tls: str = '', copy_threads: int = 0, progress: str = 'thread', encrypt: str = 'auto', openssl_library: str = '', tolerates_plain: bool = False, records_per_key: int = 4194304) -> None:
        """
        `bind_host` is a numeric address. `unix_path` empty: no Unix socket, so no peer can map our pools; its directory must be private (0700).
        `ucx_library`: path of libucp, loaded here; empty: no `ucx` lane. `ucx_tls`: its transports; empty: all but tcp. `copy_threads`: of
        `mapped` and `cma`, 0: as many as processors are idle. `progress`: which threads run the event loop: "thread", the core's own and
        one that waits; "caller", also one that posts or drains. `encrypt`: TCP sessions by TLS: "auto", those with other hosts; "always";
        "never". `openssl_library`: libssl of OpenSSL 3, loaded for the first such session; empty: as the loader finds it. `tolerates_plain`: "auto"
        is "never" where it cannot be loaded. `records_per_key`: a key encrypts at most so many records of 16 KiB.
        """

    def start(self) -> None:
        """
        Listen and start the thread. Raises TransportError if a socket cannot be bound.
        """

    def close(self) -> None:
        """
        Drop every session and join the thread. Idempotent; afterwards only `drain` and reading methods may be called.
        """

    @property
    def agent(self) -> AgentRef: ...

    @property
    def tcp_port(self) -> int:
        """The port that the core listens on; 0 before start."""

    @property
    def unix_path(self) -> str: ...

    @property
    def ucx_obstacle(self) -> str:
        """Why the `ucx` lane is off; empty: it is on."""

    def fileno(self) -> int:
        """
        An eventfd, readable while `drain` has events. Valid as long as the object.
        """

    def drain(self) -> list[GrantEnded | TransferProgress | TransferGranted | TransferFinal | TransferDrained | OfferEnded | NotifReceived | NotifDelivered | NotifFailed | SessionUp | SessionRefused | CoreFailed]:
        """
        The events since the last call, in order; of a transfer's progress only the newest. Never blocks. With progress "caller", if there
        are none, the calling thread polls the sockets first.
        """

    def wait(self, timeout_ns: int) -> bool:
        """
        Wait up to `timeout_ns` until `drain` has events other than progress; returns whether it has any. A signal may end it early. The
        calling thread runs the event loop meanwhile, unless another one does, and the core's own thread is not woken by sockets.
        """

    def add_pool(self, info: PoolInfo, region: Region, segments: Sequence[tuple[int, int, int]]) -> None:
        """
        Blocks in memory made by kvxfer. A segment is (offset, stride, length): block b has `length` bytes at `offset + b * stride`; the
        lengths add up to `block_bytes`. Raises InvalidArgumentError if a block would leave the region.
        """

    def add_foreign_pool(self, info: PoolInfo, address: int, nbytes: int, owner: object | None, segments: Sequence[tuple[int, int, int]], device: int = -1) -> None:
        """
        Blocks in foreign memory; `owner` is kept alive until the pool is removed or the core closed. Never shareable. `device`: the
        CUDA device that has it; -1: host memory. Raises LaneUnavailableError if that device cannot be used.
        """

    def set_digest(self, pool: int, digest: bytes) -> None:
        """
        Change the digest (32 bytes) of a pool's record: later pulls from it, and by it, are judged by this one.
        """

    def remove_pool(self, pool: int) -> None:
        """
        Raises BlocksBusyError while a block is granted, reserved or quarantined. When it returns, the core no longer uses the memory.
        """

    def add_region(self, info: RegionInfo, region: Region) -> None:
        """
        Register memory made by kvxfer: from now on any proven peer may read and write it as `info` says. Raises InvalidArgumentError if
        the id is or was taken, or the region is shorter than `info.bytes`.
        """

    def add_foreign_region(self, info: RegionInfo, address: int, nbytes: int, owner: object | None, device: int = -1) -> None:
        """
        Register foreign memory; `owner` is kept alive until the region is removed or the core closed. Never shareable. `device`: as
        of `add_foreign_pool`.
        """

    def remove_region(self, id: int) -> None:
        """
        Ends every peer's read and write of it. Raises BlocksBusyError while an own fetch may still write there. When it returns, the core
        no longer uses the memory.
        """

    def prepare_fetch(self, peer: AgentRef, local: Elements, remote: Elements, lanes: Sequence[Lane]) -> PreparedPost:
        """
        Reads the peer's elements `remote` into own elements `local`, one for one, of equal lengths; the start checks all of it.
        `lanes`: allowed, best first.
        """

    def prepare_push(self, peer: AgentRef, local: Elements, remote: Elements, lanes: Sequence[Lane]) -> PreparedPost:
        """
        Has the peer read own elements `local` into its `remote`; otherwise as `prepare_fetch`. Own elements must stay unchanged until
        TransferFinal, and their memory until TransferDrained.
        """

    def admit(self, admission: PeerAdmission) -> None:
        """
        From now on an unregistered agent may open a session if it proves what `admission` says. It stays known while one of its sessions is
        up, and a little longer while its reads or writes are in progress, unless `set_peer` registers it. Raises InvalidArgumentError if
        an admission of another kind was set before.
        """

    def is_connected(self, peer: AgentRef) -> bool:
        """Whether a session with exactly this incarnation is up."""

    def set_peer(self, peer: AgentRef, key: bytes, *, tcp_host: str, tcp_port: int, unix_path: str) -> None:
        """
        The address and the key (32 bytes) of one incarnation of an agent. `tcp_host` is a numeric address; `unix_path` is empty if the peer is
        on another host. A later call replaces them.
        """

    def peer_dead(self, peer: AgentRef) -> None: ...

    def grant(self, id: bytes, pool: int, blocks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, reader: str, ttl_ns: int, ready_blocks: int = 0, content_digest: bytes = ...) -> None:
        """
        `reader` is an agent id, or empty: the first authenticated reader that presents `id`. `content_digest`: 32 bytes over the content
        of the blocks; a reader with another digest is refused. Zero: not given.
        """

    def expect(self, id: bytes, *, reader: str) -> None:
        """
        The engine here accepted the prompt of `id`: early pulls of it get QUEUED. `reader` as of `grant`. Ends by `grant` or `abort_grant`.
        """

    def pulse(self, has_work: bool, took_in: bool) -> None:
        """
        A heartbeat of the engine here, which is about to step, or has nothing to do. `took_in`: it has taken in all requests that had reached
        it by its last such pulse.
        """

    def has_begun(self, id: bytes) -> bool:
        """Whether the reader of the grant `id` has asked for blocks of it."""

    def abort_grant(self, id: bytes) -> None:
        """
        The grant `id` will never be made here: readers that wait for it get grant_revoked.
        """

    def ready(self, id: bytes, blocks: int, *, layers: int = 0, complete: bool = False) -> None:
        """
        The first `blocks` blocks are written and stay unchanged. If their pool has checksums, computes those of the new ones.
        """

    def end_grant(self, id: bytes, event: GrantEvent, why: str = '') -> GrantState:
        """
        `event` is REVOKE or RELEASE. When it returns, the grant's blocks may be overwritten. The reader gets `why`.
        """

    def bind_grant(self, id: bytes, reader: str) -> str:
        """
        Let only the agent `reader` read it from now on (empty: leave it open), unless another was named, or came first. Returns the
        only agent that may read it; empty: none yet, or never.
        """

    def grant_state(self, id: bytes) -> GrantState | None: ...

    def pull(self, id: bytes, source: AgentRef, pool: int, blocks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, first: int = 0, lanes: Sequence[Lane], deadline_ns: int = 9223372036854775807, content_digest: bytes = ..., wants_checksums: bool = False, count: int = 0, granted_ns: int = 0, tells_granted: bool = False) -> None:
        """
        Read grant positions `first`.. into own `blocks`, in order. `lanes`: allowed, best first. The core owns the blocks until
        TransferDrained. No blocks, and a `count`: wait for `reserve`. `deadline_ns`: the grant must exist by then; `granted_ns`, if not 0: the
        time limit of the transfer from the moment when it hears of its grant. `tells_granted`: also send TransferGranted to a pull that has
        blocks.
        """

    def reserve(self, id: bytes, blocks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, first: int = 0) -> None:
        """
        Give blocks to a pull that has none, for grant positions `first`... Raises InvalidArgumentError if it has ended or has blocks.
        """

    def unreserve(self, id: bytes) -> bool:
        """
        Take back the blocks of a pull whose grant is not known to exist; it waits on without them. False: they are in use, or it has ended.
        """

    def cancel(self, id: bytes) -> None: ...

    def abort_pull(self, id: bytes, source: AgentRef) -> None:
        """
        `id` will never be pulled from `source`: tells the source, if it can be reached.
        """

    def transfer_state(self, id: bytes) -> TransferState | None:
        """
        The state of a pull, fetch or push, also for some time after its end; None if it is unknown. Fast enough for polling.
        """

    def notify(self, to: AgentRef, payload: bytes) -> int:
        """
        Returns the notification's number, which NotifDelivered or NotifFailed will name.
        """

    def set_unfetched_notification_bytes(self, bytes: int) -> None:
        """
        How many bytes of taken notifications the program has not fetched: they count as waiting here.
        """

    def counts(self) -> EndpointCounts: ...

    def statistics(self) -> CoreStatistics: ...

def crc32c(buffer: object, value: int = 0) -> int:
    """
    CRC-32C (Castagnoli, RFC 3720) of a contiguous buffer, continuing from `value`, the checksum of the bytes before it.
    """

def crc32c_methods() -> list[str]:
    """The CRC32C methods of this CPU, the one in use first, `portable` last."""

def crc32c_by(name: str, buffer: object, value: int = 0) -> int:
    """crc32c() by one of crc32c_methods(), to compare them."""

def cma_obstacle(pid: int = 0) -> str:
    """
    Why this process can read no other process of its user by the `cma` lane, or not be read, and what to do about it; empty: it can.
    With a process id: why it cannot read that process.
    """

def openssl_version(path: str = '') -> str:
    """
    Loads OpenSSL 3 into this process, permanently, and returns its version. `path`: libssl; empty: as the loader finds it. A later call gets
    the library that is loaded. Raises LaneUnavailableError if it cannot be used.
    """

def cma_missing_calls() -> str:
    """
    Why this process cannot make the system calls of the `cma` lane (process_vm_readv, pidfd_open); empty: it can.
    """

class JsonKind(enum.Enum):
    STRING = 0

    NUMBER = 1

    OBJECT = 2

    ARRAY = 3

    TRUE = 4

    FALSE = 5

    NULL = 6

class JsonScan:
    """
    A JSON object that was looked at once. Of a name that occurs more than once the last occurrence counts.
    """

    @property
    def body(self) -> bytes: ...

    @property
    def open(self) -> int:
        """The offset of the object's brace."""

    def __len__(self) -> int:
        """How many members there are, each occurrence of a name counted."""

    def kind(self, name: str) -> JsonKind | None:
        """The kind of a field's value; None where the body has no such field."""

    def span(self, name: str) -> tuple[int, int] | None:
        """
        Where a field's value begins and ends; None where the body has no such field.
        """

    def scalar(self, name: str) -> str | int | float | bool | None:
        """
        The value of a field that is a string, a number, true or false; None where it is null or absent. InvalidArgumentError for others.
        """

    def members(self) -> list[tuple[str, JsonKind, tuple[int, int], tuple[int, int]]]:
        """
        Every member in the body's order: decoded name, kind, and where its key and its value begin and end.
        """

    def without(self, names: Sequence[str]) -> tuple[list[tuple[int, int]], bool]:
        """
        The ranges of the body that stay when every occurrence of the named members goes, the first one from behind the object's brace; and
        whether any member stays.
        """

class JsonFields:
    """Names of members to look for in JSON objects, prepared once."""

    def __init__(self, names: Sequence[str]) -> None: ...

    @property
    def names(self) -> list[str]: ...

    def scan(self, body: bytes) -> JsonScan:
        """
        Validates the whole body and finds its members, without the GIL where it is longer than JSON_HELD_GIL_BYTES. Raises InvalidJsonError
        with the offset of the first wrong byte, JsonTooComplexError where a bound is passed.
        """

def check_json(text: bytes) -> None:
    """Raises InvalidArgumentError unless `text` is one JSON value."""

class ChainHasher:
    """
    Finds the keys of prompts: hashes, keyed with a secret, of what their JSON says. Prepared once for a route.
    """

    def __init__(self, secret: bytes, fields: JsonFields, root: Sequence[str], heads: Sequence[str]) -> None:
        """
        `secret` has 16 bytes. `root`: the fields that a root is made of; `heads`: those that stand in front of the prompt. Raises
        InvalidArgumentError for a name that `fields` has not.
        """

    def root(self, scan: JsonScan, texts: Sequence[bytes]) -> int:
        """
        One key of some texts in their order, and of every occurrence of the root's fields that is not null.
        """

    def chain(self, scan: JsonScan, root: int, name: str, is_list_of_prompts: bool) -> tuple[bytes, bytes]:
        """
        The keys of the heads and of the prompt in field `name`, and for each the bytes of content up to it; both as 64-bit words of this
        machine. Without the GIL where the body is longer than JSON_HELD_GIL_BYTES.
        """

def siphash(secret: bytes, data: bytes) -> int:
    """SipHash-2-4 with 64 bits."""

class EventChunks:
    """
    Finds out whether bytes of a chunked HTTP/1.1 body can be passed on as they came. Marks are prepared once.
    """

    def __init__(self, marks: Sequence[bytes]) -> None: ...

    def body_bytes(self, data: bytes) -> int:
        """
        How many bytes of body `data` has, where it is whole chunks of whole events in which no mark occurs; otherwise 0. The last
        chunk, of size 0, and chunk extensions are never among them.
        """

JSON_DEPTH_MAX: int = 512

JSON_MEMBERS_MAX: int = 1024

JSON_INTEGER_DIGITS_MAX: int = 4300

JSON_HELD_GIL_BYTES: int = 16384

CHAIN_BYTES: int = 2048

CHAIN_ID_BYTES: int = 4

CHAIN_KEYS_MAX: int = 4096

class UcxProbe:
    """What a UCX library can do on this host."""

    @property
    def obstacle(self) -> str:
        """Why it cannot be used; empty: it can."""

    @property
    def version(self) -> str:
        """Empty if it could not be loaded."""

    @property
    def path(self) -> str:
        """
        The path of the loaded library, which is the first that this process asked for.
        """

    @property
    def transports(self) -> list[str]:
        """UCX's names of our context's transports."""

    @property
    def has_rdma(self) -> bool: ...

    @property
    def has_cuda(self) -> bool:
        """It recognises device memory."""

def probe_ucx(path: str, *, tls: str = '') -> UcxProbe:
    """
    Loads the libucp at `path` into this process, permanently, and queries it. `tls`: as UCX_TLS; empty: a core's default.
    """
