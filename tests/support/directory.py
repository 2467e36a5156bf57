"""What agents say to a directory, and the limits by which it judges them."""

from __future__ import annotations

from typing import Any

from kvxfer.protocol.directory import Hello
from kvxfer.protocol.liveness import LivenessLimits
from kvxfer.types import CompatibilityRecord, DataAddress, Exposure, PoolRecord, Role, WorkerInfo

MS = 1_000_000
SUSPECT_NS, DEAD_NS, GAP_NS = 1500 * MS, 3000 * MS, 500 * MS
LIMITS = LivenessLimits(SUSPECT_NS, DEAD_NS, GAP_NS)
RECORD = CompatibilityRecord("m", "c", "w", "float16", 2, 3, 64, 16, "lb2thd", "plain", "rope", "sdpa")
NONCES = tuple(bytes([value]) * 16 for value in range(1, 4))


def pool(pool_id: int) -> PoolRecord:
    return PoolRecord(pool_id, RECORD, 8, 4096, Exposure.GRANT, False)


def hello(agent_id: str = "a", nonce: bytes = NONCES[0], number: int = 0, **more: Any) -> Hello:
    info = WorkerInfo(agent_id, Role.BOTH, "m", "http://127.0.0.1:1")
    return Hello(info, DataAddress("127.0.0.1", 1, "", "host"), nonce, number, **more)
