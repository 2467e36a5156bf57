"""One receiver's copy of the directory, built from the coordinator's messages; must never know how they were sent, or
that a connection exists.

The coordinator is one process that may be restarted with an empty directory, and losing it must lose nothing (fail
static). So a whole snapshot is read differently depending on which coordinator says it. From the same epoch, or from a
settled coordinator, a missing member is gone. From a coordinator that is new and not settled yet, a missing member is
only *held*: kept as it was until it shows up again, is replaced, or the coordinator settles without it. Every
incarnation that was ever in a Membership is named in ``gone`` exactly once when it ends, however the parts were cut.
(An incarnation that ended and is back before a receiver could be told was never away for it.)
"""

from __future__ import annotations

import dataclasses

from kvxfer.errors import ProtocolError
from kvxfer.protocol.directory import Change
from kvxfer.types import AgentRef, Member, Membership


class Mirror:
    """Feed it :class:`Change` parts, take whole :class:`Membership` values out."""

    def __init__(self, *, members_max: int = 1 << 20) -> None:
        """``members_max`` bounds what a sender can make us hold; ProtocolError beyond."""
        self._members_max = members_max
        self._members: dict[str, Member] = {}
        self._held: set[str] = set()
        self._epoch = b""
        self._revision = 0
        self._parts: list[Member] = []

    @property
    def membership(self) -> Membership:
        """The present view, with ``gone`` empty."""
        return Membership(self._revision, tuple(self._members[agent_id] for agent_id in sorted(self._members)))

    def apply(self, change: Change, *, is_last: bool = True) -> Membership | None:
        """Take one part; after the last one, the new view with the incarnations that ended, or ``None`` if nothing
        changed.

        Raises ProtocolError for a part that cannot follow what came before.
        """
        if len(self._parts) + len(change.members) > self._members_max:
            raise ProtocolError(f"membership exceeds members_max={self._members_max}")
        self._parts += change.members
        if not is_last:
            return None
        members, self._parts = self._parts, []
        if not change.is_whole and change.epoch != self._epoch:
            raise ProtocolError("a partial membership of a coordinator that sent no whole one")
        if not change.is_whole and change.revision < self._revision:
            raise ProtocolError(f"membership went back from revision {self._revision} to {change.revision}")
        before = (self._revision, len(self._held))
        gone = self._apply_whole(change, members) if change.is_whole else self._apply_partial(change, members)
        if change.is_settled:
            gone += [self._members.pop(agent_id).ref for agent_id in sorted(self._held)]
            self._held.clear()
        self._epoch, self._revision = change.epoch, change.revision
        if not (change.is_whole or members or gone) and before == (self._revision, len(self._held)):
            return None
        return dataclasses.replace(self.membership, gone=tuple(gone))

    def reset_parts(self) -> None:
        """The connection broke: parts of an unfinished update mean nothing."""
        self._parts = []

    def _apply_whole(self, change: Change, members: list[Member]) -> list[AgentRef]:
        present = {member.ref.agent_id for member in members}
        missing = sorted(set(self._members) - present)
        gone: list[AgentRef] = []
        if change.epoch == self._epoch:
            gone = [self._members.pop(agent_id).ref for agent_id in missing if agent_id not in self._held]
            self._held -= present
        else:
            self._held = set(missing)
        return gone + self._put(members)

    def _apply_partial(self, change: Change, members: list[Member]) -> list[AgentRef]:
        gone: list[AgentRef] = []
        for ref in change.gone:
            known = self._members.get(ref.agent_id)
            if known is not None and known.ref == ref:
                del self._members[ref.agent_id]
                self._held.discard(ref.agent_id)
            if ref not in gone:
                gone.append(ref)
        return gone + [ref for ref in self._put(members) if ref not in gone]

    def _put(self, members: list[Member]) -> list[AgentRef]:
        """Store ``members``; returns the incarnations that a new incarnation of the same agent id ended."""
        replaced: list[AgentRef] = []
        for member in members:
            known = self._members.get(member.ref.agent_id)
            if known is not None and known.ref != member.ref:
                replaced.append(known.ref)
            self._members[member.ref.agent_id] = member
            self._held.discard(member.ref.agent_id)
        return replaced
