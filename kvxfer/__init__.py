"""kvxfer moves the KV cache of a prompt from the worker that computed it to the worker that will generate from it.

The names below are the whole public surface; each is imported when first asked for, so that ``import kvxfer`` loads
neither grpc nor torch. This module decides nothing and must never import a part of the package when it is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer import errors as errors
    from kvxfer.agent import Agent, Grant, Pool, Transfer, TransferResult
    from kvxfer.config import AgentConfig
    from kvxfer.errors import KvxferError
    from kvxfer.types import (
        AgentRef,
        CompatibilityRecord,
        GrantState,
        Incarnation,
        Lane,
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
    "AgentRef",
    "CompatibilityRecord",
    "Grant",
    "GrantState",
    "Incarnation",
    "KvxferError",
    "Lane",
    "Pool",
    "Role",
    "Segment",
    "Transfer",
    "TransferId",
    "TransferResult",
    "TransferState",
    "WorkerInfo",
    "__version__",
    "errors",
]

_HOME = {
    "Agent": "kvxfer.agent",
    "AgentConfig": "kvxfer.config",
    "Grant": "kvxfer.agent",
    "KvxferError": "kvxfer.errors",
    "Pool": "kvxfer.agent",
    "Transfer": "kvxfer.agent",
    "TransferResult": "kvxfer.agent",
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
