"""Every exception kvxfer raises, in one tree.

::

    KvxferError
    ├── UsageError                  the call was wrong; fix the caller
    │   ├── InvalidArgumentError         a value is out of range or of the wrong kind
    │   │   ├── DoesNotFitError          a request takes more tokens than this worker, or any worker, holds
    │   │   └── InvalidJsonError         a body is not a JSON object; says where and what is wrong
    │   │       └── JsonTooComplexError  it passes a bound: of depth, members, or digits of an integer
    │   ├── ConfigError             a setting, flag, file or environment variable is wrong
    │   ├── BlocksBusyError              blocks are reserved, granted or quarantined already
    │   ├── LimitExceededError           a stated bound (queue, list, count) would be passed
    │   └── ClosedError                  the object was closed
    ├── PeerError                   the other side said no, or misbehaved
    │   ├── IncompatibleError            pools differ; names the field
    │   │   └── WeightsUnknownError      it cannot be said which weights made the blocks
    │   ├── RefusedError                 the peer declined, with its reason
    │   ├── AuthenticationError    token, certificate or session proof did not match
    │   ├── ForbiddenError               the caller is known, and may not do that
    │   ├── MembershipEndedError         this agent itself is no member of its cluster any more
    │   ├── ProtocolError       bytes that the protocol does not allow
    │   ├── OverloadedError              the peer's bound is reached; try later or elsewhere
    │   └── NoWorkerError                no live worker can take the part
    ├── TransportError              the wire, or the process behind it, failed
    │   ├── PeerGoneError                the peer process died, restarted or is unreachable
    │   ├── DeadlineExceededError        the caller's deadline passed first
    │   ├── LaneUnavailableError         no allowed lane joins this pair
    │   └── CoordinatorUnavailableError  the coordinator cannot be reached
    ├── GrantGoneError                   the source no longer vouches for the bytes
    │   ├── GrantExpiredError
    │   ├── GrantRevokedError
    │   ├── GrantReleasedError
    │   └── GrantUnknownError
    ├── ChecksumMismatchError            bytes arrived, and were wrong
    ├── MemoryGoneError                  registered memory is not mapped any more
    ├── StoreError                  a tier of blocks cannot keep one, or give one back: the engine computes it
    │   ├── BlockMissingError            it was evicted meanwhile, or was never there
    │   ├── BlockDamagedError            what is there is truncated, or not what was written
    │   ├── BlockForeignError            what is there belongs to another model, other weights or another block
    │   ├── StoreFullError               there is no room, and nothing that may be evicted
    │   └── StoreBrokenError             it cannot be read or written at all
    └── TransferCancelledError           the caller cancelled

``code`` is stable: it stands in HTTP error bodies, logs and metric labels. ``retryable`` says
whether the same request may succeed when tried again, perhaps with another peer, as a *new* transfer.
"""

from __future__ import annotations

from typing import ClassVar


class KvxferError(Exception):
    """Base of all errors raised by kvxfer."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False


class UsageError(KvxferError):
    code = "usage"


class InvalidArgumentError(UsageError, ValueError):
    code = "invalid_argument"


class DoesNotFitError(InvalidArgumentError):
    """A request takes more tokens than a worker holds, in its context or in its pool.

    ``field`` is the field of the request that asks for too many. ``prompt_tokens`` is how many tokens the prompt has,
    where it was counted: that, and this code, tell a router to ask a larger worker instead.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, *, field: str | None = None, prompt_tokens: int | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.prompt_tokens = prompt_tokens


class InvalidJsonError(InvalidArgumentError):
    """A body is not a JSON object. ``offset`` is the byte at which that shows, where it is known."""

    code = "invalid_json"

    def __init__(self, message: str, *, offset: int | None = None) -> None:
        super().__init__(message)
        self.offset = offset


class JsonTooComplexError(InvalidJsonError):
    """A body may be JSON, but is nested deeper, or has more members or longer integers, than is looked at."""

    code = "json_too_complex"


class ConfigError(UsageError):
    code = "config"


class BlocksBusyError(UsageError):
    code = "blocks_busy"


class LimitExceededError(UsageError):
    code = "limit_exceeded"


class ClosedError(UsageError):
    code = "closed"


class PeerError(KvxferError):
    code = "peer"


class IncompatibleError(PeerError):
    """The pools of the two sides cannot be joined.

    ``field`` is the first compatibility field that differs, or ``None`` where only the digests are known.
    """

    code = "incompatible"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class WeightsUnknownError(IncompatibleError):
    """Of one side it is not known which weights, or which adapter, its blocks are made with: they equal nothing."""

    code = "weights_unknown"


class RefusedError(PeerError):
    code = "refused"
    retryable = True


class AuthenticationError(PeerError):
    code = "unauthenticated"


class ForbiddenError(PeerError):
    """The other side knows the caller by its certificate, and its role or name does not allow the call."""

    code = "forbidden"


class MembershipEndedError(PeerError):
    """The coordinator has this agent as a member no longer: its certificate was revoked, its token or its role is not
    accepted, or another incarnation has its name. So its peers do not know it: the text says which, and what failed.

    Retryable: another agent may do the same.
    """

    code = "membership_ended"
    retryable = True


class ProtocolError(PeerError):
    code = "protocol"


class OverloadedError(PeerError):
    code = "overloaded"
    retryable = True


class NoWorkerError(PeerError):
    code = "no_worker"
    retryable = True


class TransportError(KvxferError):
    code = "transport"
    retryable = True


class PeerGoneError(TransportError):
    code = "peer_gone"


class DeadlineExceededError(TransportError):
    code = "deadline"


class LaneUnavailableError(TransportError):
    code = "no_lane"
    retryable = False


class CoordinatorUnavailableError(TransportError):
    code = "coordinator_unavailable"


class GrantGoneError(KvxferError):
    code = "grant_gone"
    retryable = True


class GrantExpiredError(GrantGoneError):
    code = "grant_expired"


class GrantRevokedError(GrantGoneError):
    code = "grant_revoked"


class GrantReleasedError(GrantGoneError):
    code = "grant_released"


class GrantUnknownError(GrantGoneError):
    code = "grant_unknown"


class ChecksumMismatchError(KvxferError):
    code = "checksum"
    retryable = True


class MemoryGoneError(KvxferError):
    """Registered memory, of the source or of the destination, was unmapped, or cannot be read or written any more.

    The text names whose it is, and the region or block. Not retryable: no second try finds it before its owner has
    registered what is there now.
    """

    code = "memory_gone"


class StoreError(KvxferError):
    """A tier could not keep a block, or not give it back. Nothing is lost: the engine computes it."""

    code = "store"


class BlockMissingError(StoreError):
    code = "block_missing"


class BlockDamagedError(StoreError):
    code = "block_damaged"


class BlockForeignError(StoreError):
    code = "block_foreign"


class StoreFullError(StoreError):
    code = "store_full"
    retryable = True


class StoreBrokenError(StoreError):
    code = "store_broken"


class TransferCancelledError(KvxferError):
    code = "cancelled"


def _walk(cls: type[KvxferError]) -> list[type[KvxferError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _walk(child))]


BY_CODE: dict[str, type[KvxferError]] = {cls.code: cls for cls in _walk(KvxferError)}
"""Stable code -> exception class; the one place where a code from a wire becomes an exception."""


def from_code(code: str, message: str) -> KvxferError:
    """The exception for a stable code; an unknown code becomes a plain ``KvxferError`` that names it."""
    cls = BY_CODE.get(code)
    if cls is None:
        return KvxferError(f"{message} (unknown error code {code!r})")
    return cls(message)
