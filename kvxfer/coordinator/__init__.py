"""The coordinator: a gRPC directory of workers, their incarnations and session keys. Never on the data path."""

from __future__ import annotations

from kvxfer.coordinator.options import CoordinatorOptions
from kvxfer.coordinator.server import serve

__all__ = ["CoordinatorOptions", "serve"]
