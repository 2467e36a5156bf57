"""NIXL's plugin names, and what each stands for here. Decides which names are accepted; must never know lanes: for
every network plugin kvxfer takes the best lane of the pair.

A name is taken where the plugin's work is done here, and refused when the backend is made otherwise: a program that
looks for a storage plugin must not learn with its first transfer that there is none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from kvxfer.connectors.nixl.enums import nixl_mem_t
from kvxfer.connectors.nixl.errors import nixlInvalidParamError, nixlNotFoundError

DRAM = nixl_mem_t.DRAM_SEG


@dataclasses.dataclass(frozen=True)
class Plugin:
    """``params``: the names and defaults that NIXL's plugin takes; ours takes any, and needs none."""

    memory: tuple[nixl_mem_t, ...]
    params: Mapping[str, str]


PLUGINS: Mapping[str, Plugin] = {
    "LIBFABRIC": Plugin((DRAM,), {}),
    "MOONCAKE": Plugin((DRAM,), {}),
    "UCCL": Plugin((DRAM,), {}),
    "UCX": Plugin((DRAM,), {"num_workers": "1", "ucx_devices": "", "ucx_error_handling_mode": "peer"}),
}
"""Those that move memory between agents: each is kvxfer."""
OTHER_WORK: Mapping[str, str] = {
    **dict.fromkeys(("GDS", "GDS_MT", "GUSLI", "HF3FS", "POSIX"), "files and block devices"),
    **dict.fromkeys(("AZURE_BLOB", "INFINIA", "OBJ"), "objects"),
    "GPUNETIO": "transfers that a GPU starts",
}
"""NIXL's other plugins, and what they are for."""

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
            raise nixlInvalidParamError(f"{handle!r} is not a backend of this agent")
        return name

    def names(self, handles: Iterable[int]) -> tuple[str, ...]:
        """Of these handles, or of all where none is given."""
        chosen = tuple(self.name(handle) for handle in handles)
        return chosen or tuple(self._names.values())

    def first(self, handles: Iterable[int]) -> int | None:
        """The first of these handles; none given: of all."""
        chosen = tuple(handles) or tuple(self._names)
        for handle in chosen:
            self.name(handle)
        return chosen[0] if chosen else None


def plugin_of(name: str) -> Plugin:
    """Raises nixlNotFoundError."""
    plugin = PLUGINS.get(name)
    if plugin is None:
        there_are = f"there are {', '.join(PLUGINS)}"
        if name in OTHER_WORK:
            raise nixlNotFoundError(
                f"plugin {name!r} is for {OTHER_WORK[name]}, and kvxfer moves host memory between agents; {there_are}"
            )
        raise nixlNotFoundError(f"there is no plugin {name!r}; {there_are}")
    return plugin
