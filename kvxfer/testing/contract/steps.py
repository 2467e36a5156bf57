"""The steps that checks of the lane contract are made of: grant, pull, wait for an outcome, see that nothing is left.
Decides what counts as left over; must never know which rule a check is about.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvxfer.config import AgentConfig
from kvxfer.testing.contract.parties import (
    POISON,
    POOL_ID,
    RECORD,
    LaneMaker,
    LaneParty,
    PoolLayout,
    fresh_id,
    introduce,
    make_party,
)
from kvxfer.transport.base import as_blocks
from kvxfer.transport.counts import describe, is_idle
from kvxfer.types import CompatibilityRecord, TransferId

SOON_S = 20.0
"""The time limit of steps without a wait of their own; a machine may be busy."""
PLAIN = PoolLayout.plain(16, 4096)


@contextlib.contextmanager
def mortal_parties(
    maker: LaneMaker,
    layout: PoolLayout = PLAIN,
    *,
    to: PoolLayout | None = None,
    config: AgentConfig | None = None,
    destination_record: CompatibilityRecord = RECORD,
    destination_key: bytes | None = None,
    has_checksums: bool = False,
) -> Iterator[tuple[LaneParty, LaneParty]]:
    """A source and a destination that know each other; a check may close one of them. ``destination_key``: if the
    destination has another one; ``has_checksums``: the source's blocks go with checksums."""
    source = make_party(maker, "source", layout, config, has_checksums=has_checksums)
    destination = make_party(maker, "destination", to or layout, config, destination_record)
    try:
        introduce(source, destination, other_key=destination_key)
        yield source, destination
    finally:
        source.transport.close()
        destination.transport.close()


@contextlib.contextmanager
def two_parties(maker: LaneMaker, layout: PoolLayout = PLAIN, **options: Any) -> Iterator[tuple[LaneParty, LaneParty]]:
    """As :func:`mortal_parties`. Whatever a check did, nothing may be left when it ends."""
    with mortal_parties(maker, layout, **options) as parties:
        yield parties
        expect_idle(maker, parties)


def expect(
    maker: LaneMaker, parties: Sequence[LaneParty], what: str, until: Callable[[], bool], within_s: float
) -> None:
    """Wait until it holds; AssertionError ``what`` otherwise."""
    if not maker.wait(parties, until, within_s):
        states = "; ".join(f"{party.ref.agent_id}: {describe(party.transport.counts())}" for party in parties)
        raise AssertionError(f"{what} not within {within_s:g} s ({states})")


def expect_idle(maker: LaneMaker, parties: Sequence[LaneParty]) -> None:
    """No block reserved, granted or quarantined, nothing alive; and every final state was reported exactly once."""
    expect(maker, parties, "idle", lambda: all(is_idle(party.transport.counts()) for party in parties), SOON_S)
    maker.wait(parties, lambda: False, 0.0)
    for party in parties:
        for identity, finals in party.finals.items():
            assert len(finals) == 1, f"{len(finals)} final states of one transfer"
            assert party.drained[identity] == 1, f"drained {party.drained[identity]} times"
        for ends in party.ended.values():
            assert len(ends) == 1, f"one grant ended {len(ends)} times"


def grant(
    party: LaneParty,
    transfer_id: TransferId,
    blocks: Sequence[int],
    *,
    ready: int | None = None,
    reader: str = "destination",
    ttl_s: float = 10.0,
) -> None:
    """Grant ``blocks``, with ``ready`` of them (all) announced."""
    count = len(blocks) if ready is None else ready
    party.transport.grant(transfer_id, POOL_ID, as_blocks(blocks), reader=reader, ttl_s=ttl_s, ready_blocks=0)
    if count:
        party.transport.ready(transfer_id, count, layers=0, complete=count == len(blocks))


def pull(
    maker: LaneMaker,
    party: LaneParty,
    source: LaneParty,
    transfer_id: TransferId,
    blocks: Sequence[int],
    *,
    first: int = 0,
    deadline_s: float = 60.0,
    wants_checksums: bool = False,
) -> None:
    party.transport.pull(
        transfer_id,
        source.ref,
        POOL_ID,
        as_blocks(blocks),
        first=first,
        lanes=[maker.lane],
        deadline_s=deadline_s,
        wants_checksums=wants_checksums,
    )


def granted_pull(
    maker: LaneMaker,
    source: LaneParty,
    destination: LaneParty,
    granted: Sequence[int],
    filled: Sequence[int] | None = None,
    *,
    ready: int | None = None,
    **options: Any,
) -> TransferId:
    """A grant of blocks and a pull of them, into blocks ``filled`` (the same). ``options``: of :func:`pull`."""
    transfer_id = fresh_id()
    grant(source, transfer_id, granted, ready=ready)
    pull(maker, destination, source, transfer_id, granted if filled is None else filled, **options)
    return transfer_id


def expect_outcome(
    maker: LaneMaker,
    parties: Sequence[LaneParty],
    party: LaneParty,
    transfer_id: TransferId,
    *outcomes: str,
    within_s: float = SOON_S,
) -> None:
    """The transfer ends as one of ``outcomes``, and drains."""
    expect(maker, parties, "drained", lambda: party.drained[transfer_id.raw] == 1, within_s)
    text = party.finals[transfer_id.raw][0].text
    assert party.outcome(transfer_id) in outcomes, f"{party.outcome(transfer_id)} ({text}), not {' or '.join(outcomes)}"


def has_done(party: LaneParty, transfer_id: TransferId, blocks: int) -> Callable[[], bool]:
    """Whether exactly ``blocks`` blocks of a transfer have landed."""
    return lambda: party.done.get(transfer_id.raw, 0) == blocks


def has_ended(party: LaneParty, transfer_id: TransferId) -> Callable[[], bool]:
    """Whether a grant has ended, and its owner got GrantEnded."""
    return lambda: bool(party.ended[transfer_id.raw])


def expect_poison(party: LaneParty, blocks: Sequence[int] | None = None) -> None:
    assert (party.read(blocks) == POISON).all(), "a byte landed where none may"


@contextlib.contextmanager
def raises(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")
