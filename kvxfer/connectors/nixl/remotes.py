"""The agents whose metadata was added. Decides how new metadata changes what is known; must never decode a blob, nor
know how it came.

A remote is one incarnation of an agent. Another incarnation under the same name is refused until the first was removed,
as in NIXL; whole metadata replaces the known regions, partial metadata adds to them.
"""

from __future__ import annotations

import logging
import threading

from kvxfer.config import is_loopback
from kvxfer.connectors.nixl.errors import nixlInvalidParamError, nixlNotAllowedError, nixlNotFoundError, translated
from kvxfer.connectors.nixl.metadata import AgentMetadata
from kvxfer.connectors.nixl.registry import newest
from kvxfer.policy.calibration import SMALL_BYTES, Calibration
from kvxfer.transport.base import Transport
from kvxfer.transport.descriptors import RemotePeer
from kvxfer.types import DataAddress, Lane

REMOTES_MAX = 4096
log = logging.getLogger("nixl.kvxfer")


class RemoteAgent:
    """One incarnation of another agent. ``peer`` is made anew when its regions change."""

    def __init__(self, metadata: AgentMetadata, address: DataAddress, ours: DataAddress) -> None:
        self.name = metadata.name
        self.ref = metadata.ref
        self.address = address
        self.capability = metadata.capability
        self.is_gone = False
        self.speed = Calibration(is_same_host=address.host_id == ours.host_id)
        self.peer = RemotePeer(metadata.ref, address, newest(metadata.records))
        self.empties = metadata.empties

    def update(self, metadata: AgentMetadata) -> None:
        """Raises nixlNotAllowedError for the metadata of another incarnation, or of this one elsewhere."""
        is_other = metadata.address is not None and (metadata.address, metadata.capability) != (
            self.address,
            self.capability,
        )
        if metadata.ref != self.ref or is_other:
            raise nixlNotAllowedError(
                f"agent {self.name!r} is known as {self.ref}, and this is the metadata of {metadata.ref}: "
                "remove_remote_agent first"
            )
        records = metadata.records if metadata.is_whole else (*self.peer.table.records, *metadata.records)
        unique = {record.region_id: record for record in records}
        self.peer = RemotePeer(self.ref, self.address, newest(unique.values()))
        self.empties = metadata.empties if metadata.is_whole else self.empties | metadata.empties

    def estimate_s(self, lane: Lane | None, nbytes: int) -> float | None:
        """How long so many bytes took so far; None without a transfer. ``lane`` None: of the lane used most."""
        figures = self.speed.figures()
        figure = figures.get(lane) if lane is not None else None
        if figure is None:
            figure = max(figures.values(), key=lambda seen: seen.large_count + seen.small_count, default=None)
        if figure is None:
            return None
        if nbytes < SMALL_BYTES or not figure.large_count:
            return figure.small_s if figure.small_count else nbytes / (figure.gb_per_s * 1e9)
        return figure.small_s + nbytes / (figure.gb_per_s * 1e9)

    def __repr__(self) -> str:
        return f"<Remote {self.name} {self.peer!r}>"


class Remotes:
    """All remote agents that one agent knows, by name. Thread-safe."""

    def __init__(self, own_name: str, transport: Transport) -> None:
        self._own_name = own_name
        self._transport = transport
        self._lock = threading.RLock()
        self._known: dict[str, RemoteAgent] = {}

    def add(self, metadata: AgentMetadata) -> RemoteAgent:
        """Raises nixlInvalidParamError (our own), nixlNotFoundError (partial, without connection info, of an agent not
        known), nixlNotAllowedError (another incarnation; more than REMOTES_MAX)."""
        with self._lock:
            if metadata.name == self._own_name:
                raise nixlInvalidParamError("this is our own metadata; an agent reaches itself without")
            known = self._known.get(metadata.name)
            if known is not None:
                known.update(metadata)
                return known
            if metadata.address is None:
                raise nixlNotFoundError(
                    f"this partial metadata of agent {metadata.name!r} has no connection info, and none came before"
                )
            if len(self._known) >= REMOTES_MAX:
                raise nixlNotAllowedError(f"no more than REMOTES_MAX={REMOTES_MAX} remote agents can be known")
            remote = RemoteAgent(metadata, metadata.address, self._transport.address)
            self._warn_where_unreachable(remote)
            with translated():
                self._transport.set_peer(remote.ref, remote.address, remote.capability)
            self._known[remote.name] = remote
            return remote

    def remove(self, name: str) -> bool:
        """Remove it: transfers with it end. Returns whether it was known."""
        with self._lock:
            remote = self._known.pop(name, None)
            if remote is None:
                return False
            remote.is_gone = True
            with translated():
                self._transport.peer_dead(remote.ref)
            return True

    def find(self, name: str) -> RemoteAgent | None:
        with self._lock:
            return self._known.get(name)

    def get(self, name: str) -> RemoteAgent:
        """Raises nixlNotFoundError."""
        remote = self.find(name)
        if remote is None:
            raise nixlNotFoundError(f"metadata of agent {name!r} was not added, or was removed")
        return remote

    def __len__(self) -> int:
        return len(self._known)

    def _warn_where_unreachable(self, remote: RemoteAgent) -> None:
        address = remote.address
        if (
            is_loopback(address.tcp_host)
            and address.host_id.partition(":")[0] != self._transport.address.host_id.partition(":")[0]
        ):
            log.warning(
                "agent %s is on another host and listens on its loopback only: set KVXFER_NIXL_HOST there", remote.name
            )
