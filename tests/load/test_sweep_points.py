"""Which points a sweep has, and how each one's service is started."""

from __future__ import annotations

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.load.sweep_points import SweepOptions, SweepPoint, points, serve_flags, stack_command

SPLITS = st.lists(st.tuples(st.integers(0, 64), st.integers(1, 64)), min_size=1, max_size=6, unique=True)
WORDS = st.lists(st.text("abc=-+ ", min_size=1, max_size=8), min_size=1, max_size=4, unique=True)


@given(SPLITS, WORDS, WORDS)
def test_every_combination_is_there_once(splits: list[tuple[int, int]], policies: list[str], lanes: list[str]) -> None:
    texts = tuple(f"{prefill}:{decode}" for prefill, decode in splits)
    found = points(SweepOptions(splits=texts, policies=tuple(policies), lanes=tuple(lanes)))
    assert [(point.prefill, point.decode) for point in found[:: len(policies) * len(lanes)]] == splits
    assert len(set(found)) == len(found) == len(splits) * len(policies) * len(lanes)
    assert all(point.devices == point.coordinates["devices"] == point.prefill + point.decode for point in found)


@given(st.integers(2, 128))
def test_all_splits_of_a_number_have_both_roles(workers: int) -> None:
    found = points(SweepOptions(workers=workers))
    assert all(point.devices == workers and point.prefill and point.decode for point in found)
    assert len(found) == min(workers - 1, 129 - workers)


@pytest.mark.parametrize("text", ["", "1", "1:0", "a:b", "1:2:3", "65:1", "1:65", "-1:2", "1 2", "1:²"])
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a split is prefill:decode"):
        SweepOptions(splits=("1:1", text))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "either splits or workers"),
        ({"splits": ("1:1",), "workers": 3}, "either splits or workers"),
        ({"workers": 1}, "workers must be 2 to 128"),
        ({"splits": ("1:1", "1:1")}, "splits must not name one twice"),
        ({"workers": 3, "policies": ()}, "policies must name at least one"),
        ({"workers": 3, "lanes": ("cma", "cma")}, "lanes must name at least one, and none twice"),
        ({"workers": 3, "mock": "", "lanes": ("cma",)}, "mock engines have no lanes"),
        ({"workers": 3, "stack": "up {prefill} {decode}"}, "stack must have {port} in it"),
        ({"workers": 3, "stack": "up {prefill} {decode} {port}", "lanes": ("cma",)}, "stack must have {lane} in it"),
        ({"workers": 3, "stack": "up {prefill} {decode} {port} '"}, "stack: No closing quotation"),
        ({"workers": 64, "policies": tuple(map(str, range(17)))}, "a sweep has at most 1000 points, not 1071"),
        ({"workers": 3, "start_s": 0}, "start_s must be"),
    ],
)
def test_wrong_settings_are_refused_with_a_sentence(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        SweepOptions(**settings)  # type: ignore[arg-type]


def test_flags_of_a_point() -> None:
    options = SweepOptions(workers=3, serve_model="m", threads=2)
    assert serve_flags(options, SweepPoint(1, 2)) == ["--prefill=1", "--decode=2", "--model=m", "--threads=2"]
    flags = serve_flags(options, SweepPoint(1, 2, "local-prefill=off", "unix+stream"))
    assert flags[-2:] == ["--policy=local-prefill=off", "--lanes=unix,stream"]
    mock = SweepOptions(workers=3, mock="--itl-ms 5")
    assert serve_flags(mock, SweepPoint(1, 2)) == ["--prefill=1", "--decode=2", "--mock=--itl-ms 5"]


@given(st.text(min_size=1, max_size=20))
def test_what_a_point_says_stays_one_word(policy: str) -> None:
    options = SweepOptions(workers=3, stack=shlex.join(["up", "{prefill}:{decode}", "--port={port}", "{policy}"]))
    words = stack_command(options, SweepPoint(2, 1, policy), 81)
    assert words[:3] == ["up", "2:1", "--port=81"]
    assert len(words) == 4
