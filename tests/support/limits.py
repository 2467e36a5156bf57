"""Limits of an endpoint by their names, whichever part of it they belong to; decides nothing."""

from __future__ import annotations

from typing import Any

from kvxfer._native import _core


def endpoint_limits(**values: Any) -> _core.EndpointLimits:
    """``values``: fields of EndpointLimits, of its grants or of its transfers."""
    limits = _core.EndpointLimits()
    for name, value in values.items():
        owner = next(part for part in (limits, limits.grants, limits.transfers) if hasattr(part, name))
        setattr(owner, name, value)
    return limits
