"""``KVXFER_LANES``: what an operator allows to everything in a process."""

from __future__ import annotations

import pytest

from kvxfer.config import DEFAULT_LANES, allowed_lanes, operator_lanes
from kvxfer.errors import ConfigError
from kvxfer.types import Lane


def test_unset_allows_all() -> None:
    assert operator_lanes({}) == tuple(Lane) == operator_lanes({"KVXFER_LANES": " , "})
    assert allowed_lanes(DEFAULT_LANES, {}) == DEFAULT_LANES


def test_it_narrows_and_the_callers_order_stays() -> None:
    environ = {"KVXFER_LANES": "Stream, ucx,stream"}
    assert operator_lanes(environ) == (Lane.STREAM, Lane.UCX)
    assert allowed_lanes(DEFAULT_LANES, environ) == (Lane.UCX, Lane.STREAM)


def test_a_wrong_name_and_nothing_left_are_told() -> None:
    with pytest.raises(ConfigError, match="'warp', which is no lane; lanes are mapped"):
        operator_lanes({"KVXFER_LANES": "stream,warp"})
    with pytest.raises(ConfigError, match="leaves none of the lanes mapped"):
        allowed_lanes([Lane.MAPPED], {"KVXFER_LANES": "stream"})
