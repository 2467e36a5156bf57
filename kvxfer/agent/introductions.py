"""Agents that know each other without a coordinator: each makes a card of itself, sealed with the cluster token, and
knows whoever's card it is handed, by whatever way. Decides which cards are believed; what a seal proves is
:mod:`kvxfer.protocol.introduction`'s, and the native core decides which dialing peers it
accepts (``accept_derived_keys``).

Nothing is sent to an address that no holder of the token wrote down, and why a card was not believed stands in this
agent's log only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging

from kvxfer.agent.peers import NOWHERE
from kvxfer.agent.pools import Pools
from kvxfer.agent.runtime import AgentRuntime
from kvxfer.errors import InvalidArgumentError, KvxferError, PeerGoneError, ProtocolError
from kvxfer.protocol.handshake import session_key, session_root
from kvxfer.protocol.introduction import Seal
from kvxfer.ratelimit import RateLimitedWarning
from kvxfer.transport.base import Transport
from kvxfer.types import AgentRef, Incarnation, Member, Role, WorkerInfo

log = logging.getLogger("kvxfer.agent")


class Introductions:
    """Of one agent, on its loop."""

    def __init__(self, token: bytes, info: WorkerInfo, pools: Pools, life: AgentRuntime, transport: Transport) -> None:
        """``info`` and ``pools``: what others shall know of this agent. From now on whoever holds the token is let in.

        Raises ConfigError for a token that is too short."""
        self._seal = Seal(token)
        self._root = session_root(token)
        self._info = info
        self._pools = pools
        self._peers = life.peers
        self._transport = transport
        self._complaint = RateLimitedWarning(log, "agent %r was not met: %s")
        life.on_session_up = self.was_met
        self._peers.admits_strangers = True
        transport.accept_derived_keys(self._root)

    def card(self) -> str:
        """Of this life, sealed. Raises InvalidArgumentError where it would be too long."""
        from kvxfer.rpc.convert import write_member

        own = Member(self._transport.ref, self._info, self._transport.address, tuple(self._pools.published))
        return self._seal.close(write_member(own, b"").SerializeToString())

    def meet(self, card: str, agent_id: str, incarnation: Incarnation | None) -> Member:
        """Know the life that ``card`` is of, which must have that name and, where one is given, be that life; for one
        that is given and known already no card is read, unless it did not know its weights when it was met: then a card
        that cannot be read changes nothing. Raises PeerGoneError, which says nothing of why."""
        known = self._peers.find(agent_id)
        if known is not None and known.pools and incarnation == known.ref.incarnation:
            self._peers.touch(known.ref)
            return known if all(pool.record.has_known_weights for pool in known.pools) else self._renewed(known, card)
        try:
            member = self._read(card)
            if member.ref.agent_id != agent_id or incarnation not in (None, member.ref.incarnation):
                raise InvalidArgumentError(f"the card is of {member.ref}")
            if known is not None and known.ref.incarnation.number > member.ref.incarnation.number:
                raise PeerGoneError(f"the card is of {member.ref}, and it is {known.ref} now")
            self._peers.introduce(member)
        except KvxferError as error:
            self._complaint.say(agent_id, error)
            raise PeerGoneError(f"agent {agent_id!r} could not be met by what the request carries") from None
        return member

    def was_met(self, ref: AgentRef) -> None:
        """A session with that life came up: it holds the token. One that nobody named can be answered from now on, over
        the sessions that it opens."""
        if self._peers.has(ref):
            self._peers.touch(ref)
            return
        key = session_key(self._root, self._transport.ref, ref)
        info = WorkerInfo(ref.agent_id, Role.BOTH, "", "")
        try:
            self._peers.introduce(Member(ref, info, NOWHERE, (), session_key=key))
        except KvxferError as error:
            self._complaint.say(ref.agent_id, error)
            self._peers.turn_away(ref)

    def _renewed(self, known: Member, card: str) -> Member:
        """What a later card of a life that is known says; that life as it was known, where it is no such card."""
        with contextlib.suppress(KvxferError):
            member = self._read(card)
            if member.ref == known.ref:
                self._peers.introduce(member)
                return member
        return known

    def _read(self, card: str) -> Member:
        """Raises AuthenticationError, ProtocolError."""
        from google.protobuf.message import DecodeError

        from kvxfer._pb import control_pb2
        from kvxfer.rpc.convert import read_member

        try:
            message = control_pb2.Member.FromString(self._seal.open(card))
        except DecodeError:
            raise ProtocolError("what stands on the card cannot be read") from None
        member = read_member(message)
        return dataclasses.replace(member, session_key=session_key(self._root, self._transport.ref, member.ref))
