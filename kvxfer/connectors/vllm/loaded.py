"""What this process saw vLLM load: the state of files just before and after, and what happened to weights in memory.
One record a process, written by :mod:`~kvxfer.connectors.vllm.watch`; must never read a file's content.

vLLM's classes know nothing of a connector, and the plugin nothing of an engine: what belongs to which is found by the
path of a file and the worker's number.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable

from kvxfer.connectors.common.changes import WeightChanges
from kvxfer.connectors.common.stamps import Stamp

_TOKEN = secrets.token_hex(4)
ADAPTERS_MAX = 4096
FILES_MAX = 1 << 16


@dataclasses.dataclass(frozen=True)
class AdapterLoad:
    """One load of a LoRA adapter by one worker (``source``; its loads are numbered). ``files``: by path, what they were
    before it and still were after it; ``why``: or why that is not known. Travels between vLLM's processes."""

    source: str
    number: int
    adapter_id: int
    path: str
    files: tuple[tuple[str, Stamp], ...]
    why: str = ""
    name: str = ""
    """What requests call it by."""


class Loaded(WeightChanges):
    """From any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self._reading: collections.OrderedDict[str, tuple[Stamp, int]] = collections.OrderedDict()
        self._adapters: collections.OrderedDict[int, dict[str, AdapterLoad]] = collections.OrderedDict()
        """By number of the adapter and worker."""
        self._newest = 0
        self._on_adapters: list[Callable[[AdapterLoad], None]] = []
        self.is_watching = False
        """Whether vLLM's workers report here what they load."""

    # --- weights ---

    def begin(self) -> None:
        """A worker begins to load its model."""
        with self._lock:
            self._reading.clear()
            self._changed = ""

    def read(self, stamps: dict[str, Stamp], at_ns: int | None = None) -> None:
        """It will now read these files; ``at_ns`` (since the epoch): now."""
        at_ns = time.time_ns() if at_ns is None else at_ns
        with self._lock:
            for path, stamp in stamps.items():
                self._reading.setdefault(path, (stamp, at_ns))
            while len(self._reading) > FILES_MAX:
                self._reading.popitem(last=False)

    def read_as(self, path: str) -> tuple[Stamp, int] | None:
        """The state of that file when a worker was about to read it, and when that was; ``None``: no worker said."""
        with self._lock:
            return self._reading.get(path)

    def files_of(self, model: str) -> list[str]:
        """Of a name of the hub: those that a worker was about to read from its snapshots; else none."""
        part = f"models--{model.partition(':')[0].replace('/', '--')}"
        with self._lock:
            return sorted(path for path in self._reading if "/" in model and part in path.split(os.sep))

    # --- adapters ---

    def adapter(
        self,
        source: str,
        adapter_id: int,
        path: str,
        files: Iterable[tuple[str, Stamp]],
        why: str = "",
        name: str = "",
    ) -> None:
        """A worker loaded an adapter."""
        load = AdapterLoad(source, next(self._numbers), adapter_id, path, tuple(files), why, name)
        self.take((load,))

    def take(self, loads: Iterable[AdapterLoad]) -> None:
        """What workers loaded, of this or another process; each may be told twice, and late."""
        news = []
        with self._lock:
            for load in loads:
                workers = self._adapters.setdefault(load.adapter_id, {})
                known = workers.get(load.source)
                if known is None or known.number < load.number:
                    workers[load.source] = load
                    self._adapters.move_to_end(load.adapter_id)
                    news.append(load)
                    if load.source.startswith(f"{_process()}."):
                        self._newest = max(self._newest, load.number)
            while len(self._adapters) > ADAPTERS_MAX:
                self._adapters.popitem(last=False)
            listeners = list(self._on_adapters)
        for load, listener in itertools.product(news, listeners):
            listener(load)

    def forget_source(self, source: str) -> None:
        """That worker's manager is no more."""
        with self._lock:
            for adapter_id in [number for number, workers in self._adapters.items() if source in workers]:
                del self._adapters[adapter_id][source]

    def listen_adapters(self, listener: Callable[[AdapterLoad], None]) -> Callable[[], None]:
        """Call it with every load that is new from now on, and with those that are known. Returns what ends that."""
        with self._lock:
            self._on_adapters.append(listener)
            known = [load for workers in self._adapters.values() for load in workers.values()]
        for load in known:
            listener(load)
        return lambda: self._on_adapters.remove(listener) if listener in self._on_adapters else None

    def adapters_since(self, number: int) -> tuple[AdapterLoad, ...]:
        """Those loads of this process's workers that are numbered above ``number``."""
        if number >= self._newest:
            return ()
        mine = f"{_process()}."
        with self._lock:
            known = [load for workers in self._adapters.values() for load in workers.values()]
        found = (load for load in known if load.number > number and load.source.startswith(mine))
        return tuple(sorted(found, key=lambda load: load.number))

    def loads_of(self, adapter_id: int) -> tuple[AdapterLoad, ...]:
        """The newest load of that adapter by each worker."""
        with self._lock:
            return tuple(self._adapters.get(adapter_id, {}).values())


def source_of(manager: object) -> str:
    """A name for a worker's adapter manager that no other living one has."""
    return f"{_process()}.{id(manager):x}"


def _process() -> str:
    return f"{os.getpid()}-{_TOKEN}"


LOADED = Loaded()
"""Of this process."""
