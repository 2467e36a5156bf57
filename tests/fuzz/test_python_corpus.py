"""The kept corpus goes through every Python fuzz target."""

from __future__ import annotations

import pathlib

import pytest

from tests.fuzz.python_targets import TARGETS

pytestmark = [pytest.mark.checkout, pytest.mark.no_sanitizer]

KEPT = pathlib.Path(__file__).resolve().parent / "corpus-python"
ENTRIES_MAX = 60
CORPUS_BYTES_MAX = 40_000


@pytest.mark.parametrize("name", TARGETS)
def test_no_kept_input_breaks_its_target(name: str) -> None:
    """Every seed is a value, and the corpus has values too: a target that refuses everything keeps nothing."""
    target = TARGETS[name]
    assert all([target.is_value(seed) for seed in target.seeds])
    assert any([target.is_value(path.read_bytes()) for path in sorted((KEPT / name).iterdir())])


def test_every_target_has_a_small_corpus() -> None:
    assert sorted(TARGETS) == sorted(path.name for path in KEPT.iterdir())
    for directory in KEPT.iterdir():
        sizes = [path.stat().st_size for path in directory.iterdir()]
        assert len(sizes) <= ENTRIES_MAX
        assert sum(sizes) <= CORPUS_BYTES_MAX
