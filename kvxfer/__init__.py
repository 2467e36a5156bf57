"""kvxfer moves the KV cache of a prompt from the worker that computed it to the worker that will generate from it.

The names below are the whole public surface; each is imported when first asked for, so that ``import kvxfer`` loads
neither grpc nor torch. This module decides nothing and must never import a part of the package when it is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer import errors as errors
    from kvxfer.agent import Agent, AgentPost, Grant, Pool, Transfer, TransferResult
    from kvxfer.agent.notifications import Delivery, Notification
    from kvxfer.config import AgentConfig
    from kvxfer.errors import KvxferError
    from kvxfer.transport.base import allocate_region
    from kvxfer.transport.engine import MemoryRegistration, Op
    from kvxfer.transport.network import MemoryNetwork
    from kvxfer.types import (
        AgentRef,
        ChecksumMode,
        CompatibilityRecord,
        DataAddress,
        Exposure,
        GrantState,
        Incarnation,
        Lane,
        Member,
        PoolRecord,
        ProgressMode,
        RegionRecord,
        Role,
        Segment,
        TransferId,
        TransferState,
        WorkerInfo,
    )

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "AgentConfig",
    "AgentPost",
    "AgentRef",
    "ChecksumMode",
    "CompatibilityRecord",
    "DataAddress",
    "Delivery",
    "Exposure",
    "Grant",
    "GrantState",
    "Incarnation",
    "KvxferError",
    "Lane",
    "Member",
    "MemoryNetwork",
    "MemoryRegistration",
    "Notification",
    "Op",
    "Pool",
    "PoolRecord",
    "ProgressMode",
    "RegionRecord",
    "Role",
    "Segment",
    "Transfer",
    "TransferId",
    "TransferResult",
    "TransferState",
    "WorkerInfo",
    "__version__",
    "allocate_region",
    "errors",
]

_HOME = {
    "Agent": "kvxfer.agent",
    "AgentConfig": "kvxfer.config",
    "AgentPost": "kvxfer.agent",
    "Delivery": "kvxfer.agent.notifications",
    "Grant": "kvxfer.agent",
    "KvxferError": "kvxfer.errors",
    "MemoryNetwork": "kvxfer.transport.network",
    "MemoryRegistration": "kvxfer.transport.engine",
    "Notification": "kvxfer.agent.notifications",
    "Op": "kvxfer.transport.engine",
    "Pool": "kvxfer.agent",
    "Transfer": "kvxfer.agent",
    "TransferResult": "kvxfer.agent",
    "allocate_region": "kvxfer.transport.base",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("kvxfer.errors")
    if name not in __all__:
        raise AttributeError(f"module 'kvxfer' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME.get(name, "kvxfer.types")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
