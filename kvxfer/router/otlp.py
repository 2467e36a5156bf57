"""Sends spans to an OpenTelemetry collector: OTLP over HTTP in its JSON encoding, which needs no package.

Decides what waits (a bounded number of requests; more are dropped and counted), what is sent again, and which of
OpenTelemetry's environment variables count. One thread makes spans and sends them, so that the event loop only appends
to a queue. It must never know what a span means.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import http.client
import json
import logging
import math
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from kvxfer import __version__
from kvxfer.errors import ConfigError
from kvxfer.router.options import RouterOptions
from kvxfer.router.spans import spans_of
from kvxfer.router.tracing import EndedRequest

log = logging.getLogger("kvxfer.router")

WAITING_MAX = 4096
"""Requests whose spans are not sent yet."""
BATCH_MAX = 64
"""Requests whose spans are sent at once."""
INTERVAL_S = 1.0
"""How long an ended request waits for others, at most."""
TRIES = 3
RETRIED = frozenset({429, 502, 503, 504})
"""Answers after which the same spans may be sent again (OTLP's specification)."""
RETRY_S = 0.5
DEFAULT_TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 64 << 10
SERVICE = "kvxfer-router"
_URL = re.compile(r"[!-~]+")
_PREFIX = "OTEL_EXPORTER_OTLP_"


@dataclasses.dataclass(frozen=True)
class OtlpSettings:
    """Where spans go, and as what."""

    url: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    resource: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S
    is_compressed: bool = False
    ca_file: str = ""

    def __post_init__(self) -> None:
        try:
            url = urlsplit(self.url)
            is_good = _URL.fullmatch(self.url) is not None and "@" not in url.netloc
            is_good = is_good and url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            is_good = False
        if not is_good:
            shown = repr(self.url) if "@" not in self.url else "one with a user or an @"  # it may hold a password
            raise ConfigError(f"otlp_endpoint must be http://HOST:PORT or https://HOST:PORT, not {shown}")


def settings(options: RouterOptions, environ: Mapping[str, str] = os.environ) -> OtlpSettings | None:
    """What the options and OpenTelemetry's own variables say; None where no spans are to be sent.

    Raises ConfigError for an endpoint that is no URL. A variable that is wrong otherwise is ignored with a warning, as
    OpenTelemetry has it.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    url = _url(options, environ)
    if not url:
        return None
    resource = {"service.name": SERVICE, "service.version": __version__, "service.instance.id": _instance()}
    resource |= _pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    if environ.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = environ["OTEL_SERVICE_NAME"]
    return OtlpSettings(
        url,
        headers=_pairs(_variable(environ, "HEADERS")),
        resource=resource,
        timeout_s=_timeout_s(_variable(environ, "TIMEOUT")),
        is_compressed=_variable(environ, "COMPRESSION").lower() == "gzip",
        ca_file=_variable(environ, "CERTIFICATE"),
    )


def _url(options: RouterOptions, environ: Mapping[str, str]) -> str:
    if options.otlp_endpoint:
        return _with_path(options.otlp_endpoint)
    if environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
        return ""
    whole, base = environ.get(_PREFIX + "TRACES_ENDPOINT", ""), environ.get(_PREFIX + "ENDPOINT", "")
    if not whole and not base:
        return ""
    if _variable(environ, "PROTOCOL").lower() == "grpc":
        log.warning("no spans are exported: the variables ask for gRPC, and the router speaks OTLP over HTTP")
        return ""
    return whole or _with_path(base)


def _with_path(base: str) -> str:
    return base if base.rstrip("/").endswith("/v1/traces") else base.rstrip("/") + "/v1/traces"


def _variable(environ: Mapping[str, str], name: str) -> str:
    """That of traces, before the common one."""
    return (environ.get(f"{_PREFIX}TRACES_{name}") or environ.get(_PREFIX + name) or "").strip()


def _pairs(text: str) -> dict[str, str]:
    """``a=b,c=d``, with percent-encoded values."""
    found = (part.partition("=") for part in text.split(","))
    return {unquote(key.strip()): unquote(value.strip()) for key, equals, value in found if equals and key.strip()}


def _timeout_s(text: str) -> float:
    """OpenTelemetry's variable is in milliseconds."""
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text) / 1000
    except ValueError:
        seconds = math.nan
    if 0 < seconds <= 300:
        return seconds
    log.warning("OTEL_EXPORTER_OTLP_TIMEOUT is no number of milliseconds up to 300000: %s s count", DEFAULT_TIMEOUT_S)
    return DEFAULT_TIMEOUT_S


