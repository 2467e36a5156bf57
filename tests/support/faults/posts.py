"""One remote side, and one party here for each phase that a read or a write of registered memory can be in, each behind
a proxy of its own: brings all of them to their phase, does to all what may happen there, and knows what must follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

from tests.support.faults.fault_proxy import CONFIRM, DATA, DONE, FETCH, HELLO, MAP, PULL, PUSH, READY, VERDICT
from tests.support.faults.lanes import STREAMS
from tests.support.faults.parties import Party
from tests.support.faults.phase_fixture import MARGIN_S, PAINT, PATIENT_S, RECONNECT_S, SILENCE_S, STALL_S
from tests.support.faults.remote import Remote

SIZE, ELEMENT = 256 << 10, 4096
SEED = 21
TTL_S = 2.0
PATIENT = {"stall_s": STALL_S, "reconnect_s": PATIENT_S, "grant_ttl_s": TTL_S}
WAITS = dict.fromkeys(PATIENT, PATIENT_S)
GIVES_UP = PATIENT | {"reconnect_s": RECONNECT_S}
gives_up = pytest.mark.parametrize("limits", [GIVES_UP], ids=["gives-up"])
waits = pytest.mark.parametrize("limits", [WAITS], ids=["waits"])
keeps = pytest.mark.parametrize("limits", [PATIENT | {"grant_ttl_s": PATIENT_S}], ids=["keeps"])
Rule = tuple[str, int, int]

READ_HEAD: dict[str, Rule] = {"asked": ("to", FETCH, 0), "announced": ("from", READY, 0)}
READ_TAIL: dict[str, Rule] = {"judged": ("from", VERDICT, 0), "connecting": ("from", HELLO, 0)}
WRITE_HEAD: dict[str, Rule] = {"asked": ("to", PUSH, 0), "pulled": ("from", PULL, 0), "announced": ("to", READY, 0)}
WRITE_TAIL: dict[str, Rule] = {
    "judged": ("to", VERDICT, 0),
    "done": ("from", DONE, 0),
    "connecting": ("from", HELLO, 0),
}
MOMENTS = {"first": 1, "middle": SIZE // 2 + 9, "last": SIZE - 1}
NOT_OFFERED = ("connecting", "asked")
"""Phases in which the side that is written to has not heard of it yet."""


def rules_of(lane: str, op: str) -> dict[str, Rule]:
    """What the proxy holds, by phase; it stands where the reader's dial, or the writer's, comes by."""
    way = "from" if op == "READ" else "to"
    middle: dict[str, Rule] = {"mapping": (way, MAP, 0)}
    if lane in STREAMS:
        middle = {name: (way, DATA, count) for name, count in MOMENTS.items()}
    elif op == "WRITE":
        middle["confirming"] = ("from", CONFIRM, 0)
    return {**READ_HEAD, **middle, **READ_TAIL} if op == "READ" else {**WRITE_HEAD, **middle, **WRITE_TAIL}


def was_judged(lane: str) -> set[str]:
    """Phases in which the owner of the bytes had said yes already, and what it said was under way, on streams with the
    bytes themselves: these may be committed after all."""
    return {"judged", "done"} | ({"announced", *MOMENTS} if lane in STREAMS else set())


class PostFixture:
    """One remote side, and one party for each phase; each posts once, and is held by a proxy.

    ``judged``: the phases whose post may be committed after all; by default :func:`was_judged`. ``make_remote`` and
    ``make_near`` make a party from its name and Party's options. The proxies are where the bytes are, or, where the
    lane does not care, all ``proxies_remote``.
    """

    def __init__(
        self,
        lane: str,
        op: str,
        limits: Mapping[str, float],
        deadline_s: float = 60.0,
        *,
        rules: Mapping[str, Rule] | None = None,
        judged: Collection[str] | None = None,
        size: int = SIZE,
        element: int = ELEMENT,
        make_remote: Callable[..., Any] = Remote,
        make_near: Callable[..., Any] = Party,
        proxies_remote: bool = False,
    ) -> None:
        self.deadline_s = deadline_s
        self.lane, self.op, self.rules = lane, op, rules_of(lane, op) if rules is None else dict(rules)
        self.proxies_remote = proxies_remote or op == "READ"
        self.was_judged = was_judged(lane) if judged is None else set(judged)
        options: dict[str, Any] = {**limits, "blocks": 1}
        self.remote = make_remote("remote", [lane], **options)
        self.near: dict[str, Any] = {}
        try:
            for number, phase in enumerate(self.rules):
                self.remote.allocate(size)
                party = self.near[phase] = make_near(phase, [lane], **options)
                party.allocate(size)
                self.remote.add_peer(party.metadata())
                if op == "READ":
                    self.remote.fill(SEED, region=number)
                else:
                    party.fill(SEED, region=0)
                if self.proxies_remote:
                    self.remote.open_proxy()
                else:
                    party.open_proxy(self.remote.metadata())
            for number, (phase, party) in enumerate(self.near.items()):
                if self.proxies_remote:
                    party.add_peer(self.remote.metadata(number))
                else:
                    party.add_peer(party.proxied(self.remote.metadata(), 0))
                self.proxy(phase, "stop_at", *self.rules[phase])
            self.posted_s = time.monotonic()
            for number, (phase, party) in enumerate(self.near.items()):
                party.post(phase, op, "remote", 0, number, element=element, deadline_s=deadline_s)
            for phase, party in self.near.items():
                assert self.proxy(phase, "wait_stopped"), f"{phase}: the proxy held nothing"
                assert party.state(phase)[0] not in ("COMMITTED", "FAILED", "CANCELLED"), phase
        except BaseException:
            self.close()
            raise

    def proxy(self, phase: str, verb: str, *arguments: object) -> object:
        if self.proxies_remote:
            return self.remote.proxy(list(self.rules).index(phase), verb, *arguments)
        return self.near[phase].proxy(0, verb, *arguments)

    def cut(self) -> float:
        """The links are down from here on; returns when (time.monotonic)."""
        cut_s = time.monotonic()
        for phase in self.rules:
            self.proxy(phase, "freeze")
        return cut_s

    def resume(self) -> None:
        for phase in self.rules:
            self.proxy(phase, "resume")

    def expect_hung_up(self) -> None:
        """Each side has hung up on the other by itself, and dials in vain."""
        for phase, party in self.near.items():
            assert party.wait_hung_up(), phase
        if self.op == "WRITE":
            left = len({"asked", "done"}.intersection(self.rules))
            assert self.remote.wait_hung_up(left), "a destination that waits for bytes hangs up too"
        again = [phase for phase, party in self.near.items() if not party.wait_hung_up(timeout_s=0.0)]
        assert not again, f"{again}: the link is not down"

    def expect(self, outcome: str, by_s: float) -> None:
        """Every post ends so, by then; its memory is its owner's again, and is written by it at once."""
        for phase, party in self.near.items():
            got = party.outcome(phase, max(by_s + MARGIN_S - time.monotonic(), 0.0))
            assert got == outcome, f"{phase}: {got or 'not over'}, not {outcome}: {party.why(phase)}"
            if outcome != "committed":
                assert party.wait_idle() == "", phase
                party.deregister(0)
                party.paint(PAINT, region=0)

    def expect_committed(self) -> None:
        self.expect("committed", time.monotonic())
        assert self.remote.wait_idle() == ""
        for number, (phase, party) in enumerate(self.near.items()):
            assert party.is_filled(SEED, region=0), phase
            assert self.remote.is_filled(SEED, region=number), phase
            assert party.wait_idle() == ""

    def expect_offers_over(self, by_s: float, judged: Collection[str]) -> None:
        """Every write is over there too, by then, and nothing is committed but what was ``judged``."""
        for number, phase in enumerate(self.rules):
            if self.op == "WRITE" and phase not in NOT_OFFERED:
                ended = self.remote.offer(phase, max(by_s + MARGIN_S - time.monotonic(), 0.0))
                assert ended == "FAILED" or (ended == "COMMITTED" and phase in judged), f"{phase}: {ended}"
                if ended == "COMMITTED":
                    assert self.remote.is_filled(SEED, region=number), f"{phase}: committed with other bytes"

    def expect_over_there(self, by_s: float, judged: Collection[str]) -> None:
        """Nothing is left there, by then; the memory is its owner's again, and is written by it at once."""
        self.expect_offers_over(by_s, judged)
        busy = self.remote.wait_idle(max(by_s + MARGIN_S - time.monotonic(), 0.0))
        assert not busy, busy
        for number in range(len(self.rules)):
            self.remote.deregister(number)
            self.remote.paint(PAINT, region=number)

    def look_again(self) -> None:
        """What was held has gone on: it landed nowhere."""
        time.sleep(0.1)
        for number, (phase, party) in enumerate(self.near.items()):
            assert party.is_painted(PAINT, region=0), f"{phase}: bytes landed in memory that was taken back"
            assert self.remote.is_painted(PAINT, region=number), f"{phase}: bytes landed there after it was taken back"
            assert party.wait_idle() == ""
        assert self.remote.wait_idle() == ""

    def expect_nothing_later(self) -> None:
        """What was held went on: here nothing lands, there nothing stays, and nothing is committed of what was ours."""
        self.expect_over_there(time.monotonic() + MARGIN_S, self.was_judged)
        self.look_again()

    def close(self) -> None:
        for party in self.near.values():
            party.close()
        self.remote.close()


