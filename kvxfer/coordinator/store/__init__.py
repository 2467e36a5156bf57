"""What outlives a coordinator process, behind one seam: in memory, in a file, or in etcd."""

from __future__ import annotations

import pathlib

from kvxfer.config import addresses
from kvxfer.coordinator.store.base import AHEAD_MAX, MemberRecord, Store, StoreChange
from kvxfer.coordinator.store.etcd import EtcdStore
from kvxfer.coordinator.store.etcd_tls import EtcdFiles
from kvxfer.coordinator.store.memory import MemoryStore
from kvxfer.coordinator.store.sqlite import SqliteStore

__all__ = [
    "AHEAD_MAX",
    "EtcdFiles",
    "EtcdStore",
    "MemberRecord",
    "MemoryStore",
    "SqliteStore",
    "Store",
    "StoreChange",
    "make_store",
]


def make_store(text: str, wall_clock_us: int, *, lease_s: float, files: EtcdFiles | None = None) -> Store:
    """The store that the option names. ``lease_s``: how long a silent coordinator of a shared store counts as alive;
    ``files``: for TLS to etcd."""
    kind, _, rest = text.partition(":")
    if kind == "sqlite":
        return SqliteStore(pathlib.Path(rest).expanduser(), wall_clock_us)
    if kind == "etcd":
        return EtcdStore(addresses(rest), wall_clock_us, lease_s=lease_s, files=files)
    return MemoryStore(wall_clock_us)
