"""Which lives of other agents are known: turns memberships into what the transport must know of peers, and names into
lives. Decides which life a name means; must never conclude a death that nobody announced.

A new life of an agent does not end the old one: the old life may still be read from, or be reading, until the
coordinator says that exactly it is gone. A name means the newest life known. While the coordinator cannot be reached,
what is known stays as it is (fail static), and a name that is not known cannot be waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from kvxfer.errors import Closed, CoordinatorUnavailable, InvalidArgument, KvxferError, PeerGone
from kvxfer.protocol.handshake import SESSION_KEY_BYTES
from kvxfer.transport.base import Transport
from kvxfer.types import AgentRef, DataAddress, Incarnation, Member, Membership

log = logging.getLogger("kvxfer.agent")


class Peers:
    """The peers of one agent, on its loop."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._members: dict[AgentRef, Member] = {}
        self._newest: dict[str, Member] = {}
        self._told: dict[AgentRef, tuple[DataAddress, bytes]] = {}
        self._changed: asyncio.Future[None] | None = None
        self._is_closed = False
        self.coordinator_state: bool | None = None
        """Whether the coordinator is heard; ``None`` where there is none."""

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
        """Know this life, or what is new about it. Raises InvalidArgument for a key or address that cannot be used."""
        if len(member.session_key) != SESSION_KEY_BYTES:
            raise InvalidArgument(f"a session key has {SESSION_KEY_BYTES} bytes, not {len(member.session_key)}")
        contact = (member.address, member.session_key)
        if self._told.get(member.ref) != contact:
            self._transport.set_peer(member.ref, member.address, member.session_key)
            self._told[member.ref] = contact
        self._members[member.ref] = member
        newest = self._newest.get(member.ref.agent_id)
        if newest is None or member.ref.incarnation.number >= newest.ref.incarnation.number:
            self._newest[member.ref.agent_id] = member
        self._tell()

    def remove(self, ref: AgentRef) -> None:
        """The announced death of exactly this life."""
        if self._told.pop(ref, None) is None:
            return
        log.info("%s: %s is gone", self._transport.ref.agent_id, ref)
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
        """The newest life with that name."""
        return self._newest.get(agent_id)

    def unknown(self, agent_id: str) -> KvxferError:
        """Why a name that is not known cannot be used."""
        if self.coordinator_state is False:
            return CoordinatorUnavailable(
                f"agent {agent_id!r} is not known here, and the coordinator, who would know, cannot be reached"
            )
        return PeerGone(f"no agent {agent_id!r} is known")

    async def wait(
        self, agent_id: str, timeout_s: float, *, with_pools: bool = False, incarnation: Incarnation | None = None
    ) -> Member:
        """The newest life with that name, waiting for a membership that has it (and, with ``with_pools``, at least one
        pool of it). ``incarnation``: only that life will do.

        Raises PeerGone after ``timeout_s``, and at once where nobody could tell or a later life than that is known;
        CoordinatorUnavailable as soon as the coordinator cannot be reached.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    member = self._find_life(agent_id, incarnation)
                    if member is not None and (member.pools or not with_pools):
                        return member
                    if self._is_closed:
                        raise Closed("the agent was closed")
                    if self.coordinator_state is not True:
                        raise self.unknown(agent_id)
                    await self._next_change()
        except TimeoutError:
            if self._find_life(agent_id, incarnation) is None:
                raise PeerGone(f"no agent {agent_id!r} joined within {timeout_s:g} s") from None
            raise PeerGone(f"agent {agent_id!r} published no pool within {timeout_s:g} s") from None

    def _find_life(self, agent_id: str, incarnation: Incarnation | None) -> Member | None:
        member = self.find(agent_id)
        if member is None or incarnation is None or member.ref.incarnation == incarnation:
            return member
        if member.ref.incarnation.number >= incarnation.number:
            raise PeerGone(f"agent {agent_id!r} was restarted: it is {member.ref} now, and no longer #{incarnation}")
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
