"""How a leg can fail, as a value: what the client would be told, and what the router may still do about it.

Decides whether a failure is the client's, the worker's or the wire's; it must never know which attempt it belongs to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import re
from collections.abc import Iterator
from typing import Any

from kvxfer.errors import (
    AuthenticationError,
    DeadlineExceededError,
    DoesNotFitError,
    ForbiddenError,
    KvxferError,
    OverloadedError,
    PeerGoneError,
    ProtocolError,
)
from kvxfer.openai.errors import INVALID_REQUEST, SERVER_ERROR, error_body, status_for
from kvxfer.openai.sse import encode_object
from kvxfer.router.fleet.kinds import failure_kind
from kvxfer.router.upstream import UpstreamError, UpstreamPhase

TOO_LARGE = 413
TOO_MANY = 429
INTERNAL = 500
BAD_GATEWAY = 502
UNAVAILABLE = 503

REFUSED = "refused"
"""The code of a worker's 4xx that has none."""
NOT_LET_IN = frozenset({AuthenticationError.code, ForbiddenError.code})
"""Codes by which a worker refuses the router, and not the client."""
CODE_CHARS_MAX = 128
_TOKENS_MAX = 1 << 40
_STATUS = re.compile(r"[45][0-9]{2}")
_TOO_LONG = re.compile(
    r"('max_tokens' or 'max_completion_tokens' is too large: \d+\. )?This model's maximum context length is \d+ tokens"
    r"|You passed \d+ input (tokens|characters) and requested \d+ output tokens\. However, the model's context length"
    r"|(max_tokens|max_completion_tokens|truncate_prompt_tokens)=-?\d+ ?cannot be greater than max_model_len\b"
    r"|The (decoder|encoder) prompt \(length \d+\) (plus the number of requested output tokens \(at least 1\) )?"
    r"is longer than the maximum model length of \d+"
    r"|The input \(\d+ tokens\) is longer than the model's context length \(\d+ tokens\)"
    r"|Requested token count exceeds the model's maximum context length of \d+ tokens"
)
"""How vLLM begins to say it (renderers/params.py, v1/engine/input_processor.py up to 0.32), and SGLang
(managers/tokenizer_manager.py of 0.5.23): they have no code for it. Only from its first word on: other messages quote
the request, whose words are the client's."""


class LegFailed(Exception):
    """Leaves a leg that failed; ``failure`` says how. It never leaves the router."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code)
        self.failure = failure


class FailureKind(enum.StrEnum):
    """What went wrong with a leg."""

    UNREACHABLE = "unreachable"
    """The connection was refused or could not be made: the worker never saw the request."""
    LOST = "lost"
    """The answer ended too early: the worker died, or left."""
    UNREAD = "unread"
    """The connection broke before an answer began. That says nothing of the worker: it may be well, and have hung up on
    a body of that size, or on one connection too many. One that died refuses the next connection."""
    EXHAUSTED = "exhausted"
    """This router could open no connection: it lacks descriptors, memory or ports, and the worker is not to blame."""
    CONNECT_TIMEOUT = "connect_timeout"
    """The connection was not made in time: the worker, or the way to it, may only be busy."""
    OVERRAN = "overran"
    """The request's own time ran out."""
    HUNG = "hung"
    """The worker has the request, and a deadline passed: for its first byte, or between two."""
    GONE = "gone"
    """The coordinator says that this incarnation of the worker ended."""
    REFUSED = "refused"
    """The worker's own 4xx: the request is at fault, and no other worker would take it."""
    DOES_NOT_FIT = "does_not_fit"
    """The worker's own 4xx too, and a larger worker may take it: that says something of the worker's size only."""
    TOO_LONG = "too_long"
    """The answer passes a bound of the router's: the request asked for so much, and another worker's is no shorter."""
    OVERLOADED = "overloaded"
    """The worker answered that it takes nothing now."""
    ERROR = "error"
    """The worker answered an error of its own."""
    MALFORMED = "malformed"
    """The worker answered something that is not the protocol."""


