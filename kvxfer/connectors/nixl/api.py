"""``nixl._api``: NIXL's Python interface, call by call, on kvxfer. Decides nothing that ``nixlAgent`` does not;
docs/nixl.md says what is the same, better or refused.

Everything raises by NIXL's names (:mod:`kvxfer.connectors.nixl.errors`). A wrong ``mem_type``, operation or backend
name raises KeyError, as there.
"""

# The defaults must be NIXL's own, lists among them; none is ever changed.
# ruff: noqa: B006

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from kvxfer.connectors.nixl import bindings
from kvxfer.connectors.nixl.codec import decode_any, encode_dlist
from kvxfer.connectors.nixl.descs import MEMORY, NoDescriptors, to_dlist
from kvxfer.connectors.nixl.dlists import as_bytes, as_name, nixlRegDList, nixlRemoteDList, nixlXferDList
from kvxfer.connectors.nixl.enums import (
    DEFAULT_COMM_PORT,
    NIXL_INIT_AGENT,
    nixl_status_t,
    nixl_thread_sync_t,
    nixl_xfer_op_t,
)
from kvxfer.connectors.nixl.errors import nixlInvalidParamError, nixlNotFoundError
from kvxfer.connectors.nixl.handles import nixl_backend_handle, nixl_prepped_dlist_handle, nixl_xfer_handle
from kvxfer.connectors.nixl.logging import get_logger
from kvxfer.connectors.nixl.requests import nixlXferTelemetry, state_of

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixlBind",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]

DListT = TypeVar("DListT", nixlXferDList, nixlRegDList, nixlRemoteDList)
nixlBind = bindings
"""The name under which programs take the compiled module from here: its lists, its exceptions, an agent of its own."""
logger = get_logger(__name__)


