"""What a target is, and good values for those of more than one file."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

import numpy as np

from kvxfer.errors import InvalidArgumentError
from kvxfer.protocol.directory import Change, Hello
from kvxfer.transport.descriptors import Descriptors, RemotePeer
from kvxfer.types import (
    AgentRef,
    CompatibilityRecord,
    DataAddress,
    Exposure,
    Incarnation,
    Lane,
    Load,
    Member,
    MemoryKind,
    PoolRecord,
    RegionRecord,
    Role,
    TransferId,
    WorkerInfo,
)

STACK_FRAMES = 400
"""That a decoder may use, whichever test calls it: input that is nested too deep is so in every run."""


@dataclasses.dataclass(frozen=True)
class Target:
    """``read`` gives a value of each of ``seeds``, and of anything else a value or one of ``errors``."""

    read: Callable[[bytes], object]
    seeds: Sequence[bytes]
    errors: tuple[type[Exception], ...] = ()

    def is_value(self, data: bytes) -> bool:
        """Whether ``data`` is a value. Raises whatever ``read`` may not raise."""
        depth, frame = 0, sys._getframe()
        while frame is not None:
            depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(depth + STACK_FRAMES)
        try:
            self.read(data)
        except self.errors:
            return False
        finally:
            sys.setrecursionlimit(limit)
        return True


REF = AgentRef("a", Incarnation(3, bytes(range(16))))
ADDRESS = DataAddress("127.0.0.1", 4000, "/run/x.sock", "host:0", (Lane.STREAM, Lane.CMA))
REGIONS = (
    RegionRecord(1 << 24, 4096, 100),
    RegionRecord(2, 1 << 40, 1 << 20, MemoryKind.CUDA, 3, exposure=Exposure.GRANT),
)
RECORD = CompatibilityRecord("m", "f" * 8, "e" * 8, "bfloat16", 2, 2, 8, 16, "HNC", "packed", "neox", "cpu")
INFO = WorkerInfo("a", Role.BOTH, "model", "http://127.0.0.1:1", 100, 16, "dialect")
POOL = PoolRecord(1, RECORD, 8, 64, Exposure.POOL, True, MemoryKind.HOST)
MEMBER = Member(REF, INFO, ADDRESS, (POOL,), Load(1, 2, 3, 4, 5), False, True, bytes(32))
HELLO = Hello(INFO, ADDRESS, bytes(16), 3, (POOL,))
CHANGE = Change(bytes(16), 5, True, True, (MEMBER,), (AgentRef("b", Incarnation(1, bytes(16))),))
TRANSFER = TransferId(bytes(range(16)))


def look_up(records: Sequence[RegionRecord]) -> None:
    """What lies in one region is found there, and anything else is InvalidArgumentError."""
    table = RemotePeer(REF, ADDRESS, records).table
    known = [(record.address, min(record.length_bytes, 64)) for record in records[:8]]
    for address, length in [(4096, 1), (2**64 - 100, 50), (1, 2**64 - 1), *known]:
        holders = [r for r in records if r.address <= address and address + length <= r.address + r.length_bytes]
        try:
            prepared = table.resolve(Descriptors(np.array([(address, length, 0)], np.uint64)))
        except InvalidArgumentError:
            assert not (len(holders) == 1 and holders[0].device == 0 and length < 2**20)
            continue
        assert prepared.regions <= {record.region_id for record in holders}
