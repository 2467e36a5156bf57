"""The kinds of store: how to make each, and how to open it again."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Callable

from kvxfer.coordinator.store import EtcdStore, MemberRecord, MemoryStore, SqliteStore, Store
from kvxfer.types import AgentRef, DataAddress, Incarnation, Member, Role, WorkerInfo
from tests.support.etcd import EtcdNodes

CLOCK_US = 1_000_000
NONCE = bytes([5]) * 16


def record(agent_id: str = "a", number: int = CLOCK_US + 1, sessions: int = 1, owner: str = "x") -> MemberRecord:
    info = WorkerInfo(agent_id, Role.BOTH, "m", "http://127.0.0.1:1")
    ref = AgentRef(agent_id, Incarnation(number, NONCE))
    return MemberRecord(owner, sessions, Member(ref, info, DataAddress("127.0.0.1", 1, "", "h")))


@dataclasses.dataclass
class StoreKind:
    """``make`` gives another store object on the same memory of the kind."""

    name: str
    make: Callable[[], Store]
    is_durable: bool

    @contextlib.asynccontextmanager
    async def opened(self, owner: str = "x") -> AsyncIterator[Store]:
        store = self.make()
        await store.open(owner, f"{owner}:1")
        try:
            yield store
        finally:
            await store.close()


def etcd_kind(nodes: EtcdNodes) -> StoreKind:
    return StoreKind("etcd", lambda: EtcdStore(tuple(nodes.endpoints.split(",")), CLOCK_US, lease_s=2), is_durable=True)


def memory_kind() -> StoreKind:
    return StoreKind("memory", lambda: MemoryStore(CLOCK_US), is_durable=False)


def sqlite_kind(path: pathlib.Path) -> StoreKind:
    return StoreKind("sqlite", lambda: SqliteStore(path, CLOCK_US), is_durable=True)
