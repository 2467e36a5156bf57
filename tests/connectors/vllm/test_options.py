"""The connector's settings: what is refused, and why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.errors import ConfigError

EXTRA = {"coordinator": "127.0.0.1:7400"}


def test_engines_that_the_router_could_not_tell_apart_are_refused() -> None:
    alone = ConnectorOptions.from_config("kv_both", "e_dp1", EXTRA)
    behind = ConnectorOptions.from_config("kv_both", "e_dp1", {**EXTRA, "http_url": "http://127.0.0.1:8100"})
    hybrid = SimpleNamespace(data_parallel_hybrid_lb=True)
    alone.check_front_end(hybrid)
    for parallel in (SimpleNamespace(), SimpleNamespace(data_parallel_hybrid_lb=False, data_parallel_size=2)):
        behind.check_front_end(parallel)
    with pytest.raises(ConfigError, match="leave http_url out"):
        behind.check_front_end(hybrid)


def test_engines_find_each_other_in_one_of_two_ways() -> None:
    alone = ConnectorOptions.from_config("kv_both", "e", {"discovery": True})
    assert alone.agent_config(0).discovery
    assert not ConnectorOptions.from_config("kv_both", "e", EXTRA).agent_config(0).discovery
    for extra in ({}, {"discovery": False}, {**EXTRA, "discovery": True}):
        with pytest.raises(ConfigError, match="either coordinator"):
            ConnectorOptions.from_config("kv_both", "e", extra)
    with pytest.raises(ConfigError, match="http_url"):
        ConnectorOptions.from_config("kv_both", "e", {"discovery": True, "http_url": "http://127.0.0.1:8100"})


@pytest.mark.parametrize(
    ("old", "text"),
    [
        ("pull_wait_s", r"timeout_s or grant_wait_s .* unknown_wait_s .* leave pull_wait_s out"),
        ("introductions", "called discovery now"),
        ("checks", "called checksum now"),
        ("hold_ttl_s", "called kv_lease_duration now"),
        ("hold_life_max_s", "called kv_lease_max_s now"),
    ],
)
def test_options_with_a_retired_key_name_its_replacement(old: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{old}.*{text}"):
        ConnectorOptions.from_config("kv_both", "e", {**EXTRA, old: 60.0})


@pytest.mark.parametrize("name", ["grant_wait_s", "unknown_wait_s", "engine_silent_s", "room_wait_s"])
def test_waits_are_durations(name: str) -> None:
    assert getattr(ConnectorOptions.from_config("kv_both", "e", {**EXTRA, name: 0.5}), name) == 0.5
    for wrong in (0.0, -1.0, float("nan"), float("inf"), 86401.0):
        with pytest.raises(ConfigError, match=name):
            ConnectorOptions.from_config("kv_both", "e", {**EXTRA, name: wrong})


def test_discovery_with_too_many_ranks_is_refused() -> None:
    alone = ConnectorOptions.from_config("kv_both", "e", {"discovery": True})
    alone.check_ranks(16)
    with pytest.raises(ConfigError, match="at most 16"):
        alone.check_ranks(17)
    ConnectorOptions.from_config("kv_both", "e", EXTRA).check_ranks(17)
