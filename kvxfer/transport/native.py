"""The native core as a transport: sockets, mappings and machines behind one event loop.

It decides where an agent listens (address, port, socket file) and how that is written down for peers; it must never
know membership, futures or what a transfer is for.

An agent's address must be published before its name is known, and the core needs its name to start. So a binding first
binds the port without listening on it, so that no other process gets it (``SO_REUSEADDR`` lets exactly such a port be
bound again), and the core listens there as soon as it has its name.

The ``host_id`` tells peers whether a Unix socket and a mapping can join us: they need the same kernel (the boot id) and
the same user (the core checks the peer's uid). Containers of one host share both and may still not see each other's
files: then the dial fails at once and the next lane is taken.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import pathlib
import socket
import time
from collections.abc import Callable, Sequence

from kvxfer._native import _core
from kvxfer.clock import NS_PER_S
from kvxfer.config import AgentConfig, allowed_lanes
from kvxfer.errors import ConfigError
from kvxfer.transport import ucx
from kvxfer.transport.base import (
    LANES,
    NO_CONTENT_DIGEST,
    Blocks,
    Event,
    PostOrder,
    Region,
    StartPost,
    as_nanoseconds,
    check_segments,
    limits_from,
    write_ref,
)
from kvxfer.transport.counts import WireCounts
from kvxfer.transport.encryption import session_encryption
from kvxfer.transport.socket_place import SocketPlace, find_socket_place
from kvxfer.types import (
    AgentRef,
    DataAddress,
    Exposure,
    GrantState,
    Lane,
    MemoryKind,
    PoolRecord,
    RegionRecord,
    Segment,
    TransferId,
    TransferState,
)

log = logging.getLogger("kvxfer.transport")

UNIX_SOCKET_LANES = (Lane.MAPPED, Lane.CMA, Lane.UNIX)
"""Two agents of one host meet over a Unix socket for these."""


class NativeBinding:
    """A :class:`~kvxfer.transport.base.Binding` on this host."""

    def __init__(self, config: AgentConfig) -> None:
        """Raises ConfigError: the port is taken, the host is not ours or not loopback, no place for the socket."""
        self._held: socket.socket | None = None
        allowed = allowed_lanes(config.lanes, os.environ)
        self._ucx = ucx.core_options(config, allowed)
        missing = {Lane.MEMORY} if self._ucx[0] else {Lane.MEMORY, Lane.UCX}
        obstacle = _core.cma_missing_calls() if Lane.CMA in allowed else ""
        if obstacle:
            missing.add(Lane.CMA)
            log.info("lane cma is not offered: %s", obstacle)
        lanes = tuple(lane for lane in allowed if lane not in missing)
        if not lanes:
            raise ConfigError(f"none of the lanes {', '.join(allowed)} can join processes here")
        host = _numeric(config.bind_host)
        advertised = _numeric(config.advertise_host) if config.advertise_host else host
        self._encryption = session_encryption(config, host)
        if ipaddress.ip_address(advertised).is_unspecified:
            raise ConfigError(f"bind_host {config.bind_host!r} is no address that peers can dial: set advertise_host")
        self._host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._held = socket.socket(family, socket.SOCK_STREAM)
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._held.bind((host, config.bind_port))
            self._port = int(self._held.getsockname()[1])
            self._place = _place_for(lanes, config.runtime_dir)
        except OSError as error:
            self._held.close()
            raise ConfigError(f"cannot listen on {host} port {config.bind_port}: {error.strerror}") from None
        except BaseException:
            self._held.close()
            raise
        self._address = DataAddress(advertised, self._port, self._unix_path, host_id(), lanes)

    @property
    def address(self) -> DataAddress:
        return self._address

    def open(self, ref: AgentRef, config: AgentConfig) -> NativeTransport:
        core = _core.Core(
            write_ref(ref),
            limits_from(config, self._address.lanes),
            bind_host=self._host,
            bind_port=self._port,
            unix_path=self._unix_path,
            ucx_library=self._ucx[0],
            ucx_tls=self._ucx[1],
            copy_threads=config.copy_threads,
            progress=str(config.progress),
            encrypt=str(self._encryption.mode),
            openssl_library=self._encryption.library,
            tolerates_plain=self._encryption.tolerates_plain,
        )
        core.start()
        if self._held is not None:
            self._held.close()
            self._held = None
        return NativeTransport(core, ref, self)

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
        if self._place.path is not None:
            with contextlib.suppress(OSError):
                self._place.path.unlink()
        if self._place.own is not None:
            self._place.own.remove()
            self._place = SocketPlace(None)

    def __repr__(self) -> str:
        return f"<NativeBinding {self._host}:{self._port} {self._unix_path}>"

    @property
    def _unix_path(self) -> str:
        return "" if self._place.path is None else str(self._place.path)


def _place_for(lanes: Sequence[Lane], runtime_dir: str) -> SocketPlace:
    """A place for the Unix socket, or none if lanes are left that need no such socket.

    Raises ConfigError if every lane needs one.
    """
    place = find_socket_place(runtime_dir)
    needing = [lane for lane in lanes if lane in UNIX_SOCKET_LANES]
    if place.obstacle and len(needing) == len(lanes):
        raise ConfigError(place.obstacle)
    if place.obstacle and needing:
        log.warning("%s: without it there are no lanes %s", place.obstacle, ", ".join(needing))
    return place


class NativeTransport:
    """A :class:`~kvxfer.transport.base.Transport` over one native core."""

    def __init__(self, core: _core.Core, ref: AgentRef, binding: NativeBinding) -> None:
        """Takes a started core and what it is bound to over; both end with :meth:`close`."""
        self.core = core
        self.drain: Callable[[], list[Event]] = core.drain  # a program polls it in a loop: one call less each time
        self._ref = ref
        self._binding = binding
        self._is_closed = False

    def __repr__(self) -> str:
        address = self._binding.address
        state = "closed" if self._is_closed else f"{address.tcp_host}:{address.tcp_port}"
        return f"<NativeTransport {self._ref} {state}>"

    @property
    def ref(self) -> AgentRef:
        return self._ref

    @property
    def address(self) -> DataAddress:
        return self._binding.address

    def fileno(self) -> int:
        return self.core.fileno()

    def wait(self, timeout_s: float) -> bool:
        return self.core.wait(max(0, round(timeout_s * NS_PER_S)))

    def add_pool(
        self, pool: PoolRecord, region: Region, segments: Sequence[Segment], *, has_checksums: bool = False
    ) -> None:
        check_segments(
            segments, block_count=pool.block_count, block_bytes=pool.block_bytes, length_bytes=region.length_bytes
        )
        is_exposed = pool.exposure is Exposure.POOL
        is_shared = region.shared is not None and pool.is_shareable and is_exposed
        info = _core.PoolInfo(
            pool.pool_id, pool.block_count, pool.block_bytes, pool.record.digest(), is_shared, is_exposed, has_checksums
        )
        parts = [(segment.offset_bytes, segment.stride_bytes, segment.length_bytes) for segment in segments]
        if region.shared is not None:
            self.core.add_pool(info, region.shared, parts)
        else:
            self.core.add_foreign_pool(info, region.address, region.length_bytes, region.owner, parts, _device(region))

    def describe_pool(self, pool: PoolRecord) -> None:
        self.core.set_digest(pool.pool_id, pool.record.digest())

    def remove_pool(self, pool_id: int) -> None:
        self.core.remove_pool(pool_id)

    def add_region(self, record: RegionRecord, region: Region) -> None:
        info = _core.RegionInfo(
            record.region_id,
            record.length_bytes,
            record.can_read,
            record.can_write,
            record.is_shareable,
            record.exposure is Exposure.POOL,
        )
        if region.shared is not None:
            self.core.add_region(info, region.shared)
        else:
            self.core.add_foreign_region(info, region.address, region.length_bytes, region.owner, _device(region))

    def remove_region(self, region_id: int) -> None:
        self.core.remove_region(region_id)

    def admit(self, admission: _core.PeerAdmission) -> None:
        self.core.admit(admission)

    def is_connected(self, ref: AgentRef) -> bool:
        return self.core.is_connected(write_ref(ref))

    def set_peer(self, ref: AgentRef, address: DataAddress, key: bytes) -> None:
        is_same_host = address.host_id == self.address.host_id
        self.core.set_peer(
            write_ref(ref),
            key,
            tcp_host=address.tcp_host,
            tcp_port=address.tcp_port,
            unix_path=address.unix_path if is_same_host else "",
        )

    def peer_dead(self, ref: AgentRef) -> None:
        self.core.peer_dead(write_ref(ref))

    def grant(
        self,
        transfer_id: TransferId,
        pool_id: int,
        blocks: Blocks,
        *,
        reader: str,
        ttl_s: float,
        ready_blocks: int,
        content_digest: bytes = NO_CONTENT_DIGEST,
    ) -> None:
        self.core.grant(
            transfer_id.raw,
            pool_id,
            blocks,
            reader=reader,
            ttl_ns=as_nanoseconds("ttl_s", ttl_s),
            ready_blocks=ready_blocks,
            content_digest=content_digest,
        )

    def expect(self, transfer_id: TransferId, *, reader: str) -> None:
        self.core.expect(transfer_id.raw, reader=reader)

    def pulse(self, *, has_work: bool, took_in: bool = True) -> None:
        self.core.pulse(has_work, took_in)

    def has_begun(self, transfer_id: TransferId) -> bool:
        return self.core.has_begun(transfer_id.raw)

    def abort_grant(self, transfer_id: TransferId) -> None:
        self.core.abort_grant(transfer_id.raw)

    def ready(self, transfer_id: TransferId, blocks: int, *, layers: int, complete: bool) -> None:
        self.core.ready(transfer_id.raw, blocks, layers=layers, complete=complete)

    def revoke_grant(self, transfer_id: TransferId, why: str = "") -> GrantState:
        return GrantState(int(self.core.end_grant(transfer_id.raw, _core.GrantEvent.REVOKE, why)))

    def release_grant(self, transfer_id: TransferId) -> GrantState:
        return GrantState(int(self.core.end_grant(transfer_id.raw, _core.GrantEvent.RELEASE)))

    def bind_grant(self, transfer_id: TransferId, reader: str) -> str:
        return self.core.bind_grant(transfer_id.raw, reader)

    def grant_state(self, transfer_id: TransferId) -> GrantState | None:
        state = self.core.grant_state(transfer_id.raw)
        return None if state is None else GrantState(int(state))

    def pull(
        self,
        transfer_id: TransferId,
        source: AgentRef,
        pool_id: int,
        blocks: Blocks,
        *,
        first: int,
        lanes: Sequence[Lane],
        deadline_s: float,
        granted_s: float = 0.0,
        tells_granted: bool = False,
        count: int = 0,
        content_digest: bytes = NO_CONTENT_DIGEST,
        wants_checksums: bool = False,
    ) -> None:
        self.core.pull(
            transfer_id.raw,
            write_ref(source),
            pool_id,
            blocks,
            first=first,
            content_digest=content_digest,
            lanes=[LANES[lane] for lane in lanes],
            deadline_ns=time.monotonic_ns() + as_nanoseconds("deadline_s", deadline_s),
            granted_ns=as_nanoseconds("granted_s", granted_s),
            count=count,
            tells_granted=tells_granted,
            wants_checksums=wants_checksums,
        )

    def reserve(self, transfer_id: TransferId, blocks: Blocks, *, first: int) -> None:
        self.core.reserve(transfer_id.raw, blocks, first=first)

    def unreserve(self, transfer_id: TransferId) -> bool:
        return self.core.unreserve(transfer_id.raw)

    def prepare_fetch(self, order: PostOrder) -> StartPost:
        return self.core.prepare_fetch(*_written(order)).start

    def prepare_push(self, order: PostOrder) -> StartPost:
        return self.core.prepare_push(*_written(order)).start

    def cancel(self, transfer_id: TransferId) -> None:
        self.core.cancel(transfer_id.raw)

    def abort_pull(self, transfer_id: TransferId, source: AgentRef) -> None:
        self.core.abort_pull(transfer_id.raw, write_ref(source))

    def transfer_state(self, transfer_id: TransferId) -> TransferState | None:
        state = self.core.transfer_state(transfer_id.raw)
        return None if state is None else TransferState(int(state))

    def notify(self, to: AgentRef, payload: bytes) -> int:
        return self.core.notify(write_ref(to), payload)

    def set_unfetched_notification_bytes(self, nbytes: int) -> None:
        """How many bytes of taken notifications the program has not fetched: they count as waiting, which bounds the
        notifications that peers can queue."""
        self.core.set_unfetched_notification_bytes(nbytes)

    def counts(self) -> _core.EndpointCounts:
        return self.core.counts()

    def wire_counts(self) -> WireCounts:
        return WireCounts.of(self.core.statistics())

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.core.close()
            self._binding.close()


def host_id() -> str:
    """This kernel's boot id and our uid: agents with an equal one can share memory. Empty if the kernel does not say
    (a masked /proc): peers then reach such an agent only over the network."""
    try:
        boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return f"{boot_id}:{os.geteuid()}"


def _written(order: PostOrder) -> tuple[_core.AgentRef, _core.Elements, _core.Elements, list[_core.Lane]]:
    return write_ref(order.peer), order.local, order.remote, [LANES[lane] for lane in order.lanes]


def _device(region: Region) -> int:
    """The CUDA device of a region for the native core; -1: host memory."""
    return region.device if region.memory is MemoryKind.CUDA else -1


def _numeric(host: str) -> str:
    """``host`` as the numeric address that peers are given: they need no resolver of ours."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"host {host!r} cannot be resolved: {error.strerror}") from None