class nixl_agent_config:
    """The configuration of an agent. ``enable_prog_thread``, ``num_threads`` and ``sync_mode`` are accepted and change
    nothing: the core has a thread of its own, and every call is thread-safe. ``listen_port`` 0 takes a free port."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: list[str] = ["UCX"],
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        """Raises TypeError for a ``sync_mode`` of another type."""
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t (got {type(sync_mode).__name__!r})")
        self.backends = backends
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode


class nixl_agent:
    """One agent: registers memory, reads and writes the memory of others, and notifies them."""

    def __init__(
        self, agent_name: str, nixl_conf: nixl_agent_config | None = None, instantiate_all: bool = False
    ) -> None:
        """``instantiate_all``: make every available backend; a config has precedence. Raises nixlInvalidParamError (a
        ValueError) for an empty name or a wrong setting in the environment."""
        config = nixl_conf or nixl_agent_config()
        if nixl_conf is not None and instantiate_all:
            logger.warning("instantiate_all is ignored, because a config is given")
        modes = nixl_thread_sync_t
        settings = bindings.nixlAgentConfig()
        settings.useProgThread = config.enable_pthread
        settings.useListenThread = config.enable_listen
        settings.listenPort = config.port
        settings.captureTelemetry = config.capture_telemetry
        settings.syncMode = (
            config.sync_mode
            if config.sync_mode is not None
            else modes.NIXL_THREAD_SYNC_STRICT
            if config.enable_listen
            else modes.NIXL_THREAD_SYNC_NONE
        )
        self.agent = bindings.nixlAgent(agent_name, settings)
        self.name = agent_name
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, nixl_backend_handle] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        self.plugin_list = self.agent.getAvailPlugins()
        self.plugin_b_options: dict[str, dict[str, str]] = {}
        self.plugin_mem_types: dict[str, list[str]] = {}
        self.nixl_mems = dict(MEMORY)
        self.nixl_ops = {"WRITE": nixl_xfer_op_t.NIXL_WRITE, "READ": nixl_xfer_op_t.NIXL_READ}
        wanted = self.plugin_list if nixl_conf is None and instantiate_all else config.backends
        for backend in wanted:
            if backend in self.plugin_list:
                threads = {"num_threads": str(config.num_threads)} if config.num_threads > 0 else {}
                self.create_backend(backend, threads)
            else:
                logger.warning("backend %s is left out: there is no such plugin", backend)

    def close(self) -> None:
        """Not in NIXL: close now, instead of when the last reference goes. May be called twice."""
        self.agent.close()

    def __repr__(self) -> str:
        return f"<nixl_agent {self.name!r} {self.agent!r}>"

    # --- plugins and backends ---

    def get_plugin_list(self) -> list[str]:
        """Every name that :meth:`create_backend` accepts."""
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Empty for an unknown plugin; likewise :meth:`get_plugin_params`."""
        return self._plugin(backend)[1]

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        return self._plugin(backend)[0]

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """Empty for a backend that was not made; likewise :meth:`get_backend_params`."""
        if backend not in self.backend_mems:
            logger.warning("backend %s was not made", backend)
        return self.backend_mems.get(backend, [])

    def get_backend_params(self, backend: str) -> dict[str, str]:
        if backend not in self.backend_options:
            logger.warning("backend %s was not made", backend)
        return self.backend_options.get(backend, {})

    def create_backend(self, backend: str, initParams: dict[str, str] = {}) -> None:
        """Raises nixlNotFoundError (no such plugin), nixlInvalidParamError (made before)."""
        handle = self.agent.createBackend(backend, initParams)
        self.backends[backend] = handle
        self.backend_options[backend], self.backend_mems[backend] = self.agent.getBackendParams(handle)
        logger.debug("backend %s was made", backend)

    # --- memory ---

    def register_memory(self, reg_list: Any, mem_type: str | None = None, backends: list[str] = []) -> nixlRegDList:
        """Open these regions to every holder of our metadata. Raises nixlInvalidParamError, nixlBackendError (VRAM)."""
        descs = self._need(self.get_reg_descs(reg_list, mem_type))
        self.agent.registerMem(descs, self._handles(backends))
        return descs

    def deregister_memory(self, dereg_list: nixlRegDList, backends: list[str] = []) -> None:
        """Once this returns no other agent reads or writes there. Raises nixlNotFoundError, nixlRepostActiveError."""
        self.agent.deregisterMem(dereg_list, self._handles(backends))

    def query_memory(self, reg_list: Any, backend: str, mem_type: str | None = None) -> list[dict[str, str] | None]:
        """Answers of a storage plugin about its files or objects. There is none here: raises nixlNotSupportedError, and
        nixlInvalidParamError for a backend that was not made."""
        descs = self._need(self.get_reg_descs(reg_list, mem_type))
        if backend not in self.backends:
            raise nixlInvalidParamError(f"backend {backend!r} was not made; there are {list(self.backends)}")
        return self.agent.queryMem(descs, self.backends[backend])

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList:
        """A list to transfer, of tuples or an array (with ``mem_type``), a tensor, or a list of tensors.

        What is of no such form is logged, and None is returned, as NIXL does; with ``KVXFER_NIXL_BAD_INPUT=raise`` it
        raises nixlInvalidParamError, as a wrong row or nothing at all always does. So :meth:`get_reg_descs` and
        :meth:`get_remote_descs`.
        """
        return self._descs(nixlXferDList, descs, mem_type)

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> nixlRemoteDList:
        """A list of (address, length, device, agent)."""
        return self._descs(nixlRemoteDList, descs, mem_type)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList:
        """A list to register, as :meth:`get_xfer_descs`; tuples have their meta as a fourth element."""
        return self._descs(nixlRegDList, descs, mem_type)

    def get_serialized_descs(self, descs: nixlXferDList | nixlRegDList | None) -> bytes:
        """The bytes of a list, or of None, for another process; see :mod:`kvxfer.connectors.nixl.codec`."""
        return encode_dlist(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> nixlXferDList | nixlRegDList | None:
        """Raises nixlMismatchError for anything but :meth:`get_serialized_descs`' bytes: a pickle is never loaded."""
        return decode_any(serialized_descs)

    # --- transfers ---

    def make_connection(self, remote_agent: str, backends: list[str] = []) -> None:
        """Open a session now. Raises nixlNotFoundError."""
        self.agent.makeConnection(remote_agent, self._handles(backends))

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str | None = None, backends: list[str] = []
    ) -> nixl_prepped_dlist_handle:
        """Find descriptors once, to transfer some of them by index any number of times. ``agent_name``: the remote's,
        or our own for transfers from here to here, or ``""`` (``"NIXL_INIT_AGENT"``) for the local side. An array of
        shape [n, 5] is (address, length, device, stride, count). Raises nixlNotFoundError."""
        agent = NIXL_INIT_AGENT if agent_name in ("", b"", "NIXL_INIT_AGENT", b"NIXL_INIT_AGENT") else agent_name
        handles = self._handles(backends)
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise nixlInvalidParamError("mem_type must be given for strided descriptors")
            handle = self.agent.prepXferDlist(agent, MEMORY[mem_type], xfer_list, handles)
        else:
            descs = self._need(self.get_xfer_descs(xfer_list, mem_type))
            handle = self.agent.prepXferDlist(agent, descs, handles)
        return nixl_prepped_dlist_handle(self.agent, handle)

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """(microseconds, error margin, method), from what this pair has reached; (0, 0, "UNKNOWN") before."""
        duration, margin, method = self.agent.estimateXferCost(req_handle._handle)
        return duration, margin, "ANALYTICAL_BACKEND" if method == 0 else "UNKNOWN"

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Sequence[int] | np.ndarray[Any, Any],
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Sequence[int] | np.ndarray[Any, Any],
        notif_msg: bytes = b"",
        backends: list[str] = [],
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """A transfer between descriptors of two prepared lists, by index. Raises nixlInvalidParamError (indices that do
        not pair, or are outside a list; lengths that differ), nixlNotFoundError (the remote was removed)."""
        op, handles = self.nixl_ops[operation], self._handles(backends)
        handle = self.agent.makeXferReq(
            op,
            local_xfer_side._handle,
            local_indices,
            remote_xfer_side._handle,
            remote_indices,
            notif_msg,
            handles,
            skip_desc_merge,
        )
        return nixl_xfer_handle(self.agent, handle)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str,
        notif_msg: bytes = b"",
        backends: list[str] = [],
    ) -> nixl_xfer_handle:
        """A transfer between two lists, all of them, in order. Raises as :meth:`make_prepped_xfer`, and
        nixlNotFoundError for memory that is not registered or not in the remote's metadata."""
        op, handles = self.nixl_ops[operation], self._handles(backends)
        handle = self.agent.createXferReq(op, local_descs, remote_descs, remote_agent, notif_msg, handles)
        return nixl_xfer_handle(self.agent, handle)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes = b"") -> str:
        """Start it, or start it again after its end: "DONE" or "PROC". ``notif_msg`` replaces the message. Raises
        nixlRepostActiveError, nixlNotFoundError (the remote was removed), nixlRemoteDisconnectError, ..."""
        return state_of(self.agent.postXferReq(handle._handle, notif_msg))

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """ "DONE" once every byte is committed (a WRITE's: at the remote), "PROC" before. Raises what ended it."""
        return state_of(self.agent.getXferStatus(handle._handle))

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """The backend's name that the program asked for; :meth:`get_xfer_telemetry` has the lane."""
        wanted = self.agent.queryXferBackend(handle._handle)
        return next(name for name, backend in self.backends.items() if backend == wanted)

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        """Raises nixlNoTelemetryError unless telemetry was asked for."""
        return self.agent.getXferTelemetry(handle._handle)

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    def prep_mem_view(self, dlist: nixlXferDList | nixlRemoteDList, *, backends: list[str] | None = None) -> int:
        """Raises nixlNotSupportedError: kvxfer has no device API."""
        return self.agent.prepMemView(dlist, self._handles(backends or []))

    def release_mem_view(self, mvh: int) -> None:
        """Raises nixlNotSupportedError."""
        self.agent.releaseMemView(mvh)

    # --- notifications ---

    def get_new_notifs(self, backends: list[str] = []) -> dict[str, list[bytes]]:
        """Messages since the last call, by sender, in order."""
        return self.agent.getNotifs({}, self._handles(backends))

    def update_notifs(self, backends: list[str] = []) -> dict[str, list[bytes]]:
        """All messages that :meth:`check_remote_xfer_done` has not taken: ``self.notifs``."""
        self.notifs = self.agent.getNotifs(self.notifs, self._handles(backends))
        return self.notifs

    def check_remote_xfer_done(
        self, remote_agent_name: str, lookup_tag: bytes, backends: list[str] = [], tag_is_prefix: bool = True
    ) -> bool:
        """Whether there is a message that begins with the tag (or contains it, if not ``tag_is_prefix``); takes it."""
        tag = as_bytes(lookup_tag)
        waiting = self.update_notifs(backends).get(as_name(remote_agent_name), [])
        for place, message in enumerate(waiting):
            if message.startswith(tag) if tag_is_prefix else tag in message:
                del waiting[place]
                return True
        return False

    def send_notif(self, remote_agent_name: str, notif_msg: bytes, backend: str | None = None) -> None:
        """Delivered once, in order. Raises nixlNotFoundError (no such agent), nixlInvalidParamError (too long)."""
        self.agent.genNotif(remote_agent_name, notif_msg, self._handles([] if backend is None else [backend]))

    # --- metadata ---

    def get_agent_metadata(self) -> bytes:
        """The address of this agent and all its registrations: a process that gets it may read and write them."""
        return self.agent.getLocalMD()

    def get_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: list[str] = []
    ) -> bytes:
        """Metadata of some regions only. An empty list: only the address. Raises nixlNotFoundError."""
        return self.agent.getLocalPartialMD(descs, inc_conn_info, self._handles(backends))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """The name of the agent, as UTF-8 bytes (as in NIXL, whatever its annotation says).

        Raises nixlMismatchError, nixlInvalidParamError (our own), nixlNotAllowedError (another incarnation of a known
        agent), nixlNotFoundError (partial, and how to reach it did not come before)."""
        return self.agent.loadRemoteMD(metadata)

    def remove_remote_agent(self, agent: str) -> None:
        """Ends transfers with that agent; handles to it become stale. An unknown agent is no error."""
        self.agent.invalidateRemoteMD(agent)

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """In the background, to an agent's listener or to etcd; failures are logged."""
        self.agent.sendLocalMD(ip_addr, port)

    def send_partial_agent_metadata(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: list[str] = [],
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        """As :meth:`send_local_metadata`; etcd needs a label."""
        self.agent.sendLocalPartialMD(descs, inc_conn_info, self._handles(backends), ip_addr, port, label)

    def fetch_remote_metadata(
        self, remote_agent: str, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        """In the background; :meth:`check_remote_metadata` says when it is there."""
        self.agent.fetchRemoteMD(remote_agent, ip_addr, port, label)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """In the background: have an agent, or all that fetched our metadata from etcd, forget us."""
        self.agent.invalidateLocalMD(ip_addr, port)

    def check_remote_metadata(self, agent: str, descs: nixlXferDList | None = None) -> bool:
        """Whether that agent is known with these descriptors."""
        empty = nixlXferDList(MEMORY["DRAM"]) if descs is None else descs
        return self.agent.checkRemoteMD(agent, empty) == nixl_status_t.NIXL_SUCCESS

    # --- what the above share ---

    def _handles(self, backends: Sequence[str]) -> list[int]:
        return [self.backends[name] for name in backends]

    def _plugin(self, backend: str) -> tuple[dict[str, str], list[str]]:
        if backend not in self.plugin_mem_types:
            try:
                params, memory = self.agent.getPluginParams(backend)
            except nixlNotFoundError:
                logger.warning("there is no plugin %s", backend)
                return {}, []
            self.plugin_b_options[backend], self.plugin_mem_types[backend] = params, memory
        return self.plugin_b_options[backend], self.plugin_mem_types[backend]

    def _descs(self, kind: type[DListT], descs: Any, mem_type: str | None) -> DListT:
        try:
            return to_dlist(kind, descs, mem_type)
        except NoDescriptors as error:
            if not self.agent.none_for_bad_input:
                raise nixlInvalidParamError(str(error)) from None
            logger.error("%s", error)
            return None  # type: ignore[return-value]

    @staticmethod
    def _need(descs: DListT | None) -> DListT:
        if descs is None:
            raise nixlInvalidParamError("these are no descriptors; the reason was logged")
        return descs
