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
    alone = ConnectorOptions.from_config("kv_both", "e", {"introductions": True})
    assert alone.agent_config(0).introductions
    assert not ConnectorOptions.from_config("kv_both", "e", EXTRA).agent_config(0).introductions
    for extra in ({}, {"introductions": False}, {**EXTRA, "introductions": True}):
        with pytest.raises(ConfigError, match="either coordinator"):
            ConnectorOptions.from_config("kv_both", "e", extra)
    with pytest.raises(ConfigError, match="http_url"):
        ConnectorOptions.from_config("kv_both", "e", {"introductions": True, "http_url": "http://127.0.0.1:8100"})


def test_one_request_introduces_so_many_ranks_only() -> None:
    alone = ConnectorOptions.from_config("kv_both", "e", {"introductions": True})
    alone.check_ranks(16)
    with pytest.raises(ConfigError, match="at most 16"):
        alone.check_ranks(17)
    ConnectorOptions.from_config("kv_both", "e", EXTRA).check_ranks(17)
