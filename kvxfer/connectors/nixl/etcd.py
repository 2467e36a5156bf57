"""Metadata through etcd, by the keys that NIXL uses, over etcd's own HTTP gateway (v3 API) with the standard library.
Decides keys and bounds; must never know what a blob holds.

Who can read the namespace can reach the agents in it: their metadata is a capability.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from kvxfer.connectors.nixl.errors import nixlBackendError, nixlInvalidParamError
from kvxfer.connectors.nixl.metadata import BLOB_BYTES_MAX

REQUEST_S = 5.0
RETRY_S = 1.0
log = logging.getLogger("nixl.kvxfer")


class EtcdClient:
    """One namespace behind some endpoints, the first that answers is used. Thread-safe."""

    NAME = "etcd"

    def __init__(self, endpoints: str, namespace: str) -> None:
        """``endpoints``: URLs, separated by ``,`` or ``;``. Raises nixlInvalidParamError."""
        self._namespace = namespace
        self._endpoints = [self._parse(text.strip()) for text in endpoints.replace(";", ",").split(",") if text.strip()]
        if not self._endpoints:
            raise nixlInvalidParamError("NIXL_ETCD_ENDPOINTS names no endpoint")

    def key(self, agent: str, label: str = "") -> str:
        return f"{self._namespace}/{agent}/{label}"

    def put(self, agent: str, label: str, blob: bytes) -> None:
        """Raises nixlBackendError."""
        self._ask("kv/put", {"key": _encode(self.key(agent, label).encode()), "value": _encode(blob)})

    def get(self, agent: str, label: str) -> bytes | None:
        """None where there is nothing, or nothing yet. Raises nixlBackendError."""
        return first_value(self._ask("kv/range", {"key": _encode(self.key(agent, label).encode())}))

    def delete(self, agent: str) -> None:
        """All labels of an agent. Raises nixlBackendError."""
        prefix = self.key(agent).encode()
        self._ask("kv/deleterange", {"key": _encode(prefix), "range_end": _encode(_after(prefix))})

    def close(self) -> None:
        """Nothing is open between two calls."""

    def agent_of(self, key: bytes) -> str | None:
        """Whose key it is."""
        begin, text = self._namespace + "/", key.decode(errors="replace")
        name, _, label = text[len(begin) :].rpartition("/")
        return name if text.startswith(begin) and name and label else None

    def open_watch(self) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A stream of what happens in the namespace, one JSON object a line. Raises nixlBackendError."""
        prefix = (self._namespace + "/").encode()
        body = {"create_request": {"key": _encode(prefix), "range_end": _encode(_after(prefix)), "filters": ["NOPUT"]}}
        return self._send("watch", body, None)

    def _ask(self, path: str, body: dict[str, Any]) -> bytes:
        connection, response = self._send(path, body, REQUEST_S)
        try:
            text = response.read(BLOB_BYTES_MAX * 2)
        except (OSError, http.client.HTTPException) as error:
            raise nixlBackendError(f"etcd: {path}: {error}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise nixlBackendError(f"etcd: {path}: HTTP {response.status}: {text[:200]!r}")
        return text

    def _send(
        self, path: str, body: dict[str, Any], timeout_s: float | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        text = json.dumps(body)
        reason = ""
        for url in self._endpoints:
            kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
            connection = kind(url.hostname or "", url.port or 2379, timeout=REQUEST_S)
            try:
                connection.request("POST", f"/v3/{path}", text, {"Content-Type": "application/json"})
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s)
                return connection, connection.getresponse()
            except (OSError, UnicodeError, http.client.HTTPException) as error:
                reason = f"{url.netloc}: {error}"
                connection.close()
        raise nixlBackendError(f"etcd cannot be reached: {reason}")

    @staticmethod
    def _parse(text: str) -> urllib.parse.SplitResult:
        try:
            url = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
            if url.scheme in ("http", "https") and url.hostname is not None and (url.port or 1) > 0:
                return url
        except ValueError:
            pass
        raise nixlInvalidParamError(f"NIXL_ETCD_ENDPOINTS: {text!r:.200} is no http(s)://host:port")


class EtcdWatch:
    """Tells of agents that took their metadata back, on a thread of its own, until :meth:`close`."""

    def __init__(self, client: EtcdClient, on_gone: Callable[[str], None]) -> None:
        self._client = client
        self._on_gone = on_gone
        self._closed = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._thread = threading.Thread(target=self._run, name="nixl-etcd-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(REQUEST_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._connection, response = self._client.open_watch()
                if self._closed.is_set():
                    return
                self._follow(response)
            except (nixlBackendError, OSError, ValueError, http.client.HTTPException) as error:
                if not self._closed.is_set():
                    log.warning("the watch of etcd broke off: %s", error)
            finally:
                if self._connection is not None:
                    self._connection.close()
            self._closed.wait(RETRY_S)

    def _follow(self, response: http.client.HTTPResponse) -> None:
        for line in iter(lambda: response.readline(1 << 20), b""):
            for key in deleted_keys(line):
                agent = self._client.agent_of(key)
                if agent is not None:
                    self._on_gone(agent)


def first_value(text: bytes) -> bytes | None:
    """Of the first key in the answer to a range request; None where there is none, or it is empty. Raises
    nixlBackendError."""
    with _read(text) as answer:
        found = answer.get("kvs") or []
        return base64.b64decode(found[0].get("value", "")) or None if found else None


def deleted_keys(line: bytes) -> list[bytes]:
    """Of one line of a watch. Raises nixlBackendError."""
    with _read(line) as answer:
        events = (answer.get("result") or {}).get("events") or []
        return [base64.b64decode(event["kv"]["key"]) for event in events if event.get("type") == "DELETE"]


@contextlib.contextmanager
def _read(text: bytes) -> Iterator[Any]:
    """JSON from whatever answers at the endpoint's address: what is not as etcd says it is one error."""
    try:
        yield json.loads(text)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise nixlBackendError(f"etcd answered {text[:200]!r}: {error}") from None


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _after(prefix: bytes) -> bytes:
    """The first key that does not begin with ``prefix``: etcd's way to name a range."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
