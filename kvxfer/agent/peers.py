"""Which incarnations of other agents are known. Turns memberships into the transport's peers, and names into
incarnations. Decides which incarnation a name means; must never conclude a death that was not announced.

A new incarnation of an agent does not end the old one: others may still read from the old incarnation, and it may still
read, until the coordinator announces that exactly it is gone. A name means the newest known incarnation. While the
coordinator cannot be reached, known peers stay as they are (fail static), and an unknown name is not waited for.

No coordinator reports the end of a discovered incarnation. Without a session it is forgotten when a newer one of its
name is known, since a message for it would otherwise be dialed for ever. Beyond DISCOVERED_MAX the one that was heard
of longest ago is forgotten. Either may be discovered again; an incarnation that was announced as gone may not.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator

from kvxfer.errors import (
    AuthenticationError,
    ClosedError,
    CoordinatorUnavailableError,
    InvalidArgumentError,
    KvxferError,
    LimitExceededError,
    MembershipEndedError,
    PeerGoneError,
)
from kvxfer.patience import timeout_while_running
from kvxfer.protocol.handshake import SESSION_KEY_BYTES
from kvxfer.transport.base import Transport
from kvxfer.types import AgentRef, DataAddress, Incarnation, Member, Membership

log = logging.getLogger("kvxfer.agent")

DISCOVERED_MAX = 1024
"""Discovered incarnations that are remembered."""
NOWHERE = DataAddress("", 0, "", "")
"""The address of an incarnation that is reached only over the sessions that it opens."""
SEEMS_GONE = (PeerGoneError, AuthenticationError, CoordinatorUnavailableError)
"""What a peer that does not know this agent looks like."""
GONE_MAX = 4096
"""Incarnations remembered that are gone, and are not admitted again."""


class Peers:
    """The peers of one agent, on its loop."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._members: dict[AgentRef, Member] = {}
        self._newest: dict[str, Member] = {}
        self._told: dict[AgentRef, tuple[DataAddress, bytes]] = {}
        self._discovered: dict[AgentRef, None] = {}
        """In the order in which they were last heard of."""
        self._gone: dict[AgentRef, None] = {}
        self.admits_unregistered = False
        """Whether peers that neither a coordinator nor the application named are admitted, if they prove the token."""
        self._changed: asyncio.Future[None] | None = None
        self._is_closed = False
        self.coordinator_state: bool | None = None
        """Whether the coordinator is heard; ``None`` where there is none."""
        self.ask: Callable[[str], None] | None = None
        """Has the coordinator tell of an agent: in a big cluster it tells only of those that were asked for."""
        self.own_end: Callable[[], MembershipEndedError | None] = lambda: None
        """That this agent itself is no member any more, as the coordinator said last."""

    def __iter__(self) -> Iterator[Member]:
        return iter(sorted(self._members.values(), key=lambda member: member.ref))

    def __len__(self) -> int:
        return len(self._members)

    def apply(self, membership: Membership) -> None:
        """What the coordinator says now."""
        for ref in membership.gone:
            self.remove(ref)
        for member in membership.members:
            if member.ref == self._transport.ref:
                continue
            try:
                self.add(member)
            except KvxferError as error:
                log.warning("%s cannot be a peer: %s", member.ref, error)

    def add(self, member: Member) -> None:
        """Add this incarnation, or what is new about it; from now on it counts as announced. Raises
        InvalidArgumentError for an unusable key or address."""
        if len(member.session_key) != SESSION_KEY_BYTES:
            raise InvalidArgumentError(f"a session key has {SESSION_KEY_BYTES} bytes, not {len(member.session_key)}")
        contact = (member.address, member.session_key)
        if self._told.get(member.ref) != contact:
            self._transport.set_peer(member.ref, member.address, member.session_key)
            self._told[member.ref] = contact
        self._discovered.pop(member.ref, None)
        self._gone.pop(member.ref, None)
        self._members[member.ref] = member
        newest = self._newest.get(member.ref.agent_id)
        if newest is None or member.ref.incarnation.number >= newest.ref.incarnation.number:
            self._newest[member.ref.agent_id] = member
        self._tell()

    def discover(self, member: Member) -> None:
        """Know an incarnation that no coordinator announced. Raises PeerGoneError if it was announced as gone,
        InvalidArgumentError for our own name, for a name whose incarnation was announced, and as :meth:`add`,
        LimitExceededError where DISCOVERED_MAX others have sessions."""
        ref = member.ref
        if ref in self._gone:
            raise PeerGoneError(f"{ref} is gone")
        if ref.agent_id == self._transport.ref.agent_id:
            raise InvalidArgumentError(f"{ref} has our own name")
        newest = self.find(ref.agent_id)
        if newest is not None and newest.ref not in self._discovered:
            raise InvalidArgumentError(f"{newest.ref} was announced, and {ref} was only discovered")
        if ref not in self._discovered and len(self._discovered) >= DISCOVERED_MAX:
            idle = next((other for other in self._discovered if not self._transport.is_connected(other)), None)
            if idle is None:
                raise LimitExceededError(f"DISCOVERED_MAX={DISCOVERED_MAX} discovered agents have sessions")
            self._forget(idle)
        self.add(member)
        self._discovered[ref] = None
        for older in [other for other in self._discovered if self._is_outlived(other)]:
            self._forget(older)

    def _is_outlived(self, ref: AgentRef) -> bool:
        return self._newest[ref.agent_id].ref != ref and not self._transport.is_connected(ref)

    def touch(self, ref: AgentRef) -> None:
        """A discovered incarnation was heard of again."""
        if ref in self._discovered:
            self._discovered[ref] = self._discovered.pop(ref)

    def remove(self, ref: AgentRef) -> None:
        """Exactly this incarnation was announced as dead."""
        if ref in self._told:
            log.info("%s: %s is gone", self._transport.ref.agent_id, ref)
            self._forget(ref)
        if self.admits_unregistered:
            self._bar(ref)

    def turn_away(self, ref: AgentRef) -> None:
        """End the sessions of an incarnation that dialed this agent and is not to become a peer."""
        self._transport.peer_dead(ref)
        if ref in self._gone:
            self._bar(ref)

    def _bar(self, ref: AgentRef) -> None:
        """Keep an incarnation out that could still prove the token: the transport now expects a key from it that no
        process has."""
        self._transport.set_peer(ref, NOWHERE, secrets.token_bytes(SESSION_KEY_BYTES))
        self._gone[ref] = None
        if len(self._gone) > GONE_MAX:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._transport.peer_dead(oldest)

    def _forget(self, ref: AgentRef) -> None:
        del self._told[ref]
        self._discovered.pop(ref, None)
        del self._members[ref]
        if self._newest[ref.agent_id].ref == ref:
            rest = [member for member in self._members.values() if member.ref.agent_id == ref.agent_id]
            if rest:
                self._newest[ref.agent_id] = max(rest, key=lambda member: member.ref)
            else:
                del self._newest[ref.agent_id]
        self._transport.peer_dead(ref)
        self._tell()

    def find(self, agent_id: str) -> Member | None:
        """The newest incarnation with that name."""
        return self._newest.get(agent_id)

    def look_for(self, agent_id: str) -> Member | None:
        """As :meth:`find`; asks for a name that is not known, for the next time. From any thread."""
        member = self.find(agent_id)
        if member is None and self.ask is not None:
            self.ask(agent_id)
        return member

    def get(self, agent_id: str) -> Member:
        """As :meth:`find`; raises PeerGoneError, CoordinatorUnavailableError or MembershipEndedError where there is
        none."""
        member = self.find(agent_id)
        if member is None:
            raise self.unknown(agent_id)
        return member

    def has(self, ref: AgentRef) -> bool:
        return ref in self._members

    def unknown(self, agent_id: str) -> KvxferError:
        """Why a name that is not known cannot be used; asks for it, for the next time."""
        if self.ask is not None:
            self.ask(agent_id)
        if self.coordinator_state is False:
            error = CoordinatorUnavailableError(
                f"agent {agent_id!r} is not known here, and the coordinator cannot be asked"
            )
            return self.explain(error)
        return self.explain(PeerGoneError(f"no agent {agent_id!r} is known"))

    def explain(self, error: KvxferError) -> KvxferError:
        """``error`` or, where a peer seems gone because this agent itself is no member any more, that. From any
        thread."""
        own_end = self.own_end() if isinstance(error, SEEMS_GONE) else None
        return error if own_end is None else MembershipEndedError(f"{own_end}; {error}")

    async def wait(
        self, agent_id: str, timeout_s: float, *, with_pools: bool = False, incarnation: Incarnation | None = None
    ) -> Member:
        """The newest incarnation with that name, as soon as a membership has it (and, with ``with_pools``, at least one
        pool of it). ``incarnation``: only that incarnation counts.

        Raises PeerGoneError after ``timeout_s`` in which this process ran, and at once if no coordinator could tell or
        a later incarnation is known; CoordinatorUnavailableError as soon as the coordinator cannot be reached, or
        MembershipEndedError if that has ended this agent.
        """
        if self.ask is not None and self._find_incarnation(agent_id, incarnation) is None:
            self.ask(agent_id)
        try:
            async with timeout_while_running(timeout_s):
                while True:
                    member = self._find_incarnation(agent_id, incarnation)
                    if member is not None and (member.pools or not with_pools):
                        return member
                    if self._is_closed:
                        raise ClosedError("the agent was closed")
                    if self.coordinator_state is not True:
                        raise self.unknown(agent_id)
                    await self._next_change()
        except TimeoutError:
            if self._find_incarnation(agent_id, incarnation) is None:
                raise self.explain(PeerGoneError(f"no agent {agent_id!r} joined within {timeout_s:g} s")) from None
            raise PeerGoneError(f"agent {agent_id!r} published no pool within {timeout_s:g} s") from None

    def _find_incarnation(self, agent_id: str, incarnation: Incarnation | None) -> Member | None:
        member = self.find(agent_id)
        if member is None or incarnation is None or member.ref.incarnation == incarnation:
            return member
        if member.ref.incarnation.number >= incarnation.number:
            raise PeerGoneError(
                f"agent {agent_id!r} was restarted: it is {member.ref} now, and no longer #{incarnation}"
            )
        return None

    def coordinator_is(self, is_connected: bool) -> None:
        self.coordinator_state = is_connected
        self._tell()

    def close(self) -> None:
        self._is_closed = True
        self._tell()

    async def _next_change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _tell(self) -> None:
        if self._changed is not None:
            changed, self._changed = self._changed, None
            if not changed.done():
                changed.set_result(None)
