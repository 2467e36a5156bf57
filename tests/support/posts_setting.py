"""A transport that only writes down what it is asked, and a poster over it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core
from kvxfer.config import AgentConfig
from kvxfer.errors import LimitExceededError
from kvxfer.transport import transfers
from kvxfer.transport.base import PostOrder, StartPost
from kvxfer.transport.engine import Op, RemotePeer, TransferBatch, TransferEngine, TransferPlan
from kvxfer.types import AgentRef, DataAddress, Incarnation, Lane, RegionRecord, TransferId, TransferState

REF = AgentRef("a", Incarnation(1, bytes(16)))
PEER_REF = AgentRef("b", Incarnation(2, bytes(16)))
ADDRESS = DataAddress("127.0.0.1", 1, "/x", "host", (Lane.MAPPED, Lane.STREAM))
MANY = 25_000
"""Scattered elements: three transfers."""


class Final(types.SimpleNamespace):
    """As the core's TransferFinal."""


class Drained(types.SimpleNamespace):
    """As the core's TransferDrained."""


class Recorder:
    """A transport to which nothing happens until a test says so."""

    ref = REF
    address = ADDRESS

    def __init__(self) -> None:
        self.asked: list[types.SimpleNamespace] = []
        self.cancelled: list[bytes] = []
        self.notified: list[bytes] = []
        self.removed: list[int] = []
        self.prepared = 0
        self.events: list[Any] = []
        self.refuse_after: int | None = None
        self.notify_error: Exception | None = None
        self.on_start: Callable[[bytes], None] = lambda identity: None

    def add_region(self, record: RegionRecord, region: Any) -> None: ...

    def remove_region(self, region_id: int) -> None:
        self.removed.append(region_id)

    def prepare_fetch(self, order: PostOrder) -> StartPost:
        def start(identity: bytes, timeout_ns: int, notification: bytes | None, wants_checksums: bool, /) -> None:
            if self.refuse_after is not None and len(self.asked) >= self.refuse_after:
                raise LimitExceededError("transfers_max")
            how = {
                "id": identity,
                "timeout_ns": timeout_ns,
                "notification": notification,
                "wants_checksums": wants_checksums,
            }
            self.asked.append(types.SimpleNamespace(**how, **order._asdict()))
            self.on_start(identity)

        self.prepared += 1
        return start

    prepare_push = prepare_fetch

    def cancel(self, transfer_id: TransferId) -> None:
        self.cancelled.append(transfer_id.raw)

    def transfer_state(self, transfer_id: TransferId) -> TransferState | None:
        is_known = any(asked.id == transfer_id.raw for asked in self.asked)
        return TransferState.CONNECTING if is_known else None

    def notify(self, to: AgentRef, payload: bytes) -> int:
        if self.notify_error is not None:
            raise self.notify_error
        self.notified.append(payload)
        return len(self.notified)

    def drain(self) -> list[Any]:
        events, self.events = self.events, []
        return events


def final_of(identity: bytes, state: TransferState, code: str, **more: Any) -> Final:
    """How a transfer over lane ``stream`` ended."""
    return Final(
        id=identity,
        state=getattr(_core.TransferState, state.name),
        code=types.SimpleNamespace(name=code),
        text="why",
        lane=_core.Lane.STREAM,
        lane_notes="",
        attempts=1,
        blocks_checked=0,
        queue_ns=1000,
        wire_ns=2000,
        confirm_ns=3000,
        **more,
    )


class Setting:
    def __init__(self, patch: pytest.MonkeyPatch, **config: Any) -> None:
        self.transport = Recorder()
        self.others: list[object] = []
        settings = AgentConfig(**config)
        self.poster = TransferEngine(self.transport, config=settings, on_event=self.others.append)  # type: ignore[arg-type]
        self.memory = np.zeros(MANY * 64, np.uint8)  # longer than what most tests name
        self.registration = self.poster.register(self.memory)
        self.peer = RemotePeer(PEER_REF, ADDRESS, [self.registration.record])
        patch.setattr(transfers, "TransferFinal", Final)
        patch.setattr(transfers, "TransferDrained", Drained)
        patch.setattr(transfers, "TRANSFER_EVENTS", (Final, Drained))

    def plan(self, count: int = MANY, op: Op = Op.READ, length: int = 16) -> TransferPlan:
        rows = np.zeros((count, 3), np.uint64)
        rows[:, 0] = self.registration.record.address + np.arange(count) * 50
        rows[:, 0] += np.random.default_rng(1).integers(0, 20, count).astype(np.uint64)
        rows[:, 1] = length
        return self.poster.plan(op, self.poster.prepare(rows), None, self.poster.prepare(rows, peer=self.peer), None)

    def finish(self, identity: bytes, state: TransferState = TransferState.COMMITTED, code: str = "ok") -> None:
        self.transport.events.append(final_of(identity, state, code))

    def drained(self, post: TransferBatch, *identities: bytes) -> None:
        for identity in identities or post.transfer_ids:
            assert self.poster.handle(Drained(id=identity))
