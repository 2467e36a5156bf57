"""Peers that are connected and have nothing to say cost nothing."""

from __future__ import annotations

import os
import time

import pytest

from kvxfer._native import _core as native
from tests.support.faults.hostile_peer import HostilePeer
from tests.support.faults.parties import Party

PEERS = 256
LOOK_S = 3.0
SHARE_MAX = 0.01
"""Of one core."""


def cpu_s() -> float:
    """This thread's part is in it: it sleeps."""
    times = os.times()
    return times.user + times.system


@pytest.mark.no_sanitizer
def test_256_idle_peers(capsys: pytest.CaptureFixture[str]) -> None:
    party = Party("party", ["stream", "unix", "mapped"], stall_s=0.5)
    peers = [HostilePeer(f"peer-{number}") for number in range(PEERS)]
    try:
        index = party.allocate(1 << 16)
        for peer in peers:
            party.add_peer(peer.metadata())
            peer.dial(party)
        for peer in peers[::16]:  # some of them have read before
            transfer = os.urandom(16)
            peer.say(peer.fetch(transfer, [(party.region_id(index), 0, 64, 64, 1)]))
            assert isinstance(peer.answer(transfer), native.Ready)
            peer.say(native.Release(transfer))
        assert party.wait_idle() == ""
        assert party.transport.counts().sessions_up == PEERS
        wakeups, before = party.statistics()["wakeups"], cpu_s()
        time.sleep(LOOK_S)
        share = (cpu_s() - before) / LOOK_S
        woken = party.statistics()["wakeups"] - wakeups
        with capsys.disabled():
            print(f" [{PEERS} idle peers: {share:.3%} of a core, {woken} wake-ups in {LOOK_S:g} s]", end="")
        assert share < SHARE_MAX
        assert party.transport.counts().sessions_up == PEERS
    finally:
        for peer in peers:
            peer.close()
        party.close()
