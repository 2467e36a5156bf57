"""Agents that find each other without a coordinator: each exports its metadata, signed with the cluster token, and adds
the agents whose signed metadata it is given. Decides which metadata is believed; :mod:`kvxfer.protocol.signed_metadata`
defines what a signature proves, and the native core admits the peers that dial (``PeerAdmission.derived_keys``).

An agent sends nothing to an address that no holder of the token wrote, and only its own log says why it refused
metadata.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging

from kvxfer._native._core import PeerAdmission
from kvxfer.agent.peers import NOWHERE
from kvxfer.agent.pools import AgentPools
from kvxfer.agent.runtime import AgentRuntime
from kvxfer.errors import InvalidArgumentError, KvxferError, PeerGoneError, ProtocolError
from kvxfer.protocol.handshake import session_key, session_root
from kvxfer.protocol.signed_metadata import Signer
from kvxfer.ratelimit import RateLimitedWarning
from kvxfer.transport.base import Transport
from kvxfer.types import AgentRef, Incarnation, Member, Role, WorkerInfo

log = logging.getLogger("kvxfer.agent")


class Discovery:
    """The discovery of one agent. Everything runs on the agent's loop."""

    def __init__(
        self, token: bytes, info: WorkerInfo, pools: AgentPools, runtime: AgentRuntime, transport: Transport
    ) -> None:
        """``info`` and ``pools``: what peers learn of this agent. From now on a peer that proves the token is admitted.

        Raises ConfigError for a token that is too short."""
        self._signer = Signer(token)
        self._root = session_root(token)
        self._info = info
        self._pools = pools
        self._peers = runtime.peers
        self._transport = transport
        self._refused = RateLimitedWarning(log, "the metadata of agent %r was refused: %s")
        runtime.on_session_up = self.session_up
        self._peers.admits_unregistered = True
        transport.admit(PeerAdmission.derived_keys(self._root))

    def export_metadata(self) -> str:
        """The signed metadata of this incarnation. Raises InvalidArgumentError if it would be too long."""
        from kvxfer.rpc.convert import write_member

        own = Member(self._transport.ref, self._info, self._transport.address, tuple(self._pools.published))
        return self._signer.sign(write_member(own, b"").SerializeToString())

    def add_remote_agent(self, metadata: str, agent_id: str, incarnation: Incarnation | None) -> Member:
        """Add the incarnation that ``metadata`` describes. It must have the name ``agent_id`` and, if one is given, be
        that ``incarnation``.

        If ``incarnation`` is given and known already, it is returned as it is known, without a look at the metadata.
        But if a pool of it had unknown weights, newer metadata may know them: they replace the old ones if they can be
        read. Raises PeerGoneError, which does not say why."""
        known = self._peers.find(agent_id)
        if known is not None and known.pools and incarnation == known.ref.incarnation:
            self._peers.touch(known.ref)
            has_weights = all(pool.record.has_known_weights for pool in known.pools)
            return known if has_weights else self._renewed(known, metadata)
        try:
            member = self._read(metadata)
            if member.ref.agent_id != agent_id or incarnation not in (None, member.ref.incarnation):
                raise InvalidArgumentError(f"the metadata is of {member.ref}")
            if known is not None and known.ref.incarnation.number > member.ref.incarnation.number:
                raise PeerGoneError(f"the metadata is of {member.ref}, and the agent is {known.ref} now")
            self._peers.discover(member)
        except KvxferError as error:
            self._refused.say(agent_id, error)
            raise PeerGoneError(f"the request's metadata does not lead to agent {agent_id!r}") from None
        return member

    def session_up(self, ref: AgentRef) -> None:
        """A session with that incarnation came up, so it holds the token. An unregistered peer can be answered from now
        on, over the sessions that it opens."""
        if self._peers.has(ref):
            self._peers.touch(ref)
            return
        key = session_key(self._root, self._transport.ref, ref)
        info = WorkerInfo(ref.agent_id, Role.BOTH, "", "")
        try:
            self._peers.discover(Member(ref, info, NOWHERE, (), session_key=key))
        except KvxferError as error:
            self._refused.say(ref.agent_id, error)
            self._peers.turn_away(ref)

    def _renewed(self, known: Member, metadata: str) -> Member:
        """The known incarnation as newer metadata describes it, or unchanged if the metadata is not of it."""
        with contextlib.suppress(KvxferError):
            member = self._read(metadata)
            if member.ref == known.ref:
                self._peers.discover(member)
                return member
        return known

    def _read(self, metadata: str) -> Member:
        """Raises AuthenticationError, ProtocolError."""
        from google.protobuf.message import DecodeError

        from kvxfer._pb import control_pb2
        from kvxfer.rpc.convert import read_member

        try:
            message = control_pb2.Member.FromString(self._signer.verify(metadata))
        except DecodeError:
            raise ProtocolError("signed agent metadata cannot be parsed") from None
        member = read_member(message)
        return dataclasses.replace(member, session_key=session_key(self._root, self._transport.ref, member.ref))
