"""Which coordinators one watches: those that are alive, and those that answer though the store has lost them."""

from __future__ import annotations

import pathlib
from typing import Any

from kvxfer.coordinator.peers import PeerWatches
from tests.support.coordinator import running, until


class KnownPeers:
    """What a keeper knows of the others."""

    def __init__(self, **peers: str) -> None:
        self.peers = peers
        self.own = "here:1"
        self.heard_of: list[tuple[str, bool]] = []

    def is_taken(self, address: str) -> bool:
        return address in (self.own, *self.peers.values())

    def heard(self, owner: str, is_heard: bool) -> None:
        self.heard_of.append((owner, is_heard))

    def take_view(self, owner: str, view: object) -> None:
        pass


async def test_who_is_cut_off_from_the_store_is_watched_on_and_who_was_replaced_is_not(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path) as cluster:
        keeper: Any = KnownPeers(b1=cluster.address)
        peers = PeerWatches(keeper, cluster.token, None)
        try:
            await peers.reconcile()
            await until(lambda: keeper.heard_of == [("b1", True)], "the watch")
            keeper.peers = {}
            await peers.reconcile()
            assert keeper.heard_of == [("b1", True)], "it answers: its agents are judged"
            keeper.peers = {"b2": cluster.address}  # the next process at this address is what answered
            await peers.reconcile()
            await until(lambda: sorted(keeper.heard_of) == [("b1", False), ("b1", True), ("b2", True)], "the change")
            keeper.peers, keeper.own = {}, cluster.address
            await peers.reconcile()
            assert keeper.heard_of[-1] == ("b2", False)
        finally:
            await peers.close()
