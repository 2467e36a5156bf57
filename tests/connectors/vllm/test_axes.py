"""How an engine's storages are told apart from another's."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.connectors.vllm.pages import LayerStorage, Pages
from kvxfer.connectors.vllm.record import axes_of
from kvxfer.errors import ConfigError
from kvxfer.layout.convertible import WHOLE_STORAGE
from kvxfer.rpc.convert import TEXT_BYTES_MAX
from kvxfer.transport.base import Region


def pages_in(*layers: int) -> Pages:
    """Storages of so many layers each, of four blocks a layer."""
    stores = tuple(
        LayerStorage(Region(1, 64 * count, None), 4 * count, 0, np.arange(count) * 4, np.ones(count, np.int64))
        for count in layers
    )
    return Pages(tuple(map(str, range(sum(layers)))), 16, stores)


def test_engines_that_keep_their_layers_in_other_storages_differ() -> None:
    axes = [axes_of("HNC", pages_in(*layers)) for layers in ((3,), (1, 1, 1), (2, 1), (1, 2))]
    assert axes[0] == WHOLE_STORAGE
    assert len(set(axes)) == 4
    assert axes_of("HNC", pages_in(2, 1)) == axes[2]


def test_more_storages_than_an_agent_has_pools_are_refused() -> None:
    assert len(axes_of("HNC", pages_in(*[1] * 64))) <= TEXT_BYTES_MAX
    with pytest.raises(ConfigError, match="in 65 storages, and kvxfer moves at most 64"):
        axes_of("HNC", pages_in(*[1] * 65))
