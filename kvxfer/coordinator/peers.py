"""What the other coordinators of a cluster say of the agents that they hold: their loads, which no store has, and that
they are there at all. Decides which coordinators are watched; must never judge a member.
"""

from __future__ import annotations

import asyncio

from kvxfer.coordinator.keeper import StoreKeeper
from kvxfer.rpc.watch import MembershipWatch
from kvxfer.trust.files import FollowedFiles


class PeerWatches:
    """A membership watch of each other coordinator that is alive, or answers. Runs on the coordinator's loop."""

    def __init__(self, keeper: StoreKeeper, token: bytes, tls: FollowedFiles | None) -> None:
        """``tls``: this coordinator's own certificate, shown to the others; None: the cluster token is shown."""
        self._keeper = keeper
        self._token = token
        self._tls = tls
        self._watches: dict[tuple[str, str], MembershipWatch] = {}

    async def reconcile(self) -> None:
        """Watch those that came, leave those that went; call a few times per heartbeat.

        One that is not alive by the store, and answers, is cut off from the store and is watched on; unless it is
        another one that answers at its address: the next process of a coordinator that crashed, or this one.
        """
        cut_off = {
            (name, address)
            for (name, address), watch in self._watches.items()
            if watch.is_connected and not self._keeper.is_taken(address)
        }
        wanted = set(self._keeper.peers.items()) | cut_off
        gone = [self._watches.pop(peer) for peer in set(self._watches) - wanted]
        for name, address in wanted - set(self._watches):
            self._watches[name, address] = self._watch(name, address)
        await asyncio.gather(*(watch.close() for watch in gone))

    async def close(self) -> None:
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
