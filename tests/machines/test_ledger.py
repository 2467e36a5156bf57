"""The ledger against a plain dictionary: granted counts, reserved and quarantined exclude everything else."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvxfer._native import _core
from kvxfer.errors import BlocksBusyError, InvalidArgumentError, KvxferError

BLOCKS = 6
LISTS = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=4, unique=True)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = _core.Ledger(_core.PoolInfo(1, BLOCKS, 16, bytes(32), True))
        self.granted = dict.fromkeys(range(BLOCKS), 0)
        self.held: dict[int, str] = {}

    @rule(blocks=LISTS)
    def grant(self, blocks: list[int]) -> None:
        if any(block in self.held for block in blocks):
            with pytest.raises(BlocksBusyError):
                self.ledger.grant(blocks)
            return
        self.ledger.grant(blocks)
        for block in blocks:
            self.granted[block] += 1

    @rule(blocks=LISTS)
    def end_grant(self, blocks: list[int]) -> None:
        if all(self.granted[block] for block in blocks):
            self.ledger.end_grant(blocks)
            for block in blocks:
                self.granted[block] -= 1

    @rule(blocks=LISTS)
    def reserve(self, blocks: list[int]) -> None:
        if any(block in self.held or self.granted[block] for block in blocks):
            with pytest.raises(BlocksBusyError):
                self.ledger.reserve(blocks)
            return
        self.ledger.reserve(blocks)
        self.held |= dict.fromkeys(blocks, "reserved")

    @rule(block=st.integers(0, BLOCKS - 1))
    def quarantine(self, block: int) -> None:
        if self.held.get(block) == "reserved":
            self.ledger.quarantine([block])
            self.held[block] = "quarantined"
        else:
            with pytest.raises(KvxferError):
                self.ledger.quarantine([block])

    @rule(block=st.integers(0, BLOCKS - 1))
    def give_back(self, block: int) -> None:
        if self.held.get(block) == "quarantined":
            self.ledger.give_back([block])
            del self.held[block]
        else:
            with pytest.raises(KvxferError):
                self.ledger.give_back([block])

    @rule(block=st.integers(0, BLOCKS - 1))
    def bad_lists(self, block: int) -> None:
        for act in (self.ledger.grant, self.ledger.reserve):
            with pytest.raises(InvalidArgumentError):
                act([block, BLOCKS])
        if block not in self.held and not self.granted[block]:
            with pytest.raises(InvalidArgumentError):
                self.ledger.reserve([block, block])

    @invariant()
    def counts_agree(self) -> None:
        states = list(self.held.values())
        assert self.ledger.granted_count == sum(count > 0 for count in self.granted.values())
        assert self.ledger.reserved_count == states.count("reserved")
        assert self.ledger.quarantined_count == states.count("quarantined")
        for block in range(BLOCKS):
            assert self.ledger.is_reserved(block) == (self.held.get(block) == "reserved")
            assert self.ledger.is_granted(block) == (self.granted[block] > 0)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
