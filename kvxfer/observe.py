"""Logging to stderr with named fields, secrets blacked out, and a small hook for traces.

Decides how a log record looks and what of it may be seen; must never know what logs or why. Loggers are the
standard library's, under ``kvxfer.``; fields travel in ``extra``::

    logging.getLogger("kvxfer.router").warning("worker lost", extra={"agent_id": "decode-0", "code": "peer_gone"})

A secret is hidden twice: by the name of its field, and by its value once it was given to :func:`hide`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from kvxfer.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
STYLES = ("text", "json")
HIDDEN = "[hidden]"

_SECRET_FIELD = re.compile(
    r"(?i)token(?!s|_|izer|ise)|secret|password|authorization|cookie|api_?key|session_?key|boot_nonce"
)
_BEARER = re.compile(r"(?i)(bearer\s+)[A-Za-z0-9._~+/=-]+")
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]{0,456})?"
)
"""Of a version after 00 more fields may follow; ``ff`` is no version."""

_hidden_values: set[str] = set()


def hide(secret: bytes | str) -> None:
    """Black out ``secret`` (text; bytes also as hex) in every record from now on. Shorter than 8 is ignored."""
    texts = [secret] if isinstance(secret, str) else [secret.hex(), secret.decode("latin-1").strip()]
    _hidden_values.update(text for text in texts if len(text) >= 8)


def redact(text: str) -> str:
    """``text`` without hidden values and bearer tokens."""
    for value in _hidden_values:
        text = text.replace(value, HIDDEN)
    if "bearer" not in text.lower():  # far cheaper than the expression, which finds nothing then
        return text
    return _BEARER.sub(rf"\g<1>{HIDDEN}", text)


@functools.lru_cache(maxsize=1024)
def _is_secret(name: str) -> bool:
    return _SECRET_FIELD.search(name) is not None


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {
        name: HIDDEN if _is_secret(name) else value
        for name, value in vars(record).items()
        if name not in _STANDARD_FIELDS
    }


@functools.lru_cache(maxsize=2)
def _clock(unix_s: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


class TextFormatter(logging.Formatter):
    """``12:30:01.250 WARNING router: worker lost agent_id=decode-0``; a traceback follows on its own lines."""

    def format(self, record: logging.LogRecord) -> str:
        clock = _clock(int(record.created))
        name = record.name.removeprefix("kvxfer.")
        fields = "".join(f" {key}={_plain(value)}" for key, value in _fields(record).items())
        text = f"{clock}.{int(record.msecs):03d} {record.levelname} {name}: {record.getMessage()}{fields}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return redact(text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (Unix s), ``level``, ``logger``, ``message``, the fields, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return redact(_encode(entry))


_encode = json.JSONEncoder(default=str).encode
_QUOTED = re.compile(r'[ "=\n]')
_NEVER_QUOTED = (int, float, bool, type(None))


def _plain(value: object) -> str:
    text = str(value)
    if type(value) in _NEVER_QUOTED:
        return text
    return json.dumps(text) if not text or _QUOTED.search(text) is not None else text


def configure_logging(*, level: str = "info", style: str = "text", stream: TextIO | None = None) -> None:
    """Send every record of level ``level`` and above to ``stream`` (stderr). Calling it again replaces the set-up.

    Libraries (asyncio, grpc, uvicorn) speak from ``warning`` upward, or from ``level`` where that is higher.
    Raises ConfigError for a level or style that is not in LEVELS or STYLES.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level must be one of {', '.join(LEVELS)}, not {level!r}")
    if style not in STYLES:
        raise ConfigError(f"log style must be one of {', '.join(STYLES)}, not {style!r}")
    # What neither style shows is not looked for; the first is the way that the documentation of `logging` names.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("kvxfer").setLevel(level.upper())


def configured() -> tuple[str, str]:
    """The level and the style that were set, for a child process that logs as this one does."""
    level = logging.getLevelName(logging.getLogger("kvxfer").getEffectiveLevel()).lower()
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
    return (level if level in LEVELS else "info"), ("json" if is_json else "text")


def log_in_host_program() -> None:
    """In a program that is not kvxfer's: write kvxfer's records to stderr in kvxfer's format, unless the program
    handles them already."""
    logger = logging.getLogger("kvxfer")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(TextFormatter())
        logger.addHandler(handler)


@dataclasses.dataclass(frozen=True)
class Span:
    """One finished piece of work: when it began (Unix ns), how long it took, and what it was about."""

    name: str
    started_unix_ns: int
    duration_ns: int
    attributes: Mapping[str, Any]
    error: str | None
    """Class name of the exception that ended it, or its code; None where it went well."""
    parent: str | None = None
    """The W3C ``traceparent`` of the request that it is a part of, or None."""


_sinks: list[Callable[[Span], None]] = []


@contextlib.contextmanager
def spans_to(sink: Callable[[Span], None]) -> Iterator[None]:
    """Within the block, call ``sink`` with every span that ends, on the thread on which it ends."""
    _sinks.append(sink)
    try:
        yield
    finally:
        _sinks.remove(sink)


class OpenSpan:
    """Work that begins in one place and ends in another. ``parent``: the ``traceparent`` of its request."""

    def __init__(self, name: str, parent: str | None = None, /, **attributes: Any) -> None:
        self.attributes = attributes
        self._name = name
        self._parent = parent
        self._started_unix_ns = time.time_ns()
        self._begin_ns = time.monotonic_ns()
        self._has_ended = False

    def end(self, error: str | None = None, **attributes: Any) -> None:
        """It is over, with more ``attributes``. The first call counts."""
        if self._has_ended:
            return
        self._has_ended = True
        if not _sinks:
            return
        duration_ns = time.monotonic_ns() - self._begin_ns
        done = Span(
            self._name, self._started_unix_ns, duration_ns, {**self.attributes, **attributes}, error, self._parent
        )
        for sink in tuple(_sinks):
            sink(done)


@contextlib.contextmanager
def span(name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
    """Measure the block. It yields the attributes, to which the block may add. Costs next to nothing without a sink."""
    if not _sinks:
        yield attributes
        return
    opened = OpenSpan(name, **attributes)
    try:
        yield opened.attributes
    except BaseException as caught:
        opened.end(type(caught).__name__)
        raise
    opened.end()


def traceparent_of(text: object) -> str | None:
    """A valid W3C ``traceparent`` as version 00 says it, which is what a program of that version passes on of one of a
    later version; None where ``text`` is none."""
    match = _TRACEPARENT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    if version == "00":
        return None if more else match.string
    return f"00-{trace_id}-{parent_id}-{int(flags, 16) & 1:02x}"


def is_traceparent(text: object) -> bool:
    """Whether it is a valid W3C ``traceparent``, of any version."""
    return traceparent_of(text) is not None


def next_traceparent(received: str | None) -> str:
    """A W3C ``traceparent`` for the next leg: the received trace with a new span id, or a new trace where none came."""
    known = traceparent_of(received)
    trace_id = known[3:35] if known is not None else secrets.token_hex(16)
    return f"00-{trace_id}-{secrets.token_hex(8)}-01"