# --- what may happen in each phase; each is a test of the fixtures ---


def cancel(fixture: PostFixture) -> None:
    """The side that cancels a write has its memory back at once, and what it puts there then may well be read."""
    for phase, party in fixture.near.items():
        party.cancel(phase)
    fixture.expect("cancelled", time.monotonic())
    fixture.resume()
    fixture.expect_nothing_later()


def deadline(fixture: PostFixture) -> None:
    """No party loses patience before it passes, so that it finds every post in its phase."""
    by_s = fixture.posted_s + fixture.deadline_s
    fixture.expect("deadline", by_s)
    assert time.monotonic() >= by_s
    fixture.expect_offers_over(by_s, ["done"])  # also where the word that it is over is held
    fixture.resume()
    fixture.expect_nothing_later()


def reset_and_again(fixture: PostFixture) -> None:
    for phase in fixture.rules:
        fixture.proxy(phase, "reset")
    fixture.expect_committed()


def partition_that_heals(fixture: PostFixture) -> None:
    """Each side has hung up on the other by then; the posts go on, and what was held is of no session any more."""
    fixture.cut()
    fixture.expect_hung_up()
    fixture.resume()
    fixture.expect_committed()


def partition(fixture: PostFixture) -> None:
    """Both sides are rid of each other, and their memory is others', before the link is up again."""
    cut_s = fixture.cut()
    fixture.expect("peer_gone", cut_s + SILENCE_S)
    fixture.expect_over_there(cut_s + max(SILENCE_S, TTL_S), ["done"])
    fixture.resume()
    fixture.look_again()


