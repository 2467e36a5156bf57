"""The grant table against a plain dictionary that knows only the essay: judged at the moment of the question, renewals
idempotent, capped, and never reviving, verdicts remembered by nonce, ids never used twice, waiting pulls bounded.
"""

from __future__ import annotations

import dataclasses
import pathlib
import resource
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvxfer._native import _core
from kvxfer._native._core import GrantEvent, GrantState
from kvxfer.errors import BlocksBusyError, GrantGoneError, GrantReleasedError, InvalidArgumentError, KvxferError

MS = 1_000_000
TTL, LIFETIME_MAX, WAIT_MAX, WAITING_MAX = 1000 * MS, 3000 * MS, 500 * MS, 3
UNKNOWN_WAIT, QUEUED_EVERY, AWAY_MAX = 300 * MS, 120 * MS, 900 * MS
BLOCKS = 8
IDS = [bytes([n]) * 16 for n in range(3)]
PEERS = [_core.AgentRef(name, number, bytes([number]) * 16) for name, number in (("d0", 1), ("d0", 2), ("d1", 3))]
ids, peers, nonces = st.sampled_from(IDS), st.sampled_from(range(3)), st.integers(1, 4)
CODES = {
    GrantState.EXPIRED: "grant_expired",
    GrantState.REVOKED: "grant_revoked",
    GrantState.RELEASED: "grant_released",
    GrantState.READER_GONE: "grant_released",
}


@dataclasses.dataclass
class Model:
    blocks: list[int]
    reader_id: str
    expiry: int
    lifetime_end: int
    state: Any = GrantState.ALIVE
    reader: Any = None
    ready: int = 0
    is_complete: bool = False
    renew_seq: int = 0
    attempt: int = 0
    is_told: bool = False
    """GrantEnded came."""
    is_aborted: bool = False
    """There never was a grant: ``reader`` said that it wants none."""
    verdicts: dict[int, str] = dataclasses.field(default_factory=dict)


def _told(line: list[Waiting], code: str) -> list[tuple[int, str]]:
    return [(each.peer + 1, code) for each in line if not each.away_until]


@dataclasses.dataclass
class Waiting:
    """A pull that came before its grant."""

    peer: int
    due: int
    unasked_until: int
    came: int
    rounds: int
    tell_at: int
    away_until: int = 0
    """Its session ended; 0: it did not."""


class GrantMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        limits = _core.GrantLimits()
        limits.ttl_ns, limits.lifetime_max_ns, limits.wait_max_ns, limits.waiting_max = (
            TTL,
            LIFETIME_MAX,
            WAIT_MAX,
            WAITING_MAX,
        )
        limits.unknown_wait_ns, limits.queued_every_ns = UNKNOWN_WAIT, QUEUED_EVERY
        limits.away_max_ns = AWAY_MAX
        self.table = _core.GrantTable(limits)
        self.ledger = _core.Ledger(_core.PoolInfo(1, BLOCKS, 16, bytes(32), True))
        self.expected: list[bytes] = []
        self.rounds, self.has_engine, self.has_work, self.idle_since = 0, False, False, 0
        self.now = 1
        self.grants: dict[bytes, Model] = {}
        self.waiting: dict[bytes, list[Waiting]] = {}
        self.attempts = 0

    # --- the model ---

    def lapse(self, id_: bytes) -> None:
        grant = self.grants[id_]
        if grant.state == GrantState.ALIVE and self.now >= grant.expiry:
            grant.state = GrantState.EXPIRED

    def accept(self, id_: bytes, peer: int) -> str:
        """What the reader is answered: a code, or READY."""
        grant = self.grants[id_]
        self.lapse(id_)
        wanted = grant.reader is not None and grant.reader != peer
        if wanted or (grant.reader is None and grant.reader_id not in ("", PEERS[peer].agent_id)):
            return "refused"
        if grant.state != GrantState.ALIVE:
            return CODES[grant.state]
        grant.reader = peer
        return "ready"

    def is_unknown(self, id_: bytes, waiting: Waiting) -> bool:
        if id_ not in self.expected and waiting.unasked_until <= self.now:
            return True
        if not self.has_engine or id_ in self.expected or self.now - waiting.came < UNKNOWN_WAIT:
            return False
        is_idle = not self.has_work and self.now - self.idle_since >= UNKNOWN_WAIT
        return self.rounds - waiting.rounds >= 2 or is_idle

    def see(self, effects: list[Any], *, sent: list[tuple[int, str]] | None = None) -> None:
        """Every GrantEnded is the first and tells the state; what was sent is exactly ``sent``: (session, code)."""
        found = []
        for effect in effects:
            if isinstance(effect, _core.GrantEnded):
                grant = self.grants[effect.id]
                assert not grant.is_told
                assert effect.state == grant.state != GrantState.ALIVE
                grant.is_told = True
            elif isinstance(effect, _core.SendFrame):
                frame = effect.frame
                if isinstance(frame, _core.Revoke):
                    assert frame.code.name == CODES[self.grants[frame.id].state]
                    continue
                if isinstance(frame, _core.Queued):
                    assert frame.is_known == (frame.id in self.expected)
                    assert frame.has_work == (self.has_work or (self.has_engine and bool(self.expected)))
                    found.append((effect.session, "queued"))
                    continue
                code = "ready" if isinstance(frame, _core.Ready) else frame.code.name
                if isinstance(frame, _core.Ready):
                    assert frame.blocks == self.grants[frame.id].ready
                    assert (
                        frame.ids == self.grants[frame.id].blocks[: min(frame.blocks, 1)][frame.ids_first :]
                    )  # a pull asks for one
                found.append((effect.session, code))
            else:
                raise AssertionError(effect)
        if sent is not None:
            assert found == sent

    # --- rules ---

    @rule(ns=st.integers(1, 800 * MS))
    def time_passes(self, ns: int) -> None:
        self.now += ns

    @rule()
    def tick(self) -> None:
        sent = []
        for is_over in (
            lambda id_, each: each.due <= self.now,
            lambda id_, each: (
                each.away_until <= self.now
                if each.away_until
                else each.tell_at <= self.now and self.is_unknown(id_, each)
            ),
        ):
            for id_ in sorted(self.waiting):
                sent += [
                    (each.peer + 1, "grant_unknown")
                    for each in self.waiting[id_]
                    if is_over(id_, each) and not each.away_until
                ]
                self.waiting[id_] = [each for each in self.waiting[id_] if not is_over(id_, each)]
        for id_ in sorted(self.waiting):
            for each in self.waiting[id_]:
                if each.tell_at <= self.now and not each.away_until:
                    each.tell_at = self.now + QUEUED_EVERY
                    sent.append((each.peer + 1, "queued"))
        for id_ in self.grants:
            self.lapse(id_)
        self.see(self.table.tick(self.now), sent=sent)
        assert all(grant.is_told for grant in self.grants.values() if grant.state != GrantState.ALIVE)
        assert self.table.next_deadline() > self.now

    @rule(
        id_=ids,
        blocks=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=3, unique=True),
        reader=st.sampled_from(["", "d0", "d1"]),
        ttl=st.integers(1, LIFETIME_MAX),
    )
    def grant(self, id_: bytes, blocks: list[int], reader: str, ttl: int) -> None:
        model = self.grants.get(id_)
        is_of_reader = model is not None and model.is_aborted and PEERS[model.reader].agent_id == reader
        if model is not None and (is_of_reader or not model.is_aborted):
            with pytest.raises(GrantReleasedError if is_of_reader else InvalidArgumentError):
                self.table.grant(id_, self.ledger, blocks, reader, ttl, self.now)
            return
        effects = self.table.grant(id_, self.ledger, blocks, reader, ttl, self.now)
        self.grants[id_] = Model(blocks, reader, self.now + ttl, self.now + LIFETIME_MAX)
        self.expected = [other for other in self.expected if other != id_]
        waited = self.waiting.pop(id_, [])
        self.see(effects, sent=[(each.peer + 1, self.accept(id_, each.peer)) for each in waited if not each.away_until])

    @rule(id_=ids, reader=st.sampled_from(["", "d0", "d1"]))
    def expect(self, id_: bytes, reader: str) -> None:
        model = self.grants.get(id_)
        if model is not None and not model.is_aborted:
            with pytest.raises(InvalidArgumentError):
                self.table.expect(id_, reader)
        elif model is not None and PEERS[model.reader].agent_id == reader:
            with pytest.raises(GrantReleasedError):
                self.table.expect(id_, reader)
        else:
            self.table.expect(id_, reader)
            if id_ not in self.expected:
                self.expected.append(id_)

    @rule(has_work=st.booleans(), took_in=st.booleans())
    def pulse(self, has_work: bool, took_in: bool) -> None:
        if not has_work and (self.has_work or not self.has_engine):
            self.idle_since = self.now
        self.has_work, self.has_engine = has_work, True
        self.rounds += took_in
        self.table.pulse(has_work, took_in, self.now)

    @rule(id_=ids, more=st.integers(0, 3), complete=st.booleans())
    def ready(self, id_: bytes, more: int, complete: bool) -> None:
        grant = self.grants.get(id_)
        if grant is None or not grant.blocks:
            with pytest.raises(GrantGoneError):
                self.table.ready(id_, 1, 0, complete, self.now)
            return
        self.lapse(id_)
        blocks = grant.ready + more
        if grant.state != GrantState.ALIVE:
            with pytest.raises(KvxferError) as caught:
                self.table.ready(id_, blocks, 0, False, self.now)
            assert caught.value.code == CODES[grant.state]
        elif blocks > len(grant.blocks) or (complete and blocks != len(grant.blocks)) or grant.is_complete > complete:
            with pytest.raises(InvalidArgumentError):
                self.table.ready(id_, blocks, 0, complete, self.now)
        else:
            if grant.ready > 0:
                with pytest.raises(InvalidArgumentError, match="never shrinks"):
                    self.table.ready(id_, grant.ready - 1, 0, False, self.now)
            grant.ready, grant.is_complete = blocks, complete
            self.see(self.table.ready(id_, blocks, 0, complete, self.now))

    @rule(id_=ids, event=st.sampled_from([GrantEvent.REVOKE, GrantEvent.RELEASE]))
    def end(self, id_: bytes, event: Any) -> None:
        grant = self.grants.get(id_)
        if grant is None:
            with pytest.raises(GrantGoneError):
                self.table.end(id_, event, self.now)
            return
        self.lapse(id_)
        if grant.state == GrantState.ALIVE:
            grant.state = GrantState.REVOKED if event == GrantEvent.REVOKE else GrantState.RELEASED
        state, effects = self.table.end(id_, event, self.now)
        assert state == grant.state != GrantState.ALIVE
        self.see(effects, sent=[])

    @rule(id_=ids, peer=peers, wait_ms=st.sampled_from([0, 100, 10_000]), is_repeat=st.booleans())
    def pull(self, id_: bytes, peer: int, wait_ms: int, is_repeat: bool) -> None:
        grant = self.grants.get(id_)
        self.attempts += 1
        attempt = grant.attempt if grant is not None and is_repeat and grant.attempt else self.attempts
        frame = _core.Pull(id_, attempt, 1, _core.Lane.MEMORY, 0, 1, 16, bytes(32), wait_ms)
        session, answer = peer + 1, ""
        line = self.waiting.get(id_, [])
        if grant is not None and not (grant.is_aborted and grant.reader != peer):
            answer = self.accept(id_, peer) if grant.blocks else CODES[grant.state]
            if answer == "ready":
                answer, grant.attempt = ("ready", attempt) if attempt > grant.attempt else ("", grant.attempt)
        elif wait_ms == 0:
            answer = "grant_unknown"
        elif peer not in [each.peer for each in line]:
            if sum(map(len, self.waiting.values())) >= WAITING_MAX:
                for other, others in self.waiting.items():
                    self.waiting[other] = [each for each in others if not each.away_until]
            if sum(map(len, self.waiting.values())) >= WAITING_MAX:
                answer = "overloaded"
            else:
                answer, due, tell_at = "queued", self.now + wait_ms * MS, self.now + QUEUED_EVERY
                self.waiting.setdefault(id_, []).append(
                    Waiting(peer, due, self.now + WAIT_MAX, self.now, self.rounds, tell_at)
                )
        else:
            answer = "queued"
            again = next(each for each in line if each.peer == peer)
            again.tell_at, again.away_until = self.now + QUEUED_EVERY, 0
        effects = self.table.on_pull(session, PEERS[peer], frame, self.now)
        self.see(effects, sent=[(session, answer)] if answer else [])

    @rule(id_=ids, reader=st.sampled_from(["", "d0", "d1"]))
    def bind(self, id_: bytes, reader: str) -> None:
        grant = self.grants.get(id_)
        if grant is None or grant.is_aborted:
            with pytest.raises(GrantGoneError):
                self.table.bind(id_, reader, self.now)
            return
        self.lapse(id_)
        if grant.reader is None and not grant.reader_id and grant.state == GrantState.ALIVE:
            grant.reader_id = reader
        bound = grant.reader_id if grant.reader is None else PEERS[grant.reader].agent_id
        assert self.table.bind(id_, reader, self.now) == bound

    @rule(id_=ids)
    def abort_grant(self, id_: bytes) -> None:
        if id_ in self.grants and not self.grants[id_].is_aborted:
            with pytest.raises(InvalidArgumentError):
                self.table.abort_grant(id_)
            return
        line = self.waiting.pop(id_, [])
        self.expected = [other for other in self.expected if other != id_]
        self.see(self.table.abort_grant(id_), sent=_told(line, "grant_revoked"))
        self.grants[id_] = Model([], "", 0, 0, GrantState.REVOKED, is_told=True)

    @rule(id_=ids, peer=peers, nonce=nonces)
    def confirm(self, id_: bytes, peer: int, nonce: int) -> None:
        grant, code = self.grants.get(id_), "grant_unknown"
        if grant is not None:
            self.lapse(id_)
            code = "refused"
            if grant.reader == peer:
                now_code = "ok" if grant.state == GrantState.ALIVE else CODES[grant.state]
                code = grant.verdicts.setdefault(nonce, now_code)
        effects = self.table.on_confirm(peer + 1, PEERS[peer], _core.Confirm(id_, nonce), self.now)
        self.see(effects, sent=[(peer + 1, code)])

    @rule(id_=ids, peer=peers)
    def release(self, id_: bytes, peer: int) -> None:
        grant = self.grants.get(id_)
        line = self.waiting.get(id_, [])
        if grant is not None:
            self.lapse(id_)
            is_named = grant.reader is None and grant.reader_id == PEERS[peer].agent_id
            if (grant.reader == peer or is_named) and grant.state == GrantState.ALIVE:
                grant.state = GrantState.RELEASED
        elif peer in [each.peer for each in line]:
            self.waiting[id_] = [each for each in line if each.peer != peer]
        if grant is None and not self.waiting.get(id_):
            self.grants[id_] = Model([], "", 0, 0, GrantState.RELEASED, peer, is_told=True, is_aborted=True)
        self.see(self.table.on_release(PEERS[peer], id_, self.now), sent=[])

    @rule(id_=ids, peer=peers, seq=st.integers(1, 6), ttl_ms=st.integers(1, 2000))
    def renew(self, id_: bytes, peer: int, seq: int, ttl_ms: int) -> None:
        grant = self.grants.get(id_)
        if grant is not None and grant.reader == peer and seq > grant.renew_seq:
            alive = grant.state == GrantState.ALIVE and self.now < grant.expiry
            if alive:
                grant.renew_seq = seq
                grant.expiry = max(grant.expiry, min(self.now + min(ttl_ms * MS, TTL), grant.lifetime_end))
        assert self.table.on_renew(PEERS[peer], _core.Renew(id_, seq, ttl_ms), self.now) is None

    @rule(peer=peers)
    def reader_dead(self, peer: int) -> None:
        self.waiting = {id_: [entry for entry in line if entry.peer != peer] for id_, line in self.waiting.items()}
        for id_, grant in self.grants.items():
            if grant.reader == peer:
                self.lapse(id_)
                if grant.state == GrantState.ALIVE:
                    grant.state = GrantState.READER_GONE
        self.see(self.table.reader_dead(PEERS[peer], self.now), sent=[])

    @rule(peer=peers)
    def session_closed(self, peer: int) -> None:
        for line in self.waiting.values():
            for each in line:
                if each.peer == peer and not each.away_until:
                    each.away_until = self.now + AWAY_MAX
        self.table.session_closed(peer + 1, self.now)

    @rule(block=st.integers(0, BLOCKS - 1))
    def a_granted_block_cannot_be_reserved(self, block: int) -> None:
        if self.ledger.is_granted(block):
            with pytest.raises(BlocksBusyError):
                self.ledger.reserve([block])

    # --- always ---

    @invariant()
    def the_table_says_what_the_model_says(self) -> None:
        for id_ in IDS:
            grant = self.grants.get(id_)
            state = self.table.state(id_, self.now)
            if grant is None:
                assert state is None
            else:
                is_over = grant.state == GrantState.ALIVE and self.now >= grant.expiry
                assert state == (GrantState.EXPIRED if is_over else grant.state)
                assert grant.expiry <= grant.lifetime_end

    @invariant()
    def the_ledger_holds_what_has_not_been_told(self) -> None:
        held = {block for grant in self.grants.values() if not grant.is_told for block in grant.blocks}
        assert self.ledger.granted_count == len(held)
        counts = self.table.counts()
        assert counts.alive == sum(not grant.is_told for grant in self.grants.values())
        assert counts.waiting_pulls == sum(map(len, self.waiting.values()))


