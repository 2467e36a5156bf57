"""NIXL's exceptions under NIXL's names, inside kvxfer's error tree. Decides which of our errors becomes which of
theirs; must never know the operation.

A program may catch NIXL's names as before, or ours: ``nixlRemoteDisconnectError`` is a ``PeerGoneError`` and
``nixlInvalidParamError`` an ``InvalidArgumentError`` (so also a ``ValueError``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvxfer import errors


class nixlError(errors.KvxferError):
    """Base of all that this connector raises; NIXL itself has no such base."""


class nixlNotPostedError(nixlError, errors.UsageError):
    """The transfer was never started."""


class nixlInvalidParamError(nixlError, errors.InvalidArgumentError):
    """A value is wrong; the message says which."""


class nixlBackendError(nixlError, errors.TransportError):
    """The wire, or what is behind it, failed."""


class nixlNotFoundError(nixlError, errors.UsageError):
    """No such agent, backend, registration or memory is known here."""


class nixlMismatchError(nixlError, errors.IncompatibleError):
    """Metadata that is not ours, or of another version."""


class nixlNotAllowedError(nixlError, errors.RefusedError):
    """The peer, or the state of things, does not permit it."""


class nixlRepostActiveError(nixlError, errors.BlocksBusyError):
    """The transfer is still under way."""


class nixlUnknownError(nixlError):
    """None of the other kinds."""


class nixlNotSupportedError(nixlError, errors.LaneUnavailableError):
    """NIXL may do it, this connector does not; or no lane joins the pair."""


class nixlRemoteDisconnectError(nixlError, errors.PeerGoneError):
    """The remote agent died, restarted or cannot be reached."""


class nixlCancelledError(nixlError, errors.TransferCancelledError):
    """The transfer was given up on this side."""


class nixlNoTelemetryError(nixlError, errors.UsageError):
    """Telemetry was not asked for when the agent was made."""


_KINDS: tuple[tuple[type[errors.KvxferError], type[nixlError]], ...] = (
    (errors.BlocksBusyError, nixlRepostActiveError),
    (errors.LimitExceededError, nixlNotAllowedError),
    (errors.UsageError, nixlInvalidParamError),
    (errors.AuthenticationError, nixlNotAllowedError),
    (errors.RefusedError, nixlNotAllowedError),
    (errors.PeerGoneError, nixlRemoteDisconnectError),
    (errors.LaneUnavailableError, nixlNotSupportedError),
    (errors.GrantGoneError, nixlNotAllowedError),
    (errors.TransferCancelledError, nixlCancelledError),
    (errors.PeerError, nixlBackendError),
    (errors.TransportError, nixlBackendError),
    (errors.ChecksumMismatchError, nixlBackendError),
    (errors.MemoryGoneError, nixlBackendError),
    (errors.StoreError, nixlBackendError),
)
"""The first that fits."""


def translate(error: errors.KvxferError) -> nixlError:
    """The exception by NIXL's name that says what ``error`` says, with ``error`` as its cause."""
    if isinstance(error, nixlError):
        return error
    kind = next((theirs for ours, theirs in _KINDS if isinstance(error, ours)), nixlUnknownError)
    translated = kind(str(error))
    translated.__cause__ = error
    return translated


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Errors of kvxfer leave the block by NIXL's names."""
    try:
        yield
    except nixlError:
        raise
    except errors.KvxferError as error:
        raise translate(error) from error