_UNSENT = frozenset({FailureKind.UNREACHABLE, FailureKind.CONNECT_TIMEOUT, FailureKind.EXHAUSTED})
_GONE = frozenset(
    {FailureKind.UNREACHABLE, FailureKind.CONNECT_TIMEOUT, FailureKind.UNREAD, FailureKind.LOST, FailureKind.GONE}
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """One leg's failure: ``status`` and ``body`` are what the client gets where nothing else is tried."""

    kind: FailureKind
    status: int
    body: dict[str, Any]

    @property
    def code(self) -> str:
        """For logs and spans: without what is beyond CODE_CHARS_MAX of one that an engine wrote."""
        return str(self.body["error"]["code"])[:CODE_CHARS_MAX]

    @property
    def is_retryable(self) -> bool:
        """Whether even the same worker may succeed when asked again."""
        return bool(self.body["error"]["retryable"])

    @property
    def is_final(self) -> bool:
        """Whether the client is to be told at once: another worker would say the same."""
        return self.kind in (FailureKind.REFUSED, FailureKind.TOO_LONG)

    @property
    def is_of_size(self) -> bool:
        """Whether the worker only is too small for the request."""
        return self.kind is FailureKind.DOES_NOT_FIT

    @property
    def is_of_gone(self) -> bool:
        """Whether the leg ended as that of a worker that is gone."""
        return self.kind in _GONE

    @property
    def is_unsent(self) -> bool:
        """Whether the worker has not got the request."""
        return self.kind in _UNSENT

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the prompt has, where a worker too small for it counted them."""
        counted = self.body["error"].get("prompt_tokens")
        return counted if self.is_of_size and type(counted) is int and 0 < counted < _TOKENS_MAX else None

    @property
    def is_unexplained(self) -> bool:
        """Whether the worker says no more than that it failed (vLLM, of a request that its engine failed), or that
        another one did."""
        is_told = self.status in (INTERNAL, BAD_GATEWAY) and self.code == str(self.status)
        return self.kind is FailureKind.ERROR and is_told


def from_error(kind: FailureKind, error: KvxferError) -> Failure:
    """A failure that the router noticed itself."""
    return Failure(kind, status_for(error), error_body(error))


def unreachable(what: str) -> Failure:
    return from_error(FailureKind.UNREACHABLE, PeerGoneError(f"the {what} worker cannot be reached"))


def lost(what: str) -> Failure:
    return from_error(FailureKind.LOST, PeerGoneError(f"the {what} worker was lost before it was done"))


def unread(what: str) -> Failure:
    return from_error(FailureKind.UNREAD, PeerGoneError(f"the {what} worker hung up on the request"))


def out_of_sockets() -> Failure:
    return from_error(FailureKind.EXHAUSTED, OverloadedError("the router can open no more connections to workers"))


def hung(what: str, phase: UpstreamPhase) -> Failure:
    """A deadline passed at the worker, while its connection stood."""
    where = "stopped in the middle of its answer"
    if phase is UpstreamPhase.FIRST_BYTE:
        where = "sent no first byte"
    elif phase is UpstreamPhase.SEND:
        where = "took too little of the request"
    return from_error(FailureKind.HUNG, DeadlineExceededError(f"the {what} worker {where} for too long"))


def from_upstream(what: str, error: UpstreamError) -> Failure:
    """The failure that an error of the upstream client stands for."""
    kind = FailureKind(failure_kind(error))
    if kind in (FailureKind.UNREACHABLE, FailureKind.CONNECT_TIMEOUT):
        return dataclasses.replace(unreachable(what), kind=kind)
    if kind is FailureKind.EXHAUSTED:
        return out_of_sockets()
    if kind is FailureKind.HUNG:
        return hung(what, error.phase)
    if kind is FailureKind.UNREAD:
        return unread(what)
    if kind is FailureKind.MALFORMED:
        return malformed(what, "no HTTP answer, or one beyond the bounds")
    if kind is FailureKind.GONE:
        return gone(what)
    return lost(what)


@contextlib.contextmanager
def of_upstream(what: str) -> Iterator[None]:
    """Turns the upstream client's errors into LegFailed."""
    try:
        yield
    except UpstreamError as error:
        raise LegFailed(from_upstream(what, error)) from None


def gone(what: str) -> Failure:
    return from_error(FailureKind.GONE, PeerGoneError(f"the {what} worker is gone"))


def malformed(what: str, reason: str) -> Failure:
    body = error_body(ProtocolError(f"the {what} worker's answer is malformed: {reason}"))
    return Failure(FailureKind.MALFORMED, BAD_GATEWAY, body)


def too_long(what: str, reason: str) -> Failure:
    return dataclasses.replace(malformed(what, reason), kind=FailureKind.TOO_LONG)


def of_handover(error: ProtocolError) -> Failure:
    """P answered, and not what D needs."""
    return Failure(FailureKind.MALFORMED, BAD_GATEWAY, error_body(error))


def from_answer(what: str, status: int, content: bytes) -> Failure:
    """The failure that a worker's own HTTP answer (not a 200) stands for; its error object is kept as it is."""
    body = _error_object(content, status)
    if body is not None and body["error"]["code"] in NOT_LET_IN:
        said = f"the {what} worker takes no requests of this router: {body['error']['message']}"
        return Failure(FailureKind.ERROR, BAD_GATEWAY, error_body(said, code=body["error"]["code"], retryable=True))
    is_busy = status == TOO_MANY or (status == UNAVAILABLE and (body is None or _says_busy(body)))
    if is_busy and body is None:
        body = error_body(OverloadedError(f"the {what} worker takes no more requests"))
    if is_busy and body is not None:
        body["error"]["retryable"] = True
        return Failure(FailureKind.OVERLOADED, UNAVAILABLE, body)
    if 400 <= status < 500:
        if body is None:
            body = error_body(f"the {what} worker refused the request ({status})", kind=INVALID_REQUEST, code=REFUSED)
        if _says_too_long(body) or status == TOO_LARGE:
            return Failure(FailureKind.DOES_NOT_FIT, status, body)
        kind = FailureKind.ERROR if body["error"]["retryable"] else FailureKind.REFUSED
        return Failure(kind, status, body)
    if body is None:
        body = error_body(f"the {what} worker answered {status}")
    return Failure(FailureKind.ERROR, status if 500 <= status < 600 else BAD_GATEWAY, body)


def from_event(what: str, content: bytes) -> Failure | None:
    """The failure that an event of a stream stands for, or None where it is no error event."""
    if b'"error"' not in content:
        return None
    body = _error_object(content)
    if body is None:
        return None
    if _says_too_long(body):
        return Failure(FailureKind.DOES_NOT_FIT, 400, body)
    if body["error"]["type"] == INVALID_REQUEST:
        return Failure(FailureKind.REFUSED, 400, body)
    if body["error"]["code"] == OverloadedError.code:
        return Failure(FailureKind.OVERLOADED, UNAVAILABLE, body)
    status = _status_in(body["error"]["code"])
    if status in (TOO_MANY, UNAVAILABLE):
        body["error"]["retryable"] = True
        return Failure(FailureKind.OVERLOADED, UNAVAILABLE, body)
    if status == TOO_LARGE:
        return Failure(FailureKind.DOES_NOT_FIT, status, body)
    if 400 <= status < 500:
        return Failure(FailureKind.REFUSED, status, body)
    return Failure(FailureKind.ERROR, 500, body)


def _says_busy(body: dict[str, Any]) -> bool:
    """Whether a 503 means that the worker takes nothing now. A worker of kvxfer's says what else it may mean by a code
    of its own; other engines have none."""
    error = body["error"]
    return bool(error["retryable"]) or error["code"] in (str(UNAVAILABLE), KvxferError.code)


def _status_in(code: str) -> int:
    """The HTTP status that vLLM and SGLang write as an error's code; 0 for another code."""
    return int(code) if _STATUS.fullmatch(code) else 0


def _says_too_long(body: dict[str, Any]) -> bool:
    """Whether the error is the worker's size; where it says so in words only, the code is written into it."""
    error = body["error"]
    if error["code"] == "400" and _TOO_LONG.match(error["message"]):
        error |= {"code": DoesNotFitError.code, "type": INVALID_REQUEST}
    is_too_long: bool = error["code"] == DoesNotFitError.code
    return is_too_long


def _error_object(content: bytes, status: int = INTERNAL) -> dict[str, Any] | None:
    """OpenAI's error object out of a worker's bytes, made whole as one of that ``status``; None where there is none
    that can be passed on."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    error = _error_in(body)
    if error is None:
        return None
    param = error.get("param")
    is_refusal = status < INTERNAL and status != TOO_MANY
    kind, code = (INVALID_REQUEST, REFUSED) if is_refusal else (SERVER_ERROR, KvxferError.code)
    whole = {
        **error,
        "type": str(error.get("type") or kind),
        "param": param if isinstance(param, str) else None,
        "code": str(error.get("code") or code),
        "retryable": error.get("retryable") is True,
    }
    try:
        encode_object(whole)
    except (ValueError, RecursionError):
        return None
    return {"error": whole}


def _error_in(body: Any) -> dict[str, Any] | None:
    """The object with the message: under ``error``, or itself (SGLang's routes of OpenAI's API answer
    ``{"object": "error", "message": ...}``), or FastAPI's ``{"detail": ...}``."""
    if not isinstance(body, dict):
        return None
    if isinstance(body.get("detail"), str):
        return {"message": body["detail"]}
    error = body if body.get("object") == "error" else body.get("error")
    return error if isinstance(error, dict) and isinstance(error.get("message"), str) else None
