"""Workers of tests: without a process, a socket, or a coordinator behind them."""

from __future__ import annotations

from typing import Any

from kvxfer.router.fleet.worker import Worker, WorkerSource, stock_worker
from kvxfer.router.fleet.workers import Workers
from kvxfer.types import AgentRef, DataAddress, Incarnation, Member, Role, WorkerInfo


class FakeClock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fleet(**more: Any) -> tuple[Workers, FakeClock]:
    """Workers on a clock of their own, without randomness."""
    clock = FakeClock()
    return Workers(now=clock, draw=lambda: 0.0, **more), clock


def stock(
    name: str,
    role: Role = Role.DECODE,
    *,
    port: int = 0,
    source: str = WorkerSource.FLAGS,
    model: str = "m",
    **more: Any,
) -> Worker:
    """A worker of stock vLLM at a port of its own."""
    port = port or 10000 + sum(name.encode()) % 20000
    return stock_worker(
        f"http://127.0.0.1:{port}", role, more.pop("dialect", "vllm"), source, name=name, model=model, **more
    )


def member(
    name: str, role: Role = Role.DECODE, *, number: int = 1, port: int = 1, dialect: str = "kvxfer", **more: Any
) -> Member:
    """A member as a coordinator lists it; ``port`` 0 is one without HTTP."""
    url = f"http://127.0.0.1:{port}" if port else ""
    info = WorkerInfo(name, role, more.pop("model", "m"), url, dialect=dialect)
    ref = AgentRef(name, Incarnation(number, bytes(16)))
    return Member(ref, info, DataAddress("127.0.0.1", 1, "", "here"), **more)
