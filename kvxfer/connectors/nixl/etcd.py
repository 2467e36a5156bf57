"""Metadata through etcd, by the keys that NIXL uses, over aetcd's gRPC stubs (the extra ``kvxfer[etcd]``). Decides keys
and bounds; must never know what a blob holds. ADR 21 says why aetcd's own client is not used.

A process that can read the namespace can reach the agents in it: their metadata is a capability.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
import urllib.parse
from collections.abc import Callable
from typing import Any

import grpc

from kvxfer.connectors.nixl.errors import nixlBackendError, nixlInvalidParamError
from kvxfer.connectors.nixl.metadata import BLOB_BYTES_MAX

REQUEST_S = 5.0
RETRY_S = 1.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", BLOB_BYTES_MAX * 2),
    ("grpc.max_send_message_length", BLOB_BYTES_MAX * 2),
    ("grpc.use_local_subchannel_pool", 1),  # an endpoint that was down is dialled by the next call
    ("grpc.enable_http_proxy", 0),
)
log = logging.getLogger("nixl.kvxfer")


class EtcdClient:
    """One namespace behind some endpoints; the first endpoint that answers is used. Thread-safe."""

    NAME = "etcd"

    def __init__(self, endpoints: str, namespace: str) -> None:
        """``endpoints``: URLs, separated by ``,`` or ``;``. Raises nixlInvalidParamError."""
        self._namespace = namespace
        self._endpoints = [_parse(text.strip()) for text in endpoints.replace(";", ",").split(",") if text.strip()]
        if not self._endpoints:
            raise nixlInvalidParamError("NIXL_ETCD_ENDPOINTS names no endpoint")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        self._stream: Any = None

    def open(self) -> None:
        """Raises nixlBackendError where aetcd is not installed, or cannot be loaded."""
        aetcd_rpc()

    def key(self, agent: str, label: str = "") -> str:
        return f"{self._namespace}/{agent}/{label}"

    def put(self, agent: str, label: str, blob: bytes) -> None:
        """Raises nixlBackendError."""
        self._ask("Put", aetcd_rpc().PutRequest(key=self.key(agent, label).encode(), value=blob))

    def get(self, agent: str, label: str) -> bytes | None:
        """None where there is nothing, or nothing yet. Raises nixlBackendError."""
        found = self._ask("Range", aetcd_rpc().RangeRequest(key=self.key(agent, label).encode())).kvs
        return found[0].value or None if found else None

    def delete(self, agent: str) -> None:
        """All labels of an agent. Raises nixlBackendError."""
        self._ask("DeleteRange", aetcd_rpc().DeleteRangeRequest(**_range(self.key(agent))))

    def agent_of(self, key: bytes) -> str | None:
        """The agent that the key belongs to."""
        begin, text = self._namespace + "/", key.decode(errors="replace")
        name, _, label = text[len(begin) :].rpartition("/")
        return name if text.startswith(begin) and name and label else None

    def watch(self, on_gone: Callable[[str], None]) -> None:
        """Call ``on_gone``, on a thread of the client's own, for each agent that takes its metadata back, until
        :meth:`close`. Callable again, with the same ``on_gone``."""
        with self._lock:
            if self._watcher is None and not self._closed.is_set():
                self._watcher = threading.Thread(None, self._watch, "nixl-etcd-watch", (on_gone,), daemon=True)
                self._watcher.start()

    def close(self) -> None:
        """End the watch. Between two calls nothing else is open."""
        with self._lock:
            self._closed.set()
            watcher, stream = self._watcher, self._stream
        if stream is not None:
            stream.cancel()
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join(REQUEST_S)

    def _ask(self, method: str, request: Any) -> Any:
        reason = ""
        for url in self._endpoints:
            with open_channel(url) as channel:
                try:
                    return getattr(aetcd_rpc().KVStub(channel), method)(request, timeout=REQUEST_S)
                except grpc.RpcError as error:
                    reason = f"{url.netloc}: {_text_of(error)}"
        raise nixlBackendError(f"etcd cannot be asked: {method}: {reason}")

    def _watch(self, on_gone: Callable[[str], None]) -> None:
        tries = 0
        while not self._closed.is_set():
            try:
                self._follow(self._endpoints[tries % len(self._endpoints)], on_gone)
            except (grpc.RpcError, nixlBackendError) as error:
                if not self._closed.is_set():
                    log.warning("the watch of etcd broke off: %s", _text_of(error))
            tries += 1
            self._closed.wait(RETRY_S)

    def _follow(self, url: urllib.parse.SplitResult, on_gone: Callable[[str], None]) -> None:
        """Until etcd ends the watch or the stream. Raises grpc.RpcError, nixlBackendError."""
        rpc, requests = aetcd_rpc(), queue.SimpleQueue[Any]()
        create = rpc.WatchCreateRequest(**_range(self._namespace + "/"), filters=["NOPUT"])
        requests.put(rpc.WatchRequest(create_request=create))
        with open_channel(url) as channel:
            stream = rpc.WatchStub(channel).Watch(iter(requests.get, None))
            with self._lock:
                self._stream = stream
            try:
                for answer in () if self._closed.is_set() else stream:
                    for event in answer.events:
                        agent = self.agent_of(event.kv.key)
                        if event.type == event.DELETE and agent is not None:
                            on_gone(agent)
                    if answer.canceled:
                        return
            finally:
                requests.put(None)
                stream.cancel()


def aetcd_rpc() -> Any:
    """aetcd's messages and stubs. Raises nixlBackendError."""
    try:
        return importlib.import_module("aetcd.rpc")
    except ImportError:
        raise nixlBackendError("metadata through etcd needs aetcd: install it, or kvxfer with its extra etcd") from None
    except TypeError as error:  # protobuf refuses a second rpc.proto in one process
        raise nixlBackendError(f"aetcd cannot be loaded beside another client of etcd: {error}") from None


def open_channel(url: urllib.parse.SplitResult) -> grpc.Channel:
    host = url.netloc.rpartition("@")[2]
    target = host if url.port is not None else f"{host.rstrip(':')}:2379"
    if url.scheme == "https":
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(), CHANNEL_OPTIONS)
    return grpc.insecure_channel(target, CHANNEL_OPTIONS)


def _parse(text: str) -> urllib.parse.SplitResult:
    try:
        url = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
        if url.scheme in ("http", "https") and url.hostname is not None and (url.port or 1) > 0:
            return url
    except ValueError:
        pass
    raise nixlInvalidParamError(f"NIXL_ETCD_ENDPOINTS: {text!r:.200} is no http(s)://host:port")


def _range(prefix: str) -> dict[str, bytes]:
    """All keys that begin so: etcd's way to name them is the first key after them."""
    key = prefix.encode()
    return {"key": key, "range_end": key[:-1] + bytes([key[-1] + 1])}


def _text_of(error: Exception) -> str:
    """In one line; gRPC's own text has many."""
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
