"""NIXL's plugin names, and what each stands for here. Decides which names are taken; must never know lanes: whatever
network plugin a program names, the best lane that joins the pair is picked.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from kvxfer.connectors.nixl.enums import nixl_mem_t
from kvxfer.connectors.nixl.errors import nixlInvalidParamError, nixlNotFoundError

DRAM, FILE = nixl_mem_t.DRAM_SEG, nixl_mem_t.FILE_SEG


@dataclasses.dataclass(frozen=True)
class Plugin:
    """``params``: the names and defaults that NIXL's plugin takes; ours takes any, and needs none."""

    is_network: bool
    memory: tuple[nixl_mem_t, ...]
    params: Mapping[str, str]


PLUGINS: Mapping[str, Plugin] = {
    "LIBFABRIC": Plugin(True, (DRAM,), {}),
    "MOONCAKE": Plugin(True, (DRAM,), {}),
    "POSIX": Plugin(False, (DRAM, FILE), {}),
    "UCCL": Plugin(True, (DRAM,), {}),
    "UCX": Plugin(True, (DRAM,), {"num_workers": "1", "ucx_devices": "", "ucx_error_handling_mode": "peer"}),
}
"""Every network plugin is kvxfer; POSIX only answers questions about files."""

_handles = itertools.count(0x1000, 0x10)


class Backends:
    """The backends of one agent, by handle, in the order they were made."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._params: dict[int, dict[str, str]] = {}

    def create(self, name: str, params: Mapping[str, str]) -> int:
        """Raises nixlNotFoundError for a plugin that is not known, nixlInvalidParamError for one made before."""
        plugin_of(name)
        if name in self._names.values():
            raise nixlInvalidParamError(f"backend {name} was created before")
        if not all(isinstance(text, str) for pair in params.items() for text in pair):
            raise TypeError("a backend's parameters must be str by str")
        handle = next(_handles)
        self._names[handle], self._params[handle] = name, dict(params)
        return handle

    def params(self, handle: int) -> dict[str, str]:
        self.name(handle)
        return dict(self._params[handle])

    def name(self, handle: int) -> str:
        """Raises nixlInvalidParamError for a handle that is none of this agent's."""
        name = self._names.get(handle)
        if name is None:
            raise nixlInvalidParamError(f"{handle!r} is no backend of this agent")
        return name

    def names(self, handles: Iterable[int]) -> tuple[str, ...]:
        """Of these handles, or of all where none is given."""
        chosen = tuple(self.name(handle) for handle in handles)
        return chosen or tuple(self._names.values())

    def network(self, handles: Iterable[int]) -> int | None:
        """The first of these handles (none given: of all) that can move memory."""
        chosen = tuple(handles) or tuple(self._names)
        return next((handle for handle in chosen if PLUGINS[self.name(handle)].is_network), None)


def plugin_of(name: str) -> Plugin:
    """Raises nixlNotFoundError."""
    plugin = PLUGINS.get(name)
    if plugin is None:
        raise nixlNotFoundError(f"there is no plugin {name!r}; there are {', '.join(PLUGINS)}")
    return plugin
