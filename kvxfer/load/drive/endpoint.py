"""Where requests go: the address, the head of a request, whether anything answers there, and which model it serves.

Decides what a user is told of an endpoint that cannot be used. It must never know a workload.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import pathlib
import socket
import ssl
from urllib.parse import urlsplit

from kvxfer.errors import AuthenticationError, ConfigError, PeerGoneError, ProtocolError
from kvxfer.load.options import ApiKind, TargetOptions

CONNECT_S = 5.0
"""How long the first connection may take."""
ANSWER_S = 30.0
ROUTES = {ApiKind.COMPLETIONS: "/v1/completions", ApiKind.CHAT: "/v1/chat/completions"}


@dataclasses.dataclass(frozen=True)
class LoadEndpoint:
    """A target whose name was looked up and which took a connection."""

    url: str
    family: int
    address: tuple[object, ...]
    """As the socket module has it."""
    host: str
    """Of the URL, without its port: what a certificate must be for."""
    is_tls: bool
    ca_file: str
    head: bytes
    """The head of each request, up to what differs between requests."""

    def context(self) -> ssl.SSLContext | None:
        """Raises ConfigError for certificates that cannot be read."""
        return tls_context(self.ca_file) if self.is_tls else None


def tls_context(ca_file: str) -> ssl.SSLContext:
    """Raises ConfigError for certificates that cannot be read."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca_file {ca_file!r} cannot be used: {error}") from None


def api_key(target: TargetOptions) -> str:
    """Empty where there is none. Raises ConfigError for a file that cannot be read, or has no key."""
    if not target.api_key_file:
        return ""
    try:
        key = pathlib.Path(target.api_key_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file cannot be read: {error}") from None
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"api_key_file {target.api_key_file!r} has no key of one line")
    return key


def base_path(url: str) -> str:
    """What stands before ``/v1``; a URL may end with it."""
    return urlsplit(url).path.rstrip("/").removesuffix("/v1").rstrip("/")


def find(target: TargetOptions) -> LoadEndpoint:
    """Look the name up and connect once.

    Raises PeerGoneError where nothing takes a connection within CONNECT_S, and ConfigError for a key or certificates
    that cannot be read.
    """
    parts = urlsplit(target.url)
    host = parts.hostname or ""
    is_tls = parts.scheme == "https"
    if is_tls:
        tls_context(target.ca_file)
    port = parts.port or (443 if is_tls else 80)
    family, address = _connected(target.url, host, port)
    shown = f"[{host}]" if ":" in host else host
    lines = [
        f"POST {base_path(target.url)}{ROUTES[target.api]} HTTP/1.1",
        f"host: {shown}:{port}",
        "user-agent: kvxfer-load",
        "content-type: application/json",
        "accept: text/event-stream, application/json",
        *([f"authorization: Bearer {key}"] if (key := api_key(target)) else []),
        *(["x-kvxfer-account: 1"] if target.account else []),
    ]
    try:
        head = "\r\n".join([*lines, ""]).encode("ascii")
    except UnicodeEncodeError:
        raise ConfigError(f"url has characters that must be escaped: {target.url!r:.200}") from None
    return LoadEndpoint(target.url, family, address, host, is_tls, target.ca_file, head)


def _connected(url: str, host: str, port: int) -> tuple[int, tuple[object, ...]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PeerGoneError(f"the server's name cannot be looked up: {url} ({_said(error)})") from None
    reason = ""
    for family, _, _, _, address in found:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as one:
                one.settimeout(CONNECT_S)
                one.connect(address)
            return int(family), tuple(address)
        except OSError as error:
            reason = reason or _said(error)
    raise PeerGoneError(f"nothing answers at {url}: {reason}")


def first_model(target: TargetOptions) -> str:
    """The first model that ``/v1/models`` lists.

    Raises PeerGoneError where nothing answers, AuthenticationError where the key is refused, ProtocolError for an
    answer that names no model.
    """
    parts = urlsplit(target.url)
    host, route = parts.hostname or "", f"{base_path(target.url)}/v1/models"
    if parts.scheme == "https":
        context = tls_context(target.ca_file)
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, parts.port, timeout=ANSWER_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=ANSWER_S)
    key = api_key(target)
    try:
        connection.request("GET", route, headers={"authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        status, body = answer.status, answer.read(1 << 20)
    except (OSError, http.client.HTTPException) as error:
        raise PeerGoneError(f"nothing answers at {target.url}: {_said(error)}") from None
    finally:
        connection.close()
    if status in (401, 403):
        raise AuthenticationError(f"{target.url} refuses the API key (status {status}): give api_key_file")
    try:
        model = json.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        model = None
    if status != 200 or not isinstance(model, str) or not model:
        raise ProtocolError(f"{target.url} names no model at /v1/models (status {status}): give model")
    return model


def _said(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