TestGrantTable = GrantMachine.TestCase
TestGrantTable.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_tombstones_are_bounded() -> None:
    limits = _core.GrantLimits()
    limits.tombstones_max = 2
    table, ledger = _core.GrantTable(limits), _core.Ledger(_core.PoolInfo(1, 4, 16, bytes(32), True))
    for id_ in IDS:
        table.grant(id_, ledger, [0], "", TTL, 1)
        table.end(id_, GrantEvent.REVOKE, 2)
    assert [table.state(id_, 3) for id_ in IDS] == [None, GrantState.REVOKED, GrantState.REVOKED]


def resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.no_sanitizer  # it measures memory
def test_tombstones_keep_nothing_of_a_grants_blocks() -> None:
    """There are 65,536 of them, and a long prompt has thousands of blocks."""
    blocks, grants = 8192, 1000
    table, ledger = _core.GrantTable(_core.GrantLimits()), _core.Ledger(_core.PoolInfo(1, blocks, 16, bytes(32), True))
    before = 0
    for number in range(grants + 10):
        if number == 10:
            before = resident_bytes()
        id_ = number.to_bytes(16, "big")
        table.grant(id_, ledger, list(range(blocks)), "", TTL, 1)
        table.ready(id_, blocks, 0, True, 1)
        table.end(id_, GrantEvent.REVOKE, 1)
    assert resident_bytes() - before < grants * blocks * 8 / 4


