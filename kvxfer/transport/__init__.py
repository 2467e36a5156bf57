"""Lanes and sessions behind one seam. Must never know the coordinator, asyncio or an engine."""

from __future__ import annotations

from kvxfer.transport.base import Blocks, Event, Region, Transport
from kvxfer.transport.memory import MemoryBinding, MemoryTransport
from kvxfer.transport.native import NativeBinding, NativeTransport
from kvxfer.transport.network import MemoryNetwork, Passage, PassageFate

__all__ = [
    "Blocks",
    "Event",
    "MemoryBinding",
    "MemoryNetwork",
    "MemoryTransport",
    "NativeBinding",
    "NativeTransport",
    "Passage",
    "PassageFate",
    "Region",
    "Transport",
]