def _instance() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


class OtlpExporter:
    """``count`` is told what became of how many requests: ``exported``, ``dropped`` or ``failed``; from any thread."""

    def __init__(
        self,
        where: OtlpSettings,
        count: Callable[[str, int], None],
        *,
        waiting_max: int = WAITING_MAX,
        interval_s: float = INTERVAL_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._where = where
        self._count = count
        self._waiting_max = waiting_max
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._resource = {"attributes": [_attribute(key, value) for key, value in where.resource.items()]}
        self._scope = {"name": "kvxfer.router", "version": __version__}
        self._waiting: collections.deque[EndedRequest] = collections.deque()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._is_well = True
        url = urlsplit(where.url)
        self._target = url.path + (f"?{url.query}" if url.query else "")
        self._tls: ssl.SSLContext | None = None
        if url.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=where.ca_file or None)
            except OSError as error:
                raise ConfigError(f"cannot read the certificates of {where.ca_file}: {error}") from None
        self._thread = threading.Thread(target=self._run, name="kvxfer-otlp", daemon=True)
        self._thread.start()

    def offer(self, ended: EndedRequest) -> None:
        """Have its spans sent, or drop it where too many wait. Never waits."""
        if len(self._waiting) >= self._waiting_max:
            self._count("dropped", 1)
            return
        self._waiting.append(ended)
        if len(self._waiting) == BATCH_MAX:
            self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what waits, for at most ``timeout_s``. Blocks. What is left is dropped."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._waiting:
            self._count("dropped", len(self._waiting))

    def _run(self) -> None:
        while True:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH_MAX, len(self._waiting)))]
                self._count(self._send(batch), len(batch))
            if self._stopping.is_set() and not self._waiting:
                self._close()
                return

    def _send(self, batch: Sequence[EndedRequest]) -> str:
        try:
            content = self._encoded(batch)
        except Exception:
            log.exception("spans could not be made")
            return "failed"
        trouble = ""
        for number in range(TRIES):
            if number and self._stopping.wait(self._retry_s * 2**number):
                break
            try:
                status = self._post(content)
            except (OSError, ValueError, http.client.HTTPException) as error:
                self._close()
                is_told = str(error) and not isinstance(error, ValueError)  # that quotes the header that it refuses
                trouble = str(error) if is_told else type(error).__name__
                continue
            if 200 <= status < 300:
                if not self._is_well:
                    log.info("spans are exported again")
                self._is_well = True
                return "exported"
            trouble = f"status {status}"
            if status not in RETRIED:
                break
        if self._is_well:
            log.warning("spans cannot be exported", extra={"endpoint": self._where.url, "why": trouble})
        self._is_well = False
        return "failed"

    def _encoded(self, batch: Sequence[EndedRequest]) -> bytes:
        spans: list[Any] = []
        for ended in batch:
            spans += spans_of(ended)
        body = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [{"scope": self._scope, "spans": spans}]}]}
        content = json.dumps(body, separators=(",", ":")).encode()
        return gzip.compress(content, 1) if self._where.is_compressed else content

    def _post(self, content: bytes) -> int:
        if self._connection is None:
            self._connection = self._connect()
        headers = {**self._where.headers, "content-type": "application/json"}
        if self._where.is_compressed:
            headers["content-encoding"] = "gzip"
        self._connection.request("POST", self._target, content, headers)
        answer = self._connection.getresponse()
        if len(answer.read(ANSWER_BYTES_MAX)) >= ANSWER_BYTES_MAX:
            self._close()
        return answer.status

    def _connect(self) -> http.client.HTTPConnection:
        url = urlsplit(self._where.url)
        host, timeout_s = url.hostname or "", self._where.timeout_s
        if self._tls is not None:
            return http.client.HTTPSConnection(host, url.port, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection(host, url.port, timeout=timeout_s)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _attribute(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}
