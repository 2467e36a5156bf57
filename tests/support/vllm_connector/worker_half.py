"""A worker half whose weights are known when a test says so."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.agent import Agent
from kvxfer.connectors.common.weights import PENDING
from kvxfer.connectors.vllm.loaded import Loaded
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.worker import WorkerHalf
from kvxfer.types import CompatibilityRecord, Role, WorkerInfo, unknown_fingerprint, why_unknown
from tests.support.vllm_connector.pair import TOKEN

RECORD = CompatibilityRecord("m", "", "", "f32", 1, 1, 16, 4, "page:HNC", "", "", "none")
OPTIONS = ConnectorOptions.from_config("kv_both", "a", {"coordinator": "127.0.0.1:1"})


class Told:
    """Weights of which a test says what is known."""

    def __init__(self) -> None:
        self.why: str | None = PENDING
        self.fingerprint = unknown_fingerprint(PENDING, bytes(16))
        self.listeners: list[Callable[[], None]] = []
        self.is_stopped = False

    def listen(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)

    def become(self, fingerprint: str) -> None:
        self.fingerprint, self.why = fingerprint, why_unknown(fingerprint)
        for listener in self.listeners:
            listener()

    def stop(self) -> None:
        self.is_stopped = True


def new_half(
    weights: Told, loaded: Loaded, *, options: ConnectorOptions = OPTIONS, rank: int = 0, ranks: int = 1
) -> WorkerHalf:
    config = options.agent_config(0) if options.discovery else None
    return WorkerHalf(
        options,
        lambda _: RECORD,
        model="m",
        rank=rank,
        ranks=ranks,
        new_agent=lambda _: Agent(WorkerInfo("a", Role.BOTH, "m", ""), token=TOKEN, config=config),
        weights=weights,  # type: ignore[arg-type]
        loaded=loaded,
    )
