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
