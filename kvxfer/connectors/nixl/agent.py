"""``nixlAgent`` of NIXL's bindings: numeric handles, camel case, statuses. Decides what a handle stands for;
:mod:`endpoint`, :mod:`requests` and :mod:`metadata_exchange` do the work.

Every method raises by NIXL's names. Where NIXL reads freed memory for a handle that was released, these raise
nixlInvalidParamError.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from kvxfer.connectors.nixl.backends import PLUGINS, Backends, plugin_of
from kvxfer.connectors.nixl.dlists import as_bytes, as_name, nixlRegDList, nixlRemoteDList, nixlXferDList, strided_rows
from kvxfer.connectors.nixl.endpoint import Endpoint
from kvxfer.connectors.nixl.enums import (
    DEFAULT_COMM_PORT,
    NIXL_INIT_AGENT,
    nixl_mem_t,
    nixl_status_t,
    nixl_thread_sync_t,
    nixl_xfer_op_t,
)
from kvxfer.connectors.nixl.errors import (
    nixlBackendError,
    nixlError,
    nixlInvalidParamError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotSupportedError,
    translated,
)
from kvxfer.connectors.nixl.metadata_exchange import MetadataExchange
from kvxfer.connectors.nixl.prepared import DList, pair, prepare
from kvxfer.connectors.nixl.requests import (
    InstantRequest,
    LoopRequest,
    RemoteRequest,
    TransferRequest,
    as_indices,
    nixlXferTelemetry,
)
from kvxfer.connectors.nixl.settings import Settings, with_file
from kvxfer.connectors.nixl.telemetry import Ring, TelemetryEvent, ring_for
from kvxfer.transport.plan import Op

SUCCESS = nixl_status_t.NIXL_SUCCESS
_handles = itertools.count(0x10000, 0x10)
P = ParamSpec("P")
T = TypeVar("T")
_OPS = {nixl_xfer_op_t.NIXL_READ: Op.READ, nixl_xfer_op_t.NIXL_WRITE: Op.WRITE}


def _counted(method: Callable[Concatenate[nixlAgent, P], T]) -> Callable[Concatenate[nixlAgent, P], T]:
    """Records the method's exceptions as events too, if events are enabled."""

    @functools.wraps(method)
    def counted(agent: nixlAgent, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(agent, *args, **kwargs)
        except nixlError as error:
            if agent._events is not None:
                agent._events.add_error(error)
            raise

    return counted


class nixlAgentConfig:
    """As in NIXL. ``syncMode``, ``useProgThread``, ``pthrDelay`` and ``lthrDelay`` are taken and change nothing: every
    call is thread-safe, and the core has a thread of its own."""

    def __init__(
        self,
        useProgThread: bool = False,
        useListenThread: bool = False,
        listenPort: int = DEFAULT_COMM_PORT,
        syncMode: nixl_thread_sync_t = nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE,
        num_workers: int = 1,
        pthrDelay: int = 0,
        lthrDelay: int = 100000,
        captureTelemetry: bool = False,
    ) -> None:
        self.useProgThread = useProgThread
        self.useListenThread = useListenThread
        self.listenPort = listenPort
        self.syncMode = syncMode
        self.captureTelemetry = captureTelemetry
        self.pthrDelay = pthrDelay
        self.lthrDelay = lthrDelay
        self.etcdWatchTimeout = datetime.timedelta(seconds=5)


class nixlAgent:
    """One agent. Dropping the last reference to it, :meth:`close` and the end of the process all close it."""

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        """Raises nixlInvalidParamError (a ValueError) for an empty name or wrong settings in the environment,
        nixlBackendError where the listener's port is taken, or NIXL_TELEMETRY_DIR takes no file."""
        with translated():
            settings = Settings.from_environment(with_file(os.environ))
        self._endpoint = Endpoint(as_name(name), settings)
        self._has_telemetry = bool(config.captureTelemetry) if settings.telemetry is None else settings.telemetry
        self._exchange = MetadataExchange(
            self._endpoint,
            listens=bool(config.useListenThread),
            port=int(config.listenPort),
            etcd_wait_s=config.etcdWatchTimeout.total_seconds(),
        )
        try:
            self._events = ring_for(self._endpoint.name, settings) if self._has_telemetry else None
        except BaseException:
            self._exchange.close()
            raise
        self._lock = threading.RLock()
        self._backends = Backends()
        self._dlists: dict[int, DList] = {}
        self._requests: dict[int, TransferRequest] = {}
        self._leaked_xfer_handles: list[int] = []
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self._exchange, self._endpoint, self._events)

    # --- ours, not NIXL's ---

    def close(self) -> None:
        """Close all sessions and end the background threads; every later call raises nixlBackendError. May be called
        twice."""
        self._finalizer()

    @property
    def listenPort(self) -> int | None:
        """The port of the metadata listener, which differs from the requested one if that was 0."""
        return None if self._exchange.listener is None else self._exchange.listener.port

    @property
    def none_for_bad_input(self) -> bool:
        return self._endpoint.settings.none_for_bad_input

    def __repr__(self) -> str:
        return f"<nixlAgent {self._endpoint!r}, {len(self._dlists)} lists, {len(self._requests)} transfers>"

    # --- plugins and backends ---

    def getAvailPlugins(self) -> list[str]:
        return list(PLUGINS)

    def getPluginParams(self, type: str) -> tuple[dict[str, str], list[str]]:
        plugin = plugin_of(type)
        return dict(plugin.params), [memory.name for memory in plugin.memory]

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:
        name = self._backends.name(backend)
        return self._backends.params(backend), [memory.name for memory in PLUGINS[name].memory]

    def createBackend(self, type: str, initParams: dict[str, str]) -> int:
        with self._lock:
            plugin_of(type)
            self._endpoint.open()
            return self._backends.create(type, initParams)

    # --- memory ---

    def registerMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        self._check_list(descs, nixlRegDList)
        self._check_memory(descs.getType(), backends)
        self._endpoint.link.registry.register(descs)
        self._count(TelemetryEvent.AGENT_MEMORY_REGISTERED, descs)
        return SUCCESS

    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        self._check_list(descs, nixlRegDList)
        self._check_memory(descs.getType(), backends)
        self._endpoint.link.registry.deregister(descs)
        self._count(TelemetryEvent.AGENT_MEMORY_DEREGISTERED, descs)
        return SUCCESS

    def queryMem(self, descs: nixlRegDList, backend: int) -> list[dict[str, str] | None]:
        """Raises nixlNotSupportedError, as NIXL's network plugins do: only storage can be asked what it has."""
        self._check_list(descs, nixlRegDList)
        name = self._backends.name(backend)
        raise nixlNotSupportedError(f"backend {name} cannot be asked about {descs.getType().name}")

    # --- connections and prepared lists ---

    def makeConnection(self, remote_agent: str, backends: Sequence[int] = ()) -> nixl_status_t:
        self._network(backends)
        self._endpoint.connect(as_name(remote_agent))
        return SUCCESS

    @_counted
    def prepXferDlist(self, *arguments: Any) -> int:
        """``([agent_name,] descs, backends=())`` or ``(agent_name, mem_type, strided_array, backends=())``."""
        words: list[Any] = list(arguments)
        agent = NIXL_INIT_AGENT
        if words and isinstance(words[0], (str, bytes, bytearray)):
            agent = as_name(words.pop(0))
        if words and isinstance(words[0], nixl_mem_t) and len(words) >= 2:
            memory, rows = words.pop(0), strided_rows(np.asarray(words.pop(0)))
        elif words and isinstance(words[0], nixlXferDList):
            memory, rows = words[0].getType(), words.pop(0).rows
        else:
            given = type(words[0]).__name__ if words else "nothing"
            raise TypeError(f"prepXferDlist takes a nixlXferDList, or a memory type and an array, not {given}")
        backends: Sequence[int] = next(iter(words), ())
        self._check_memory(memory, backends, nixlNotFoundError)
        return self._keep(self._prepare(agent, rows))

    def releasedDlistH(self, handle: int) -> nixl_status_t:
        with self._lock:
            if self._dlists.pop(handle, None) is None:
                raise nixlInvalidParamError(f"{handle!r} is not a prepared list of this agent, or was released")
        return SUCCESS

    def prepMemView(self, dlist: nixlXferDList | nixlRemoteDList, backends: Sequence[int] = ()) -> int:
        raise nixlNotSupportedError("kvxfer has no device API: HAVE_UCX_GPU_DEVICE_API is False")

    def releaseMemView(self, mvh: int) -> None:
        raise nixlNotSupportedError("kvxfer has no device API: HAVE_UCX_GPU_DEVICE_API is False")

    # --- transfers ---

    @_counted
    def makeXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_side: int,
        local_indices: Any,
        remote_side: int,
        remote_indices: Any,
        notif_msg: bytes | str = b"",
        backend: Sequence[int] = (),
        skip_desc_merge: bool = False,
    ) -> int:
        local, remote = self._dlist(local_side), self._dlist(remote_side)
        if local.agent_name or not remote.agent_name:
            raise nixlInvalidParamError("the local side must be local, and the remote side remote")
        remote.check_alive()
        ours, theirs = as_indices(local_indices), as_indices(remote_indices)
        return self._request(_OPS[operation], local, ours, remote, theirs, as_bytes(notif_msg), self._network(backend))

    @_counted
    def createXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str,
        notif_msg: bytes | str = b"",
        backend: Sequence[int] = (),
    ) -> int:
        self._check_list(local_descs, nixlXferDList)
        self._check_list(remote_descs, nixlXferDList)
        if local_descs.descCount() != remote_descs.descCount():
            raise nixlInvalidParamError(
                f"{local_descs.descCount()} local descriptors do not pair with {remote_descs.descCount()} of the remote"
            )
        if not np.array_equal(local_descs.rows[:, 1], remote_descs.rows[:, 1]):
            raise nixlInvalidParamError("the lengths of the descriptors differ between local and remote")
        name = as_name(remote_agent)
        if not name:
            raise nixlNotFoundError("a transfer needs the name of a remote agent")
        for descs in (local_descs, remote_descs):
            self._check_memory(descs.getType(), backend, nixlNotFoundError)
        local, remote = self._prepare(NIXL_INIT_AGENT, local_descs.rows), self._prepare(name, remote_descs.rows)
        return self._request(_OPS[operation], local, None, remote, None, as_bytes(notif_msg), self._network(backend))

    @_counted
    def estimateXferCost(self, req_handle: int) -> tuple[int, int, int]:
        """(microseconds, error margin, method), from what the pair has reached; (0, 0, -1) without a transfer."""
        duration_us = self._req(req_handle).estimate_us()
        return (0, 0, -1) if duration_us is None else (duration_us, duration_us // 2, 0)

    def postXferReq(self, reqh: int, notif_msg: bytes | str = b"") -> nixl_status_t:
        request = self._req(reqh)
        self._post(request, as_bytes(notif_msg))
        return request.status()

    def getXferStatus(self, reqh: int) -> nixl_status_t:
        return self._req(reqh).status()

    def getXferTelemetry(self, reqh: int) -> nixlXferTelemetry:
        request = self._req(reqh)
        if not self._has_telemetry:
            raise nixlNoTelemetryError("telemetry was not asked for: capture_telemetry, or NIXL_TELEMETRY_ENABLE=y")
        return request.telemetry()

    def queryXferBackend(self, reqh: int) -> int:
        return self._req(reqh).backend

    def releaseXferReq(self, reqh: int) -> nixl_status_t:
        self._req(reqh).release()
        with self._lock:
            self._requests.pop(reqh, None)
        return SUCCESS

    # --- notifications ---

    def getNotifs(self, notif_map: dict[str, list[bytes]], backends: Sequence[int] = ()) -> dict[str, list[bytes]]:
        self._network(backends)
        self._endpoint.poll()
        return self._endpoint.inbox.take(notif_map)

    def genNotif(self, remote_agent: str, msg: bytes | str, backends: Sequence[int] | int = ()) -> nixl_status_t:
        self._network((backends,) if isinstance(backends, int) else backends)
        self._endpoint.notify(as_name(remote_agent), as_bytes(msg))
        return SUCCESS

    # --- metadata ---

    def getLocalMD(self) -> bytes:
        return self._endpoint.metadata()

    def getLocalPartialMD(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()
    ) -> bytes:
        self._check_list(descs, nixlRegDList)
        self._network(backends)
        return self._endpoint.partial_metadata(descs, has_connection=inc_conn_info)

    def loadRemoteMD(self, remote_metadata: bytes) -> bytes:
        return self._endpoint.load(remote_metadata).encode()

    def invalidateRemoteMD(self, remote_agent: str) -> nixl_status_t:
        return SUCCESS if self._endpoint.forget(as_name(remote_agent)) else nixl_status_t.NIXL_ERR_NOT_FOUND

    def checkRemoteMD(self, remote_name: str, descs: nixlXferDList) -> nixl_status_t:
        missing = nixl_status_t.NIXL_ERR_NOT_FOUND
        remote = self._endpoint.link.remotes.find(as_name(remote_name)) if self._endpoint.is_open else None
        if remote is None:
            return missing
        if descs.isEmpty():
            return SUCCESS
        if descs.getType() is not nixl_mem_t.DRAM_SEG:
            return missing
        try:
            prepare(self._endpoint.link.poster, remote_name, remote, descs.rows)
        except nixlNotFoundError:
            return missing
        return SUCCESS

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        self._exchange.send(ip_addr, port)

    def sendLocalPartialMD(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[int] = (),
        ip_addr: str = "",
        port: int = 0,
        label: str = "",
    ) -> None:
        self._check_list(descs, nixlRegDList)
        self._exchange.send_partial(descs, inc_conn_info, ip_addr, port, label)

    def fetchRemoteMD(self, remote_agent: str, ip_addr: str = "", port: int = 0, label: str = "") -> None:
        self._exchange.fetch(as_name(remote_agent), ip_addr, port, label)

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        self._exchange.invalidate(ip_addr, port)

    # --- what the above share ---

    def _prepare(self, agent: str, rows: Any) -> DList:
        link = self._endpoint.link
        remote = None if agent in (NIXL_INIT_AGENT, self._endpoint.name) else link.remotes.get(agent)
        return prepare(link.poster, agent, remote, rows, link.registry.empties)

    def _request(
        self, op: Op, local: DList, ours: Any, remote: DList, theirs: Any, message: bytes, backend: int
    ) -> int:
        on_end = None if self._events is None else functools.partial(self._events.add_end, op is Op.WRITE)
        endpoint = self._endpoint
        picked = pair(local, ours, remote, theirs)
        if remote.remote is None:
            name, inbox, poster = endpoint.name, endpoint.inbox, endpoint.link.poster
            regions = local.regions | remote.regions

            def check() -> None:
                if not regions <= {record.region_id for record in poster.records()}:
                    raise nixlNotAllowedError("memory of this transfer was deregistered after it was made")

            def deliver(text: bytes) -> None:
                inbox.put(name, text)

            if picked is None:
                return self._keep(InstantRequest(message, backend, deliver, check, on_end))
            mine, other = local.pieces(picked[0]), remote.pieces(picked[1])
            source, destination = (other, mine) if op is Op.READ else (mine, other)
            return self._keep(LoopRequest(source, destination, message, backend, deliver, check, on_end))
        if picked is None:
            tell = functools.partial(endpoint.notify, remote.agent_name)
            endpoint.link.wrap(message)  # a message that is too long is told of now
            return self._keep(InstantRequest(message, backend, tell, remote.check_alive, on_end))
        assert local.prepared is not None
        assert remote.prepared is not None
        with translated():
            plan = endpoint.link.poster.plan(op, local.prepared, picked[0], remote.prepared, picked[1])
        return self._keep(RemoteRequest(endpoint, remote.remote, plan, message, backend, on_end))

    @_counted
    def _post(self, request: TransferRequest, message: bytes) -> None:
        request.post(message)

    def _count(self, kind: TelemetryEvent, descs: nixlRegDList) -> None:
        if self._events is not None:
            self._events.add((kind, int(descs.rows[:, 1].sum())))

    def _keep(self, thing: DList | TransferRequest) -> int:
        handle = next(_handles)
        with self._lock:
            if isinstance(thing, DList):
                self._dlists[handle] = thing
            else:
                self._requests[handle] = thing
        return handle

    def _dlist(self, handle: Any) -> DList:
        dlist = self._dlists.get(handle)
        if dlist is None:
            raise nixlInvalidParamError(f"{handle!r} is not a prepared list of this agent, or was released")
        return dlist

    def _req(self, handle: Any) -> TransferRequest:
        request = self._requests.get(handle)
        if request is None:
            raise nixlInvalidParamError(f"{handle!r} is not a transfer of this agent, or was released")
        return request

    def _network(self, backends: Sequence[int]) -> int:
        handle = self._backends.first(backends)
        if handle is None:
            raise nixlBackendError("no backend that reaches other agents: none was created")
        return handle

    def _check_memory(
        self, memory: nixl_mem_t, backends: Sequence[int], missing: type[Exception] = nixlBackendError
    ) -> None:
        if not self._backends.names(backends):
            raise nixlNotFoundError(f"no backend of this agent takes {memory.name}: none was created")
        if memory is nixl_mem_t.VRAM_SEG:
            raise missing("the NIXL connector of kvxfer registers host memory (DRAM) only, not VRAM")
        if memory is not nixl_mem_t.DRAM_SEG:
            raise nixlNotFoundError(f"no backend of this agent takes {memory.name}")

    @staticmethod
    def _check_list(descs: object, kind: type) -> None:
        if not isinstance(descs, kind):
            raise TypeError(f"expected a {kind.__name__}, not {type(descs).__name__}")


def _close(pid: int, exchange: MetadataExchange, endpoint: Endpoint, events: Ring | None) -> None:
    if pid != os.getpid():
        return  # a fork's copy: the threads to wait for are the parent's
    exchange.close()
    endpoint.close()
    if events is not None:
        events.close()
