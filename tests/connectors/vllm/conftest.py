"""Fixtures of several files."""

from __future__ import annotations

from .pair import ranks

__all__ = ["ranks"]
