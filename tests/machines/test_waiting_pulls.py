"""Pulls that came before their grants, in the grant table: what another peer says changes nothing for them, and a lost
session does not make them young again."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import GrantState

PEERS = [_core.AgentRef("d0", 1, b"a" * 16), _core.AgentRef("d0", 2, b"b" * 16), _core.AgentRef("d1", 1, b"c" * 16)]
IDS = [bytes([n]) * 16 for n in range(1, 4)]
MS = 1_000_000
TTL, QUEUED_EVERY, AWAY_MAX = 1000 * MS, 120 * MS, 900 * MS


def test_grant_after_another_peer_aborted_serves_its_reader() -> None:
    """A RELEASE may come from any peer before the grant is made: it speaks of that peer only."""
    table, ledger = _core.GrantTable(_core.GrantLimits()), _core.Ledger(_core.PoolInfo(1, 4, 16, bytes(32), True))
    unknown, reader = PEERS[0], PEERS[2]
    table.on_release(unknown, IDS[0], 1)
    pull = _core.Pull(IDS[0], 1, 7, _core.Lane.MEMORY, 0, 1, 16, bytes(32), 1000)
    [queued] = table.on_pull(1, reader, pull, 1)
    assert isinstance(queued.frame, _core.Queued)
    ready = [effect.frame for effect in table.grant(IDS[0], ledger, [0], reader.agent_id, TTL, 1)]
    assert [type(frame) for frame in ready] == [_core.Ready]
    assert table.state(IDS[0], 1) == GrantState.ALIVE
    limits = _core.GrantLimits()
    limits.tombstones_max = 4  # of given up ones the table keeps a quarter as many
    table = _core.GrantTable(limits)
    table.on_release(unknown, IDS[0], 1)
    table.grant(IDS[0], ledger, [0], reader.agent_id, TTL, 1)
    table.on_release(unknown, IDS[1], 1)
    table.on_release(unknown, IDS[2], 1)
    assert table.state(IDS[0], 1) == GrantState.ALIVE


def test_abort_grant_after_another_peer_aborted_answers_the_reader_that_waits() -> None:
    table = _core.GrantTable(_core.GrantLimits())
    table.on_release(PEERS[0], IDS[0], 1)
    pull = _core.Pull(IDS[0], 1, 7, _core.Lane.MEMORY, 0, 1, 16, bytes(32), 1000)
    [queued] = table.on_pull(1, PEERS[2], pull, 1)
    assert isinstance(queued.frame, _core.Queued)
    [answer] = [effect.frame for effect in table.abort_grant(IDS[0])]
    assert answer.code == _core.Code.grant_revoked
    assert table.state(IDS[0], 1) == GrantState.REVOKED


@pytest.mark.parametrize(("reader", "counted"), [("", 0), ("d0", 1)])
def test_second_reader_of_an_open_grant_is_not_counted_as_refused(reader: str, counted: int) -> None:
    """What is forbidden is counted, and ends the session in the end: a router that gives one answer to two readers must
    not cut the second one's session."""
    table, ledger = _core.GrantTable(_core.GrantLimits()), _core.Ledger(_core.PoolInfo(1, 4, 16, bytes(32), True))
    table.grant(IDS[0], ledger, [0], reader, TTL, 1)
    answers = []
    for session, peer in enumerate((PEERS[0], PEERS[2]), 1):
        pull = _core.Pull(IDS[0], 1, 7, _core.Lane.MEMORY, 0, 1, 16, bytes(32), 0)
        answers += [type(effect.frame).__name__ for effect in table.on_pull(session, peer, pull, 1)]
    assert answers == ["Ready", "ErrorFrame"]
    assert table.counts().refused == counted


def test_a_reader_that_comes_back_over_a_new_session_has_waited_since_its_first_pull() -> None:
    """Its source must not count anew: a reader whose connection breaks again and again would wait for ever for an
    engine that stopped while it was idle, or for a prompt that it was never asked for."""
    limits = _core.GrantLimits()
    limits.away_max_ns = AWAY_MAX
    table, reader = _core.GrantTable(limits), PEERS[2]
    table.pulse(False, True, 1)
    table.expect(IDS[0], reader.agent_id)
    for attempt, now in enumerate(range(1, 3 * AWAY_MAX, AWAY_MAX // 2), start=1):
        pull = _core.Pull(IDS[0], attempt, 7, _core.Lane.MEMORY, 0, 1, 16, bytes(32), 100_000)
        [queued] = table.on_pull(attempt, reader, pull, now)
        assert queued.frame.age_ms == (now - 1) // MS
        table.session_closed(attempt, now)
        assert table.tick(now + QUEUED_EVERY) == []
    assert table.counts().waiting_pulls == 1
    assert table.tick(now + AWAY_MAX) == []
    assert table.counts().waiting_pulls == 0


def test_an_older_attempt_over_a_new_session_is_answered_there() -> None:
    """Flaw: it was answered on the session that had ended."""
    table, reader = _core.GrantTable(_core.GrantLimits()), PEERS[2]

    def pull(attempt: int) -> Any:
        return _core.Pull(IDS[0], attempt, 7, _core.Lane.MEMORY, 0, 1, 16, bytes(32), 1000)

    table.on_pull(1, reader, pull(2), 1)
    table.session_closed(1, 1)
    [queued] = table.on_pull(2, reader, pull(1), 2)
    assert (queued.session, queued.frame.attempt) == (2, 1)
