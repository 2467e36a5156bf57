"""The kept corpus goes through every Python fuzz target, and the fuzzer finds what is there to be found."""

from __future__ import annotations

import json
import pathlib
import random

import pytest

from tests.fuzz.python_fuzz import CORPUS_BYTES_MAX, ENTRIES_MAX, KEPT, Fuzzer, fewest, files_of, run
from tests.fuzz.python_targets import TARGETS
from tests.fuzz.python_targets.samples import Target

pytestmark = [pytest.mark.checkout, pytest.mark.no_sanitizer]


@pytest.mark.parametrize("name", TARGETS)
def test_no_kept_input_breaks_its_target(name: str) -> None:
    """Every seed is a value, and the corpus has values too: a target that refuses everything keeps nothing."""
    target = TARGETS[name]
    assert all([run(target, seed) for seed in target.seeds])
    assert any([run(target, path.read_bytes()) for path in files_of(KEPT / name)])


def test_every_target_has_a_small_corpus() -> None:
    assert sorted(TARGETS) == sorted(path.name for path in KEPT.iterdir())
    for directory in KEPT.iterdir():
        sizes = [path.stat().st_size for path in directory.iterdir()]
        assert len(sizes) <= ENTRIES_MAX
        assert sum(sizes) <= CORPUS_BYTES_MAX


def odd_number(data: bytes) -> None:
    values = json.loads(data)
    if isinstance(values, dict) and "a" in values:
        int(values["a"])


@pytest.mark.parametrize(
    ("errors", "missing"),
    [
        ((ValueError, TypeError, OverflowError), RecursionError),
        ((ValueError, TypeError, RecursionError), OverflowError),
    ],
)
def test_what_breaks_a_target_is_kept(
    errors: tuple[type[Exception], ...],
    missing: type[Exception],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One that forgot what is nested too deep, and one that forgot 1e999."""
    target = Target(odd_number, [b'{"a": 1}'], errors)
    fuzzer = Fuzzer(target, random.Random(1), found=tmp_path, broken=tmp_path / "broken-")
    done = fuzzer.fuzz(target.seeds, 30)
    assert done.broken is not None
    assert done.broken.name.startswith("broken-")
    assert missing.__name__ in capsys.readouterr().err
    with pytest.raises(missing):
        run(target, done.broken.read_bytes())


def test_few_inputs_with_all_coverage_are_kept() -> None:
    """What only says the same again goes."""
    target = TARGETS["vllm_notification"]
    ask, *others = target.seeds
    same = [ask + b" ", *(seed + b"  " for seed in target.seeds)]
    chosen = fewest(target, [ask], [*others, *same, b"{"])
    assert b"{" in chosen
    assert set(chosen) <= {*others, b"{"}
    assert fewest(target, [ask, *chosen], [*others, *same, b"{"]) == []
