"""The pages that speak of the machines say what the machines say."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

from kvxfer.testing.sim import Invariant
from kvxfer.testing.sim.faults import IMPOSSIBLE, Kind, TransferPhase

pytestmark = pytest.mark.checkout


def test_state_diagrams_are_fresh(root: pathlib.Path) -> None:
    spec = importlib.util.spec_from_file_location("make_state_diagrams", root / "docs" / "make_state_diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    page = (root / "docs" / "safety.md").read_text()
    assert maker.drawn(page) == page, "run python docs/make_state_diagrams.py"
    assert "ALIVE --> EXPIRED: expire" in page
    assert "CONFIRMING --> COMMITTED: verdict_ok" in page


def test_simulation_page_names_every_invariant(root: pathlib.Path) -> None:
    page = (root / "docs" / "simulation.md").read_text()
    for invariant in Invariant:
        assert f"{invariant.value}. *{invariant.name.lower()}*" in page


def test_every_kind_can_strike_somewhere() -> None:
    assert all(any((kind, phase) not in IMPOSSIBLE for phase in TransferPhase) for kind in Kind)
