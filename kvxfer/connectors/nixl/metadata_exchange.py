"""Sends and fetches metadata in the background: to an address or, without one, through the store that the environment
names (etcd, a TCPStore). Decides which, and in what order; must never know a blob's form nor a socket's.

As in NIXL the calls return at once and failures are logged: ``check_remote_metadata`` says what has come.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvxfer.connectors.nixl import p2p
from kvxfer.connectors.nixl.dlists import check_text, nixlRegDList
from kvxfer.connectors.nixl.endpoint import Endpoint
from kvxfer.connectors.nixl.errors import nixlBackendError, nixlInvalidParamError, nixlNotAllowedError
from kvxfer.connectors.nixl.settings import Settings
from kvxfer.connectors.nixl.tcpstore import TcpStoreClient
from kvxfer.errors import KvxferError

DEFAULT_LABEL = "metadata"
TASKS_MAX = 1024
POLL_S = 0.1
"""How often a store is asked for a key that is missing."""
FLUSH_S = 3.0
"""How long a closing agent waits for its queued exchanges."""
log = logging.getLogger("nixl.kvxfer")


class MetadataStore(Protocol):
    """A store where agents leave metadata for agents that know their names; everything but ``key`` may raise
    nixlBackendError."""

    NAME: str

    def open(self) -> None: ...
    def key(self, agent: str, label: str) -> str: ...
    def put(self, agent: str, label: str, blob: bytes) -> None: ...
    def get(self, agent: str, label: str) -> bytes | None: ...
    def delete(self, agent: str) -> None: ...
    def watch(self, on_gone: Callable[[str], None]) -> None: ...
    def close(self) -> None: ...


@dataclasses.dataclass
class MetadataWait:
    """A fetch that may still succeed; ``reason`` is why the last try did not."""

    end_s: float
    next_s: float = 0.0
    reason: str = ""


class MetadataExchange:
    """The background work of one agent. Thread-safe; its threads hold the endpoint, never the agent."""

    def __init__(self, endpoint: Endpoint, *, listens: bool, port: int, etcd_wait_s: float) -> None:
        """Raises nixlBackendError if the port is taken; nixlInvalidParamError if the environment names two stores, or
        one that cannot exist."""
        settings = endpoint.settings
        self._endpoint = endpoint
        self._store, self._wait_s = _store(settings, etcd_wait_s)
        self._waits: dict[tuple[str, str], MetadataWait] = {}
        """Fetches in the order of their next try. Used by the worker alone."""
        self._tasks: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._worker: threading.Thread | None = None
        self._watched: set[str] = set()
        self._is_closed = self._is_flushed = False
        self.listener = p2p.Listener(endpoint, settings.host, port) if listens else None

    def send(self, host: str, port: int) -> None:
        """Raises nixlInvalidParamError where there is neither an address nor a store; so do the others."""
        blob = self._endpoint.metadata()
        self._send(self._chosen_store(host, port), blob, host, port, DEFAULT_LABEL)

    def send_partial(self, descs: nixlRegDList, has_connection: bool, host: str, port: int, label: str) -> None:
        check_text("label", label)
        store = self._chosen_store(host, port)
        if store is not None and not label:
            raise nixlInvalidParamError(f"partial metadata for {store.NAME} needs a label")
        self._send(store, self._endpoint.partial_metadata(descs, has_connection=has_connection), host, port, label)

    def _send(self, store: MetadataStore | None, blob: bytes, host: str, port: int, label: str) -> None:
        if store is None:
            self._submit(f"send to {host}:{port}", lambda: _drop(p2p.tell(host, port, p2p.LOAD, blob)))
        else:
            self._submit(f"send to {store.NAME}", lambda: store.put(self._endpoint.name, label, blob))

    def fetch(self, name: str, host: str, port: int, label: str) -> None:
        check_text("label", label)
        store = self._chosen_store(host, port)
        if store is None:
            self._submit(f"fetch from {host}:{port}", lambda: self._load(name, p2p.tell(host, port, p2p.SEND)))
        else:
            self._submit(f"fetch {name} from {store.NAME}", lambda: self._fetch(store, name, label or DEFAULT_LABEL))

    def invalidate(self, host: str, port: int) -> None:
        store = self._chosen_store(host, port)
        if store is None:
            body = self._endpoint.own_proof() + self._endpoint.name.encode()
            self._submit(f"invalidate at {host}:{port}", lambda: self._tell_gone(host, port, body))
        else:
            self._submit(f"invalidate in {store.NAME}", lambda: store.delete(self._endpoint.name))

    def close(self) -> None:
        """Finish the queued tasks, for at most FLUSH_S, then close. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._tasks.put(None)
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join(FLUSH_S)
        self._is_flushed = True
        if self.listener is not None:
            self.listener.close()
        if self._store is not None:
            self._store.close()

    def __repr__(self) -> str:
        return f"<Exchange of {self._endpoint.name}: {self._tasks.qsize()} tasks, {len(self._waits)} waits>"

    def _chosen_store(self, host: str, port: int) -> MetadataStore | None:
        """The store, opened; None if the exchange uses the address. Raises nixlInvalidParamError for neither."""
        if host:
            if not 0 < port < 65536:
                raise nixlInvalidParamError(f"the port of {host!r:.100} must be between 1 and 65535, not {port}")
            return None
        if self._store is None:
            raise nixlInvalidParamError(
                "no peer's address was given, and neither NIXL_ETCD_ENDPOINTS nor NIXL_TCPSTORE_ENDPOINT is set"
            )
        self._store.open()
        return self._store

    def _submit(self, what: str, task: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closed:
                raise nixlNotAllowedError("the agent was closed")
            if self._tasks.qsize() >= TASKS_MAX:
                raise nixlNotAllowedError(f"more than TASKS_MAX={TASKS_MAX} exchanges are waiting")
            self._tasks.put((what, task))
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="nixl-exchange", daemon=True)
                self._worker.start()

    def _work(self) -> None:
        while True:
            wait = next(iter(self._waits.values()), None)
            try:
                task = self._tasks.get(timeout=None if wait is None else max(0.0, wait.next_s - time.monotonic()))
            except queue.Empty:
                pass
            else:
                if task is None:
                    return
                if self._is_flushed:
                    log.error("metadata exchange: %d tasks are given up, first: %s", self._tasks.qsize(), task[0])
                    return
                self._do(*task)
            self._retry()

    def _do(self, what: str, task: Callable[[], None]) -> None:
        """Run a task, and log its error: no error may end the worker."""
        try:
            task()
        except Exception as error:
            text = f"{what}: {type(error).__name__}: {error}"
            # What a program calls a host may hold half a surrogate, which no log file can.
            log.error("metadata exchange, %s", text.encode("utf-8", "backslashreplace").decode("utf-8"))

    def _load(self, name: str, blob: bytes | None) -> None:
        loaded = self._endpoint.load(blob or b"")
        if name and loaded != name:
            log.warning("asked for the metadata of agent %s, that of %s came", name, loaded)

    def _tell_gone(self, host: str, port: int, body: bytes) -> None:
        try:
            p2p.tell(host, port, p2p.FORGET, body)
        except ConnectionRefusedError:
            log.info("no agent listens at %s:%d any more, so none is left to forget us there", host, port)

    def _fetch(self, store: MetadataStore, name: str, label: str, wait: MetadataWait | None = None) -> None:
        """The stored metadata; without it the worker tries again and again, between its other tasks."""
        wait = wait or MetadataWait(time.monotonic() + self._wait_s)
        if self._is_done(store, name, label, wait):
            return
        self._waits.pop((name, label), None)
        if len(self._waits) >= TASKS_MAX:
            raise nixlNotAllowedError(f"more than TASKS_MAX={TASKS_MAX} fetches are waiting")
        wait.next_s = time.monotonic() + POLL_S
        self._waits[name, label] = wait

    def _retry(self) -> None:
        """Try the next waiting fetch once, if it is due. One fetch only: a slow store delays the tasks by one try."""
        store, key = self._store, next(iter(self._waits), None)
        if store is None or key is None or self._is_closed or time.monotonic() < self._waits[key].next_s:
            return
        (name, label), wait = key, self._waits.pop(key)
        if time.monotonic() < wait.end_s:
            self._do(f"fetch {name} from {store.NAME}", lambda: self._fetch(store, name, label, wait))
        else:
            log.error(
                "metadata exchange, fetch %s from %s: none came in %g s: %s",
                name, store.NAME, self._wait_s, wait.reason,
            )  # fmt: skip

    def _is_done(self, store: MetadataStore, name: str, label: str, wait: MetadataWait) -> bool:
        """Whether the fetch has found metadata and loaded it. Raises if the metadata is wrong. A store that does not
        answer is no error: it may answer the next time."""
        try:
            blob = store.get(name, label)
        except nixlBackendError as error:
            if not wait.reason:
                log.warning("metadata exchange, fetch %s from %s: %s; it is tried again", name, store.NAME, error)
            wait.reason = str(error)
            return False
        if blob is None:
            wait.reason = f"there is no {store.key(name, label)!r}"
            return False
        self._endpoint.load(blob, name)
        with self._lock:
            self._watched.add(name)
        store.watch(self._on_withdrawn)
        return True

    def _on_withdrawn(self, name: str) -> None:
        with self._lock:
            if name not in self._watched:
                return
            self._watched.discard(name)
        log.info("agent %s took its metadata back from etcd", name)
        try:
            self._endpoint.forget(name)
        except KvxferError as error:
            log.error("metadata exchange: %s", error)


def _drop(_: object) -> None:
    """Drop a result, because a task returns nothing."""


def _store(settings: Settings, etcd_wait_s: float) -> tuple[MetadataStore | None, float]:
    """The store that the environment names, if any, and how long a fetch from it waits."""
    if settings.etcd_endpoints and settings.tcpstore_endpoint:
        raise nixlInvalidParamError("NIXL_ETCD_ENDPOINTS and NIXL_TCPSTORE_ENDPOINT are both set: unset one")
    if settings.etcd_endpoints:
        from kvxfer.connectors.nixl.etcd import EtcdClient  # it imports grpc, which no other part of this package does

        return EtcdClient(settings.etcd_endpoints, settings.etcd_namespace), etcd_wait_s
    if settings.tcpstore_endpoint:
        wait_s, answer_s = settings.tcpstore_wait_s, settings.tcpstore_answer_s
        return TcpStoreClient(settings.tcpstore_endpoint, wait_s, answer_s), wait_s
    return None, 0.0
