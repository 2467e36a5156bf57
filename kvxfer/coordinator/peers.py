"""What the other coordinators of a cluster say of the agents that they hold: their loads, which no store has, and that
they are there at all. Decides which coordinators are watched; must never judge a member.
"""

from __future__ import annotations

import asyncio
import logging

from kvxfer.coordinator.keeper import StoreKeeper
from kvxfer.errors import KvxferError
from kvxfer.rpc.watch import MembershipWatch, acquaint
from kvxfer.trust.files import FollowedFiles

log = logging.getLogger("kvxfer.coordinator")

CALLS_MAX = 256
"""Calls at other coordinators at a time."""


class PeerWatches:
    """A membership watch of each other coordinator that is alive, or answers. Runs on the coordinator's loop."""

    def __init__(self, keeper: StoreKeeper, token: bytes, tls: FollowedFiles | None) -> None:
        """``tls``: this coordinator's own certificate, shown to the others; None: the cluster token is shown."""
        self._keeper = keeper
        self._token = token
        self._tls = tls
        self._watches: dict[tuple[str, str], MembershipWatch] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def reconcile(self) -> None:
        """Watch those that came, leave those that went; call a few times per heartbeat."""
        heard = {peer for peer, watch in self._watches.items() if watch.is_connected}
        wanted = set(self._keeper.peers.items()) | heard
        gone = [self._watches.pop(peer) for peer in set(self._watches) - wanted]
        for name, address in wanted - set(self._watches):
            self._watches[name, address] = self._watch(name, address)
        await asyncio.gather(*(watch.close() for watch in gone))

    def acquaint(self, agent_id: str, others: list[str]) -> None:
        """Have the coordinator that holds an agent's session tell it of others, which named it. In the background: one
        that does not answer is asked again when one of them asks again, or when its agent changes."""
        address = self._keeper.address_of(agent_id)
        if not address or len(self._calls) >= CALLS_MAX:
            return
        call = asyncio.create_task(self._acquaint(address, agent_id, others))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _acquaint(self, address: str, agent_id: str, others: list[str]) -> None:
        try:
            await acquaint(address, self._token, agent_id, others, tls=self._tls)
        except KvxferError as error:
            log.warning("%s may not hear of %d agents that look for it: %s", agent_id, len(others), error)

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        watches, self._watches = list(self._watches.values()), {}
        await asyncio.gather(*(watch.close() for watch in watches))

    def _watch(self, name: str, address: str) -> MembershipWatch:
        watch = MembershipWatch(
            address,
            self._token,
            on_membership=lambda view: self._keeper.take_view(name, view),
            on_state=lambda is_heard: self._keeper.heard(name, is_heard),
            tls=self._tls,
        )
        watch.start()
        return watch
