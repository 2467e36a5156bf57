"""Rounds in which the other process is killed, hangs, or cannot be reached, amid pulls, reads and writes: what this
process holds then is what it held before.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.faults.fault_proxy import DATA, VERDICT
from tests.support.faults.lanes import LANES, STREAMS, at_once
from tests.support.faults.parties import Party
from tests.support.faults.phase_fixture import MARGIN_S
from tests.support.faults.remote import Remote
from tests.support.faults.rounds import check_rounds, expect_no_more

pytestmark = pytest.mark.no_sanitizer

BLOCKS, BLOCK_BYTES = 16, 4096
SIZE = 64 << 10
SEED = 51
STALL_S, RECONNECT_S, TTL_S = 0.25, 0.5, 1.5
SILENCE_S = 2 * STALL_S + RECONNECT_S
HERE, THERE = 0, 1
WARM_UP = 4
REMEMBERED = 128
"""States of transfers that are over: so few that they are no growth."""
OVER = ("peer_gone", "grant_revoked", "grant_expired", "grant_unknown", "refused", "transport")
"""What a party that hung, or was cut off, may hear when it goes on."""


class Exchange:
    """One party here, and another in a process of its own; all that goes between them goes through proxies."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.options: dict[str, Any] = {
            "blocks": BLOCKS,
            "block_bytes": BLOCK_BYTES,
            "stall_s": STALL_S,
            "reconnect_s": RECONNECT_S,
            "grant_ttl_s": TTL_S,
            "remembered": REMEMBERED,
        }
        self.outcomes: dict[str, int] = {}
        self.near = self.equip(Party("near", [lane], **self.options))
        self.near.fill(SEED, region=1)
        self.remote = self.open_remote()
        self.pulled = ""

    @staticmethod
    def equip(party: Any) -> Any:
        """With memory, and with two proxies: HERE in front of it, THERE in front of the other side."""
        for _ in range(2):
            party.allocate(SIZE)
        for _ in (HERE, THERE):
            party.open_proxy()
        return party

    def open_remote(self) -> Remote:
        # One arena: how many an allocator makes is a question of which threads met.
        remote: Remote = self.equip(
            Remote("remote", [self.lane], command=("env", "MALLOC_ARENA_MAX=1"), **self.options)
        )
        remote.is_filled(SEED, region=1)  # it loads what that takes: half a hundred mappings
        for party, other in ((self.near, remote), (remote, self.near)):
            party.add_peer(other.metadata())
            host, port, path, *_ = other.metadata()["address"]
            party.proxy(THERE, "aim", [host, port], path)
        return remote

    def proxies(self, verb: str) -> None:
        for party in (self.near, self.remote):
            for proxy in (HERE, THERE):
                party.proxy(proxy, verb)

    def begin(self, owner: Any, reader: Any) -> None:
        """A pull has half of its blocks; a write is held when some of it has come, or all, and the word is missing that
        it was right; a read waits behind it. The bytes are the owner's, and go through its proxies."""
        name, peer = ("near", "remote") if owner is self.near else ("remote", "near")
        self.rest()
        reader.add_peer(owner.metadata(HERE))
        owner.add_peer(owner.proxied(reader.metadata(), THERE))
        self.pulled, blocks = secrets.token_hex(16), list(range(BLOCKS))
        owner.grant(self.pulled, blocks, BLOCKS // 2, TTL_S, peer)
        reader.pull(self.pulled, name, blocks)
        assert reader.wait_state(self.pulled, "READING", BLOCKS // 2), reader.state(self.pulled)
        last_word = (DATA, SIZE // 2) if self.lane in STREAMS else (VERDICT, 0)
        owner.proxy(HERE, "stop_at", "from", *last_word)
        owner.proxy(THERE, "stop_at", "to", *last_word)
        owner.post("write", "WRITE", peer, 0, 0, element=4096)
        end = time.monotonic() + 20
        while not any(owner.proxy(proxy, "wait_stopped", 0.02) for proxy in (HERE, THERE)):
            assert time.monotonic() < end, f"nothing was held: {owner.state('write')}"
        reader.post("read", "READ", name, 1, 1, element=4096)

    def expect_lost(self, owner: Any, by_s: float) -> None:
        """Everything is over here, by then; a grant, when its time to live is over."""
        ended = {}
        for name in ("write",) if owner is self.near else (self.pulled, "read"):
            ended[name] = self.near.outcome(name, max(by_s + MARGIN_S - time.monotonic(), 0.0))
        assert set(ended.values()) == {"peer_gone"}, ended
        if owner is self.near:
            ended[self.pulled] = self.near.wait_ended(self.pulled, TTL_S + MARGIN_S)
            assert ended[self.pulled] in ("EXPIRED", "READER_GONE"), ended
        else:
            ended["offer"] = self.near.offer("remote", max(by_s + MARGIN_S - time.monotonic(), 0.0))
            assert ended["offer"] == "FAILED", ended
        for outcome in ended.values():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.settle()

    def settle(self) -> None:
        assert self.near.wait_idle() == ""
        self.near.forget()

    def rest(self) -> None:
        """No connection is left between the two."""
        for party in (self.near, self.remote):
            assert party.wait_dialed()
        self.proxies("reset")
        self.proxies("wait_empty")
        for party in (self.near, self.remote):
            assert party.wait_hung_up()

    def round(self, number: int) -> None:
        """Whose the bytes are changes, too."""
        fault = self.FAULTS[number % len(self.FAULTS)]
        is_ours = (number + number // len(self.FAULTS)) % 2 == 1
        owner, reader = (self.near, self.remote) if is_ours else (self.remote, self.near)
        self.begin(owner, reader)
        fault(self, owner)

    def lose_an_incarnation(self, owner: Any, is_said: bool) -> None:
        """Another takes its place."""
        self.remote.kill()
        killed_s = time.monotonic()
        if is_said:
            self.near.transport.peer_dead(self.near.peers["remote"].ref)
        self.expect_lost(owner, killed_s + (0.0 if is_said else RECONNECT_S))
        self.remote = self.open_remote()

    def killed(self, owner: Any) -> None:
        self.lose_an_incarnation(owner, is_said=False)

    def killed_and_said(self, owner: Any) -> None:
        self.lose_an_incarnation(owner, is_said=True)

    def stopped(self, owner: Any) -> None:
        """It goes on when it was given up here."""
        stopped_s = time.monotonic()
        self.remote.stop()
        self.expect_lost(owner, stopped_s + SILENCE_S)
        self.remote.go_on()
        self.go_on(owner)

    def cut_off(self, owner: Any) -> None:
        cut_s = time.monotonic()
        self.proxies("freeze")
        self.expect_lost(owner, cut_s + SILENCE_S)
        self.go_on(owner)

    def go_on(self, owner: Any) -> None:
        """Everything is over there as well."""
        self.proxies("resume")
        for name in ("write",) if owner is self.remote else (self.pulled, "read"):
            got = self.remote.outcome(name)
            if got == "committed" and name == "write":  # it asked again
                assert self.near.offer("remote") == "COMMITTED"
            elif got == "committed" and name == "read":
                assert self.remote.is_filled(SEED, region=1)
            else:
                assert got in OVER, f"{name}: {got}: {self.remote.why(name)}"
        assert self.remote.wait_idle() == ""
        self.remote.forget()

    def close(self) -> None:
        self.near.close()
        self.remote.close()

    FAULTS: tuple[Callable[[Any, Any], None], ...] = (killed_and_said, killed, stopped, cut_off)


class Killed(Exchange):
    FAULTS = (Exchange.killed_and_said, Exchange.killed)


class Silent(Exchange):
    """The remote process is the same from the first round to the last."""

    FAULTS = (Exchange.stopped, Exchange.cut_off)


class Everywhere:
    """The same on all lanes, at the same time: bounds are waited for once."""

    def __init__(self, kind: type[Exchange]) -> None:
        self.exchanges = at_once(kind, {lane: lane for lane in LANES})
        self.outcomes: dict[str, int] = {}
        self.played = 0

    def parties(self) -> Sequence[Party]:
        return [exchange.near for exchange in self.exchanges.values()]

    def round(self, number: int) -> None:
        """Those to warm up are counted: what comes after them is the other half of the kinds."""
        at_once(lambda exchange: exchange.round(self.played), self.exchanges)
        self.played += 1

    def settle(self) -> None:
        self.outcomes.clear()
        for exchange in self.exchanges.values():
            exchange.settle()
            exchange.rest()
            for outcome, count in exchange.outcomes.items():
                self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count

    def close(self) -> None:
        at_once(Exchange.close, self.exchanges)


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        pytest.param(Exchange, 4, id="each-4"),
        pytest.param(Killed, 24, id="killed-24", marks=pytest.mark.nightly),
        pytest.param(Silent, 40, id="silent-40", marks=pytest.mark.nightly),
    ],
)
def test_nothing_is_held_after(kind: type[Exchange], rounds: int, record_property: Any) -> None:
    made = Everywhere(kind)
    try:
        for number in range(WARM_UP):
            made.round(number)
        made.settle()
        before = {lane: exchange.remote.resources() for lane, exchange in made.exchanges.items()}
        check_rounds(made, rounds, 0, record_property)
        for lane, exchange in made.exchanges.items():
            if kind is Silent:
                expect_no_more(before[lane], exchange.remote.resources(), lane)
    finally:
        made.close()