@pytest.mark.no_sanitizer  # it measures memory
def test_a_tombstone_is_small() -> None:
    """A busy source has 65,536 of them after its first hours."""
    table, ledger = _core.GrantTable(_core.GrantLimits()), _core.Ledger(_core.PoolInfo(1, 4, 16, bytes(32), True))
    count, before = 30_000, 0
    for number in range(count + 1000):
        if number == 1000:
            before = resident_bytes()
        id_ = number.to_bytes(16, "big")
        table.grant(id_, ledger, [0, 1], "", TTL, 1)
        table.end(id_, GrantEvent.REVOKE, 1)
    assert (resident_bytes() - before) / count < 400


def test_ready_on_an_expired_grant_does_not_swallow_its_end() -> None:
    """An error drops the effects of its call: GrantEnded must come with the next, or the blocks are lost for ever."""
    table, ledger = _core.GrantTable(_core.GrantLimits()), _core.Ledger(_core.PoolInfo(1, 4, 16, bytes(32), True))
    table.grant(IDS[0], ledger, [0, 1], "", TTL, 1)
    with pytest.raises(GrantGoneError):
        table.ready(IDS[0], 1, 0, False, 1 + TTL)
    ended = [effect for effect in table.tick(1 + TTL) if isinstance(effect, _core.GrantEnded)]
    assert [effect.state for effect in ended] == [GrantState.EXPIRED]
    assert ledger.granted_count == 0