def killed(fixture: PostFixture) -> None:
    """The remote side: the owner of the bytes of a read, the fetcher of those of a write."""
    fixture.remote.kill()
    killed_s = time.monotonic()
    fixture.expect("peer_gone", killed_s + RECONNECT_S)
    for party in fixture.near.values():
        assert party.is_painted(PAINT, region=0), "bytes landed in memory that was taken back"
        assert party.wait_idle() == ""


def stopped(fixture: PostFixture) -> None:
    """SIGSTOP of the remote side, and SIGCONT long after everything was given up here."""
    fixture.remote.stop()
    stopped_s = time.monotonic()
    try:
        fixture.expect("peer_gone", stopped_s + SILENCE_S)
    finally:
        fixture.remote.go_on()
    fixture.resume()
    fixture.expect_nothing_later()


def lose_a_writer(
    lane: str, fault: str, rules: Mapping[str, Rule] | None = None, *, size: int = SIZE, element: int = ELEMENT
) -> None:
    """The side that is written to is rid of a dead or hanging writer in bounded time, and gets its memory back."""
    options: dict[str, Any] = {**GIVES_UP, "blocks": 1}
    rules = dict(rules_of(lane, "WRITE") if rules is None else rules)
    for phase in (*NOT_OFFERED, "done"):  # nothing is offered yet, or not any more
        rules.pop(phase, None)
    writer = Remote("writer", [lane], **options)
    parties = {phase: Party(phase, [lane], **options) for phase in rules}
    try:
        for number, (phase, party) in enumerate(parties.items()):
            party.allocate(size)
            writer.allocate(size)
            writer.fill(SEED, region=number)
            party.add_peer(writer.metadata())
            writer.open_proxy(party.metadata())
            writer.add_peer(writer.proxied(party.metadata(), number))
            writer.proxy(number, "stop_at", *rules[phase])
        for number, phase in enumerate(parties):
            writer.post(phase, "WRITE", phase, number, 0, element=element)
        for number, phase in enumerate(parties):
            assert writer.proxy(number, "wait_stopped"), phase
        gone_s = time.monotonic()
        writer.kill() if fault == "kill" else writer.stop()
        for phase, party in parties.items():
            left_s = gone_s + SILENCE_S + MARGIN_S - time.monotonic()
            assert party.offer("writer", max(left_s, 0.0)) == "FAILED", phase
            assert party.wait_idle() == ""
            party.deregister(0)
            party.paint(PAINT, region=0)
        if fault == "stop":
            writer.go_on()
            for number in range(len(rules)):
                writer.proxy(number, "resume")
            for phase in parties:
                assert writer.outcome(phase) in ("peer_gone", "refused", "grant_revoked", "transport"), phase
            assert writer.wait_idle() == ""
        for party in parties.values():
            assert party.is_painted(PAINT, region=0)
            assert party.wait_idle() == ""
    finally:
        for party in parties.values():
            party.close()
        writer.close()
