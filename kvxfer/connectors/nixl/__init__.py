"""A drop-in for NIXL's Python package, on kvxfer's transport: ``from kvxfer.connectors.nixl import nixl_agent``, or
``kvxfer nixl -- python app.py`` for a program that says ``import nixl``. See docs/nixl.md.

Every registration is an open-ended grant and offer: a process that holds an agent's metadata may read and write what it
registered, until it is deregistered.
"""

from __future__ import annotations

from kvxfer.connectors.nixl.api import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
)
from kvxfer.connectors.nixl.errors import (
    nixlBackendError,
    nixlCancelledError,
    nixlError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixlBackendError",
    "nixlCancelledError",
    "nixlError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