def test_a_repeated_pull_after_a_cancel_is_not_served_again() -> None:
    """The attempt names one SendData chain: two chains of one name would count each other's bytes, and the verdict of
    the second would come before its last byte was out.
    """
    limits = _core.GrantLimits()
    limits.data_bytes_max = 16
    table, ledger = _core.GrantTable(limits), _core.Ledger(_core.PoolInfo(1, 4, 16, bytes(32), True))
    table.grant(IDS[0], ledger, [0, 1], "", TTL, 1)
    table.ready(IDS[0], 2, 0, True, 1)
    pull = _core.Pull(IDS[0], 1, 7, _core.Lane.STREAM, 0, 2, 16, bytes(32), 0)
    first = table.on_pull(1, PEERS[0], pull, 2)
    assert any(isinstance(effect, _core.SendData) for effect in first)
    table.on_cancel(1, _core.Cancel(IDS[0], 1))
    assert table.on_pull(1, PEERS[0], pull, 3) == []
    assert table.data_sent(1, IDS[0], 1, 1, 4) == []


def test_verdict_trailer_waits_for_the_last_byte() -> None:
    limits = _core.GrantLimits()
    limits.data_bytes_max = 16
    table, ledger = _core.GrantTable(limits), _core.Ledger(_core.PoolInfo(1, 4, 16, bytes(32), True))
    table.grant(IDS[0], ledger, [0, 1], "", TTL, 1)
    table.ready(IDS[0], 2, 0, True, 1)
    table.on_pull(1, PEERS[0], _core.Pull(IDS[0], 1, 7, _core.Lane.STREAM, 0, 2, 16, bytes(32), 0), 2)
    frames = [type(effect).__name__ for effect in table.data_sent(1, IDS[0], 1, 1, 3)]
    assert frames == ["SendData"]
    (verdict,) = table.data_sent(1, IDS[0], 1, 1, 4)
    assert verdict.frame.code == _core.Code.ok
    assert verdict.frame.nonce == 7
