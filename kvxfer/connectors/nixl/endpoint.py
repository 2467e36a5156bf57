"""The kvxfer side of one NIXL agent: its name and incarnation, its memory, its remotes, its notifications. Decides when
the transport opens and what the metadata says; must never know NIXL's handles.

The transport opens with the first network backend, as NIXL's does. The background threads of the metadata exchange hold
this object, and never the agent in front of it: so that an agent that the program drops is closed.
"""

from __future__ import annotations

import hmac
import os
import secrets
import threading

from kvxfer._native._core import PeerAdmission
from kvxfer.connectors.nixl.dlists import nixlRegDList
from kvxfer.connectors.nixl.errors import (
    nixlBackendError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNotFoundError,
    translated,
)
from kvxfer.connectors.nixl.metadata import (
    AgentMetadata,
    decode_metadata,
    encode_metadata,
    invalidation_proof,
    wire_id,
)
from kvxfer.connectors.nixl.notification_inbox import HELLO, NotificationInbox, envelope_for
from kvxfer.connectors.nixl.registry import Registry
from kvxfer.connectors.nixl.remotes import Remotes
from kvxfer.connectors.nixl.settings import Settings
from kvxfer.transport.engine import TransferEngine
from kvxfer.transport.native import NativeBinding
from kvxfer.types import AgentRef, Incarnation, RegionRecord


class Link:
    """What exists while the transport is open."""

    def __init__(self, name: str, settings: Settings, inbox: NotificationInbox) -> None:
        """Raises by NIXL's names."""
        with translated():
            config = settings.agent_config(os.environ)
            self.ref = AgentRef(wire_id(name), Incarnation(0, secrets.token_bytes(16)))
            self.capability = secrets.token_bytes(32)
            binding = NativeBinding(config)
            try:
                self.transport = binding.open(self.ref, config)
            except BaseException:
                binding.close()
                raise
            self.transport.admit(PeerAdmission.bearer_key(self.capability))
            inbox.on_held = self.transport.set_unfetched_notification_bytes
            self.poster = TransferEngine(self.transport, config=config, on_event=inbox.take_event)
            self.registry = Registry(self.poster)
            self.remotes = Remotes(name, self.transport)
            self.wrap = envelope_for(name)


class Endpoint:
    """Thread-safe; every method raises by NIXL's names."""

    def __init__(self, name: str, settings: Settings) -> None:
        if not name:
            raise nixlInvalidParamError("an agent needs a non-empty name")
        self.name = name
        self.settings = settings
        self.inbox = NotificationInbox()
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        return self._link is not None

    @property
    def link(self) -> Link:
        """Raises nixlBackendError where no network backend was created, or all is closed."""
        if self._link is None:
            raise nixlBackendError(
                f"agent {self.name!r} "
                + ("was closed" if self._is_closed else "has no backend that reaches other agents")
            )
        return self._link

    def open(self) -> None:
        """Open a port and a socket; does nothing if that was done."""
        with self._lock:
            if self._is_closed:
                raise nixlBackendError(f"agent {self.name!r} was closed")
            if self._link is None:
                self._link = Link(self.name, self.settings, self.inbox)

    def close(self) -> None:
        """Close. After this has returned no byte of the agent's memory is read or written. May be called twice."""
        with self._lock:
            link, self._link, self._is_closed = self._link, None, True
        if link is not None:
            self.inbox.on_held = lambda nbytes: None
            link.transport.close()

    def poll(self) -> None:
        """Handle the events since the last call; without events, move bytes. Never waits."""
        with translated():
            self.link.poster.poll()

    # --- metadata ---

    def metadata(self) -> bytes:
        """The whole metadata. Raises nixlInvalidParamError if it would lead nowhere."""
        if self._link is None:
            raise nixlInvalidParamError(f"agent {self.name!r} has no backend that reaches other agents")
        records, empties = self._link.poster.records(), self._link.registry.empties
        return encode_metadata(self._describe(records, empties, is_whole=True, has_connection=True))

    def partial_metadata(self, descs: nixlRegDList, *, has_connection: bool) -> bytes:
        """Metadata of these rows, with or without the address; an empty list means the address only."""
        link = self.link
        records = () if descs.isEmpty() else link.registry.records(descs)
        empties = frozenset(descs.rows[descs.rows[:, 1] == 0, 0].tolist())
        return encode_metadata(
            self._describe(records, empties, is_whole=False, has_connection=has_connection or descs.isEmpty())
        )

    def load(self, blob: bytes, name: str | None = None) -> str:
        """Add another agent's metadata; returns its name. Raises nixlMismatchError, and adds nothing, if it is not that
        of agent ``name``."""
        metadata = decode_metadata(blob)
        if name not in (None, metadata.name):
            raise nixlMismatchError(f"this is the metadata of agent {metadata.name!r}, not of {name!r}")
        if self._link is None:
            raise nixlBackendError(f"agent {self.name!r} has no backend that reaches agent {metadata.name!r}")
        return self._link.remotes.add(metadata).name

    def forget(self, name: str) -> bool:
        """Remove a remote agent; returns whether it was known. Raises nixlInvalidParamError for our own name."""
        if name == self.name:
            raise nixlInvalidParamError("an agent cannot remove itself")
        return self._link is not None and self._link.remotes.remove(name)

    def own_proof(self) -> bytes:
        """The proof, for holders of our metadata, that this agent takes it back."""
        return invalidation_proof(self.link.capability, self.link.ref)

    def forget_proven(self, name: str, proof: bytes) -> None:
        """Remove a remote agent that asked for it itself. Raises nixlNotFoundError for any other proof."""
        remote = None if self._link is None else self._link.remotes.find(name)
        if remote is None or not hmac.compare_digest(proof, invalidation_proof(remote.capability, remote.ref)):
            raise nixlNotFoundError(f"agent {name!r} is not known here in the incarnation that asks to be forgotten")
        self.forget(name)

    # --- notifications ---

    def notify(self, name: str, message: bytes) -> None:
        """Raises nixlNotFoundError for an agent that is not known."""
        link = self.link
        payload = link.wrap(message)
        if name == self.name:
            self.inbox.put(name, message)
            return
        remote = link.remotes.get(name)
        try:
            with translated():
                link.transport.notify(remote.ref, payload)
        except nixlNotAllowedError as error:
            raise nixlNotAllowedError(f"agent {name!r}: {error}") from error

    def connect(self, name: str) -> None:
        """Open a session in advance."""
        link = self.link
        remote = link.remotes.get(name)
        with translated():
            link.transport.notify(remote.ref, HELLO)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else repr(self._link.transport) if self._link is not None else "not open"
        return f"<Endpoint {self.name} {state}>"

    def _describe(
        self, records: tuple[RegionRecord, ...], empties: frozenset[int], *, is_whole: bool, has_connection: bool
    ) -> AgentMetadata:
        link = self.link
        address, capability = (link.transport.address, link.capability) if has_connection else (None, b"")
        return AgentMetadata(self.name, link.ref, records, is_whole, address, capability, empties)
