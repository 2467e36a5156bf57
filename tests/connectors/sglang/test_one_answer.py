"""Which requests a server of a pair refuses because they ask for several answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.sglang.one_answer import refuse_several


def read(params: Any, room: Any = 7) -> None:
    assert refuse_several(None, SimpleNamespace(sampling_params=params, bootstrap_room=room)) is None


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"n": 2}, "n: .* 2 are asked for"),
        ([{"n": 1}, {"n": 3}], "n: .* 3 are asked for"),
        ({"n": 1, "beam_width": 4}, "beam_width: .* 4 are asked for"),
    ],
)
@pytest.mark.parametrize("room", [7, [7], [7, 8]])
def test_several_answers_are_refused_by_their_field(params: Any, word: str, room: Any) -> None:
    with pytest.raises(ValueError, match=f"^{word}"):
        read(params, room)
    for none in (None, [None, None]):  # it needs no pair
        read(params, none)


@pytest.mark.parametrize("params", [None, {}, {"n": 1}, {"n": None}, {"n": "2"}, [{}, {"n": 1}], [], {"beam_width": 1}])
def test_one_answer_is_read_as_ever(params: Any) -> None:
    read(params)
