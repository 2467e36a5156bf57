"""Whether the peers of open rooms are alive. Decides when one counts as gone; must never know what a room is.

Without a coordinator no death is announced. So each peer of an open room is told something every half second: its
agent says that it came, from a thread that Python does not stop. A process that was killed has no session any more, and
opens none; one that was stopped, or cannot be reached, says nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable

from kvxfer.agent import Agent, Delivery
from kvxfer.connectors.common.pauses import Pauses
from kvxfer.connectors.sglang.messages import Alive, encode
from kvxfer.errors import KvxferError, LimitExceededError, PeerGoneError
from kvxfer.types import AgentRef, TransferId

log = logging.getLogger("kvxfer.sglang")

LOOK_S = 0.1
ASK_S = 0.5
SILENT_S = 2.0
"""A peer that confirms nothing for this time, or is not known at all, is gone."""
LOST_S = 0.9
"""A peer without a session for this time, though it was dialed all the time, is gone too."""


@dataclasses.dataclass(eq=False)
class PeerLeg:
    """The part of one peer in a room."""

    transfer_id: TransferId
    agent_id: str
    rank: int
    ref: AgentRef | None = None
    """The peer's incarnation, once it is known."""
    began_s: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass(eq=False)
class _Probe:
    """What is known of one incarnation."""

    at_s: float = 0.0
    answer: asyncio.Future[KvxferError | None] | None = None
    down_s: float | None = None
    full_s: float | None = None
    """Since when its unconfirmed messages leave no room for another."""


class Watch:
    """On the agent's loop. ``legs()``: those of rooms that are not over; ``on_gone`` ends the room of one."""

    def __init__(
        self, agent: Agent, legs: Callable[[], Iterable[PeerLeg]], on_gone: Callable[[PeerLeg, KvxferError], None]
    ) -> None:
        self._agent = agent
        self._legs = legs
        self._on_gone = on_gone
        self._asked: dict[AgentRef, _Probe] = {}
        self._pauses = Pauses(LOOK_S)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                self.look(time.monotonic())
            except KvxferError as error:
                log.debug("peers could not be looked at: %s", error)
            await asyncio.sleep(LOOK_S)

    def look(self, now_s: float) -> None:
        """Ask the peers whose turn it is, and give up those that have not answered."""
        legs = list(self._legs())
        self._put_off(legs, self._pauses.look(now_s))
        gone: dict[AgentRef, KvxferError | None] = {}
        for leg in legs:
            error = self._look_at(leg, now_s, gone)
            if error is not None:
                self._on_gone(leg, self._agent.explain(error))
        for ref in [ref for ref in self._asked if ref not in gone]:
            del self._asked[ref]

    def _put_off(self, legs: list[PeerLeg], by_s: float) -> None:
        """Extend every wait by the time for which this process did not run."""
        if not by_s:
            return
        for leg in legs:
            leg.began_s += by_s
        for asked in self._asked.values():
            asked.at_s += by_s
            asked.down_s = None if asked.down_s is None else asked.down_s + by_s
            asked.full_s = None if asked.full_s is None else asked.full_s + by_s

    def _look_at(self, leg: PeerLeg, now_s: float, seen: dict[AgentRef, KvxferError | None]) -> KvxferError | None:
        member = self._agent.find_member(leg.agent_id)
        if leg.ref is None and member is not None:
            leg.ref = member.ref
        if leg.ref is None:
            is_late = now_s - leg.began_s >= SILENT_S
            return PeerGoneError(f"no agent {leg.agent_id!r} is known") if is_late else None
        if member is None or member.ref != leg.ref:
            now = "gone" if member is None else f"restarted: it is {member.ref} now"
            return PeerGoneError(f"{leg.ref} is {now}")
        if leg.ref not in seen:
            seen[leg.ref] = self._ask(leg.ref, now_s)
        return seen[leg.ref]

    def _ask(self, ref: AgentRef, now_s: float) -> KvxferError | None:
        asked = self._asked.setdefault(ref, _Probe())
        if self._agent.is_connected(ref.agent_id):
            asked.down_s = None
        else:
            asked.down_s = now_s if asked.down_s is None else asked.down_s
            if now_s - asked.down_s >= LOST_S:
                return PeerGoneError(f"{ref} cannot be reached")
        if asked.answer is not None and asked.answer.done():
            error, asked.answer = asked.answer.result(), None
            if error is not None:
                return error
        if asked.answer is not None:
            if now_s - asked.at_s >= SILENT_S:
                return PeerGoneError(f"{ref} has said nothing for {SILENT_S:g} s")
        elif now_s - asked.at_s >= ASK_S:
            try:
                delivery = self._agent.notify(ref.agent_id, encode(Alive()))
            except LimitExceededError:
                asked.full_s = now_s if asked.full_s is None else asked.full_s
                if now_s - asked.full_s < 2 * SILENT_S:
                    return None
                return PeerGoneError(f"{ref} has not had room for another message for {2 * SILENT_S:g} s")
            asked.full_s = None
            asked.at_s, asked.answer = now_s, asyncio.ensure_future(_outcome(delivery))
        return None


async def _outcome(delivery: Delivery) -> KvxferError | None:
    try:
        await delivery
    except KvxferError as error:
        return error
    return None
