"""Sending and fetching metadata in the background: to an address, or through etcd where none is given. Decides which,
and in what order; must never know a blob's form nor a socket's.

As in NIXL the calls return at once and failures are logged: ``check_remote_metadata`` says what has come.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from kvxfer.connectors.nixl import p2p
from kvxfer.connectors.nixl.dlists import nixlRegDList
from kvxfer.connectors.nixl.endpoint import Endpoint
from kvxfer.connectors.nixl.errors import nixlInvalidParamError, nixlMismatchError, nixlNotAllowedError
from kvxfer.connectors.nixl.etcd import DEFAULT_LABEL, EtcdClient, EtcdWatch
from kvxfer.errors import KvxferError

TASKS_MAX = 1024
FLUSH_S = 3.0
"""How long an agent that is closed waits for what it was asked to send."""
log = logging.getLogger("nixl.kvxfer")


class Exchange:
    """The background of one agent. Thread-safe; its threads hold the endpoint, never the agent."""

    def __init__(self, endpoint: Endpoint, *, listens: bool, port: int, etcd_wait_s: float) -> None:
        """Raises nixlBackendError (the port is taken), nixlInvalidParamError (NIXL_ETCD_ENDPOINTS)."""
        settings = endpoint.settings
        self._endpoint = endpoint
        self._etcd_wait_s = etcd_wait_s
        self._tasks: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue(TASKS_MAX)
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._watch: EtcdWatch | None = None
        self._watched: set[str] = set()
        self._is_closed = False
        self._etcd = EtcdClient(settings.etcd_endpoints, settings.etcd_namespace) if settings.etcd_endpoints else None
        self.listener = p2p.Listener(endpoint, settings.host, port) if listens else None

    def send(self, host: str, port: int) -> None:
        """Raises nixlInvalidParamError where there is neither an address nor etcd; so do the others."""
        blob, etcd = self._endpoint.metadata(), self._central(host)
        if etcd is None:
            self._submit(f"send to {host}:{port}", lambda: _drop(p2p.tell(host, port, p2p.LOAD, blob)))
        else:
            self._submit("send to etcd", lambda: etcd.put(self._endpoint.name, DEFAULT_LABEL, blob))

    def send_partial(self, descs: nixlRegDList, has_connection: bool, host: str, port: int, label: str) -> None:
        etcd = self._central(host)
        if etcd is not None and not label:
            raise nixlInvalidParamError("partial metadata for etcd needs a label")
        blob = self._endpoint.partial_metadata(descs, has_connection=has_connection)
        if etcd is None:
            self._submit(f"send to {host}:{port}", lambda: _drop(p2p.tell(host, port, p2p.LOAD, blob)))
        else:
            self._submit("send to etcd", lambda: etcd.put(self._endpoint.name, label, blob))

    def fetch(self, name: str, host: str, port: int, label: str) -> None:
        etcd = self._central(host)
        if etcd is None:
            self._submit(f"fetch from {host}:{port}", lambda: self._load(name, p2p.tell(host, port, p2p.SEND)))
        else:
            self._submit(f"fetch {name} from etcd", lambda: self._fetch_from(etcd, name, label or DEFAULT_LABEL))

    def invalidate(self, host: str, port: int) -> None:
        etcd = self._central(host)
        if etcd is None:
            body = self._endpoint.own_proof() + self._endpoint.name.encode()
            self._submit(f"invalidate at {host}:{port}", lambda: self._tell_gone(host, port, body))
        else:
            self._submit("invalidate in etcd", lambda: etcd.delete(self._endpoint.name))

    def close(self) -> None:
        """Finish what was asked for, at most FLUSH_S; then hang up. Callable twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            worker, watch = self._worker, self._watch
        if worker is not None:
            try:
                self._tasks.put(None, timeout=FLUSH_S)
            except queue.Full:
                log.error("metadata exchange: %d tasks are given up", TASKS_MAX)
            if worker is not threading.current_thread():
                worker.join(FLUSH_S)
        if watch is not None:
            watch.close()
        if self.listener is not None:
            self.listener.close()

    def __repr__(self) -> str:
        return f"<Exchange of {self._endpoint.name}: {self._tasks.qsize()} tasks>"

    def _central(self, host: str) -> EtcdClient | None:
        """None: the address is to be used."""
        if host:
            return None
        if self._etcd is None:
            raise nixlInvalidParamError("no peer's address was given, and NIXL_ETCD_ENDPOINTS is not set")
        return self._etcd

    def _submit(self, what: str, task: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closed:
                raise nixlNotAllowedError("the agent was closed")
            try:
                self._tasks.put_nowait((what, task))
            except queue.Full:
                raise nixlNotAllowedError(f"more than TASKS_MAX={TASKS_MAX} exchanges are waiting") from None
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="nixl-exchange", daemon=True)
                self._worker.start()

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            try:
                task[1]()
            except (KvxferError, OSError) as error:
                log.error("metadata exchange, %s: %s", task[0], error)

    def _load(self, name: str, blob: bytes | None) -> None:
        loaded = self._endpoint.load(blob or b"")
        if name and loaded != name:
            log.warning("asked for the metadata of agent %s, that of %s came", name, loaded)

    def _tell_gone(self, host: str, port: int, body: bytes) -> None:
        try:
            p2p.tell(host, port, p2p.FORGET, body)
        except ConnectionRefusedError:
            log.info("nobody listens at %s:%d any more, so nobody is left to forget us there", host, port)

    def _fetch_from(self, etcd: EtcdClient, name: str, label: str) -> None:
        blob = etcd.wait(name, label, self._etcd_wait_s)
        loaded = self._endpoint.load(blob)
        if loaded != name:
            self._endpoint.forget(loaded)
            raise nixlMismatchError(f"under {etcd.key(name, label)!r} lies the metadata of agent {loaded!r}")
        with self._lock:
            self._watched.add(name)
            if self._watch is None and not self._is_closed:
                self._watch = EtcdWatch(etcd, self._taken_back)

    def _taken_back(self, name: str) -> None:
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
    """A task returns nothing."""
