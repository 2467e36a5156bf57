"""What a failure looks like over HTTP: OpenAI's error object plus ``retryable``, and the status that goes with it.

Decides the body and the status for an exception of kvxfer's tree; it must never know which server is answering,
and never puts a traceback or an internal address into a message.
"""

from __future__ import annotations

from typing import Any

from kvxfer.errors import (
    AuthenticationError,
    ClosedError,
    DeadlineExceededError,
    DoesNotFitError,
    ForbiddenError,
    InvalidArgumentError,
    KvxferError,
    LimitExceededError,
    MembershipEndedError,
    NoWorkerError,
    OverloadedError,
    TransportError,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

_STATUS: tuple[tuple[type[KvxferError], int], ...] = (
    (InvalidArgumentError, 400),
    (AuthenticationError, 401),
    (ForbiddenError, 403),
    (OverloadedError, 503),
    (NoWorkerError, 503),
    (ClosedError, 503),
    (LimitExceededError, 503),
    (DeadlineExceededError, 504),
    (MembershipEndedError, 502),
    (TransportError, 502),
)


class RequestError(InvalidArgumentError):
    """A client's request is wrong. ``param`` names the field (dotted path, or None for the whole body).

    ``status`` is 4xx; ``error_code`` stands in the body's ``code`` (``invalid_argument`` unless a client
    may want to tell it apart, such as ``model_not_found``), ``kind`` in its ``type`` where that is not
    ``invalid_request_error``. ``retry_after_s`` is given where waiting so long helps.
    """

    kind: str | None = None
    retry_after_s: int | None = None

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, error_code: str = InvalidArgumentError.code
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.error_code = error_code


def status_for(error: BaseException) -> int:
    """The HTTP status of an error; anything that is not a KvxferError is a 500."""
    if isinstance(error, RequestError):
        return error.status
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return 500


def error_body(
    error: BaseException | str,
    *,
    param: str | None = None,
    code: str | None = None,
    kind: str | None = None,
    retryable: bool | None = None,
) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code", "retryable"}}`` for an exception or a plain message;
    a DoesNotFitError adds ``prompt_tokens`` where it knows them.

    Keywords override what the exception says. An exception from outside kvxfer's tree is an internal error whose
    text stays in the log: the client sees only its class name.
    """
    if isinstance(error, str):
        message = error
    elif isinstance(error, KvxferError):
        message = str(error) or error.code
        retryable = error.retryable if retryable is None else retryable
    else:
        message = f"internal error ({type(error).__name__})"
    if isinstance(error, RequestError):
        param = error.param if param is None else param
        code = code or error.error_code
        kind = kind or error.kind
    elif isinstance(error, KvxferError):
        code = code or error.code
    counted: dict[str, int] = {}
    if isinstance(error, DoesNotFitError):
        param = error.field if param is None else param
        counted = {} if error.prompt_tokens is None else {"prompt_tokens": error.prompt_tokens}
    if kind is None:
        is_client_fault = not isinstance(error, str) and 400 <= status_for(error) < 500
        kind = INVALID_REQUEST if is_client_fault else SERVER_ERROR
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": param,
            "code": code or KvxferError.code,
            "retryable": bool(retryable),
            **counted,
        }
    }
